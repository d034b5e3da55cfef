// Lanes: which group each of them serves, where its things lie in a region, and where the other members have theirs.
#ifndef EEP_CPU_LANES_H_
#define EEP_CPU_LANES_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/rank_sets.h"
#include "eep/eep.h"

namespace eep {

// What this rank remembers of a lane between calls. The three parts belong to different threads and know nothing of
// each other; each counts from one again when it finds the table in another epoch. Members do that one after the other,
// so each also remembers what a slower member may still need of the epoch before.
struct Lane {
  static constexpr uint32_t kParts = 3;
  eep_group group;  // its id is 0 while the lane is free; guarded by Lanes::mutex
  uint64_t closed;  // after how many others it was closed last; 0 if it never was

  struct Calls {
    uint64_t epoch;
    uint64_t round;   // the last that was entered
    uint64_t half;    // of our outbox, that it used: 0 or 1. They alternate for ever, whatever the epoch
    RankSet entered;  // the members known to have entered it
    RankSet active;   // the members of this epoch
    bool told_all;    // whether each of them was told of every round
    // Members that may still be in an earlier epoch, before its last round, and read what our next round overwrites.
    RankSet readers;
    uint64_t read_epoch, read_round;
    RankSet known;                      // whose lane is known
    std::vector<uint8_t> lane_of;       // by rank
    std::vector<uint32_t> incarnation;  // by rank
  } calls[kParts];  // by the part of the lane that they use: the first, but for calls over several hosts
  struct Stream {
    uint64_t epoch;
    uint64_t sequence;  // of the last cell
    uint64_t before;    // flag of the last cell of an earlier epoch, while it may be unread; 0 for none
    uint32_t lane;      // at the destination
    uint32_t incarnation;
  };
  std::vector<Stream> sent, received;  // by rank
};

struct Lanes {
  std::mutex mutex;
  std::unique_ptr<Lane[]> lane;  // [shape.lanes]
  uint64_t closings = 0;
};

// A group as one call sees it. Arrays are by rank, and only filled for active members.
struct Members {
  uint64_t group;
  uint64_t epoch;
  RankSet active;  // those of its ranks that are in the view
  RankSet remote;  // those of these that are on other hosts
  uint32_t me;
  uint32_t lane;
  uint32_t size;
  uint32_t ranks[EEP_MAX_RANKS];     // all, in the order of the group: the only one that is not by rank
  uint32_t position[EEP_MAX_RANKS];  // in that order; of members that are not active, too
  uint32_t place[EEP_MAX_RANKS];     // the same, among active members
  uint64_t host[EEP_MAX_RANKS];      // which host a rank is on
  uint32_t slot[EEP_MAX_RANKS];
  uint32_t incarnation[EEP_MAX_RANKS];
  uint8_t* region[EEP_MAX_RANKS];
  eep_control_page* control[EEP_MAX_RANKS];  // at which it is told that there is something for it
  eep_control_page* page[EEP_MAX_RANKS];     // in which it says what it is up to: the same, but for a remote one
};

// Calls `visit(position, rank)` for those of `ranks` that are members, in the order of the group.
template <typename Visit>
void in_order(const Members& members, const RankSet& ranks, Visit visit) {
  for (uint32_t position = 0; position < members.size; ++position)
    if (has(ranks, members.ranks[position])) visit(position, members.ranks[position]);
}

// Refuses a lane that does not exist or serves no group, and a rank that is not in its own view.
int take_members(eep_context& context, uint32_t lane, const char* call, Members& members);

// The lane at which `rank` serves the group, or -1 while it does not.
int find_lane(const Members& members, uint32_t rank, uint32_t lanes);
// The same, or the lane at which it has served the group in this epoch: what it owed is still there.
int find_lane_to_read(const Members& members, uint32_t rank, uint32_t lanes);

// Before a wait for the lane of a rank on another host, to which nothing was written yet: its proxy must know that the
// end of the link is to end the wait.
void knock(const Members& members, const RankSet& ranks);

// Those of `ranks` that say of themselves that they left, or that they left the group.
RankSet left_among(const Members& members, const RankSet& ranks, uint32_t lanes);

}  // namespace eep

#endif  // EEP_CPU_LANES_H_
