#if __has_include(<rdma/fabric.h>)

#include "hosts/fabric_link.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cstring>
#include <iterator>

#include "common/checks.h"

namespace eep::hosts {
namespace {

constexpr uint32_t kOfferVersion = 2;
constexpr uint32_t kMostUnread = 512;
constexpr uint32_t kTurnsBetweenEvents = 16;
constexpr size_t kMostReady = 256;  // signals that wait to be taken: a peer that floods us waits
constexpr char kMagic[8] = {'E', 'E', 'P', 'L', 'I', 'N', 'K', '1'};

// In constant time: how much of a guess was right must not show.
bool is_same(const uint8_t* left, const uint8_t* right, size_t bytes) {
  uint8_t differs = 0;
  for (size_t i = 0; i < bytes; ++i) differs |= left[i] ^ right[i];
  return !differs;
}

}  // namespace

// ---- life ----

bool FabricLink::open(const eep_area* areas, uint32_t count, const eep_link_secret& secret) {
  std::memcpy(token_, secret.token, sizeof token_);
  offer_.version = kOfferVersion;
  offer_.areas = count;
  if (!open_queue() || !offer_areas(areas, secret)) return false;
  if (!transport_.has_connections() && !open_endpoint(transport_.info())) return false;
  // Where there are connections, all links share the address at which the transport listens.
  fid* named = transport_.has_connections() ? &transport_.listener()->fid : &endpoint_->fid;
  size_t bytes = sizeof offer_.address;
  if (const int error = fi_getname(named, offer_.address, &bytes)) return transport_.no("fi_getname", error);
  offer_.address_bytes = static_cast<uint32_t>(bytes);
  transport_.add(this);
  return true;
}

FabricLink::~FabricLink() {
  transport_.remove(this);
  if (descriptor_ >= 0) close(descriptor_);
}

bool FabricLink::open_queue() {
  descriptor_ = epoll_create1(EPOLL_CLOEXEC);
  fi_cq_attr queue = {};
  queue.size = 2 * (kMostUnread + kFrames + kReceives);
  queue.format = FI_CQ_FORMAT_DATA;
  queue.wait_obj = FI_WAIT_FD;
  if (const int error = fi_cq_open(transport_.domain(), &queue, queue_.out(), nullptr))
    return transport_.no("fi_cq_open", error);
  if (!watch(&queue_->fid)) return false;
  if (transport_.has_connections()) {
    fi_eq_attr events = {};
    events.wait_obj = FI_WAIT_FD;
    if (const int error = fi_eq_open(transport_.fabric(), &events, events_.out(), nullptr))
      return transport_.no("fi_eq_open", error);
    return watch(&events_->fid) && watch(&transport_.requests()->fid);
  }
  fi_av_attr book = {};
  book.type = FI_AV_TABLE;
  book.count = 1;
  if (const int error = fi_av_open(transport_.domain(), &book, book_.out(), nullptr))
    return transport_.no("fi_av_open", error);
  return true;
}

bool FabricLink::watch(fid* what) {
  int descriptor = -1;
  if (const int error = fi_control(what, FI_GETWAIT, &descriptor)) return transport_.no("fi_control", error);
  epoll_event event = {};
  event.events = EPOLLIN;
  if (epoll_ctl(descriptor_, EPOLL_CTL_ADD, descriptor, &event)) return transport_.no("epoll_ctl", -errno);
  return true;
}

bool FabricLink::offer_areas(const eep_area* areas, const eep_link_secret& secret) {
  const auto mode = static_cast<uint64_t>(transport_.info()->domain_attr->mr_mode);
  offer_.provider_keys = (mode & FI_MR_PROV_KEY) != 0;
  areas_.resize(offer_.areas);
  for (uint32_t i = 0; i < offer_.areas; ++i) {
    void* address = reinterpret_cast<void*>(areas[i].address);
    if (const int error = fi_mr_reg(transport_.domain(), address, areas[i].bytes, FI_REMOTE_WRITE, 0,
                                    masked(secret.keys[i]), 0, areas_[i].out(), nullptr))
      return transport_.no("fi_mr_reg", error);
    offer_.base[i] = mode & FI_MR_VIRT_ADDR ? areas[i].address : 0;
    offer_.bytes[i] = areas[i].bytes;
    offer_.keys[i] = offer_.provider_keys ? fi_mr_key(areas_[i].get()) : 0;
  }
  return true;
}

bool FabricLink::open_endpoint(fi_info* info) {
  if (const int error = fi_endpoint(transport_.domain(), info, endpoint_.out(), nullptr))
    return transport_.no("fi_endpoint", error);
  fid* other = transport_.has_connections() ? &events_->fid : &book_->fid;
  if (const int error = fi_ep_bind(endpoint_.get(), other, 0)) return transport_.no("fi_ep_bind", error);
  if (const int error = fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV))
    return transport_.no("fi_ep_bind", error);
  if (const int error = fi_enable(endpoint_.get())) return transport_.no("fi_enable", error);
  for (Frame& frame : receives_)
    if (!post(frame)) return transport_.no("fi_recv", -FI_EAGAIN);
  return true;
}

// ---- finding each other ----

// Of the two ends one connects and the other accepts. Tokens are random, and both ends know both.
int FabricLink::connect(const eep_link_offer& peer, const eep_link_secret& secret) {
  if (peer.version != kOfferVersion || peer.areas > EEP_MAX_AREAS || peer.address_bytes > EEP_ADDRESS_BYTES)
    return fail(EEP_ERROR_ARGUMENT, "the offer of a peer is of another version, or does not agree with itself");
  if (knows_peer_) return fail(EEP_ERROR_PHASE, "this link is connected already");
  peer_offer_ = peer;
  peer_secret_ = secret;
  if (!transport_.has_connections()) {
    if (fi_av_insert(book_.get(), peer.address, 1, &peer_, 0, nullptr) != 1)
      return fail(EEP_ERROR_ARGUMENT, "libfabric cannot use the address that a peer offered");
    is_connected_ = true;
  } else if (std::memcmp(token_, secret.token, sizeof token_) < 0 && !dial()) {
    return EEP_ERROR_DEVICE;
  }
  knows_peer_ = true;
  return EEP_OK;
}

bool FabricLink::dial() {
  Info to{transport_.library(), transport_.library().dupinfo(transport_.info())};
  if (!to.info) return transport_.no("fi_dupinfo", -FI_ENOMEM);
  ConnectionRequest request;
  std::memcpy(request.magic, kMagic, sizeof kMagic);
  std::memcpy(request.token, peer_secret_.token, sizeof request.token);
  if (!open_endpoint(to.info)) return false;
  if (const int error = fi_connect(endpoint_.get(), peer_offer_.address, &request, sizeof request))
    return transport_.no("fi_connect", error);
  return true;
}

bool FabricLink::is_meant_by(const ConnectionRequest& request) const {
  return !endpoint_ && std::memcmp(request.magic, kMagic, sizeof kMagic) == 0 &&
         is_same(request.token, token_, sizeof token_);
}

bool FabricLink::accept(fi_info* theirs) {
  if (!open_endpoint(theirs)) {
    broken(eep_last_error());
    return false;
  }
  if (const int error = fi_accept(endpoint_.get(), nullptr, 0)) broken(transport_.name_of(-error));
  return true;
}

void FabricLink::read_events() {
  if (!events_) return;
  transport_.accept_requests();
  alignas(fi_eq_cm_entry) uint8_t space[sizeof(fi_eq_cm_entry) + 256];
  uint32_t event = 0;
  const ssize_t bytes = fi_eq_read(events_.get(), &event, space, sizeof space, 0);
  if (bytes == -FI_EAVAIL) {
    fi_eq_err_entry error = {};
    fi_eq_readerr(events_.get(), &error, 0);
    broken(transport_.name_of(error.err));
  } else if (bytes >= 0 && event == FI_CONNECTED) {
    is_connected_ = true;
  } else if (bytes >= 0 && event == FI_SHUTDOWN) {
    broken("the peer has closed the connection");
  }
}

// ---- out ----

Outcome FabricLink::put(uint32_t area, uint64_t offset, const void* from, uint64_t bytes) {
  if (knows_peer_ &&
      (area >= peer_offer_.areas || offset > peer_offer_.bytes[area] || bytes > peer_offer_.bytes[area] - offset))
    return broken("a put outside of what the peer offered was asked for");
  if (const Outcome now = readiness(); now != Outcome::kDone) return now;
  const bool counts = !transport_.has_connections();
  // Two messages may write the same rows. Where nothing keeps them in order, one begins when the other has been
  // delivered.
  if (unread_ >= kMostUnread || (counts && !puts_ && unread_)) return Outcome::kLater;
  const uint64_t key = peer_offer_.provider_keys ? peer_offer_.keys[area] : masked(peer_secret_.keys[area]);
  const uint64_t to = peer_offer_.base[area] + offset;
  // Over a connection the signal cannot overtake; elsewhere the receiver counts.
  const Outcome outcome =
      counts ? said("fi_writedata",
                    fi_writedata(endpoint_.get(), from, bytes, nullptr, sequence_, peer_, to, key, &row_mark_))
             : said("fi_write", fi_write(endpoint_.get(), from, bytes, nullptr, peer_, to, key, &row_mark_));
  if (outcome == Outcome::kDone) ++unread_, puts_ += counts, last_put_ = sequence_;
  return outcome;
}

Outcome FabricLink::signal(const eep_signal& signal) {
  if (const Outcome now = readiness(); now != Outcome::kDone) return now;
  if (is_far_behind()) return Outcome::kLater;
  Send& send = sends_[sequence_ % kFrames];
  Frame& frame = send.frame;
  std::memcpy(frame.token, peer_secret_.token, sizeof frame.token);
  frame.sequence = sequence_;
  frame.puts = puts_;
  frame.signal = signal;
  const Outcome outcome = said("fi_send", fi_send(endpoint_.get(), &frame, sizeof frame, nullptr, peer_, &send));
  if (outcome == Outcome::kDone) send.is_out = true, ++signals_out_, ++sequence_, puts_ = 0;
  return outcome;
}

// ---- in ----

void FabricLink::progress() {
  while (ready_.size() < kMostReady) {
    fi_cq_data_entry entries[32];
    const ssize_t count = fi_cq_read(queue_.get(), entries, std::size(entries));
    if (count == -FI_EAVAIL) {
      read_error();
      continue;
    }
    if (count < 0 && count != -FI_EAGAIN) broken(transport_.name_of(-count));
    if (count <= 0) break;
    for (ssize_t i = 0; i < count; ++i) completed(entries[i]);
    if (count < static_cast<ssize_t>(std::size(entries))) break;
  }
  // To look costs system calls, and there is seldom news: until there is a connection, now and then, and before a
  // sleep.
  if (!is_connected_ || ++turns_ % kTurnsBetweenEvents == 0) read_events();
}

void FabricLink::completed(const fi_cq_data_entry& entry) {
  if (entry.flags & FI_REMOTE_WRITE) {
    counter_.put_arrived(static_cast<uint32_t>(entry.data));
  } else if (entry.op_context == &row_mark_) {
    --unread_;
  } else if (is_posted(entry.op_context)) {
    Frame& frame = *static_cast<Frame*>(entry.op_context);
    received(frame, entry.len);
    if (!post(frame)) broken("a buffer for what the peer sends could not be given back");
  } else {
    has_left(entry.op_context);
  }
  for (eep_signal signal; counter_.take(signal);) ready_.push_back(signal);
}

void FabricLink::received(const Frame& frame, size_t bytes) {
  if (bytes != sizeof frame || !is_same(frame.token, token_, sizeof token_) ||
      !counter_.signal_arrived(frame.sequence, frame.puts, frame.signal))
    ++refused_;
}

void FabricLink::read_error() {
  fi_cq_err_entry error = {};
  if (fi_cq_readerr(queue_.get(), &error, 0) != 1) return;
  if (error.op_context == &row_mark_) --unread_;
  has_left(error.op_context);
  if (transport_.has_connections() || !is_posted(error.op_context)) {
    broken(transport_.name_of(error.err));
    return;
  }
  // Without connections anyone can send: too long for a signal, and the buffer is free again.
  ++refused_;
  if (!post(*static_cast<Frame*>(error.op_context))) broken("a buffer for what the peer sends could not be given back");
}

bool FabricLink::take(eep_signal& signal) {
  if (ready_.empty()) return false;
  signal = ready_.front();
  ready_.pop_front();
  return true;
}

bool FabricLink::may_sleep() {
  read_events();
  if (!trouble_.empty()) return false;
  fid* waited[3] = {&queue_->fid};
  int count = 1;
  if (events_) waited[count++] = &events_->fid, waited[count++] = &transport_.requests()->fid;
  return ready_.empty() && fi_trywait(transport_.fabric(), waited, count) == FI_SUCCESS;
}

// ---- small things ----

bool FabricLink::post(Frame& frame) {
  return fi_recv(endpoint_.get(), &frame, sizeof frame, nullptr, FI_ADDR_UNSPEC, &frame) == 0;
}

bool FabricLink::is_posted(const void* frame) const {
  return frame >= receives_.data() && frame < receives_.data() + receives_.size();
}

bool FabricLink::is_far_behind() const {
  return sends_[sequence_ % kFrames].is_out ||
         (unread_ && !transport_.has_connections() && sequence_ - last_put_ >= kFrames);
}

void FabricLink::has_left(void* operation) {
  if (operation < sends_.data() || operation >= sends_.data() + sends_.size()) return;
  static_cast<Send*>(operation)->is_out = false;
  --signals_out_;
}

Outcome FabricLink::readiness() {
  if (!knows_peer_) return broken("it is not connected");
  if (!trouble_.empty()) return Outcome::kBroken;
  return is_connected_ ? Outcome::kDone : Outcome::kLater;
}

Outcome FabricLink::said(const char* call, int64_t result) {
  if (result == 0) return Outcome::kDone;
  if (result == -FI_EAGAIN) return Outcome::kLater;
  return broken(std::string(call) + ": " + transport_.name_of(-result));
}

Outcome FabricLink::broken(const std::string& why) {
  if (trouble_.empty()) trouble_ = why;
  return Outcome::kBroken;
}

uint64_t FabricLink::masked(uint64_t key) const {
  const size_t bytes = transport_.info()->domain_attr->mr_key_size;
  return bytes >= sizeof key ? key : key & ((uint64_t{1} << 8 * bytes) - 1);
}

}  // namespace eep::hosts

#endif
