// Dispatch: put each token once into the inbox of every rank that hosts one of its experts, say so, and wait for the
// rest.
//
// Blocks put rows in parallel. Of many tokens, the last one to finish sends the flags. Of few, each block has one rank
// to send to, and tells that rank by itself. One block settles which sources arrived. The others look for the flags
// themselves, which costs less than to be told; where one is missing or wrong, all act on the
// verdict of the one that settles. So a source is taken whole or not at all in every step that can be trusted. Rows are
// used where they lie; only the routing metadata is copied out, checked.
#include <type_traits>

#include "cuda/arrivals.cuh"
#include "cuda/launch.h"
#include "cuda/put_rows.cuh"
#include "cuda/stopwatch.cuh"

namespace eep {
namespace {

constexpr uint32_t kMostDirectTokens = 32;  // beyond, all blocks together are faster than each by itself
constexpr uint32_t kMostNarrowTokens = 16;  // beyond, a block with few threads has too little on its way
// Two narrow blocks have room on a multiprocessor, so that the next kernel is there before this one is over.
constexpr uint32_t kNarrow = 512, kWide = 1024;
constexpr uint32_t kEncodedUnits = 2;  // that a thread encodes at once
enum Phases : uint32_t { kSend = 1, kReceive = 2 };

// ---- flags and the verdict ----

// Of a round in one piece, by one warp of the last block.
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

// Of a piece, by one thread of the block that has put it.
template <uint32_t kThreads>
__device__ void send_flag(const Home& home, const eep_dispatch_send_args& args, const Members& members,
                          const Share<true, kThreads>& share) {
  if (share.piece() >= share.pieces || !(members.reachable >> share.rank() & 1)) return;
  const uint64_t envelope = eep_envelope(args.wire_type, args.topk, home.shape.hidden);
  const ChannelView inbox = channel_at(home, members.region[share.rank()], args.channel);
  eep_mailbox* mailbox = inbox.mailbox(members.slot[home.rank]);
  fence_sys();
  store_pair_relaxed_sys(share.piece() ? &mailbox->further[share.piece() - 1].dispatch_flag : &mailbox->dispatch_flag,
                         eep_flag_make(members.epoch, members.round, args.tokens),
                         eep_envelope_of_pieces(envelope, share.pieces));
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

// Waits, and writes down which sources arrived, for this block, the combine and the caller. The other blocks need it
// only where something is wrong: close_sources() tells them.
__device__ void settle_sources(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                               uint32_t* slot_counts) {
  ChannelState& channel = home.state->channels[args.channel];
  Trouble* trouble = &home.state->trouble;
  uint32_t counts[2] = {0, 0};
  uint64_t received = 0;
  const WaitFor wait{home.page, trouble, members.epoch, members.deadline_ns, 0};
  const uint64_t arrived = wait_by(wait, members.reachable, [&](uint64_t missing) {
    const Arrivals found = look_for(home, args, members, missing);
    received |= found.sound;
    for (uint32_t half = 0; half < 2; ++half)
      if (found.sound >> (threadIdx.x + 32 * half) & 1) counts[half] = found.count[half];
    return found.here;
  });
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (rank >= home.shape.max_ranks) continue;
    if (received >> rank & 1) slot_counts[members.slot[rank]] = counts[half];
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

// By one thread, behind a barrier or a __syncwarp() that the warp which settled has passed, too. Apart from settling,
// and by another warp where there is metadata to copy, because the fence of the release takes as long as that.
__device__ void close_sources(const Home& home, const eep_dispatch_recv_args& args, const Members& members) {
  const uint64_t round = eep_flag_make(members.epoch, members.round, 0);
  store_release_gpu(&home.state->channels[args.channel].verdict, round);
  // When this kernel is over the experts may write the outbox, and from now on it is of this round. A peer that we
  // dropped may still be reading the last round from it: it finds another stamp. No fence of our own: stamp and outbox
  // are both memory of this GPU, to which every reader comes through the same cache, and what writes the outbox is a
  // later kernel of the stream, before which the stores of this one are in that cache. With a fence, the last block
  // would wait for nothing but that fence.
  if (!(home.bench & EEP_BENCH_UNCLOSED)) store_relaxed_sys(own_channel(home, args.channel).outbox_stamp(), round);
}

// The tokens of each slot, as one warp finds them by itself, or as the verdict says if not all is as it should be.
__device__ void count_tokens(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                             uint32_t* slot_counts) {
  ChannelState& channel = home.state->channels[args.channel];
  const uint64_t settled = eep_flag_make(members.epoch, members.round, 0);
  uint64_t sound = 0;
  uint32_t counts[2] = {0, 0};
  for (uint32_t looks = 1; sound != members.reachable; ++looks) {
    const Arrivals found = look_for(home, args, members, members.reachable & ~sound);
    sound |= found.sound;
    for (uint32_t half = 0; half < 2; ++half)
      if (found.sound >> (threadIdx.x + 32 * half) & 1) counts[half] = found.count[half];
    // The block that settles ends its own wait at the deadline, so that this one ends as well.
    const bool is_settled = looks % 32 == 0 && load_acquire_gpu(&channel.verdict) == settled;
    if (found.here != found.sound || __any_sync(~0u, is_settled)) break;
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

// `kEncodes` is for fp8: a kernel of its own leaves both kinds more registers. Where two kernels make one dispatch,
// both are told of both halves.
//
// The first warp talks to the other ranks. The last one reads the table and closes the sources, which nothing that the
// first one does has to wait for; of few tokens it has no rows to move.
template <uint32_t kPhases, typename Membership, bool kEncodes, bool kDirect, uint32_t kThreads, bool kStamped>
__global__ void __launch_bounds__(kThreads, kWide / kThreads)
    dispatch_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_send_args send,
                    const __grid_constant__ eep_dispatch_recv_args receive, const __grid_constant__ Plan plan,
                    const __grid_constant__ Membership membership) {
  __shared__ Members members;
  __shared__ bool is_last;  // of the blocks; where none waits for another, any will do
  __shared__ uint32_t slot_counts[EEP_MAX_CUDA_RANKS * EEP_INCARNATIONS];
  constexpr bool kAcrossHosts = std::is_same_v<Membership, AcrossHosts>;
  constexpr bool kReadsTable = (kPhases & kSend) != 0 && !std::is_same_v<Membership, FixedMembers>;
  const uint32_t number = kPhases & kSend ? send.channel : receive.channel;
  ChannelState& channel = home.state->channels[number];
  const bool is_first_warp = threadIdx.x < 32, is_last_warp = threadIdx.x >= kThreads - 32;
  Entries entries;
  if (kReadsTable && is_last_warp) entries = read_table(home);
  for (uint32_t slot = threadIdx.x; slot < home.at.slots; slot += kThreads) slot_counts[slot] = 0;
  await_kernel_before();
  if (kPhases & kReceive && kThreads == kNarrow && (home.bench & EEP_BENCH_AT_ONCE)) let_next_kernel_begin();
  const Stopwatch<kStamped> stopwatch(home, kDispatchStamps);
  if constexpr (kPhases & kSend) {
    // Before it loads rows, so that this does not queue behind the rows of all the others.
    if (is_last_warp) {
      if constexpr (kReadsTable)
        read_members<kAcrossHosts>(home, number, entries, members);
      else
        read_members(membership, channel.last_round + 1, members);
    }
    const Share<kDirect, kThreads> share(send, plan);
    const Choice first = load_routing(home, send, plan, share, first_choice<kDirect, kThreads>());
    if (kDirect && is_cleared_at_once<kThreads>(home, plan)) clear_routing<kThreads>(home, receive, plan);
    const auto prepare = [&] {
      __syncthreads();
      stopwatch.stamp(kMembersRead);
      put_routing(home, send, plan, members, share, first);
    };
    if constexpr (kEncodes) {
      if (send.x_type == EEP_TYPE_F32)
        put_quantized_rows<true, kEncodedUnits, false, kAcrossHosts>(home, send, members, plan, share, prepare);
      else
        put_quantized_rows<false, kEncodedUnits, true, kAcrossHosts>(home, send, members, plan, share, prepare);
    } else if (plan.vectors == 8) {
      put_rows<8, true, kAcrossHosts>(home, send, members, plan, share, prepare);
    } else if (plan.vectors == 7) {
      put_rows<7, true, kAcrossHosts>(home, send, members, plan, share, prepare);
    } else {
      put_rows<4, false, kAcrossHosts>(home, send, members, plan, share, prepare);
    }
    __syncthreads();
    if (kPhases == kSend && receive.count) let_next_kernel_begin();
    stopwatch.stamp(kRowsIssued);
    if (threadIdx.x == 0) {
      if constexpr (kDirect) {
        send_flag(home, send, members, share);
        is_last = block_number() == block_count() - 1;
      } else {
        __threadfence();  // the rows of this block before the count; the last block releases all of them to the others
        is_last = atomicAdd(&channel.senders_done, 1) == gridDim.x - 1;
        if (is_last) channel.senders_done = 0;
      }
    }
    // Directly, the first warp goes on to look for flags while the others are still here.
    if constexpr (kDirect)
      __syncwarp();
    else
      __syncthreads();
    stopwatch.stamp(kRowsCounted);
    if (is_first_warp && is_last) {
      if constexpr (!kDirect) send_flags<kAcrossHosts>(home, send, members);
      stopwatch.stamp(kFlagsSent);
      leave_snapshot(home, send, members);
    }
  } else {
    read_snapshot<kThreads>(home, number, members);
    if (threadIdx.x == 0) is_last = blockIdx.x == 0;
    __syncthreads();
  }
  // Of two kernels for one dispatch the first clears: it has more blocks.
  if (!(kPhases == kReceive && send.x) && !(kDirect && is_cleared_at_once<kThreads>(home, plan)))
    clear_routing<kThreads>(home, receive, plan);
  if constexpr (kPhases & kReceive) {
    const bool settles = is_first_warp && is_last;
    if (settles) settle_sources(home, receive, members, slot_counts);
    if (home.shape.layout == EEP_LAYOUT_RANK) {  // packing has kernels of its own
      if (is_first_warp && !settles) count_tokens(home, receive, members, slot_counts);
      __syncthreads();
      if (home.overlaps) let_next_kernel_begin();
      stopwatch.stamp(kFlagsSeen);
      if (is_last && threadIdx.x == kThreads - 1) close_sources(home, receive, members);
      take_routing<kThreads>(home, receive, plan, members, slot_counts);
    } else if (settles && threadIdx.x == 0) {
      close_sources(home, receive, members);
    }
  }
  stopwatch.stamp(kEnded);
}

Plan plan_of(const Home& home, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
             uint32_t pieces) {
  Plan plan;
  const uint32_t vectors = home.shape.hidden * eep_element_bytes(send.x_type) / sizeof(uint4);
  const uint32_t units = eep_is_fp8(send.wire_type) ? home.shape.hidden / kEncodedAtOnce : vectors;
  plan.vectors = eep_is_fp8(send.wire_type) ? kEncodedUnits : vectors_at_once(vectors);
  plan.chunks = Divider((units + 32 * plan.vectors - 1) / (32 * plan.vectors));
  plan.topk = Divider(send.topk);
  plan.choices = Divider(send.tokens * send.topk);
  plan.pieces = Divider(pieces);
  plan.received_topk = Divider(receive.topk);
  plan.places = Divider(home.shape.max_tokens * receive.topk);
  return plan;
}

template <uint32_t kPhases, bool kEncodes, bool kDirect, uint32_t kThreads>
cudaError_t launch_kernel(eep_context* context, const eep_dispatch_send_args& send,
                          const eep_dispatch_recv_args& receive, cudaStream_t stream, bool early) {
  const bool only_waits = kPhases == kReceive && context->shares_gpu;
  const uint32_t pieces = pieces_of(context->home, context->blocks);
  const dim3 blocks = kDirect      ? dim3(context->home.shape.max_ranks, pieces)
                      : only_waits ? dim3(std::min(context->blocks, kWaitingBlocks))
                                   : dim3(context->blocks);
  const Plan plan = plan_of(context->home, send, receive, pieces);
  if constexpr (kPhases == kSend && !kDirect)
    if (context->home.landing)
      return launch(dispatch_kernel<kSend, AcrossHosts, kEncodes, false, kWide, false>, blocks, kWide, stream, early,
                    context->home, send, receive, plan, AcrossHosts{});
  if (context->is_bench(EEP_BENCH_FIXED_MEMBERSHIP))
    return launch(dispatch_kernel<kPhases, FixedMembers, kEncodes, kDirect, kThreads, false>, blocks, kThreads, stream,
                  early, context->home, send, receive, plan, fixed_members(*context));
  if (context->is_bench(EEP_BENCH_STAMPS))
    return launch(dispatch_kernel<kPhases, InMemory, kEncodes, kDirect, kThreads, true>, blocks, kThreads, stream,
                  early, context->home, send, receive, plan, InMemory{});
  return launch(dispatch_kernel<kPhases, InMemory, kEncodes, kDirect, kThreads, false>, blocks, kThreads, stream, early,
                context->home, send, receive, plan, InMemory{});
}

template <uint32_t kPhases, bool kDirect, uint32_t kThreads>
auto choose_kernel(bool encodes) {
  return encodes    ? launch_kernel < kPhases, (kPhases & kSend) != 0, kDirect,
         kThreads > : launch_kernel<kPhases, false, kDirect, kThreads>;
}

// `early`: what is before it on the stream is the other half of this dispatch.
template <uint32_t kPhases>
int launch_dispatch(eep_context* context, const eep_dispatch_send_args& send, const eep_dispatch_recv_args& receive,
                    void* stream, bool early = false) {
  constexpr bool kSends = (kPhases & kSend) != 0;
  const auto on = static_cast<cudaStream_t>(stream);
  const bool encodes = kSends && eep_is_fp8(send.wire_type);
  const bool direct =
      kSends && !context->home.landing && send.tokens <= kMostDirectTokens && pieces_of(context->home, context->blocks);
  const bool narrow = direct && send.tokens <= kMostNarrowTokens && !context->is_bench(EEP_BENCH_WIDE);
  constexpr uint32_t kLeast = kSends ? kNarrow : kWide;
  const auto kernel = narrow   ? choose_kernel<kPhases, kSends, kLeast>(encodes)
                      : direct ? choose_kernel<kPhases, kSends, kWide>(encodes)
                               : choose_kernel<kPhases, false, kWide>(encodes);
  const cudaError_t error = kernel(context, send, receive, on, early || context->home.overlaps);
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

template <uint32_t kPhases, bool kDirect, uint32_t kThreads>
cudaError_t load_senders() {
  return load_kernels(dispatch_kernel<kPhases, InMemory, false, kDirect, kThreads, false>,
                      dispatch_kernel<kPhases, InMemory, true, kDirect, kThreads, false>);
}

cudaError_t load_dispatch() {
  for (const auto load : {load_senders<kSend, false, kWide>, load_senders<kSend, true, kWide>,
                          load_senders<kSend, true, kNarrow>, load_senders<kSend | kReceive, false, kWide>,
                          load_senders<kSend | kReceive, true, kWide>, load_senders<kSend | kReceive, true, kNarrow>})
    if (const cudaError_t error = load()) return error;
  return load_kernels(dispatch_kernel<kSend, AcrossHosts, false, false, kWide, false>,
                      dispatch_kernel<kSend, AcrossHosts, true, false, kWide, false>,
                      dispatch_kernel<kReceive, InMemory, false, false, kWide, false>);
}

}  // namespace eep

int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void* stream) {
  if (const int error = eep::begin_send(context, *args)) return error;
  return eep::launch_dispatch<eep::kSend>(context, *args, {}, stream);
}

int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void* stream) {
  if (const int error = eep::begin_receive(context, *args)) return error;
  if (const int error = eep::land_rows(context, *args, stream)) return error;
  return eep::launch_dispatch<eep::kReceive>(context, {}, *args, stream);
}

int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* receive,
                 void* stream) {
  if (const int error = eep::begin_send(context, *send)) return error;
  if (const int error = eep::begin_receive(context, *receive)) return error;
  if (!context->shares_gpu && !context->home.landing)
    return eep::launch_dispatch<eep::kSend | eep::kReceive>(context, *send, *receive, stream);
  if (const int error = eep::launch_dispatch<eep::kSend>(context, *send, *receive, stream)) return error;
  if (const int error = eep::land_rows(context, *receive, stream)) return error;
  return eep::launch_dispatch<eep::kReceive>(context, *send, *receive, stream, true);
}
