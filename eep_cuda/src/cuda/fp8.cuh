// Rows on the wire as fp8 (e4m3), with a scale for each group of values: sixteen values of a thread at a time.
#ifndef EEP_CUDA_FP8_CUH_
#define EEP_CUDA_FP8_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device.cuh"

namespace eep {

constexpr uint32_t kEncodedAtOnce = 16;  // 16 bytes when encoded

struct Scale {
  float value, inverse;
  uint8_t exponent;
};

// As src/cpu/formats.h, to the bit.
__device__ inline Scale scale_for(float largest, bool power_of_two) {
  largest = fmaxf(largest, 1e-4f);
  if (!power_of_two) return {__fdiv_rn(largest, 448.0f), __fdiv_rn(448.0f, largest), 0};
  const uint32_t bits = __float_as_uint(__fdiv_rn(largest, 448.0f));
  const uint32_t exponent = min((bits >> 23) + ((bits & 0x7fffff) != 0), 253u);
  return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23), static_cast<uint8_t>(exponent)};
}

// `words` hold sixteen values, f32 or bf16.
template <bool kF32>
__device__ inline float value_at(const uint32_t* words, uint32_t i) {
  return __uint_as_float(kF32 ? words[i] : i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}

template <bool kF32>
__device__ inline float largest_of(const uint32_t* words) {
  if constexpr (kF32) {
    float largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEncodedAtOnce; ++i) largest = fmaxf(largest, fabsf(__uint_as_float(words[i])));
    return largest;
  } else {  // two at a time
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(words);
    __nv_bfloat162 largest = __habs2(pairs[0]);
#pragma unroll
    for (uint32_t i = 1; i < kEncodedAtOnce / 2; ++i) largest = __hmax2(largest, __habs2(pairs[i]));
    return fmaxf(__low2float(largest), __high2float(largest));
  }
}

template <bool kF32>
__device__ inline uint4 encode(const uint32_t* words, float inverse) {
  uint32_t packed[4] = {0, 0, 0, 0};
#pragma unroll
  for (uint32_t i = 0; i < kEncodedAtOnce; i += 2) {
    const float2 pair{__fmul_rn(value_at<kF32>(words, i), inverse), __fmul_rn(value_at<kF32>(words, i + 1), inverse)};
    packed[i / 4] |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << i % 4 * 8;
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// Sixteen values, times their scale.
__device__ inline void decode(const uint4& data, float scale, float (&values)[kEncodedAtOnce]) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (uint32_t i = 0; i < kEncodedAtOnce; i += 2) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 4] >> i % 4 * 8);
    const float2 each = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    values[i] = __fmul_rn(each.x, scale);
    values[i + 1] = __fmul_rn(each.y, scale);
  }
}

// A row as it travels: values, then a float for each group. By one warp.
__device__ inline void encode_row(uint8_t* to, const uint8_t* from, uint32_t hidden) {
  constexpr uint32_t kLanesPerGroup = EEP_SCALE_GROUP / kEncodedAtOnce;
  const uint32_t lane = threadIdx.x % 32, units = hidden / kEncodedAtOnce;
  for (uint32_t first = 0; first < units; first += 32) {
    const uint32_t unit = first + lane;
    uint4 raw[2] = {};
    if (unit < units)
      for (uint32_t i = 0; i < 2; ++i) raw[i] = load_input(reinterpret_cast<const uint4*>(from) + 2 * unit + i);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
    float largest = largest_of<false>(words);
#pragma unroll
    for (uint32_t step = kLanesPerGroup / 2; step; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const Scale scale = scale_for(largest, false);
    if (unit >= units) continue;
    store_row(reinterpret_cast<uint4*>(to) + unit, encode<false>(words, scale.inverse));
    if (lane % kLanesPerGroup == 0) reinterpret_cast<float*>(to + hidden)[unit / kLanesPerGroup] = scale.value;
  }
}

}  // namespace eep

#endif  // EEP_CUDA_FP8_CUH_
