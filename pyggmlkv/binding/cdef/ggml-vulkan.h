/* Declarations of ggml-vulkan.h, kept equal to upstream by scripts/check_cdef.py. */

static char *const GGML_VK_NAME;

#define GGML_VK_MAX_DEVICES ...

ggml_backend_t ggml_backend_vk_init(size_t dev_num);
bool ggml_backend_is_vk(ggml_backend_t backend);
int ggml_backend_vk_get_device_count(void);
void ggml_backend_vk_get_device_description(int device, char *description, size_t description_size);
void ggml_backend_vk_get_device_memory(int device, size_t *free, size_t *total);
ggml_backend_buffer_type_t ggml_backend_vk_buffer_type(size_t dev_num);
ggml_backend_buffer_type_t ggml_backend_vk_host_buffer_type(void);
ggml_backend_reg_t ggml_backend_vk_reg(void);
