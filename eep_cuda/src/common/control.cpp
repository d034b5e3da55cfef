// Writing control pages: what ends a wait from outside.
#include "common/control.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <initializer_list>

#include "common/rank_sets.h"
#include "eep/eep.h"

namespace eep {
namespace {
void wake(eep_control_page& page) { syscall(SYS_futex, &page.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
}  // namespace

// A sender stores the flag first and rings the doorbell second. A waiter reads them in the other order: either it sees
// the flag, or the kernel refuses its sleep because the doorbell has moved.
//
// A sleeper that misses m flags asks to be woken at the m-th ring only (wake_at). Why the m-th ring always wakes it:
// - It read the doorbell as D before it looked. A flag that it did not see then rings after D was read, and each
// missing
//   source rings at least once. So the doorbell reaches D + m no later than the last flag.
// - It counts itself a sleeper first and stores wake_at second. A ring before or between makes the kernel refuse the
//   sleep; a ring after both sees them.
// - wake_at speaks for one sleeper. With more than one, every ring wakes all. A rank that stops sleeping first sets
//   wake_at to a count that has passed, and then counts itself out. So when one of several sleepers is left, wake_at is
//   either its own or one at which every ring wakes.
// Rings for other reasons come on top of the m: they wake too early, never too late.
void ring(eep_control_page& page) {
  const uint32_t count = std::atomic_ref<uint32_t>(page.doorbell).fetch_add(1, std::memory_order_seq_cst) + 1;
  const uint32_t sleepers = std::atomic_ref<uint32_t>(page.sleepers).load(std::memory_order_seq_cst);
  if (!sleepers) return;
  if (sleepers == 1) {
    const uint32_t wake_at = std::atomic_ref<uint32_t>(page.wake_at).load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(count - wake_at) < 0) return;
  }
  wake(page);
}

void ring_all(eep_control_page& page) {
  std::atomic_ref<uint32_t>(page.doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref<uint32_t>(page.sleepers).load(std::memory_order_seq_cst)) wake(page);
}

void forget_trouble(eep_control_page& page) {
  for (eep_rank_set* ranks : {&page.suspects, &page.dropped, &page.corrupt}) clear(*ranks);
  store_release(page.status, uint64_t{0});
}

}  // namespace eep

void eep_control_revoke(eep_control_page* page, uint64_t epoch) {
  std::atomic_ref<uint64_t> revoked(page->revoked_epoch);
  uint64_t seen = revoked.load(std::memory_order_relaxed);
  // Only ever upwards: a rank that wakes up in an old epoch must not take back what was revoked since.
  while (seen < epoch && !revoked.compare_exchange_weak(seen, epoch, std::memory_order_release)) {
  }
  eep::ring_all(*page);
}

void eep_control_suspect(eep_control_page* page, const eep_rank_set* ranks) {
  eep::set_bits(page->suspects, *ranks, std::memory_order_release);
  eep::ring_all(*page);
}

void eep_control_state(eep_control_page* page, uint64_t state) {
  std::atomic_ref<uint64_t>(page->state).store(state, std::memory_order_release);
  eep::ring_all(*page);
}

void eep_revoke(eep_context* context, uint64_t epoch) {
  const eep_peer_table* table = eep_table(context);
  for (uint32_t rank = 0; rank < table->max_ranks; ++rank)
    if (table->peers[rank].active && table->peers[rank].control)
      eep_control_revoke(reinterpret_cast<eep_control_page*>(table->peers[rank].control), epoch);
}
