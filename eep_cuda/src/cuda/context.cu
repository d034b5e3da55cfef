// Creation, and showing the kernels a new table. Host code; what runs per step is in the kernels' own files.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "common/control.h"
#include "cuda/state.cuh"

namespace eep {

const uint32_t kMostRanks = EEP_MAX_CUDA_RANKS;

int check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return EEP_OK;
  return fail(EEP_ERROR_DEVICE, "%s: CUDA says %s", what, cudaGetErrorString(error));
}

namespace {

// Ranks that share a GPU wait for each other inside their kernels, so all of their blocks must be resident at once.
uint32_t default_blocks(uint32_t max_ranks) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return std::max(1u, std::min(32u, static_cast<uint32_t>(multiprocessors) / max_ranks));
}

}  // namespace
}  // namespace eep

eep_context::~eep_context() {
  eep::hide_all(this);
  cudaFree(home.state);
  cudaFree(packed_source);
  cudaFreeHost(lanes);
  if (side) cudaStreamDestroy(side);
  if (is_registered) cudaHostUnregister(control);
}

int eep_create(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control, eep_context** out) {
  using eep::check_cuda;
  if (const int error = eep::check_create(*shape, rank, region, control)) return error;
  if (shape->hidden % 8)
    return eep::fail(EEP_ERROR_ARGUMENT, "on a GPU hidden must be a multiple of 8, got %u", shape->hidden);
  const uint32_t blocks = eep::default_blocks(shape->max_ranks);
  if (shape->lanes && shape->lane_parts > blocks)
    return eep::fail(EEP_ERROR_ARGUMENT, "lane_parts must be at most %u here, where %u ranks may share a GPU, got %u",
                     blocks, shape->max_ranks, shape->lane_parts);
  if (shape->lanes && shape->lane_bytes > eep::kMostLaneBytes)
    return eep::fail(EEP_ERROR_ARGUMENT, "on a GPU lane_bytes must be at most %u, got %u", eep::kMostLaneBytes,
                     shape->lane_bytes);
  auto context = std::make_unique<eep_context>();
  context->control = control;
  context->table.rank = rank;
  context->table.max_ranks = shape->max_ranks;
  context->home.region = static_cast<uint8_t*>(region);
  context->home.shape = *shape;
  context->home.at = eep_region_layout_of(shape);
  context->home.local_experts = eep::Divider(shape->local_experts);
  context->home.rank = rank;
  context->blocks = blocks;
  if (const int error = check_cuda(cudaHostRegister(control, sizeof *control, cudaHostRegisterMapped),
                                   "the control page cannot be shown to the GPU"))
    return error;
  context->is_registered = true;
  void* page = nullptr;
  if (const int error = check_cuda(cudaHostGetDevicePointer(&page, control, 0), "the control page has no GPU address"))
    return error;
  context->home.page = static_cast<eep_control_page*>(page);
  if (const int error = check_cuda(cudaMalloc(&context->home.state, sizeof(eep::DeviceState)), "no device memory"))
    return error;
  cudaMemset(context->home.state, 0, sizeof(eep::DeviceState));
  if (shape->layout == EEP_LAYOUT_EXPERT) {
    const uint64_t rows = eep::packed_rows(*shape) * shape->channels;
    if (const int error = check_cuda(cudaMalloc(&context->packed_source, rows * sizeof(int32_t)), "no device memory"))
      return error;
  }
  if (shape->lanes) {
    if (const int error = check_cuda(cudaMallocHost(&context->lanes, EEP_MAX_LANES * sizeof(eep::Lane)), "no memory"))
      return error;
    std::memset(static_cast<void*>(context->lanes), 0, EEP_MAX_LANES * sizeof(eep::Lane));
    if (const int error = check_cuda(cudaStreamCreateWithFlags(&context->side, cudaStreamNonBlocking), "no stream"))
      return error;
    for (const auto load : {eep::load_moves, eep::load_reductions})
      if (const int error = check_cuda(load(), "loading the kernels")) return error;
  }
  for (const auto load : {eep::load_dispatch, eep::load_combine, eep::load_pack, eep::load_publish, eep::load_barrier,
                          eep::load_weights, eep::load_rows, eep::load_pages, eep::load_landing})
    if (const int error = check_cuda(load(), "loading the kernels")) return error;
  if (const int error = check_cuda(cudaDeviceSynchronize(), "creating a buffer")) return error;
  *out = context.release();
  return EEP_OK;
}

void eep_destroy(eep_context* context) {
  cudaDeviceSynchronize();  // a kernel may still look at what is freed here
  delete context;
}

eep_peer_table* eep_table(eep_context* context) { return &context->table; }

int eep_publish_table(eep_context* context) {
  // Between steps: whatever still runs belongs to a step that is over, and must not see two views.
  if (const int error = eep::check_cuda(cudaDeviceSynchronize(), "before a new view")) return error;
  eep::forget_trouble(*context->control);
  eep::DeviceState* state = context->home.state;
  cudaMemset(&state->trouble, 0, sizeof state->trouble);
  for (auto& channel : state->channels) {
    // Offsets only: `state` is device memory.
    cudaMemset(&channel.senders_done, 0, sizeof channel.senders_done);
  }
  if (const int error =
          eep::check_cuda(cudaMemcpy(&state->table, &context->table, sizeof context->table, cudaMemcpyHostToDevice),
                          "publishing a peer table"))
    return error;
  return eep::find_lanes(context);
}

int eep_publish_deadline(eep_context* context) {
  return eep::check_cuda(cudaMemcpy(&context->home.state->table.deadline_ns, &context->table.deadline_ns,
                                    sizeof context->table.deadline_ns, cudaMemcpyHostToDevice),
                         "publishing a deadline");
}

int eep_tune(eep_context* context, uint32_t blocks, uint32_t bench) {
  if (blocks > 1024) return eep::fail(EEP_ERROR_ARGUMENT, "a kernel takes at most 1024 blocks, got %u", blocks);
  if (blocks) context->blocks = blocks;
  context->home.bench = bench;
  return EEP_OK;
}

int eep_share_gpu(eep_context* context) {
  context->shares_gpu = true;
  return EEP_OK;
}

int eep_overlap(eep_context* context) {
  context->home.overlaps = 1;
  return EEP_OK;
}

int eep_stamps(eep_context* context, eep_block_stamps* stamps, uint32_t blocks) {
  constexpr uint32_t kMost = EEP_STAMPED_KERNELS * EEP_STAMPED_BLOCKS;
  if (blocks > kMost) return eep::fail(EEP_ERROR_ARGUMENT, "at most %u blocks are stamped, got %u", kMost, blocks);
  return eep::check_cuda(
      cudaMemcpy(stamps, context->home.state->stamps, blocks * sizeof *stamps, cudaMemcpyDeviceToHost), "stamps");
}

const eep_snapshot* eep_snapshot_of(eep_context* context, uint32_t channel) {
  static thread_local eep_snapshot copy;
  if (channel >= context->home.shape.channels) return nullptr;
  cudaMemcpy(&copy, &context->home.state->channels[channel].snapshot, sizeof copy, cudaMemcpyDeviceToHost);
  return &copy;
}
