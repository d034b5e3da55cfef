// A barrier over the active ranks, outside any round.
#include "cpu/context.h"
#include "cpu/wait.h"

int eep_barrier(eep_context* context, uint64_t deadline_ns, void*) {
  if (const int error = eep::check_in_view(context->table, "barrier")) return error;
  eep_snapshot here;
  eep::take_snapshot(*context, here);
  const uint64_t epoch = context->table.epoch;
  if (context->barrier_epoch != epoch) context->barrier_epoch = epoch, context->barrier_round = 0;
  const uint64_t round = ++context->barrier_round;
  const uint64_t others = here.active & ~eep::rank_bit(context->table.rank) & ~eep::given_up(*context->control);
  const uint32_t own_slot = here.slot[context->table.rank];
  eep::for_each_rank(others, [&](uint32_t rank) {
    eep::store_release(context->of_peer(here, rank, 0).mailbox(own_slot).barrier_flag, eep_flag_make(epoch, round, 0));
    eep::ring(*reinterpret_cast<eep_control_page*>(here.control[rank]));
  });
  const eep::ChannelView own = context->own(0);
  eep::wait_for(others, *context->control, epoch, deadline_ns, [&](uint32_t rank) {
    const uint64_t flag = eep::load_acquire(own.mailbox(here.slot[rank]).barrier_flag);
    // A peer may be one barrier ahead already; it cannot be two.
    return eep_flag_is(flag, epoch, round) || eep_flag_is(flag, epoch, round + 1);
  });
  return EEP_OK;
}
