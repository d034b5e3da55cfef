// The collectives that reduce, where some ranks are on other hosts.
#include "cuda/reduce_kernel.cuh"

namespace eep {
namespace {

template <typename T>
int launch(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream) {
  reduce_kernel<T, false, true><<<parts, kLaneThreads, 0, stream>>>(home, call);
  return check_cuda(cudaGetLastError(), "a reduction across hosts");
}

template <typename... Ts>
cudaError_t load_for() {
  return load_kernels(reduce_kernel<Ts, false, true>...);
}

}  // namespace

cudaError_t load_far_reductions() {
  return load_for<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, __half, __nv_bfloat16,
                  float, double, Bool>();
}

int launch_far_reduction(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream) {
  static constexpr decltype(&launch<float>) kByElement[] = {
      launch<uint8_t>, launch<int8_t>,   launch<uint16_t>, launch<int16_t>, launch<uint32_t>,
      launch<int32_t>, launch<uint64_t>, launch<int64_t>,  launch<__half>,  launch<__nv_bfloat16>,
      launch<float>,   launch<double>,   launch<Bool>};
  return kByElement[call.element](home, call, parts, stream);
}

}  // namespace eep
