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

// ---- at the source ----

// Which tokens a block sends, and to which ranks. `kThreads` is how many threads a block has.
//
// In one piece, every block sends some parts of all tokens to all ranks. Neighbouring parts go to different blocks, so
// that few tokens still use all of them. Directly, a block sends every so many tokens, to one rank, and nothing else:
// so it can tell that rank by itself when they are there.
template <bool kDirect, uint32_t kThreads>
struct Share {
  uint32_t ranks_in_all, pieces, tokens;  // of this block

  __device__ Share(const Home& home, const eep_dispatch_send_args& args)
      : ranks_in_all(home.shape.max_ranks),
        pieces(kDirect ? pieces_of(home, gridDim.x) : 1),
        tokens(!kDirect                                    ? args.tokens
               : piece() < pieces && piece() < args.tokens ? (args.tokens - piece() - 1) / pieces + 1
                                                           : 0) {}
  __device__ uint32_t rank() const { return blockIdx.x % ranks_in_all; }
  __device__ uint32_t piece() const { return blockIdx.x / ranks_in_all; }
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
__device__ inline Choice load_routing(const Home& home, const eep_dispatch_send_args& args,
                                      const Share<kDirect, kThreads>& share, uint32_t i) {
  const uint32_t per_rank = share.tokens * args.topk;
  if (i >= (kDirect ? 1 : home.shape.max_ranks) * per_rank) return {-1, 0.0f};
  const uint32_t choice = i % per_rank, place = share.token(choice / args.topk) * args.topk + choice % args.topk;
  return {args.topk_idx[place], args.topk_weights ? args.topk_weights[place] : 1.0f};
}

template <bool kDirect, uint32_t kThreads>
__device__ inline uint32_t first_choice() {
  return (kDirect ? 0 : blockIdx.x * kThreads) + threadIdx.x;
}

// Tells every reachable rank of the share which of its experts each token wants. `next` is this thread's first choice.
template <bool kDirect, uint32_t kThreads>
__device__ inline void put_routing(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                                   const Share<kDirect, kThreads>& share, Choice next) {
  const uint32_t per_rank = share.tokens * args.topk, experts = home.shape.local_experts;
  const uint32_t stride = (kDirect ? 1 : gridDim.x) * kThreads;
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * experts;
  bool misrouted = false;
  for (uint32_t i = first_choice<kDirect, kThreads>(); i < (kDirect ? 1 : home.shape.max_ranks) * per_rank;
       i += stride) {
    const uint32_t rank = kDirect ? share.rank() : i / per_rank, choice = i % per_rank;
    const auto [expert, weight] = next;
    next = load_routing(home, args, share, i + stride);
    if (!(members.reachable >> rank & 1)) continue;
    const bool known = expert >= 0 && expert < limit;
    const uint32_t host = known ? static_cast<uint32_t>(expert) / experts : EEP_MAX_CUDA_RANKS;
    misrouted |= expert < -1 || expert >= limit || (known && !(members.active >> host & 1));
    const bool here = host == rank;
    const uint32_t slot = members.slot[home.rank], token = share.token(choice / args.topk), k = choice % args.topk;
    const ChannelView inbox = channel_at(home, members.region[rank], args.channel);
    inbox.topk_idx(slot, token)[k] = here ? static_cast<int32_t>(static_cast<uint32_t>(expert) % experts) : -1;
    inbox.topk_weights(slot, token)[k] = here ? weight : 0.0f;
  }
  if (misrouted) {
    note(&home.state->trouble, EEP_STATUS_MISROUTED);
    show_trouble(&home.state->trouble, home.page);
  }
}

// ---- at the destination ----
// The caller's metadata has a place for every token that any slot has room for, and a place without a token says -1. A
// block owns every so many chunks of it. It clears them while the flags are still on their way, so that room costs
// nothing; when the flags are here, it looks only at the chunks that have tokens. A chunk has a place for each thread.

template <uint32_t kChunk>
__device__ inline void clear_routing(const Home& home, const eep_dispatch_recv_args& args) {
  constexpr uint32_t kVectors = kChunk / 4, kAtOnce = 4;
  const uint32_t places = home.at.slots * home.shape.max_tokens * args.topk;
  const bool is_aligned = reinterpret_cast<uintptr_t>(args.topk_idx) % sizeof(int4) == 0;
  for (uint32_t chunk = blockIdx.x + threadIdx.x / kVectors * gridDim.x; chunk * kChunk < places;
       chunk += kAtOnce * gridDim.x) {
    const uint32_t first = chunk * kChunk + threadIdx.x % kVectors * 4;
    if (is_aligned && first + 4 <= places) {
      *reinterpret_cast<int4*>(args.topk_idx + first) = make_int4(-1, -1, -1, -1);
    } else {
      for (uint32_t place = first; place < min(first + 4, places); ++place) args.topk_idx[place] = -1;
    }
  }
}

// Copies the metadata of the sources that arrived, checked. By blocks that have cleared theirs.
template <uint32_t kChunk>
__device__ inline void take_routing(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                                    const uint32_t* slot_counts) {
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t per_slot = home.shape.max_tokens * args.topk, places = home.at.slots * per_slot;
  const uint32_t stride = gridDim.x * kChunk;
  // Of the first place of a chunk: its slot, and how far in. Counted on from chunk to chunk, since dividing takes long.
  uint32_t slot = blockIdx.x * kChunk / per_slot, offset = blockIdx.x * kChunk % per_slot;
  for (uint32_t first = blockIdx.x * kChunk; first < places; first += stride) {
    const bool is_in_one_slot = offset + kChunk <= per_slot;
    if (!is_in_one_slot || offset < slot_counts[slot] * args.topk) {
      const uint32_t place = first + threadIdx.x;
      const uint32_t of = is_in_one_slot ? slot : place / per_slot;
      const uint32_t token = (place - of * per_slot) / args.topk, k = place % args.topk;
      if (place < places && token < slot_counts[of]) {
        int32_t expert = inbox.topk_idx(of, token)[k];
        args.topk_weights[place] = inbox.topk_weights(of, token)[k];
        if (expert < -1 || expert >= static_cast<int32_t>(home.shape.local_experts)) {
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
