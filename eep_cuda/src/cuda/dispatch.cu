// Dispatch: put each token once into the inbox of every rank that hosts one of its experts, say so, and wait for the
// rest.
//
// Blocks put rows in parallel; the last one to finish sends the flags and settles which sources arrived. The others
// look for the flags themselves, which costs less than to be told; where one is missing or wrong, all act on the
// verdict of the one that settles. So a source is taken whole or not at all in every step that can be trusted. Rows are
// used where they lie; only the routing metadata is copied out, checked.
#include <type_traits>

#include "cuda/fp8.cuh"
#include "cuda/launch.h"
#include "cuda/routing.cuh"
#include "cuda/stopwatch.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = kDispatchThreads, kWarps = kThreads / 32;
enum Phases : uint32_t { kSend = 1, kReceive = 2 };

// ---- rows ----

// Neighbouring items go to different blocks, so that few tokens still use all of them.
__device__ inline uint32_t first_item() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

// Which of its top-k experts this lane speaks for, loaded ahead of its use; -1 in lanes beyond top-k.
__device__ inline int64_t load_choice(const eep_dispatch_send_args& args, uint32_t token) {
  const uint32_t lane = threadIdx.x % 32;
  return lane < args.topk ? args.topk_idx[static_cast<uint64_t>(token) * args.topk + lane] : -1;
}

// Moves rows of 16-byte vectors as they are. Each warp takes `V` vectors a lane of one token, all loads in flight at
// once. `prepare` runs once, by all threads, while the first of them are on their way: before it, only one warp knows
// anything of the members.
template <uint32_t V, bool kExact, typename Prepare>
__device__ void put_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                         Prepare prepare) {
  const uint32_t lane = threadIdx.x % 32, vectors = home.shape.hidden * eep_element_bytes(args.x_type) / sizeof(uint4);
  const uint32_t chunks = (vectors + 32 * V - 1) / (32 * V), items = args.tokens * chunks;
  const uint64_t row_bytes = static_cast<uint64_t>(vectors) * sizeof(uint4);
  uint4 data[V];
  int64_t choice = -1;
  const auto load = [&](uint32_t item) {
    const uint32_t token = item / chunks, first = item % chunks * 32 * V + lane;
    const uint4* row = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(args.x) + token * row_bytes);
    choice = load_choice(args, token);
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
      if (kExact || first + i * 32 < vectors) data[i] = load_input(row + first + i * 32);
  };
  uint32_t item = first_item();
  if (item < items) load(item);
  prepare();
  const uint32_t own_slot = members.slot[home.rank];
  while (item < items) {
    const uint32_t token = item / chunks, first = item % chunks * 32 * V + lane;
    for (uint64_t hosts = hosts_of(home, choice) & members.reachable; hosts; hosts &= hosts - 1) {
      const ChannelView inbox = channel_at(home, members.region[__ffsll(hosts) - 1], args.channel);
      uint4* to = reinterpret_cast<uint4*>(inbox.row(own_slot, token, row_bytes));
#pragma unroll
      for (uint32_t i = 0; i < V; ++i)
        if (kExact || first + i * 32 < vectors) store_row(to + first + i * 32, data[i]);
    }
    item += gridDim.x * kWarps;
    if (item < items) load(item);
  }
}

// Encodes on the way: sixteen values a lane, eight lanes to a scale. Each warp takes `V` times 512 values of one token,
// encodes all of them in place, and then sends the same registers to one rank after the other. With `kAhead` the next
// item of the warp is on its way meanwhile. A usual number of tokens gives a warp one or two items; without that, all
// warps would first load, then encode, then store.
template <bool kF32, uint32_t V, bool kAhead, typename Prepare>
__device__ void put_quantized_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                                   Prepare prepare) {
  constexpr uint32_t kValues = kEncodedAtOnce, kLanesPerGroup = EEP_SCALE_GROUP / kValues, kLoads = kF32 ? 4 : 2;
  constexpr uint32_t kGroups = 32 / kLanesPerGroup;  // that a warp encodes at once
  const uint32_t lane = threadIdx.x % 32, hidden = home.shape.hidden, units = hidden / kValues;
  const uint32_t chunks = (units + 32 * V - 1) / (32 * V), items = args.tokens * chunks;
  const bool power_of_two = args.wire_type != EEP_TYPE_FP8, as_exponent = args.wire_type == EEP_TYPE_FP8_UE8M0;
  uint4 raw[V][kLoads], next[kAhead ? V : 1][kLoads];
  int64_t choice = -1;
  // The last chunk of a token may be shorter. Each token begins with another one, so that no block gets them all.
  const auto first_unit = [&](uint32_t item) { return (item + item / chunks / chunks) % chunks * 32 * V; };
  const auto load = [&](uint32_t item, uint4(*to)[kLoads]) {
    const uint32_t token = item / chunks, first = first_unit(item) + lane;
    const uint4* row = static_cast<const uint4*>(args.x) + static_cast<uint64_t>(token) * units * kLoads;
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j)
        to[i][j] = first + i * 32 < units ? load_input(row + (first + i * 32) * kLoads + j) : make_uint4(0, 0, 0, 0);
  };
  const uint32_t stride = gridDim.x * kWarps;
  if (first_item() < items) {
    choice = load_choice(args, first_item() / chunks);
    load(first_item(), raw);
  }
  if (kAhead && first_item() + stride < items) load(first_item() + stride, next);
  prepare();
  const uint32_t own_slot = members.slot[home.rank];
#pragma unroll 1
  for (uint32_t item = first_item(); item < items;) {
    const uint32_t token = item / chunks, first = first_unit(item);
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
    for (uint64_t hosts = hosts_of(home, choice) & members.reachable; hosts; hosts &= hosts - 1) {
      const ChannelView inbox = channel_at(home, members.region[__ffsll(hosts) - 1], args.channel);
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
    choice = load_choice(args, item / chunks);  // not needed before the values are encoded
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

// ---- flags and the verdict, by one warp of the last block ----

__device__ void send_flags(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  const uint64_t flag = eep_flag_make(members.epoch, members.round, args.tokens);
  const uint64_t envelope = eep_envelope(args.wire_type, args.topk, home.shape.hidden);
  fence_sys();  // one fence releases all rows to all ranks
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (members.reachable >> rank & 1) {
      const ChannelView inbox = channel_at(home, members.region[rank], args.channel);
      store_pair_relaxed_sys(&inbox.mailbox(members.slot[home.rank])->dispatch_flag, flag, envelope);
    }
}

// What the combine of this round, and the receive half if it is launched apart, need to know.
__device__ void leave_snapshot(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  eep_snapshot& snapshot = home.state->channels[args.channel].snapshot;
  for (uint32_t rank = threadIdx.x; rank < EEP_MAX_CUDA_RANKS; rank += 32) {
    snapshot.slot[rank] = members.slot[rank];
    snapshot.region[rank] = members.region[rank];
  }
  if (threadIdx.x == 0) {
    snapshot.epoch = members.epoch;
    snapshot.round = members.round;
    snapshot.deadline_ns = members.deadline_ns;
    snapshot.active.words[0] = members.active;
    snapshot.tokens = args.tokens;
  }
  __syncwarp();
}

// What a source has said of this round so far.
struct Arrival {
  bool is_here, is_sound;
  uint32_t count;
};

__device__ inline Arrival look_for(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                                   uint32_t rank) {
  const ChannelView inbox = own_channel(home, args.channel);
  uint64_t flag, envelope;
  load_pair_acquire_sys(&inbox.mailbox(members.slot[rank])->dispatch_flag, flag, envelope);
  if (!eep_flag_is(flag, members.epoch, members.round)) return {false, false, 0};
  const uint32_t count = eep_flag_count(flag);
  return {true,
          count <= home.shape.max_tokens && envelope == eep_envelope(args.wire_type, args.topk, home.shape.hidden),
          count};
}

// Waits, and writes down which sources arrived, for this block, the combine and the caller. The other blocks need it
// only where something is wrong: close_sources() tells them.
__device__ void settle_sources(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                               uint32_t* slot_counts) {
  ChannelState& channel = home.state->channels[args.channel];
  Trouble* trouble = &home.state->trouble;
  uint32_t counts[2] = {0, 0};
  bool is_sound[2] = {false, false};
  const WaitFor wait{home.page, trouble, members.epoch, members.deadline_ns, 0};
  const uint64_t arrived = wait_for(wait, members.reachable, [&](uint32_t rank) {
    const Arrival arrival = look_for(home, args, members, rank);
    is_sound[rank / 32] = arrival.is_sound;
    if (arrival.is_sound) counts[rank / 32] = arrival.count;
    return arrival.is_here;
  });
  const uint64_t received = vote(is_sound[0], is_sound[1]);
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (rank >= home.shape.max_ranks) continue;
    if (is_sound[half]) slot_counts[members.slot[rank]] = counts[half];
    channel.snapshot.count[rank] = counts[half];
    args.count[rank] = static_cast<int32_t>(counts[half]);
  }
  if (threadIdx.x == 0) {
    channel.snapshot.received.words[0] = received;
    if (arrived != received) note(trouble, EEP_STATUS_CORRUPT, 0, arrived & ~received);
    if (received != members.active) show_trouble(trouble, home.page);
  }
  __syncwarp();
}

// Apart from settling, because the fence of the release takes as long as copying the metadata.
__device__ void close_sources(const Home& home, const eep_dispatch_recv_args& args, const Members& members) {
  if (threadIdx.x) return;
  const uint64_t round = eep_flag_make(members.epoch, members.round, 0);
  store_release_gpu(&home.state->channels[args.channel].verdict, round);
  // When this kernel is over the experts may write the outbox, and from now on it is of this round. A peer that we
  // dropped may still be reading the last round from it: it finds another stamp. No fence of our own: stamp and outbox
  // are both memory of this GPU, to which every reader comes through the same cache, and what writes the outbox is a
  // later kernel of the stream, before which the stores of this one are in that cache. With a fence, the last block would
  // wait for nothing but that fence.
  store_relaxed_sys(own_channel(home, args.channel).outbox_stamp(), round);
}

// The tokens of each slot, as one warp finds them by itself, or as the verdict says if not all is as it should be.
__device__ void count_tokens(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                             uint32_t* slot_counts) {
  ChannelState& channel = home.state->channels[args.channel];
  const uint64_t settled = eep_flag_make(members.epoch, members.round, 0);
  uint64_t sound = 0;
  uint32_t counts[2] = {0, 0};
  for (uint32_t looks = 1; sound != members.reachable; ++looks) {
    bool is_sound[2], is_wrong = false;
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t rank = threadIdx.x + 32 * half;
      is_sound[half] = sound >> rank & 1;
      if (is_sound[half] || !(members.reachable >> rank & 1)) continue;
      const Arrival arrival = look_for(home, args, members, rank);
      is_sound[half] = arrival.is_sound;
      counts[half] = arrival.count;
      is_wrong |= arrival.is_here && !arrival.is_sound;
    }
    sound = vote(is_sound[0], is_sound[1]);
    // The block that settles ends its own wait at the deadline, so that this one ends as well.
    const bool is_settled = looks % 32 == 0 && load_acquire_gpu(&channel.verdict) == settled;
    if (__any_sync(~0u, is_wrong || is_settled)) break;
  }
  if (sound != members.reachable) {
    while (load_acquire_gpu(&channel.verdict) != settled) {
    }
    sound = channel.snapshot.received.words[0];
    for (uint32_t half = 0; half < 2; ++half) counts[half] = channel.snapshot.count[threadIdx.x + 32 * half];
  }
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (sound >> rank & 1) slot_counts[members.slot[rank]] = counts[half];
  }
}

// `kEncodes` is for fp8: a kernel of its own leaves both kinds more registers. Where two kernels make one dispatch, both
// are told of both halves.
template <uint32_t kPhases, typename Membership, bool kEncodes, bool kStamped>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_send_args send,
                    const __grid_constant__ eep_dispatch_recv_args receive,
                    const __grid_constant__ Membership membership) {
  __shared__ Members members;
  __shared__ bool is_last;
  __shared__ uint32_t slot_counts[EEP_MAX_CUDA_RANKS * EEP_INCARNATIONS];
  const uint32_t number = kPhases & kSend ? send.channel : receive.channel;
  ChannelState& channel = home.state->channels[number];
  await_kernel_before();
  const Stopwatch<kStamped> stopwatch(home);
  for (uint32_t slot = threadIdx.x; slot < home.at.slots; slot += kThreads) slot_counts[slot] = 0;
  if constexpr (kPhases & kSend) {
    // One warp reads the table before it loads rows, so that this does not queue behind the rows of all the others.
    if (threadIdx.x < 32) {
      if constexpr (std::is_same_v<Membership, FixedMembers>)
        read_members(membership, channel, members);
      else
        read_members(home, number, members);
    }
    const Choice first = load_routing(home, send, first_choice());
    const auto prepare = [&] {
      __syncthreads();
      stopwatch.stamp(kMembersRead);
      put_routing(home, send, members, first);
    };
    const uint32_t vectors = home.shape.hidden * eep_element_bytes(send.x_type) / sizeof(uint4);
    if constexpr (kEncodes) {
      if (send.x_type == EEP_TYPE_F32)
        put_quantized_rows<true, 2, false>(home, send, members, prepare);
      else
        put_quantized_rows<false, 2, true>(home, send, members, prepare);
    } else if (vectors % (32 * 8) == 0) {
      put_rows<8, true>(home, send, members, prepare);
    } else if (vectors % (32 * 7) == 0) {
      put_rows<7, true>(home, send, members, prepare);
    } else {
      put_rows<4, false>(home, send, members, prepare);
    }
    __syncthreads();
    if (kPhases == kSend && receive.count) let_next_kernel_begin();
    stopwatch.stamp(kRowsIssued);
    if (threadIdx.x == 0) {
      __threadfence();  // the rows of this block before the count; the last block releases all of them to the others
      is_last = atomicAdd(&channel.senders_done, 1) == gridDim.x - 1;
      if (is_last) channel.senders_done = 0;
    }
    __syncthreads();
    stopwatch.stamp(kRowsCounted);
    if (is_last && threadIdx.x < 32) {
      send_flags(home, send, members);
      stopwatch.stamp(kFlagsSent);
      leave_snapshot(home, send, members);
    }
  } else {
    read_snapshot(home, number, members);
    if (threadIdx.x == 0) is_last = blockIdx.x == 0;
    __syncthreads();
  }
  // Of two kernels for one dispatch the first clears: it has more blocks.
  if (home.shape.layout == EEP_LAYOUT_RANK && receive.count && !(kPhases == kReceive && send.x))
    clear_routing(home, receive);
  if constexpr (kPhases & kReceive) {
    const bool settles = is_last && threadIdx.x < 32;
    if (settles) settle_sources(home, receive, members, slot_counts);
    if (home.shape.layout == EEP_LAYOUT_RANK) {  // packing has kernels of its own
      if (!is_last && threadIdx.x < 32) count_tokens(home, receive, members, slot_counts);
      __syncthreads();
      if (home.overlaps) let_next_kernel_begin();
      stopwatch.stamp(kFlagsSeen);
      take_routing(home, receive, members, slot_counts);
    }
    if (settles) close_sources(home, receive, members);
  }
  stopwatch.stamp(kEnded);
}

FixedMembers fixed_members(const eep_context& context) {
  FixedMembers fixed{context.table.epoch, 0, context.table.deadline_ns, {}, {}};
  for (uint32_t rank = 0; rank < context.table.max_ranks; ++rank) {
    const eep_peer& peer = context.table.peers[rank];
    fixed.active |= static_cast<uint64_t>(peer.active) << rank;
    fixed.slot[rank] = peer.slot;
    fixed.region[rank] = peer.region;
  }
  return fixed;
}

template <uint32_t kPhases, bool kEncodes>
cudaError_t launch_kernel(eep_context* context, const eep_dispatch_send_args& send,
                          const eep_dispatch_recv_args& receive, cudaStream_t stream, bool early) {
  const bool only_waits = kPhases == kReceive && context->shares_gpu;
  const uint32_t blocks = only_waits ? std::min(context->blocks, kWaitingBlocks) : context->blocks;
  if (context->bench & EEP_BENCH_FIXED_MEMBERSHIP)
    return launch(dispatch_kernel<kPhases, FixedMembers, kEncodes, false>, blocks, kThreads, stream, early,
                  context->home, send, receive, fixed_members(*context));
  if (context->bench & EEP_BENCH_STAMPS)
    return launch(dispatch_kernel<kPhases, InMemory, kEncodes, true>, blocks, kThreads, stream, early, context->home,
                  send, receive, InMemory{});
  return launch(dispatch_kernel<kPhases, InMemory, kEncodes, false>, blocks, kThreads, stream, early, context->home,
                send, receive, InMemory{});
}

// `early`: what is before it on the stream is the other half of this dispatch.
template <uint32_t kPhases>
int launch_dispatch(eep_context* context, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
                    void* stream, bool early = false) {
  const auto on = static_cast<cudaStream_t>(stream);
  early |= context->home.overlaps != 0;
  const cudaError_t error = kPhases & kSend && eep_is_fp8(send.wire_type)
                                ? launch_kernel<kPhases, (kPhases & kSend) != 0>(context, send, receive, on, early)
                                : launch_kernel<kPhases, false>(context, send, receive, on, early);
  if (const int failed = check_cuda(error, "dispatch")) return failed;
  if (kPhases & kReceive && context->home.shape.layout == EEP_LAYOUT_EXPERT) return pack(context, receive, stream);
  return EEP_OK;
}

int begin_send(eep_context* context, const eep_dispatch_send_args& args) {
  if (const int error =
          check_turn(context->home.shape, args.channel, context->turn(args.channel), EEP_PHASE_IDLE, "dispatch"))
    return error;
  if (const int error = check_in_view(context->table, "dispatch")) return error;
  if (const int error = check_dispatch_send(context->home.shape, args)) return error;
  context->turns[args.channel] = {EEP_PHASE_SENT, args.tokens, context->table.epoch};
  return EEP_OK;
}

int begin_receive(eep_context* context, const eep_dispatch_recv_args& args) {
  if (const int error =
          check_turn(context->home.shape, args.channel, context->turn(args.channel), EEP_PHASE_SENT, "receive"))
    return error;
  if (const int error = check_dispatch_recv(context->home.shape, args)) return error;
  context->turns[args.channel].phase = EEP_PHASE_RECEIVED;
  return EEP_OK;
}

}  // namespace

cudaError_t load_dispatch() {
  return load_kernels(dispatch_kernel<kSend, InMemory, false, false>, dispatch_kernel<kSend, InMemory, true, false>,
                      dispatch_kernel<kReceive, InMemory, false, false>,
                      dispatch_kernel<kSend | kReceive, InMemory, false, false>,
                      dispatch_kernel<kSend | kReceive, InMemory, true, false>);
}

}  // namespace eep

int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void* stream) {
  if (const int error = eep::begin_send(context, *args)) return error;
  return eep::launch_dispatch<eep::kSend>(context, *args, {}, stream);
}

int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void* stream) {
  if (const int error = eep::begin_receive(context, *args)) return error;
  return eep::launch_dispatch<eep::kReceive>(context, {}, *args, stream);
}

int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* receive,
                 void* stream) {
  if (const int error = eep::begin_send(context, *send)) return error;
  if (const int error = eep::begin_receive(context, *receive)) return error;
  if (!context->shares_gpu) return eep::launch_dispatch<eep::kSend | eep::kReceive>(context, *send, *receive, stream);
  if (const int error = eep::launch_dispatch<eep::kSend>(context, *send, *receive, stream)) return error;
  return eep::launch_dispatch<eep::kReceive>(context, *send, *receive, stream, true);
}
