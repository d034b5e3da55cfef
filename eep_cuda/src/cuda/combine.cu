// Combine: say that the outbox is ready, wait for those of the others, pull and add up what they made of our tokens.
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/members.cuh"
#include "cuda/row_sums.cuh"
#include "cuda/stopwatch.cuh"

namespace eep {
namespace {

constexpr uint32_t kMostNarrowTokens = 16;  // beyond, a block with few threads has too little on its way
// Two narrow blocks have room on a multiprocessor, so that the next kernel is there before this one is over.
constexpr uint32_t kNarrow = 512, kWide = 1024;
constexpr uint32_t kTokensAtOnce = 64;                  // whose sources a block keeps in shared memory
constexpr uint32_t kMostSharers = 16;                   // more have nothing left to share
constexpr uint32_t kWaiters = 32 + EEP_MAX_CUDA_RANKS;  // one warp waits, the others read the members meanwhile
enum Phases : uint32_t { kSend = 1, kReceive = 2 };

// Tells all sources that the outbox is ready, by one warp. What it needs to know of them it loads by itself, all at
// once, and does not wait until the block knows the members: the flags are what the other ranks wait for. What the
// experts wrote is released to all of them by the one fence that precedes all flags: it takes as long as a trip to
// memory, and the loads are on their way meanwhile. The stamp of the outbox says since the dispatch which round it is
// of.
__device__ void answer_sources(const Home& home, uint32_t channel) {
  const DeviceState& state = *home.state;
  const eep_snapshot& snapshot = state.channels[channel].snapshot;
  const uint64_t epoch = load_now(&snapshot.epoch), round = load_now(&snapshot.round);
  const uint64_t active = load_now(&snapshot.active.words[0]);
  const uint64_t dropped = load_now(&state.trouble.dropped), corrupt = load_now(&state.trouble.corrupt);
  // Of the ranks that this lane speaks for, and of this one.
  uint64_t region[2];
  uint32_t taken[2];
  for (uint32_t half = 0; half < 2; ++half) {
    region[half] = load_now(&snapshot.region[threadIdx.x + 32 * half]);
    taken[half] = load_now(&snapshot.count[threadIdx.x + 32 * half]);
  }
  const uint32_t own_slot = load_now(&snapshot.slot[home.rank]);
  if (!(home.bench & EEP_BENCH_UNFENCED)) fence_sys();
  if (home.landing) {  // its stamp is looked at by a proxy, which wants it before the flags
    if (threadIdx.x == 0)
      store_relaxed_sys(landing_channel(home, channel).outbox_stamp(), eep_flag_make(epoch, round, 0));
    __syncwarp();
    fence_sys();
  }
  const uint64_t reachable = active & ~dropped;
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (!(reachable >> rank & 1)) continue;
    // The count tells the source whether we took its tokens: if not, it must not believe the sum.
    const uint64_t count = corrupt >> rank & 1 ? 0 : taken[half];
    store_relaxed_sys(&channel_at(home, region[half], channel).mailbox(own_slot)->combine_flag,
                      eep_flag_make(epoch, round, count));
  }
  __syncwarp();
}

// By one warp: the ranks whose outbox holds what they made of our tokens.
__device__ uint64_t await_outboxes(const Home& home, uint32_t channel, const Members& members, uint32_t tokens) {
  const ChannelView own = own_channel(home, channel);
  const WaitFor wait{home.page, &home.state->trouble, members.epoch, members.deadline_ns, 0};
  bool took_all[2] = {false, false};
  const uint64_t arrived = wait_for(wait, members.reachable, [&](uint32_t rank) {
    const uint64_t flag = load_acquire_sys(&own.mailbox(members.slot[rank])->combine_flag);
    if (!eep_flag_is(flag, members.epoch, members.round)) return false;
    took_all[rank / 32] = eep_flag_count(flag) == tokens;
    return true;
  });
  const uint64_t usable = arrived & vote(took_all[0], took_all[1]);
  if (threadIdx.x == 0 && usable != members.active) {
    if (usable != arrived) note(&home.state->trouble, EEP_STATUS_CORRUPT, 0, arrived & ~usable);
    show_trouble(&home.state->trouble, home.page);
  }
  return usable;
}

// By one warp; lanes beyond top-k are idle.
__device__ void find_parts(const Home& home, const eep_combine_recv_args& args, const Members& members, uint32_t token,
                           Parts& parts) {
  const uint32_t lane = threadIdx.x % 32;
  const int64_t* experts = args.topk_idx + static_cast<uint64_t>(token) * args.topk;
  if (home.shape.layout == EEP_LAYOUT_RANK) {
    const uint64_t hosts = hosts_of(home, lane < args.topk ? experts[lane] : -1) & members.reachable;
    for (uint32_t rank = lane; rank < home.shape.max_ranks; rank += 32)
      if (hosts >> rank & 1) {
        const uint32_t place = __popcll(hosts & (rank_bit(rank) - 1));
        parts.row[place] =
            channel_at(home, members.region[rank], args.channel).outbox_by_slot(members.slot[home.rank], token);
        parts.weight[place] = 1.0f;  // the experts have weighted and summed already
      }
    if (lane == 0) parts.count = __popcll(hosts);
    return;
  }
  const int64_t expert = lane < args.topk ? experts[lane] : -1;
  const int64_t limit = static_cast<int64_t>(home.shape.max_ranks) * home.shape.local_experts;
  const uint32_t rank = expert >= 0 && expert < limit ? home.local_experts.quotient(static_cast<uint32_t>(expert)) : 0;
  const bool counts = expert >= 0 && expert < limit && (members.reachable >> rank & 1);
  const uint32_t chosen = __ballot_sync(~0u, counts);
  if (counts) {
    const uint32_t place = __popc(chosen & ((1u << lane) - 1));
    parts.row[place] = channel_at(home, members.region[rank], args.channel).outbox_by_choice(home.rank, token, lane);
    parts.weight[place] = args.topk_weights ? args.topk_weights[static_cast<uint64_t>(token) * args.topk + lane] : 1.0f;
  }
  if (lane == 0) parts.count = __popc(chosen);
}

// A rank that dropped us does not wait for us to finish reading. Its stamp tells. By one warp, when the block has
// passed a barrier behind its sums.
//
// The stamp must be loaded after the rows, and no fence is needed for that: a sum is stored only when all its rows are
// here, and the barrier only opens when the stores were issued. The rows and the stamp of a rank are memory of one GPU,
// which every load of ours reaches, so a row of a later round is never followed by the stamp of this one. A fence would
// wait for the stores of the sums.
__device__ void check_stamps(const Home& home, uint32_t channel, const Members& members, uint64_t usable) {
  const uint64_t expected = eep_flag_make(members.epoch, members.round, 0);
  bool torn = false;
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (usable >> rank & 1)
      torn |= load_relaxed_sys(channel_at(home, members.region[rank], channel).outbox_stamp()) != expected;
  if (__any_sync(~0u, torn) && threadIdx.x == 0) {
    note(&home.state->trouble, EEP_STATUS_TORN);
    show_trouble(&home.state->trouble, home.page);
  }
}

// What a launch says of a combine, so that no kernel has to divide for it.
//
// Of few tokens each is shared by several blocks: those of a group own tokens group, + groups, ..., and each adds up
// every so many columns of them. One block alone would take long to load all rows of a token.
struct Plan {
  uint32_t sharers_log2 = 0;
  Divider groups;
  Divider chunks;  // in which warps take a row
};

struct Ownership {
  uint32_t sharers, groups, group, tokens;

  __device__ Ownership(uint32_t tokens_in_all, const Plan& plan)
      : sharers(1u << plan.sharers_log2), groups(plan.groups.by), group(blockIdx.x >> plan.sharers_log2) {
    tokens = group < groups && group < tokens_in_all ? plan.groups.quotient(tokens_in_all - group - 1) + 1 : 0;
  }
  __device__ uint32_t token(uint32_t number) const { return group + number * groups; }
  __device__ Columns columns(const Plan& plan) const { return {blockIdx.x % sharers, plan.sharers_log2, plan.chunks}; }
};

// `kEncoded`: outputs travel as fp8. In a kernel of its own, which needs more registers.
//
// The first warp talks to the other ranks, the last ones find out who they are and where the parts of the sums lie.
template <uint32_t kPhases, typename Membership, uint32_t kThreads, bool kEncoded, bool kStamped>
__global__ void __launch_bounds__(kThreads, kWide / kThreads)
    combine_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_combine_recv_args args,
                   const __grid_constant__ Plan plan, const __grid_constant__ Membership membership) {
  __shared__ Members members;
  __shared__ Parts parts[kTokensAtOnce];
  __shared__ uint64_t usable;
  constexpr uint32_t kWarps = kThreads / 32;
  const uint32_t warp = threadIdx.x / 32;
  await_kernel_before();
  if (kPhases & kReceive && kThreads == kNarrow && (home.bench & EEP_BENCH_AT_ONCE)) let_next_kernel_begin();
  const Stopwatch<kStamped> stopwatch(home, kCombineStamps);
  if (kPhases & kSend && blockIdx.x == 0 && warp == 0) {
    answer_sources(home, args.channel);
    stopwatch.stamp(kAnswered);
  }
  if constexpr (std::is_same_v<Membership, FixedMembers>) {
    if (warp == kWarps - 1) read_members(membership, home.state->channels[args.channel].snapshot.round, members);
    __syncthreads();
  } else {
    read_snapshot<kThreads>(home, args.channel, members);
  }
  stopwatch.stamp(kMembersRead);
  if constexpr (kPhases & kReceive) {
    // Where the parts of its tokens lie is found while the others get ready.
    const Ownership own(args.tokens, plan);
    bool waited = false;
    for (uint32_t done = 0; done < own.tokens || !waited; done += kTokensAtOnce) {
      const uint32_t batch = done < own.tokens ? min(own.tokens - done, kTokensAtOnce) : 0;
      for (uint32_t i = kWarps - 1 - warp; i < batch; i += kWarps)
        find_parts(home, args, members, own.token(done + i), parts[i]);
      if (!waited && warp == 0) {
        stopwatch.stamp(kPartsFound);
        const uint64_t ready = await_outboxes(home, args.channel, members, args.tokens);
        if (threadIdx.x == 0) usable = ready;
      }
      waited = true;
      __syncthreads();
      if (home.overlaps) let_next_kernel_begin();
      stopwatch.stamp(kOutboxesSeen);
      const uint32_t first = own.token(done);
      // What a rank that did not answer left in its outbox is added all the same: the status says not to use the sum.
      if constexpr (kEncoded)
        add_parts<EEP_TYPE_FP8, kWarps>(home, args, parts, first, own.groups, batch, own.columns(plan));
      else if (home.shape.combine_type == EEP_TYPE_BF16)
        add_parts<EEP_TYPE_BF16, kWarps>(home, args, parts, first, own.groups, batch, own.columns(plan));
      else
        add_parts<EEP_TYPE_F32, kWarps>(home, args, parts, first, own.groups, batch, own.columns(plan));
      __syncthreads();
    }
    stopwatch.stamp(kSummed);
    if (own.tokens && warp == 0 && !(home.bench & EEP_BENCH_UNCHECKED))
      check_stamps(home, args.channel, members, usable);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      home.state->channels[args.channel].last_epoch = members.epoch;
      home.state->channels[args.channel].last_round = members.round;
    }
  }
  stopwatch.stamp(kEnded);
}

// Where the GPU is shared, this waits before the kernel that adds up, which then finds everything there. Its one block
// leaves room on its multiprocessor for others.
template <bool kSendsFlags>
__global__ void __launch_bounds__(kWaiters)
    wait_kernel(const __grid_constant__ Home home, const __grid_constant__ eep_combine_recv_args args) {
  __shared__ Members members;
  await_kernel_before();
  if (kSendsFlags && threadIdx.x < 32) answer_sources(home, args.channel);
  read_snapshot<kWaiters>(home, args.channel, members);
  if (threadIdx.x >= 32) return;
  await_outboxes(home, args.channel, members, args.tokens);
  let_next_kernel_begin();
}

template <bool kSendsFlags>
int launch_wait(eep_context* context, const eep_combine_recv_args& args, cudaStream_t stream, bool early) {
  return check_cuda(launch(wait_kernel<kSendsFlags>, 1, kWaiters, stream, early, context->home, args),
                    "waiting for a combine");
}

Plan plan_of(const Home& home, uint32_t tokens, uint32_t blocks, bool shares) {
  Plan plan;
  while (shares && 1u << plan.sharers_log2 < kMostSharers && (tokens << plan.sharers_log2) * 2 <= blocks)
    ++plan.sharers_log2;
  plan.groups = Divider(blocks >> plan.sharers_log2);
  const uint32_t type = home.shape.combine_type;
  const uint32_t vectors = home.shape.hidden * (eep_is_fp8(type) ? 1 : eep_element_bytes(type)) / sizeof(uint4);
  plan.chunks = Divider((vectors + 31) / 32);
  return plan;
}

template <uint32_t kPhases, uint32_t kThreads, bool kEncoded>
cudaError_t launch_kernel(eep_context* context, const eep_combine_recv_args& args, cudaStream_t stream, bool early) {
  uint32_t blocks = kPhases & kReceive ? context->blocks : 1;
  // Those beyond would have little left to add up.
  if (kThreads == kNarrow) blocks = std::min(blocks, args.tokens ? std::max(kMostSharers, 2 * args.tokens) : 1);
  const Plan plan = plan_of(context->home, args.tokens, blocks, kThreads == kNarrow);
  if (context->is_bench(EEP_BENCH_FIXED_MEMBERSHIP))
    return launch(combine_kernel<kPhases, FixedMembers, kThreads, kEncoded, false>, blocks, kThreads, stream, early,
                  context->home, args, plan, fixed_members(*context));
  if constexpr ((kPhases & kReceive) != 0)
    if (context->is_bench(EEP_BENCH_STAMPS))
      return launch(combine_kernel<kPhases, InMemory, kThreads, kEncoded, true>, blocks, kThreads, stream, early,
                    context->home, args, plan, InMemory{});
  return launch(combine_kernel<kPhases, InMemory, kThreads, kEncoded, false>, blocks, kThreads, stream, early,
                context->home, args, plan, InMemory{});
}

template <uint32_t kPhases>
int launch_combine(eep_context* context, const eep_combine_recv_args& args, cudaStream_t stream, bool early) {
  constexpr bool kReceives = (kPhases & kReceive) != 0;
  constexpr uint32_t kMost = kReceives ? kWide : kNarrow;
  const bool narrow = args.tokens <= kMostNarrowTokens && !context->is_bench(EEP_BENCH_WIDE);
  const bool encoded = kReceives && eep_is_fp8(context->home.shape.combine_type);
  const auto kernel =
      encoded  ? narrow ? launch_kernel<kPhases, kNarrow, kReceives> : launch_kernel<kPhases, kMost, kReceives>
       : narrow ? launch_kernel<kPhases, kNarrow, false>
               : launch_kernel<kPhases, kMost, false>;
  return check_cuda(kernel(context, args, stream, early || context->home.overlaps), "combine");
}

int begin_send(eep_context* context, const eep_combine_send_args& args) {
  const Turn turn = context->turn(args.channel);
  if (const int error = check_turn(context->home.shape, args.channel, turn, EEP_PHASE_RECEIVED, "combine"))
    return error;
  if (const int error = check_combine_send(context->home.shape, args)) return error;
  context->turns[args.channel].phase = EEP_PHASE_PUBLISHED;
  return EEP_OK;
}

int begin_receive(eep_context* context, const eep_combine_recv_args& args) {
  const Turn turn = context->turn(args.channel);
  if (const int error = check_turn(context->home.shape, args.channel, turn, EEP_PHASE_PUBLISHED, "combine's receive"))
    return error;
  if (const int error = check_combine_recv(context->home.shape, args, context->turns[args.channel].tokens))
    return error;
  context->turns[args.channel].phase = EEP_PHASE_IDLE;
  return EEP_OK;
}

}  // namespace

template <uint32_t kThreads, bool kEncoded>
cudaError_t load_receivers() {
  return load_kernels(combine_kernel<kReceive, InMemory, kThreads, kEncoded, false>,
                      combine_kernel<kSend | kReceive, InMemory, kThreads, kEncoded, false>);
}

cudaError_t load_combine() {
  for (const auto load : {load_receivers<kNarrow, false>, load_receivers<kWide, false>, load_receivers<kNarrow, true>,
                          load_receivers<kWide, true>})
    if (const cudaError_t error = load()) return error;
  return load_kernels(combine_kernel<kSend, InMemory, kNarrow, false, false>, wait_kernel<false>, wait_kernel<true>);
}

}  // namespace eep

int eep_combine_send(eep_context* context, const eep_combine_send_args* args, void* stream) {
  if (const int error = eep::begin_send(context, *args)) return error;
  if (const int error = eep::publish(context, *args, stream)) return error;
  eep_combine_recv_args flags_only{};
  flags_only.channel = args->channel;
  return eep::launch_combine<eep::kSend>(context, flags_only, static_cast<cudaStream_t>(stream),
                                         !eep::is_published(*context, *args));
}

int eep_combine_recv(eep_context* context, const eep_combine_recv_args* args, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (const int error = eep::begin_receive(context, *args)) return error;
  if (const int error = eep::land_sums(context, args->channel, stream)) return error;
  if (context->shares_gpu)
    if (const int error = eep::launch_wait<false>(context, *args, on, false)) return error;
  return eep::launch_combine<eep::kReceive>(context, *args, on, context->shares_gpu);
}

int eep_combine(eep_context* context, const eep_combine_send_args* send, const eep_combine_recv_args* receive,
                void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (const int error = eep::begin_send(context, *send)) return error;
  if (const int error = eep::publish(context, *send, stream)) return error;
  if (const int error = eep::begin_receive(context, *receive)) return error;
  const bool early = !eep::is_published(*context, *send);
  if (context->home.landing) {
    if (const int error = eep::launch_combine<eep::kSend>(context, *receive, on, early)) return error;
    if (const int error = eep::land_sums(context, receive->channel, stream)) return error;
    if (context->shares_gpu)
      if (const int error = eep::launch_wait<false>(context, *receive, on, false)) return error;
    return eep::launch_combine<eep::kReceive>(context, *receive, on, context->shares_gpu);
  }
  if (!context->shares_gpu) return eep::launch_combine<eep::kSend | eep::kReceive>(context, *receive, on, early);
  if (const int error = eep::launch_wait<true>(context, *receive, on, early)) return error;
  return eep::launch_combine<eep::kReceive>(context, *receive, on, true);
}
