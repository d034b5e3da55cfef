// Collectives while views change: ranks enter them one by one, and lanes are taken by one group after the other.
#include <chrono>

#include "caller.h"

namespace eep_test {
namespace {

// Every rank goes through the epochs at its own pace, with calls that wait for all, for some and for none: a slow
// rank must find what it needs of the old epoch untouched by those that are in the next one already.
void test_views_are_entered_at_any_moment() {
  constexpr uint32_t kCount = 3;
  Ranks ranks(kCount);
  const std::vector<uint32_t> members = ranks.backwards();
  on_ranks(kCount, [&](uint32_t rank) {
    ranks.open(rank, kGroup, members);
    for (uint32_t epoch = 1; epoch < 400; ++epoch) {
      if (epoch > 1) ranks.show(rank, epoch, ranks.all_ranks());
      const size_t sizes[] = {1, 2048, 0, 5000, 300};
      for (uint32_t i = 0; i < epoch % 4; ++i)
        Caller(ranks, rank, members, sizes[(epoch + i) % 5]).call((epoch * 7 + i * 3) % Caller::kCalls, epoch % kCount);
    }
  });
}

// A lane of two ranks that has been through so many rounds.
void open_and_reduce(Ranks& ranks, uint32_t rounds) {
  on_ranks(2, [&](uint32_t rank) {
    ranks.open(rank, kGroup, {0, 1});
    uint32_t answered = 0;
    for (uint32_t i = 0; i < rounds; ++i) REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
  });
}

// What the members have is gathered at rank 1; the others do not wait.
eep_collective_args gather_at_1(Ranks& ranks, uint32_t rank, const int32_t& in, std::vector<void*>& out) {
  eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_GATHER);
  args.in = &in, args.bytes = sizeof in, args.root = 1, args.deadline_ns = 600 * kSecond;
  if (rank == 1) args.out_blocks = out.data();
  return args;
}

// Rank 0 is done with the old epoch, and goes on in the new one, while rank 1 has yet to call, to look for the
// flags, or to copy what they told it of.
void test_the_slow_one_finds_the_old_epoch_whole() {
  enum Where { kBeforeCall, kBeforeLook, kBeforeCopy };
  const auto point_named = [](const char* name) {
    for (uint32_t point = 0; point < eep_fault_count(); ++point)
      if (!std::strcmp(eep_fault_name(point), name)) return point;
    return eep_fault_count();
  };
  for (Where where : {kBeforeCall, kBeforeLook, kBeforeCopy})
    for (uint32_t rounds_before : {0, 1, 2, 3}) {
      Ranks ranks(2);
      open_and_reduce(ranks, rounds_before);
      // Of rank 0, which comes first, only the call in the old epoch is passed over.
      if (where == kBeforeLook)
        REQUIRE(eep_fault_arm(point_named("collective.after_flags"), EEP_FAULT_SLEEP, 1, 50'000) == EEP_OK);
      if (where == kBeforeCopy)
        REQUIRE(eep_fault_arm(point_named("collective.before_copy"), EEP_FAULT_SLEEP, 0, 50'000) == EEP_OK);
      const auto gather = [&](uint32_t rank, int32_t expected) {
        const int32_t in = expected + int32_t(rank);
        int32_t got[2] = {-1, -1};
        std::vector<void*> out = {got, got + 1};
        eep_collective_args args = gather_at_1(ranks, rank, in, out);
        REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK);
        REQUIRE(ranks.status(rank) == 0 && args.answered == first_ranks(3));
        if (rank == 1) REQUIRE(got[0] == expected && got[1] == expected + 1);
      };
      gather(0, 100);
      std::thread slow([&] {
        if (where == kBeforeCall) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        gather(1, 100);
        ranks.show(1, 2, 3);
        for (int32_t i = 1; i < 4; ++i) gather(1, 100 + 10 * i);
      });
      if (where != kBeforeCall) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ranks.show(0, 2, 3);
      for (int32_t i = 1; i < 4; ++i) gather(0, 100 + 10 * i);
      slow.join();
      for (const char* name : {"collective.after_flags", "collective.before_copy"})
        REQUIRE(eep_fault_arm(point_named(name), EEP_FAULT_OFF, 0, 0) == EEP_OK);
    }
}

// Rank 0 gives the old epoch up in the middle of it: rank 1, which waits for it there, is told so by the first flag of
// the new one, and takes nothing that was not meant for it.
void test_who_has_left_an_epoch_is_not_waited_for() {
  enum Why { kNeverCalled, kGaveUs };
  for (Why why : {kNeverCalled, kGaveUs})
    for (uint32_t rounds_before : {0, 2, 3}) {
      Ranks ranks(2);
      open_and_reduce(ranks, rounds_before);
      uint32_t answered = 0;
      if (why == kGaveUs) {  // it finishes the round, but without rank 1, to which it says nothing
        suspect(ranks.ranks[0].control, 2);
        REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 1);
      }
      std::thread waiting([&] {
        uint32_t seen = 9;
        REQUIRE(reduce_one(ranks, 1, seen, 600 * kSecond) == EEP_OK && seen == 0);
        REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == first_ranks(0));
        // Nor does another call of that epoch begin.
        REQUIRE(reduce_one(ranks, 1, seen, 600 * kSecond) == EEP_OK && seen == 0);
        ranks.show(1, 2, 3);
        for (int i = 0; i < 3; ++i) REQUIRE(reduce_one(ranks, 1, seen) == EEP_OK && seen == 3);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ranks.show(0, 2, 3);
      for (int i = 0; i < 3; ++i) REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 3);
      waiting.join();
      for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(ranks.status(rank) == 0);
    }
}

// A lane that served another group before: what its members said then counts for nothing now.
void test_a_lane_is_taken_again() {
  Ranks ranks(2);
  on_ranks(2, [&](uint32_t rank) {
    for (uint64_t id = 1; id < 40; ++id) {
      const uint32_t lane = ranks.open(rank, id, {0, 1});
      uint32_t answered = 0;
      for (uint64_t i = 0; i < id % 4; ++i) REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
      eep_collective_args args = call_of(lane, EEP_BARRIER);
      REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK && args.answered == first_ranks(3));
      REQUIRE(eep_lane_close(ranks.ranks[rank].context, lane) == EEP_OK);
    }
  });
}

// And in a view that it has left: what lies there of the group before has the number of the round that is waited for.
void test_a_lane_that_was_taken_again_holds_nothing_of_the_group_before() {
  Ranks ranks(2);
  uint32_t answered = 0;
  on_ranks(2, [&](uint32_t rank) {
    for (uint64_t id : {8, 9}) ranks.open(rank, id, {0, 1});  // so that no other lane is free
    const uint32_t lane = ranks.open(rank, 1, {0, 1});
    uint32_t seen = 0;
    REQUIRE(reduce_one(ranks, rank, seen) == EEP_OK && seen == 3);
    REQUIRE(eep_lane_close(ranks.ranks[rank].context, lane) == EEP_OK);
    REQUIRE(ranks.open(rank, 2, {0, 1}) == lane);
  });
  std::thread waiting([&] {
    uint32_t seen = 9;
    REQUIRE(reduce_one(ranks, 1, seen, 600 * kSecond) == EEP_OK && seen == 0);
    REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == first_ranks(0));
    ranks.show(1, 2, 3);
    REQUIRE(reduce_one(ranks, 1, seen) == EEP_OK && seen == 3);
  });
  ranks.show(0, 2, 3);
  REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 3);
  waiting.join();
}

}  // namespace

void test_collectives_as_views_change() {
  test_views_are_entered_at_any_moment();
  test_the_slow_one_finds_the_old_epoch_whole();
  test_who_has_left_an_epoch_is_not_waited_for();
  test_a_lane_is_taken_again();
  test_a_lane_that_was_taken_again_holds_nothing_of_the_group_before();
}

}  // namespace eep_test
