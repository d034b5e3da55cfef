// Writing control pages: what ends a wait from outside.
#include "common/control.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <initializer_list>

#include "eep/eep.h"

namespace eep {

// The flag comes first and the doorbell second; a waiter reads them in the other order, so that either it
// sees the flag or its sleep is refused because the doorbell has moved.
void ring(eep_control_page& page) {
  std::atomic_ref<uint32_t>(page.doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (std::atomic_ref<uint32_t>(page.sleepers).load(std::memory_order_seq_cst))
    syscall(SYS_futex, &page.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void forget_trouble(eep_control_page& page) {
  for (uint64_t* word : {&page.suspects, &page.dropped, &page.corrupt, &page.status})
    std::atomic_ref<uint64_t>(*word).store(0, std::memory_order_release);
}

}  // namespace eep

void eep_control_revoke(eep_control_page* page, uint64_t epoch) {
  std::atomic_ref<uint64_t> revoked(page->revoked_epoch);
  uint64_t seen = revoked.load(std::memory_order_relaxed);
  // Only ever upwards: a rank that wakes up in an old epoch must not take back what was revoked since.
  while (seen < epoch && !revoked.compare_exchange_weak(seen, epoch, std::memory_order_release)) {
  }
  eep::ring(*page);
}

void eep_control_suspect(eep_control_page* page, uint64_t ranks) {
  std::atomic_ref<uint64_t>(page->suspects).fetch_or(ranks, std::memory_order_release);
  eep::ring(*page);
}

void eep_control_state(eep_control_page* page, uint64_t state) {
  std::atomic_ref<uint64_t>(page->state).store(state, std::memory_order_release);
  eep::ring(*page);
}

void eep_revoke(eep_context* context, uint64_t epoch) {
  const eep_peer_table* table = eep_table(context);
  for (uint32_t rank = 0; rank < table->max_ranks; ++rank)
    if (table->peers[rank].active && table->peers[rank].control)
      eep_control_revoke(reinterpret_cast<eep_control_page*>(table->peers[rank].control), epoch);
}
