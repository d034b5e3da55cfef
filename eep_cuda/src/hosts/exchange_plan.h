// What of a message goes where: the areas that two ranks register for each other, and the puts of a dispatch or a
// combine. Pure: it reads memory and sends nothing.
#ifndef EEP_HOSTS_EXCHANGE_PLAN_H_
#define EEP_HOSTS_EXCHANGE_PLAN_H_

#include <vector>

#include "common/region_views.h"
#include "hosts/message.h"

namespace eep::hosts {

// Both ends number their areas alike: those of channel 0 first, and after the channels one for all lanes.
enum AreaKind : uint32_t { kIndices, kWeights, kRows, kOutbox, kScales, kAreaKinds };

// One pair of ranks, as this one sees it.
struct Pair {
  const eep_shape& shape;
  const eep_region_layout& at;
  uint8_t* region;  // ours
  uint8_t* mirror;  // of the peer's
  uint32_t own_rank, own_slot, peer_rank, peer_slot;

  ChannelView own(uint32_t channel) const { return {shape, at, region, channel}; }
  ChannelView mirrored(uint32_t channel) const { return {shape, at, mirror, channel}; }
  uint32_t area(AreaKind kind, uint32_t channel) const { return channel * kinds() + kind; }
  // Rows of fewer values than share a scale have none.
  uint32_t kinds() const { return at.scale_bytes ? kAreaKinds : kScales; }
  uint32_t lane_area() const { return shape.channels * kinds(); }
};

// What the peer may write: its slot of our region, the part of its mirror from which we pull, and the lanes of its
// mirror, which stand for its own.
std::vector<eep_area> areas_of(const Pair& pair);

// Tokens `begin` to `end` of a dispatch.
struct Stretch {
  uint32_t begin, end;
};

// Rows of a dispatch that a kernel has written, before it tells of them: those of the tokens before `end`.
struct RowOffer {
  uint32_t channel;
  uint64_t round;  // the flag, without its count
  uint64_t envelope;
  uint32_t end;
};

// Those of `rows` that go to the peers with these mirrors.
struct RemoteRows {
  RowOffer rows;
  std::vector<const uint8_t*> mirrors;
};

// Rows that our kernel has written for a dispatch with that envelope: in our own inbox, where they serve every peer.
// The routing in the mirror says which of them the peer wants.
void plan_rows(const Pair& pair, uint32_t channel, uint64_t envelope, Stretch tokens, std::vector<Put>& puts);

// What our kernel has written for a dispatch whose flag and envelope are these: routing in the mirror, and the rows
// from token `first` on.
void plan_dispatch(const Pair& pair, uint32_t channel, uint64_t flag, uint64_t envelope, uint32_t first,
                   std::vector<Put>& puts);

// The rows of our outbox that the peer waits for after it dispatched `count` tokens.
void plan_combine(const Pair& pair, uint32_t channel, uint32_t count, std::vector<Put>& puts);

}  // namespace eep::hosts

#endif  // EEP_HOSTS_EXCHANGE_PLAN_H_
