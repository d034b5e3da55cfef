#include "hosts/peer_traffic.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "common/control.h"
#include "common/fault.h"
#include "common/rank_sets.h"
#include "common/shared_words.h"

namespace eep::hosts {

namespace {

// What our kernels have caused: rows and parts of messages that follow are sent, and missed by the peer if they are
// not.
bool is_from_kernels(const eep_signal& signal) {
  const uint64_t kind = signal.words[0] & 0xff;
  return kind == kDispatch || kind == kCombine || kind == kBarrier || kind == kRound || kind == kCell;
}

uint64_t without_count(uint64_t flag) { return flag & ~uint64_t{0xffff}; }

}  // namespace

PeerTraffic::PeerTraffic(const Pair& pair, std::unique_ptr<Link> link, eep_control_page& control,
                         eep_control_page& waits)
    : pair_(pair),
      link_(std::move(link)),
      control_(control),
      waits_(waits),
      lanes_(pair, control, pair.lane_area()),
      ended_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  told_.revoked = load_acquire(waits_.revoked_epoch);  // what ended before this life is not its business
}

PeerTraffic::~PeerTraffic() {
  if (ended_ >= 0) close(ended_);
}

int PeerTraffic::connect(const eep_link_offer& offer, const eep_link_secret& secret) {
  const int error = link_->connect(offer, secret);
  is_connecting_ = !error;
  return error;
}

bool PeerTraffic::turn() {
  bool moved = false;
  link_->progress();
  for (eep_signal signal; link_->take(signal); moved = true)
    if (!lanes_.apply(signal)) apply_exchange(signal);
  if (!link_->trouble().empty()) return accuse() || moved;
  while (is_begun_ || begin_message()) {
    if (!advance()) break;
    moved = true;
  }
  return moved;
}

bool PeerTraffic::is_settled() const {
  return !pair_.shape.lanes || !is_up() || !link_->trouble().empty() || lanes_.is_farewelled() || lanes_.has_left();
}

// ---- out ----

bool PeerTraffic::begin_message() {
  if (!next_message()) return false;
  next_put_ = 0;
  is_half_put_ = is_put_ = false;
  is_begun_ = true;
  return true;
}

bool PeerTraffic::next_message() {
  if (!has_greeted_) {
    message_.begin(kHello, load_relaxed(control_.host));
    return is_connecting_;
  }
  if (const uint64_t epoch = load_acquire(waits_.revoked_epoch); epoch > told_.revoked) {
    told_.revoked = epoch;
    message_.begin(kRevoke, epoch);
    return true;
  }
  if (pair_.shape.channels) {
    const eep_mailbox& mailbox = *pair_.mirrored(0).mailbox(pair_.own_slot);
    if (const uint64_t flag = load_acquire(mailbox.barrier_flag); flag != told_.barrier) {
      told_.barrier = flag;
      is_used_ = true;
      message_.begin(kBarrier, flag, load_relaxed(mailbox.barrier_before));
      return true;
    }
  }
  for (uint32_t channel = 0; channel < pair_.shape.channels; ++channel)
    if (next_exchange(channel)) return true;
  return lanes_.next(message_);
}

// These rows belong to no message, so none may be begun; and the network would take none of them. Their places are
// free: our kernel writes a round when the peer has read the one before, or was dropped, as for what comes with a
// message.
void PeerTraffic::send_ahead(const RowOffer& rows) {
  if (is_begun_ || !has_greeted_ || rows.round == without_count(told_.dispatch[rows.channel])) return;
  Ahead& ahead = ahead_[rows.channel];
  if (ahead.round != rows.round) ahead = {rows.round, 0};
  ahead_puts_.clear();
  plan_rows(pair_, rows.channel, rows.envelope, {ahead.tokens, rows.end}, ahead_puts_);
  for (const Put& put : ahead_puts_)
    if (link_->put(put.area, put.offset, put.from, put.bytes) != Outcome::kDone) return;  // all of them again, later
  if (!ahead_puts_.empty()) fault::pass(fault::kHostsMidRows);
  ahead.tokens = rows.end;
}

// Of a dispatch and a combine that both wait, the one that our kernels came to first goes first.
bool PeerTraffic::next_exchange(uint32_t channel) {
  const eep_mailbox& mailbox = *pair_.mirrored(channel).mailbox(pair_.own_slot);
  const uint64_t dispatch = load_acquire(mailbox.dispatch_flag), combine = load_acquire(mailbox.combine_flag);
  const bool dispatches = dispatch != told_.dispatch[channel], combines = combine != told_.combine[channel];
  if (!dispatches && !combines) return false;
  is_used_ = true;
  if (combines && (!dispatches || combine >> 16 < dispatch >> 16)) {
    told_.combine[channel] = combine;
    message_.begin(kCombine | uint64_t{channel} << 8, combine);
    // If our outbox was given up to a later round while it was read, we have dropped the peer in this epoch, or left
    // the epoch: the peer hears nothing of this round.
    message_.guards[0] = {pair_.own(channel).outbox_stamp(), without_count(combine)};
    plan_combine(pair_, channel, eep_flag_count(combine), message_.puts);
  } else {
    const uint64_t envelope = load_relaxed(mailbox.envelope);
    told_.dispatch[channel] = dispatch;
    message_.begin(kDispatch | uint64_t{channel} << 8, dispatch, envelope);
    const Ahead& ahead = ahead_[channel];
    const uint32_t first = ahead.round == without_count(dispatch) ? ahead.tokens : 0;
    plan_dispatch(pair_, channel, dispatch, envelope, first, message_.puts);
  }
  return true;
}

// One step of the message. False: the network takes no more just now, or the link is broken.
bool PeerTraffic::advance() {
  if (!is_half_put_ && next_put_ >= message_.puts.size() / 2) {
    is_half_put_ = true;
    if (is_from_kernels(message_.signal)) fault::pass(fault::kHostsMidRows);
  }
  if (next_put_ < message_.puts.size()) {
    const Put& put = message_.puts[next_put_];
    if (link_->put(put.area, put.offset, put.from, put.bytes) != Outcome::kDone) return false;
    ++next_put_;
    return true;
  }
  // The signal says that the rows are those of the round, so they must have been read before we look.
  if (message_.is_guarded() && link_->unread()) return false;
  if (!is_put_) {
    is_put_ = true;
    if (is_from_kernels(message_.signal)) fault::pass(fault::kHostsAfterRows);
  }
  if (!message_.is_torn()) {
    if (link_->signal(message_.signal) != Outcome::kDone) return false;
    has_greeted_ = true;
  }
  is_begun_ = false;
  return true;
}

// ---- in ----

void PeerTraffic::apply_exchange(const eep_signal& signal) {
  const uint64_t kind = signal.words[0] & 0xff, channel = signal.words[0] >> 8;
  const uint64_t flag = signal.words[1];
  if (kind == kHello && !has_heard_) {
    store_relaxed(page_behind(pair_.mirror, pair_.at)->host, flag);
    has_heard_ = true;
  }
  if (kind == kRevoke && flag < EEP_EPOCH_LIMIT - 1) eep_control_revoke(&control_, flag);
  if (channel >= pair_.shape.channels || (kind != kDispatch && kind != kCombine && kind != kBarrier)) return;
  eep_mailbox& mailbox = *pair_.own(static_cast<uint32_t>(channel)).mailbox(pair_.peer_slot);
  fault::pass(fault::kHostsReceived);
  if (kind == kDispatch) {
    store_relaxed(mailbox.envelope, signal.words[2]);
    store_release(mailbox.dispatch_flag, flag);
  } else if (kind == kCombine) {
    // The kernels look at the stamp after they have pulled, as if this were the outbox of the peer.
    store_relaxed(*pair_.mirrored(static_cast<uint32_t>(channel)).outbox_stamp(), without_count(flag));
    store_release(mailbox.combine_flag, flag);
  } else {
    store_relaxed(mailbox.barrier_before, signal.words[2]);
    store_release(mailbox.barrier_flag, flag);
  }
  ring(control_);
}

// A link that is broken: our kernels need not wait for the peer. Once, and again whenever they write to it: a new view
// forgets suspects, and may still have that peer.
bool PeerTraffic::accuse() {
  is_begun_ = false;
  bool has_news = lanes_.take_knock() || !is_accused_;
  while (has_greeted_ && begin_message()) is_begun_ = false, has_news |= is_from_kernels(message_.signal);
  if (!is_ended_) {
    is_ended_ = true;
    const uint64_t one = 1;
    if (write(ended_, &one, sizeof one) < 0) return false;  // no one has a descriptor to hear it
  }
  // What a peer owed has come before it said goodbye, and kernels see for themselves that no more will.
  if (!has_news || !(is_used_ || lanes_.is_used()) || lanes_.has_left()) return false;
  is_accused_ = true;
  const RankSet peer = only(pair_.peer_rank);
  eep_control_suspect(&control_, &peer);
  return true;
}

}  // namespace eep::hosts
