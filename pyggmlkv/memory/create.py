"""From hyperparameters to a memory: which kind a model needs, and its settings.

The one module here that knows hyperparameters.  Upstream: llama_model::create_memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from pyggmlkv.cparams import CParams
from pyggmlkv.gguf.hparams import HParams
from pyggmlkv.memory.config import KVSpec, LayerSpec, RopeSpec
from pyggmlkv.memory.hybrid import HybridMemory
from pyggmlkv.memory.kv import KVCache
from pyggmlkv.memory.recurrent.memory import RecurrentMemory, RecurrentSpec
from pyggmlkv.memory.site import Site
from pyggmlkv.memory.sliding import SlidingKVCache


def rope_spec(hp: HParams, cp: CParams) -> RopeSpec:
    """RoPE as the context settled it."""
    return RopeSpec(
        mode=hp.rope_type,
        n_ctx_orig=cp.n_ctx_orig_yarn,
        freq_base=cp.rope_freq_base,
        freq_scale=cp.rope_freq_scale,
        ext_factor=cp.yarn_ext_factor,
        attn_factor=cp.yarn_attn_factor,
        beta_fast=cp.yarn_beta_fast,
        beta_slow=cp.yarn_beta_slow,
    )


def layer_spec(hp: HParams, il: int) -> LayerSpec:
    """Layer `il` as the cache stores it; MLA stores the latent row and its rotary slice as K, and no V."""
    swa = hp.is_swa(il)
    n_rot = hp.n_rot(il) if hp.has_rope(il) and hp.rope_type is not None else 0
    return LayerSpec(
        il=il,
        n_head_kv=hp.n_head_kv(il),
        head_dim_k=hp.n_embd_head_k(il),
        head_dim_v=hp.n_embd_head_v(il),
        n_rot=n_rot,
        n_embd_nope=hp.n_embd_head_k(il) - hp.n_rot(il) if hp.n_lora_kv > 0 else 0,
        freq_base=hp.rope_freq_base_train_swa if swa else None,
        freq_scale=hp.rope_freq_scale_train_swa if swa else None,
        has_v=not hp.is_mla,
    )


def kv_spec(hp: HParams, cp: CParams, layers: Callable[[int], bool] = lambda il: True) -> KVSpec:
    """A cache of `n_ctx_seq` cells a stream for the layers chosen."""
    chosen = tuple(layer_spec(hp, il) for il in range(hp.n_layer_all) if hp.has_kv(il) and layers(il))
    return KVSpec(
        layers=chosen,
        kv_size=cp.n_ctx_seq,
        type_k=cp.type_k,
        type_v=cp.type_v,
        v_trans=not cp.flash_attn,
        n_seq_max=cp.n_seq_max,
        unified=cp.kv_unified,
        rope=rope_spec(hp, cp),
        n_pos_per_embd=hp.n_pos_per_embd,
        use_alibi=hp.use_alibi,
        n_rel_attn_bkts=hp.n_rel_attn_bkts,
        attn_rot=cp.attn_rot,
        shift=cp.shift,
        reuse=reused_layers(hp, layers),
    )


def reused_layers(hp: HParams, layers: Callable[[int], bool] = lambda il: True) -> dict[int, int]:
    """Layers without K and V of their own, and the last layer of the same kind that has them.

    Upstream: llama_model::create_memory, layer_reuse_cb of gemma3n and gemma4.
    """
    n = hp.n_layer_kv_from_start
    if n is None:
        return {}
    return {il: n - (2 if hp.is_swa(il) else 1) for il in range(n, hp.n_layer_all) if layers(il)}


MemoryKind: TypeAlias = Literal["attention", "recurrent", "hybrid", "none"]
MemoryObject: TypeAlias = KVCache | SlidingKVCache | RecurrentMemory | HybridMemory


def create_memory(kind: MemoryKind, hp: HParams, cp: CParams, site: Site) -> MemoryObject | None:
    """The memory that a model of these hyperparameters decodes into, None if it has none."""
    if kind == "none":
        return None
    if kind == "recurrent":
        return RecurrentMemory(recurrent_spec(hp, cp, range(hp.n_layer)), site)
    if kind == "attention":
        return _attention(kv_spec(hp, cp), hp, cp, site)
    spec = kv_spec(hp, cp, lambda il: not hp.is_recr(il))
    if hp.swa_type != "none" and spec.attn_rot is None:
        spec = dataclasses.replace(
            spec, attn_rot=False
        )  # upstream does not rotate beside recurrent layers and a window
    attn = _attention(spec, hp, cp, site)
    try:
        layers = [il for il in range(hp.n_layer) if hp.is_recr(il)]
        return HybridMemory(attn, RecurrentMemory(recurrent_spec(hp, cp, layers), site))
    except BaseException:
        attn.close()
        raise


def recurrent_spec(hp: HParams, cp: CParams, layers: Iterable[int]) -> RecurrentSpec:
    """One state cell a sequence, for the layers given."""
    n = max(1, cp.n_seq_max)
    return RecurrentSpec(
        tuple(layers), hp.n_embd_r(), hp.n_embd_s(), n_seq_max=n, size=n, n_rs_seq=cp.n_rs_seq
    )


def _attention(spec: KVSpec, hp: HParams, cp: CParams, site: Site) -> KVCache | SlidingKVCache:
    if hp.swa_type == "none":
        return KVCache(spec, site)
    spec = dataclasses.replace(spec, n_swa=hp.n_swa, swa_type=hp.swa_type, forget=cp.swa_forget)
    return SlidingKVCache(spec, site, is_swa=hp.is_swa, n_ubatch=cp.n_ubatch, swa_full=cp.swa_full)
