// Who takes part in a round, as a block sees it in shared memory.
#ifndef EEP_CUDA_MEMBERS_CUH_
#define EEP_CUDA_MEMBERS_CUH_

#include "cuda/device.cuh"

namespace eep {

struct Members {
  uint64_t epoch;
  uint64_t round;
  uint64_t deadline_ns;
  uint64_t active;
  uint64_t reachable;  // active, and not given up in this epoch: whom we write to and wait for
  uint64_t remote;     // active, and on another host; only kernels that ask for it know
  uint32_t slot[EEP_MAX_CUDA_RANKS];
  uint64_t region[EEP_MAX_CUDA_RANKS];
};

// Nothing: the membership is in memory. Its place among the kernel's parameters is then as good as free.
struct InMemory {};

// The same, where some ranks may be on other hosts.
struct AcrossHosts {};

// The membership as a kernel parameter: what a build without elasticity would have. Only the benchmark uses it.
struct FixedMembers {
  uint64_t epoch;
  uint64_t active;
  uint64_t deadline_ns;
  uint32_t slot[EEP_MAX_CUDA_RANKS];
  uint64_t region[EEP_MAX_CUDA_RANKS];
};

inline FixedMembers fixed_members(const eep_context& context) {
  FixedMembers fixed{context.table.epoch, 0, context.table.deadline_ns, {}, {}};
  for (uint32_t rank = 0; rank < context.table.max_ranks; ++rank) {
    const eep_peer& peer = context.table.peers[rank];
    fixed.active |= static_cast<uint64_t>(peer.active) << rank;
    fixed.slot[rank] = peer.slot;
    fixed.region[rank] = peer.region;
  }
  return fixed;
}

// What the peer table says of the ranks that a lane speaks for. Loads only: they are on their way together.
struct Entries {
  uint64_t epoch, deadline_ns;
  uint64_t region[2];
  uint4 entry[2];  // active, transport, incarnation, slot
};

// The host writes the table only when no kernel of ours runs, but for the deadline, which may change at any time. So it
// may be read before the kernel before this one is over.
__device__ inline Entries read_table(const Home& home) {
  const eep_peer_table& table = home.state->table;
  static_assert(offsetof(eep_peer, active) == 16 && offsetof(eep_peer, slot) == 28 && sizeof(eep_peer) % 16 == 0);
  Entries said{load_now(&table.epoch), load_now(&table.deadline_ns), {}, {}};
  for (uint32_t half = 0; half < 2; ++half) {
    const eep_peer& peer = table.peers[threadIdx.x % 32 + 32 * half];
    said.region[half] = load_now(&peer.region);
    said.entry[half] = load_shared_row(reinterpret_cast<const uint4*>(&peer.active));
  }
  return said;
}

// The prologue of a dispatch: checks what the table says, and counts the round. Every block does it for itself, which
// costs less than a launch of its own; one of them leaves the snapshot for the combine. Called by one full warp.
template <bool kAcrossHosts>
__device__ inline void read_members(const Home& home, uint32_t channel, const Entries& said, Members& members) {
  const ChannelState& last = home.state->channels[channel];
  const uint64_t last_epoch = load_now(&last.last_epoch), last_round = load_now(&last.last_round);
  const uint64_t dropped = load_now(&home.state->trouble.dropped);
  const uint32_t lane = threadIdx.x % 32;
  bool is_active[2], is_remote[2];
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = lane + 32 * half, incarnation = said.entry[half].z, slot = said.entry[half].w;
    is_remote[half] = said.entry[half].y == EEP_TRANSPORT_REMOTE;
    is_active[half] = rank < home.shape.max_ranks && said.entry[half].x;
    if (!is_active[half]) continue;
    // A table that was scribbled over must cost us a peer, not the process.
    if (!said.region[half] || slot != eep_slot_of(rank, incarnation, home.shape.max_ranks)) [[unlikely]] {
      note(&home.state->trouble, EEP_STATUS_BAD_TABLE);
      show_trouble(&home.state->trouble, home.page);
      is_active[half] = false;
      continue;
    }
    members.slot[rank] = slot;
    members.region[rank] = said.region[half];
  }
  const uint64_t active = vote(is_active[0], is_active[1]);
  if constexpr (kAcrossHosts) {
    const uint64_t remote = active & vote(is_remote[0], is_remote[1]);
    if (lane == 0) members.remote = remote;
  }
  if (lane == 0) {
    members.epoch = said.epoch;
    members.round = (last_epoch == said.epoch ? last_round : 0) + 1;
    members.deadline_ns = said.deadline_ns;
    members.active = active;
    members.reachable = active & ~dropped;
  }
  __syncwarp();
}

__device__ inline void read_members(const FixedMembers& fixed, uint64_t round, Members& members) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t rank = lane; rank < EEP_MAX_CUDA_RANKS; rank += 32) {
    members.slot[rank] = fixed.slot[rank];
    members.region[rank] = fixed.region[rank];
  }
  if (lane == 0) {
    members.epoch = fixed.epoch;
    members.round = round;
    members.deadline_ns = fixed.deadline_ns;
    members.active = members.reachable = fixed.active;
  }
}

// The ranks on other hosts, as the table has them. Called by one full warp.
__device__ inline uint64_t remote_ranks(const Home& home) {
  const eep_peer_table& table = home.state->table;
  const uint32_t lane = threadIdx.x % 32;
  const auto is_remote = [&](uint32_t rank) {
    return table.peers[rank].active && table.peers[rank].transport == EEP_TRANSPORT_REMOTE;
  };
  return vote(is_remote(lane), is_remote(lane + 32));
}

// The membership of the dispatch that this combine belongs to. Called by all threads, of which the last ones read it:
// the first warp may have something else to do.
template <uint32_t kThreads>
__device__ inline void read_snapshot(const Home& home, uint32_t channel, Members& members) {
  static_assert(kThreads >= EEP_MAX_CUDA_RANKS);
  const eep_snapshot& snapshot = home.state->channels[channel].snapshot;
  const uint32_t rank = threadIdx.x - (kThreads - EEP_MAX_CUDA_RANKS);
  if (rank < EEP_MAX_CUDA_RANKS) {
    members.slot[rank] = snapshot.slot[rank];
    members.region[rank] = snapshot.region[rank];
  }
  if (rank == 0) {
    members.epoch = snapshot.epoch;
    members.round = snapshot.round;
    members.deadline_ns = snapshot.deadline_ns;
    members.active = snapshot.active.words[0];
    members.reachable = snapshot.active.words[0] & ~home.state->trouble.dropped;
  }
  __syncthreads();
}

// The ranks that host an expert of a token, as one full warp: each lane brings one of its top-k, or -1.
__device__ inline uint64_t hosts_of(const Home& home, int64_t expert) {
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * home.shape.local_experts;
  uint64_t mine = 0;
  if (expert >= 0 && expert < limit) mine = rank_bit(home.local_experts.quotient(static_cast<uint32_t>(expert)));
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(mine));
  const uint32_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(mine >> 32));
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace eep

#endif  // EEP_CUDA_MEMBERS_CUH_
