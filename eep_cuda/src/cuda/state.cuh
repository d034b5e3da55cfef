// What a buffer is on a GPU: state in device memory at fixed addresses, and the handle the host keeps.
#ifndef EEP_CUDA_STATE_CUH_
#define EEP_CUDA_STATE_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "common/checks.h"
#include "common/divider.h"
#include "common/region_views.h"
#include "eep/eep.h"

namespace eep {

// What went wrong in this view; kept here because kernels have no atomics on host memory.
struct Trouble {
  uint64_t dropped;
  uint64_t corrupt;
  uint64_t status;
};

struct ChannelState {
  eep_snapshot snapshot;  // membership of the round, written once per dispatch and read by its combine
  uint64_t last_epoch;    // of the last round that was combined: no dispatch writes what its own blocks count from
  uint64_t last_round;
  uint64_t verdict;                           // the flag of the round whose sources are settled in the snapshot
  uint32_t senders_done;                      // blocks of a dispatch in one piece that have put all their rows
  uint64_t landed;                            // the ranks on other hosts whose rows of the round are in the landing
  uint32_t landed_count[EEP_MAX_CUDA_RANKS];  // and how many
};

// Of a kernel that waits on a GPU which other ranks need meanwhile. A waiting block fills a multiprocessor. Libraries
// start their matrix products in clusters of eight, which need eight free multiprocessors close to each other.
constexpr uint32_t kWaitingBlocks = 2;

constexpr uint32_t kMaxParts = 64;              // of a lane
constexpr uint32_t kMostLaneBytes = 64u << 20;  // so that 32 bits number the vectors of a round
constexpr uint32_t kUnknownLane = ~0u;

// A process group as the kernels see it. The host writes it, a graph holds only the number of the lane.
struct Lane {
  uint64_t group;  // 0: the lane is free
  uint32_t size;
  uint32_t rank[EEP_MAX_CUDA_RANKS];     // in the order of the group
  uint32_t lane_at[EEP_MAX_CUDA_RANKS];  // by rank: which lane of *its* region serves the group
};

// How far a part of a lane has come. Counted here, so that a graph has nothing of it baked in.
struct PartState {
  uint64_t epoch;
  uint64_t round;         // the last one, in that epoch
  uint64_t half;          // of the outbox, which comes next: alternates for ever, across epochs and groups
  uint64_t has_left_out;  // 1: a rank of the view was not told of every round of that epoch
};

struct DeviceState {
  eep_peer_table table;
  Trouble trouble;
  uint64_t barrier_epoch;
  uint64_t barrier_round;   // the last that was entered
  uint64_t barrier_before;  // flag of the last one of the epoch before
  ChannelState channels[EEP_MAX_CHANNELS];
  Lane lanes[EEP_MAX_LANES];
  PartState parts[EEP_MAX_LANES][kMaxParts];
  eep_block_stamps stamps[EEP_STAMPED_KERNELS * EEP_STAMPED_BLOCKS];
};

// Everything a kernel is told. Nothing of it changes while the buffer lives, so that graphs may hold it.
struct Home {
  DeviceState* state;
  eep_control_page* page;  // mapped host memory
  uint8_t* region;
  eep_shape shape;
  eep_region_layout at;
  Divider local_experts;
  uint32_t rank;
  uint32_t bench;     // eep_bench: what a benchmark wants otherwise
  uint32_t overlaps;  // whether the next kernel may take its place while one of ours runs
  uint8_t* landing;   // memory of the host that stands for the region towards other hosts; null: there are none
};

// A channel of a region that is mapped here, and of our own.
__device__ inline ChannelView channel_at(const Home& home, uint64_t region, uint32_t channel) {
  return {home.shape, home.at, reinterpret_cast<uint8_t*>(region), channel};
}
__device__ inline ChannelView own_channel(const Home& home, uint32_t channel) {
  return {home.shape, home.at, home.region, channel};
}
__device__ inline ChannelView landing_channel(const Home& home, uint32_t channel) {
  return {home.shape, home.at, home.landing, channel};
}

// expert layout: the rows that a channel packs for all local experts
inline uint64_t packed_rows(const eep_shape& shape) {
  return uint64_t{shape.local_experts} * shape.max_ranks * shape.max_tokens;
}

// Turns the outcome of a launch or another runtime call into an eep_error.
int check_cuda(cudaError_t error, const char* what);

}  // namespace eep

struct eep_context {
  eep::Home home{};
  eep_peer_table table{};  // the host's copy
  eep_control_page* control = nullptr;
  bool is_registered = false;        // the control page, with the GPU
  uint32_t blocks = 0;               // per kernel: what may spin at once must fit on the GPU at once
  bool shares_gpu = false;           // with ranks that have work for it while we wait
  int32_t* packed_source = nullptr;  // expert layout: the inbox row behind each packed row, for each channel
  eep::Lane* lanes = nullptr;        // the host's copy, in pinned memory
  std::map<const void*, std::vector<void*>> shown;  // what of a landing or a mirror is registered with the GPU
  cudaStream_t side = nullptr;  // for what must reach the kernels while some of them run, or while a graph is captured
  struct {
    uint32_t phase;
    uint32_t tokens;
    uint64_t epoch;
  } turns[EEP_MAX_CHANNELS] = {};

  eep_context() = default;
  eep_context(const eep_context&) = delete;
  ~eep_context();  // lets go of whatever was had so far, so that half a buffer leaves nothing behind

  bool is_bench(eep_bench what) const { return (home.bench & what) != 0; }
  // Of a channel: one dispatch is combined while another is in flight.
  int32_t* packed_source_of(uint32_t channel) const { return packed_source + channel * eep::packed_rows(home.shape); }
  eep::Turn turn(uint32_t channel) const {
    const auto& last = turns[channel < EEP_MAX_CHANNELS ? channel : 0];
    return {last.phase, last.epoch, table.epoch};
  }
};

namespace eep {

// expert layout: the kernels that follow a dispatch and precede a combine
int pack(eep_context* context, const eep_dispatch_recv_args& args, void* stream);
// Looks up where the members of all groups have their lanes, and shows it to the kernels. Part of showing a new view.
int find_lanes(eep_context* context);
// Whether the experts wrote the outbox themselves.
bool is_published(const eep_context& context, const eep_combine_send_args& args);
// either layout: nothing to do where they did
int publish(eep_context* context, const eep_combine_send_args& args, void* stream);

// What passes between the region and the landing; nothing where no rank is on another host.
// After a dispatch has sent, before it receives: rows of other hosts land.
int land_rows(eep_context* context, const eep_dispatch_recv_args& args, void* stream);
// After expert outputs were published, before their flags: what goes to other hosts is put into the landing.
int put_outputs(eep_context* context, const eep_combine_send_args& args, void* stream);
// Before a combine receives: flags of other hosts land.
int land_sums(eep_context* context, uint32_t channel, void* stream);
// Takes the landing and all mirrors from the kernels.
void hide_all(eep_context* context);

// Loads kernels into the context now rather than at their first launch: loading waits for the GPU to be idle, and by
// then a kernel of ours may be waiting for a rank that waits for us.
template <typename... Kernels>
cudaError_t load_kernels(Kernels*... kernels) {
  cudaFuncAttributes unused;
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? cudaFuncGetAttributes(&unused, kernels) : error), ...);
  return error;
}
cudaError_t load_dispatch();
cudaError_t load_combine();
cudaError_t load_pack();
cudaError_t load_publish();
cudaError_t load_barrier();
cudaError_t load_moves();
cudaError_t load_reductions();
cudaError_t load_far_reductions();
cudaError_t load_weights();
cudaError_t load_rows();
cudaError_t load_pages();
cudaError_t load_landing();

}  // namespace eep

#endif  // EEP_CUDA_STATE_CUH_
