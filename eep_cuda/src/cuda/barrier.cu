// A barrier over the active ranks, outside any round.
#include "cuda/members.cuh"

namespace eep {
namespace {

__global__ void barrier_kernel(const __grid_constant__ Home home, uint64_t deadline_ns) {
  __shared__ Members members;
  read_members(home, 0, members);
  DeviceState& state = *home.state;
  const uint64_t epoch = members.epoch, round = (state.barrier_epoch == epoch ? state.barrier_round : 0) + 1;
  const ChannelView own(home, reinterpret_cast<uint64_t>(home.region), 0);
  const uint64_t others = members.reachable & ~rank_bit(home.rank);
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (others >> rank & 1)
      store_release_sys(&ChannelView(home, members.region[rank], 0).mailbox(members.slot[home.rank])->barrier_flag,
                        eep_flag_make(epoch, round, 0));
  const WaitFor wait{home.page, &state.trouble, epoch, deadline_ns, 0};
  const uint64_t arrived = wait_for(wait, others, [&](uint32_t rank) {
    const uint64_t flag = load_acquire_sys(&own.mailbox(members.slot[rank])->barrier_flag);
    // A peer may be one barrier ahead already; it cannot be two.
    return eep_flag_is(flag, epoch, round) || eep_flag_is(flag, epoch, round + 1);
  });
  if (threadIdx.x == 0) {
    if (arrived != others) show_trouble(&state.trouble, home.page);
    state.barrier_epoch = epoch;
    state.barrier_round = round;
  }
}

}  // namespace

cudaError_t load_barrier() { return load_kernels(barrier_kernel); }

}  // namespace eep

int eep_barrier(eep_context* context, uint64_t deadline_ns, void* stream) {
  if (!context->home.shape.channels)
    return eep::fail(EEP_ERROR_ARGUMENT, "this region has only lanes: use the barrier of a process group");
  if (const int error = eep::check_in_view(context->table, "barrier")) return error;
  eep::barrier_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(context->home, deadline_ns);
  return eep::check_cuda(cudaGetLastError(), "barrier");
}
