/* What the oracle calls, for cffi in API mode: "..." is filled in, and every layout checked, by the compiler. */

enum ggml_type { GGML_TYPE_F32, GGML_TYPE_COUNT, ... };
enum ggml_log_level { GGML_LOG_LEVEL_NONE, ... };
typedef void (*ggml_log_callback)(enum ggml_log_level level, const char * text, void * user_data);
typedef bool (*ggml_abort_callback)(void * data);

enum ggml_op { GGML_OP_NONE, ... };
struct ggml_tensor {
    enum ggml_type type;
    enum ggml_op op;
    int64_t ne[4];
    size_t nb[4];
    struct ggml_tensor * src[...];
    struct ggml_tensor * view_src;
    void * data;
    char name[...];
    ...;
};
typedef bool (*ggml_backend_sched_eval_callback)(struct ggml_tensor * t, bool ask, void * user_data);

const char * ggml_type_name(enum ggml_type type);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
bool ggml_is_contiguous(const struct ggml_tensor * tensor);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
const char * ggml_version(void);

struct gguf_context;
struct gguf_init_params { bool no_alloc; ...; };
struct gguf_context * gguf_init_from_file(const char * fname, struct gguf_init_params params);
void gguf_free(struct gguf_context * ctx);

struct llama_vocab;
struct llama_model;
struct llama_context;
typedef struct llama_memory_i * llama_memory_t;
typedef int32_t llama_pos;
typedef int32_t llama_token;
typedef int32_t llama_seq_id;

enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED,
                             LLAMA_FLASH_ATTN_TYPE_ENABLED, ... };
enum llama_rope_scaling_type { LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, LLAMA_ROPE_SCALING_TYPE_NONE,
                               LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN,
                               LLAMA_ROPE_SCALING_TYPE_LONGROPE, ... };
enum llama_pooling_type { LLAMA_POOLING_TYPE_UNSPECIFIED, LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN,
                          LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK, ... };
enum llama_attention_type { LLAMA_ATTENTION_TYPE_UNSPECIFIED, LLAMA_ATTENTION_TYPE_CAUSAL,
                            LLAMA_ATTENTION_TYPE_NON_CAUSAL, ... };
enum llama_load_mode { LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP, ... };
enum llama_rope_type { LLAMA_ROPE_TYPE_NONE, LLAMA_ROPE_TYPE_NORM, LLAMA_ROPE_TYPE_NEOX, LLAMA_ROPE_TYPE_MROPE,
                       LLAMA_ROPE_TYPE_IMROPE, LLAMA_ROPE_TYPE_VISION, ... };

struct llama_model_params {
    int32_t n_gpu_layers;
    enum llama_load_mode load_mode;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    ...;
};
struct llama_context_params {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    int32_t n_threads;
    int32_t n_threads_batch;
    enum llama_rope_scaling_type rope_scaling_type;
    enum llama_pooling_type pooling_type;
    enum llama_attention_type attention_type;
    enum llama_flash_attn_type flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    ggml_backend_sched_eval_callback cb_eval;
    void * cb_eval_user_data;
    enum ggml_type type_k;
    enum ggml_type type_v;
    ggml_abort_callback abort_callback;
    void * abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    ...;
};
typedef struct llama_batch {
    int32_t n_tokens;
    llama_token * token;
    float * embd;
    llama_pos * pos;
    int32_t * n_seq_id;
    llama_seq_id ** seq_id;
    int8_t * logits;
} llama_batch;
struct llama_perf_context_data {
    double t_p_eval_ms;
    double t_eval_ms;
    int32_t n_p_eval;
    int32_t n_eval;
    int32_t n_reused;
    ...;
};

struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void llama_backend_init(void);
const char * llama_version(void);
typedef void (*llama_model_set_tensor_data_t)(struct ggml_tensor * tensor, void * userdata);
struct llama_model * llama_model_init_from_user(struct gguf_context * metadata,
        llama_model_set_tensor_data_t set_tensor_data, void * set_tensor_data_ud, struct llama_model_params params);
struct llama_model * llama_model_load_from_file(const char * path_model, struct llama_model_params params);
void llama_model_free(struct llama_model * model);
struct llama_context * llama_init_from_model(struct llama_model * model, struct llama_context_params params);
void llama_free(struct llama_context * ctx);

uint32_t llama_n_ctx(const struct llama_context * ctx);
uint32_t llama_n_ctx_seq(const struct llama_context * ctx);
uint32_t llama_n_batch(const struct llama_context * ctx);
uint32_t llama_n_ubatch(const struct llama_context * ctx);
uint32_t llama_n_seq_max(const struct llama_context * ctx);
llama_memory_t llama_get_memory(const struct llama_context * ctx);
enum llama_pooling_type llama_pooling_type(const struct llama_context * ctx);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
llama_token llama_vocab_bos(const struct llama_vocab * vocab);
llama_token llama_vocab_eos(const struct llama_vocab * vocab);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len, llama_token * tokens,
        int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_detokenize(const struct llama_vocab * vocab, const llama_token * tokens, int32_t n_tokens, char * text,
        int32_t text_len_max, bool remove_special, bool unparse_special);
enum llama_rope_type llama_model_rope_type(const struct llama_model * model);
int32_t llama_model_n_ctx_train(const struct llama_model * model);
int32_t llama_model_n_embd(const struct llama_model * model);
int32_t llama_model_n_embd_inp(const struct llama_model * model);
int32_t llama_model_n_embd_out(const struct llama_model * model);
int32_t llama_model_n_layer(const struct llama_model * model);
int32_t llama_model_n_head(const struct llama_model * model);
int32_t llama_model_n_head_kv(const struct llama_model * model);
int32_t llama_model_n_swa(const struct llama_model * model);
uint32_t llama_model_n_cls_out(const struct llama_model * model);
uint64_t llama_model_size(const struct llama_model * model);
uint64_t llama_model_n_params(const struct llama_model * model);
int32_t llama_model_desc(const struct llama_model * model, char * buf, size_t buf_size);
int32_t llama_model_meta_val_str(const struct llama_model * model, const char * key, char * buf, size_t buf_size);
bool llama_model_has_encoder(const struct llama_model * model);
bool llama_model_has_decoder(const struct llama_model * model);
llama_token llama_model_decoder_start_token(const struct llama_model * model);
bool llama_model_is_recurrent(const struct llama_model * model);
bool llama_model_is_hybrid(const struct llama_model * model);

void llama_memory_clear(llama_memory_t mem, bool data);
bool llama_memory_seq_rm(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(llama_memory_t mem, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
void llama_memory_seq_keep(llama_memory_t mem, llama_seq_id seq_id);
void llama_memory_seq_add(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
void llama_memory_seq_div(llama_memory_t mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d);
llama_pos llama_memory_seq_pos_min(llama_memory_t mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(llama_memory_t mem, llama_seq_id seq_id);
bool llama_memory_can_shift(llama_memory_t mem);

size_t llama_state_get_size(struct llama_context * ctx);
size_t llama_state_get_data(struct llama_context * ctx, uint8_t * dst, size_t size);
size_t llama_state_set_data(struct llama_context * ctx, const uint8_t * src, size_t size);
bool llama_state_load_file(struct llama_context * ctx, const char * path, llama_token * tokens_out, size_t capacity,
        size_t * count_out);
bool llama_state_save_file(struct llama_context * ctx, const char * path, const llama_token * tokens, size_t count);
size_t llama_state_seq_save_file(struct llama_context * ctx, const char * path, llama_seq_id seq_id,
        const llama_token * tokens, size_t count);
size_t llama_state_seq_load_file(struct llama_context * ctx, const char * path, llama_seq_id dest_seq_id,
        llama_token * tokens_out, size_t capacity, size_t * count_out);
#define LLAMA_STATE_SEQ_FLAGS_NONE ...
#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY ...
#define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE ...
size_t llama_state_seq_get_size_ext(struct llama_context * ctx, llama_seq_id seq_id, uint32_t flags);
size_t llama_state_seq_get_data_ext(struct llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
        uint32_t flags);
size_t llama_state_seq_set_data_ext(struct llama_context * ctx, const uint8_t * src, size_t size,
        llama_seq_id dest_seq_id, uint32_t flags);

int32_t llama_encode(struct llama_context * ctx, struct llama_batch batch);
int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);
void llama_set_n_threads(struct llama_context * ctx, int32_t n_threads, int32_t n_threads_batch);
void llama_set_embeddings(struct llama_context * ctx, bool embeddings);
void llama_set_causal_attn(struct llama_context * ctx, bool causal_attn);
void llama_synchronize(struct llama_context * ctx);
float * llama_get_logits(struct llama_context * ctx);
float * llama_get_embeddings(struct llama_context * ctx);
float * llama_get_embeddings_seq(struct llama_context * ctx, llama_seq_id seq_id);
struct llama_perf_context_data llama_perf_context(const struct llama_context * ctx);
void llama_perf_context_reset(struct llama_context * ctx);

struct oracle_part_info {
    const char * kind;
    uint32_t n_cells;
    uint32_t n_stream;
    uint32_t n_swa;
    int swa_type;
    bool v_trans;
    bool attn_rot_k;
    bool attn_rot_v;
    int n_layers;
    uint32_t head;
    uint32_t used;
    uint32_t n_rs_seq;
};
struct oracle_cells {
    int32_t * pos;
    int32_t * shift;
    int32_t * x;
    int32_t * y;
    uint64_t * seq;
};
struct oracle_times {
    double slot_us;
    double mask_us;
    int64_t n_kv;
};
int oracle_n_parts(const struct llama_context * ctx);
int oracle_seq_words(void);
void oracle_part(const struct llama_context * ctx, int index, struct oracle_part_info * out);
uint32_t oracle_kv_head(const struct llama_context * ctx, int index, int stream);
void oracle_kv_cells(const struct llama_context * ctx, int index, int stream, struct oracle_cells * out);
void oracle_recurrent_cells(const struct llama_context * ctx, int index, struct oracle_cells * out);
int oracle_layer(const struct llama_context * ctx, int index, int slot, struct ggml_tensor ** k, struct ggml_tensor ** v);
void oracle_time_step(struct llama_context * ctx, int n_tokens, int reps, bool f16, struct oracle_times * out);
bool oracle_memory_update(struct llama_context * ctx);
void oracle_log_set(ggml_log_callback callback, void * user_data, bool keep_ggml);

extern "Python" void oracle_on_log(enum ggml_log_level level, const char * text, void * user_data);
extern "Python" bool oracle_on_eval(struct ggml_tensor * t, bool ask, void * user_data);
extern "Python" void oracle_on_tensor(struct ggml_tensor * tensor, void * user_data);
