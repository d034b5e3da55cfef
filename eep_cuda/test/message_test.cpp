// Messages between ranks that are threads.
#include <chrono>

#include "group.h"

namespace eep_test {
namespace {

constexpr uint64_t kGroup = 78;

std::vector<uint8_t> bytes_of(uint64_t tag, size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = uint8_t(tag * 131 + i * 7);
  return bytes;
}

struct End {
  Ranks& ranks;
  uint32_t rank;
  uint64_t deadline_ns = 60 * kSecond;

  eep_context* context() const { return ranks.ranks[rank].context; }
  uint32_t lane() const { return ranks.ranks[rank].lane; }
  bool send(uint32_t to, uint64_t tag, size_t size) const {
    const std::vector<uint8_t> data = bytes_of(tag, size);
    uint32_t done = 9;
    REQUIRE(eep_send(context(), lane(), to, tag, data.data(), size, deadline_ns, &done) == EEP_OK);
    return done;
  }
  eep_message probe(uint64_t mask) const {
    const eep_rank_set sources = first_ranks(mask);
    eep_message message{};
    REQUIRE(eep_probe(context(), lane(), &sources, eep_pokes(context()), deadline_ns, &message) == EEP_OK);
    return message;
  }
  bool take(const eep_message& message) const {
    std::vector<uint8_t> data(message.bytes);
    uint32_t done = 9;
    REQUIRE(eep_recv(context(), lane(), message.source, data.data(), data.size(), deadline_ns, &done) == EEP_OK);
    if (done) REQUIRE(data == bytes_of(message.tag, message.bytes));
    return done;
  }
};

// Every pair at once, beside collectives of the same lane.
void test_exchange() {
  constexpr uint32_t kCount = 3;
  const size_t sizes[] = {0, 1, 256, 257, 5000, 0, 300000, 64};
  Ranks ranks(kCount);
  for (uint32_t rank = 0; rank < kCount; ++rank) ranks.open(rank, kGroup, {0, 1, 2});
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kCount; ++rank) {
    for (uint32_t to = 0; to < kCount; ++to)
      if (to != rank)
        threads.emplace_back([&, rank, to] {
          for (size_t i = 0; i < std::size(sizes); ++i) REQUIRE((End{ranks, rank}.send(to, rank * 1000 + i, sizes[i])));
        });
    threads.emplace_back([&, rank] {
      const End end{ranks, rank};
      size_t next[kCount] = {};
      for (size_t i = 0; i < (kCount - 1) * std::size(sizes); ++i) {
        const eep_message message = end.probe(~uint64_t{0});
        REQUIRE(message.arrived && message.source < kCount && message.source != rank);
        REQUIRE(message.tag == message.source * 1000 + next[message.source]);
        REQUIRE(message.bytes == sizes[next[message.source]++]);
        REQUIRE(end.take(message));
      }
    });
    threads.emplace_back([&, rank] {
      for (int32_t i = 0; i < 100; ++i) {
        int32_t data = i + int32_t(rank);
        eep_collective_args args{};
        args.in = args.out = &data, args.bytes = sizeof data, args.deadline_ns = 60 * kSecond;
        args.lane = ranks.ranks[rank].lane, args.kind = EEP_ALL_REDUCE, args.element = EEP_ELEMENT_I32;
        REQUIRE(eep_collective(ranks.ranks[rank].context, &args, nullptr) == EEP_OK && data == 3 * i + 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < kCount; ++rank) REQUIRE(ranks.status(rank) == 0);
}

// What ends a wait: a look that may not last, a poke, a source that left, a revoke.
void test_ends() {
  Ranks ranks(2);
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
  End end{ranks, 0};
  const auto later = [](auto act) {
    return std::thread([act] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      act();
    });
  };
  end.deadline_ns = 0;
  REQUIRE(!end.probe(2).arrived);
  end.deadline_ns = kSecond / 100;
  REQUIRE(!end.probe(2).arrived);
  REQUIRE(ranks.status(0) == 0 && ranks.ranks[0].control.dropped == first_ranks(0));

  end.deadline_ns = 600 * kSecond;
  const uint32_t pokes = eep_pokes(end.context());
  std::thread poker = later([&] { eep_poke(end.context()); });
  eep_message message{};
  const eep_rank_set sources = first_ranks(2);
  REQUIRE(eep_probe(end.context(), end.lane(), &sources, pokes, end.deadline_ns, &message) == EEP_OK &&
          !message.arrived);
  poker.join();
  // A poke from before counts as well.
  REQUIRE(eep_probe(end.context(), end.lane(), &sources, pokes, end.deadline_ns, &message) == EEP_OK &&
          !message.arrived);

  // What was sent before leaving is still there; a size that is not the message's is refused and takes nothing.
  REQUIRE((End{ranks, 1}.send(0, 4, 700)));
  eep_control_state(&ranks.ranks[1].control, EEP_OWNER_LEFT);
  message = end.probe(2);
  uint8_t small[8];
  uint32_t done = 9;
  REQUIRE(eep_recv(end.context(), end.lane(), 1, small, sizeof small, kSecond, &done) == EEP_ERROR_ARGUMENT);
  REQUIRE(last_error_says("has 700 bytes"));
  REQUIRE(message.arrived && message.bytes == 700 && end.take(message));
  REQUIRE(!end.probe(2).arrived);
  REQUIRE(ranks.status(0) == 0);
  eep_control_state(&ranks.ranks[1].control, EEP_OWNER_ALONE);

  std::thread revoker = later([&] { eep_control_revoke(&ranks.ranks[0].control, 1); });
  REQUIRE(!end.probe(2).arrived);
  revoker.join();
  REQUIRE(!end.send(1, 0, 1));
  REQUIRE(ranks.status(0) == EEP_STATUS_REVOKED);

  // The next epoch counts from one again, although a message of this one was never taken.
  REQUIRE((End{ranks, 1}.send(0, 5, 900)));
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.show(rank, 2, 3);
  end.deadline_ns = 0;
  REQUIRE(!end.probe(2).arrived);
  end.deadline_ns = 60 * kSecond;
  REQUIRE((End{ranks, 1}.send(0, 6, 40)));
  message = end.probe(2);
  REQUIRE(message.arrived && message.tag == 6 && end.take(message));
}

// A source that is in the next view already leaves what it sent in the old one to a destination that is slow.
void test_views_are_entered_at_any_moment() {
  Ranks ranks(2);
  on_ranks(2, [&](uint32_t rank) {
    ranks.open(rank, kGroup, {0, 1});
    const End end{ranks, rank};
    for (uint64_t epoch = 1; epoch < 300; ++epoch) {
      if (epoch > 1) ranks.show(rank, epoch, 3);
      for (uint64_t i = 0; i < epoch % 5; ++i) {
        const uint64_t tag = epoch * 10 + i, size = epoch * 97 % 1500;
        if (rank == 0) {
          REQUIRE(end.send(1, tag, size));
        } else {
          const eep_message message = end.probe(1);
          REQUIRE(message.arrived && message.tag == tag && message.bytes == size && end.take(message));
        }
      }
    }
    REQUIRE(ranks.status(rank) == 0);
  });
}

// What its source did not send before it left an epoch never comes, and no rank is blamed. The same
// holds for a destination that will take nothing of that epoch any more.
void test_an_epoch_is_left() {
  Ranks ranks(2);
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
  const End first{ranks, 0, 600 * kSecond}, second{ranks, 1, 600 * kSecond};
  std::thread waiting([&] {
    REQUIRE(!second.take({0, 300, 0, 1}));
    REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == first_ranks(0));
    REQUIRE(!second.probe(1).arrived);
    // What was not taken of an epoch that is over is not in the way.
    REQUIRE(!second.send(0, 7, 256 * (EEP_PIPE_CELLS + 1)));
    REQUIRE(ranks.status(1) == EEP_STATUS_REVOKED && ranks.ranks[1].control.dropped == first_ranks(0));
    ranks.show(1, 2, 3);
    const eep_message message = second.probe(1);
    REQUIRE(message.arrived && message.tag == 8 && second.take(message));
    REQUIRE(second.send(0, 9, 20));
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ranks.show(0, 2, 3);
  REQUIRE(first.send(1, 8, 900));
  const eep_message message = first.probe(2);
  REQUIRE(message.arrived && message.tag == 9 && first.take(message));
  waiting.join();
  for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(ranks.status(rank) == 0);
}

// A pipe that is never emptied: the sender gives its destination up, at the deadline or when it left.
void test_a_full_pipe() {
  for (bool left : {false, true}) {
    Ranks ranks(2);
    for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
    if (left) eep_control_state(&ranks.ranks[1].control, EEP_OWNER_LEFT);
    REQUIRE(!(End{ranks, 0, left ? 600 * kSecond : kSecond / 20}.send(1, 1, 256 * (EEP_PIPE_CELLS + 1))));
    REQUIRE(ranks.status(0) == EEP_STATUS_SUSPECT && ranks.ranks[0].control.dropped == first_ranks(2));
  }
}

// A source whose words contradict each other is dropped, and costs the receiver nothing else.
void test_lies() {
  Ranks ranks(2);
  for (uint32_t rank = 0; rank < 2; ++rank) ranks.open(rank, kGroup, {0, 1});
  const auto cell = [&](uint64_t sequence) {
    uint8_t* region = reinterpret_cast<uint8_t*>(ranks.ranks[0].region.get());
    const uint64_t stride = sizeof(eep_pipe_cell) + ranks.shape.pipe_bytes;
    return reinterpret_cast<eep_pipe_cell*>(region + ranks.at.lanes + ranks.at.pipes + ranks.at.pipe_stride +
                                            sizeof(eep_pipe) + sequence % EEP_PIPE_CELLS * stride);
  };
  *cell(1) = {eep_flag_make(1, 1, 0), kGroup, 3, 600, 0, {}};
  *cell(2) = {eep_flag_make(1, 2, 0), kGroup, 3, 600, uint64_t{1} << 60, {}};
  const End end{ranks, 0};
  const eep_message message = end.probe(2);
  REQUIRE(message.arrived && message.bytes == 600 && !end.take(message));
  REQUIRE(ranks.status(0) == EEP_STATUS_CORRUPT && ranks.ranks[0].control.corrupt == first_ranks(2));
  REQUIRE(ranks.ranks[0].control.dropped == first_ranks(2));
  REQUIRE(!end.probe(2).arrived);  // its only source is given up

  uint32_t done = 9;
  REQUIRE(eep_send(end.context(), end.lane(), 0, 0, nullptr, 0, 1, &done) == EEP_ERROR_ARGUMENT);
  REQUIRE(last_error_says("rank 0 is this rank itself"));
}

}  // namespace

void test_messages() {
  test_exchange();
  test_ends();
  test_views_are_entered_at_any_moment();
  test_an_epoch_is_left();
  test_a_full_pipe();
  test_lies();
}

}  // namespace eep_test
