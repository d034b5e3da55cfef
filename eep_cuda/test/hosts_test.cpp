// Two ranks of one process that take each other for ranks of another host, for the sanitizers: kernels, proxies and
// links as threads side by side. Where there is no libfabric, there is nothing to test.
#include "eep/hosts.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "require.h"

namespace eep_test {
namespace {

constexpr uint32_t kRanks = 2, kTokens = 8, kHidden = 128, kTopk = 2, kLocalExperts = 2;

struct HostRank {
  std::unique_ptr<uint64_t[]> region, mirror;
  eep_control_page control{}, waits{};
  eep_context* context = nullptr;
  eep_proxy* proxy = nullptr;
  eep_link_offer offer{};
  uint32_t link = 0;
};

eep_link_secret secret_of(uint32_t rank) {
  eep_link_secret secret{};
  std::memset(secret.token, int(rank) + 1, sizeof secret.token);
  for (uint32_t i = 0; i < EEP_MAX_AREAS; ++i) secret.keys[i] = 1000 * (rank + 1) + i;
  return secret;
}

class TwoHosts {
 public:
  explicit TwoHosts(eep_layout layout) {
    shape_ = {kRanks, kTokens, kHidden, kTopk, kLocalExperts, uint32_t(layout), EEP_TYPE_F32, EEP_TYPE_F32, 1, 0,
              0,      0,       0,       0};
    REQUIRE(eep_region_layout_compute(&shape_, &at) == EEP_OK);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      HostRank& here = ranks[rank];
      const uint64_t words = at.total_bytes / sizeof(uint64_t);
      here.region = std::make_unique<uint64_t[]>(words);
      here.mirror = std::make_unique<uint64_t[]>(words + sizeof(eep_control_page) / sizeof(uint64_t));
      REQUIRE(eep_create(&shape_, rank, here.region.get(), &here.control, &here.context) == EEP_OK);
      REQUIRE(eep_proxy_start(&shape_, rank, here.region.get(), &here.control, &here.waits, "tcp", "127.0.0.1",
                              &here.proxy) == EEP_OK);
      const eep_remote_peer peer{reinterpret_cast<uint64_t>(here.mirror.get()), 1 - rank, 0, 0, 0};
      const eep_link_secret secret = secret_of(rank);
      REQUIRE(eep_proxy_invite(here.proxy, &peer, &secret, &here.offer, &here.link) == EEP_OK);
      uint32_t again;
      REQUIRE(eep_proxy_invite(here.proxy, &peer, &secret, &here.offer, &again) == EEP_ERROR_PHASE);
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const eep_link_secret secret = secret_of(1 - rank);
      REQUIRE(eep_proxy_connect(ranks[rank].proxy, ranks[rank].link, &ranks[1 - rank].offer, &secret) == EEP_OK);
    }
    for (HostRank& here : ranks)
      for (uint32_t is_up = 0; !is_up;) {
        REQUIRE(eep_proxy_is_up(here.proxy, here.link, &is_up) == EEP_OK);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
  }
  ~TwoHosts() {
    for (HostRank& here : ranks) {
      if (here.proxy) eep_proxy_stop(here.proxy);
      eep_destroy(here.context);
    }
  }

  void show(uint32_t rank, uint64_t epoch) {
    HostRank& here = ranks[rank];
    eep_peer_table* table = eep_table(here.context);
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      eep_peer& entry = table->peers[peer];
      entry.active = 1;
      entry.transport = peer == rank ? EEP_TRANSPORT_LOCAL : EEP_TRANSPORT_REMOTE;
      entry.region = reinterpret_cast<uint64_t>(peer == rank ? here.region.get() : here.mirror.get());
      entry.control = reinterpret_cast<uint64_t>(peer == rank ? &here.control : &here.waits);
      entry.slot = eep_slot_of(peer, 0, kRanks);
    }
    table->deadline_ns = 60 * kSecond;
    table->epoch = epoch;
    REQUIRE(eep_publish_table(here.context) == EEP_OK);
  }

  // Every expert gives back its input: a token comes back times its number of experts.
  void step(uint32_t rank, uint32_t round) {
    eep_context* context = ranks[rank].context;
    const uint32_t tokens = (rank + round) % (kTokens + 1);
    const bool by_rank = shape_.layout == EEP_LAYOUT_RANK;
    std::vector<float> x(tokens * kHidden), out(tokens * kHidden, -1);
    std::vector<int64_t> idx(tokens * kTopk);
    for (uint32_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 7 + round) % 17 - 8);
    for (uint32_t token = 0; token < tokens; ++token) {
      idx[token * kTopk] = (token + round) % 4;
      idx[token * kTopk + 1] = token % 3 == 0 ? int64_t{-1} : (token + round + 1) % 4;
    }
    eep_dispatch_send_args send{x.data(), idx.data(), nullptr, tokens, kTopk, EEP_TYPE_F32, EEP_TYPE_F32, 0, 0};
    const uint64_t slots = at.slots, rows = kRanks * kTokens;
    std::vector<int32_t> count(kRanks), recv_idx(slots * kTokens * kTopk), packed_count(kLocalExperts),
        src_info(kLocalExperts * rows);
    std::vector<float> recv_weights(slots * kTokens * kTopk), packed(kLocalExperts * rows * kHidden);
    std::vector<int64_t> range(kLocalExperts * kRanks);
    eep_dispatch_recv_args receive{count.data(),
                                   recv_idx.data(),
                                   recv_weights.data(),
                                   packed.data(),
                                   nullptr,
                                   packed_count.data(),
                                   src_info.data(),
                                   range.data(),
                                   kTopk,
                                   EEP_TYPE_F32,
                                   0,
                                   0};
    REQUIRE(eep_dispatch(context, &send, &receive, nullptr) == EEP_OK);
    std::vector<float> results = packed;
    if (by_rank) {
      results.assign(slots * kTokens * kHidden, 0);
      const float* inbox =
          reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(ranks[rank].region.get()) + at.rows);
      for (uint64_t row = 0; row < slots * kTokens; ++row) {
        const float experts = float(recv_idx[row * kTopk] >= 0) + float(recv_idx[row * kTopk + 1] >= 0);
        for (uint32_t i = 0; experts && i < kHidden; ++i)
          results[row * kHidden + i] = experts * inbox[row * kHidden + i];
      }
    }
    eep_combine_send_args publish{results.data(), src_info.data(), range.data(), kTopk, 0};
    eep_combine_recv_args pull{out.data(), idx.data(), nullptr, tokens, kTopk, 0, 0};
    REQUIRE(eep_combine(context, &publish, &pull, nullptr) == EEP_OK);
    if (status(rank) || suspects(rank)) return;
    for (uint32_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == x[i] * (idx[i / kHidden * kTopk + 1] < 0 ? 1 : 2));
  }

  // Whether no row lies in the inbox of what this rank has of the other.
  bool has_no_rows_in_mirror(uint32_t rank) const {
    const uint8_t* mirror = reinterpret_cast<const uint8_t*>(ranks[rank].mirror.get());
    return std::all_of(mirror + at.rows, mirror + at.outbox, [](uint8_t byte) { return !byte; });
  }

  uint64_t suspects(uint32_t rank) { return __atomic_load_n(&ranks[rank].control.suspects.words[0], __ATOMIC_ACQUIRE); }
  uint64_t status(uint32_t rank) { return __atomic_load_n(&ranks[rank].control.status, __ATOMIC_ACQUIRE); }

  HostRank ranks[kRanks];
  eep_region_layout at;

 private:
  eep_shape shape_;
};

void test_steps(eep_layout layout) {
  TwoHosts hosts(layout);
  on_ranks(kRanks, [&](uint32_t rank) {
    for (uint32_t epoch = 1; epoch <= 2; ++epoch) {
      hosts.show(rank, epoch);
      REQUIRE(eep_barrier(hosts.ranks[rank].context, 60 * kSecond, nullptr) == EEP_OK);
      for (uint32_t round = 0; round < 8; ++round) {
        hosts.step(rank, round);
        REQUIRE(hosts.status(rank) == 0);
      }
    }
    REQUIRE(hosts.has_no_rows_in_mirror(rank));
  });
}

void test_a_revoke_crosses() {
  TwoHosts hosts(EEP_LAYOUT_RANK);
  for (uint32_t rank = 0; rank < kRanks; ++rank) hosts.show(rank, 1);
  std::thread waiting([&] { hosts.step(0, 3); });
  eep_revoke(hosts.ranks[1].context, 1);
  waiting.join();
  REQUIRE(hosts.status(0) & EEP_STATUS_REVOKED);
}

// Kernels of a GPU leave flags in a mirror and ring at no page.
void test_a_proxy_that_watches_needs_no_ring() {
  TwoHosts hosts(EEP_LAYOUT_RANK);
  for (HostRank& here : hosts.ranks) eep_proxy_watch(here.proxy);
  const auto mailbox = [&](void* base, uint32_t slot) { return static_cast<eep_mailbox*>(base) + slot; };
  for (uint64_t flag = 1; flag <= 20; ++flag) {
    if (flag % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(250));  // it naps longer by now
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      __atomic_store_n(&mailbox(hosts.ranks[rank].mirror.get(), rank)->barrier_flag, flag, __ATOMIC_RELEASE);
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      while (__atomic_load_n(&mailbox(hosts.ranks[rank].region.get(), 1 - rank)->barrier_flag, __ATOMIC_ACQUIRE) !=
             flag)
        std::this_thread::yield();
  }
  // Kernels that ring are served as ever.
  on_ranks(kRanks, [&](uint32_t rank) {
    hosts.show(rank, 1);
    for (uint32_t round = 0; round < 4; ++round) hosts.step(rank, round);
    REQUIRE(hosts.status(rank) == 0);
  });
}

// The kernel does the work of its proxy, and sleeps at its links: a revoke rings at its doorbell, where it does not.
void test_a_revoke_at_home_ends_a_wait_for_a_link() {
  TwoHosts hosts(EEP_LAYOUT_RANK);
  for (uint32_t rank = 0; rank < kRanks; ++rank) hosts.show(rank, 1);
  std::thread waiting([&] { hosts.step(0, 3); });
  eep_control_revoke(&hosts.ranks[0].control, 1);
  waiting.join();
  REQUIRE(hosts.status(0) == EEP_STATUS_REVOKED);
}

void test_a_link_that_ends_makes_a_suspect() {
  TwoHosts hosts(EEP_LAYOUT_RANK);
  hosts.show(0, 1);
  std::thread alone([&] { hosts.step(0, 3); });
  eep_proxy_stop(hosts.ranks[1].proxy);
  hosts.ranks[1].proxy = nullptr;
  alone.join();
  REQUIRE(hosts.suspects(0) == 2);
  REQUIRE(eep_proxy_dismiss(hosts.ranks[0].proxy, hosts.ranks[0].link) == EEP_OK);
  REQUIRE(eep_proxy_dismiss(hosts.ranks[0].proxy, hosts.ranks[0].link) == EEP_ERROR_ARGUMENT);
}

// Where a network may change the order, no more signals are under way than a receiver has room for: the one that it
// must show next may be the last to come.
void test_signals_under_way_are_few() {
  eep_hosts* hosts[2];
  eep_link* links[2];
  eep_link_offer offers[2];
  uint64_t words[2] = {};
  for (uint32_t end : {0, 1}) {
    const eep_area area{reinterpret_cast<uint64_t>(&words[end]), sizeof words[end]};
    const eep_link_secret secret = secret_of(end);
    REQUIRE(eep_hosts_open("tcp;ofi_rxm", "127.0.0.1", &hosts[end]) == EEP_OK);
    REQUIRE(eep_link_open(hosts[end], &area, 1, &secret, &links[end]) == EEP_OK);
    eep_link_offered(links[end], &offers[end]);
  }
  for (uint32_t end : {0, 1}) {
    const eep_link_secret secret = secret_of(1 - end);
    REQUIRE(eep_link_connect(links[end], &offers[1 - end], &secret) == EEP_OK);
  }
  const auto progress = [&](uint32_t end) {
    eep_signal signal;
    uint32_t count;
    REQUIRE(eep_link_progress(links[end], &signal, 1, &count) == EEP_OK);
    return count ? signal.words[0] : 0;
  };
  const auto send = [&](uint64_t number) {
    const eep_signal signal{{number}};
    uint32_t done;
    REQUIRE(eep_link_signal(links[0], &signal, &done) == EEP_OK);
    return done;
  };
  while (!send(1)) progress(0), progress(1);
  while (progress(1) != 1) progress(0);
  // The sender does not look at what has been delivered, so for it all of these are under way.
  uint64_t sent = 1;
  for (uint32_t tries = 0; tries < 1000; ++tries) sent += send(sent + 1);
  REQUIRE(sent > 1 && sent <= 1 + 32);
  for (uint64_t shown = 1; shown < sent; progress(0))
    if (const uint64_t number = progress(1)) REQUIRE(number == ++shown);
  for (uint32_t end : {0, 1}) eep_link_close(links[end]), eep_hosts_close(hosts[end]);
}

}  // namespace

// The first use of libfabric loads it, and what it brings along.
bool open_without_taking_signals() {
  const auto handler_of = [](int signal) {
    struct sigaction action;
    REQUIRE(sigaction(signal, nullptr, &action) == 0);
    return action.sa_handler;
  };
  const int signals[] = {SIGABRT, SIGBUS, SIGILL, SIGINT, SIGSEGV, SIGTERM};
  std::vector<void (*)(int)> before, after;
  for (const int signal : signals) before.push_back(handler_of(signal));
  eep_hosts* transport = nullptr;
  if (eep_hosts_open("tcp", "127.0.0.1", &transport) != EEP_OK) return false;
  for (const int signal : signals) after.push_back(handler_of(signal));
  REQUIRE(before == after);
  eep_hosts_close(transport);
  return true;
}

void test_hosts() {
  if (!open_without_taking_signals()) {
    std::printf("nothing between hosts is tested: %s\n", eep_last_error());
    return;
  }
  test_signals_under_way_are_few();
  test_steps(EEP_LAYOUT_RANK);
  test_steps(EEP_LAYOUT_EXPERT);
  test_a_revoke_crosses();
  test_a_proxy_that_watches_needs_no_ring();
  test_a_revoke_at_home_ends_a_wait_for_a_link();
  test_a_link_that_ends_makes_a_suspect();
}

}  // namespace eep_test
