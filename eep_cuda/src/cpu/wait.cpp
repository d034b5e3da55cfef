#include "cpu/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace eep {
namespace {

// Long enough for a peer that is running to finish its stores, short enough not to keep a peer from running.
constexpr uint32_t kLooksBeforeSleep = 64;

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

uint64_t given_up(const eep_control_page& page) { return load_acquire(page.suspects) | load_acquire(page.dropped); }

void report(eep_control_page& page, eep_status why) { set_bits(page.status, uint64_t{why}); }

BoundedWait::BoundedWait(eep_control_page& page, uint64_t epoch, uint64_t deadline_ns)
    : page_(page), epoch_(epoch), deadline_ns_(deadline_ns) {}

void BoundedWait::begin_look() {
  doorbell_ = std::atomic_ref<uint32_t>(page_.doorbell).load(std::memory_order_seq_cst);
}

uint64_t BoundedWait::pause(uint64_t missing) {
  if (is_revoked(page_, epoch_)) {
    report(page_, EEP_STATUS_REVOKED);
    return 0;
  }
  if (const uint64_t given_up = load_acquire(page_.suspects) & missing) {
    set_bits(page_.dropped, given_up);
    report(page_, EEP_STATUS_SUSPECT);
    return missing & ~given_up;
  }
  if (last_look_) {
    set_bits(page_.dropped, missing);
    report(page_, EEP_STATUS_SUSPECT);
    return 0;
  }
  if (++looks_ < kLooksBeforeSleep) {
    relax();
    return missing;
  }
  const uint64_t now = now_ns();
  if (!started_ns_) started_ns_ = now;
  const uint64_t waited = now - started_ns_;
  if (waited >= deadline_ns_) {
    last_look_ = true;  // we may have been stopped since the last look; what arrived meanwhile counts
    return missing;
  }
  sleep(deadline_ns_ - waited);
  return missing;
}

void BoundedWait::sleep(uint64_t remaining_ns) {
  std::atomic_ref<uint32_t> sleepers(page_.sleepers);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const timespec timeout{time_t(remaining_ns / 1'000'000'000), long(remaining_ns % 1'000'000'000)};
  syscall(SYS_futex, &page_.doorbell, FUTEX_WAIT, doorbell_, &timeout, nullptr, 0);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace eep
