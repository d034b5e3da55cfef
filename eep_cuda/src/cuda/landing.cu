// Between the region and the landing. To the kernels that come after these, a rank on another host is then as one that
// maps our region: its rows, its routing and its flags are in the region, where that rank would have written them. So
// only these kernels cross the bus for what came, once for each row, and no other kernel waits for the network.
//
//   dispatch   rows for other hosts -> landing, routing and flags -> mirrors (dispatch.cu)
//   land_rows  flag in the landing?  flag -> region; then routing and rows -> region
//   ...        the receive half of the dispatch, experts, as ever
//   put_outputs  outbox -> landing; combine.cu then stamps both, and puts flags into mirrors
//   land_sums  flag in the landing?  flag -> region
//   ...        the receive half of the combine, which pulls from the mirrors
#include "cuda/members.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32, kBlocksPerBlock = 4;

// By one warp. Each thread has several loads on their way: a trip over the bus takes long.
__device__ void copy_row(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  constexpr uint32_t kAtOnce = 4;
  const uint32_t lane = threadIdx.x % 32, vectors = static_cast<uint32_t>(bytes / sizeof(uint4));
  for (uint32_t first = lane; first < vectors; first += kAtOnce * 32) {
    uint4 data[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (first + i * 32 < vectors) data[i] = load_shared_row(reinterpret_cast<const uint4*>(from) + first + i * 32);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (first + i * 32 < vectors) store_row(reinterpret_cast<uint4*>(to) + first + i * 32, data[i]);
  }
}

// Waits for the dispatches of other hosts, as a receive half waits for those of this one. One small block, so that
// there is room on its multiprocessor for others.
__global__ void __launch_bounds__(EEP_MAX_CUDA_RANKS) await_rows(const __grid_constant__ Home home, uint32_t number) {
  __shared__ Members members;
  read_snapshot<EEP_MAX_CUDA_RANKS>(home, number, members);
  if (threadIdx.x >= 32) return;
  ChannelState& channel = home.state->channels[number];
  const ChannelView landing = landing_channel(home, number), own = own_channel(home, number);
  uint64_t flags[2] = {0, 0}, envelopes[2] = {0, 0};
  const WaitFor wait{home.page, &home.state->trouble, members.epoch, members.deadline_ns, 0};
  const uint64_t landed = wait_for(wait, members.reachable & remote_ranks(home), [&](uint32_t rank) {
    // A proxy writes the envelope first.
    const eep_mailbox* mailbox = landing.mailbox(members.slot[rank]);
    const uint64_t flag = load_acquire_sys(&mailbox->dispatch_flag);
    if (!eep_flag_is(flag, members.epoch, members.round)) return false;
    flags[rank / 32] = flag;
    envelopes[rank / 32] = load_relaxed_sys(&mailbox->envelope);
    return true;
  });
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (!(landed >> rank & 1)) continue;
    // Only the receive half looks for them, which begins when all rows are there. What is wrong with them it finds out.
    store_pair_relaxed_sys(&own.mailbox(members.slot[rank])->dispatch_flag, flags[half], envelopes[half]);
    const uint32_t count = eep_flag_count(flags[half]);
    channel.landed_count[rank] = count <= home.shape.max_tokens ? count : 0;
  }
  if (threadIdx.x) return;
  channel.landed = landed;
  // All that we still wait for have got the last round of our outbox. Of a rank that we dropped the proxy may be
  // sending it: it finds the stamp gone before the first new row is there. As in close_sources(), but in memory of the
  // host, where nothing but the fence says so.
  store_relaxed_sys(landing.outbox_stamp(), 0);
  fence_sys();
}

// A warp per row of a source that has landed.
__global__ void __launch_bounds__(kThreads)
    carry_rows(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_recv_args args) {
  const ChannelState& channel = home.state->channels[args.channel];
  const ChannelView landing = landing_channel(home, args.channel), own = own_channel(home, args.channel);
  const uint64_t landed = channel.landed, row_bytes = home.shape.hidden * eep_element_bytes(args.wire_type);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < home.shape.max_ranks * home.shape.max_tokens;
       i += gridDim.x * kWarps) {
    const uint32_t rank = i / home.shape.max_tokens, token = i % home.shape.max_tokens;
    if (!(landed >> rank & 1) || token >= channel.landed_count[rank]) continue;
    const uint32_t slot = channel.snapshot.slot[rank];
    int32_t expert = -1;
    if (lane < args.topk) {
      expert = landing.topk_idx(slot, token)[lane];
      own.topk_idx(slot, token)[lane] = expert;
      own.topk_weights(slot, token)[lane] = landing.topk_weights(slot, token)[lane];
    }
    if (!__any_sync(~0u, expert >= 0)) continue;  // its source had no use for this row, and did not send it
    copy_row(own.row(slot, token, row_bytes), landing.row(slot, token, row_bytes), row_bytes);
    if (!eep_is_fp8(args.wire_type)) continue;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(landing.scales(slot, token));
    uint32_t* own_scales = reinterpret_cast<uint32_t*>(own.scales(slot, token));
    for (uint32_t word = lane; word < home.at.scale_bytes / sizeof(uint32_t); word += 32)
      own_scales[word] = scales[word];
  }
}

// A warp per row that a source on another host waits for.
__global__ void __launch_bounds__(kThreads)
    carry_outputs(const __grid_constant__ Home home, const __grid_constant__ eep_combine_send_args args) {
  const ChannelState& channel = home.state->channels[args.channel];
  const eep_snapshot& snapshot = channel.snapshot;
  const ChannelView landing = landing_channel(home, args.channel), own = own_channel(home, args.channel);
  const uint64_t sources = channel.landed & snapshot.received.words[0];
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < home.shape.max_ranks * home.shape.max_tokens;
       i += gridDim.x * kWarps) {
    const uint32_t rank = i / home.shape.max_tokens, token = i % home.shape.max_tokens;
    if (!(sources >> rank & 1) || token >= snapshot.count[rank]) continue;
    const uint32_t slot = snapshot.slot[rank];
    const bool is_ours = lane < args.topk && own.topk_idx(slot, token)[lane] >= 0;
    const uint32_t chosen = __ballot_sync(~0u, is_ours);
    if (home.shape.layout == EEP_LAYOUT_RANK) {
      if (chosen)
        copy_row(landing.outbox_by_slot(slot, token), own.outbox_by_slot(slot, token), home.at.outbox_row_bytes);
      continue;
    }
    for (uint32_t left = chosen; left; left &= left - 1) {
      const uint32_t k = __ffs(left) - 1;
      copy_row(landing.outbox_by_choice(rank, token, k), own.outbox_by_choice(rank, token, k),
               home.at.outbox_row_bytes);
    }
  }
}

// Waits for the combine flags of other hosts.
__global__ void __launch_bounds__(EEP_MAX_CUDA_RANKS) await_sums(const __grid_constant__ Home home, uint32_t number) {
  __shared__ Members members;
  read_snapshot<EEP_MAX_CUDA_RANKS>(home, number, members);
  if (threadIdx.x >= 32) return;
  const ChannelView landing = landing_channel(home, number), own = own_channel(home, number);
  uint64_t flags[2] = {0, 0};
  const WaitFor wait{home.page, &home.state->trouble, members.epoch, members.deadline_ns, 0};
  const uint64_t landed = wait_for(wait, members.reachable & remote_ranks(home), [&](uint32_t rank) {
    flags[rank / 32] = load_acquire_sys(&landing.mailbox(members.slot[rank])->combine_flag);
    return eep_flag_is(flags[rank / 32], members.epoch, members.round) != 0;
  });
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x + 32 * half;
    if (landed >> rank & 1) store_relaxed_sys(&own.mailbox(members.slot[rank])->combine_flag, flags[half]);
  }
}

}  // namespace

cudaError_t load_landing() { return load_kernels(await_rows, carry_rows, carry_outputs, await_sums); }

int land_rows(eep_context* context, const eep_dispatch_recv_args& args, void* stream) {
  if (!context->home.landing) return EEP_OK;
  const auto on = static_cast<cudaStream_t>(stream);
  await_rows<<<1, EEP_MAX_CUDA_RANKS, 0, on>>>(context->home, args.channel);
  carry_rows<<<context->blocks * kBlocksPerBlock, kThreads, 0, on>>>(context->home, args);
  return check_cuda(cudaGetLastError(), "taking rows of other hosts");
}

int put_outputs(eep_context* context, const eep_combine_send_args& args, void* stream) {
  if (!context->home.landing) return EEP_OK;
  carry_outputs<<<context->blocks * kBlocksPerBlock, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(context->home,
                                                                                                       args);
  return check_cuda(cudaGetLastError(), "putting expert outputs where they can be sent");
}

int land_sums(eep_context* context, uint32_t channel, void* stream) {
  if (!context->home.landing) return EEP_OK;
  await_sums<<<1, EEP_MAX_CUDA_RANKS, 0, static_cast<cudaStream_t>(stream)>>>(context->home, channel);
  return check_cuda(cudaGetLastError(), "waiting for a combine of other hosts");
}

}  // namespace eep
