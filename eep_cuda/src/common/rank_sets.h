// What is done with sets of ranks, our own and those that others write to while we read.
#ifndef EEP_COMMON_RANK_SETS_H_
#define EEP_COMMON_RANK_SETS_H_

#include <bit>
#include <cstdint>

#include "common/shared_words.h"
#include "eep/rank_set.h"

// Beside their type, so that they are found wherever it is used.
inline eep_rank_set operator|(eep_rank_set a, const eep_rank_set& b) {
  for (int i = 0; i < EEP_RANK_WORDS; ++i) a.words[i] |= b.words[i];
  return a;
}
inline eep_rank_set operator&(eep_rank_set a, const eep_rank_set& b) {
  for (int i = 0; i < EEP_RANK_WORDS; ++i) a.words[i] &= b.words[i];
  return a;
}
// Those of the first that are not in the second.
inline eep_rank_set operator-(eep_rank_set a, const eep_rank_set& b) {
  for (int i = 0; i < EEP_RANK_WORDS; ++i) a.words[i] &= ~b.words[i];
  return a;
}
inline eep_rank_set& operator|=(eep_rank_set& a, const eep_rank_set& b) { return a = a | b; }
inline eep_rank_set& operator&=(eep_rank_set& a, const eep_rank_set& b) { return a = a & b; }
inline eep_rank_set& operator-=(eep_rank_set& a, const eep_rank_set& b) { return a = a - b; }
inline bool operator==(const eep_rank_set& a, const eep_rank_set& b) {
  uint64_t different = 0;
  for (int i = 0; i < EEP_RANK_WORDS; ++i) different |= a.words[i] ^ b.words[i];
  return !different;
}

namespace eep {

using RankSet = eep_rank_set;

inline uint64_t bit_of(uint32_t rank) { return uint64_t{1} << rank % 64; }
inline bool has(const RankSet& set, uint32_t rank) { return set.words[rank / 64] & bit_of(rank); }
inline void add(RankSet& set, uint32_t rank) { set.words[rank / 64] |= bit_of(rank); }
inline void remove(RankSet& set, uint32_t rank) { set.words[rank / 64] &= ~bit_of(rank); }
inline RankSet only(uint32_t rank) {
  RankSet set = {};
  add(set, rank);
  return set;
}
inline bool is_empty(const RankSet& set) { return set == RankSet{}; }
inline uint32_t count(const RankSet& set) {
  int ranks = 0;
  for (uint64_t word : set.words) ranks += std::popcount(word);
  return static_cast<uint32_t>(ranks);
}

// Calls `visit(rank)` for each rank, in ascending order: the order in which sums are taken. It may remove that rank.
template <typename Visit>
void for_each_rank(const RankSet& set, Visit visit) {
  for (uint32_t i = 0; i < EEP_RANK_WORDS; ++i)
    for (uint64_t word = set.words[i]; word; word &= word - 1)
      visit(64 * i + static_cast<uint32_t>(std::countr_zero(word)));
}

// ---- sets that another process, or another thread, reads or writes while we do ----

inline RankSet load_acquire(const RankSet& shared) {
  RankSet set;
  for (int i = 0; i < EEP_RANK_WORDS; ++i) set.words[i] = load_acquire(shared.words[i]);
  return set;
}
// Says of more ranks what the set says. Words without any of them are left alone.
inline void set_bits(RankSet& shared, const RankSet& ranks, std::memory_order order = std::memory_order_relaxed) {
  for (int i = 0; i < EEP_RANK_WORDS; ++i)
    if (ranks.words[i]) std::atomic_ref<uint64_t>(shared.words[i]).fetch_or(ranks.words[i], order);
}
inline void set_bit(RankSet& shared, uint32_t rank) { set_bits(shared.words[rank / 64], bit_of(rank)); }
inline void clear(RankSet& shared) {
  for (uint64_t& word : shared.words) store_release(word, uint64_t{0});
}

}  // namespace eep

#endif  // EEP_COMMON_RANK_SETS_H_
