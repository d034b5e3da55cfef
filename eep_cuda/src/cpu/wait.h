// The one bounded wait that every kernel uses.
#ifndef EEP_CPU_WAIT_H_
#define EEP_CPU_WAIT_H_

#include "cpu/context.h"
#include "hosts/loan.h"

namespace eep {

bool is_revoked(const eep_control_page& page, uint64_t epoch);

// Sleeps through a wait without missing what ends it: flag, revoke, suspicion, or the deadline.
class BoundedWait {
 public:
  static constexpr uint64_t kUntilRung = ~uint64_t{0};
  // `longest_sleep_ns`: for waits that may also end without a ring at this rank's doorbell.
  // `loan`: for waits that links may end.
  BoundedWait(eep_control_page& page, uint64_t epoch, uint64_t deadline_ns, uint64_t longest_sleep_ns = kUntilRung,
              hosts::Loan* loan = nullptr);

  // Call before looking at the flags.
  void begin_look();
  // Whether this has taken long enough for the next pause to be a sleep.
  bool is_slow() const { return looks_ + 1 >= kLooksBeforeSleep; }
  // Call after a look that left `missing` ranks, of which `gone` are known never to come. Returns those that are still
  // worth waiting for, possibly after a sleep; the others were dropped, and the control page says why. Nobody: the wait
  // is over.
  RankSet pause(const RankSet& missing, RankSet gone = {});
  // The pause alone, until `rings` rings came or something else happened; false when the deadline has passed.
  bool rest(uint32_t rings);

 private:
  // Spins first: long enough for a running peer to finish its stores, short enough not to keep a peer from running.
  // Then yields: where there are more ranks than cores, the next to run is often the one that is missing, and it need
  // not wake us.
  static constexpr uint32_t kLooksBeforeYield = 16;
  static constexpr uint32_t kLooksBeforeSleep = 64;
  void sleep(uint64_t remaining_ns, uint32_t rings);
  eep_control_page& page_;
  const uint64_t epoch_;
  const uint64_t deadline_ns_;
  const uint64_t longest_sleep_ns_;
  hosts::Loan* const loan_;
  uint64_t started_ns_ = 0;
  uint32_t doorbell_ = 0;
  uint32_t looks_ = 0;
  bool last_look_ = false;
};

// Waits until `has_arrived(rank)` for each rank of `sources`; returns those for which it is true.
template <typename HasArrived>
RankSet wait_for(const RankSet& sources, BoundedWait wait, HasArrived has_arrived) {
  RankSet arrived = {}, missing = sources;
  while (!is_empty(missing)) {
    wait.begin_look();
    for_each_rank(missing, [&](uint32_t rank) {
      if (has_arrived(rank)) add(arrived, rank);
    });
    missing -= arrived;
    if (!is_empty(missing)) missing = wait.pause(missing);
  }
  return arrived;
}

}  // namespace eep

#endif  // EEP_CPU_WAIT_H_
