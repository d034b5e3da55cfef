// A barrier over the active ranks, outside any round.
#include "cuda/members.cuh"

namespace eep {
namespace {

// The order of the loads is what eep_barrier_read() relies on. A dispatch flag of a rank on this host is one word with
// its envelope, and is read as it was written; a proxy writes them one after the other.
__device__ inline eep_barrier_word read_word(const eep_mailbox* mailbox, bool is_remote, uint64_t epoch,
                                             uint64_t round) {
  uint64_t latest, envelope;
  if (is_remote)
    latest = load_acquire_sys(&mailbox->dispatch_flag);
  else
    load_pair_acquire_sys(&mailbox->dispatch_flag, latest, envelope);
  const uint64_t flag = load_acquire_sys(&mailbox->barrier_flag);
  return eep_barrier_read(latest, flag, load_relaxed_sys(&mailbox->barrier_before), epoch, round);
}

__global__ void barrier_kernel(const __grid_constant__ Home home, uint64_t deadline_ns) {
  __shared__ Members members;
  read_members<true>(home, 0, read_table(home), members);
  DeviceState& state = *home.state;
  const uint64_t epoch = members.epoch;
  const bool is_first = state.barrier_epoch != epoch;
  const uint64_t round = (is_first ? 0 : state.barrier_round) + 1;
  const uint64_t before = is_first ? eep_flag_make(state.barrier_epoch, state.barrier_round, 0) : state.barrier_before;
  const ChannelView own = own_channel(home, 0), landing = landing_channel(home, 0);
  const uint64_t others = members.reachable & ~rank_bit(home.rank);
  for (uint32_t rank = threadIdx.x; rank < home.shape.max_ranks; rank += 32)
    if (others >> rank & 1) {
      eep_mailbox* mailbox = channel_at(home, members.region[rank], 0).mailbox(members.slot[home.rank]);
      store_relaxed_sys(&mailbox->barrier_before, before);
      store_release_sys(&mailbox->barrier_flag, eep_flag_make(epoch, round, 0));
    }
  const WaitFor wait{home.page, &state.trouble, epoch, deadline_ns, EEP_STATUS_REVOKED};
  const uint64_t arrived = wait_for(wait, others, [&](uint32_t rank) {
    const bool is_remote = members.remote >> rank & 1;
    const eep_mailbox* mailbox = (is_remote ? landing : own).mailbox(members.slot[rank]);
    const eep_barrier_word word = read_word(mailbox, is_remote, epoch, round);
    // The epoch is over, though no revoke has reached us: the wait ends at its next glance.
    if (word == EEP_BARRIER_NEVER) note(&state.trouble, EEP_STATUS_REVOKED);
    return word == EEP_BARRIER_ENTERED;
  });
  if (threadIdx.x == 0) {
    if (arrived != others) show_trouble(&state.trouble, home.page);
    state.barrier_epoch = epoch;
    state.barrier_round = round;
    state.barrier_before = before;
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
