// The work of the proxy, lent to a kernel. A kernel that waits for ranks on other hosts has nothing else to do, so it
// moves what it waits for itself: no other thread has to be woken first, neither here to send nor here to receive.
#ifndef EEP_HOSTS_LOAN_H_
#define EEP_HOSTS_LOAN_H_

#include <chrono>

#include "common/rank_sets.h"
#include "eep/peer_table.h"

struct eep_proxy;

namespace eep::hosts {

class Loan {
 public:
  // Nothing is held where no active peer is remote, where there is no proxy, or where another kernel has its work.
  explicit Loan(const eep_peer_table& table);
  ~Loan() { give_back(); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  bool is_held() const { return proxy_ != nullptr; }
  // Whether a flag in a mirror is seen without a ring at that page.
  bool looks_at(const eep_control_page* page) const { return is_held() && page == waits_; }
  // Moves what can be moved without waiting. Whether that was anything.
  bool turn();
  // After a look that left `missing` ranks: moves what can be moved, or else sleeps a little, if all of them are
  // remote. False: nothing moved for so long that the proxy has its work back, and the caller is to sleep at its
  // doorbell.
  bool rest(const RankSet& missing);

 private:
  void give_back();

  const eep_control_page* waits_ = nullptr;
  RankSet remote_ = {};
  eep_proxy* proxy_ = nullptr;
  uint32_t looks_ = 0;
  std::chrono::steady_clock::time_point idle_since_{};
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_LOAN_H_
