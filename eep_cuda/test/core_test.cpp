// The C++ core with ranks as threads of one process, for the sanitizers: they see every access of every rank.
//
// What the Python tests check with real processes is checked here only as far as needed to know that the
// paths were taken: results, drops, revokes, views that change under load.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cpu/formats.h"
#include "eep/eep.h"
#include "require.h"

namespace {

using eep_test::kSecond;
using eep_test::on_ranks;

constexpr uint32_t kRanks = 4, kTokens = 9, kHidden = 256, kTopk = 3, kLocalExperts = 2;

struct Rank {
  std::vector<uint64_t> region;
  eep_control_page control{};
  eep_context* context = nullptr;
};

struct Instance {
  eep_shape shape;
  eep_region_layout at;
  std::vector<Rank> ranks{kRanks};

  Instance(eep_layout layout, eep_type wire) {
    shape = {kRanks, kTokens, kHidden, kTopk, kLocalExperts, uint32_t(layout), uint32_t(wire), EEP_TYPE_F32, 1, 0,
             0,      0,       0,       0};
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks[rank].region.resize(at.total_bytes / sizeof(uint64_t));
      REQUIRE(eep_create(&shape, rank, ranks[rank].region.data(), &ranks[rank].control, &ranks[rank].context) ==
              EEP_OK);
    }
  }
  ~Instance() {
    for (Rank& rank : ranks) eep_destroy(rank.context);
  }

  void apply(uint32_t rank, uint64_t epoch, uint64_t active, uint64_t deadline_ns) {
    eep_peer_table* table = eep_table(ranks[rank].context);
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      eep_peer& entry = table->peers[peer];
      entry.active = active >> peer & 1;
      entry.region = reinterpret_cast<uint64_t>(ranks[peer].region.data());
      entry.control = reinterpret_cast<uint64_t>(&ranks[peer].control);
      entry.slot = eep_slot_of(peer, entry.incarnation, kRanks);
    }
    table->deadline_ns = deadline_ns;
    table->epoch = epoch;
    REQUIRE(eep_publish_table(ranks[rank].context) == EEP_OK);
  }
};

// One dispatch and combine in which every expert returns its input; a token comes back times its number of
// experts.
void step(Instance& instance, uint32_t rank, std::mt19937& random) {
  eep_context* context = instance.ranks[rank].context;
  const uint32_t tokens = random() % (kTokens + 1);
  const bool by_rank = instance.shape.layout == EEP_LAYOUT_RANK;
  std::vector<float> x(tokens * kHidden), out(tokens * kHidden, -1), weights(tokens * kTopk, 1.0f);
  std::vector<int64_t> idx(tokens * kTopk);
  const uint64_t active = eep_table(context)->peers[3].active ? 15 : 7;
  for (float& value : x) value = float(int(random() % 17) - 8);
  for (uint32_t token = 0; token < tokens; ++token)
    for (uint32_t k = 0; k < kTopk; ++k)  // distinct experts on ranks that are in
      idx[token * kTopk + k] = (k * 2 + token + random() % 2) % (active == 15 ? 8 : 6);

  eep_dispatch_send_args send{
      x.data(), idx.data(), weights.data(), tokens, kTopk, EEP_TYPE_F32, instance.shape.wire_type, 0, 0};
  REQUIRE(eep_dispatch_send(context, &send, nullptr) == EEP_OK);
  const uint64_t slots = instance.at.slots, rows = kRanks * kTokens;
  std::vector<int32_t> count(kRanks), recv_idx(slots * kTokens * kTopk), packed_count(kLocalExperts),
      src_info(kLocalExperts * rows);
  std::vector<float> recv_weights(slots * kTokens * kTopk), packed(kLocalExperts * rows * kHidden),
      packed_scales(kLocalExperts * rows * kHidden / 128);
  std::vector<int64_t> range(kLocalExperts * kRanks);
  eep_dispatch_recv_args receive{count.data(),
                                 recv_idx.data(),
                                 recv_weights.data(),
                                 packed.data(),
                                 packed_scales.data(),
                                 packed_count.data(),
                                 src_info.data(),
                                 range.data(),
                                 kTopk,
                                 instance.shape.wire_type,
                                 0,
                                 0};
  REQUIRE(eep_dispatch_recv(context, &receive, nullptr) == EEP_OK);

  std::vector<float> results((by_rank ? slots * kTokens : kLocalExperts * rows) * kHidden);
  if (by_rank) {
    const float* inbox = reinterpret_cast<const float*>(
        reinterpret_cast<const uint8_t*>(instance.ranks[rank].region.data()) + instance.at.rows);
    for (uint64_t row = 0; row < slots * kTokens; ++row) {
      float experts = 0;
      for (uint32_t k = 0; k < kTopk; ++k) experts += recv_idx[row * kTopk + k] >= 0;
      for (uint32_t i = 0; experts && i < kHidden; ++i) results[row * kHidden + i] = experts * inbox[row * kHidden + i];
    }
  } else if (instance.shape.wire_type == EEP_TYPE_F32) {
    results = packed;
  }
  eep_combine_send_args publish{results.data(), src_info.data(), range.data(), kTopk, 0};
  REQUIRE(eep_combine_send(context, &publish, nullptr) == EEP_OK);
  eep_combine_recv_args pull{out.data(), idx.data(), weights.data(), tokens, kTopk, 0, 0};
  REQUIRE(eep_combine_recv(context, &pull, nullptr) == EEP_OK);
  if (instance.ranks[rank].control.status == 0 && instance.shape.wire_type == EEP_TYPE_F32)
    for (uint32_t i = 0; i < tokens * kHidden; ++i) REQUIRE(out[i] == kTopk * x[i]);
}

void test_steps(eep_layout layout, eep_type wire) {
  Instance instance(layout, wire);
  for (uint32_t rank = 0; rank < kRanks; ++rank) instance.apply(rank, 1, 15, 60 * kSecond);
  on_ranks(kRanks, [&](uint32_t rank) {
    std::mt19937 random(rank);
    for (int i = 0; i < 50; ++i) {
      step(instance, rank, random);
      if (i % 10 == 0) REQUIRE(eep_barrier(instance.ranks[rank].context, 60 * kSecond, nullptr) == EEP_OK);
      REQUIRE(instance.ranks[rank].control.status == 0);
    }
  });
}

// Rank 3 never comes: the others drop it at their deadline, once, and go on without it in the next view.
void test_absent_rank() {
  Instance instance(EEP_LAYOUT_RANK, EEP_TYPE_F32);
  for (uint32_t rank = 0; rank < 3; ++rank) instance.apply(rank, 1, 15, kSecond / 20);
  on_ranks(3, [&](uint32_t rank) {
    std::mt19937 random(rank);
    step(instance, rank, random);
    REQUIRE(instance.ranks[rank].control.status & EEP_STATUS_SUSPECT);
    REQUIRE(instance.ranks[rank].control.dropped.words[0] >> 3 & 1);
  });
  for (uint32_t rank = 0; rank < 3; ++rank) instance.apply(rank, 2, 7, 60 * kSecond);
  on_ranks(3, [&](uint32_t rank) {
    std::mt19937 random(rank);
    for (int i = 0; i < 20; ++i) step(instance, rank, random);
    REQUIRE(instance.ranks[rank].control.status == 0);
  });
}

// Rank 3 never comes, and the deadline is far away: a revoke frees every rank.
void test_revoke() {
  Instance instance(EEP_LAYOUT_RANK, EEP_TYPE_F32);
  for (uint32_t rank = 0; rank < kRanks; ++rank) instance.apply(rank, 1, 15, 600 * kSecond);
  std::thread revoker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    eep_revoke(instance.ranks[3].context, 1);
  });
  on_ranks(3, [&](uint32_t rank) {
    std::mt19937 random(rank);
    step(instance, rank, random);
    REQUIRE(eep_snapshot_of(instance.ranks[rank].context, 0)->phase == EEP_PHASE_IDLE);
  });
  revoker.join();
  for (uint32_t rank = 0; rank < 3; ++rank) REQUIRE(instance.ranks[rank].control.status & EEP_STATUS_REVOKED);
}

void barrier(Instance& instance, uint32_t rank, uint64_t status) {
  REQUIRE(eep_barrier(instance.ranks[rank].context, 600 * kSecond, nullptr) == EEP_OK);
  REQUIRE(instance.ranks[rank].control.status == status);
  REQUIRE(instance.ranks[rank].control.dropped.words[0] == 0);
}

// Each rank goes from view to view at its own pace, with nothing but barriers to hold them together: a rank that
// still looks for the flags of the last view finds those of the next, and knows that it was met.
void test_a_barrier_is_met_though_others_are_in_the_next_view() {
  Instance instance(EEP_LAYOUT_RANK, EEP_TYPE_F32);
  on_ranks(kRanks, [&](uint32_t rank) {
    for (uint64_t epoch = 1; epoch < 300; ++epoch) {
      instance.apply(rank, epoch, 15, 60 * kSecond);
      for (uint64_t i = 0; i < 1 + epoch % 3; ++i) barrier(instance, rank, 0);
    }
  });
}

// Rank 0 calls a barrier of a view that the others have left, with nothing revoked: told by their flags, of whatever
// kind, it does not wait for its deadline. No rank is suspected, and in the new view all meet.
void test_a_barrier_of_a_view_that_the_others_left() {
  enum Sign { kBarrier, kBarrierAfterAnother, kDispatch };
  for (Sign sign : {kBarrier, kBarrierAfterAnother, kDispatch}) {
    Instance instance(EEP_LAYOUT_RANK, EEP_TYPE_F32);
    for (uint32_t rank = 0; rank < kRanks; ++rank) instance.apply(rank, 1, 15, 600 * kSecond);
    if (sign == kBarrierAfterAnother) on_ranks(kRanks, [&](uint32_t rank) { barrier(instance, rank, 0); });
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      barrier(instance, 0, EEP_STATUS_REVOKED);
      instance.apply(0, 2, 15, 600 * kSecond);
      std::mt19937 random(0);
      if (sign == kDispatch) step(instance, 0, random);
      barrier(instance, 0, 0);
    });
    on_ranks(kRanks, [&](uint32_t rank) {
      if (!rank) return;
      instance.apply(rank, 2, 15, 600 * kSecond);
      std::mt19937 random(rank);
      if (sign == kDispatch) step(instance, rank, random);
      barrier(instance, rank, 0);
    });
    late.join();
  }
}

// Every bf16 value as fp8, against the definition: the nearest of all 127 magnitudes, ties to the even code.
void test_e4m3() {
  float magnitudes[127];
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    magnitudes[code] = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  }
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float value = eep::float_of_bf16(uint16_t(bits));
    int best = 0;
    for (int code = 1; code < 127; ++code) {
      const float was = std::fabs(magnitudes[best] - value), is = std::fabs(magnitudes[code] - value);
      if (is < was || (is == was && code % 2 == 0)) best = code;
    }
    REQUIRE(eep::e4m3_of_float(value) == best);
    REQUIRE(eep::e4m3_of_float(-value) == (best | 0x80));
  }
}

}  // namespace

int main() {
  test_e4m3();
  test_steps(EEP_LAYOUT_RANK, EEP_TYPE_F32);
  test_steps(EEP_LAYOUT_EXPERT, EEP_TYPE_F32);
  test_steps(EEP_LAYOUT_RANK, EEP_TYPE_FP8);
  test_steps(EEP_LAYOUT_EXPERT, EEP_TYPE_FP8_POW2);
  test_absent_rank();
  test_revoke();
  test_a_barrier_is_met_though_others_are_in_the_next_view();
  test_a_barrier_of_a_view_that_the_others_left();
  eep_test::test_numbers();
  eep_test::test_rank_sets();
  eep_test::test_collectives();
  eep_test::test_collectives_as_views_change();
  eep_test::test_messages();
  eep_test::test_many_ranks();
  eep_test::test_lying_peers();
  eep_test::test_message_counter();
  eep_test::test_kernel_ranges();
  eep_test::test_hosts();
  eep_test::test_rows_ahead();
  eep_test::test_lanes_over_links();
  std::puts("core_test: all well");
}
