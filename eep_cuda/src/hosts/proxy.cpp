#include "hosts/proxy.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/checks.h"
#include "common/control.h"
#include "common/shared_words.h"

using eep::fail;
using eep::hosts::Pair;
using eep::hosts::PeerTraffic;
using eep::hosts::RemoteRows;

namespace {

// Few: to look costs system calls, and whoever it waits for may need its core.
constexpr uint32_t kLooksBeforeSleep = 4;
// The longest sleeps: all that ends one is waited for, and this is in case something is not.
constexpr int kSleepMs = 100, kSleepHeldUpMs = 2;
constexpr std::chrono::microseconds kLookForLeave{200};
// How long the thread leaves the links alone after a kernel had its work: the next kernel may come at once, and what
// arrived meanwhile is read then. So it need not wake for each message of a step.
constexpr std::chrono::milliseconds kSpared{1};
constexpr int kSparedSleepMs = 2;
// How a proxy looks after kernels of a GPU, which ring at no page. While a step runs there is something to move every
// few hundred microseconds, and each nap is time that a rank waits. Between steps it naps longer, and most of the time.
constexpr std::chrono::microseconds kWatched{200}, kShortNap{50}, kLongNap{1000};
constexpr std::chrono::milliseconds kStepsRun{200};
constexpr unsigned long kTimerSlackNs = 1000;  // the kernel would make each nap 50 us longer

std::mutex proxies_mutex;
std::map<const eep_control_page*, eep_proxy*> proxies;  // by the page at which they wait

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

}  // namespace

eep_proxy::eep_proxy(const eep_shape& shape, uint32_t rank, void* region, eep_control_page& control,
                     eep_control_page& waits)
    : shape_(shape),
      at_(eep_region_layout_of(&shape)),
      rank_(rank),
      region_(static_cast<uint8_t*>(region)),
      control_(control),
      waits_(waits) {}

int eep_proxy::open(const char* provider, const char* address) {
  transport_ = eep::hosts::open_fabric(provider, address);
  if (!transport_) return EEP_ERROR_DEVICE;
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_ < 0) return fail(EEP_ERROR_DEVICE, "there is no descriptor for the proxy: %s", std::strerror(errno));
  thread_ = std::thread(&eep_proxy::run, this);
  bell_ = std::thread(&eep_proxy::forward_rings, this);
  const std::lock_guard<std::mutex> lock(proxies_mutex);
  proxies[&waits_] = this;
  return EEP_OK;
}

eep_proxy::~eep_proxy() {
  {
    const std::lock_guard<std::mutex> lock(proxies_mutex);
    if (const auto found = proxies.find(&waits_); found != proxies.end() && found->second == this) proxies.erase(found);
  }
  is_stopping_ = true;
  while (is_lent_) std::this_thread::sleep_for(kLookForLeave);
  if (thread_.joinable()) {
    wake();
    eep::ring_all(waits_);
    thread_.join();
    bell_.join();
  }
  peers_.clear();
  if (wake_ >= 0) close(wake_);
}

// ---- who is there ----

eep_proxy::Visit::Visit(eep_proxy& proxy) : proxy_(proxy), lock_(proxy.mutex_, std::defer_lock) {
  proxy_.visitors_.fetch_add(1);
  lock_.lock();
}

eep_proxy::Visit::~Visit() {
  lock_.unlock();
  proxy_.visitors_.fetch_sub(1);
  proxy_.wake();
}

int eep_proxy::invite(const eep_remote_peer& peer, const eep_link_secret& secret, eep_link_offer& offer, uint32_t& id) {
  if (peer.rank >= shape_.max_ranks || peer.rank == rank_ || !peer.mirror)
    return fail(EEP_ERROR_ARGUMENT, "rank %u cannot be a remote peer of rank %u of %u, or has no mirror", peer.rank,
                rank_, shape_.max_ranks);
  const Pair pair{shape_,    at_,
                  region_,   reinterpret_cast<uint8_t*>(peer.mirror),
                  rank_,     eep_slot_of(rank_, peer.own_incarnation, shape_.max_ranks),
                  peer.rank, eep_slot_of(peer.rank, peer.incarnation, shape_.max_ranks)};
  const Visit visit(*this);
  for (const auto& known : peers_)
    if (known.second->slot() == pair.peer_slot)
      return fail(EEP_ERROR_PHASE, "another life of rank %u still has the slot of incarnation %u; dismiss it first",
                  peer.rank, peer.incarnation);
  const std::vector<eep_area> areas = eep::hosts::areas_of(pair);
  auto link = transport_->open_link(areas.data(), static_cast<uint32_t>(areas.size()), secret);
  if (!link) return EEP_ERROR_DEVICE;
  offer = link->offer();
  id = ++last_id_;
  peers_[id] = std::make_unique<PeerTraffic>(pair, std::move(link), control_, waits_);
  return EEP_OK;
}

int eep_proxy::connect(uint32_t id, const eep_link_offer& offer, const eep_link_secret& secret) {
  const Visit visit(*this);
  PeerTraffic* peer = find(id);
  return peer ? peer->connect(offer, secret) : EEP_ERROR_ARGUMENT;
}

int eep_proxy::is_up(uint32_t id, uint32_t& is_up) {
  const Visit visit(*this);
  PeerTraffic* peer = find(id);
  if (!peer) return EEP_ERROR_ARGUMENT;
  is_up = peer->is_up();
  if (peer->link().trouble().empty()) return EEP_OK;
  return fail(EEP_ERROR_DEVICE, "%s", peer->link().trouble().c_str());
}

int eep_proxy::dismiss(uint32_t id) {
  const Visit visit(*this);
  if (!find(id)) return EEP_ERROR_ARGUMENT;
  peers_.erase(id);
  return EEP_OK;
}

int eep_proxy::ended(uint32_t id, int& descriptor) {
  const Visit visit(*this);
  PeerTraffic* peer = find(id);
  if (!peer) return EEP_ERROR_ARGUMENT;
  descriptor = peer->ended();
  return descriptor >= 0 ? EEP_OK : fail(EEP_ERROR_DEVICE, "there is no descriptor for the end of a link");
}

bool eep_proxy::take_leave(uint64_t deadline_ns) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(deadline_ns);
  while (true) {
    bool is_settled = true;
    {
      const Visit visit(*this);
      for (const auto& peer : peers_) is_settled &= peer.second->is_settled();
    }
    if (is_settled || std::chrono::steady_clock::now() >= end) return is_settled;
    std::this_thread::sleep_for(kLookForLeave);
  }
}

void eep_proxy::watch() {
  is_watching_ = true;
  wake();
}

PeerTraffic* eep_proxy::find(uint32_t id) {
  const auto found = peers_.find(id);
  if (found != peers_.end()) return found->second.get();
  fail(EEP_ERROR_ARGUMENT, "there is no link with the number %u", id);
  return nullptr;
}

// ---- the thread ----

void eep_proxy::run() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  uint32_t looks = 0;
  auto moved_at = std::chrono::steady_clock::now();
  while (!is_stopping_) {
    while (visitors_.load()) sched_yield();
    const uint32_t doorbell = std::atomic_ref<uint32_t>(waits_.doorbell).load(std::memory_order_seq_cst);
    if (is_spared()) {
      sleep_spared(doorbell);
      continue;
    }
    is_called_ = false;
    if (turn()) {
      looks = 0;
      moved_at = std::chrono::steady_clock::now();
    } else if (is_watching_) {
      nap(std::chrono::steady_clock::now() - moved_at);
    } else if (++looks < kLooksBeforeSleep) {
      sched_yield();
    } else {
      sleep(doorbell);
      looks = 0;
    }
  }
}

bool eep_proxy::turn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  send_ahead();
  bool moved = false;
  for (const auto& peer : peers_) moved |= peer.second->turn();
  return moved;
}

// Before any message: the flag of that round may be there by now, and then the message has what is left of it.
void eep_proxy::send_ahead() {
  RemoteRows offered;
  {
    const std::lock_guard<std::mutex> lock(offer_mutex_);
    if (offered_.mirrors.empty()) return;
    offered = std::exchange(offered_, {});
  }
  for (const auto& peer : peers_)
    if (std::find(offered.mirrors.begin(), offered.mirrors.end(), peer.second->mirror()) != offered.mirrors.end())
      peer.second->send_ahead(offered.rows);
}

// `doorbell` was read before the last look: a flag that came since has moved it.
void eep_proxy::sleep(uint32_t doorbell) {
  std::vector<pollfd> waited{{wake_, POLLIN, 0}};
  bool is_held_up = false;
  if (!may_sleep(waited, is_held_up)) return;
  is_asleep_.store(true, std::memory_order_seq_cst);
  if (std::atomic_ref<uint32_t>(waits_.doorbell).load(std::memory_order_seq_cst) == doorbell)
    poll(waited.data(), waited.size(), is_held_up ? kSleepHeldUpMs : kSleepMs);
  is_asleep_.store(false, std::memory_order_seq_cst);
  uint64_t rings;
  if (read(wake_, &rings, sizeof rings) < 0) return;  // it was something else
}

// Kernels may write at any moment, and nothing tells. `idle`: for how long nothing has moved.
void eep_proxy::nap(std::chrono::nanoseconds idle) {
  std::vector<pollfd> waited{{wake_, POLLIN, 0}};
  bool is_held_up = false;
  if (idle < kWatched || !may_sleep(waited, is_held_up)) {
    sched_yield();
    return;
  }
  const std::chrono::nanoseconds longest = idle < kStepsRun ? kShortNap : kLongNap;
  const timespec most{0, static_cast<long>(longest.count())};
  ppoll(waited.data(), waited.size(), &most, nullptr);
  uint64_t rings;
  if (read(wake_, &rings, sizeof rings) < 0) return;  // it was something else
}

// The descriptors at which something shows that is to be moved. False: something is to be moved now.
bool eep_proxy::may_sleep(std::vector<pollfd>& waited, bool& is_held_up) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) {
    if (!peer.second->link().trouble().empty()) continue;  // its descriptor may be readable for ever
    if (!peer.second->link().may_sleep()) return false;
    is_held_up |= peer.second->is_held_up();
    waited.push_back({peer.second->link().descriptor(), POLLIN, 0});
  }
  return true;
}

void eep_proxy::wake() {
  is_called_ = true;
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) return;  // it is awake for 2^64 reasons already
}

// ---- what a kernel does in place of the thread ----

eep_proxy* eep_proxy::lend(const eep_control_page& waits) {
  const std::lock_guard<std::mutex> lock(proxies_mutex);
  const auto found = proxies.find(&waits);
  if (found == proxies.end() || found->second->is_lent_.exchange(true)) return nullptr;
  return found->second;
}

void eep_proxy::call(const eep_control_page& waits) {
  const std::lock_guard<std::mutex> lock(proxies_mutex);
  const auto found = proxies.find(&waits);
  if (found != proxies.end() && now_ns() < found->second->spared_until_ns_ + kSparedSleepMs * 1'000'000)
    found->second->wake();
}

void eep_proxy::offer_rows(const eep_control_page& waits, RemoteRows rows) {
  const std::lock_guard<std::mutex> lock(proxies_mutex);
  const auto found = proxies.find(&waits);
  if (found == proxies.end() || rows.mirrors.empty()) return;
  {
    const std::lock_guard<std::mutex> offer_lock(found->second->offer_mutex_);
    found->second->offered_ = std::move(rows);
  }
  found->second->wake();
}

// What the kernel leaves undone is the thread's again, at once.
void eep_proxy::take_back() {
  bool is_calm = true;
  turn_for_kernel();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& peer : peers_) is_calm &= !peer.second->is_held_up() && peer.second->link().is_idle();
  }
  spared_until_ns_ = now_ns() + std::chrono::nanoseconds(kSpared).count();
  if (!is_calm || is_called_) wake();
  is_lent_ = false;  // the last: a proxy that stops waits for it
}

bool eep_proxy::turn_for_kernel() {
  if (visitors_.load()) sched_yield();
  return turn();
}

void eep_proxy::sleep_for_kernel(std::chrono::nanoseconds longest) {
  std::vector<pollfd> waited;
  bool is_held_up = false;
  if (!may_sleep(waited, is_held_up)) return;
  const timespec most{0, static_cast<long>(longest.count())};
  ppoll(waited.data(), waited.size(), &most, nullptr);
}

// Whether the thread has no work: a kernel has it, or had it just now and left nothing undone.
bool eep_proxy::is_spared() const { return is_lent_ || (!is_called_ && now_ns() < spared_until_ns_); }

void eep_proxy::sleep_spared(uint32_t doorbell) {
  const std::atomic_ref<uint32_t> now(waits_.doorbell);
  pollfd waited{wake_, POLLIN, 0};
  is_asleep_.store(true, std::memory_order_seq_cst);
  if (now.load(std::memory_order_seq_cst) == doorbell) poll(&waited, 1, kSparedSleepMs);
  is_asleep_.store(false, std::memory_order_seq_cst);
  if (now.load(std::memory_order_seq_cst) != doorbell) is_called_ = true;
  uint64_t rings;
  if (read(wake_, &rings, sizeof rings) < 0) return;  // it was something else
}

// Kernels ring a doorbell, which is a futex; the proxy sleeps on descriptors. So a thread stands between. It rings
// through only while the proxy sleeps: the proxy says so before it looks at the doorbell for the last time, and this
// thread looks after it has seen the doorbell move.
void eep_proxy::forward_rings() {
  std::atomic_ref<uint32_t> doorbell(waits_.doorbell), sleepers(waits_.sleepers), wake_at(waits_.wake_at);
  uint32_t seen = doorbell.load(std::memory_order_seq_cst);
  // The order of these steps is what ring() relies on.
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (!is_stopping_) {
    wake_at.store(seen + 1, std::memory_order_seq_cst);
    syscall(SYS_futex, &waits_.doorbell, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    seen = doorbell.load(std::memory_order_seq_cst);
    if (is_asleep_.load(std::memory_order_seq_cst)) wake();
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// ---- the C functions ----

int eep_proxy_start(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control,
                    eep_control_page* waits, const char* provider, const char* address, eep_proxy** out) {
  if (const int error = eep::check_create(*shape, rank, region, control)) return error;
  if (!(shape->channels || shape->lanes) || !waits || !provider || !*provider || !address || !*address)
    return fail(EEP_ERROR_ARGUMENT,
                "a proxy needs a channel or a lane, a page to wait at, a provider and an address of this host");
  auto proxy = std::make_unique<eep_proxy>(*shape, rank, region, *control, *waits);
  if (const int error = proxy->open(provider, address)) return error;
  *out = proxy.release();
  return EEP_OK;
}

void eep_proxy_stop(eep_proxy* proxy) { delete proxy; }

int eep_proxy_invite(eep_proxy* proxy, const eep_remote_peer* peer, const eep_link_secret* secret,
                     eep_link_offer* offer, uint32_t* id) {
  return proxy->invite(*peer, *secret, *offer, *id);
}

int eep_proxy_connect(eep_proxy* proxy, uint32_t id, const eep_link_offer* offer, const eep_link_secret* secret) {
  return proxy->connect(id, *offer, *secret);
}

int eep_proxy_is_up(eep_proxy* proxy, uint32_t id, uint32_t* is_up) { return proxy->is_up(id, *is_up); }

int eep_proxy_dismiss(eep_proxy* proxy, uint32_t id) { return proxy->dismiss(id); }

int eep_proxy_ended(eep_proxy* proxy, uint32_t id, int* descriptor) { return proxy->ended(id, *descriptor); }

void eep_proxy_watch(eep_proxy* proxy) { proxy->watch(); }

uint32_t eep_proxy_take_leave(eep_proxy* proxy, uint64_t deadline_ns) { return proxy->take_leave(deadline_ns); }
