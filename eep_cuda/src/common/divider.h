// Division by a number that is known when a kernel is launched: a GPU takes more than a hundred cycles for any other.
#ifndef EEP_COMMON_DIVIDER_H_
#define EEP_COMMON_DIVIDER_H_

#include <cstdint>

#include "common/region_views.h"

namespace eep {

// Exact for every dividend of 32 bits (Granlund and Montgomery, "Division by invariant integers using multiplication").
struct Divider {
  uint32_t by = 1;

  Divider() = default;
  explicit Divider(uint32_t divisor) : by(divisor ? divisor : 1) {
    uint32_t bits = 0;  // the logarithm of the divisor, rounded up
    while (bits < 32 && uint64_t{1} << bits < by) ++bits;
    magic_ = static_cast<uint32_t>((((uint64_t{1} << bits) - by) << 32) / by + 1);
    first_shift_ = bits < 1 ? bits : 1;
    second_shift_ = bits < 1 ? 0 : bits - 1;
  }

  EEP_HOST_DEVICE uint32_t quotient(uint32_t dividend) const {
    const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(magic_) * dividend >> 32);
    return (high + ((dividend - high) >> first_shift_)) >> second_shift_;
  }
  EEP_HOST_DEVICE uint32_t rest(uint32_t dividend) const { return dividend - quotient(dividend) * by; }

 private:
  uint32_t magic_ = 1, first_shift_ = 0, second_shift_ = 0;
};

}  // namespace eep

#endif  // EEP_COMMON_DIVIDER_H_
