// The rounds of a collective: who takes part, telling them that our half of the outbox is filled, waiting for theirs.
//
// Each thread block owns one part of a lane and meets only the blocks of the same part on the other ranks; no block
// waits for another of its own grid. A round is: fill a half of our outbox; meet(); pull from the halves of the others;
// end_round(). No rank writes payload into the memory of another.
//
// Which half a round uses alternates for ever and is told with the flag, because rounds begin again at 1 in every
// epoch: a slow member may still be reading the last round of the old epoch when a fast one enters the first of the
// new. For the same reason that first flag also says that its sender is done with the old epoch; whether it left there
// what we want, the stamp of its other half tells. If not, that will never come, and the call ends as if revoked.
//
// A stamp is never taken for another's: it names epoch, round and group. If a member was not told of a round, the stamp
// of that round is gone before the member hears of its sender again.
#ifndef EEP_CUDA_LANES_CUH_
#define EEP_CUDA_LANES_CUH_

#include "cuda/lane_landing.cuh"

namespace eep {

__device__ inline uint64_t reduce_or(uint64_t value) {
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(value));
  const uint32_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(value >> 32));
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ inline void complain(const Home& home, eep_status why) {
  note(&home.state->trouble, why);
  show_trouble(&home.state->trouble, home.page);
}

// In the epoch before, a member was not told of a round whose stamp still stands. That member may still wait there. It
// was told of an earlier round that used the same half, and would take those words for this round: sums of a round that
// went on without it would pass as whole. So the stamps are cleared. Called by the thread that stamps; the fence before
// our next flags orders this before them, and that member looks at a stamp only after it has seen such a flag.
template <bool kAcrossHosts>
__device__ inline void forget_stamps(const Home& home, const Party<kAcrossHosts>& party) {
  const PartView own = part_at(home, party.part[home.rank]);
  for (uint32_t half = 0; half < 2; ++half) {
    store_pair_relaxed_sys(own.stamp(half), 0, 0);
    if constexpr (kAcrossHosts) stamp_landing(home, party, half, 0, 0);
  }
}

// Reads the table and the lane, as every kernel does at its start. Called by all threads. False: there is nothing to
// take part in, because this rank is not in its own view or the lane was closed under a graph.
template <bool kAcrossHosts>
__device__ inline bool join_party(const Home& home, uint32_t number, Party<kAcrossHosts>& party) {
  if (threadIdx.x < 32) {
    const eep_peer_table& table = home.state->table;
    const Lane& lane = home.state->lanes[number];
    const PartState& part = home.state->parts[number][blockIdx.x];
    const uint64_t dropped = home.state->trouble.dropped;
    bool is_met[2] = {false, false}, is_unmet = false;
    uint32_t rank_at[2] = {0, 0};
    uint64_t ranks = 0, remote_ranks = 0;
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t position = threadIdx.x + 32 * i;
      if (position >= lane.size) continue;
      const uint32_t rank = rank_at[i] = lane.rank[position];
      const eep_peer& peer = table.peers[rank];
      if (!peer.active) continue;
      // A table that was scribbled over must cost us a peer, not the process.
      if (!peer.region || peer.slot != eep_slot_of(rank, peer.incarnation, home.shape.max_ranks)) {
        complain(home, EEP_STATUS_BAD_TABLE);
        is_unmet = true;
      } else if (lane.lane_at[rank] >= home.shape.lanes) {
        complain(home, EEP_STATUS_MISMATCH);  // it has not opened the group
        is_unmet = true;
      } else {
        is_met[i] = true;
        ranks |= rank_bit(rank);
        if (kAcrossHosts && peer.transport == EEP_TRANSPORT_REMOTE) remote_ranks |= rank_bit(rank);
        party.slot[rank] = peer.slot;
        party.part[rank] = LaneView(home.shape, home.at, reinterpret_cast<uint8_t*>(peer.region), lane.lane_at[rank])
                               .part(blockIdx.x)
                               .base;
      }
    }
    const uint64_t positions = vote(is_met[0], is_met[1]);
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t position = threadIdx.x + 32 * i;
      const uint32_t place = __popcll(positions & (rank_bit(position) - 1));
      if (!is_met[i]) continue;
      party.rank[place] = rank_at[i];
      party.position[place] = position;
      if (rank_at[i] == home.rank) party.own = place;
    }
    const uint64_t active = reduce_or(ranks);
    if constexpr (kAcrossHosts) {
      const uint64_t remote = reduce_or(remote_ranks);
      if (threadIdx.x == 0) {
        party.remote = remote;
        party.landing = LaneView(home.shape, home.at, home.landing, number).part(blockIdx.x).base;
      }
    }
    const bool leaves_out = __any_sync(~0u, is_unmet);
    __syncwarp();  // one lane reads below what another wrote above
    if (threadIdx.x == 0) {
      const bool is_new_epoch = part.epoch != table.epoch;
      party.epoch = table.epoch;
      party.deadline_ns = table.deadline_ns;
      party.group = lane.group;
      party.round = (is_new_epoch ? 0 : part.round) + 1;
      party.half = part.half & 1;
      party.active = active;
      party.present = active & ~(dropped & ~rank_bit(home.rank));
      party.count = __popcll(active);
      party.has_left_out = leaves_out || (!is_new_epoch && part.has_left_out);
      if (!(active >> home.rank & 1))
        complain(home, EEP_STATUS_BAD_TABLE);
      else if (is_new_epoch && part.has_left_out)
        forget_stamps(home, party);
    }
  }
  __syncthreads();
  return party.active >> home.rank & 1;
}

// Whether that half of `rank` holds our round. Both words of a stamp are one load, so they belong together. In a mirror
// they are two: a proxy clears the stamp, names the group and then stamps.
template <bool kAcrossHosts>
__device__ inline bool is_held(const Home& home, const Party<kAcrossHosts>& party, uint32_t rank, uint32_t half) {
  const uint64_t* words = part_at(home, party.part[rank]).stamp(half);
  uint64_t stamp, group;
  if (party.is_remote(rank)) {
    if (load_acquire_sys(words + 1) != party.group) return false;
    stamp = load_acquire_sys(words);
    group = load_relaxed_sys(words + 1);
  } else {
    load_pair_acquire_sys(words, stamp, group);
  }
  return stamp == eep_flag_make(party.epoch, party.round, 0) && group == party.group;
}

// The same, for what happens once in an epoch: not worth registers that the copies need.
template <bool kAcrossHosts>
__device__ __noinline__ inline bool is_left_behind(const Home& home, const Party<kAcrossHosts>& party, uint32_t rank,
                                                   uint32_t half) {
  return is_held(home, party, rank, half);
}

// Where `rank` tells us of a round.
template <bool kAcrossHosts>
__device__ inline const eep_lane_mailbox* mailbox_of(const Home& home, const Party<kAcrossHosts>& party,
                                                     uint32_t rank) {
  if constexpr (kAcrossHosts)
    if (party.is_remote(rank)) return part_at(home, party.landing).mailbox(party.slot[rank]);
  return part_at(home, party.part[home.rank]).mailbox(party.slot[rank]);
}

// What a member says of our round, and the half in which it has its part of it, or one of these.
enum : uint32_t { kNotYet = 2, kNever = 3 };
struct Heard {
  uint32_t half;
  uint64_t call, bytes, members;
};
template <bool kAcrossHosts>
__device__ inline Heard hear(const Home& home, const Party<kAcrossHosts>& party, uint32_t rank) {
  const eep_lane_mailbox* box = mailbox_of(home, party, rank);
  const uint64_t flag = load_acquire_sys(&box->flag);
  const uint32_t told = flag & 1;
  const bool is_here = eep_flag_is(flag, party.epoch, party.round), is_newer = eep_flag_epoch(flag) > party.epoch;
  // A member that saw our flag of this round may be one ahead already, or in a new epoch.
  if (!is_here && !is_newer && !eep_flag_is(flag, party.epoch, party.round + 1)) return {kNotYet, 0, 0, 0};
  const uint32_t half = is_here ? told : 1 - told;
  // All loads before the first use: one trip to memory instead of one after the other.
  const uint64_t group = load_relaxed_sys(&box->group);
  const Heard heard{half, load_relaxed_sys(&box->call[half]), load_relaxed_sys(&box->bytes[half]),
                    load_relaxed_sys(&box->members[half])};
  if (group != party.group) return {kNotYet, 0, 0, 0};
  if (is_newer && !is_left_behind(home, party, rank, 1 - told)) return {kNever, 0, 0, 0};
  return heard;
}

// A member made another call than we did, or met other ranks. A loss or a revoke makes members meet other ranks, so
// where one is known it is the better reason.
template <bool kAcrossHosts>
__device__ inline void note_mismatch(const Home& home, const Party<kAcrossHosts>& party, bool is_other_call) {
  Trouble* trouble = &home.state->trouble;
  if (load_relaxed_sys(&home.page->revoked_epoch) >= party.epoch)
    note(trouble, EEP_STATUS_REVOKED);
  else if (is_other_call || !*static_cast<volatile uint64_t*>(&trouble->status))
    note(trouble, EEP_STATUS_MISMATCH);
}

// Called by all threads when our half is filled: tells the others and waits for theirs. Afterwards `party.present` are
// those whose half may be read. With `writes_next` the other half of our outbox may be written at once, before
// end_round().
template <bool kAcrossHosts>
__device__ inline void meet(const Home& home, Party<kAcrossHosts>& party, const Statement& said, const Reads& reads,
                            bool writes_next = false) {
  const PartView own = part_at(home, party.part[home.rank]);
  __syncthreads();
  if constexpr (kAcrossHosts) {
    carry_half(home, party, reads);
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    const uint64_t others = party.present & ~rank_bit(home.rank);
    const uint64_t stamp = eep_flag_make(party.epoch, party.round, 0);
    if (threadIdx.x == 0) {
      store_pair_relaxed_sys(own.stamp(party.half), stamp, party.group);
      if constexpr (kAcrossHosts) stamp_landing(home, party, party.half, stamp, party.group);
    }
    if constexpr (kAcrossHosts) write_letters(home, party, said, reads, others);
    for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32) {
      if (!(others >> rank & 1) || party.is_remote(rank)) continue;
      eep_lane_mailbox* box = part_at(home, party.part[rank]).mailbox(party.slot[home.rank]);
      store_relaxed_sys(&box->group, party.group);
      store_relaxed_sys(&box->call[party.half], said.call);
      store_relaxed_sys(&box->bytes[party.half], said.bytes);
      store_relaxed_sys(&box->members[party.half], said.taken);
    }
    __syncwarp();
    fence_sys();  // one fence releases the half, its stamp and what we say of it to all ranks
    for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32) {
      if (!(others >> rank & 1)) continue;
      const PartView theirs = part_at(home, party.part[rank]);
      uint64_t* flag = &theirs.mailbox(party.slot[home.rank])->flag;
      if (party.is_remote(rank)) flag = &letter_of(theirs, party.half).flag;
      store_relaxed_sys(flag, stamp | party.half);
    }

    const WaitFor wait{home.page, &home.state->trouble, party.epoch, party.deadline_ns,
                       EEP_STATUS_MISMATCH | EEP_STATUS_REVOKED};
    bool has_same_call[2] = {false, false}, has_same_ranks[2] = {false, false};
    uint64_t largest = said.bytes;
    const uint64_t arrived = wait_for(wait, others, [&](uint32_t rank) {
      const Heard heard = hear(home, party, rank);
      if (heard.half == kNever) note(&home.state->trouble, EEP_STATUS_REVOKED);  // the wait ends at its next glance
      if (heard.half > 1) return false;
      party.half_of[rank] = heard.half;
      const uint32_t i = rank / 32;
      has_same_call[i] = heard.call == said.call && (said.may_differ_in_bytes || heard.bytes == said.bytes);
      has_same_ranks[i] = heard.members == party.active;
      if (has_same_call[i]) largest = max(largest, heard.bytes);
      return true;
    });
    for (uint32_t step = 16; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const uint64_t called = arrived & vote(has_same_call[0], has_same_call[1]);
    const uint64_t agreed = called & vote(has_same_ranks[0], has_same_ranks[1]);
    if (threadIdx.x == 0) {
      party.half_of[home.rank] = party.half;
      party.largest = largest;
      party.present = agreed | rank_bit(home.rank);
      if (others != (party.active & ~rank_bit(home.rank))) party.has_left_out = true;
      if (agreed != arrived) note_mismatch(home, party, called != arrived);
      if (agreed != (party.active & ~rank_bit(home.rank))) show_trouble(&home.state->trouble, home.page);
    }
  }
  if (!writes_next) __syncthreads();
  // All have entered this round, so no member reads our other half any more. One that we have dropped may: it finds the
  // stamp gone. Done before that half is written again, in the shadow of the pulling where that is later.
  if (threadIdx.x == 0) {
    store_pair_relaxed_sys(own.stamp(1 - party.half), 0, 0);
    if constexpr (kAcrossHosts) stamp_landing(home, party, 1 - party.half, 0, 0);
    fence_sys();
  }
  if (writes_next) __syncthreads();
}

// Called by all threads when they have read what they need. A member that dropped us does not wait for that: its stamp
// tells whether it has written its half again meanwhile. No fence lies between, as in a combine: see check_stamps().
template <bool kAcrossHosts>
__device__ inline void end_round(const Home& home, Party<kAcrossHosts>& party) {
  __syncthreads();
  if (threadIdx.x < 32) {
    bool torn = false;
    for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
      if (rank != home.rank && party.has(rank)) torn |= !is_held(home, party, rank, party.half_of[rank]);
    if (__any_sync(~0u, torn) && threadIdx.x == 0) complain(home, EEP_STATUS_TORN);
    if (threadIdx.x == 0) {
      ++party.round;
      party.half ^= 1;
    }
  }
  __syncthreads();
}

// Called by all threads after the last round: the next call goes on from here.
template <bool kAcrossHosts>
__device__ inline void leave_party(const Home& home, uint32_t number, const Party<kAcrossHosts>& party) {
  if (threadIdx.x == 0)
    home.state->parts[number][blockIdx.x] = {party.epoch, party.round - 1, party.half, party.has_left_out};
}

// ---- shares: every payload is cut into one slice per block ----

struct Slice {
  uint64_t begin, bytes;
};
// What every block but the last ones gets: the same on all ranks, so that all of them make the same number of rounds.
__device__ inline uint64_t share_of(uint64_t bytes) { return eep_align_up((bytes + gridDim.x - 1) / gridDim.x, 128); }
__device__ inline Slice slice_of(uint64_t bytes) {
  const uint64_t begin = min(blockIdx.x * share_of(bytes), bytes);
  return {begin, min(share_of(bytes), bytes - begin)};
}
__device__ inline uint64_t rounds_for(uint64_t bytes, uint64_t capacity) {
  return max(uint64_t{1}, (share_of(bytes) + capacity - 1) / capacity);
}
// The piece of a slice that round `i` moves.
__device__ inline Slice piece_of(const Slice& slice, uint64_t i, uint64_t capacity) {
  const uint64_t begin = min(i * capacity, slice.bytes);
  return {slice.begin + begin, min(capacity, slice.bytes - begin)};
}

// ---- copies of a block, several at once ----

struct Copies {
  const uint8_t* from[EEP_MAX_CUDA_RANKS];
  uint8_t* to[EEP_MAX_CUDA_RANKS];
  uint64_t bytes[EEP_MAX_CUDA_RANKS];  // 0: nothing to do
};
struct Copy {
  const uint8_t* from;
  uint8_t* to;
  uint64_t bytes;
};

__device__ inline void copy_few(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  const bool by_words = ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes) & 3) == 0;
  for (uint32_t i = 0; i < bytes; i += by_words ? 4 : 1) {
    if (by_words)
      *reinterpret_cast<uint32_t*>(to + i) = *reinterpret_cast<const volatile uint32_t*>(from + i);
    else
      to[i] = *const_cast<const volatile uint8_t*>(from + i);
  }
}

// Called by all threads: makes the copies that `copy_at(i)` says for i < count, none larger than `most` bytes. Each
// thread has several 16-byte loads in flight, from whichever copies: few bytes from many ranks then cost one latency,
// not many.
template <typename CopyAt>
__device__ void run_copies(Copies& copies, uint32_t count, uint64_t most, CopyAt copy_at) {
  constexpr uint32_t kAtOnce = 4;
  __syncthreads();  // `copies` may still be in use
  if (threadIdx.x < count) {
    const Copy copy = copy_at(threadIdx.x);
    copies.from[threadIdx.x] = copy.from;
    copies.to[threadIdx.x] = copy.to;
    copies.bytes[threadIdx.x] = copy.from && copy.to && copy.from != copy.to ? copy.bytes : 0;
  }
  __syncthreads();
  const uint32_t vectors = static_cast<uint32_t>((most + sizeof(uint4) - 1) / sizeof(uint4));
  const uint64_t total = static_cast<uint64_t>(count) * vectors;
#pragma unroll 1
  for (uint64_t first = threadIdx.x; first < total; first += kAtOnce * kLaneThreads) {
    uint4 data[kAtOnce];
    uint4* to[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      to[j] = nullptr;
      const uint64_t item = first + j * kLaneThreads;
      if (item >= total) continue;
      const uint32_t i = static_cast<uint32_t>(item) / vectors;
      const uint64_t offset = static_cast<uint64_t>(static_cast<uint32_t>(item) % vectors) * sizeof(uint4);
      if (offset >= copies.bytes[i]) continue;
      const uint64_t left = copies.bytes[i] - offset;
      const uint8_t* source = copies.from[i] + offset;
      uint8_t* target = copies.to[i] + offset;
      const bool is_whole = left >= sizeof(uint4) &&
                            ((reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(target)) & 15) == 0;
      if (is_whole) {
        to[j] = reinterpret_cast<uint4*>(target);
        data[j] = load_shared_row(reinterpret_cast<const uint4*>(source));
      } else {
        copy_few(target, source, static_cast<uint32_t>(min(left, static_cast<uint64_t>(sizeof(uint4)))));
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j)
      if (to[j]) store_row(to[j], data[j]);
  }
}

}  // namespace eep

#endif  // EEP_CUDA_LANES_CUH_
