// Sums of rows, as combine takes them.
#ifndef EEP_CPU_ROW_SUMS_H_
#define EEP_CPU_ROW_SUMS_H_

#include <cstdint>

namespace eep {

// out = the sum of `count` rows of `hidden` values each, taken in f32 in the order given and rounded once. The result
// does not depend on how it is computed: every build and machine gives the same bits.
using AddRows = void (*)(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden,
                         uint8_t* out);

// For rows as they travel: f32, bf16, or fp8, whose sums are bf16. Weights are only read where it is `weighted`.
AddRows find_add_rows(uint32_t combine_type, bool weighted);

}  // namespace eep

#endif  // EEP_CPU_ROW_SUMS_H_
