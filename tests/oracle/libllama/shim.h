// C face of shim.cpp, for the generated cffi module.
#pragma once

#include "ggml.h"
#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct oracle_part_info {
    const char * kind;  // kv, kv_base, kv_swa or recurrent
    uint32_t n_cells;
    uint32_t n_stream;
    uint32_t n_swa;
    int      swa_type;
    bool     v_trans;
    bool     attn_rot_k;
    bool     attn_rot_v;
    int      n_layers;
    uint32_t head;      // recurrent only; a KV cache has one head a stream
    uint32_t used;      // recurrent only
    uint32_t n_rs_seq;  // recurrent only
};

// arrays of n_cells; seq has n_cells*oracle_seq_words() words and starts zeroed.
// For a recurrent part: shift is src0, x is src, y is tail.
struct oracle_cells {
    int32_t  * pos;
    int32_t  * shift;
    int32_t  * x;
    int32_t  * y;
    uint64_t * seq;
};

// medians, microseconds; n_kv is the width of the mask
struct oracle_times {
    double  slot_us;
    double  mask_us;
    int64_t n_kv;
};

int      oracle_n_parts(const struct llama_context * ctx);
int      oracle_seq_words(void);
void     oracle_part(const struct llama_context * ctx, int index, struct oracle_part_info * out);
uint32_t oracle_kv_head(const struct llama_context * ctx, int index, int stream);
void     oracle_kv_cells(const struct llama_context * ctx, int index, int stream, struct oracle_cells * out);
void     oracle_recurrent_cells(const struct llama_context * ctx, int index, struct oracle_cells * out);
int      oracle_layer(const struct llama_context * ctx, int index, int slot, struct ggml_tensor ** k, struct ggml_tensor ** v);
// slot search and mask of the next n_tokens of sequence 0, reps times; places nothing
void     oracle_time_step(struct llama_context * ctx, int n_tokens, int reps, bool f16, struct oracle_times * out);
bool     oracle_memory_update(struct llama_context * ctx);
// libllama's log; ggml's as well unless keep_ggml (llama_log_set alone would always take both)
void     oracle_log_set(ggml_log_callback callback, void * user_data, bool keep_ggml);

#ifdef __cplusplus
}
#endif
