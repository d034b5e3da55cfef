// Process groups over links: ranks, proxies and links as threads side by side, for the sanitizers. Where there is no
// libfabric, there is nothing to test.
#include <poll.h>

#include "caller.h"
#include "linked_ranks.h"

namespace eep_test {
namespace {

std::vector<uint8_t> bytes_of(uint64_t tag, size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = uint8_t(tag * 131 + i * 7);
  return bytes;
}

void send(LinkedRanks& ranks, uint32_t rank, uint32_t to, uint64_t tag, size_t size) {
  const std::vector<uint8_t> data = bytes_of(tag, size);
  uint32_t done = 9;
  REQUIRE(eep_send(ranks.ranks[rank].context, ranks.ranks[rank].lane, to, tag, data.data(), size, 60 * kSecond,
                   &done) == EEP_OK);
  REQUIRE(done == 1);
}

void receive(LinkedRanks& ranks, uint32_t rank, uint32_t source, uint64_t tag, size_t size) {
  eep_context* context = ranks.ranks[rank].context;
  const uint32_t lane = ranks.ranks[rank].lane;
  eep_message message{};
  const eep_rank_set sources = eep::only(source);
  REQUIRE(eep_probe(context, lane, &sources, eep_pokes(context), 60 * kSecond, &message) == EEP_OK);
  REQUIRE(message.arrived && message.tag == tag && message.bytes == size);
  std::vector<uint8_t> data(size);
  uint32_t done = 9;
  REQUIRE(eep_recv(context, lane, source, data.data(), size, 60 * kSecond, &done) == EEP_OK);
  REQUIRE(done == 1 && data == bytes_of(tag, size));
}

void test_every_kind(const std::vector<uint32_t>& hosts) {
  LinkedRanks ranks(hosts);
  const std::vector<uint32_t> members = ranks.backwards();
  on_ranks(ranks.count, [&](uint32_t rank) {
    ranks.open(rank, kGroup, members);
    for (size_t size : {0, 17, 2049, 30000, 3}) Caller(ranks, rank, members, size).call_everything();
  });
}

// Both ways at once, beside collectives, in two views.
void test_messages_cross() {
  const size_t sizes[] = {0, 1, 256, 5000, 70000, 64};
  LinkedRanks ranks({0, 1});
  for (uint64_t epoch = 1; epoch <= 2; ++epoch) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ranks.enter(rank, epoch, 3);
      ranks.open(rank, kGroup, {0, 1});
    }
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        for (size_t i = 0; i < std::size(sizes); ++i) send(ranks, rank, 1 - rank, i, sizes[i]);
      });
      threads.emplace_back([&, rank] {
        for (size_t i = 0; i < std::size(sizes); ++i) receive(ranks, rank, 1 - rank, i, sizes[i]);
      });
      threads.emplace_back([&, rank] {
        uint32_t answered = 0;
        for (int i = 0; i < 30; ++i) REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(ranks.status(rank) == 0);
  }
}

// Lanes serve one group after the other, of the same rounds, in views of which one rank is always first.
void test_groups_and_views_follow_each_other() {
  LinkedRanks ranks({0, 1});
  const std::vector<uint32_t> members = {0, 1};
  on_ranks(2, [&](uint32_t rank) {
    for (uint64_t epoch = 1; epoch <= 6; ++epoch) {
      if (epoch > 1) ranks.enter(rank, epoch, 3);
      for (uint64_t use = 0; use < 5; ++use) {
        const uint32_t lane = ranks.open(rank, kGroup + epoch * 10 + use, members);
        for (size_t size : {3, 2049}) Caller(ranks, rank, members, size).call_everything();
        REQUIRE(eep_lane_close(ranks.ranks[rank].context, lane) == EEP_OK);
      }
    }
  });
}

void test_a_mismatch_is_told_on_both_sides() {
  LinkedRanks ranks({0, 1});
  on_ranks(2, [&](uint32_t rank) {
    const uint32_t lane = ranks.open(rank, kGroup, {0, 1});
    std::vector<int32_t> data(10, 1);
    eep_collective_args args = call_of(lane, rank ? EEP_BARRIER : EEP_ALL_REDUCE);
    args.in = args.out = data.data(), args.bytes = data.size() * sizeof(int32_t);
    REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_ERROR_MISMATCH);
    uint32_t answered = 0;
    REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
  });
}

void test_a_link_that_ends() {
  LinkedRanks ranks({0, 0, 1});
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  uint32_t answered = 0;
  std::thread waiting([&] { REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK); });
  int ended = -1;
  REQUIRE(eep_proxy_ended(ranks.proxy(0), ranks.link(0, 2), &ended) == EEP_OK);
  ranks.stop(2);
  pollfd descriptor{ended, POLLIN, 0};
  REQUIRE(poll(&descriptor, 1, 60'000) == 1);
  uint32_t other = 0;
  REQUIRE(reduce_one(ranks, 1, other) == EEP_OK);
  waiting.join();
  REQUIRE(!(answered & 4) && !(other & 4) && (ranks.status(0) & EEP_STATUS_SUSPECT));
}

// What a rank owed is with its peers when it has taken leave, and the end of its link is no reason to suspect it.
void test_a_goodbye() {
  LinkedRanks ranks({0, 1});
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
  const std::vector<uint32_t> members = {0, 1};
  std::thread first([&] { Caller(ranks, 1, members, 100).call(1, 1); });  // a broadcast, of which it is the root
  first.join();
  send(ranks, 1, 0, 5, 300);
  eep_control_state(&ranks.ranks[1].control, EEP_OWNER_LEFT);
  eep_control_state(ranks.waits(1), EEP_OWNER_LEFT);
  REQUIRE(eep_proxy_take_leave(ranks.proxy(1), 60 * kSecond));
  ranks.stop(1);
  Caller(ranks, 0, members, 100).call(1, 1);
  receive(ranks, 0, 1, 5, 300);
  uint32_t answered = 0;
  REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 1);
}

#if !defined(__SANITIZE_THREAD__)  // it races on purpose
// A peer that writes what it likes to all that it can reach of a rank: calls end, and nothing breaks.
void test_a_peer_that_scribbles() {
  LinkedRanks ranks({0, 1});
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
  std::atomic<bool> is_over{false};
  std::thread scribbler([&] {
    uint64_t random = 88172645463325252;
    uint64_t* words = reinterpret_cast<uint64_t*>(ranks.mirror(0, 1) + ranks.at.lanes);
    const uint64_t count = (ranks.at.total_bytes - ranks.at.lanes) / sizeof(uint64_t);
    while (!is_over) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      __atomic_store_n(&words[random % count], random, __ATOMIC_RELAXED);
    }
  });
  on_ranks(2, [&](uint32_t rank) {
    for (int i = 0; i < 20; ++i) {
      uint32_t answered = 0;
      reduce_one(ranks, rank, answered, kSecond / 20);
      int32_t out[2] = {};
      void* blocks[2] = {&out[0], &out[1]};
      eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_GATHER);
      args.in = &out, args.out_blocks = blocks, args.bytes = 4, args.deadline_ns = kSecond / 20;
      eep_collective(ranks.ranks[rank].context, &args, nullptr);
    }
  });
  is_over = true;
  scribbler.join();
}
#endif

}  // namespace

void test_lanes_over_links() {
  eep_hosts* transport = nullptr;
  if (eep_hosts_open("tcp", "127.0.0.1", &transport) != EEP_OK) return;
  eep_hosts_close(transport);
  test_every_kind({0, 1});
  test_every_kind({0, 1, 0});
  test_every_kind({0, 0, 1, 2, 1});
  test_messages_cross();
  test_groups_and_views_follow_each_other();
  test_a_mismatch_is_told_on_both_sides();
  test_a_link_that_ends();
  test_a_goodbye();
#if !defined(__SANITIZE_THREAD__)
  test_a_peer_that_scribbles();
#endif
}

}  // namespace eep_test
