// Sums of rows, as combine takes them: in a fixed order, in fp32, with separate multiplications and additions. They are
// the same bits on every run, and those of the CPU backend.
#ifndef EEP_CUDA_ROW_SUMS_CUH_
#define EEP_CUDA_ROW_SUMS_CUH_

#include "cuda/fp8.cuh"

namespace eep {

// Where the parts of a token's sum lie, in the order in which they are added.
struct Parts {
  const uint8_t* row[EEP_MAX_TOPK];
  float weight[EEP_MAX_TOPK];
  uint32_t count;
};

// What a thread adds up: the values in 16 bytes of rows of `kType`.
template <uint32_t kType>
struct Sum {
  static constexpr uint32_t kValues = kType == EEP_TYPE_F32 ? 4 : kType == EEP_TYPE_BF16 ? 8 : 16;
  static constexpr uint32_t kResultBytes = kValues * (kType == EEP_TYPE_F32 ? 4 : 2);
  float value[kValues] = {};

  __device__ void add(const uint4& data, float scale, float weight) {
    float part[kValues];
    if constexpr (kType == EEP_TYPE_FP8) {
      decode(data, scale, part);
    } else {
      const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
      for (uint32_t i = 0; i < kValues; ++i) part[i] = value_at < kType == EEP_TYPE_F32 > (words, i);
    }
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) value[i] = __fadd_rn(value[i], __fmul_rn(weight, part[i]));
  }
  __device__ void store(uint8_t* out) const {
    uint32_t words[kResultBytes / 4];
#pragma unroll
    for (uint32_t i = 0; i < kResultBytes / 4; ++i) {
      if constexpr (kType == EEP_TYPE_F32) {
        words[i] = __float_as_uint(value[i]);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kResultBytes / 4; i += 4)
      store_row(reinterpret_cast<uint4*>(out) + i / 4, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
  }
};

// Which columns of a row a block adds up: of all chunks of 32 threads' worth, every so many, beginning with number
// `first`.
struct Columns {
  uint32_t first, sharers_log2;
  const Divider& chunks;
};

// The loads of several parts are on their way at once; rarely are there more parts than that. A block that shares its
// tokens has one at most.
template <uint32_t kType, uint32_t kWarps>
__device__ void add_parts(const Home& home, const eep_combine_recv_args& args, const Parts* parts, uint32_t first_token,
                          uint32_t stride, uint32_t tokens, Columns columns) {
  constexpr uint32_t kAtOnce = kType == EEP_TYPE_FP8 ? 4 : 8;
  const uint32_t lane = threadIdx.x % 32, vectors = home.shape.hidden / Sum<kType>::kValues;
  const uint32_t sharers = 1u << columns.sharers_log2;
  const uint32_t chunks = (columns.chunks.by + sharers - 1 - columns.first) >> columns.sharers_log2;
  for (uint32_t item = threadIdx.x / 32; item < tokens * chunks; item += kWarps) {
    const uint32_t number = tokens == 1 ? 0 : columns.chunks.quotient(item);
    const Parts& of_token = parts[number];
    const uint32_t vector = ((item - number * chunks) * sharers + columns.first) * 32 + lane;
    if (vector >= vectors) continue;
    Sum<kType> sum;
    for (uint32_t first = 0; first < of_token.count; first += kAtOnce) {
      uint4 data[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + i >= of_token.count) continue;
        const uint8_t* row = of_token.row[first + i];
        data[i] = load_shared_row(reinterpret_cast<const uint4*>(row) + vector);
        if constexpr (kType == EEP_TYPE_FP8)
          scale[i] = load_shared_float(reinterpret_cast<const float*>(row + home.shape.hidden) +
                                       vector * kEncodedAtOnce / EEP_SCALE_GROUP);
        else
          scale[i] = 1.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i < of_token.count) sum.add(data[i], scale[i], of_token.weight[first + i]);
    }
    const uint64_t token = first_token + static_cast<uint64_t>(number) * stride;
    sum.store(static_cast<uint8_t*>(args.out) + token * home.at.output_row_bytes + vector * Sum<kType>::kResultBytes);
  }
}

}  // namespace eep

#endif  // EEP_CUDA_ROW_SUMS_CUH_
