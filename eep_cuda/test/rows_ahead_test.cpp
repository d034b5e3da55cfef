// Rows that are sent before the flag of their round, over a link that notes what it is given.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/control.h"
#include "common/shared_words.h"
#include "hosts/peer_traffic.h"
#include "require.h"

namespace eep_test {
namespace {

using eep::hosts::Outcome;

constexpr uint32_t kTokens = 8, kHidden = 128, kTopk = 1, kRowBytes = kHidden * sizeof(float);
constexpr uint32_t kNoExpertAt = 5;  // the token that the peer does not want

struct NotedLink final : eep::hosts::Link {
  struct Sent {
    uint64_t first_word;  // of a signal; 0: these are rows
    uint64_t begin, end;  // tokens
  };

  const eep_link_offer& offer() const override { return offered; }
  int connect(const eep_link_offer&, const eep_link_secret&) override { return EEP_OK; }
  Outcome put(uint32_t area, uint64_t offset, const void*, uint64_t bytes) override {
    if (is_full) return Outcome::kLater;
    if (area == eep::hosts::kRows) sent.push_back({0, offset / kRowBytes, (offset + bytes) / kRowBytes});
    return Outcome::kDone;
  }
  Outcome signal(const eep_signal& signal) override {
    if (is_full) return Outcome::kLater;
    sent.push_back({signal.words[0], 0, 0});
    return Outcome::kDone;
  }
  uint32_t unread() const override { return 0; }
  bool is_idle() const override { return true; }
  void progress() override {}
  bool take(eep_signal& signal) override {
    if (has_answered) return false;
    signal = {{eep::hosts::kHello, 1}};
    return has_answered = true;
  }
  uint64_t refused() const override { return 0; }
  const std::string& trouble() const override { return none; }
  int descriptor() const override { return -1; }
  bool may_sleep() override { return true; }

  std::vector<Sent> take_sent() { return std::exchange(sent, {}); }

  eep_link_offer offered{};
  std::string none;
  std::vector<Sent> sent;
  bool is_full = false, has_answered = false;
};

// Rank 0 with a peer on another host, as its proxy has it.
struct FarPeer {
  FarPeer() {
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    region = std::make_unique<uint64_t[]>(at.total_bytes / sizeof(uint64_t));
    mirror = std::make_unique<uint64_t[]>((at.total_bytes + sizeof(eep_control_page)) / sizeof(uint64_t));
    const eep::hosts::Pair pair{shape, at, bytes_of(region), bytes_of(mirror), 0, 0, 1, 1};
    auto noted = std::make_unique<NotedLink>();
    link = noted.get();
    traffic = std::make_unique<eep::hosts::PeerTraffic>(pair, std::move(noted), control, waits);
    for (uint32_t token = 0; token < kTokens; ++token) *view().topk_idx(0, token) = token == kNoExpertAt ? -1 : 0;
    REQUIRE(traffic->connect({}, {}) == EEP_OK);
    while (!traffic->is_up()) traffic->turn();
    link->take_sent();
  }

  static uint8_t* bytes_of(const std::unique_ptr<uint64_t[]>& words) { return reinterpret_cast<uint8_t*>(words.get()); }
  eep::ChannelView view() { return {shape, at, bytes_of(mirror), 0}; }
  static uint64_t envelope() { return eep_envelope(EEP_TYPE_F32, kTopk, kHidden); }
  void offer(uint64_t round, uint32_t end) { traffic->send_ahead({0, eep_flag_make(1, round, 0), envelope(), end}); }
  // As a kernel tells of its round.
  void tell(uint64_t round) {
    eep_mailbox& mailbox = *view().mailbox(0);
    eep::store_relaxed(mailbox.envelope, envelope());
    eep::store_release(mailbox.dispatch_flag, eep_flag_make(1, round, kTokens));
  }

  eep_shape shape{2, kTokens, kHidden, kTopk, 1, EEP_LAYOUT_RANK, EEP_TYPE_F32, EEP_TYPE_F32, 1, 0, 0, 0, 0, 0};
  eep_region_layout at;
  std::unique_ptr<uint64_t[]> region, mirror;
  eep_control_page control{}, waits{};
  NotedLink* link;
  std::unique_ptr<eep::hosts::PeerTraffic> traffic;
};

bool is_rows(const NotedLink::Sent& sent, uint64_t begin, uint64_t end) {
  return !sent.first_word && sent.begin == begin && sent.end == end;
}
bool is_dispatch(const NotedLink::Sent& sent) { return sent.first_word == eep::hosts::kDispatch; }

void test_a_message_has_what_was_not_sent_ahead() {
  FarPeer peer;
  peer.offer(1, 2);
  peer.offer(1, 4);
  auto sent = peer.link->take_sent();
  REQUIRE(sent.size() == 2 && is_rows(sent[0], 0, 2) && is_rows(sent[1], 2, 4));
  peer.tell(1);
  peer.traffic->turn();
  sent = peer.link->take_sent();
  REQUIRE(sent.size() == 2 && is_rows(sent[0], 4, 8) && is_dispatch(sent[1]));  // small gaps are sent along
}

void test_a_later_round_begins_anew() {
  FarPeer peer;
  peer.offer(1, 4);  // and its flags were lost
  peer.tell(2);
  peer.traffic->turn();
  auto sent = peer.link->take_sent();
  REQUIRE(sent.size() == 3 && is_rows(sent[1], 0, 8) && is_dispatch(sent[2]));
  peer.offer(3, 4);
  sent = peer.link->take_sent();
  REQUIRE(sent.size() == 1 && is_rows(sent[0], 0, 4));
}

void test_rows_that_were_told_of_are_not_sent_again() {
  FarPeer peer;
  peer.tell(1);
  peer.traffic->turn();
  peer.link->take_sent();
  peer.offer(1, 4);
  REQUIRE(peer.link->take_sent().empty());
}

void test_what_the_network_does_not_take_goes_with_the_message() {
  FarPeer peer;
  peer.link->is_full = true;
  peer.offer(1, 4);
  peer.link->is_full = false;
  peer.tell(1);
  peer.traffic->turn();
  const auto sent = peer.link->take_sent();
  REQUIRE(sent.size() == 2 && is_rows(sent[0], 0, 8) && is_dispatch(sent[1]));
}

void test_rows_do_not_come_between_those_of_a_message() {
  FarPeer peer;
  peer.tell(1);
  peer.link->is_full = true;
  peer.traffic->turn();
  peer.link->is_full = false;
  peer.offer(2, 4);
  REQUIRE(peer.link->take_sent().empty());
  peer.traffic->turn();
  REQUIRE(is_dispatch(peer.link->take_sent().back()));
}

}  // namespace

void test_rows_ahead() {
  test_a_message_has_what_was_not_sent_ahead();
  test_a_later_round_begins_anew();
  test_rows_that_were_told_of_are_not_sent_again();
  test_what_the_network_does_not_take_goes_with_the_message();
  test_rows_do_not_come_between_those_of_a_message();
}

}  // namespace eep_test
