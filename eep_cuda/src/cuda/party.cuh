// Who takes part in a round of a collective, as a block sees it.
#ifndef EEP_CUDA_PARTY_CUH_
#define EEP_CUDA_PARTY_CUH_

#include "cuda/device.cuh"

namespace eep {

constexpr uint32_t kLaneThreads = 512;

__device__ inline PartView part_at(const Home& home, uint8_t* base) { return {home.shape, home.at, base}; }

// Those of the members that are on other hosts: nothing is known of them, and nothing costs anything, in kernels of
// ranks that have no landing.
template <bool kAcrossHosts>
struct FarMembers {
  __device__ static constexpr bool is_remote(uint32_t) { return false; }
};
template <>
struct FarMembers<true> {
  uint64_t remote;   // by rank
  uint8_t* landing;  // our part in our own lane, as it is in the landing
  __device__ bool is_remote(uint32_t rank) const { return remote >> rank & 1; }
};

// Who meets, as a block sees it in shared memory. A *place* counts the members that are in the view, in group order.
template <bool kAcrossHosts>
struct Party : FarMembers<kAcrossHosts> {
  uint64_t epoch, round, deadline_ns, group;
  uint64_t active;    // the members in the view, by rank: what shares are counted by, the same on all of them
  uint64_t present;   // those whose part is taken: this rank, and members that arrived with the same call
  uint64_t largest;   // the largest number of bytes that a member named in the last meet()
  uint32_t count;     // of active
  uint32_t own;       // our place
  uint32_t half;      // of our outbox, in this round
  bool has_left_out;  // a member in the view was not told of every round of this epoch
  uint32_t rank[EEP_MAX_CUDA_RANKS];      // by place
  uint32_t position[EEP_MAX_CUDA_RANKS];  // by place: the position in the group, by which a caller gives its blocks
  uint32_t slot[EEP_MAX_CUDA_RANKS];      // by rank
  uint32_t half_of[EEP_MAX_CUDA_RANKS];   // by rank: which half of its outbox holds this round
  uint8_t* part[EEP_MAX_CUDA_RANKS];      // by rank: our part in the lane that it has for this group

  __device__ bool has(uint32_t rank_) const { return present >> rank_ & 1; }
};

// What a member says of a round, beside its flag.
struct Statement {
  uint64_t call;
  uint64_t bytes;
  uint64_t taken;  // whose parts went into what its half holds; shares are counted by party.active
  bool may_differ_in_bytes;
};

}  // namespace eep

#endif  // EEP_CUDA_PARTY_CUH_
