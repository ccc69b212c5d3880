/* Declarations of ggml-cuda.h, kept equal to upstream by scripts/check_cdef.py. */

static char *const GGML_CUDA_NAME;
static char *const GGML_CUBLAS_NAME;

#define GGML_CUDA_MAX_DEVICES ...

ggml_backend_t ggml_backend_cuda_init(int device);
bool ggml_backend_is_cuda(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int device);
bool ggml_backend_cuda_allreduce_tensor(ggml_backend_t *backends, struct ggml_tensor **tensors,
        size_t n_backends);
ggml_backend_buffer_type_t ggml_backend_cuda_host_buffer_type(void);
int ggml_backend_cuda_get_device_count(void);
void ggml_backend_cuda_get_device_description(int device, char *description, size_t description_size);
void ggml_backend_cuda_get_device_memory(int device, size_t *free, size_t *total);
bool ggml_backend_cuda_register_host_buffer(void *buffer, size_t size);
void ggml_backend_cuda_unregister_host_buffer(void *buffer);
ggml_backend_reg_t ggml_backend_cuda_reg(void);
