// The work of the proxy, lent to a kernel. A kernel that waits for ranks on other hosts has nothing else to do, so it
// moves what it waits for itself: no other thread has to be woken first, neither here to send nor here to receive.
#ifndef EEP_HOSTS_LOAN_H_
#define EEP_HOSTS_LOAN_H_

#include <chrono>

#include "common/rank_sets.h"
#include "eep/peer_table.h"
#include "hosts/exchange_plan.h"

struct eep_proxy;

namespace eep::hosts {

class Loan {
 public:
  // Holds nothing yet. `bytes`: of the rows that this rank has in the round. Where they are many, or where a peer on
  // this host needs the core, the thread serves better: it moves them while kernels copy. It is told so now.
  Loan(const eep_peer_table& table, uint64_t bytes);
  ~Loan() { give_back(); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  // For a kernel that writes many rows: has the thread send those of the tokens before `end` while it writes the
  // others. Does nothing where the kernel will have the work of the thread.
  void offer_rows(const eep_snapshot& snapshot, const RankSet& ranks, const RowOffer& rows) const;
  // To be called when a kernel has nothing more to do before it waits: nothing else moves meanwhile. Nothing is taken
  // where the thread serves better, where no peer is remote, or where another kernel has its work.
  void take();
  // To be called when the wait is over, and before anything that takes long.
  void give_back();
  bool is_held() const { return proxy_ != nullptr; }
  // Whether a flag in a mirror is seen without a ring at that page.
  bool looks_at(const eep_control_page* page) const { return is_held() && page == waits_; }
  // Moves what can be moved without waiting. Whether that was anything.
  bool turn();
  // After a look that left ranks missing: moves what can be moved, or else sleeps a little. False: nothing moved for so
  // long that the proxy has its work back, and the caller is to sleep at its doorbell.
  bool rest();

 private:
  const eep_control_page* waits_ = nullptr;
  bool is_wanted_ = false;
  eep_proxy* proxy_ = nullptr;
  std::chrono::steady_clock::time_point idle_since_{};
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_LOAN_H_
