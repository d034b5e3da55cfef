// The routing metadata of a dispatch: what a source tells of its tokens, and what a destination makes of it.
#ifndef EEP_CUDA_ROUTING_CUH_
#define EEP_CUDA_ROUTING_CUH_

#include "cuda/members.cuh"

namespace eep {

// How many blocks send to each rank directly; 0 if they are too few, or the ranks too many.
__host__ __device__ inline uint32_t pieces_of(const Home& home, uint32_t blocks) {
  if (home.shape.max_ranks > 32 / EEP_MAX_PIECES) return 0;
  const uint32_t pieces = blocks / home.shape.max_ranks;
  return pieces < EEP_MAX_PIECES ? pieces : EEP_MAX_PIECES;
}

// What a launch says of a dispatch, so that no kernel has to divide for it.
struct Plan {
  // at the source
  Divider topk;          // of the tokens that are sent
  Divider choices;       // of all of these tokens
  Divider chunks;        // in which warps take a row
  Divider pieces;        // of a message to one rank
  uint32_t vectors = 0;  // of 16 bytes, that a thread has of a chunk
  // at the destination
  Divider received_topk;  // of the tokens that are received
  Divider places;         // for choices, in a slot
};

// How many vectors of a row a thread takes at once. Rather so that none is left over.
inline uint32_t vectors_at_once(uint32_t vectors) {
  return vectors % (32 * 8) == 0 ? 8 : vectors % (32 * 7) == 0 ? 7 : 4;
}

// Blocks in the order in which they divide work that is not of any one rank.
__device__ inline uint32_t block_number() { return blockIdx.y * gridDim.x + blockIdx.x; }
__device__ inline uint32_t block_count() { return gridDim.y * gridDim.x; }

// ---- at the source ----

// Which tokens a block sends, and to which ranks. `kThreads` is how many threads a block has.
//
// In one piece, every block sends some parts of all tokens to all ranks. Neighbouring parts go to different blocks, so
// that few tokens still use all of them. Directly, a block sends every so many tokens, to one rank, and nothing else:
// so it can tell that rank by itself when they are there. Then blocks are numbered by rank, and by piece.
template <bool kDirect, uint32_t kThreads>
struct Share {
  uint32_t pieces, tokens;  // of this block

  __device__ Share(const eep_dispatch_send_args& args, const Plan& plan)
      : pieces(kDirect ? gridDim.y : 1),
        tokens(!kDirect                ? args.tokens
               : piece() < args.tokens ? plan.pieces.quotient(args.tokens - piece() - 1) + 1
                                       : 0) {}
  __device__ uint32_t rank() const { return blockIdx.x; }
  __device__ uint32_t piece() const { return blockIdx.y; }
  __device__ uint64_t ranks() const { return kDirect ? rank_bit(rank()) : ~uint64_t{0}; }
  __device__ uint32_t token(uint32_t number) const { return kDirect ? piece() + number * pieces : number; }
  __device__ uint32_t first_item() const {
    return kDirect ? threadIdx.x / 32 : threadIdx.x / 32 * gridDim.x + blockIdx.x;
  }
  __device__ uint32_t stride() const { return (kDirect ? 1 : gridDim.x) * (kThreads / 32); }
};

// One of the choices that a thread tells the others, loaded ahead of its use.
struct Choice {
  int64_t expert;
  float weight;
};

template <bool kDirect, uint32_t kThreads>
__device__ inline Choice load_routing(const Home& home, const eep_dispatch_send_args& args, const Plan& plan,
                                      const Share<kDirect, kThreads>& share, uint32_t i) {
  const uint32_t per_rank = share.tokens * args.topk;
  if (i >= (kDirect ? 1 : home.shape.max_ranks) * per_rank) return {-1, 0.0f};
  const uint32_t choice = kDirect ? i : plan.choices.rest(i), number = plan.topk.quotient(choice);
  const uint32_t place = choice + (share.token(number) - number) * args.topk;
  return {args.topk_idx[place], args.topk_weights ? args.topk_weights[place] : 1.0f};
}

// Directly, the last warps begin: of few tokens they have no rows to move.
template <bool kDirect, uint32_t kThreads>
__device__ inline uint32_t first_choice() {
  return kDirect ? (kThreads - 32 - threadIdx.x / 32 * 32) + threadIdx.x % 32 : blockIdx.x * kThreads + threadIdx.x;
}

// Tells every reachable rank of the share which of its experts each token wants. `next` is this thread's first choice.
template <bool kDirect, uint32_t kThreads>
__device__ inline void put_routing(const Home& home, const eep_dispatch_send_args& args, const Plan& plan,
                                   const Members& members, const Share<kDirect, kThreads>& share, Choice next) {
  const uint32_t per_rank = share.tokens * args.topk;
  const uint32_t stride = (kDirect ? 1 : gridDim.x) * kThreads;
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * home.shape.local_experts;
  bool misrouted = false;
#pragma unroll 1
  for (uint32_t i = first_choice<kDirect, kThreads>(); i < (kDirect ? 1 : home.shape.max_ranks) * per_rank;
       i += stride) {
    const uint32_t rank = kDirect ? share.rank() : plan.choices.quotient(i),
                   choice = i - (kDirect ? 0 : rank * per_rank);
    const auto [expert, weight] = next;
    next = load_routing(home, args, plan, share, i + stride);
    if (!(members.reachable >> rank & 1)) continue;
    const bool known = expert >= 0 && expert < limit;
    const uint32_t named = static_cast<uint32_t>(expert), of = home.local_experts.quotient(named);
    const uint32_t host = known ? of : EEP_MAX_CUDA_RANKS;
    misrouted |= expert < -1 || expert >= limit || (known && !(members.active >> host & 1));
    const bool here = host == rank;
    const uint32_t slot = members.slot[home.rank], number = plan.topk.quotient(choice), k = choice - number * args.topk;
    const uint32_t token = share.token(number);
    const ChannelView inbox = channel_at(home, members.region[rank], args.channel);
    inbox.topk_idx(slot, token)[k] = here ? static_cast<int32_t>(named - of * home.shape.local_experts) : -1;
    inbox.topk_weights(slot, token)[k] = here ? weight : 0.0f;
  }
  if (misrouted) [[unlikely]] {
    note(&home.state->trouble, EEP_STATUS_MISROUTED);
    show_trouble(&home.state->trouble, home.page);
  }
}

// ---- at the destination ----
// The caller's metadata has a place for every token that any slot has room for, and a place without a token says -1. A
// block owns every so many chunks of it. It clears them while the flags are still on their way, so that room costs
// nothing; when the flags are here, it looks only at the chunks that have tokens. A chunk has a place for each thread.

// Whether no thread has more than four neighbouring places to clear. If so, they are cleared before rows are put, while
// the first loads are on their way.
template <uint32_t kChunk>
__device__ inline bool is_cleared_at_once(const Home& home, const Plan& plan) {
  return home.at.slots * plan.places.by <= 4 * block_count() * kChunk;
}

template <uint32_t kChunk>
__device__ inline void clear_routing(const Home& home, const eep_dispatch_recv_args& args, const Plan& plan) {
  constexpr uint32_t kVectors = kChunk / 4, kAtOnce = 4;
  if (home.shape.layout != EEP_LAYOUT_RANK || !args.count) return;  // packing writes its own; a half does not receive
  const uint32_t places = home.at.slots * plan.places.by;
  const bool is_aligned = reinterpret_cast<uintptr_t>(args.topk_idx) % sizeof(int4) == 0;
#pragma unroll 1
  for (uint32_t chunk = block_number() + threadIdx.x / kVectors * block_count(); chunk * kChunk < places;
       chunk += kAtOnce * block_count()) {
    const uint32_t first = chunk * kChunk + threadIdx.x % kVectors * 4;
    if (is_aligned && first + 4 <= places) {
      *reinterpret_cast<int4*>(args.topk_idx + first) = make_int4(-1, -1, -1, -1);
    } else {
#pragma unroll 1
      for (uint32_t place = first; place < min(first + 4, places); ++place) args.topk_idx[place] = -1;
    }
  }
}

// Copies the metadata of the sources that arrived, checked. By blocks that have cleared theirs.
template <uint32_t kChunk>
__device__ inline void take_routing(const Home& home, const eep_dispatch_recv_args& args, const Plan& plan,
                                    const Members& members, const uint32_t* slot_counts) {
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t per_slot = plan.places.by, places = home.at.slots * per_slot;
  const uint32_t begin = block_number() * kChunk, stride = block_count() * kChunk;
  // Of the first place of a chunk: its slot, and how far in. Counted on from chunk to chunk.
  uint32_t slot = plan.places.quotient(begin), offset = begin - slot * per_slot;
#pragma unroll 1
  for (uint32_t first = begin; first < places; first += stride) {
    const bool is_in_one_slot = offset + kChunk <= per_slot;
    if (!is_in_one_slot || offset < slot_counts[slot] * args.topk) {
      const uint32_t place = first + threadIdx.x;
      const uint32_t of = is_in_one_slot ? slot : plan.places.quotient(place), within = place - of * per_slot;
      const uint32_t token = plan.received_topk.quotient(within), k = within - token * args.topk;
      if (place < places && token < slot_counts[of]) {
        int32_t expert = inbox.topk_idx(of, token)[k];
        args.topk_weights[place] = inbox.topk_weights(of, token)[k];
        if (expert < -1 || expert >= static_cast<int32_t>(home.shape.local_experts)) [[unlikely]] {
          note(&home.state->trouble, EEP_STATUS_CORRUPT, 0, rank_bit(of % home.shape.max_ranks));
          show_trouble(&home.state->trouble, home.page);
          expert = -1;
        }
        args.topk_idx[place] = expert;
      }
    }
    for (offset += stride; offset >= per_slot && slot < home.at.slots; offset -= per_slot) ++slot;
  }
}

}  // namespace eep

#endif  // EEP_CUDA_ROUTING_CUH_
