#include "hosts/loan.h"

#include <sched.h>

#include <algorithm>

#include "hosts/proxy.h"

namespace eep::hosts {
namespace {

using Clock = std::chrono::steady_clock;

// Whoever else is waited for may need this core.
constexpr uint32_t kLooksForOthers = 48;
// Short, because a revoke and a suspicion ring at the doorbell, at which nobody sleeps meanwhile.
constexpr std::chrono::microseconds kLongestIdle{1000};

}  // namespace

Loan::Loan(const eep_peer_table& table) {
  for (uint32_t rank = 0; rank < table.max_ranks; ++rank) {
    const eep_peer& peer = table.peers[rank];
    if (!peer.active || peer.transport != EEP_TRANSPORT_REMOTE) continue;
    add(remote_, rank);
    waits_ = reinterpret_cast<const eep_control_page*>(peer.control);
  }
  if (waits_) proxy_ = eep_proxy::lend(*waits_);
}

void Loan::give_back() {
  if (proxy_) proxy_->take_back();
  proxy_ = nullptr;
}

bool Loan::turn() { return proxy_ && proxy_->turn_for_kernel(); }

bool Loan::rest(const RankSet& missing) {
  if (!proxy_) return false;
  if (turn()) {
    idle_since_ = {};
    return true;
  }
  const auto now = Clock::now();
  if (idle_since_ == Clock::time_point{}) idle_since_ = now;
  const auto left = idle_since_ + kLongestIdle - now;
  if (left > Clock::duration::zero()) {
    if (is_empty(missing - remote_)) {
      proxy_->sleep_for_kernel(std::chrono::duration_cast<std::chrono::nanoseconds>(left));
      return true;
    }
    if (++looks_ < kLooksForOthers) {
      sched_yield();
      return true;
    }
  }
  give_back();
  return false;
}

}  // namespace eep::hosts
