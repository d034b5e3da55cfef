// A rank's part of collective calls, for the tests of them: every kind, with values that tell who made them.
#ifndef EEP_TEST_CALLER_H_
#define EEP_TEST_CALLER_H_

#include "group.h"

namespace eep_test {

constexpr uint64_t kGroup = 77;

inline eep_collective_args call_of(uint32_t lane, eep_collective_kind kind) {
  eep_collective_args args{};
  args.lane = lane;
  args.kind = kind;
  args.element = EEP_ELEMENT_I32;
  args.reduction = EEP_SUM;
  args.deadline_ns = 60 * kSecond;
  return args;
}

// A value that tells who made it, for whom, and where in the block it stands.
inline int32_t value(uint32_t from, uint32_t to, size_t i) { return int32_t(from * 1000003 + to * 7919 + i * 31); }

using Block = std::vector<int32_t>;
inline Block block(uint32_t from, uint32_t to, size_t size) {
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
    eep_rank_set all{};
    for (uint32_t member : members_) eep::add(all, member);
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

// A sum of one number from each: returns the code, and tells whose numbers are in it.
inline int reduce_one(Ranks& ranks, uint32_t rank, uint32_t& answered, uint64_t deadline_ns = 60 * kSecond) {
  int32_t data = 1;
  eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_REDUCE);
  args.in = args.out = &data, args.bytes = sizeof data, args.deadline_ns = deadline_ns;
  const int code = eep_collective(ranks.ranks[rank].context, &args, nullptr);
  answered = uint32_t(args.answered.words[0]);
  return code;
}

}  // namespace eep_test

#endif  // EEP_TEST_CALLER_H_
