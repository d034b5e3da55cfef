// What lanes exchange over one link: rounds of collectives, parts of messages, and what a rank says of itself and its
// groups. It decides what is sent next and applies what has come; the link itself is PeerTraffic's.
//
// Everything that a peer puts lands in its own mirror: the halves of its outbox where its region has them, and the
// parts of its messages in the pipes of its own slot there, which no kernel uses. From there this side copies them to
// the region.
#ifndef EEP_HOSTS_LANE_TRAFFIC_H_
#define EEP_HOSTS_LANE_TRAFFIC_H_

#include <algorithm>
#include <vector>

#include "common/lane_letters.h"
#include "common/mirrors.h"
#include "hosts/exchange_plan.h"
#include "hosts/message.h"

namespace eep::hosts {

class LaneTraffic {
 public:
  // `control` is our page; `area` is the number of the peer's area for lanes.
  LaneTraffic(const Pair& pair, eep_control_page& control, uint32_t area);

  // The next message, if there is something to say.
  bool next(Message& message);
  // Whether that signal was one of ours. What it says is checked before it is used.
  bool apply(const eep_signal& signal);

  // Whether the peer has told of all groups that it had when the link began: they come before its first page.
  bool has_introduced_itself() const { return has_page_; }

  // Whether kernels have begun to wait for a lane of that peer since this was asked last.
  bool take_knock();
  // Whether kernels have written for that peer, or waited for it.
  bool is_used() const { return is_used_; }
  // Whether the peer has said that it leaves: the end of its link is no surprise then.
  bool has_left() const { return load_acquire(page().state) == EEP_OWNER_LEFT; }
  // Whether the peer knows that we leave, and with it all that we owed.
  bool is_farewelled() const { return is_farewelled_; }

 private:
  static constexpr uint32_t kMostParts = 64;  // of a lane on a GPU; a CPU has 3

  // What was sent of one of our lanes.
  struct Own {
    uint64_t group = 0;  // its word in our page
    uint64_t taken = 0;
    uint64_t cleared[kMostParts] = {};  // the letter for which the stamp of the half was taken away
    bool is_stamped[kMostParts] = {};
  };
  // What was sent to one of the peer's lanes.
  struct There {
    uint64_t round[kMostParts] = {}, cell = 0;  // flags
  };

  bool next_group(Message& message, bool is_open);
  bool next_round(Message& message);
  bool next_cell(Message& message);
  bool next_taken(Message& message);
  bool next_page(Message& message);
  bool send_round(Message& message, uint32_t lane, uint32_t part, const Letter& letter);
  void apply_group(uint32_t lane, uint64_t word, uint64_t taken);
  void apply_round(const eep_signal& signal, uint32_t lane);
  void apply_cell(const eep_signal& signal, uint32_t lane);

  uint32_t parts() const { return std::min(pair_.shape.lane_parts, kMostParts); }
  // The lane of ours that serves a group, as the peer knows it; shape.lanes if there is none.
  uint32_t own_lane(uint64_t group) const;
  LaneView own(uint32_t lane) const { return {pair_.shape, pair_.at, pair_.region, lane}; }
  LaneView mirrored(uint32_t lane) const { return {pair_.shape, pair_.at, pair_.mirror, lane}; }
  eep_control_page& page() const { return *page_behind(pair_.mirror, pair_.at); }
  // Where something that has an address in the lanes of a region lies in the area of lanes.
  uint64_t offset_of(const void* address, const uint8_t* region) const {
    return static_cast<uint64_t>(static_cast<const uint8_t*>(address) - region) - pair_.at.lanes;
  }

  const Pair pair_;
  eep_control_page& control_;
  const uint32_t area_;
  std::vector<Own> own_;
  std::vector<There> there_;
  uint32_t knocks_ = 0;
  uint64_t told_state_ = ~uint64_t{0}, told_revoked_ = 0;  // no state: the first page is always sent
  bool has_page_ = false, is_used_ = false, owes_farewell_ = false, is_farewelled_ = false;
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_LANE_TRAFFIC_H_
