// Dispatch: put each token once into the inbox of every rank that hosts one of its experts, say so, and wait for the
// rest.
//
// Blocks put rows in parallel; the last one to finish sends the flags and settles which sources arrived, so that all
// blocks act on one verdict: a source is taken whole or not at all. Rows are used where they lie; only the routing
// metadata is copied out, checked.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/members.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 1024, kWarps = kThreads / 32;
enum Phases : uint32_t { kSend = 1, kReceive = 2 };

// ---- rows ----

// Neighbouring items go to different blocks, so that few tokens still use all of them.
__device__ inline uint32_t first_item() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

// Moves rows of 16-byte vectors as they are. Each warp takes `V` vectors a lane of one token, all loads in flight at
// once. `meanwhile` runs once, while the first of them are on their way.
template <uint32_t V, bool kExact, typename Meanwhile>
__device__ void put_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                         Meanwhile meanwhile) {
  bool is_first = true;
  const uint32_t lane = threadIdx.x % 32, vectors = home.shape.hidden * eep_element_bytes(args.x_type) / sizeof(uint4);
  const uint32_t chunks = (vectors + 32 * V - 1) / (32 * V), own_slot = members.slot[home.rank];
  const uint64_t row_bytes = static_cast<uint64_t>(vectors) * sizeof(uint4);
  for (uint32_t item = first_item(); item < args.tokens * chunks; item += gridDim.x * kWarps) {
    const uint32_t token = item / chunks, first = item % chunks * 32 * V + lane;
    const uint4* row = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(args.x) + token * row_bytes);
    uint4 data[V];
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
      if (kExact || first + i * 32 < vectors) data[i] = load_input(row + first + i * 32);
    if (is_first) meanwhile();
    is_first = false;
    uint64_t hosts = hosts_of(home, args.topk_idx + static_cast<uint64_t>(token) * args.topk, args.topk);
    for (hosts &= members.reachable; hosts; hosts &= hosts - 1) {
      const ChannelView inbox(home, members.region[__ffsll(hosts) - 1], args.channel);
      uint4* to = reinterpret_cast<uint4*>(inbox.row(own_slot, token, row_bytes));
#pragma unroll
      for (uint32_t i = 0; i < V; ++i)
        if (kExact || first + i * 32 < vectors) store_row(to + first + i * 32, data[i]);
    }
  }
  if (is_first) meanwhile();
}

struct Scale {
  float value, inverse;
  uint8_t exponent;
};

// As src/cpu/formats.h, to the bit.
__device__ Scale scale_for(float largest, bool power_of_two) {
  largest = fmaxf(largest, 1e-4f);
  if (!power_of_two) return {__fdiv_rn(largest, 448.0f), __fdiv_rn(448.0f, largest), 0};
  const uint32_t bits = __float_as_uint(__fdiv_rn(largest, 448.0f));
  const uint32_t exponent = min((bits >> 23) + ((bits & 0x7fffff) != 0), 253u);
  return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23), static_cast<uint8_t>(exponent)};
}

// Encodes on the way: sixteen values a lane, eight lanes to a scale. Each warp takes `V` times 512 values of one token.
template <bool kF32, uint32_t V, typename Meanwhile>
__device__ void put_quantized_rows(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                                   Meanwhile meanwhile) {
  bool is_first = true;
  constexpr uint32_t kValues = 16, kLanesPerGroup = EEP_SCALE_GROUP / kValues, kLoads = kF32 ? 4 : 2;
  const uint32_t lane = threadIdx.x % 32, hidden = home.shape.hidden, units = hidden / kValues;
  const uint32_t chunks = (units + 32 * V - 1) / (32 * V), own_slot = members.slot[home.rank];
  for (uint32_t item = first_item(); item < args.tokens * chunks; item += gridDim.x * kWarps) {
    const uint32_t token = item / chunks, first = item % chunks * 32 * V + lane;
    const uint4* row = static_cast<const uint4*>(args.x) + static_cast<uint64_t>(token) * units * kLoads;
    uint4 raw[V][kLoads];
#pragma unroll
    for (uint32_t i = 0; i < V; ++i)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j)
        raw[i][j] = first + i * 32 < units ? load_input(row + (first + i * 32) * kLoads + j) : make_uint4(0, 0, 0, 0);
    if (is_first) meanwhile();
    is_first = false;
    const uint64_t hosts =
        hosts_of(home, args.topk_idx + static_cast<uint64_t>(token) * args.topk, args.topk) & members.reachable;
#pragma unroll
    for (uint32_t i = 0; i < V; ++i) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(raw[i]);
      float values[kValues], largest = 0;
#pragma unroll
      for (uint32_t j = 0; j < kValues; ++j) {
        values[j] = __uint_as_float(kF32 ? words[j] : j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
        largest = fmaxf(largest, fabsf(values[j]));
      }
#pragma unroll
      for (uint32_t step = kLanesPerGroup / 2; step; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const Scale scale = scale_for(largest, args.wire_type != EEP_TYPE_FP8);
      uint32_t packed[4] = {0, 0, 0, 0};
#pragma unroll
      for (uint32_t j = 0; j < kValues; j += 2) {
        const float2 pair{__fmul_rn(values[j], scale.inverse), __fmul_rn(values[j + 1], scale.inverse)};
        packed[j / 4] |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << j % 4 * 8;
      }
      const uint32_t unit = first + i * 32;
      if (unit >= units) continue;
      for (uint64_t to = hosts; to; to &= to - 1) {
        const ChannelView inbox(home, members.region[__ffsll(to) - 1], args.channel);
        store_row(reinterpret_cast<uint4*>(inbox.row(own_slot, token, hidden)) + unit,
                  make_uint4(packed[0], packed[1], packed[2], packed[3]));
        if (lane % kLanesPerGroup) continue;
        uint8_t* scales = inbox.scales(own_slot, token);
        if (args.wire_type == EEP_TYPE_FP8_UE8M0)
          scales[unit / kLanesPerGroup] = scale.exponent;
        else
          reinterpret_cast<float*>(scales)[unit / kLanesPerGroup] = scale.value;
      }
    }
  }
  if (is_first) meanwhile();
}

// ---- routing metadata ----

// Tells every reachable rank which of its experts each token wants.
__device__ void put_routing(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  const uint32_t per_rank = args.tokens * args.topk, experts = home.shape.local_experts;
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * experts;
  bool misrouted = false;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < home.shape.max_ranks * per_rank;
       i += gridDim.x * kThreads) {
    const uint32_t rank = i / per_rank, choice = i % per_rank;
    if (!(members.reachable >> rank & 1)) continue;
    const int64_t expert = args.topk_idx[choice];
    const bool known = expert >= 0 && expert < limit;
    const uint32_t host = known ? static_cast<uint32_t>(expert) / experts : EEP_MAX_RANKS;
    misrouted |= expert < -1 || expert >= limit || (known && !(members.active >> host & 1));
    const bool here = host == rank;
    const uint32_t slot = members.slot[home.rank], token = choice / args.topk, k = choice % args.topk;
    const ChannelView inbox(home, members.region[rank], args.channel);
    inbox.topk_idx(slot, token)[k] = here ? static_cast<int32_t>(static_cast<uint32_t>(expert) % experts) : -1;
    inbox.topk_weights(slot, token)[k] = !here ? 0.0f : args.topk_weights ? args.topk_weights[choice] : 1.0f;
  }
  if (misrouted) {
    note(&home.state->trouble, EEP_STATUS_MISROUTED);
    show_trouble(&home.state->trouble, home.page);
  }
}

// Copies the metadata of the sources that arrived; what nobody sent gets an expert of -1.
__device__ void take_routing(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                             const uint32_t* slot_counts) {
  const ChannelView inbox(home, reinterpret_cast<uint64_t>(home.region), args.channel);
  const uint32_t per_slot = home.shape.max_tokens * args.topk, experts = home.shape.local_experts;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < home.at.slots * per_slot; i += gridDim.x * kThreads) {
    const uint32_t slot = i / per_slot, token = i % per_slot / args.topk, k = i % args.topk;
    int32_t expert = -1;
    if (token < slot_counts[slot]) {
      expert = inbox.topk_idx(slot, token)[k];
      args.topk_weights[i] = inbox.topk_weights(slot, token)[k];
      if (expert < -1 || expert >= static_cast<int32_t>(experts)) {
        note(&home.state->trouble, EEP_STATUS_CORRUPT, 0, rank_bit(slot % home.shape.max_ranks));
        show_trouble(&home.state->trouble, home.page);
        expert = -1;
      }
    }
    args.topk_idx[i] = expert;
  }
}

// ---- flags and the verdict, by one warp of the last block ----

__device__ void send_flags(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  const uint64_t flag = eep_flag_make(members.epoch, members.round, args.tokens);
  const auto mailbox_at = [&](uint32_t rank) {
    return ChannelView(home, members.region[rank], args.channel).mailbox(members.slot[home.rank]);
  };
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (members.reachable >> rank & 1)
      store_relaxed_sys(&mailbox_at(rank)->envelope, eep_envelope(args.wire_type, args.topk, home.shape.hidden));
  fence_sys();  // one fence releases all rows and envelopes to all ranks
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (members.reachable >> rank & 1) store_relaxed_sys(&mailbox_at(rank)->dispatch_flag, flag);
}

// What the combine of this round, and the receive half if it is launched apart, need to know.
__device__ void leave_snapshot(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  eep_snapshot& snapshot = home.state->channels[args.channel].snapshot;
  for (uint32_t rank = threadIdx.x; rank < EEP_MAX_RANKS; rank += 32) {
    snapshot.slot[rank] = members.slot[rank];
    snapshot.region[rank] = members.region[rank];
  }
  if (threadIdx.x == 0) {
    snapshot.epoch = members.epoch;
    snapshot.round = members.round;
    snapshot.deadline_ns = members.deadline_ns;
    snapshot.active = members.active;
    snapshot.tokens = args.tokens;
  }
  __syncwarp();
}

__device__ void settle_sources(const Home& home, const eep_dispatch_recv_args& args, const Members& members) {
  const ChannelView inbox(home, reinterpret_cast<uint64_t>(home.region), args.channel);
  ChannelState& channel = home.state->channels[args.channel];
  Trouble* trouble = &home.state->trouble;
  uint32_t counts[2] = {0, 0};
  const WaitFor wait{home.page, trouble, members.epoch, members.deadline_ns, 0};
  const uint64_t arrived = wait_for(wait, members.reachable, [&](uint32_t rank) {
    const uint64_t flag = load_acquire_sys(&inbox.mailbox(members.slot[rank])->dispatch_flag);
    if (!eep_flag_is(flag, members.epoch, members.round)) return false;
    counts[rank / 32] = eep_flag_count(flag);
    return true;
  });
  const uint64_t envelope = eep_envelope(args.wire_type, args.topk, home.shape.hidden);
  bool is_sound[2];
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    const bool here = arrived >> rank & 1;
    is_sound[half] =
        here && counts[half] <= home.shape.max_tokens && inbox.mailbox(members.slot[rank])->envelope == envelope;
    if (rank < home.shape.max_ranks) {
      channel.snapshot.count[rank] = is_sound[half] ? counts[half] : 0;
      args.count[rank] = static_cast<int32_t>(is_sound[half] ? counts[half] : 0);
    }
  }
  const uint64_t received = vote(is_sound[0], is_sound[1]);
  if (threadIdx.x == 0) {
    channel.snapshot.received = received;
    if (arrived != received) note(trouble, EEP_STATUS_CORRUPT, 0, arrived & ~received);
    if (received != members.active) show_trouble(trouble, home.page);
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    store_release_gpu(&channel.verdict, eep_flag_make(members.epoch, members.round, 0));
    // When this kernel is over the experts may write the outbox. A peer that we dropped may still be reading the last
    // round from it: it finds the stamp gone.
    store_relaxed_sys(inbox.outbox_stamp(), 0);
    fence_sys();
  }
}

template <uint32_t kPhases, typename Membership>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_send_args send,
                    const __grid_constant__ eep_dispatch_recv_args receive,
                    const __grid_constant__ Membership membership) {
  __shared__ Members members;
  __shared__ bool is_last;
  __shared__ uint32_t slot_counts[EEP_MAX_RANKS * EEP_INCARNATIONS];
  const uint32_t number = kPhases & kSend ? send.channel : receive.channel;
  ChannelState& channel = home.state->channels[number];
  if constexpr (kPhases & kSend) {
    if constexpr (std::is_same_v<Membership, FixedMembers>)
      read_members(membership, channel, members);
    else
      read_members(home, number, members);
    const uint32_t vectors = home.shape.hidden * eep_element_bytes(send.x_type) / sizeof(uint4);
    const auto routing = [&] { put_routing(home, send, members); };
    if (eep_is_fp8(send.wire_type) && send.x_type == EEP_TYPE_F32)
      put_quantized_rows<true, 2>(home, send, members, routing);
    else if (eep_is_fp8(send.wire_type))
      put_quantized_rows<false, 4>(home, send, members, routing);
    else if (vectors % (32 * 8) == 0)
      put_rows<8, true>(home, send, members, routing);
    else if (vectors % (32 * 7) == 0)
      put_rows<7, true>(home, send, members, routing);
    else
      put_rows<4, false>(home, send, members, routing);
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // the rows of this block before the count; the last block releases all of them to the others
      is_last = atomicAdd(&channel.senders_done, 1) == gridDim.x - 1;
      if (is_last) channel.senders_done = 0;
    }
    __syncthreads();
    if (is_last && threadIdx.x < 32) {
      send_flags(home, send, members);
      leave_snapshot(home, send, members);
    }
  } else {
    read_snapshot(home, number, members);
    if (threadIdx.x == 0) is_last = blockIdx.x == 0;
    __syncthreads();
  }
  if constexpr (kPhases & kReceive) {
    const uint64_t settled = eep_flag_make(members.epoch, members.round, 0);
    if (is_last && threadIdx.x < 32) settle_sources(home, receive, members);
    if (home.shape.layout == EEP_LAYOUT_EXPERT) return;  // packing has kernels of its own
    // The block that settles ends its own wait at the deadline, so that this one ends as well.
    if (threadIdx.x == 0)
      while (load_acquire_gpu(&channel.verdict) != settled) {
      }
    for (uint32_t slot = threadIdx.x; slot < home.at.slots; slot += kThreads) slot_counts[slot] = 0;
    __syncthreads();
    if (threadIdx.x < home.shape.max_ranks && (channel.snapshot.received >> threadIdx.x & 1))
      slot_counts[members.slot[threadIdx.x]] = channel.snapshot.count[threadIdx.x];
    __syncthreads();
    take_routing(home, receive, members, slot_counts);
  }
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

template <uint32_t kPhases>
int launch(eep_context* context, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
           void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (context->fixed_membership)
    dispatch_kernel<kPhases>
        <<<context->blocks, kThreads, 0, on>>>(context->home, send, receive, fixed_members(*context));
  else
    dispatch_kernel<kPhases><<<context->blocks, kThreads, 0, on>>>(context->home, send, receive, InMemory{});
  if (const int error = check_cuda(cudaGetLastError(), "dispatch")) return error;
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
  return load_kernels(dispatch_kernel<kSend, InMemory>, dispatch_kernel<kReceive, InMemory>,
                      dispatch_kernel<kSend | kReceive, InMemory>);
}

}  // namespace eep

int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void* stream) {
  if (const int error = eep::begin_send(context, *args)) return error;
  return eep::launch<eep::kSend>(context, *args, {}, stream);
}

int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void* stream) {
  if (const int error = eep::begin_receive(context, *args)) return error;
  return eep::launch<eep::kReceive>(context, {}, *args, stream);
}

int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* receive,
                 void* stream) {
  if (const int error = eep::begin_send(context, *send)) return error;
  if (const int error = eep::begin_receive(context, *receive)) return error;
  return eep::launch<eep::kSend | eep::kReceive>(context, *send, *receive, stream);
}
