// Copies of rows that are chosen by number, such as the entries of a request in a cache.
#include <cstring>

#include "common/checks.h"

int eep_copy_rows(uint32_t arrays, void* const* to, const void* const* from, const uint64_t* row_bytes, uint64_t rows,
                  const int64_t* to_rows, const int64_t* from_rows, void*) {
  if (const int error = eep::check_row_copies(arrays, to, from, row_bytes, rows, to_rows, from_rows)) return error;
  for (uint32_t array = 0; array < arrays; ++array) {
    auto* target = static_cast<uint8_t*>(to[array]);
    const auto* source = static_cast<const uint8_t*>(from[array]);
    const uint64_t bytes = row_bytes[array];
    for (uint64_t row = 0; row < rows && bytes; ++row)
      std::memcpy(target + to_rows[row] * bytes, source + from_rows[row] * bytes, bytes);
  }
  return EEP_OK;
}
