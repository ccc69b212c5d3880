"""`TensorLoader`: an architecture names its weights one by one, then all of them are loaded at once.

Checks presence and shape, chooses each weight's buffer type, maps or copies the data. Knows no architecture.
Upstream: llama-model-loader.cpp, create_tensor, done_getting_tensors; llama-model.cpp, load_tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias, overload

from pyggmlkv.backend.placement import BufferTypeList, LayerPlacement
from pyggmlkv.binding.arena import TensorArena
from pyggmlkv.binding.buffer import BufferType
from pyggmlkv.binding.device import Device, cpu_device
from pyggmlkv.binding.tensor import Tensor
from pyggmlkv.errors import ClosedError, GGUFTensorError
from pyggmlkv.logs import logger

from .buffer_choice import BufferChoice
from .hparams import HParams
from .reader import GGUFReader, Weight
from .tensor_ops import split_name, tensor_use
from .weight_data import Placed, WeightData, load_data

Progress: TypeAlias = Callable[[float], bool | None]
"""Gets the loaded fraction, 0 to 1; False (or an exception) stops the load."""

SCALED: Final = frozenset(
    ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ffn_gate", "ffn_down", "ffn_up",
     "ffn_gate_shexp", "ffn_down_shexp", "ffn_up_shexp", "ssm_in", "ssm_out", "ssm_alpha", "ssm_beta",
     "nextn.eh_proj", "nextn.shared_head_head")
)  # fmt: skip
"""Layer weights that may have a factor beside them, `.scale` and `.input_scale`, of one element."""
SCALED_EXPERTS: Final = frozenset(("ffn_gate_exps", "ffn_down_exps", "ffn_up_exps"))
"""The same, with one factor an expert."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. `use_mmap` leaves weights in the file's mapping where the device can read them there;
    `check_tensors` refuses data with NaN, infinity or invalid blocks (reads everything once more)."""

    use_mmap: bool = True
    check_tensors: bool = False


class TensorLoader:
    """Collects the weights of one model; `load` fills them.

    A context manager: leaving it before `load` returned releases everything.
    """

    def __init__(
        self,
        reader: GGUFReader,
        hparams: HParams,
        placement: LayerPlacement,
        options: LoadOptions = LoadOptions(),
    ) -> None:
        self.reader = reader
        self.hparams = hparams
        self.placement = placement
        self.options = options
        self._choice = BufferChoice(hparams)
        self._arenas: dict[BufferType, Placed] = {}
        self._created: dict[tuple[BufferType, str], Tensor] = {}
        self._named: dict[str, Tensor] = {}
        self._skipped: set[str] = set()
        self._done = False

    @overload
    def tensor(
        self,
        name: str,
        *ne: int,
        il: int | None = None,
        required: Literal[True] = True,
        duplicated: bool = False,
        role: str | None = None,
    ) -> Tensor: ...
    @overload
    def tensor(
        self,
        name: str,
        *ne: int,
        il: int | None = None,
        required: bool,
        duplicated: bool = False,
        role: str | None = None,
    ) -> Tensor | None: ...
    def tensor(
        self,
        name: str,
        *ne: int,
        il: int | None = None,
        required: bool = True,
        duplicated: bool = False,
        role: str | None = None,
    ) -> Tensor | None:
        """The weight `name` of shape `ne` (ggml order); None if it is not there and not `required`.

        `il` places a weight that has no layer in its name (`rope_freqs.weight`) with that layer. `duplicated`
        takes a weight that already has a use for a second one: `token_embd.weight` as the output matrix.
        `role` is a key of `tensor_ops.ROLES`, for names that do not tell their use.
        Raises: GGUFTensorError if it is missing, has another shape, or no buffer type can hold it.
        """
        weight = self._find(name, required)
        if weight is None:
            return None
        expected = (*ne, *(1,) * (4 - len(ne)))
        if weight.info.ne != expected:
            raise GGUFTensorError(
                f"tensor '{name}' has shape {_shape(weight.info.ne)}, expected {_shape(expected)}",
                tensor=name,
                expected=expected,
                found=weight.info.ne,
            )
        return self._create(name, weight, weight.info.ne, _Use(il, duplicated, role))

    def tensor_reshaped(self, name: str, *ne: int, required: bool = True) -> Tensor | None:
        """Like `tensor`, but only the number of elements must agree. Upstream: TENSOR_ALLOW_RESHAPE."""
        weight = self._find(name, required)
        if weight is None:
            return None
        a, b, c, d = (*ne, *(1,) * (4 - len(ne)))
        if weight.info.n_elements != a * b * c * d:
            raise GGUFTensorError(
                f"tensor '{name}' has {weight.info.n_elements} elements in {_shape(weight.info.ne)}, "
                f"expected {a * b * c * d} in {_shape((a, b, c, d))}",
                tensor=name,
                expected=(a, b, c, d),
                found=weight.info.ne,
            )
        return self._create(name, weight, (a, b, c, d), _Use(None, False, None))

    def skip(self, name: str) -> None:
        """Say that a weight may be in the file and is not wanted."""
        if name in self.reader.weights and name not in self._skipped:
            self._skipped.add(name)
            logger.debug("tensor %s (%d bytes) is not used", name, self.reader.weights[name].info.nbytes)

    def has(self, name: str) -> bool:
        """Whether the file has this weight."""
        return name in self.reader.weights

    def scales(self) -> Mapping[str, Tensor]:
        """The factors that lie beside the weights created so far (`blk.0.attn_q.scale`, ...), by name.

        Call it once, after all others. Upstream: the generic pass at the end of load_tensors.
        """
        found: dict[str, Tensor] = {}
        for name in list(self._named):
            parts = split_name(name)
            experts = parts.stem in SCALED_EXPERTS
            if parts.suffix != "weight" or not (experts or parts.stem in SCALED or parts.stem == "output"):
                continue
            if parts.stem == "output" and self._named[name].dtype != "nvfp4":
                continue
            for suffix in ("scale", "input_scale"):
                scale = name.removesuffix("weight") + suffix
                n = self.hparams.n_expert if experts else 1
                if scale not in self._named and (t := self.tensor(scale, n, required=False)) is not None:
                    found[scale] = t
        return found

    def load(self, progress: Progress | None = None) -> WeightData:
        """Fill every weight; the loader is done then, and what it returns owns the memory.

        Raises: GGUFTensorError naming weights of the file that nobody asked for, or invalid data;
        LoadCancelledError if `progress` returned False; DeviceMemoryError. All memory is released then.
        """
        if self._done:
            raise ClosedError("this TensorLoader has loaded its weights, or was closed")
        self._done = True
        placed = sorted(self._arenas.values(), key=lambda p: p.buffer_type.name)
        try:
            self._refuse_unused()
            return load_data(self.reader, placed, self._named, self.options, progress)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Give up before `load`."""
        if not self._done:
            self._done = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _release(self) -> None:
        for placed in self._arenas.values():
            placed.arena.close()

    def _find(self, name: str, required: bool) -> Weight | None:
        if self._done:
            raise ClosedError("this TensorLoader has loaded its weights, or was closed")
        weight = self.reader.weights.get(name)
        if weight is None and required:
            raise GGUFTensorError(f"tensor '{name}' is missing", tensor=name)
        return weight

    def _create(self, name: str, weight: Weight, ne: tuple[int, int, int, int], use: _Use) -> Tensor | None:
        parts = split_name(name)
        role = "output" if use.duplicated and parts.stem == "token_embd" else use.role
        meant = tensor_use(name, role, routed_adapters=self.hparams.router_layer is not None)
        if meant.op == "none":
            self.skip(name)
            return None
        bufts = self._bufts(meant.layer, parts.il if parts.il is not None else use.il or 0)
        device, buffer_type = self._settle(*self._choice.choose(name, weight.info.dtype, ne, meant.op, bufts))
        known = self._created.get((buffer_type, name))
        if known is not None:
            if use.duplicated or use.il:
                return known
            raise GGUFTensorError(f"tensor '{name}' was asked for twice", tensor=name)
        if buffer_type not in self._arenas:
            arena = TensorArena(len(self.reader.weights) + 1 + 2 * self.hparams.n_layer_all)
            self._arenas[buffer_type] = Placed(device, buffer_type, arena)
        tensor = self._arenas[buffer_type].arena.new_tensor(weight.info.dtype, *ne, name=name)
        self._created[buffer_type, name] = tensor
        self._named.setdefault(name, tensor)
        return tensor

    def _bufts(self, layer: str, il: int) -> BufferTypeList:
        if layer == "input":
            return self.placement.input_bufts
        return self.placement.output_bufts if layer == "output" else self.placement.layer_bufts(il)

    def _settle(self, device: Device, buffer_type: BufferType) -> tuple[Device, BufferType]:
        """Host memory of a device gains nothing over the mapping of the file."""
        if self.options.use_mmap and buffer_type == device.host_buffer_type:
            cpu = cpu_device()
            return cpu, cpu.buffer_type
        return device, buffer_type

    def _refuse_unused(self) -> None:
        unused = [n for n in self.reader.weights if n not in self._named and n not in self._skipped]
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise GGUFTensorError(
                f"the file has {len(unused)} tensors that architecture '{self.hparams.arch}' does not use: "
                f"{', '.join(unused[:5])}{more}",
                unused=unused,
            )


@dataclass(frozen=True, slots=True)
class _Use:
    il: int | None
    duplicated: bool
    role: str | None


def _shape(ne: tuple[int, ...]) -> str:
    n = max((i + 1 for i, d in enumerate(ne) if d != 1), default=1)
    return str(list(ne[:n]))
