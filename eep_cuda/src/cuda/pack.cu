// Expert layout, after a dispatch: one row per (token, local expert), packed per expert, sources in rank order.
#include "cuda/launch.h"
#include "cuda/members.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kFinders = 1024, kFinderWarps = kFinders / 32;

// The tokens of all sources in the order of ranks, as if they lay in one row.
struct Queue {
  uint32_t slot[EEP_MAX_CUDA_RANKS];
  uint32_t end[EEP_MAX_CUDA_RANKS];  // of the tokens of each rank
};

// By all threads of a block.
__device__ void line_up(const Home& home, const eep_snapshot& snapshot, Queue& queue) {
  const uint32_t rank = threadIdx.x;
  if (rank < home.shape.max_ranks) {
    queue.slot[rank] = snapshot.slot[rank];
    queue.end[rank] = snapshot.received.words[0] >> rank & 1 ? snapshot.count[rank] : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (uint32_t next = 1; next < home.shape.max_ranks; ++next) queue.end[next] += queue.end[next - 1];
  __syncthreads();
}

// One block per local expert finds its rows, in the order of ranks and then tokens.
__global__ void __launch_bounds__(kFinders)
    find_rows(const __grid_constant__ Home home, const __grid_constant__ eep_dispatch_recv_args args,
              int32_t* packed_source) {
  __shared__ Queue queue;
  __shared__ uint32_t found_by_warp[kFinderWarps];
  __shared__ uint32_t first_of[EEP_MAX_CUDA_RANKS + 1];  // the position of the first row that a rank may have
  await_kernel_before();
  let_next_kernel_begin();
  line_up(home, home.state->channels[args.channel].snapshot, queue);
  const ChannelView inbox = own_channel(home, args.channel);
  const uint32_t expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, ranks = home.shape.max_ranks;
  const uint64_t rows_per_expert = static_cast<uint64_t>(ranks) * home.shape.max_tokens;
  const uint32_t tokens = queue.end[ranks - 1];
  uint32_t total = 0;
  for (uint32_t first = 0; first < tokens; first += kFinders) {
    const uint32_t place = first + threadIdx.x;
    uint32_t rank = 0, token = 0;
    bool wanted = false, bad = false;
    if (place < tokens) {
      while (queue.end[rank] <= place) ++rank;
      token = place - (rank ? queue.end[rank - 1] : 0);
      const int32_t* idx = inbox.topk_idx(queue.slot[rank], token);
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
    for (uint32_t each = 0; each < kFinderWarps; ++each) {
      if (each < warp) position += found_by_warp[each];
      total += found_by_warp[each];
    }
    if (place < tokens && token == 0) first_of[rank] = position;
    if (wanted) {
      args.src_info[expert * rows_per_expert + position] = static_cast<int32_t>(token);
      packed_source[expert * rows_per_expert + position] =
          static_cast<int32_t>(inbox.row_index(queue.slot[rank], token));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    args.packed_count[expert] = static_cast<int32_t>(total);
    for (uint32_t rank = ranks; rank-- > 0;) {  // a rank without tokens begins where the next one does
      const uint32_t end = rank + 1 < ranks ? first_of[rank + 1] : total;
      if (queue.end[rank] == (rank ? queue.end[rank - 1] : 0)) first_of[rank] = end;
      args.layout_range[static_cast<uint64_t>(expert) * ranks + rank] =
          static_cast<int64_t>(first_of[rank]) << 32 | (end - first_of[rank]);
    }
  }
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
          check_cuda(launch(find_rows, shape.local_experts, kFinders, on, true, context->home, args, source),
                     "finding received tokens"))
    return error;
  const dim3 grid(std::max(1u, context->blocks * 8 / shape.local_experts), shape.local_experts);
  return check_cuda(launch(copy_rows, grid, kThreads, on, true, context->home, args, source),
                    "packing received tokens");
}

}  // namespace eep
