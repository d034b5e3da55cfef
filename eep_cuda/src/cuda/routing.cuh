// The routing metadata of a dispatch: what a source tells of its tokens, and what a destination makes of it.
#ifndef EEP_CUDA_ROUTING_CUH_
#define EEP_CUDA_ROUTING_CUH_

#include "cuda/members.cuh"

namespace eep {

constexpr uint32_t kDispatchThreads = 1024;

// ---- at the source ----

// One of the choices that a thread tells the others, loaded ahead of its use.
struct Choice {
  int64_t expert;
  float weight;
};

__device__ inline Choice load_routing(const Home& home, const eep_dispatch_send_args& args, uint32_t i) {
  const uint32_t per_rank = args.tokens * args.topk;
  if (i >= home.shape.max_ranks * per_rank) return {-1, 0.0f};
  return {args.topk_idx[i % per_rank], args.topk_weights ? args.topk_weights[i % per_rank] : 1.0f};
}

__device__ inline uint32_t first_choice() { return blockIdx.x * kDispatchThreads + threadIdx.x; }

// Tells every reachable rank which of its experts each token wants. `next` is this thread's first choice.
__device__ inline void put_routing(const Home& home, const eep_dispatch_send_args& args, const Members& members, Choice next) {
  const uint32_t per_rank = args.tokens * args.topk, experts = home.shape.local_experts, stride = gridDim.x * kDispatchThreads;
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * experts;
  bool misrouted = false;
  for (uint32_t i = first_choice(); i < home.shape.max_ranks * per_rank; i += stride) {
    const uint32_t rank = i / per_rank, choice = i % per_rank;
    const auto [expert, weight] = next;
    next = load_routing(home, args, i + stride);
    if (!(members.reachable >> rank & 1)) continue;
    const bool known = expert >= 0 && expert < limit;
    const uint32_t host = known ? static_cast<uint32_t>(expert) / experts : EEP_MAX_CUDA_RANKS;
    misrouted |= expert < -1 || expert >= limit || (known && !(members.active >> host & 1));
    const bool here = host == rank;
    const uint32_t slot = members.slot[home.rank], token = choice / args.topk, k = choice % args.topk;
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
// nothing; when the flags are here, it looks only at the chunks that have tokens.

constexpr uint32_t kChunk = kDispatchThreads;  // places

__device__ inline void clear_routing(const Home& home, const eep_dispatch_recv_args& args) {
  constexpr uint32_t kVectors = kChunk / 4, kAtOnce = kDispatchThreads / kVectors;
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
