// A peer that changes what it sent while we receive it: we check what we use, not what was there a moment before.
#include <atomic>

#include "common/region_views.h"
#include "eep/eep.h"
#include "require.h"

namespace eep_test {
namespace {

constexpr uint32_t kMe = 0, kLiar = 1, kRanks = 2, kTokens = 512, kHidden = 16, kTopk = 2, kExperts = 2;
constexpr uint32_t kRows = kRanks * kTokens;
constexpr int32_t kNoExpert = kExperts;  // one more than there are

struct Pair {
  eep_shape shape{};
  eep_region_layout at{};
  struct Rank {
    std::vector<uint64_t> region;
    eep_control_page control{};
    eep_context* context = nullptr;
  } ranks[kRanks];

  explicit Pair(eep_layout layout) {
    shape = {kRanks, kTokens, kHidden, kTopk, kExperts, uint32_t(layout), EEP_TYPE_F32, EEP_TYPE_F32, 1, 0, 0, 0, 0, 0};
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks[rank].region.resize(at.total_bytes / sizeof(uint64_t));
      REQUIRE(eep_create(&shape, rank, ranks[rank].region.data(), &ranks[rank].control, &ranks[rank].context) ==
              EEP_OK);
    }
  }
  ~Pair() {
    for (Rank& rank : ranks) eep_destroy(rank.context);
  }

  void enter(uint64_t epoch) {
    for (Rank& rank : ranks) {
      eep_peer_table* table = eep_table(rank.context);
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        eep_peer& entry = table->peers[peer];
        entry.active = 1;
        entry.region = reinterpret_cast<uint64_t>(ranks[peer].region.data());
        entry.control = reinterpret_cast<uint64_t>(&ranks[peer].control);
        entry.slot = eep_slot_of(peer, 0, kRanks);
      }
      table->deadline_ns = 60 * kSecond;
      table->epoch = epoch;
      REQUIRE(eep_publish_table(rank.context) == EEP_OK);
    }
  }

  // All tokens go to experts 0 and 1, which this rank hosts.
  void send(uint32_t rank) {
    const std::vector<float> x(kTokens * kHidden, 1.0f), weights(kTokens * kTopk, 1.0f);
    std::vector<int64_t> idx(kTokens * kTopk);
    for (uint32_t i = 0; i < kTokens * kTopk; ++i) idx[i] = i % kTopk;
    const eep_dispatch_send_args args{x.data(), idx.data(), weights.data(), kTokens, kTopk, EEP_TYPE_F32, EEP_TYPE_F32,
                                      0,        0};
    REQUIRE(eep_dispatch_send(ranks[rank].context, &args, nullptr) == EEP_OK);
  }

  // The last choice that the liar told us.
  std::atomic_ref<int32_t> last_choice() {
    const eep::ChannelView inbox(shape, at, reinterpret_cast<uint8_t*>(ranks[kMe].region.data()), 0);
    return std::atomic_ref<int32_t>(inbox.topk_idx(eep_slot_of(kLiar, 0, kRanks), kTokens - 1)[kTopk - 1]);
  }
};

// What a rank was given. Of exact size, so that the sanitizer sees every step beyond.
struct Received {
  std::vector<int32_t> count, idx, packed_count, src_info;
  std::vector<float> weights, packed;
  std::vector<int64_t> range;

  explicit Received(Pair& pair)
      : count(kRanks),
        idx(pair.at.slots * kTokens * kTopk),
        packed_count(kExperts),
        src_info(kExperts * kRows),
        weights(idx.size()),
        packed(kExperts * kRows * kHidden),
        range(kExperts * kRanks) {
    const eep_dispatch_recv_args args{
        count.data(),    idx.data(),   weights.data(), packed.data(), nullptr, packed_count.data(),
        src_info.data(), range.data(), kTopk,          EEP_TYPE_F32,  0,       0};
    REQUIRE(eep_dispatch_recv(pair.ranks[kMe].context, &args, nullptr) == EEP_OK);
  }
};

// A source is taken whole, with experts that we have, or not at all, and then the status says so.
void check(const Pair& pair, const Received& received) {
  const uint64_t corrupt = pair.ranks[kMe].control.corrupt.words[0];
  const uint32_t taken = corrupt ? 0 : kTokens;
  REQUIRE(!corrupt == !(pair.ranks[kMe].control.status & EEP_STATUS_CORRUPT));
  REQUIRE(received.count[kMe] == int32_t(kTokens));
  REQUIRE(received.count[kLiar] == int32_t(taken));
  if (pair.shape.layout == EEP_LAYOUT_EXPERT) {
    uint32_t rows = 0;
    for (uint32_t expert = 0; expert < kExperts; ++expert) {
      const int64_t of_liar = received.range[expert * kRanks + kLiar];
      REQUIRE(received.packed_count[expert] == int32_t(of_liar >> 32) + int32_t(of_liar));
      if (corrupt) REQUIRE(received.packed_count[expert] == int32_t(kTokens));
      rows += received.packed_count[expert];
    }
    REQUIRE(rows <= kExperts * kRows);
    return;
  }
  const uint32_t of_liar = eep_slot_of(kLiar, 0, kRanks) * kTokens * kTopk;
  for (uint32_t i = 0; i < received.idx.size(); ++i) {
    REQUIRE(received.idx[i] >= -1 && received.idx[i] < int32_t(kExperts));
    if (corrupt && i >= of_liar && i < of_liar + kTokens * kTopk) REQUIRE(received.idx[i] == -1);
  }
}

void test_a_choice_that_changes(eep_layout layout, int32_t lie) {
  uint32_t caught = 0, missed = 0;
  for (uint64_t epoch = 1; epoch <= 100 || (lie == kNoExpert && !(caught && missed)); ++epoch) {
    REQUIRE(epoch < 100'000);  // or the lie never came in time, and this tests nothing
    Pair pair(layout);
    pair.enter(epoch);
    for (uint32_t rank : {kMe, kLiar}) pair.send(rank);
    std::atomic<bool> done = false;
    std::thread liar([&] {
      const std::atomic_ref<int32_t> choice = pair.last_choice();
      while (!done.load(std::memory_order_relaxed)) {
        choice.store(lie, std::memory_order_relaxed);
        choice.store(1, std::memory_order_relaxed);
      }
    });
    const Received received(pair);
    done = true;
    liar.join();
    check(pair, received);
    ++(pair.ranks[kMe].control.corrupt.words[0] ? caught : missed);
  }
}

}  // namespace

void test_lying_peers() {
  for (eep_layout layout : {EEP_LAYOUT_RANK, EEP_LAYOUT_EXPERT}) {
    test_a_choice_that_changes(layout, kNoExpert);
    test_a_choice_that_changes(layout, 0);  // named twice by one token
  }
}

}  // namespace eep_test
