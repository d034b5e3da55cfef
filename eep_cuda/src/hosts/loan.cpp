#include "hosts/loan.h"

#include <utility>

#include "hosts/proxy.h"

namespace eep::hosts {
namespace {

using Clock = std::chrono::steady_clock;

// Of rows. Measured with two ranks and rows of 4 KiB: 512 KiB gain from a loan, 4 MiB lose.
constexpr uint64_t kLargestRound = 2 << 20;
// Short, because a revoke and a suspicion ring at the doorbell, at which nobody sleeps meanwhile.
constexpr std::chrono::microseconds kLongestIdle{1000};

}  // namespace

Loan::Loan(const eep_peer_table& table, uint64_t bytes) : is_wanted_(bytes <= kLargestRound) {
  for (uint32_t rank = 0; rank < table.max_ranks; ++rank) {
    const eep_peer& peer = table.peers[rank];
    if (!peer.active || rank == table.rank) continue;
    if (peer.transport == EEP_TRANSPORT_REMOTE)
      waits_ = reinterpret_cast<const eep_control_page*>(peer.control);
    else
      is_wanted_ = false;
  }
  if (waits_ && !is_wanted_) eep_proxy::call(*waits_);
}

void Loan::offer_rows(const eep_snapshot& snapshot, const RankSet& ranks, const RowOffer& rows) const {
  if (!waits_ || is_wanted_) return;
  RemoteRows remote{rows, {}};
  for_each_rank(ranks, [&](uint32_t rank) {
    if (reinterpret_cast<const eep_control_page*>(snapshot.control[rank]) == waits_)
      remote.mirrors.push_back(reinterpret_cast<const uint8_t*>(snapshot.region[rank]));
  });
  eep_proxy::offer_rows(*waits_, std::move(remote));
}

void Loan::take() {
  if (waits_ && is_wanted_ && !proxy_) proxy_ = eep_proxy::lend(*waits_);
}

void Loan::give_back() {
  if (proxy_) proxy_->take_back();
  proxy_ = nullptr;
}

bool Loan::turn() { return proxy_ && proxy_->turn_for_kernel(); }

bool Loan::rest() {
  if (!proxy_) return false;
  if (turn()) {
    idle_since_ = {};
    return true;
  }
  const auto now = Clock::now();
  if (idle_since_ == Clock::time_point{}) idle_since_ = now;
  const auto left = idle_since_ + kLongestIdle - now;
  if (left > Clock::duration::zero()) {
    proxy_->sleep_for_kernel(std::chrono::duration_cast<std::chrono::nanoseconds>(left));
    return true;
  }
  give_back();
  return false;
}

}  // namespace eep::hosts
