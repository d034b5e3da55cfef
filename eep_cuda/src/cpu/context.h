// What a buffer is on the inside.
#ifndef EEP_CPU_CONTEXT_H_
#define EEP_CPU_CONTEXT_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "common/checks.h"
#include "common/control.h"
#include "common/rank_sets.h"
#include "common/region_views.h"
#include "common/shared_words.h"
#include "cpu/lanes.h"
#include "eep/eep.h"

struct eep_context {
  eep_shape shape;
  eep_region_layout at;
  uint8_t* region;
  eep_control_page* control;
  eep_peer_table table;
  eep_snapshot snapshots[EEP_MAX_CHANNELS];
  std::unique_ptr<uint8_t[]> row_scratch[EEP_MAX_CHANNELS];  // one encoded row and its scales
  uint64_t barrier_epoch;
  uint64_t barrier_round;   // the last that was entered
  uint64_t barrier_before;  // flag of the last one of the epoch before
  eep::Lanes lanes;
  std::atomic<uint32_t> pokes;

  eep::ChannelView own(uint32_t channel) const { return {shape, at, region, channel}; }
  eep::ChannelView of_peer(const eep_snapshot& snapshot, uint32_t rank, uint32_t channel) const {
    return {shape, at, reinterpret_cast<uint8_t*>(snapshot.region[rank]), channel};
  }
  eep::Turn turn(uint32_t channel) const {
    const eep_snapshot& snapshot = snapshots[channel < EEP_MAX_CHANNELS ? channel : 0];
    return {snapshot.phase, snapshot.epoch, table.epoch};
  }
  // Of the rows that this rank has in the round; nothing before the first.
  uint64_t round_bytes(uint32_t channel) const {
    return uint64_t{snapshots[channel < EEP_MAX_CHANNELS ? channel : 0].tokens} * at.outbox_row_bytes;
  }
  uint32_t rank_of_expert(int64_t expert) const { return static_cast<uint32_t>(expert / shape.local_experts); }
};

namespace eep {

// The one-step prologue: copies the table to the channel's snapshot and counts the round.
void begin_round(eep_context& context, uint32_t channel);
// Fills the membership part of a snapshot from the table, skipping entries that contradict themselves.
void take_snapshot(eep_context& context, eep_snapshot& snapshot);
// Whether the epoch of this round is over; if so the round takes no further part in anything.
bool leave_if_revoked(eep_context& context, eep_snapshot& snapshot);
// Checks that every expert exists.
int check_experts(const eep_context& context, const int64_t* topk_idx, uint32_t tokens, uint32_t topk);

// Ranks that are not waited for again, nor written to, in this epoch.
RankSet given_up(const eep_control_page& page);
void report(eep_control_page& page, eep_status why);

}  // namespace eep

#endif  // EEP_CPU_CONTEXT_H_
