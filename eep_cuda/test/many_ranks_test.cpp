// More ranks than one word of a set has bits: as threads, with tiny shapes. A rank beyond the first word is lost and
// returns.
//
// No deadline is near: what ends a wait here is told from outside.
#include <atomic>
#include <chrono>

#include "caller.h"

namespace eep_test {
namespace {

constexpr uint32_t kCount = 130, kLost = 100;
constexpr uint32_t kTokens = 2, kHidden = 16, kTopk = 4, kExperts = 2;
constexpr uint64_t kFar = 600 * kSecond;

struct Wide {
  struct Rank {
    std::unique_ptr<uint64_t[]> region;
    eep_control_page control{};
    eep_context* context = nullptr;
    uint32_t incarnation = 0;
  };
  eep_shape shape{};
  eep_region_layout at{};
  std::vector<Rank> ranks{kCount};
  std::vector<uint32_t> active;

  explicit Wide(eep_layout layout) {
    shape = {kCount, kTokens, kHidden, kTopk, kExperts, uint32_t(layout), EEP_TYPE_F32, EEP_TYPE_F32, 1, 0, 0, 0, 0, 0};
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    for (uint32_t rank = 0; rank < kCount; ++rank) start(rank), active.push_back(rank);
  }
  ~Wide() {
    for (Rank& rank : ranks) eep_destroy(rank.context);
  }

  void start(uint32_t rank) {
    Rank& own = ranks[rank];
    own.region = std::make_unique<uint64_t[]>(at.total_bytes / sizeof(uint64_t));
    own.control = {};
    REQUIRE(eep_create(&shape, rank, own.region.get(), &own.control, &own.context) == EEP_OK);
  }

  // Its next life. The region of the last one stays, as a mapping would.
  void return_from_loss(uint32_t rank) {
    eep_destroy(ranks[rank].context);
    lost_regions_.push_back(std::move(ranks[rank].region));
    ++ranks[rank].incarnation;
    start(rank);
  }

  void show(uint64_t epoch) {
    for (uint32_t rank : active) {
      eep_peer_table* table = eep_table(ranks[rank].context);
      for (eep_peer& entry : table->peers) entry.active = 0;
      for (uint32_t peer : active) {
        const uint32_t life = ranks[peer].incarnation;
        table->peers[peer] = {reinterpret_cast<uint64_t>(ranks[peer].region.get()),
                              reinterpret_cast<uint64_t>(&ranks[peer].control),
                              1,
                              EEP_TRANSPORT_MAPPED,
                              life,
                              eep_slot_of(peer, life, kCount),
                              epoch,
                              {}};
      }
      table->deadline_ns = kFar;
      table->epoch = epoch;
      REQUIRE(eep_publish_table(ranks[rank].context) == EEP_OK);
    }
  }

  uint64_t status(uint32_t rank) { return __atomic_load_n(&ranks[rank].control.status, __ATOMIC_ACQUIRE); }

  // A dispatch and a combine in which each expert returns its input. What must come back is known, but of tokens for
  // `without`, of which nothing comes. Choices are on other ranks each, and reach all of them.
  void step(uint32_t rank, uint32_t round, uint32_t without = kCount) {
    eep_context* context = ranks[rank].context;
    const bool by_rank = shape.layout == EEP_LAYOUT_RANK;
    std::vector<float> x(kTokens * kHidden), out(x.size(), -1);
    std::vector<int64_t> idx(kTokens * kTopk);
    std::vector<float> expected(kTokens, kTopk);
    for (uint32_t i = 0; i < x.size(); ++i) x[i] = float(int((rank * 31 + i * 7 + round) % 33) - 16);
    for (uint32_t token = 0; token < kTokens; ++token)
      for (uint32_t k = 0; k < kTopk; ++k) {
        const uint32_t host = active[(rank * 37 + token * 11 + k * 33 + round * 7) % active.size()];
        idx[token * kTopk + k] = host * kExperts + (rank + k) % kExperts;
        if (host == without) expected[token] -= 1;
      }
    const eep_dispatch_send_args send{x.data(), idx.data(), nullptr, kTokens, kTopk, EEP_TYPE_F32, EEP_TYPE_F32, 0, 0};
    REQUIRE(eep_dispatch_send(context, &send, nullptr) == EEP_OK);
    const uint64_t rows = kCount * kTokens, inbox_rows = at.slots * kTokens;
    std::vector<int32_t> count(kCount), got(inbox_rows * kTopk), packed_count(kExperts), src_info(kExperts * rows);
    std::vector<float> weights(got.size()), packed(kExperts * rows * kHidden);
    std::vector<int64_t> range(kExperts * kCount);
    const eep_dispatch_recv_args receive{
        count.data(),    got.data(),   weights.data(), packed.data(), nullptr, packed_count.data(),
        src_info.data(), range.data(), kTopk,          EEP_TYPE_F32,  0,       0};
    REQUIRE(eep_dispatch_recv(context, &receive, nullptr) == EEP_OK);
    for (uint32_t source : active) REQUIRE(count[source] == (source == without ? 0 : int32_t(kTokens)));
    std::vector<float> results(by_rank ? inbox_rows * kHidden : packed.size());
    const float* inbox = reinterpret_cast<const float*>(ranks[rank].region.get()) + at.rows / sizeof(float);
    if (!by_rank) results = packed;
    for (uint64_t row = 0; by_rank && row < inbox_rows; ++row) {
      float experts = 0;
      for (uint32_t k = 0; k < kTopk; ++k) experts += got[row * kTopk + k] >= 0;
      for (uint32_t i = 0; experts && i < kHidden; ++i) results[row * kHidden + i] = experts * inbox[row * kHidden + i];
    }
    const eep_combine_send_args publish{results.data(), src_info.data(), range.data(), kTopk, 0};
    const eep_combine_recv_args pull{out.data(), idx.data(), nullptr, kTokens, kTopk, 0, 0};
    REQUIRE(eep_combine(context, &publish, &pull, nullptr) == EEP_OK);
    for (uint32_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == expected[i / kHidden] * x[i]);
  }

  void good_steps(uint64_t epoch) {
    show(epoch);
    on_ranks(uint32_t(active.size()), [&](uint32_t i) {
      for (uint32_t round = 0; round < 3; ++round) step(active[i], round);
      REQUIRE(eep_barrier(ranks[active[i]].context, kFar, nullptr) == EEP_OK);
      REQUIRE(status(active[i]) == 0);
    });
  }

 private:
  std::vector<std::unique_ptr<uint64_t[]>> lost_regions_;
};

void test_a_loss_and_a_return(eep_layout layout) {
  Wide wide(layout);
  wide.good_steps(1);

  wide.show(2);
  std::vector<uint32_t> left = wide.active;
  left.erase(left.begin() + kLost);
  std::thread teller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const eep_rank_set lost = eep::only(kLost);
    for (uint32_t rank : left) eep_control_suspect(&wide.ranks[rank].control, &lost);
  });
  on_ranks(uint32_t(left.size()), [&](uint32_t i) {
    wide.step(left[i], 0, kLost);
    const eep_control_page& page = wide.ranks[left[i]].control;
    REQUIRE(eep::load_acquire(page.suspects) == eep::only(kLost));
    REQUIRE(eep::is_empty(page.dropped - eep::only(kLost)) && eep::is_empty(page.corrupt));
  });
  teller.join();

  std::swap(wide.active, left);
  wide.good_steps(3);

  std::swap(wide.active, left);
  wide.return_from_loss(kLost);
  wide.good_steps(4);
}

// All calls of a group of all ranks, and of one whose members are mostly beyond the first word.
void test_groups() {
  Ranks ranks(kCount, 12288, 64);
  const std::vector<uint32_t> all = ranks.backwards(), few{129, 3, 64, 100, 70};
  on_ranks(kCount, [&](uint32_t rank) {
    ranks.open(rank, kGroup, all);
    for (size_t size : {1, 50}) Caller(ranks, rank, all, size).call_everything();
  });
  on_ranks(uint32_t(few.size()), [&](uint32_t i) {
    ranks.open(few[i], kGroup + 1, few);
    for (size_t size : {0, 17, 5000}) Caller(ranks, few[i], few, size).call_everything();
  });
}

// As in the test of small groups: who was lost is beyond the first word, and so are those who must hear of it.
void test_a_loss_is_told_to_the_others() {
  Ranks ranks(kCount, 12288, 64);
  const std::vector<uint32_t> members{70, 100, 129};
  for (uint32_t rank : members) ranks.open(rank, kGroup, members);
  const eep_rank_set first = eep::only(70), last = eep::only(129);
  eep_control_suspect(&ranks.ranks[70].control, &last);
  eep_control_suspect(&ranks.ranks[129].control, &first);
  on_ranks(3, [&](uint32_t i) {
    std::vector<int32_t> data(20000, 1);
    eep_collective_args args = call_of(ranks.ranks[members[i]].lane, EEP_ALL_REDUCE);
    args.in = args.out = data.data(), args.bytes = data.size() * sizeof(int32_t);
    REQUIRE(eep_collective(ranks.ranks[members[i]].context, &args, nullptr) == EEP_OK);
    REQUIRE(args.answered == eep::only(members[i]));
    REQUIRE(ranks.status(members[i]) == EEP_STATUS_SUSPECT);
  });
}

// One pair of an all_to_all does not agree: all members say so, and which.
void test_sizes_that_do_not_agree() {
  Ranks ranks(kCount, 12288, 64);
  const std::vector<uint32_t> members = ranks.backwards();
  on_ranks(kCount, [&](uint32_t rank) {
    ranks.open(rank, kGroup, members);
    const std::vector<uint64_t> sent(kCount, 4);
    std::vector<uint64_t> expected = sent;
    if (rank == 100) expected[kCount - 1 - 70] = 8;
    std::vector<uint64_t> in(1, 7), out(kCount, 0);
    const std::vector<const void*> from(kCount, in.data());
    std::vector<void*> to;
    for (uint64_t& block : out) to.push_back(&block);
    eep_collective_args args = call_of(ranks.ranks[rank].lane, EEP_ALL_TO_ALL);
    args.in_blocks = from.data(), args.in_bytes = sent.data();
    args.out_blocks = to.data(), args.out_bytes = expected.data();
    REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_ERROR_MISMATCH);
    REQUIRE(last_error_says("rank 70 sends 4 bytes to rank 100, which expects 8"));
  });
}

void test_limits() {
  eep_shape shape = {EEP_MAX_RANKS + 1, 1, 16, 1, 1, EEP_LAYOUT_RANK, EEP_TYPE_F32, EEP_TYPE_F32, 1, 0, 0, 0, 0, 0};
  eep_region_layout at;
  REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_ERROR_ARGUMENT &&
          last_error_says("between 1 and 512, got 513"));
  shape.max_ranks = EEP_MAX_RANKS, shape.lanes = 1, shape.lane_parts = 1, shape.lane_bytes = 40960;
  REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_ERROR_ARGUMENT && last_error_says("between 45056"));
  shape.lane_bytes = 45056;
  REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
}

}  // namespace

void test_many_ranks() {
  test_limits();
  for (eep_layout layout : {EEP_LAYOUT_RANK, EEP_LAYOUT_EXPERT}) test_a_loss_and_a_return(layout);
  test_groups();
  test_a_loss_is_told_to_the_others();
  test_sizes_that_do_not_agree();
}

}  // namespace eep_test
