// A link over libfabric. It has an endpoint and a completion queue of its own: the queue on which something arrives
// says which peer sent it, and closing the endpoint shuts out that peer alone.
#ifndef EEP_HOSTS_FABRIC_LINK_H_
#define EEP_HOSTS_FABRIC_LINK_H_

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "hosts/fabric_transport.h"
#include "hosts/message_counter.h"

namespace eep::hosts {

class FabricLink : public Link {
 public:
  explicit FabricLink(FabricTransport& transport) : transport_(transport) {}
  ~FabricLink() override;

  // False if it cannot be opened; eep_last_error() says why.
  bool open(const eep_area* areas, uint32_t count, const eep_link_secret& secret);
  bool is_meant_by(const ConnectionRequest& request) const;
  // Takes a request for a connection that means this link. False: it is to be refused.
  bool accept(fi_info* theirs);

  const eep_link_offer& offer() const override { return offer_; }
  int connect(const eep_link_offer& peer, const eep_link_secret& secret) override;
  Outcome put(uint32_t area, uint64_t offset, const void* from, uint64_t bytes) override;
  Outcome signal(const eep_signal& signal) override;
  uint32_t unread() const override { return unread_; }
  bool is_idle() const override { return !unread_ && !signals_out_; }
  void progress() override;
  bool take(eep_signal& signal) override;
  uint64_t refused() const override { return refused_; }
  const std::string& trouble() const override { return trouble_; }
  int descriptor() const override { return descriptor_; }
  bool may_sleep() override;

 private:
  static constexpr uint32_t kReceives = 64;
  // Messages on their way out. A signal is sent when that of kFrames messages before has been delivered, with all of
  // its message. So all that the receiver has not shown yet lies in its window: also the puts of the message after.
  static constexpr uint32_t kFrames = 32;
  static_assert(kFrames < MessageCounter::kWindow);

  struct Frame {
    uint8_t token[EEP_TOKEN_BYTES];
    uint32_t sequence;
    uint32_t puts;
    eep_signal signal;
  };

  // A signal of ours, and whether it may still be read.
  struct Send {
    Frame frame;
    bool is_out = false;
  };

  bool open_queue();
  bool watch(fid* what);
  bool offer_areas(const eep_area* areas, const eep_link_secret& secret);
  bool open_endpoint(fi_info* info);
  bool dial();
  bool post(Frame& frame);
  void read_events();
  void completed(const fi_cq_data_entry& entry);
  void received(const Frame& frame, size_t bytes);
  void read_error();
  bool is_posted(const void* frame) const;
  // Whether the message of kFrames before may still be on its way.
  bool is_far_behind() const;
  void has_left(void* operation);
  Outcome readiness();
  Outcome said(const char* call, int64_t result);
  Outcome broken(const std::string& why);
  uint64_t masked(uint64_t key) const;

  FabricTransport& transport_;
  // Closed from the last to the first: the endpoint before what it uses.
  Handle<fid_av> book_;
  Handle<fid_eq> events_;
  Handle<fid_cq> queue_;
  std::vector<Handle<fid_mr>> areas_;
  Handle<fid_ep> endpoint_;
  int descriptor_ = -1;
  eep_link_offer offer_ = {}, peer_offer_ = {};
  uint8_t token_[EEP_TOKEN_BYTES] = {};
  eep_link_secret peer_secret_ = {};
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  bool knows_peer_ = false, is_connected_ = false;
  std::string trouble_;
  uint64_t refused_ = 0;
  uint32_t unread_ = 0, signals_out_ = 0, turns_ = 0, sequence_ = 0, puts_ = 0;
  uint32_t last_put_ = 0;  // the last message that had puts; where puts are counted, all that are unread are its own
  char row_mark_ = 0;      // whose address tells the completions of puts from others
  std::array<Send, kFrames> sends_;  // by the number of the message
  std::array<Frame, kReceives> receives_;
  MessageCounter counter_;
  std::deque<eep_signal> ready_;
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_FABRIC_LINK_H_
