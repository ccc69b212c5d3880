/* Declarations of ggml-blas.h, kept equal to upstream by scripts/check_cdef.py. */

ggml_backend_t ggml_backend_blas_init(void);
bool ggml_backend_is_blas(ggml_backend_t backend);
void ggml_backend_blas_set_n_threads(ggml_backend_t backend_blas, int n_threads);
ggml_backend_reg_t ggml_backend_blas_reg(void);
