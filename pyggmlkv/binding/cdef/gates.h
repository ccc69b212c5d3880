/* C side of callbacks.h, compiled into the extension. Knows ggml's callback types and nothing of Python objects.
 * A gate answers without the GIL whenever it can: backends log, and ggml asks whether to stop, once a graph node. */

#if defined(_MSC_VER)
#define PYGGMLKV_THREAD_LOCAL __declspec(thread)
#else
#define PYGGMLKV_THREAD_LOCAL _Thread_local
#endif

static void pyggmlkv_log(enum ggml_log_level level, const char *text, void *user_data);
static bool pyggmlkv_abort(void *user_data);

/* Levels below this are dropped; above GGML_LOG_LEVEL_ERROR means silent, as it must be once Python is going away. */
static int pyggmlkv_log_threshold = GGML_LOG_LEVEL_WARN;

static void pyggmlkv_log_gate(enum ggml_log_level level, const char *text, void *user_data) {
    static PYGGMLKV_THREAD_LOCAL int last_level = GGML_LOG_LEVEL_NONE;
    if (level != GGML_LOG_LEVEL_CONT) {
        last_level = (int) level;
    }
    if (last_level < pyggmlkv_log_threshold) {
        return;
    }
    pyggmlkv_log(level, text, user_data);
}

struct pyggmlkv_abort_state {
    volatile int32_t stop;
    int64_t interval_us;
    int64_t next_us;
    void *user_data;
};

static bool pyggmlkv_abort_gate(void *state) {
    struct pyggmlkv_abort_state *gate = (struct pyggmlkv_abort_state *) state;
    int64_t now_us;
    if (gate->stop) {
        return true;
    }
    now_us = ggml_time_us();
    if (now_us < gate->next_us) {
        return false;
    }
    gate->next_us = now_us + gate->interval_us;
    if (pyggmlkv_abort(gate->user_data)) {
        gate->stop = 1;
    }
    return gate->stop != 0;
}
