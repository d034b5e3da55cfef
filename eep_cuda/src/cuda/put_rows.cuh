// Puts the rows of a dispatch into the inboxes of the ranks that they go to.
#ifndef EEP_CUDA_PUT_ROWS_CUH_
#define EEP_CUDA_PUT_ROWS_CUH_

#include "cuda/fp8.cuh"
#include "cuda/routing.cuh"

namespace eep {

// Which of its top-k experts this lane speaks for, loaded ahead of its use; -1 in lanes beyond top-k.
__device__ inline int64_t load_choice(const eep_dispatch_send_args& args, uint32_t token) {
  const uint32_t lane = threadIdx.x % 32;
  return lane < args.topk ? args.topk_idx[static_cast<uint64_t>(token) * args.topk + lane] : -1;
}

// The ranks into whose inboxes a token goes, as one full warp. Of those on other hosts one stands for all: a row has
// the same number everywhere, so one copy in the landing serves all links.
template <bool kAcrossHosts, bool kDirect, uint32_t kThreads>
__device__ inline uint64_t targets_of(const Home& home, const Members& members, const Share<kDirect, kThreads>& share,
                                      int64_t choice) {
  const uint64_t hosts = hosts_of(home, choice) & members.reachable & share.ranks();
  if constexpr (!kAcrossHosts) return hosts;
  const uint64_t remote = hosts & members.remote;
  return (hosts & ~remote) | (remote & (~remote + 1));
}

// The inbox in which a row for that target is put.
template <bool kAcrossHosts>
__device__ inline ChannelView inbox_for(const Home& home, const Members& members, uint32_t rank, uint32_t channel) {
  if constexpr (kAcrossHosts)
    if (members.remote >> rank & 1) return landing_channel(home, channel);
  return channel_at(home, members.region[rank], channel);
}

// Moves rows of 16-byte vectors as they are. Each warp takes `V` vectors a lane of one token, all loads in flight at
// once. `prepare` runs once, by all threads, while the first of them are on their way: before it, only one warp knows
// anything of the members.
template <uint32_t V, bool kExact, bool kAcrossHosts, bool kDirect, uint32_t kThreads, typename Prepare>
__device__ void put_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members, const Plan& plan,
                         const Share<kDirect, kThreads>& share, Prepare prepare) {
  const uint32_t lane = threadIdx.x % 32, vectors = home.shape.hidden * eep_element_bytes(args.x_type) / sizeof(uint4);
  const uint32_t items = share.tokens * plan.chunks.by;
  const uint64_t row_bytes = static_cast<uint64_t>(vectors) * sizeof(uint4);
  uint4 data[V];
  int64_t choice = -1;
  // Which token an item is of, and the first vector of this thread.
  const auto place_of = [&](uint32_t item) {
    const uint32_t number = plan.chunks.quotient(item);
    return uint2{share.token(number), (item - number * plan.chunks.by) * 32 * V + lane};
  };
  const auto load = [&](uint32_t item) {
    const auto [token, first] = place_of(item);
    const uint4* row = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(args.x) + token * row_bytes);
    choice = load_choice(args, token);
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
      if (kExact || first + i * 32 < vectors) data[i] = load_input(row + first + i * 32);
  };
  uint32_t item = share.first_item();
  if (item < items) load(item);
  prepare();
  const uint32_t own_slot = members.slot[home.rank];
  while (item < items) {
    const auto [token, first] = place_of(item);
    for (uint64_t hosts = targets_of<kAcrossHosts>(home, members, share, choice); hosts; hosts &= hosts - 1) {
      const ChannelView inbox = inbox_for<kAcrossHosts>(home, members, __ffsll(hosts) - 1, args.channel);
      uint4* to = reinterpret_cast<uint4*>(inbox.row(own_slot, token, row_bytes));
#pragma unroll
      for (uint32_t i = 0; i < V; ++i)
        if (kExact || first + i * 32 < vectors) store_row(to + first + i * 32, data[i]);
    }
    item += share.stride();
    if (item < items) load(item);
  }
}

// Encodes on the way: sixteen values a lane, eight lanes to a scale. Each warp takes `V` times 512 values of one token,
// encodes all of them in place, and then sends the same registers to one rank after the other. With `kAhead` the next
// item of the warp is on its way meanwhile. A usual number of tokens gives a warp one or two items; without that, all
// warps would first load, then encode, then store.
template <bool kF32, uint32_t V, bool kAhead, bool kAcrossHosts, bool kDirect, uint32_t kThreads, typename Prepare>
__device__ void put_quantized_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                                   const Plan& plan, const Share<kDirect, kThreads>& share, Prepare prepare) {
  constexpr uint32_t kValues = kEncodedAtOnce, kLanesPerGroup = EEP_SCALE_GROUP / kValues, kLoads = kF32 ? 4 : 2;
  constexpr uint32_t kGroups = 32 / kLanesPerGroup;  // that a warp encodes at once
  const uint32_t lane = threadIdx.x % 32, hidden = home.shape.hidden, units = hidden / kValues;
  const uint32_t items = share.tokens * plan.chunks.by;
  const bool power_of_two = args.wire_type != EEP_TYPE_FP8, as_exponent = args.wire_type == EEP_TYPE_FP8_UE8M0;
  uint4 raw[V][kLoads], next[kAhead ? V : 1][kLoads];
  int64_t choice = -1;
  // The last chunk of a token may be shorter. Each token begins with another one, so that no block gets them all.
  const auto first_unit = [&](uint32_t item) {
    return plan.chunks.rest(item + plan.chunks.quotient(plan.chunks.quotient(item))) * 32 * V;
  };
  const auto load = [&](uint32_t item, uint4(*to)[kLoads]) {
    const uint32_t token = share.token(plan.chunks.quotient(item)), first = first_unit(item) + lane;
    const uint4* row = static_cast<const uint4*>(args.x) + static_cast<uint64_t>(token) * units * kLoads;
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j)
        to[i][j] = first + i * 32 < units ? load_input(row + (first + i * 32) * kLoads + j) : make_uint4(0, 0, 0, 0);
  };
  const uint32_t stride = share.stride(), begin = share.first_item();
  if (begin < items) {
    choice = load_choice(args, share.token(plan.chunks.quotient(begin)));
    load(begin, raw);
  }
  if (kAhead && begin + stride < items) load(begin + stride, next);
  prepare();
  const uint32_t own_slot = members.slot[home.rank];
#pragma unroll 1
  for (uint32_t item = begin; item < items;) {
    const uint32_t token = share.token(plan.chunks.quotient(item)), first = first_unit(item);
    uint32_t scale_word = 0;  // of group `lane` of this chunk
#pragma unroll
    for (uint32_t i = 0; i < V; ++i) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(raw[i]);
      float largest = largest_of<kF32>(words);
#pragma unroll
      for (uint32_t step = kLanesPerGroup / 2; step; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const Scale scale = scale_for(largest, power_of_two);
      raw[i][0] = encode<kF32>(words, scale.inverse);
      const uint32_t word = as_exponent ? scale.exponent : __float_as_uint(scale.value);
      const uint32_t of_group = __shfl_sync(~0u, word, lane % kGroups * kLanesPerGroup);
      if (lane / kGroups == i) scale_word = of_group;
    }
    const uint32_t group = first / kLanesPerGroup + lane;
    const bool has_scale = lane < V * kGroups && group < units / kLanesPerGroup;
    for (uint64_t hosts = targets_of<kAcrossHosts>(home, members, share, choice); hosts; hosts &= hosts - 1) {
      const ChannelView inbox = inbox_for<kAcrossHosts>(home, members, __ffsll(hosts) - 1, args.channel);
      uint4* to = reinterpret_cast<uint4*>(inbox.row(own_slot, token, hidden)) + first + lane;
#pragma unroll
      for (uint32_t i = 0; i < V; ++i)
        if (first + lane + i * 32 < units) store_row(to + i * 32, raw[i][0]);
      uint8_t* scales = inbox.scales(own_slot, token);
      if (has_scale && as_exponent) scales[group] = static_cast<uint8_t>(scale_word);
      if (has_scale && !as_exponent) reinterpret_cast<uint32_t*>(scales)[group] = scale_word;
    }
    item += stride;
    if (item >= items) break;
    choice = load_choice(args, share.token(plan.chunks.quotient(item)));  // not needed before the values are encoded
    if constexpr (kAhead) {
#pragma unroll
      for (uint32_t i = 0; i < V; ++i)
#pragma unroll
        for (uint32_t j = 0; j < kLoads; ++j) raw[i][j] = next[i][j];
      if (item + stride < items) load(item + stride, next);
    } else {
      load(item, raw);
    }
  }
}

}  // namespace eep

#endif  // EEP_CUDA_PUT_ROWS_CUH_
