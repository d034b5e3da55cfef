// Collectives with ranks as threads: every kind, in one round and in many, and what ends them early.
#include <chrono>

#include "caller.h"

namespace eep_test {
namespace {

void test_every_kind(uint32_t count) {
  Ranks ranks(count);
  const std::vector<uint32_t> members = ranks.backwards();
  on_ranks(count, [&](uint32_t rank) {
    ranks.open(rank, kGroup, members);
    // Nothing, less than a round, just a round of 8192 bytes, just more, and many.
    for (size_t size : {0, 1, 17, 2048, 2049, 5000, 30000, 3}) Caller(ranks, rank, members, size).call_everything();
  });
}

// Two groups at once, of which one has other members, each called from threads of its own.
void test_lanes_do_not_disturb_each_other() {
  Ranks ranks(4);
  const std::vector<uint32_t> all = ranks.backwards(), some = {3, 1};
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    if (rank % 2) ranks.open(rank, 5, some);  // lane 0 there, so that the lanes of the other group differ
    ranks.open(rank, kGroup, all);
  }
  REQUIRE(ranks.ranks[0].lane == 0 && ranks.ranks[1].lane == 1);
  for (uint32_t rank : all)
    threads.emplace_back([&, rank] {
      for (size_t size : {1, 100, 4000, 9}) Caller(ranks, rank, all, size).call_everything();
    });
  std::vector<eep_control_page*> pages;
  for (uint32_t rank : some)
    threads.emplace_back([&, rank] {
      for (int32_t i = 0; i < 200; ++i) {
        int32_t data = int32_t(rank) + i;
        eep_collective_args args = call_of(0, EEP_ALL_REDUCE);
        args.in = args.out = &data, args.bytes = sizeof data;
        REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK);
        REQUIRE(args.answered == first_ranks(10) && data == 4 + 2 * i);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// Every member hears of it, no rank is blamed, and the next call is in step again.
void test_mismatch() {
  Ranks ranks(3, 8192);
  on_ranks(3, [&](uint32_t rank) {
    const uint32_t lane = ranks.open(rank, kGroup, {0, 1, 2});
    eep_context* context = ranks.ranks[rank].context;
    std::vector<int32_t> data(30000, 1);
    std::vector<void*> blocks(3, data.data());
    uint32_t answered = 0;
    for (int i = 0; i < 10; ++i) {
      // Rank 2 gathers where the others reduce, in many rounds.
      eep_collective_args args = call_of(lane, rank == 2 ? EEP_ALL_GATHER : EEP_ALL_REDUCE);
      std::vector<int32_t> out(data.size());
      args.in = data.data(), args.out = out.data(), args.bytes = data.size() * sizeof(int32_t);
      args.out_blocks = blocks.data();
      REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_MISMATCH && eep::is_empty(args.answered));
      if (rank < 2)
        REQUIRE(
            last_error_says("rank 2 called all_gather of 120000 bytes (i32) while this rank called all_reduce "
                            "(sum) of 120000 bytes (i32)"));
      REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 7);

      // Sizes differ.
      args = call_of(lane, EEP_ALL_REDUCE);
      args.in = args.out = data.data(), args.bytes = rank ? 8 : 4;
      REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_MISMATCH);

      // Rank 0, the root of a long broadcast, waits for no rank; it finds out before its second round.
      args = call_of(lane, rank == 2 ? EEP_BARRIER : EEP_BROADCAST);
      args.in = args.out = data.data(), args.bytes = data.size() * sizeof(int32_t);
      const int code = eep_collective(context, &args, nullptr);
      REQUIRE(code == EEP_ERROR_MISMATCH);
      REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 7);

      // Rank 1 expects less of rank 0 than it sends: all of them know.
      const uint64_t sent[3] = {4, 4, 4}, expected[3] = {rank == 1 ? 0u : 4u, 4, 4};
      args = call_of(lane, EEP_ALL_TO_ALL);
      args.in_blocks = blocks.data(), args.in_bytes = sent, args.out_blocks = blocks.data(), args.out_bytes = expected;
      REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_MISMATCH);
      REQUIRE(last_error_says("rank 0 sends 4 bytes to rank 1, which expects 0"));
      REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 7);
    }
    REQUIRE(ranks.status(rank) == 0);
  });
}

// The last rank never comes: a revoke frees the others, later calls of the epoch end at once, the next epoch is well.
void test_revoke() {
  Ranks ranks(3);
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  std::thread revoker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    eep_revoke(ranks.ranks[2].context, 1);
  });
  on_ranks(2, [&](uint32_t rank) {
    uint32_t answered = 99;
    REQUIRE(reduce_one(ranks, rank, answered, 600 * kSecond) == EEP_OK && answered == 0);
    REQUIRE(ranks.status(rank) == EEP_STATUS_REVOKED);
    REQUIRE(reduce_one(ranks, rank, answered, 600 * kSecond) == EEP_OK && answered == 0);
  });
  revoker.join();
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.show(rank, 2, 3);
  on_ranks(2, [&](uint32_t rank) {
    uint32_t answered = 0;
    for (int i = 0; i < 5; ++i) REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
    REQUIRE(ranks.status(rank) == 0);
  });
  // And with the third again.
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.show(rank, 3, 7);
  on_ranks(3, [&](uint32_t rank) {
    uint32_t answered = 0;
    for (int i = 0; i < 5; ++i) REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 7);
  });
}

enum Why { kDeadline, kSuspect, kLeft, kNoLane };

// A rank is lost: by a deadline, by a suspicion from outside, because it left, before it opened its lane.
void lose_a_rank(Why why) {
  Ranks ranks(3);
  for (uint32_t rank = 0; rank < (why == kNoLane ? 2 : 3); ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  const auto rings = [&] { return __atomic_load_n(&ranks.ranks[2].control.doorbell, __ATOMIC_ACQUIRE); };
  const uint32_t before = rings();
  std::thread outside([&] {
    // Both wait by then. Whom all were told not to wait for before they began is left out, and that is no trouble.
    while (why == kSuspect && rings() - before < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (why == kSuspect)
      for (uint32_t rank = 0; rank < 2; ++rank) suspect(ranks.ranks[rank].control, 4);
    if (why == kLeft) eep_control_state(&ranks.ranks[2].control, EEP_OWNER_LEFT);
  });
  on_ranks(2, [&](uint32_t rank) {
    // Seconds: the two must not give up each other, however long one of them gets no processor.
    const bool in_time = why == kDeadline || why == kNoLane;
    uint32_t answered = 0;
    REQUIRE(reduce_one(ranks, rank, answered, in_time ? 6 * kSecond : 600 * kSecond) == EEP_OK && answered == 3);
    REQUIRE(ranks.status(rank) == EEP_STATUS_SUSPECT);
    REQUIRE(ranks.ranks[rank].control.dropped == first_ranks(4));
  });
  outside.join();
}

// Side by side: some of them only wait.
void test_loss() {
  std::vector<std::thread> losses;
  for (Why why : {kDeadline, kSuspect, kLeft, kNoLane}) losses.emplace_back([why] { lose_a_rank(why); });
  for (std::thread& loss : losses) loss.join();
}

// A sum that lacks a part is never taken for a whole one: ranks 0 and 2 give each other up, rank 1 lacks no part, and
// none may believe the segments that the others reduced.
void test_a_loss_is_told_to_the_others() {
  Ranks ranks(3);
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  suspect(ranks.ranks[0].control, 4);
  suspect(ranks.ranks[2].control, 1);
  on_ranks(3, [&](uint32_t rank) {
    std::vector<int32_t> data(20000, 1);
    eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_REDUCE);
    args.in = args.out = data.data(), args.bytes = data.size() * sizeof(int32_t);
    REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK);
    REQUIRE(args.answered == eep::only(rank));
    REQUIRE(ranks.status(rank) == EEP_STATUS_SUSPECT && ranks.ranks[rank].control.dropped == first_ranks(0));
  });
}

void test_lanes_open_and_close() {
  Ranks ranks(3);
  eep_context* context = ranks.ranks[0].context;
  uint32_t lane = 9;
  eep_group group{0, 2, 0, {0, 1}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("must not be 0"));
  group = {EEP_GROUP_LIMIT, 2, 0, {0, 1}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("below 2^39"));
  group = {1, 2, 0, {1, 2}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("does not belong"));
  group = {1, 3, 0, {0, 1, 1}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT &&
          last_error_says("rank 1 is in the group more than once"));
  group = {1, 2, 0, {0, 3}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("outside the capacity of 3"));
  group = {1, 9, 0, {0}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT);
  REQUIRE(lane == 9);
  for (uint64_t id : {1, 2, 3}) REQUIRE(ranks.open(0, id, {0}) == id - 1);
  group = {4, 1, 0, {0}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("all 3 lanes"));
  REQUIRE(ranks.open(0, 2, {0, 1}) == 1);  // growth
  REQUIRE(ranks.ranks[0].control.groups[1] == 2);
  REQUIRE(eep_lane_close(context, 1) == EEP_OK && ranks.ranks[0].control.groups[1] == eep_group_closed(2, 1));
  REQUIRE(eep_lane_close(context, 1) == EEP_ERROR_ARGUMENT);
  REQUIRE(ranks.open(0, 4, {0}) == 1);

  eep_collective_args args = call_of(7, EEP_BARRIER);
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("lane 7 serves no group"));
  args = call_of(0, EEP_BROADCAST);
  args.root = 2;
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("the root, rank 2"));
  float bits = 0;
  args = call_of(0, EEP_ALL_REDUCE);
  args.in = args.out = &bits, args.bytes = 4, args.element = EEP_ELEMENT_F32, args.reduction = EEP_BXOR;
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("cannot be reduced"));
  args.reduction = EEP_SUM, args.bytes = 3;
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("not a whole number"));
  args.bytes = 4, args.out = nullptr;
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("gave no address"));
}

// A member that has done its part and closed its lane owes nothing more. One that comes later finds what it left, and
// is told at once, long before the deadline, that no more will come. In the next view the group is another.
void test_what_a_closed_lane_owed_is_still_there() {
  Ranks ranks(2);
  float given = 5, got = 0;
  const auto broadcast = [&](uint32_t rank, uint32_t lane, float& value) {
    eep_collective_args args = call_of(lane, EEP_BROADCAST);
    args.root = 0, args.in = args.out = &value, args.bytes = 4, args.element = EEP_ELEMENT_F32;
    args.deadline_ns = 600 * kSecond;
    REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK);
    return args.answered.words[0];
  };
  const uint32_t late[] = {ranks.open(1, 1, {0, 1}), ranks.open(1, 2, {0, 1})};
  for (uint64_t id : {1, 2}) {  // the lane of the first is not used for the second
    const uint32_t lane = ranks.open(0, id, {0, 1});
    REQUIRE(broadcast(0, lane, given) == 3);
    REQUIRE(eep_lane_close(ranks.ranks[0].context, lane) == EEP_OK);
    given += 1;
  }
  for (uint32_t i : {0, 1}) REQUIRE(broadcast(1, late[i], got) == 3 && got == 5 + i);
  REQUIRE(ranks.status(1) == 0);
  REQUIRE(broadcast(1, late[1], got) != 3 && ranks.status(1) == EEP_STATUS_SUSPECT);
}

}  // namespace

void test_collectives() {
  test_what_a_closed_lane_owed_is_still_there();
  test_lanes_open_and_close();
  for (uint32_t count : {1, 2, 3, 5}) test_every_kind(count);
  test_lanes_do_not_disturb_each_other();
  test_mismatch();
  test_revoke();
  test_loss();
  test_a_loss_is_told_to_the_others();
}

}  // namespace eep_test
