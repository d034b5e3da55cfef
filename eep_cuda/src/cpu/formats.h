// Number formats on the wire: bf16, and fp8 e4m3 with one scale per 128 values.
#ifndef EEP_CPU_FORMATS_H_
#define EEP_CPU_FORMATS_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "eep/protocol.h"

namespace eep {

inline float float_of_bf16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

inline uint16_t bf16_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

inline float float_of_f16(uint16_t value) {
  const uint32_t magnitude = uint32_t{value} & 0x7fff;
  // Moves the exponent bias from 15 to 127; as a product, so that subnormals come out right too.
  const float moved = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000 : 0;  // infinity and NaN
  return std::bit_cast<float>(std::bit_cast<uint32_t>(moved) | special | (uint32_t{value} & 0x8000) << 16);
}

// To nearest, ties to even; what is too large becomes infinity.
inline uint16_t f16_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Subnormals are multiples of 2^-24: adding 1/2 makes the float unit round at just that bit.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  uint32_t result = magnitude < (113u << 23) ? subnormal : std::min(normal, 0x7c00u);
  result = magnitude > 0x7f800000 ? 0x7e00 : result;
  return static_cast<uint16_t>(result | (bits >> 16 & 0x8000));
}

// Round to nearest even; beyond the largest finite value (448) it saturates.
inline uint8_t e4m3_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal numbers: move the exponent bias from 127 to 7 and let the rounding carry run into it.
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  // Subnormals are multiples of 2^-9: adding 2^14 makes the float unit round at just that bit.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 16384.0f) - std::bit_cast<uint32_t>(16384.0f);
  uint32_t result = magnitude < (121u << 23) ? subnormal : std::min(normal, 0x7eu);
  result = magnitude > 0x7f800000 ? 0x7f : result;  // NaN stays NaN
  return static_cast<uint8_t>(result | (bits >> 24 & 0x80));
}

constexpr std::array<float, 256> kValuesOfE4m3 = [] {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent ? 8.0f + static_cast<float>(mantissa) : static_cast<float>(mantissa);  // in units of 2^-9
    for (uint32_t i = 1; i < exponent; ++i) value *= 2;
    value /= 512;
    if ((code & 0x7f) == 0x7f) value = std::bit_cast<float>(0x7fc00000u);
    values[code] = code & 0x80 ? -value : value;
  }
  return values;
}();

inline float float_of_e4m3(uint8_t value) { return kValuesOfE4m3[value]; }

struct Scale {
  float value;    // what the receiver multiplies by
  float inverse;  // what the sender multiplies by
  uint8_t exponent;
};

inline Scale scale_for(float largest, bool power_of_two) {
  constexpr float kE4m3Max = 448.0f,
                  kSmallest = 1e-4f;  // the floor keeps a row of zeros from dividing by zero
  largest = std::max(largest, kSmallest);
  if (!power_of_two) return {largest / kE4m3Max, kE4m3Max / largest, 0};
  const uint32_t bits = std::bit_cast<uint32_t>(largest / kE4m3Max);
  // Rounded up, so that nothing overflows; capped so that infinity still has a scale with an inverse.
  const uint32_t exponent = std::min((bits >> 23) + ((bits & 0x7fffff) != 0), 253u);
  return {std::bit_cast<float>(exponent << 23), std::bit_cast<float>((254 - exponent) << 23),
          static_cast<uint8_t>(exponent)};
}

// The largest magnitude of a group, NaN left out. Compared as bits: magnitudes are ordered as their bits are, and a
// maximum of integers is one that the compiler takes several at a time.
inline float largest_of(const float (&group)[EEP_SCALE_GROUP]) {
  uint32_t magnitude[EEP_SCALE_GROUP];
  for (uint32_t i = 0; i < EEP_SCALE_GROUP; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(group[i]) & 0x7fffffff;
    magnitude[i] = bits > 0x7f800000 ? 0 : bits;
  }
  uint32_t most = 0;
  for (uint32_t value : magnitude) most = std::max(most, value);
  return std::bit_cast<float>(most);
}

// On its own, with pointers that do not overlap: inlined into the loop over groups, gcc takes the values one by one.
[[gnu::noinline]] inline void encode_group(const float* __restrict group, float inverse, uint8_t* __restrict row) {
  for (uint32_t i = 0; i < EEP_SCALE_GROUP; ++i) row[i] = e4m3_of_float(group[i] * inverse);
}

// Encodes `hidden` values of `x_type` as fp8: values to `row`, scales (fp32 or exponent bytes) to `scales`.
inline void quantize_row(const uint8_t* x, uint32_t x_type, uint32_t hidden, uint32_t wire_type, uint8_t* row,
                         uint8_t* scales) {
  float group[EEP_SCALE_GROUP];
  for (uint32_t begin = 0; begin < hidden; begin += EEP_SCALE_GROUP) {
    if (x_type == EEP_TYPE_F32) {
      std::memcpy(group, x + begin * sizeof(float), sizeof group);
    } else {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(x) + begin;
      for (uint32_t i = 0; i < EEP_SCALE_GROUP; ++i) group[i] = float_of_bf16(values[i]);
    }
    const Scale scale = scale_for(largest_of(group), wire_type != EEP_TYPE_FP8);
    encode_group(group, scale.inverse, row + begin);
    const uint32_t index = begin / EEP_SCALE_GROUP;
    if (wire_type == EEP_TYPE_FP8_UE8M0)
      scales[index] = scale.exponent;
    else
      std::memcpy(scales + index * sizeof(float), &scale.value, sizeof(float));
  }
}

}  // namespace eep

#endif  // EEP_CPU_FORMATS_H_
