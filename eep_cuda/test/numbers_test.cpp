// How numbers are reduced, rows are added up, and f16 converted.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/divider.h"
#include "cpu/formats.h"
#include "cpu/reduce.h"
#include "cpu/row_sums.h"
#include "require.h"

namespace eep_test {
namespace {

template <typename T>
T reduced(eep_element element, eep_reduction reduction, const std::vector<T>& values) {
  std::vector<const uint8_t*> sources;
  for (const T& value : values) sources.push_back(reinterpret_cast<const uint8_t*>(&value));
  const eep::Reduce reduce = eep::find_reduce(element, reduction);
  REQUIRE(reduce);
  T out{};
  reduce(sources.data(), uint32_t(values.size()), sizeof(T), reinterpret_cast<uint8_t*>(&out));
  return out;
}

void test_reductions() {
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_U8, EEP_SUM, {200, 100, 1}) == 45);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_U8, EEP_AVG, {200, 201}) == 200);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_AVG, {-3, -4, -1, 1}) == -1);
  REQUIRE(reduced<int8_t>(EEP_ELEMENT_I8, EEP_MIN, {3, -4, 5}) == -4);
  REQUIRE(reduced<int64_t>(EEP_ELEMENT_I64, EEP_MAX, {3, -4, 5}) == 5);
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_U16, EEP_PROD, {65535, 65535}) == 1);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_PROD, {1 << 30, 4}) == 0);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_BAND, {12, 10}) == 8);
  REQUIRE(reduced<uint64_t>(EEP_ELEMENT_U64, EEP_BOR, {12, 10}) == 14);
  REQUIRE(reduced<int16_t>(EEP_ELEMENT_I16, EEP_BXOR, {12, 10, 1}) == 7);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_SUM, {0, 2, 1}) == 1);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_PROD, {1, 2, 0}) == 0);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_MIN, {1, 2}) == 1);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_MAX, {0, 0}) == 0);
  REQUIRE(reduced<float>(EEP_ELEMENT_F32, EEP_AVG, {1, 2, 4}) == 7.0f / 3);
  REQUIRE(reduced<double>(EEP_ELEMENT_F64, EEP_SUM, {1e300, 1, -1e300}) == 0);  // in order
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (eep_reduction reduction : {EEP_MIN, EEP_MAX}) {
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {nan, 1, 2})));
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {1, nan, 2})));
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {1, 2, nan})));
  }
  // 256 + 1 is a tie in bf16 that would round down; with another 1 it does not, if rounding waits for the end.
  const auto bf16 = [](float x) { return eep::bf16_of_float(x); };
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_BF16, EEP_SUM, {bf16(256), bf16(1), bf16(1)}) == bf16(258));
  const auto f16 = [](float x) { return eep::f16_of_float(x); };
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_F16, EEP_SUM, {f16(2048), f16(1), f16(1)}) == f16(2050));
  REQUIRE(!eep::find_reduce(EEP_ELEMENT_BYTES, EEP_SUM) && !eep::find_reduce(EEP_ELEMENT_BF16, EEP_BAND));
  REQUIRE(!eep::find_reduce(EEP_ELEMENT_BOOL, EEP_AVG) && !eep::find_reduce(EEP_ELEMENT_I32, 8));
}

// Every f16 there and back, and every tie between two of them.
void test_f16() {
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const int exponent = bits >> 10, mantissa = bits & 0x3ff;
    const float exact = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    REQUIRE(eep::float_of_f16(uint16_t(bits)) == exact);
    REQUIRE(eep::float_of_f16(uint16_t(bits | 0x8000)) == -exact);
    REQUIRE(eep::f16_of_float(exact) == bits && eep::f16_of_float(-exact) == (bits | 0x8000));
    const float next = bits == 0x7bff ? 65536.0f : eep::float_of_f16(uint16_t(bits + 1)), tie = (exact + next) / 2;
    REQUIRE(eep::f16_of_float(tie) == bits + (bits & 1));
    REQUIRE(eep::f16_of_float(std::nextafter(tie, 0.0f)) == bits);
    REQUIRE(eep::f16_of_float(std::nextafter(tie, 1e9f)) == bits + 1);
  }
  REQUIRE(eep::f16_of_float(1e30f) == 0x7c00 && eep::f16_of_float(-INFINITY) == 0xfc00);
  REQUIRE(std::isinf(eep::float_of_f16(0x7c00)) && std::isnan(eep::float_of_f16(0x7e01)));
  REQUIRE(std::isnan(eep::float_of_f16(eep::f16_of_float(NAN))));
}

// What combine makes of rows, one value at a time.
template <typename T>
T sum_of(const std::vector<std::vector<T>>& rows, const std::vector<float>& weights, size_t column, bool weighted) {
  float sum = 0;
  for (size_t row = 0; row < rows.size(); ++row) {
    float value;
    if constexpr (sizeof(T) == 4)
      value = rows[row][column];
    else
      value = eep::float_of_bf16(rows[row][column]);
    if (weighted) value *= weights[row];
    sum = row ? sum + value : value;
  }
  if constexpr (sizeof(T) == 4)
    return sum;
  else
    return eep::bf16_of_float(sum);
}

// Any number of rows of any length, NaN and infinity among their values: the same bits as one after the other.
template <typename T>
void test_row_sums() {
  uint32_t noise = 1;
  const auto next = [&] { return (noise = noise * 1664525 + 1013904223) >> 16; };
  for (const size_t hidden : {1, 7, 128, 1500})
    for (uint32_t count = 0; count <= 16; ++count) {
      std::vector<std::vector<T>> rows(count, std::vector<T>(hidden));
      std::vector<float> weights;
      std::vector<const uint8_t*> addresses;
      for (std::vector<T>& row : rows) {
        for (T& value : row)
          if constexpr (sizeof(T) == 4)
            value = float(int(next() % 2048) - 1024) / 3;
          else
            value = uint16_t(next());
        weights.push_back(float(next()) / 1000);
        addresses.push_back(reinterpret_cast<const uint8_t*>(row.data()));
      }
      for (const bool weighted : {false, true}) {
        std::vector<T> out(hidden, T(9));
        const eep::AddRows add = eep::find_add_rows(sizeof(T) == 4 ? EEP_TYPE_F32 : EEP_TYPE_BF16, weighted);
        add(addresses.data(), weights.data(), count, uint32_t(hidden), reinterpret_cast<uint8_t*>(out.data()));
        for (size_t i = 0; i < hidden; ++i) {
          const T expected = sum_of(rows, weights, i, weighted);
          REQUIRE(std::memcmp(&out[i], &expected, sizeof(T)) == 0);
        }
      }
    }
}

void test_divider() {
  const uint32_t most = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> numbers = {1, 2, 3, 5, 6, 7, 9, 28, 160, 641, 65535, 65537, 6700417, most / 2, most - 1, most};
  for (uint32_t bit = 1; bit; bit <<= 1) numbers.insert(numbers.end(), {bit, bit + 1, bit + bit / 2});
  for (const uint32_t by : numbers) {
    const eep::Divider divider(by);
    REQUIRE(divider.by == by);
    for (const uint32_t factor : numbers)
      for (const uint32_t more : {most, 0u, 1u}) {
        const uint32_t dividend = by * factor + more;  // around a multiple, where it does not overflow
        REQUIRE(divider.quotient(dividend) == dividend / by && divider.rest(dividend) == dividend % by);
      }
  }
  REQUIRE(eep::Divider().quotient(most) == most && eep::Divider(0).quotient(7) == 7);
}

}  // namespace

void test_numbers() {
  test_divider();
  test_reductions();
  test_f16();
  test_row_sums<float>();
  test_row_sums<uint16_t>();
}

}  // namespace eep_test
