// Pages of a copy of contexts, filled from a cache in host memory.
#include <cstring>

#include "common/checks.h"

namespace {

// The owner of the table writes it in another thread.
int32_t look_up(const int32_t* table, int64_t place) { return __atomic_load_n(table + place, __ATOMIC_RELAXED); }

}  // namespace

int eep_copy_pages(const eep_page_copy* copy, uint32_t count, const int64_t* pages, void*) {
  if (const int error = eep::check_page_copy(*copy, count, pages)) return error;
  const uint32_t tokens = copy->page_tokens;
  for (uint32_t i = 0; i < count; ++i) {
    int32_t* rows = copy->rows + static_cast<uint64_t>(i) * tokens;
    for (uint32_t token = 0; token < tokens; ++token) rows[token] = look_up(copy->table, copy->places[i] + token);
    uint8_t* to = copy->pages + pages[i] * copy->page_bytes;
    for (uint32_t layer = 0; layer < copy->layers; ++layer) {
      const auto* from = static_cast<const uint8_t*>(copy->from[layer]);
      const uint64_t bytes = copy->row_bytes[layer];
      for (uint32_t token = 0; token < tokens; ++token, to += bytes) std::memcpy(to, from + rows[token] * bytes, bytes);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    bool same = true;
    for (uint32_t token = 0; token < tokens; ++token)
      same &= rows[token] == look_up(copy->table, copy->places[i] + token);
    copy->same[i] = same;
  }
  return EEP_OK;
}
