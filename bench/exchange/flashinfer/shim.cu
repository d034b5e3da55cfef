// FlashInfer's one-sided MoE all-to-all behind a C interface, for the contest. Built with the sources of the package
// flashinfer-python; see build.py.
//
// A rank is a workspace, which its peers map. What lies where in it is FlashInfer's caller's to choose.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <exception>

#include "tensorrt_llm/common/dataType.h"
#include "tensorrt_llm/common/envUtils.h"
#include "tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.h"

namespace all_to_all = tensorrt_llm::kernels::moe_alltoall;

namespace {

int threads_of_a_block = 256;

constexpr uint64_t kLine = 128;

}  // namespace

// What FlashInfer asks the environment for.
namespace tensorrt_llm::common {
int getEnvMoeA2ADispatchBlockSize() { return threads_of_a_block; }
int getEnvMoeA2ACombineBlockSize() { return threads_of_a_block; }
}  // namespace tensorrt_llm::common

extern "C" {

struct Exchange {
  int32_t ranks, rank, experts, topk, tokens, hidden, row_bytes, scales, overlaps, threads;
  void* workspace[all_to_all::kMaxRanks];  // of each rank
  const void *x, *scale, *experts_of_tokens, *weights;
  void* out;
};

// Offsets in a workspace.
struct Places {
  uint64_t round, finished_tokens, sent, received, dispatch_flags, combine_flags, target_ranks, places, rows, scales,
      experts, weights, outputs, end;
};

void places_of(const Exchange* exchange, Places* at) {
  uint64_t next = 0;
  const auto take = [&next](uint64_t bytes) {
    const uint64_t begin = next;
    next = (next + bytes + kLine - 1) / kLine * kLine;
    return begin;
  };
  const uint64_t ranks = exchange->ranks, tokens = exchange->tokens, rows = ranks * tokens, topk = exchange->topk;
  at->round = take(4);
  at->finished_tokens = take(4);
  at->sent = take(4 * ranks);
  at->received = take(4 * ranks);
  at->dispatch_flags = take(4 * ranks);
  at->combine_flags = take(4 * ranks);
  at->target_ranks = take(4 * tokens * all_to_all::kMaxTopK);
  at->places = take(4 * tokens * all_to_all::kMaxTopK);
  at->rows = take(rows * exchange->row_bytes);
  at->scales = take(rows * exchange->scales * 4);
  at->experts = take(rows * topk * 4);
  at->weights = take(rows * topk * 4);
  at->outputs = take(rows * exchange->hidden * 2);
  at->end = next;
}

// Memory that other processes may open: its address and its handle of 64 bytes. cudaError_t.
int make_workspace(uint64_t bytes, void** memory, void* handle) {
  if (const cudaError_t error = cudaMalloc(memory, bytes)) return error;
  if (const cudaError_t error = cudaMemset(*memory, 0, bytes)) return error;
  if (const cudaError_t error = cudaDeviceSynchronize()) return error;
  return cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *memory);
}
int open_workspace(const void* handle, void** memory) {
  return cudaIpcOpenMemHandle(memory, *static_cast<const cudaIpcMemHandle_t*>(handle), cudaIpcMemLazyEnablePeerAccess);
}
int close_workspace(void* memory) { return cudaIpcCloseMemHandle(memory); }
int free_workspace(void* memory) { return cudaFree(memory); }
int copy_bytes(void* to, const void* from, uint64_t bytes) {
  if (const cudaError_t error = cudaDeviceSynchronize()) return error;
  if (const cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault)) return error;
  return cudaDeviceSynchronize();
}

// A stream whose kernels run on the part `number` of as many equal parts of the GPU's multiprocessors. CUresult.
int make_stream_on_part(uint32_t parts, uint32_t number, void** stream) {
  CUdevice device;
  CUdevResource whole{}, part[all_to_all::kMaxRanks], rest{};
  uint32_t made = parts;
  CUdevResourceDesc description;
  CUgreenCtx context;
  if (parts > all_to_all::kMaxRanks || number >= parts) return CUDA_ERROR_INVALID_VALUE;
  cudaFree(nullptr);  // makes the context of the process
  if (const CUresult error = cuDeviceGet(&device, 0)) return error;
  if (const CUresult error = cuDeviceGetDevResource(device, &whole, CU_DEV_RESOURCE_TYPE_SM)) return error;
  const uint32_t each = whole.sm.smCount / parts / 8 * 8;
  if (const CUresult error = cuDevSmResourceSplitByCount(part, &made, &whole, &rest, 0, each)) return error;
  if (made < parts) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = cuDevResourceGenerateDesc(&description, &part[number], 1)) return error;
  if (const CUresult error = cuGreenCtxCreate(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM)) return error;
  return cuGreenCtxStreamCreate(reinterpret_cast<CUstream*>(stream), context, CU_STREAM_NON_BLOCKING, 0);
}

int dispatch(const Exchange* exchange, void* stream) try {
  Places at;
  places_of(exchange, &at);
  threads_of_a_block = exchange->threads;
  const auto place = [&](int rank, uint64_t offset) { return static_cast<uint8_t*>(exchange->workspace[rank]) + offset; };
  const auto words = [&](int rank, uint64_t offset) { return reinterpret_cast<int*>(place(rank, offset)); };
  all_to_all::MoeA2ADispatchParams params{};
  params.enable_pdl = exchange->overlaps != 0;
  params.ep_size = exchange->ranks;
  params.ep_rank = exchange->rank;
  params.num_experts = exchange->experts;
  params.local_num_tokens = params.max_tokens_per_rank = exchange->tokens;
  params.top_k = exchange->topk;
  params.token_selected_experts = static_cast<const int32_t*>(exchange->experts_of_tokens);
  uint64_t into[all_to_all::kMaxPayloads];
  const auto add = [&](const void* from, int bytes, int count, uint64_t offset) {
    into[params.num_payloads] = offset;
    params.payloads[params.num_payloads++] = {from, bytes, count};
  };
  add(exchange->x, exchange->row_bytes / exchange->hidden, exchange->hidden, at.rows);
  if (exchange->scales) add(exchange->scale, 4, exchange->scales, at.scales);
  add(exchange->experts_of_tokens, 4, exchange->topk, at.experts);
  add(exchange->weights, 4, exchange->topk, at.weights);
  const int own = exchange->rank;
  params.flag_val = reinterpret_cast<uint32_t*>(words(own, at.round));
  params.local_token_counter = words(own, at.finished_tokens);
  params.send_counters = words(own, at.sent);
  params.topk_target_ranks = words(own, at.target_ranks);
  params.topk_send_indices = words(own, at.places);
  for (int rank = 0; rank < exchange->ranks; ++rank) {
    params.recv_counters[rank] = words(rank, at.received);
    params.completion_flags[rank] = reinterpret_cast<uint32_t*>(words(rank, at.dispatch_flags));
    for (int i = 0; i < params.num_payloads; ++i) params.recv_buffers[rank][i] = place(rank, into[i]);
  }
  params.stream = static_cast<cudaStream_t>(stream);
  all_to_all::moe_a2a_prepare_dispatch_launch(params);
  all_to_all::moe_a2a_dispatch_launch(params);
  return cudaGetLastError();
} catch (const std::exception& error) {
  std::fprintf(stderr, "FlashInfer: %s\n", error.what());
  return cudaErrorUnknown;
}

int combine(const Exchange* exchange, void* stream) try {
  Places at;
  places_of(exchange, &at);
  threads_of_a_block = exchange->threads;
  const auto place = [&](int rank, uint64_t offset) { return static_cast<uint8_t*>(exchange->workspace[rank]) + offset; };
  const auto words = [&](int rank, uint64_t offset) { return reinterpret_cast<int*>(place(rank, offset)); };
  all_to_all::MoeA2ACombineParams params{};
  params.enable_pdl = exchange->overlaps != 0;
  params.ep_size = exchange->ranks;
  params.ep_rank = exchange->rank;
  params.local_num_tokens = params.max_tokens_per_rank = exchange->tokens;
  params.top_k = exchange->topk;
  params.output_data = exchange->out;
  params.elements_per_token = exchange->hidden;
  params.dtype = nvinfer1::DataType::kBF16;
  const int own = exchange->rank;
  params.flag_val = reinterpret_cast<uint32_t*>(words(own, at.round));
  params.topk_target_ranks = words(own, at.target_ranks);
  params.topk_send_indices = words(own, at.places);
  params.recv_counters = words(own, at.received);
  for (int rank = 0; rank < exchange->ranks; ++rank) {
    params.completion_flags[rank] = reinterpret_cast<uint32_t*>(words(rank, at.combine_flags));
    params.recv_buffers[rank] = place(rank, at.outputs);
  }
  params.stream = static_cast<cudaStream_t>(stream);
  all_to_all::moe_a2a_prepare_combine_launch(params);
  all_to_all::moe_a2a_combine_launch(params);
  return cudaGetLastError();
} catch (const std::exception& error) {
  std::fprintf(stderr, "FlashInfer: %s\n", error.what());
  return cudaErrorUnknown;
}

}  // extern "C"
