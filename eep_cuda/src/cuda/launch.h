// Launches of kernels, which may begin while the one before them ends.
#ifndef EEP_CUDA_LAUNCH_H_
#define EEP_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace eep {

// `early`: the kernel before it on the stream is one of ours. Then the launch itself takes no time of its own: the
// kernel gets its place as soon as all blocks of the other have come to let_next_kernel_begin(), and waits there by
// await_kernel_before(). A kernel of others may rely on the order of whole kernels, so it is never let in early.
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
