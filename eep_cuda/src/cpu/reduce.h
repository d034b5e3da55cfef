// Elementwise reductions. The same bits wherever they are taken: always in the order given, 16-bit floats in f32 and
// rounded once at the end.
#ifndef EEP_CPU_REDUCE_H_
#define EEP_CPU_REDUCE_H_

#include <cstdint>

#include "eep/eep.h"

namespace eep {

// Of one element in memory; 0 if there is no such type.
uint32_t element_size(uint32_t element);

// out[i] = sources[0][i] op sources[1][i] op ... for `bytes` bytes. `out` overlaps none of the sources.
using Reduce = void (*)(const uint8_t* const* sources, uint32_t count, uint64_t bytes, uint8_t* out);

// Null if there is no such reduction of such elements.
Reduce find_reduce(uint32_t element, uint32_t reduction);

}  // namespace eep

#endif  // EEP_CPU_REDUCE_H_
