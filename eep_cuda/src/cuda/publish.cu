// Putting expert outputs into the outbox, where they were not written there in the first place.
#include "cuda/fp8.cuh"
#include "cuda/members.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;

__device__ void copy_row(uint8_t* to, const uint8_t* from, uint64_t bytes) {
#pragma unroll 4
  for (uint32_t i = threadIdx.x % 32; i < bytes / sizeof(uint4); i += 32)
    store_row(reinterpret_cast<uint4*>(to) + i, load_input(reinterpret_cast<const uint4*>(from) + i));
}

__device__ void put_output(const Home& home, uint8_t* to, const uint8_t* from) {
  if (eep_is_fp8(home.shape.combine_type))
    encode_row(to, from, home.shape.hidden);
  else
    copy_row(to, from, home.at.outbox_row_bytes);
}

// rank layout: a warp per inbox row that wanted an expert here.
__global__ void __launch_bounds__(kThreads)
    publish_by_rank(const __grid_constant__ Home home, const __grid_constant__ eep_combine_send_args args) {
  let_next_kernel_begin();
  const eep_snapshot& snapshot = home.state->channels[args.channel].snapshot;
  const ChannelView own = own_channel(home, args.channel);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < home.shape.max_ranks * home.shape.max_tokens;
       i += gridDim.x * kWarps) {
    const uint32_t rank = i / home.shape.max_tokens, token = i % home.shape.max_tokens;
    if (!(snapshot.received.words[0] >> rank & 1) || token >= snapshot.count[rank]) continue;
    const uint32_t slot = snapshot.slot[rank];
    if (!__any_sync(~0u, lane < args.topk && own.topk_idx(slot, token)[lane] >= 0)) continue;
    const uint64_t row = own.row_index(slot, token);
    put_output(home, own.outbox_row(row), static_cast<const uint8_t*>(args.x) + row * home.at.output_row_bytes);
  }
}

// expert layout: a warp per packed row; blockIdx.y is the expert.
__global__ void __launch_bounds__(kThreads)
    publish_by_expert(const __grid_constant__ Home home, const __grid_constant__ eep_combine_send_args args,
                      const int32_t* packed_source) {
  let_next_kernel_begin();
  const ChannelView own = own_channel(home, args.channel);
  const uint64_t rows_per_expert = static_cast<uint64_t>(home.shape.max_ranks) * home.shape.max_tokens;
  const uint32_t expert = blockIdx.y;
  const int64_t last = args.layout_range[static_cast<uint64_t>(expert + 1) * home.shape.max_ranks - 1];
  const uint32_t count =
      min(static_cast<uint32_t>(last >> 32) + static_cast<uint32_t>(last), static_cast<uint32_t>(rows_per_expert));
  for (uint32_t position = blockIdx.x * kWarps + threadIdx.x / 32; position < count; position += gridDim.x * kWarps) {
    const uint64_t packed = expert * rows_per_expert + position;
    const uint32_t source = static_cast<uint32_t>(packed_source[packed]);
    const uint32_t slot = source / home.shape.max_tokens, token = source % home.shape.max_tokens;
    if (slot >= home.at.slots) continue;
    for (uint32_t k = 0; k < args.topk; ++k)
      if (own.topk_idx(slot, token)[k] == static_cast<int32_t>(expert))
        put_output(home, own.outbox_by_choice(slot % home.shape.max_ranks, token, k),
                   static_cast<const uint8_t*>(args.x) + packed * home.at.output_row_bytes);
  }
}

}  // namespace

cudaError_t load_publish() { return load_kernels(publish_by_rank, publish_by_expert); }

bool is_published(const eep_context& context, const eep_combine_send_args& args) {
  const Home& home = context.home;
  return home.shape.layout == EEP_LAYOUT_RANK && !eep_is_fp8(home.shape.combine_type) &&
         args.x == home.region + args.channel * home.at.channel_bytes + home.at.outbox;
}

int publish(eep_context* context, const eep_combine_send_args& args, void* stream) {
  if (is_published(*context, args)) return put_outputs(context, args, stream);
  const Home& home = context->home;
  const auto on = static_cast<cudaStream_t>(stream);
  if (home.shape.layout == EEP_LAYOUT_RANK) {
    publish_by_rank<<<context->blocks * 4, kThreads, 0, on>>>(home, args);
  } else {
    const dim3 grid(std::max(1u, context->blocks * 8 / home.shape.local_experts), home.shape.local_experts);
    publish_by_expert<<<grid, kThreads, 0, on>>>(home, args, context->packed_source_of(args.channel));
  }
  if (const int error = check_cuda(cudaGetLastError(), "publishing expert outputs")) return error;
  return put_outputs(context, args, stream);
}

}  // namespace eep
