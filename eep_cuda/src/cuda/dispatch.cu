// Dispatch: put each token once into the inbox of every rank that hosts one of its experts, say so, and wait for the
// rest.
//
// Blocks put rows in parallel; the last one to finish sends the flags and settles which sources arrived. The others
// look for the flags themselves, which costs less than to be told; where one is missing or wrong, all act on the
// verdict of the one that settles. So a source is taken whole or not at all in every step that can be trusted. Rows are
// used where they lie; only the routing metadata is copied out, checked.
#include <type_traits>

#include "cuda/put_rows.cuh"
#include "cuda/stopwatch.cuh"

namespace eep {
namespace {

enum Phases : uint32_t { kSend = 1, kReceive = 2 };

// ---- routing metadata ----

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
__device__ void put_routing(const Home& home, const eep_dispatch_send_args& args, const Members& members, Choice next) {
  const uint32_t per_rank = args.tokens * args.topk, experts = home.shape.local_experts,
                 stride = gridDim.x * kDispatchThreads;
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

// Copies the metadata of the sources that arrived; a row that no source sent gets an expert of -1.
__device__ void take_routing(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                             const uint32_t* slot_counts) {
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t per_slot = home.shape.max_tokens * args.topk, experts = home.shape.local_experts;
  for (uint32_t i = blockIdx.x * kDispatchThreads + threadIdx.x; i < home.at.slots * per_slot;
       i += gridDim.x * kDispatchThreads) {
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

template <bool kAcrossHosts>
__device__ void send_flags(const Home& home, const eep_dispatch_send_args& args, const Members& members) {
  const uint64_t flag = eep_flag_make(members.epoch, members.round, args.tokens);
  const uint64_t envelope = eep_envelope(args.wire_type, args.topk, home.shape.hidden);
  const auto mailbox_at = [&](uint32_t rank) {
    return channel_at(home, members.region[rank], args.channel).mailbox(members.slot[home.rank]);
  };
  // A GPU and a CPU have no word of 16 bytes in common. In a mirror the fence is between the envelope and the flag.
  if constexpr (kAcrossHosts) {
    for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
      if (members.reachable & members.remote & rank_bit(rank)) store_relaxed_sys(&mailbox_at(rank)->envelope, envelope);
  }
  fence_sys();  // one fence releases all rows to all ranks
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32) {
    if (!(members.reachable >> rank & 1)) continue;
    if (kAcrossHosts && (members.remote >> rank & 1))
      store_relaxed_sys(&mailbox_at(rank)->dispatch_flag, flag);
    else
      store_pair_relaxed_sys(&mailbox_at(rank)->dispatch_flag, flag, envelope);
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
  const ChannelView inbox = own_channel(home, args.channel);
  store_release_gpu(&home.state->channels[args.channel].verdict, eep_flag_make(members.epoch, members.round, 0));
  // When this kernel is over the experts may write the outbox. A peer that we dropped may still be reading the last
  // round from it: it finds the stamp gone. No fence of our own: stamp and outbox are both memory of this GPU, to which
  // every reader comes through the same cache, and what writes the outbox is a later kernel of the stream, before which
  // the stores of this one are in that cache. With a fence, the last block would wait for nothing but that fence.
  store_relaxed_sys(inbox.outbox_stamp(), 0);
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

// `kEncodes` is for fp8: a kernel of its own leaves both kinds more registers.
template <uint32_t kPhases, typename Membership, bool kEncodes, bool kStamped>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_send_args send,
                    const __grid_constant__ eep_dispatch_recv_args receive,
                    const __grid_constant__ Membership membership) {
  __shared__ Members members;
  __shared__ bool is_last;
  __shared__ uint32_t slot_counts[EEP_MAX_CUDA_RANKS * EEP_INCARNATIONS];
  constexpr bool kAcrossHosts = std::is_same_v<Membership, AcrossHosts>;
  const uint32_t number = kPhases & kSend ? send.channel : receive.channel;
  ChannelState& channel = home.state->channels[number];
  const Stopwatch<kStamped> stopwatch(home);
  for (uint32_t slot = threadIdx.x; slot < home.at.slots; slot += kDispatchThreads) slot_counts[slot] = 0;
  if constexpr (kPhases & kSend) {
    // One warp reads the table before it loads rows, so that this does not queue behind the rows of all the others.
    if (threadIdx.x < 32) {
      if constexpr (std::is_same_v<Membership, FixedMembers>)
        read_members(membership, channel, members);
      else
        read_members<kAcrossHosts>(home, number, members);
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
        put_quantized_rows<true, 2, false, kAcrossHosts>(home, send, members, prepare);
      else
        put_quantized_rows<false, 2, true, kAcrossHosts>(home, send, members, prepare);
    } else if (vectors % (32 * 8) == 0) {
      put_rows<8, true, kAcrossHosts>(home, send, members, prepare);
    } else if (vectors % (32 * 7) == 0) {
      put_rows<7, true, kAcrossHosts>(home, send, members, prepare);
    } else {
      put_rows<4, false, kAcrossHosts>(home, send, members, prepare);
    }
    __syncthreads();
    stopwatch.stamp(kRowsIssued);
    if (threadIdx.x == 0) {
      __threadfence();  // the rows of this block before the count; the last block releases all of them to the others
      is_last = atomicAdd(&channel.senders_done, 1) == gridDim.x - 1;
      if (is_last) channel.senders_done = 0;
    }
    __syncthreads();
    stopwatch.stamp(kRowsCounted);
    if (is_last && threadIdx.x < 32) {
      send_flags<kAcrossHosts>(home, send, members);
      stopwatch.stamp(kFlagsSent);
      leave_snapshot(home, send, members);
    }
  } else {
    read_snapshot(home, number, members);
    if (threadIdx.x == 0) is_last = blockIdx.x == 0;
    __syncthreads();
  }
  if constexpr (kPhases & kReceive) {
    const bool settles = is_last && threadIdx.x < 32;
    if (settles) settle_sources(home, receive, members, slot_counts);
    if (home.shape.layout == EEP_LAYOUT_RANK) {  // packing has kernels of its own
      if (!is_last && threadIdx.x < 32) count_tokens(home, receive, members, slot_counts);
      __syncthreads();
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
void launch_kernel(eep_context* context, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
                   cudaStream_t stream) {
  const bool only_waits = kPhases == kReceive && context->shares_gpu;
  const uint32_t blocks = only_waits ? std::min(context->blocks, kWaitingBlocks) : context->blocks;
  if (kPhases == kSend && context->home.landing) {
    const auto kernel = dispatch_kernel<kSend, AcrossHosts, kEncodes, false>;
    kernel<<<blocks, kDispatchThreads, 0, stream>>>(context->home, send, receive, AcrossHosts{});
  } else if (context->bench & EEP_BENCH_FIXED_MEMBERSHIP) {
    const auto kernel = dispatch_kernel<kPhases, FixedMembers, kEncodes, false>;
    kernel<<<blocks, kDispatchThreads, 0, stream>>>(context->home, send, receive, fixed_members(*context));
  } else {
    const auto kernel = context->bench & EEP_BENCH_STAMPS ? dispatch_kernel<kPhases, InMemory, kEncodes, true>
                                                          : dispatch_kernel<kPhases, InMemory, kEncodes, false>;
    kernel<<<blocks, kDispatchThreads, 0, stream>>>(context->home, send, receive, InMemory{});
  }
}

template <uint32_t kPhases>
int launch(eep_context* context, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
           void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (kPhases & kSend && eep_is_fp8(send.wire_type))
    launch_kernel<kPhases, (kPhases & kSend) != 0>(context, send, receive, on);
  else
    launch_kernel<kPhases, false>(context, send, receive, on);
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
  return load_kernels(
      dispatch_kernel<kSend, InMemory, false, false>, dispatch_kernel<kSend, InMemory, true, false>,
      dispatch_kernel<kSend, AcrossHosts, false, false>, dispatch_kernel<kSend, AcrossHosts, true, false>,
      dispatch_kernel<kReceive, InMemory, false, false>, dispatch_kernel<kSend | kReceive, InMemory, false, false>,
      dispatch_kernel<kSend | kReceive, InMemory, true, false>);
}

}  // namespace eep

int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void* stream) {
  if (const int error = eep::begin_send(context, *args)) return error;
  return eep::launch<eep::kSend>(context, *args, {}, stream);
}

int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void* stream) {
  if (const int error = eep::begin_receive(context, *args)) return error;
  if (const int error = eep::land_rows(context, *args, stream)) return error;
  return eep::launch<eep::kReceive>(context, {}, *args, stream);
}

int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* receive,
                 void* stream) {
  if (const int error = eep::begin_send(context, *send)) return error;
  if (const int error = eep::begin_receive(context, *receive)) return error;
  if (!context->shares_gpu && !context->home.landing)
    return eep::launch<eep::kSend | eep::kReceive>(context, *send, *receive, stream);
  if (const int error = eep::launch<eep::kSend>(context, *send, {}, stream)) return error;
  if (const int error = eep::land_rows(context, *receive, stream)) return error;
  return eep::launch<eep::kReceive>(context, {}, *receive, stream);
}
