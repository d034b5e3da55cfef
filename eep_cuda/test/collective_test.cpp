// Collectives with ranks as threads: every kind, in one round and in many, and what ends them early.
#include <chrono>
#include <cmath>
#include <limits>

#include "cpu/formats.h"
#include "cpu/reduce.h"
#include "group.h"

namespace eep_test {
namespace {

constexpr uint64_t kGroup = 77;

eep_collective_args call_of(uint32_t lane, eep_collective_kind kind) {
  eep_collective_args args{};
  args.lane = lane;
  args.kind = kind;
  args.element = EEP_ELEMENT_I32;
  args.reduction = EEP_SUM;
  args.deadline_ns = 60 * kSecond;
  return args;
}

// A value that tells who made it, for whom, and where in the block it stands.
int32_t value(uint32_t from, uint32_t to, size_t i) { return int32_t(from * 1000003 + to * 7919 + i * 31); }

using Block = std::vector<int32_t>;
Block block(uint32_t from, uint32_t to, size_t size) {
  Block values(size);
  for (size_t i = 0; i < size; ++i) values[i] = value(from, to, i);
  return values;
}

// One rank's part of a call of every kind, with blocks of `size` elements.
class Caller {
 public:
  Caller(Ranks& ranks, uint32_t rank, const std::vector<uint32_t>& members, size_t size)
      : ranks_(ranks), rank_(rank), members_(members), size_(size), bytes_(size * sizeof(int32_t)) {}

  static constexpr uint32_t kCalls = 10;
  void call(uint32_t which, uint32_t root) {
    switch (which) {
      case 0:
        return barrier();
      case 1:
        return broadcast(root);
      case 2:
        return all_reduce(true);
      case 3:
        return gather(root);
      case 4:
        return all_reduce(false);
      case 5:
        return all_gather();
      case 6:
        return scatter(root);
      case 7:
        return reduce(root);
      case 8:
        return reduce_scatter();
      default:
        return all_to_all();
    }
  }
  void call_everything() {
    for (uint32_t which = 0; which < kCalls; ++which) call(which, members_[size_ % members_.size()]);
  }

 private:
  uint32_t count() const { return uint32_t(members_.size()); }
  uint32_t lane() const { return ranks_.ranks[rank_].lane; }
  void make(eep_collective_args& args) {
    const int code = eep_collective(ranks_.ranks[rank_].context, &args, nullptr);
    if (code) std::fprintf(stderr, "rank %u: %s\n", rank_, eep_last_error());
    REQUIRE(code == EEP_OK);
    uint64_t all = 0;
    for (uint32_t member : members_) all |= uint64_t{1} << member;
    REQUIRE(args.answered == all);
    REQUIRE(ranks_.status(rank_) == 0);
  }
  Block sum_for(uint32_t to) const {
    Block total(size_, 0);
    for (size_t i = 0; i < size_; ++i)
      for (uint32_t member : members_) total[i] = int32_t(uint32_t(total[i]) + uint32_t(value(member, to, i)));
    return total;
  }
  std::vector<Block> blocks(bool outgoing) const {
    std::vector<Block> all;
    for (uint32_t member : members_) all.push_back(outgoing ? block(rank_, member, size_) : Block(size_, -1));
    return all;
  }
  static std::vector<void*> pointers(std::vector<Block>& blocks) {
    std::vector<void*> all;
    for (Block& block : blocks) all.push_back(block.data());
    return all;
  }

  void barrier() {
    eep_collective_args args = call_of(lane(), EEP_BARRIER);
    make(args);
  }
  void broadcast(uint32_t root) {
    Block data = rank_ == root ? block(root, 0, size_) : Block(size_, -1);
    eep_collective_args args = call_of(lane(), EEP_BROADCAST);
    args.in = args.out = data.data(), args.bytes = bytes_, args.root = root;
    make(args);
    REQUIRE(data == block(root, 0, size_));
  }
  void all_reduce(bool in_place) {
    Block in = block(rank_, 5, size_), out(size_, -1);
    eep_collective_args args = call_of(lane(), EEP_ALL_REDUCE);
    args.in = in.data(), args.out = in_place ? in.data() : out.data(), args.bytes = bytes_;
    make(args);
    REQUIRE((in_place ? in : out) == sum_for(5));
    if (!in_place) REQUIRE(in == block(rank_, 5, size_));
  }
  void reduce(uint32_t root) {
    Block data = block(rank_, 6, size_);
    eep_collective_args args = call_of(lane(), EEP_REDUCE);
    args.in = args.out = data.data(), args.bytes = bytes_, args.root = root;
    make(args);
    REQUIRE(data == (rank_ == root ? sum_for(6) : block(rank_, 6, size_)));
  }
  void all_gather() {
    std::vector<Block> out = blocks(false);
    const Block in = block(rank_, 1, size_);
    std::vector<void*> to = pointers(out);
    eep_collective_args args = call_of(lane(), EEP_ALL_GATHER);
    args.in = in.data(), args.out_blocks = to.data(), args.bytes = bytes_;
    make(args);
    for (uint32_t i = 0; i < count(); ++i) REQUIRE(out[i] == block(members_[i], 1, size_));
  }
  void gather(uint32_t root) {
    std::vector<Block> out = blocks(false);
    const Block in = block(rank_, 2, size_);
    std::vector<void*> to = pointers(out);
    eep_collective_args args = call_of(lane(), EEP_GATHER);
    args.in = in.data(), args.bytes = bytes_, args.root = root;
    if (rank_ == root) args.out_blocks = to.data();
    make(args);
    for (uint32_t i = 0; i < count(); ++i)
      REQUIRE(out[i] == (rank_ == root ? block(members_[i], 2, size_) : Block(size_, -1)));
  }
  void scatter(uint32_t root) {
    std::vector<Block> in = blocks(true);
    std::vector<void*> from = pointers(in);
    Block out(size_, -1);
    eep_collective_args args = call_of(lane(), EEP_SCATTER);
    args.out = out.data(), args.bytes = bytes_, args.root = root;
    if (rank_ == root) args.in_blocks = from.data();
    make(args);
    REQUIRE(out == block(root, rank_, size_));
  }
  // In place: the result goes where this rank's own block was.
  void reduce_scatter() {
    std::vector<Block> in = blocks(true);
    std::vector<void*> from = pointers(in);
    eep_collective_args args = call_of(lane(), EEP_REDUCE_SCATTER);
    uint32_t own = 0;
    while (members_[own] != rank_) ++own;
    args.in_blocks = from.data(), args.out = from[own], args.bytes = bytes_;
    make(args);
    REQUIRE(in[own] == sum_for(rank_));
  }
  // Sizes differ by pair, and some are nothing.
  void all_to_all() {
    const auto size_for = [&](uint32_t from, uint32_t to) { return (from * 3 + to) % 4 * size_; };
    std::vector<Block> in, out;
    std::vector<uint64_t> in_bytes, out_bytes;
    for (uint32_t member : members_) {
      in.push_back(block(rank_, member, size_for(rank_, member)));
      out.push_back(Block(size_for(member, rank_), -1));
      in_bytes.push_back(in.back().size() * sizeof(int32_t));
      out_bytes.push_back(out.back().size() * sizeof(int32_t));
    }
    std::vector<void*> from = pointers(in), to = pointers(out);
    eep_collective_args args = call_of(lane(), EEP_ALL_TO_ALL);
    args.in_blocks = from.data(), args.in_bytes = in_bytes.data();
    args.out_blocks = to.data(), args.out_bytes = out_bytes.data();
    make(args);
    for (uint32_t i = 0; i < count(); ++i) REQUIRE(out[i] == block(members_[i], rank_, size_for(members_[i], rank_)));
  }

  Ranks& ranks_;
  const uint32_t rank_;
  const std::vector<uint32_t>& members_;
  const size_t size_;
  const uint64_t bytes_;
};

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
        REQUIRE(args.answered == 10 && data == 4 + 2 * i);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

int reduce_one(Ranks& ranks, uint32_t rank, uint32_t& answered, uint64_t deadline_ns = 60 * kSecond) {
  int32_t data = 1;
  eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_REDUCE);
  args.in = args.out = &data, args.bytes = sizeof data, args.deadline_ns = deadline_ns;
  const int code = eep_collective(ranks.ranks[rank].context, &args, nullptr);
  answered = uint32_t(args.answered);
  return code;
}

// Everybody hears of it, nobody is blamed, and the next call is in step again.
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
      REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_MISMATCH && !args.answered);
      if (rank < 2)
        REQUIRE(
            last_error_says("rank 2 called all_gather of 120000 bytes (i32) while this rank called all_reduce "
                            "(sum) of 120000 bytes (i32)"));
      REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 7);

      // Sizes differ.
      args = call_of(lane, EEP_ALL_REDUCE);
      args.in = args.out = data.data(), args.bytes = rank ? 8 : 4;
      REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_MISMATCH);

      // Rank 0, the root of a long broadcast, waits for nobody; it finds out before its second round.
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

// A rank is lost: by a deadline, by what somebody says, because it left, before it opened its lane.
void test_loss() {
  enum Why { kDeadline, kSuspect, kLeft, kNoLane };
  for (Why why : {kDeadline, kSuspect, kLeft, kNoLane}) {
    Ranks ranks(3);
    for (uint32_t rank = 0; rank < (why == kNoLane ? 2 : 3); ++rank) ranks.open(rank, kGroup, {0, 1, 2});
    std::thread outside([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (why == kSuspect)
        for (uint32_t rank = 0; rank < 2; ++rank) eep_control_suspect(&ranks.ranks[rank].control, 4);
      if (why == kLeft) eep_control_state(&ranks.ranks[2].control, EEP_OWNER_LEFT);
    });
    on_ranks(2, [&](uint32_t rank) {
      const bool in_time = why == kDeadline || why == kNoLane;
      uint32_t answered = 0;
      REQUIRE(reduce_one(ranks, rank, answered, in_time ? 2 * kSecond : 600 * kSecond) == EEP_OK && answered == 3);
      REQUIRE(ranks.status(rank) == EEP_STATUS_SUSPECT);
      REQUIRE(ranks.ranks[rank].control.dropped == 4);
    });
    outside.join();
  }
}

// A sum that lacks somebody is never taken for a whole one: ranks 0 and 2 give each other up, rank 1 lacks nobody, and
// none may believe the segments that the others reduced.
void test_a_loss_is_told_to_the_others() {
  Ranks ranks(3);
  for (uint32_t rank = 0; rank < 3; ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  eep_control_suspect(&ranks.ranks[0].control, 4);
  eep_control_suspect(&ranks.ranks[2].control, 1);
  on_ranks(3, [&](uint32_t rank) {
    std::vector<int32_t> data(20000, 1);
    eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_REDUCE);
    args.in = args.out = data.data(), args.bytes = data.size() * sizeof(int32_t);
    REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK);
    REQUIRE(args.answered == uint64_t{1} << rank);
    REQUIRE(ranks.status(rank) == EEP_STATUS_SUSPECT && ranks.ranks[rank].control.dropped == 0);
  });
}

void test_lanes_open_and_close() {
  Ranks ranks(3);
  eep_context* context = ranks.ranks[0].context;
  uint32_t lane = 9;
  eep_group group{0, 2, 0, {0, 1}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("other than 0"));
  group = {1, 2, 0, {1, 2}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("does not belong"));
  group = {1, 3, 0, {0, 1, 1}};
  REQUIRE(eep_lane_open(context, &group, &lane) == EEP_ERROR_ARGUMENT && last_error_says("rank 1 is twice"));
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
  REQUIRE(eep_lane_close(context, 1) == EEP_OK && ranks.ranks[0].control.groups[1] == 0);
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
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("no whole number"));
  args.bytes = 4, args.out = nullptr;
  REQUIRE(eep_collective(context, &args, nullptr) == EEP_ERROR_ARGUMENT && last_error_says("is missing"));
}

// ---- views are entered one by one ----

// Every rank goes through the epochs at its own pace, with calls that wait for all, for some and for nobody: whoever is
// slow must find what it needs of the old epoch untouched by those that are in the next one already.
void test_views_are_entered_at_any_moment() {
  constexpr uint32_t kCount = 3;
  Ranks ranks(kCount);
  const std::vector<uint32_t> members = ranks.backwards();
  on_ranks(kCount, [&](uint32_t rank) {
    ranks.open(rank, kGroup, members);
    for (uint32_t epoch = 1; epoch < 400; ++epoch) {
      if (epoch > 1) ranks.show(rank, epoch, ranks.everybody());
      const size_t sizes[] = {1, 2048, 0, 5000, 300};
      for (uint32_t i = 0; i < epoch % 4; ++i)
        Caller(ranks, rank, members, sizes[(epoch + i) % 5]).call((epoch * 7 + i * 3) % Caller::kCalls, epoch % kCount);
    }
  });
}

// What the members have is gathered at rank 1; the others wait for nobody.
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
      for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
      on_ranks(2, [&](uint32_t rank) {
        uint32_t answered = 0;
        for (uint32_t i = 0; i < rounds_before; ++i)
          REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
      });
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
        REQUIRE(ranks.status(rank) == 0 && args.answered == 3);
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
      for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
      on_ranks(2, [&](uint32_t rank) {
        uint32_t answered = 0;
        for (uint32_t i = 0; i < rounds_before; ++i)
          REQUIRE(reduce_one(ranks, rank, answered) == EEP_OK && answered == 3);
      });
      uint32_t answered = 0;
      if (why == kGaveUs) {  // it finishes the round, but without rank 1, to which it says nothing
        eep_control_suspect(&ranks.ranks[0].control, 2);
        REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 1);
      }
      std::thread waiting([&] {
        uint32_t seen = 9;
        REQUIRE(reduce_one(ranks, 1, seen, 600 * kSecond) == EEP_OK && seen == 0);
        REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == 0);
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
      REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK && args.answered == 3);
      REQUIRE(eep_lane_close(ranks.ranks[rank].context, lane) == EEP_OK);
    }
  });
}

// And in a view that it has left: what lies there of the group before has the number of the round that is waited for.
void test_a_lane_that_was_taken_again_holds_nothing_of_the_group_before() {
  Ranks ranks(2);
  uint32_t answered = 0;
  on_ranks(2, [&](uint32_t rank) {
    const uint32_t lane = ranks.open(rank, 1, {0, 1});
    uint32_t seen = 0;
    REQUIRE(reduce_one(ranks, rank, seen) == EEP_OK && seen == 3);
    REQUIRE(eep_lane_close(ranks.ranks[rank].context, lane) == EEP_OK);
    REQUIRE(ranks.open(rank, 2, {0, 1}) == lane);
  });
  std::thread waiting([&] {
    uint32_t seen = 9;
    REQUIRE(reduce_one(ranks, 1, seen, 600 * kSecond) == EEP_OK && seen == 0);
    REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == 0);
    ranks.show(1, 2, 3);
    REQUIRE(reduce_one(ranks, 1, seen) == EEP_OK && seen == 3);
  });
  ranks.show(0, 2, 3);
  REQUIRE(reduce_one(ranks, 0, answered) == EEP_OK && answered == 3);
  waiting.join();
}

// ---- numbers ----

template <typename T>
T reduced(eep_element element, eep_reduction reduction, const std::vector<T>& values) {
  std::vector<const uint8_t*> sources;
  for (const T& value : values) sources.push_back(reinterpret_cast<const uint8_t*>(&value));
  const eep::Reduce reduce = eep::find_reduce(element, reduction);
  REQUIRE(reduce);
  T out{};
  reduce(sources.data(), uint32_t(values.size()), sizeof(T), reinterpret_cast<uint8_t*>(&out));
  return out;
}

void test_numbers() {
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_U8, EEP_SUM, {200, 100, 1}) == 45);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_U8, EEP_AVG, {200, 201}) == 200);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_AVG, {-3, -4, -1, 1}) == -1);
  REQUIRE(reduced<int8_t>(EEP_ELEMENT_I8, EEP_MIN, {3, -4, 5}) == -4);
  REQUIRE(reduced<int64_t>(EEP_ELEMENT_I64, EEP_MAX, {3, -4, 5}) == 5);
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_U16, EEP_PROD, {65535, 65535}) == 1);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_PROD, {1 << 30, 4}) == 0);
  REQUIRE(reduced<int32_t>(EEP_ELEMENT_I32, EEP_BAND, {12, 10}) == 8);
  REQUIRE(reduced<uint64_t>(EEP_ELEMENT_U64, EEP_BOR, {12, 10}) == 14);
  REQUIRE(reduced<int16_t>(EEP_ELEMENT_I16, EEP_BXOR, {12, 10, 1}) == 7);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_SUM, {0, 2, 1}) == 1);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_PROD, {1, 2, 0}) == 0);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_MIN, {1, 2}) == 1);
  REQUIRE(reduced<uint8_t>(EEP_ELEMENT_BOOL, EEP_MAX, {0, 0}) == 0);
  REQUIRE(reduced<float>(EEP_ELEMENT_F32, EEP_AVG, {1, 2, 4}) == 7.0f / 3);
  REQUIRE(reduced<double>(EEP_ELEMENT_F64, EEP_SUM, {1e300, 1, -1e300}) == 0);  // in order
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (eep_reduction reduction : {EEP_MIN, EEP_MAX}) {
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {nan, 1, 2})));
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {1, nan, 2})));
    REQUIRE(std::isnan(reduced<float>(EEP_ELEMENT_F32, reduction, {1, 2, nan})));
  }
  // 256 + 1 is a tie in bf16 that would round down; with another 1 it does not, if rounding waits for the end.
  const auto bf16 = [](float x) { return eep::bf16_of_float(x); };
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_BF16, EEP_SUM, {bf16(256), bf16(1), bf16(1)}) == bf16(258));
  const auto f16 = [](float x) { return eep::f16_of_float(x); };
  REQUIRE(reduced<uint16_t>(EEP_ELEMENT_F16, EEP_SUM, {f16(2048), f16(1), f16(1)}) == f16(2050));
  REQUIRE(!eep::find_reduce(EEP_ELEMENT_BYTES, EEP_SUM) && !eep::find_reduce(EEP_ELEMENT_BF16, EEP_BAND));
  REQUIRE(!eep::find_reduce(EEP_ELEMENT_BOOL, EEP_AVG) && !eep::find_reduce(EEP_ELEMENT_I32, 8));
}

// Every f16 there and back, and every tie between two of them.
void test_f16() {
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const int exponent = bits >> 10, mantissa = bits & 0x3ff;
    const float exact = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    REQUIRE(eep::float_of_f16(uint16_t(bits)) == exact);
    REQUIRE(eep::float_of_f16(uint16_t(bits | 0x8000)) == -exact);
    REQUIRE(eep::f16_of_float(exact) == bits && eep::f16_of_float(-exact) == (bits | 0x8000));
    const float next = bits == 0x7bff ? 65536.0f : eep::float_of_f16(uint16_t(bits + 1)), tie = (exact + next) / 2;
    REQUIRE(eep::f16_of_float(tie) == bits + (bits & 1));
    REQUIRE(eep::f16_of_float(std::nextafter(tie, 0.0f)) == bits);
    REQUIRE(eep::f16_of_float(std::nextafter(tie, 1e9f)) == bits + 1);
  }
  REQUIRE(eep::f16_of_float(1e30f) == 0x7c00 && eep::f16_of_float(-INFINITY) == 0xfc00);
  REQUIRE(std::isinf(eep::float_of_f16(0x7c00)) && std::isnan(eep::float_of_f16(0x7e01)));
  REQUIRE(std::isnan(eep::float_of_f16(eep::f16_of_float(NAN))));
}

}  // namespace

void test_collectives() {
  test_numbers();
  test_f16();
  test_lanes_open_and_close();
  for (uint32_t count : {1, 2, 3, 5}) test_every_kind(count);
  test_lanes_do_not_disturb_each_other();
  test_mismatch();
  test_revoke();
  test_loss();
  test_a_loss_is_told_to_the_others();
  test_views_are_entered_at_any_moment();
  test_the_slow_one_finds_the_old_epoch_whole();
  test_who_has_left_an_epoch_is_not_waited_for();
  test_a_lane_is_taken_again();
  test_a_lane_that_was_taken_again_holds_nothing_of_the_group_before();
}

}  // namespace eep_test
