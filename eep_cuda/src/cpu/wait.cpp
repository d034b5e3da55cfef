#include "cpu/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace eep {
namespace {

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

void relax() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("pause" ::: "memory");
#endif
}

}  // namespace

bool is_revoked(const eep_control_page& page, uint64_t epoch) { return load_acquire(page.revoked_epoch) >= epoch; }

RankSet given_up(const eep_control_page& page) { return load_acquire(page.suspects) | load_acquire(page.dropped); }

void report(eep_control_page& page, eep_status why) { set_bits(page.status, uint64_t{why}); }

BoundedWait::BoundedWait(eep_control_page& page, uint64_t epoch, uint64_t deadline_ns, uint64_t longest_sleep_ns,
                         hosts::Loan* loan)
    : page_(page), epoch_(epoch), deadline_ns_(deadline_ns), longest_sleep_ns_(longest_sleep_ns), loan_(loan) {}

void BoundedWait::begin_look() {
  doorbell_ = std::atomic_ref<uint32_t>(page_.doorbell).load(std::memory_order_seq_cst);
}

RankSet BoundedWait::pause(const RankSet& missing, RankSet gone) {
  if (is_revoked(page_, epoch_)) {
    report(page_, EEP_STATUS_REVOKED);
    return {};
  }
  gone |= load_acquire(page_.suspects) & missing;
  if (is_empty(gone) && loan_ && !last_look_ && loan_->rest()) return missing;
  if (is_empty(gone) && !rest(count(missing))) gone = missing;
  if (!is_empty(gone)) {
    set_bits(page_.dropped, gone);
    report(page_, EEP_STATUS_SUSPECT);
  }
  return missing - gone;
}

bool BoundedWait::rest(uint32_t rings) {
  if (last_look_) return false;
  if (++looks_ < kLooksBeforeSleep) {
    looks_ < kLooksBeforeYield ? relax() : static_cast<void>(sched_yield());
    return true;
  }
  const uint64_t now = now_ns();
  if (!started_ns_) started_ns_ = now;
  const uint64_t waited = now - started_ns_;
  if (waited >= deadline_ns_)
    last_look_ = true;  // we may have been stopped since the last look; what arrived meanwhile counts
  else
    sleep(std::min(deadline_ns_ - waited, longest_sleep_ns_), rings);
  return true;
}

// The order of these steps is what ring() relies on.
void BoundedWait::sleep(uint64_t remaining_ns, uint32_t rings) {
  std::atomic_ref<uint32_t> sleepers(page_.sleepers), wake_at(page_.wake_at);
  if (sleepers.fetch_add(1, std::memory_order_seq_cst) == 0)
    wake_at.store(doorbell_ + rings, std::memory_order_seq_cst);
  const timespec timeout{time_t(remaining_ns / 1'000'000'000), long(remaining_ns % 1'000'000'000)};
  syscall(SYS_futex, &page_.doorbell, FUTEX_WAIT, doorbell_, &timeout, nullptr, 0);
  wake_at.store(doorbell_, std::memory_order_seq_cst);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace eep
