// Expert layout, after a dispatch: one row per (token, local expert), packed per expert, sources in rank order.
#include "cuda/launch.h"
#include "cuda/members.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;

// One block per local expert finds its rows, in the order of ranks and then tokens.
__global__ void __launch_bounds__(kThreads)
    find_rows(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_recv_args args,
              int32_t* packed_source) {
  __shared__ uint32_t found_by_warp[kWarps];
  __shared__ uint32_t total;
  await_kernel_before();
  let_next_kernel_begin();
  const eep_snapshot& snapshot = home.state->channels[args.channel].snapshot;
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t rows_per_expert = static_cast<uint64_t>(home.shape.max_ranks) * home.shape.max_tokens;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (uint32_t rank = 0; rank < home.shape.max_ranks; ++rank) {
    const uint32_t begin = total, slot = snapshot.slot[rank];
    const uint32_t count = snapshot.received.words[0] >> rank & 1 ? snapshot.count[rank] : 0;
    for (uint32_t first = 0; first < count; first += kThreads) {
      const uint32_t token = first + threadIdx.x;
      bool wanted = false, bad = false;
      if (token < count) {
        const int32_t* idx = inbox.topk_idx(slot, token);
        for (uint32_t k = 0; k < args.topk; ++k) {
          const int32_t named = idx[k];
          wanted |= named == static_cast<int32_t>(expert);
          bad |= named < -1 || named >= static_cast<int32_t>(home.shape.local_experts);
        }
      }
      if (bad) {
        note(&home.state->trouble, EEP_STATUS_CORRUPT, 0, rank_bit(rank));
        show_trouble(&home.state->trouble, home.page);
      }
      const uint32_t votes = __ballot_sync(~0u, wanted);
      if (lane == 0) found_by_warp[warp] = __popc(votes);
      __syncthreads();
      uint32_t position = total + __popc(votes & ((1u << lane) - 1));
      for (uint32_t earlier = 0; earlier < warp; ++earlier) position += found_by_warp[earlier];
      if (wanted) {
        args.src_info[expert * rows_per_expert + position] = static_cast<int32_t>(token);
        packed_source[expert * rows_per_expert + position] = static_cast<int32_t>(inbox.row_index(slot, token));
      }
      __syncthreads();
      if (threadIdx.x == 0)
        for (uint32_t found : found_by_warp) total += found;
      __syncthreads();
    }
    if (threadIdx.x == 0)
      args.layout_range[static_cast<uint64_t>(expert) * home.shape.max_ranks + rank] =
          static_cast<int64_t>(begin) << 32 | (total - begin);
  }
  if (threadIdx.x == 0) args.packed_count[expert] = static_cast<int32_t>(total);
}

// A warp per row; blockIdx.y is the expert.
__global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_recv_args args,
              const int32_t* packed_source) {
  await_kernel_before();
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t expert = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t rows_per_expert = static_cast<uint64_t>(home.shape.max_ranks) * home.shape.max_tokens;
  const uint64_t row_bytes = home.shape.hidden * eep_element_bytes(args.wire_type);
  const uint32_t count = static_cast<uint32_t>(args.packed_count[expert]);
  for (uint32_t position = blockIdx.x * kWarps + warp; position < count; position += gridDim.x * kWarps) {
    const uint64_t packed = expert * rows_per_expert + position;
    const uint32_t source = static_cast<uint32_t>(packed_source[packed]);
    const uint32_t slot = source / home.shape.max_tokens, token = source % home.shape.max_tokens;
    const uint2* from = reinterpret_cast<const uint2*>(inbox.row(slot, token, row_bytes));
    uint2* to = reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.packed_rows) + packed * row_bytes);
    if (row_bytes % sizeof(uint4) == 0) {
      const uint4* wide_from = reinterpret_cast<const uint4*>(from);
      uint4* wide_to = reinterpret_cast<uint4*>(to);
#pragma unroll 4
      for (uint32_t i = lane; i < row_bytes / sizeof(uint4); i += 32)
        store_row(wide_to + i, load_shared_row(wide_from + i));
    } else {
      for (uint32_t i = lane; i < row_bytes / sizeof(uint2); i += 32) to[i] = from[i];
    }
    if (!eep_is_fp8(args.wire_type)) continue;
    // Grouped matrix kernels read scales column by column; exponent bytes go four to a word.
    const uint32_t groups = home.shape.hidden / EEP_SCALE_GROUP;
    const uint32_t words = args.wire_type == EEP_TYPE_FP8_UE8M0 ? groups / 4 : groups;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(inbox.scales(slot, token));
    uint32_t* column = static_cast<uint32_t*>(args.packed_scales) + expert * words * rows_per_expert + position;
    for (uint32_t word = lane; word < words; word += 32) column[word * rows_per_expert] = scales[word];
  }
}

}  // namespace

cudaError_t load_pack() { return load_kernels(find_rows, copy_rows); }

int pack(eep_context* context, const eep_dispatch_recv_args& args, void* stream) {
  const eep_shape& shape = context->home.shape;
  const auto on = static_cast<cudaStream_t>(stream);
  int32_t* source = context->packed_source_of(args.channel);
  if (const int error =
          check_cuda(launch(find_rows, shape.local_experts, kThreads, on, true, context->home, args, source),
                     "finding received tokens"))
    return error;
  const dim3 grid(std::max(1u, context->blocks * 8 / shape.local_experts), shape.local_experts);
  return check_cuda(launch(copy_rows, grid, kThreads, on, true, context->home, args, source),
                    "packing received tokens");
}

}  // namespace eep
