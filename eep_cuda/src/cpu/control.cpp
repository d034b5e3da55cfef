// Writing control pages: what ends a wait from outside.
#include "cpu/context.h"

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

void eep_revoke(eep_context* context, uint64_t epoch) {
  eep_control_revoke(context->control, epoch);
  eep_snapshot reachable;
  eep::take_snapshot(*context, reachable);
  eep::for_each_rank(reachable.active & ~eep::rank_bit(context->table.rank), [&](uint32_t rank) {
    eep_control_revoke(reinterpret_cast<eep_control_page*>(reachable.control[rank]), epoch);
  });
}

void eep_control_reset(eep_control_page* page) {
  eep::store_release(page->suspects, uint64_t{0});
  eep::store_release(page->dropped, uint64_t{0});
  eep::store_release(page->corrupt, uint64_t{0});
  eep::store_release(page->status, uint64_t{0});
}
