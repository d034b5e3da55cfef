// A barrier over the active ranks, outside any round.
#include "cpu/context.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// How long a wait may go without a look: a peer that has left our epoch rings once, and others may not ring at all.
constexpr uint64_t kLookForLeft = 20'000'000;

void enter_epoch(eep_context& context) {
  context.barrier_before = eep_flag_make(context.barrier_epoch, context.barrier_round, 0);
  context.barrier_epoch = context.table.epoch;
  context.barrier_round = 0;
}

// The order of the loads is what eep_barrier_read() relies on.
eep_barrier_word read(const eep_mailbox& mailbox, uint64_t epoch, uint64_t round) {
  const uint64_t latest = load_acquire(mailbox.dispatch_flag), flag = load_acquire(mailbox.barrier_flag);
  return eep_barrier_read(latest, flag, load_relaxed(mailbox.barrier_before), epoch, round);
}

// Waits until each of `missing` has entered the barrier, or one of them never will: then the epoch is over, though no
// revoke has reached us.
void wait_for_all(eep_context& context, const eep_snapshot& here, RankSet missing, uint64_t deadline_ns,
                  hosts::Loan& loan) {
  const uint64_t epoch = context.barrier_epoch, round = context.barrier_round;
  const ChannelView own = context.own(0);
  BoundedWait wait(*context.control, epoch, deadline_ns, kLookForLeft, &loan);
  while (!is_empty(missing)) {
    wait.begin_look();
    RankSet entered = {};
    bool never = false;
    for_each_rank(missing, [&](uint32_t rank) {
      const eep_barrier_word word = read(*own.mailbox(here.slot[rank]), epoch, round);
      if (word == EEP_BARRIER_ENTERED) add(entered, rank);
      if (word == EEP_BARRIER_NEVER) never = true;
    });
    if (never) return report(*context.control, EEP_STATUS_REVOKED);
    missing -= entered;
    if (!is_empty(missing)) missing = wait.pause(missing);
  }
}

}  // namespace
}  // namespace eep

int eep_barrier(eep_context* context, uint64_t deadline_ns, void*) {
  using namespace eep;
  if (const int error = check_in_view(context->table, "barrier")) return error;
  eep_snapshot here;
  take_snapshot(*context, here);
  if (context->barrier_epoch != context->table.epoch) enter_epoch(*context);
  const uint64_t flag = eep_flag_make(context->barrier_epoch, ++context->barrier_round, 0);
  const RankSet others = here.active - only(context->table.rank) - given_up(*context->control);
  hosts::Loan loan(context->table, context->round_bytes(0));
  loan.take();
  const uint32_t own_slot = here.slot[context->table.rank];
  for_each_rank(others, [&](uint32_t rank) {
    eep_mailbox& mailbox = *context->of_peer(here, rank, 0).mailbox(own_slot);
    store_relaxed(mailbox.barrier_before, context->barrier_before);
    store_release(mailbox.barrier_flag, flag);
    auto& page = *reinterpret_cast<eep_control_page*>(here.control[rank]);
    if (!loan.looks_at(&page)) ring(page);
  });
  loan.turn();
  wait_for_all(*context, here, others, deadline_ns, loan);
  return EEP_OK;
}
