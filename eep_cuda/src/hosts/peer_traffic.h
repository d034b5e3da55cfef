// What passes over one link: flags that our kernels leave in a mirror become messages, and messages of the peer become
// flags in our region.
#ifndef EEP_HOSTS_PEER_TRAFFIC_H_
#define EEP_HOSTS_PEER_TRAFFIC_H_

#include <memory>

#include "hosts/exchange_plan.h"
#include "hosts/lane_traffic.h"
#include "hosts/transport.h"

namespace eep::hosts {

class PeerTraffic {
 public:
  // `control` is our page, `waits` the one that stands for the page of every peer on another host.
  PeerTraffic(const Pair& pair, std::unique_ptr<Link> link, eep_control_page& control, eep_control_page& waits);
  ~PeerTraffic();

  int connect(const eep_link_offer& offer, const eep_link_secret& secret);
  // Does what can be done without waiting. Whether that was anything.
  bool turn();
  // Sends rows of a dispatch of which our kernel has not told yet. What the network does not take goes with the
  // message.
  void send_ahead(const RowOffer& rows);
  bool is_up() const { return has_heard_ && has_greeted_ && (!pair_.shape.lanes || lanes_.has_introduced_itself()); }
  // A message is begun, and the network takes no more of it just now.
  bool is_held_up() const { return is_begun_; }
  // Whether nothing that we owe can still be lost by closing the link.
  bool is_settled() const;
  // A descriptor that becomes readable when the link ends by itself.
  int ended() const { return ended_; }
  uint32_t slot() const { return pair_.peer_slot; }
  const uint8_t* mirror() const { return pair_.mirror; }
  Link& link() { return *link_; }

 private:
  // What our kernels have told the peer last.
  struct Told {
    uint64_t dispatch[EEP_MAX_CHANNELS] = {}, combine[EEP_MAX_CHANNELS] = {}, barrier = 0, revoked = 0;
  };

  // The rows of a dispatch that were sent before it had a flag.
  struct Ahead {
    uint64_t round = 0;
    uint32_t tokens = 0;
  };

  bool begin_message();
  bool next_message();
  bool next_exchange(uint32_t channel);
  bool advance();
  void apply_exchange(const eep_signal& signal);
  bool accuse();

  const Pair pair_;
  std::unique_ptr<Link> link_;
  eep_control_page& control_;
  eep_control_page& waits_;
  Told told_;
  Ahead ahead_[EEP_MAX_CHANNELS];
  std::vector<Put> ahead_puts_;
  LaneTraffic lanes_;
  Message message_;
  size_t next_put_ = 0;
  bool is_begun_ = false, is_half_put_ = false, is_put_ = false;  // the message
  bool is_connecting_ = false, has_greeted_ = false, has_heard_ = false;
  bool is_used_ = false;  // our kernels have written to the mirror: the peer is, or was, in the view
  bool is_accused_ = false, is_ended_ = false;
  int ended_ = -1;  // an eventfd
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_PEER_TRAFFIC_H_
