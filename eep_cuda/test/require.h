// What the tests of the core share.
#ifndef EEP_TEST_REQUIRE_H_
#define EEP_TEST_REQUIRE_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define REQUIRE(condition)                                                               \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)

namespace eep_test {

constexpr uint64_t kSecond = 1'000'000'000;

// Runs `body(rank)` for each rank in a thread of its own.
template <typename Body>
void on_ranks(uint32_t count, Body body) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < count; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

void test_collectives();
void test_collectives_as_views_change();
void test_hosts();
void test_kernel_ranges();
void test_lanes_over_links();
void test_lying_peers();
void test_message_counter();
void test_messages();
void test_many_ranks();
void test_numbers();
void test_rows_ahead();
void test_rank_sets();

}  // namespace eep_test

#endif  // EEP_TEST_REQUIRE_H_
