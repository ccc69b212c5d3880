// Looks inside the reference libllama: cells, heads, storage tensors, pending updates. Compiled against its private
// headers by scripts/build_reference.py, test-only. It reads, and times; the one thing it triggers is a memory update.
// Upstream: llama-kv-cache.h, llama-memory-recurrent.h, llama-context.h.

#include <algorithm>
#include <array>
#include <bitset>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#define private public
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#undef private

#include "shim.h"

namespace {

struct part {
    const char * kind;
    const llama_kv_cache * kv;
    const llama_memory_recurrent * recurrent;
};

void append_iswa(std::vector<part> & out, const llama_kv_cache_iswa * iswa) {
    out.push_back({ "kv_base", iswa->get_base(), nullptr });
    out.push_back({ "kv_swa", iswa->get_swa(), nullptr });
}

std::vector<part> parts_of(const llama_context * ctx) {
    std::vector<part> out;
    const llama_memory_i * mem = ctx->get_memory();
    if (const auto * kv = dynamic_cast<const llama_kv_cache *>(mem)) {
        out.push_back({ "kv", kv, nullptr });
    } else if (const auto * iswa = dynamic_cast<const llama_kv_cache_iswa *>(mem)) {
        append_iswa(out, iswa);
    } else if (const auto * recurrent = dynamic_cast<const llama_memory_recurrent *>(mem)) {
        out.push_back({ "recurrent", nullptr, recurrent });
    } else if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(mem)) {
        out.push_back({ "kv", hybrid->get_mem_attn(), nullptr });
        out.push_back({ "recurrent", nullptr, hybrid->get_mem_recr() });
    } else if (const auto * hybrid_iswa = dynamic_cast<const llama_memory_hybrid_iswa *>(mem)) {
        append_iswa(out, hybrid_iswa->get_mem_attn());
        out.push_back({ "recurrent", nullptr, hybrid_iswa->get_mem_recr() });
    }
    return out;
}

constexpr int seq_words = (LLAMA_MAX_SEQ + 63)/64;

}  // namespace

int oracle_n_parts(const llama_context * ctx) {
    return (int) parts_of(ctx).size();
}

int oracle_seq_words(void) {
    return seq_words;
}

void oracle_part(const llama_context * ctx, int index, struct oracle_part_info * out) {
    const part p = parts_of(ctx).at(index);
    memset(out, 0, sizeof(*out));
    out->kind = p.kind;
    if (p.kv) {
        out->n_cells    = p.kv->get_size();
        out->n_stream   = p.kv->get_n_stream();
        out->n_swa      = p.kv->n_swa;
        out->swa_type   = (int) p.kv->swa_type;
        out->v_trans    = p.kv->v_trans;
        out->attn_rot_k = p.kv->attn_rot_k;
        out->attn_rot_v = p.kv->attn_rot_v;
        out->n_layers   = (int) p.kv->layers.size();
    } else {
        out->n_cells  = p.recurrent->size;
        out->n_stream = 1;
        out->n_layers = (int) p.recurrent->r_l.size();
        out->head     = p.recurrent->head;
        out->used     = p.recurrent->used;
        out->n_rs_seq = p.recurrent->n_rs_seq;
    }
}

uint32_t oracle_kv_head(const llama_context * ctx, int index, int stream) {
    return parts_of(ctx).at(index).kv->v_heads.at(stream);
}

void oracle_kv_cells(const llama_context * ctx, int index, int stream, struct oracle_cells * out) {
    const llama_kv_cells & cells = parts_of(ctx).at(index).kv->v_cells.at(stream);
    for (uint32_t i = 0; i < cells.size(); ++i) {
        out->pos[i]   = cells.pos[i];
        out->shift[i] = cells.shift[i];
        out->x[i]     = cells.ext[i].x;
        out->y[i]     = cells.ext[i].y;
        for (int s = 0; s < LLAMA_MAX_SEQ; ++s) {
            if (cells.seq[i].test(s)) {
                out->seq[i*seq_words + s/64] |= uint64_t(1) << (s%64);
            }
        }
    }
}

void oracle_recurrent_cells(const llama_context * ctx, int index, struct oracle_cells * out) {
    const llama_memory_recurrent * mem = parts_of(ctx).at(index).recurrent;
    for (uint32_t i = 0; i < mem->size; ++i) {
        const auto & cell = mem->cells[i];
        out->pos[i]   = cell.pos;
        out->shift[i] = cell.src0;
        out->x[i]     = cell.src;
        out->y[i]     = cell.tail;
        for (llama_seq_id s : cell.seq_id) {
            out->seq[i*seq_words + s/64] |= uint64_t(1) << (s%64);
        }
    }
}

int oracle_layer(const llama_context * ctx, int index, int slot, struct ggml_tensor ** k, struct ggml_tensor ** v) {
    const part p = parts_of(ctx).at(index);
    if (p.kv) {
        const auto & layer = p.kv->layers.at(slot);
        *k = layer.k;
        *v = layer.v;
        return (int) layer.il;
    }
    *k = p.recurrent->r_l.at(slot);
    *v = p.recurrent->s_l.at(slot);
    return slot;
}

void oracle_time_step(llama_context * ctx, int n_tokens, int reps, bool f16, struct oracle_times * out) {
    llama_kv_cache * kv = const_cast<llama_kv_cache *>(parts_of(ctx).at(0).kv);
    const auto & model = ctx->get_model();

    std::vector<llama_token> tokens(n_tokens, 1);
    llama_batch_allocr balloc(1);
    if (!balloc.init(llama_batch_get_one(tokens.data(), n_tokens), model.vocab, kv, model.hparams.n_embd, LLAMA_MAX_SEQ, false)) {
        return;
    }
    balloc.split_reset();
    const llama_ubatch ubatch = balloc.split_simple(n_tokens);
    const int64_t n_kv = kv->get_n_kv(kv->find_slot(ubatch, false));

    ggml_init_params params = { size_t(n_kv)*n_tokens*4 + 2*ggml_tensor_overhead() + 256, nullptr, true };
    ggml_context * gctx = ggml_init(params);
    ggml_tensor * mask = ggml_new_tensor_4d(gctx, f16 ? GGML_TYPE_F16 : GGML_TYPE_F32, n_kv, n_tokens, 1, 1);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(gctx, ggml_backend_cpu_buffer_type());

    std::vector<int64_t> slot, fill;
    for (int i = 0; i < reps; ++i) {
        const int64_t t0 = ggml_time_us();
        volatile bool found = !kv->find_slot(ubatch, false).empty();
        (void) found;
        const int64_t t1 = ggml_time_us();
        kv->set_input_kq_mask(mask, &ubatch, true);
        slot.push_back(t1 - t0);
        fill.push_back(ggml_time_us() - t1);
    }
    std::sort(slot.begin(), slot.end());
    std::sort(fill.begin(), fill.end());
    out->slot_us = slot.at(reps/2);
    out->mask_us = fill.at(reps/2);
    out->n_kv    = n_kv;

    ggml_backend_buffer_free(buffer);
    ggml_free(gctx);
}

bool oracle_memory_update(llama_context * ctx) {
    return ctx->memory_update(false);
}

void oracle_log_set(ggml_log_callback callback, void * user_data, bool keep_ggml) {
    ggml_log_callback ggml_callback = nullptr;
    void * ggml_user_data = nullptr;
    ggml_log_get(&ggml_callback, &ggml_user_data);
    llama_log_set(callback, user_data);
    if (keep_ggml) {
        ggml_log_set(ggml_callback, ggml_user_data);
    }
}
