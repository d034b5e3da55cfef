// What the members of an all_to_all say of the sizes of their blocks, at the head of its first round, and whether it
// agrees.
//
// All members must find the same thing wrong. If each compared the sizes of all pairs, that would take all of them a
// time that grows with the square of their number. So a member also says a hash of the sizes that it sends, and one of
// those that it expects: all pairs agree if the sums of both are the same. Its own pairs a member compares one by one.
#ifndef EEP_CPU_BLOCK_SIZES_H_
#define EEP_CPU_BLOCK_SIZES_H_

#include <cstring>

#include "common/checks.h"
#include "cpu/lanes.h"

namespace eep {

class BlockSizes {
 public:
  static uint64_t bytes(uint32_t group_size) { return (2 * uint64_t{group_size} + 2) * sizeof(uint64_t); }

  BlockSizes(const uint8_t* half, uint32_t group_size)
      : words_(reinterpret_cast<const uint64_t*>(half)), size_(group_size) {}

  // By position in the group.
  uint64_t sent_to(uint32_t position) const { return words_[position]; }
  uint64_t expected_from(uint32_t position) const { return words_[size_ + position]; }
  uint64_t sent_hash() const { return words_[2 * size_]; }
  uint64_t expected_hash() const { return words_[2 * size_ + 1]; }

 private:
  const uint64_t* words_;
  uint32_t size_;
};

inline uint64_t hash_of_pair(uint32_t from, uint32_t to, uint64_t bytes) {
  return eep_mix(bytes ^ eep_mix(uint64_t{from} << 32 | to));
}

inline void write_sizes(const Members& members, const uint64_t* sent, const uint64_t* expected, uint8_t* half) {
  const uint32_t size = members.size, own = members.position[members.me];
  uint64_t hashes[2] = {0, 0};
  in_order(members, members.active, [&](uint32_t other, uint32_t) {
    hashes[0] += hash_of_pair(own, other, sent[other]);
    hashes[1] += hash_of_pair(other, own, expected[other]);
  });
  std::memcpy(half, sent, size * sizeof(uint64_t));
  std::memcpy(half + size * sizeof(uint64_t), expected, size * sizeof(uint64_t));
  std::memcpy(half + 2 * size * sizeof(uint64_t), hashes, sizeof hashes);
}

// Whether the sizes of all pairs agree, by their hashes. No, if a member is lost: hashes are of pairs with all of them.
template <typename SizesOf>
bool hashes_agree(const Members& members, const RankSet& usable, SizesOf sizes_of) {
  if (usable != members.active) return false;
  const uint32_t own = members.position[members.me];
  const BlockSizes ours = sizes_of(members.me);
  uint64_t sent = 0, expected = 0;
  bool agree = true;
  in_order(members, usable, [&](uint32_t other, uint32_t rank) {
    const BlockSizes theirs = sizes_of(rank);
    sent += theirs.sent_hash();
    expected += theirs.expected_hash();
    agree &= theirs.sent_to(own) == ours.expected_from(other) && theirs.expected_from(own) == ours.sent_to(other);
  });
  return agree && sent == expected;
}

// The same, pair by pair. Says with fail() which of them do not agree.
template <typename SizesOf>
bool sizes_agree(const Members& members, const RankSet& usable, SizesOf sizes_of) {
  bool agree = true;
  in_order(members, usable, [&](uint32_t from, uint32_t sender) {
    in_order(members, usable, [&](uint32_t to, uint32_t receiver) {
      const uint64_t sent = sizes_of(sender).sent_to(to), expected = sizes_of(receiver).expected_from(from);
      if (!agree || sent == expected) return;
      agree = false;
      fail(EEP_ERROR_MISMATCH, "all_to_all: rank %u sends %llu bytes to rank %u, which expects %llu", sender,
           static_cast<unsigned long long>(sent), receiver, static_cast<unsigned long long>(expected));
    });
  });
  return agree;
}

}  // namespace eep

#endif  // EEP_CPU_BLOCK_SIZES_H_
