#include "cpu/row_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "cpu/formats.h"

// Rounding to bf16 takes instructions that not every x86 has; the loader chooses. It asks a function of ours before a
// sanitizer is ready for one.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define EEP_FOR_EACH_CPU [[gnu::target_clones("avx2", "default")]]
#else
#define EEP_FOR_EACH_CPU
#endif
// So that it is compiled for the CPU of its caller.
#define EEP_FOR_CALLER [[gnu::always_inline]] inline

namespace eep {
namespace {

EEP_FOR_CALLER float widen(float value) { return value; }
EEP_FOR_CALLER float widen(uint16_t bf16) { return float_of_bf16(bf16); }
EEP_FOR_CALLER void narrow(float value, float& to) { to = value; }
EEP_FOR_CALLER void narrow(float value, uint16_t& to) { to = bf16_of_float(value); }

// The sum of few rows stays in registers.
template <typename T, size_t... row>
EEP_FOR_CALLER void add_few(const uint8_t* const* rows, size_t size, T* __restrict out, std::index_sequence<row...>) {
  const T* const each[] = {reinterpret_cast<const T*>(rows[row])...};
  for (size_t i = 0; i < size; ++i) narrow((... + widen(each[row][i])), out[i]);
}

// The sum of one row is the row, with every NaN written alike.
EEP_FOR_CALLER void copy_sum(const uint8_t* row, size_t size, float* out) { std::memcpy(out, row, size * sizeof *out); }
EEP_FOR_CALLER void copy_sum(const uint8_t* row, size_t size, uint16_t* __restrict out) {
  const uint16_t* values = reinterpret_cast<const uint16_t*>(row);
  for (size_t i = 0; i < size; ++i) out[i] = (values[i] & 0x7fff) > 0x7f80 ? 0x7fc0 : values[i];
}

// sum = or += weight * values
template <bool first, bool weighted, typename T>
EEP_FOR_CALLER void add_row(float* __restrict sum, const T* __restrict values, float weight, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    float value = widen(values[i]);
    if constexpr (weighted) value *= weight;
    sum[i] = first ? value : sum[i] + value;
  }
}

// That of many is taken in blocks, so that it stays in L1.
template <bool weighted, typename T>
EEP_FOR_CALLER void add_many(const uint8_t* const* rows, const float* weights, uint32_t count, size_t size, T* out) {
  constexpr size_t kBlock = 1024;
  float sum[kBlock];
  for (size_t begin = 0; begin < size; begin += kBlock) {
    const size_t block = std::min(kBlock, size - begin);
    for (uint32_t row = 0; row < count; ++row) {
      const T* values = reinterpret_cast<const T*>(rows[row]) + begin;
      if (row)
        add_row<false, weighted>(sum, values, weighted ? weights[row] : 1, block);
      else
        add_row<true, weighted>(sum, values, weighted ? weights[row] : 1, block);
    }
    for (size_t i = 0; i < block; ++i) narrow(sum[i], out[begin + i]);
  }
}

template <bool weighted, typename T>
EEP_FOR_CALLER void add(const uint8_t* const* rows, const float* weights, uint32_t count, size_t size, T* out) {
  if (!count) std::memset(out, 0, size * sizeof(T));
  if (!count) return;
  if (weighted || count > 4) return add_many<weighted>(rows, weights, count, size, out);
  if (count == 1) return copy_sum(rows[0], size, out);
  if (count == 2) return add_few(rows, size, out, std::make_index_sequence<2>());
  if (count == 3) return add_few(rows, size, out, std::make_index_sequence<3>());
  add_few(rows, size, out, std::make_index_sequence<4>());
}

// Rows of fp8, group by group. Products of a value and its scale are rounded as those of any value and its weight.
template <bool weighted>
EEP_FOR_CALLER void add_encoded(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                                uint16_t* out) {
  for (uint32_t begin = 0; begin < hidden; begin += EEP_SCALE_GROUP) {
    float sum[EEP_SCALE_GROUP] = {}, values[EEP_SCALE_GROUP];
    for (uint32_t row = 0; row < count; ++row) {
      float scale;
      std::memcpy(&scale, rows[row] + hidden + begin / EEP_SCALE_GROUP * sizeof scale, sizeof scale);
      for (uint32_t i = 0; i < EEP_SCALE_GROUP; ++i) values[i] = float_of_e4m3(rows[row][begin + i]) * scale;
      add_row<false, weighted>(sum, values, weighted ? weights[row] : 1, EEP_SCALE_GROUP);
    }
    for (uint32_t i = 0; i < EEP_SCALE_GROUP; ++i) narrow(sum[i], out[begin + i]);
  }
}

EEP_FOR_EACH_CPU void add_f32(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                              uint8_t* out) {
  add<false>(rows, weights, count, hidden, reinterpret_cast<float*>(out));
}
EEP_FOR_EACH_CPU void add_bf16(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                               uint8_t* out) {
  add<false>(rows, weights, count, hidden, reinterpret_cast<uint16_t*>(out));
}
EEP_FOR_EACH_CPU void add_weighted_f32(const uint8_t* const* rows, const float* weights, uint32_t count,
                                       uint32_t hidden, uint8_t* out) {
  add<true>(rows, weights, count, hidden, reinterpret_cast<float*>(out));
}
EEP_FOR_EACH_CPU void add_weighted_bf16(const uint8_t* const* rows, const float* weights, uint32_t count,
                                        uint32_t hidden, uint8_t* out) {
  add<true>(rows, weights, count, hidden, reinterpret_cast<uint16_t*>(out));
}

EEP_FOR_EACH_CPU void add_fp8(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                              uint8_t* out) {
  add_encoded<false>(rows, weights, count, hidden, reinterpret_cast<uint16_t*>(out));
}
EEP_FOR_EACH_CPU void add_weighted_fp8(const uint8_t* const* rows, const float* weights, uint32_t count,
                                       uint32_t hidden, uint8_t* out) {
  add_encoded<true>(rows, weights, count, hidden, reinterpret_cast<uint16_t*>(out));
}

}  // namespace

AddRows find_add_rows(uint32_t combine_type, bool weighted) {
  const bool is_f32 = combine_type == EEP_TYPE_F32;
  if (eep_is_fp8(combine_type)) return weighted ? add_weighted_fp8 : add_fp8;
  if (weighted) return is_f32 ? add_weighted_f32 : add_weighted_bf16;
  return is_f32 ? add_f32 : add_bf16;
}

}  // namespace eep
