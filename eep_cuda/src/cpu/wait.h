// The one bounded wait that every kernel uses.
#ifndef EEP_CPU_WAIT_H_
#define EEP_CPU_WAIT_H_

#include "cpu/context.h"

namespace eep {

bool is_revoked(const eep_control_page& page, uint64_t epoch);

// Sleeps through a wait without missing what ends it: flag, revoke, suspicion, or the deadline.
class BoundedWait {
 public:
  BoundedWait(eep_control_page& page, uint64_t epoch, uint64_t deadline_ns);

  // Call before looking at the flags, with the ranks still missing.
  void begin_look();
  // Call after a look that left `missing` ranks. Returns those that are still worth waiting for, possibly
  // after a sleep; the others were dropped, and the control page says why. 0 ends the wait.
  uint64_t pause(uint64_t missing);

 private:
  void sleep(uint64_t remaining_ns);
  eep_control_page& page_;
  const uint64_t epoch_;
  const uint64_t deadline_ns_;
  uint64_t started_ns_ = 0;
  uint32_t doorbell_ = 0;
  uint32_t looks_ = 0;
  bool last_look_ = false;
};

// Waits until `has_arrived(rank)` for each rank of `sources`; returns those for which it is true.
template <typename HasArrived>
uint64_t wait_for(uint64_t sources, eep_control_page& page, uint64_t epoch, uint64_t deadline_ns,
                  HasArrived has_arrived) {
  BoundedWait wait(page, epoch, deadline_ns);
  uint64_t arrived = 0, missing = sources;
  while (missing) {
    wait.begin_look();
    for_each_rank(missing, [&](uint32_t rank) {
      if (has_arrived(rank)) arrived |= rank_bit(rank);
    });
    missing &= ~arrived;
    if (missing) missing = wait.pause(missing);
  }
  return arrived;
}

}  // namespace eep

#endif  // EEP_CPU_WAIT_H_
