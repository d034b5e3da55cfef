// Launches of kernels, which may get their place on the GPU while the one before them ends.
#ifndef EEP_CUDA_LAUNCH_H_
#define EEP_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace eep {

// `early`: programmatic dependent launch. The launch itself then takes no time of its own: the kernel gets its place as
// soon as all blocks of the kernel before it have ended, or said that it may, and waits there by await_kernel_before().
// It reads and writes nothing that others do before that wait is over, so that no kernel before it need know.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads, cudaStream_t stream, bool early,
                   const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace eep

#endif  // EEP_CUDA_LAUNCH_H_
