/* Calls from C into Python. Nothing here is upstream's: each name stands for one callback type of ggml. */

/* ggml_log_callback. Give ggml pyggmlkv_log_gate; it drops what is below the threshold without taking the GIL. */
extern "Python" void pyggmlkv_log(enum ggml_log_level level, const char *text, void *user_data);
void pyggmlkv_log_gate(enum ggml_log_level level, const char *text, void *user_data);
extern int pyggmlkv_log_threshold;

/* ggml_abort_callback. Give ggml pyggmlkv_abort_gate with a state: it reads `stop` every time, and asks Python
 * (with `user_data`) only once in `interval_us`. */
struct pyggmlkv_abort_state {
    int32_t stop;
    int64_t interval_us;
    int64_t next_us;
    void *user_data;
};
extern "Python" bool pyggmlkv_abort(void *user_data);
bool pyggmlkv_abort_gate(void *state);

/* ggml_abort_callback_t: the last words before the process dies. */
extern "Python" void pyggmlkv_fatal(const char *error_message);

/* ggml_backend_sched_eval_callback and ggml_backend_eval_callback */
extern "Python" bool pyggmlkv_eval(struct ggml_tensor *t, bool ask, void *user_data);
extern "Python" bool pyggmlkv_compare(int node_index, struct ggml_tensor *t1, struct ggml_tensor *t2,
        void *user_data);

/* ggml_backend_meta_get_split_state_t */
extern "Python" struct ggml_backend_meta_split_state pyggmlkv_split_state(const struct ggml_tensor *tensor,
        void *userdata);

/* gguf_reader_callback_t */
extern "Python" size_t pyggmlkv_gguf_read(void *userdata, void *output, uint64_t offset, size_t len);

/* ggml_custom1_op_t, ggml_custom2_op_t, ggml_custom3_op_t, ggml_custom_op_t */
extern "Python" void pyggmlkv_custom1(struct ggml_tensor *dst, const struct ggml_tensor *a, int ith, int nth,
        void *userdata);
extern "Python" void pyggmlkv_custom2(struct ggml_tensor *dst, const struct ggml_tensor *a,
        const struct ggml_tensor *b, int ith, int nth, void *userdata);
extern "Python" void pyggmlkv_custom3(struct ggml_tensor *dst, const struct ggml_tensor *a,
        const struct ggml_tensor *b, const struct ggml_tensor *c, int ith, int nth, void *userdata);
extern "Python" void pyggmlkv_custom(struct ggml_tensor *dst, int ith, int nth, void *userdata);

/* ggml_opt_get_optimizer_params; ggml_opt_epoch_callback carries no user data, hence one for each phase */
extern "Python" struct ggml_opt_optimizer_params pyggmlkv_opt_params(void *userdata);
extern "Python" void pyggmlkv_opt_train(bool train, ggml_opt_context_t opt_ctx, ggml_opt_dataset_t dataset,
        ggml_opt_result_t result, int64_t ibatch, int64_t ibatch_max, int64_t t_start_us);
extern "Python" void pyggmlkv_opt_eval(bool train, ggml_opt_context_t opt_ctx, ggml_opt_dataset_t dataset,
        ggml_opt_result_t result, int64_t ibatch, int64_t ibatch_max, int64_t t_start_us);
