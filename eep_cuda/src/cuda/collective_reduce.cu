// The collectives that reduce, among the ranks of one host.
#include "cuda/reduce_kernel.cuh"

namespace eep {
namespace {

template <typename T>
int launch(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream) {
  const auto kernel = call.reduction <= EEP_AVG ? reduce_kernel<T, true, false> : reduce_kernel<T, false, false>;
  kernel<<<parts, kLaneThreads, 0, stream>>>(home, call);
  return check_cuda(cudaGetLastError(), "a reduction");
}

template <typename... Ts>
cudaError_t load_for() {
  return load_kernels(reduce_kernel<Ts, true, false>..., reduce_kernel<Ts, false, false>...);
}

}  // namespace

cudaError_t load_reductions() {
  const cudaError_t error = load_far_reductions();
  if (error != cudaSuccess) return error;
  return load_for<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t, __half, __nv_bfloat16,
                  float, double, Bool>();
}

int launch_reduction(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream) {
  if (home.landing) return launch_far_reduction(home, call, parts, stream);
  static constexpr decltype(&launch<float>) kByElement[] = {
      launch<uint8_t>, launch<int8_t>,   launch<uint16_t>, launch<int16_t>, launch<uint32_t>,
      launch<int32_t>, launch<uint64_t>, launch<int64_t>,  launch<__half>,  launch<__nv_bfloat16>,
      launch<float>,   launch<double>,   launch<Bool>};
  return kByElement[call.element](home, call, parts, stream);
}

}  // namespace eep
