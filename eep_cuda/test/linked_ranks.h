// Ranks of one process that share lanes, of which those on other hosts have only links to each other.
#ifndef EEP_TEST_LINKED_RANKS_H_
#define EEP_TEST_LINKED_RANKS_H_

#include <atomic>
#include <chrono>

#include "common/mirrors.h"
#include "eep/hosts.h"
#include "group.h"

namespace eep_test {

class LinkedRanks : public Ranks {
 public:
  // Rank r is on host hosts[r].
  explicit LinkedRanks(std::vector<uint32_t> hosts, uint32_t lane_bytes = 8192)
      : Ranks(uint32_t(hosts.size()), lane_bytes, 256, 3), hosts_(std::move(hosts)), ends_(count) {
    for (uint32_t rank = 0; rank < count; ++rank) {
      End& end = ends_[rank];
      end.peers.resize(count);
      ranks[rank].control.host = hosts_[rank] + 1;
      last_group(ranks[rank].control) = kFirstGroup + rank;
      REQUIRE(eep_proxy_start(&shape, rank, ranks[rank].region.get(), &ranks[rank].control, &end.waits, "tcp",
                              "127.0.0.1", &end.proxy) == EEP_OK);
      for (uint32_t peer = 0; peer < count; ++peer)
        if (is_remote(rank, peer)) invite(rank, peer);
    }
    for (uint32_t rank = 0; rank < count; ++rank)
      for (uint32_t peer = 0; peer < count; ++peer)
        if (is_remote(rank, peer)) {
          const eep_link_secret secret = secret_of(peer, rank);
          REQUIRE(eep_proxy_connect(ends_[rank].proxy, ends_[rank].peers[peer].link, &ends_[peer].peers[rank].offer,
                                    &secret) == EEP_OK);
        }
    for (uint32_t rank = 0; rank < count; ++rank)
      for (uint32_t peer = 0; peer < count; ++peer)
        for (uint32_t is_up = !is_remote(rank, peer); !is_up;) {
          REQUIRE(eep_proxy_is_up(ends_[rank].proxy, ends_[rank].peers[peer].link, &is_up) == EEP_OK);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    // A rank that is reached has told of the groups that it had.
    for (uint32_t rank = 0; rank < count; ++rank)
      for (uint32_t peer = 0; peer < count; ++peer)
        if (is_remote(rank, peer)) REQUIRE(last_group(*eep::page_behind(mirror(rank, peer), at)) == kFirstGroup + peer);
    for (uint32_t rank = 0; rank < count; ++rank) last_group(ranks[rank].control) = 0;
    for (uint32_t rank = 0; rank < count; ++rank) enter(rank, 1, all_ranks());
  }
  ~LinkedRanks() {
    for (uint32_t rank = 0; rank < count; ++rank) stop(rank);
  }

  // The view of an epoch, as this rank sees it.
  void enter(uint32_t rank, uint64_t epoch, uint64_t mask) { enter(rank, epoch, first_ranks(mask)); }
  void enter(uint32_t rank, uint64_t epoch, const eep_rank_set& active) {
    show(rank, epoch, active);
    eep_peer_table* table = eep_table(ranks[rank].context);
    for (uint32_t peer = 0; peer < count; ++peer) {
      eep_peer& entry = table->peers[peer];
      entry.transport = is_remote(rank, peer) ? EEP_TRANSPORT_REMOTE : EEP_TRANSPORT_MAPPED;
      if (!is_remote(rank, peer)) continue;
      entry.region = reinterpret_cast<uint64_t>(ends_[rank].peers[peer].mirror.get());
      entry.control = reinterpret_cast<uint64_t>(&ends_[rank].waits);
    }
  }

  eep_proxy* proxy(uint32_t rank) { return ends_[rank].proxy; }
  eep_control_page* waits(uint32_t rank) { return &ends_[rank].waits; }
  // What `rank` has of `peer`.
  uint8_t* mirror(uint32_t rank, uint32_t peer) {
    return reinterpret_cast<uint8_t*>(ends_[rank].peers[peer].mirror.get());
  }
  uint32_t link(uint32_t rank, uint32_t peer) { return ends_[rank].peers[peer].link; }
  // All links of that rank end.
  void stop(uint32_t rank) {
    if (ends_[rank].proxy) eep_proxy_stop(ends_[rank].proxy);
    ends_[rank].proxy = nullptr;
  }

 private:
  struct Peer {
    std::unique_ptr<uint64_t[]> mirror;
    eep_link_offer offer{};
    uint32_t link = 0;
  };
  struct End {
    eep_control_page waits{};
    eep_proxy* proxy = nullptr;
    std::vector<Peer> peers;
  };

  static constexpr uint64_t kFirstGroup = 1'000'000;
  std::atomic_ref<uint64_t> last_group(eep_control_page& page) const {
    return std::atomic_ref<uint64_t>(page.groups[shape.lanes - 1]);
  }

  bool is_remote(uint32_t rank, uint32_t peer) const { return hosts_[rank] != hosts_[peer]; }

  static eep_link_secret secret_of(uint32_t rank, uint32_t peer) {
    eep_link_secret secret{};
    std::memset(secret.token, int(rank * 8 + peer) + 1, sizeof secret.token);
    for (uint32_t i = 0; i < EEP_MAX_AREAS; ++i) secret.keys[i] = 1000 * (rank * 8 + peer + 1) + i;
    return secret;
  }

  void invite(uint32_t rank, uint32_t peer) {
    Peer& there = ends_[rank].peers[peer];
    there.mirror = std::make_unique<uint64_t[]>((at.total_bytes + sizeof(eep_control_page)) / sizeof(uint64_t));
    const eep_remote_peer entry{reinterpret_cast<uint64_t>(there.mirror.get()), peer, 0, 0, 0};
    const eep_link_secret secret = secret_of(rank, peer);
    REQUIRE(eep_proxy_invite(ends_[rank].proxy, &entry, &secret, &there.offer, &there.link) == EEP_OK);
  }

  const std::vector<uint32_t> hosts_;
  std::vector<End> ends_;
};

}  // namespace eep_test

#endif  // EEP_TEST_LINKED_RANKS_H_
