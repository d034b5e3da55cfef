// What a caller gives us, checked before anything is touched. The same for every backend.
#ifndef EEP_COMMON_CHECKS_H_
#define EEP_COMMON_CHECKS_H_

#include "eep/eep.h"

namespace eep {

// How many ranks this backend serves: EEP_MAX_RANKS, or EEP_MAX_CUDA_RANKS.
extern const uint32_t kMostRanks;

// Records a sentence for eep_last_error() and returns `code`.
[[gnu::format(printf, 2, 3)]] int fail(eep_error code, const char* format, ...);

int check_create(const eep_shape& shape, uint32_t rank, const void* region, const eep_control_page* control);

// Whose turn it is on a channel: what came last, in which epoch, and which epoch the table is at now.
struct Turn {
  uint32_t phase;
  uint64_t epoch;
  uint64_t table_epoch;
};
int check_turn(const eep_shape& shape, uint32_t channel, const Turn& turn, eep_phase expected, const char* call);
// That this rank is part of its own view.
int check_in_view(const eep_peer_table& table, const char* call);

int check_dispatch_send(const eep_shape& shape, const eep_dispatch_send_args& args);
int check_dispatch_recv(const eep_shape& shape, const eep_dispatch_recv_args& args);
int check_combine_send(const eep_shape& shape, const eep_combine_send_args& args);
int check_copies(uint32_t count, void* const* to, const void* const* from, const uint64_t* bytes);
int check_row_copies(uint32_t arrays, void* const* to, const void* const* from, const uint64_t* row_bytes,
                     uint64_t rows, const int64_t* to_rows, const int64_t* from_rows);
int check_page_copy(const eep_page_copy& copy, uint32_t count, const int64_t* pages);
int check_combine_recv(const eep_shape& shape, const eep_combine_recv_args& args, uint32_t dispatched_tokens);

}  // namespace eep

#endif  // EEP_COMMON_CHECKS_H_
