// Sets of ranks against a std::set, and the word by which members compare theirs.
#include <random>
#include <set>

#include "common/rank_sets.h"
#include "eep/protocol.h"
#include "require.h"

namespace eep_test {
namespace {

using eep::RankSet;

constexpr uint32_t kEdges[] = {0, 1, 63, 64, 65, 127, 128, 300, 448, 510, EEP_MAX_RANKS - 1};

std::set<uint32_t> ranks_in(const RankSet& set) {
  std::set<uint32_t> ranks;
  uint32_t last = 0;
  eep::for_each_rank(set, [&](uint32_t rank) {
    REQUIRE(ranks.empty() || rank > last);
    ranks.insert(last = rank);
  });
  return ranks;
}

RankSet some(std::mt19937& random, std::set<uint32_t>& ranks) {
  RankSet set{};
  for (uint32_t left = random() % 60; left; --left) {
    const uint32_t rank = random() % 3 ? random() % EEP_MAX_RANKS : kEdges[random() % std::size(kEdges)];
    eep::add(set, rank), ranks.insert(rank);
  }
  return set;
}

void test_against_a_set() {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::set<uint32_t> a, b, both, either, first;
    const RankSet x = some(random, a), y = some(random, b);
    for (uint32_t rank = 0; rank < EEP_MAX_RANKS; ++rank) {
      REQUIRE(eep::has(x, rank) == a.contains(rank));
      if (a.contains(rank) && b.contains(rank)) both.insert(rank);
      if (a.contains(rank) || b.contains(rank)) either.insert(rank);
      if (a.contains(rank) && !b.contains(rank)) first.insert(rank);
    }
    REQUIRE(ranks_in(x) == a && ranks_in(x & y) == both && ranks_in(x | y) == either && ranks_in(x - y) == first);
    REQUIRE(eep::count(x) == a.size() && eep::is_empty(x) == a.empty() && (x == y) == (a == b));
    RankSet left = x;
    for (uint32_t rank : a) eep::remove(left, rank);
    REQUIRE(eep::is_empty(left));
  }
}

// Ranks that threads name at once are all in the set.
void test_a_shared_set() {
  RankSet shared{};
  on_ranks(4, [&](uint32_t thread) {
    for (uint32_t rank = thread; rank < EEP_MAX_RANKS; rank += 4)
      rank % 8 < 4 ? eep::set_bit(shared, rank) : eep::set_bits(shared, eep::only(rank));
  });
  REQUIRE(eep::count(eep::load_acquire(shared)) == EEP_MAX_RANKS);
  eep::clear(shared);
  REQUIRE(eep::is_empty(shared));
}

// Of ranks below 64 the word is the set. Beyond, each of all sets that differ by one rank or two has another.
void test_the_word_of_members() {
  std::mt19937_64 random(2);
  RankSet all{};
  for (uint64_t& word : all.words) word = ~uint64_t{0};
  for (int i = 0; i < 100; ++i) {
    const RankSet low{{random()}};
    REQUIRE(eep_members_word(&low) == low.words[0]);
  }
  std::set<uint64_t> words{eep_members_word(&all)};
  size_t sets = 1;
  for (uint32_t first = 0; first < EEP_MAX_RANKS; ++first)
    for (uint32_t second : kEdges) {
      if (second > first) continue;
      const RankSet fewer = all - eep::only(first) - eep::only(second);
      const bool is_new = words.insert(eep_members_word(&fewer)).second;
      REQUIRE(is_new);
      ++sets;
    }
  REQUIRE(words.size() == sets);
}

}  // namespace

void test_rank_sets() {
  test_against_a_set();
  test_a_shared_set();
  test_the_word_of_members();
}

}  // namespace eep_test
