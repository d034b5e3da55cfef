// Ranks of one process that share lanes.
#ifndef EEP_TEST_GROUP_H_
#define EEP_TEST_GROUP_H_

#include <cstring>
#include <memory>
#include <string>

#include "common/rank_sets.h"
#include "eep/eep.h"
#include "require.h"

namespace eep_test {

// Some of the first 64 ranks.
inline eep_rank_set first_ranks(uint64_t mask) { return {{mask}}; }

inline void suspect(eep_control_page& page, uint64_t mask) {
  const eep_rank_set ranks = first_ranks(mask);
  eep_control_suspect(&page, &ranks);
}

struct Ranks {
  struct Rank {
    std::unique_ptr<uint64_t[]> region;
    eep_control_page control{};
    eep_context* context = nullptr;
    uint32_t lane = 0;
  };
  const uint32_t count;
  eep_shape shape{};
  eep_region_layout at{};
  std::vector<Rank> ranks;

  explicit Ranks(uint32_t count, uint32_t lane_bytes = 8192, uint32_t pipe_bytes = 256, uint32_t lane_parts = 1)
      : count(count), ranks(count) {
    shape.max_ranks = count;
    shape.lanes = 3;
    shape.lane_parts = lane_parts;
    shape.lane_bytes = lane_bytes;
    shape.pipe_bytes = pipe_bytes;
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    for (uint32_t rank = 0; rank < count; ++rank) {
      ranks[rank].region = std::make_unique<uint64_t[]>(at.total_bytes / sizeof(uint64_t));
      REQUIRE(eep_create(&shape, rank, ranks[rank].region.get(), &ranks[rank].control, &ranks[rank].context) == EEP_OK);
    }
    for (uint32_t rank = 0; rank < count; ++rank) show(rank, 1, all_ranks());
  }
  ~Ranks() {
    for (Rank& rank : ranks) eep_destroy(rank.context);
  }

  eep_rank_set all_ranks() const {
    eep_rank_set all{};
    for (uint32_t rank = 0; rank < count; ++rank) eep::add(all, rank);
    return all;
  }

  void show(uint32_t rank, uint64_t epoch, uint64_t mask) { show(rank, epoch, first_ranks(mask)); }
  void show(uint32_t rank, uint64_t epoch, const eep_rank_set& active) {
    eep_peer_table* table = eep_table(ranks[rank].context);
    for (uint32_t peer = 0; peer < count; ++peer) {
      eep_peer& entry = table->peers[peer];
      entry.active = eep::has(active, peer);
      entry.region = reinterpret_cast<uint64_t>(ranks[peer].region.get());
      entry.control = reinterpret_cast<uint64_t>(&ranks[peer].control);
      entry.slot = eep_slot_of(peer, 0, count);
    }
    table->deadline_ns = 60 * kSecond;
    table->epoch = epoch;
    REQUIRE(eep_publish_table(ranks[rank].context) == EEP_OK);
  }

  uint32_t open(uint32_t rank, uint64_t id, const std::vector<uint32_t>& members) {
    eep_group group{};
    group.id = id;
    group.size = static_cast<uint32_t>(members.size());
    for (size_t i = 0; i < members.size(); ++i) group.ranks[i] = members[i];
    REQUIRE(eep_lane_open(ranks[rank].context, &group, &ranks[rank].lane) == EEP_OK);
    return ranks[rank].lane;
  }
  // All ranks, last one first: the order of a group need not be that of its ranks.
  std::vector<uint32_t> backwards() const {
    std::vector<uint32_t> members(count);
    for (uint32_t i = 0; i < count; ++i) members[i] = count - 1 - i;
    return members;
  }
  uint64_t status(uint32_t rank) { return __atomic_load_n(&ranks[rank].control.status, __ATOMIC_ACQUIRE); }
};

inline bool last_error_says(const char* words) {
  const bool says = std::string(eep_last_error()).find(words) != std::string::npos;
  if (!says) std::fprintf(stderr, "the last error was: %s\n", eep_last_error());
  return says;
}

}  // namespace eep_test

#endif  // EEP_TEST_GROUP_H_
