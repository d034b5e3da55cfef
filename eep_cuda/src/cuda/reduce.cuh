// The arithmetic of reductions: elements of a 16-byte vector, added in a fixed order. 16-bit floats are added in f32
// and rounded once, at the end.
#ifndef EEP_CUDA_REDUCE_CUH_
#define EEP_CUDA_REDUCE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "eep/eep.h"

namespace eep {

struct Bool {  // what torch keeps in a byte
  uint8_t value;
};

template <typename T>
struct Element {  // integers, f32, f64: they are added as they are
  using Sum = T;
  __device__ static Sum load(T value) { return value; }
  __device__ static T store(Sum sum) { return sum; }
};
template <>
struct Element<__nv_bfloat16> {
  using Sum = float;
  __device__ static Sum load(__nv_bfloat16 value) { return __bfloat162float(value); }
  __device__ static __nv_bfloat16 store(Sum sum) { return __float2bfloat16_rn(sum); }
};
template <>
struct Element<__half> {
  using Sum = float;
  __device__ static Sum load(__half value) { return __half2float(value); }
  __device__ static __half store(Sum sum) { return __float2half_rn(sum); }
};
template <>
struct Element<Bool> {
  using Sum = bool;
  __device__ static Sum load(Bool value) { return value.value != 0; }
  __device__ static Bool store(Sum sum) { return {static_cast<uint8_t>(sum)}; }
};

template <typename S>
__device__ S add(S a, S b) {
  if constexpr (std::is_same_v<S, bool>)
    return a || b;
  else
    return static_cast<S>(a + b);
}

// Not a number wins, as in torch.
template <typename S>
__device__ S least(S a, S b) {
  return a != a || a < b ? a : b;
}
template <typename S>
__device__ S largest(S a, S b) {
  return a != a || a > b ? a : b;
}

template <typename S>
__device__ S apply(uint32_t reduction, S a, S b) {
  switch (reduction) {
    case EEP_MIN:
      return least(a, b);
    case EEP_MAX:
      return largest(a, b);
    case EEP_PROD:
      if constexpr (std::is_same_v<S, bool>)
        return a && b;
      else
        return static_cast<S>(a * b);
    case EEP_BAND:
    case EEP_BOR:
    case EEP_BXOR:
      if constexpr (std::is_integral_v<S>)
        return static_cast<S>(reduction == EEP_BAND ? a & b : reduction == EEP_BOR ? a | b : a ^ b);
      return a;  // the host does not let it come to this
    default:
      return add(a, b);
  }
}

// One vector's worth of sums. `kAdds` leaves nothing to decide per element: sums and averages are what servers ask for.
// `kAverages`: an average may be asked for.
template <typename T, bool kAdds, bool kAverages>
struct VectorSum {
  using Sum = typename Element<T>::Sum;
  static constexpr uint32_t kValues = sizeof(uint4) / sizeof(T);
  union Vector {
    uint4 whole;
    T value[kValues];
    __device__ Vector() {}
  };
  Sum sum[kValues];

  __device__ void begin(const uint4& data) {
    Vector vector;
    vector.whole = data;
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) sum[i] = Element<T>::load(vector.value[i]);
  }
  __device__ void take(const uint4& data, uint32_t reduction) {
    Vector vector;
    vector.whole = data;
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      const Sum value = Element<T>::load(vector.value[i]);
      if constexpr (kAdds)
        sum[i] = add(sum[i], value);
      else
        sum[i] = apply(reduction, sum[i], value);
    }
  }
  __device__ uint4 result(uint32_t reduction, uint32_t taken) const {
    Vector vector;
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) {
      Sum value = sum[i];
      if constexpr (kAverages && !std::is_same_v<Sum, bool>)
        if (reduction == EEP_AVG) value = static_cast<Sum>(value / static_cast<Sum>(taken));
      vector.value[i] = Element<T>::store(value);
    }
    return vector.whole;
  }
};

}  // namespace eep

#endif  // EEP_CUDA_REDUCE_CUH_
