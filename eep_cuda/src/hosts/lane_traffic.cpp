#include "hosts/lane_traffic.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "common/control.h"
#include "common/fault.h"

namespace eep::hosts {
namespace {

constexpr uint64_t kNoWord = 0;  // what is put over a stamp

constexpr uint64_t kClosed = uint64_t{1} << 63;

// The next flag after `last` of those that count from 1 in each epoch.
bool follows(uint64_t flag, uint64_t last) {
  const uint64_t epoch = eep_flag_epoch(flag), last_epoch = eep_flag_epoch(last), round = flag >> 16 & EEP_ROUND_MASK;
  if (epoch == last_epoch) return round == (((last >> 16) + 1) & EEP_ROUND_MASK);
  return epoch > last_epoch && round == 1;
}

// Whether a round comes after another. Rounds of an epoch start again at 0 when their 24 bits are used up.
bool is_later(uint64_t flag, uint64_t last) {
  if (eep_flag_epoch(flag) != eep_flag_epoch(last)) return eep_flag_epoch(flag) > eep_flag_epoch(last);
  const uint64_t ahead = ((flag >> 16) - (last >> 16)) & EEP_ROUND_MASK;
  return ahead && ahead <= EEP_ROUND_MASK / 2;
}

}  // namespace

LaneTraffic::LaneTraffic(const Pair& pair, eep_control_page& control, uint32_t area)
    : pair_(pair), control_(control), area_(area), own_(pair.shape.lanes), there_(pair.shape.lanes) {}

bool LaneTraffic::take_knock() {
  const uint32_t knocks = load_acquire(page().doorbell);
  if (knocks == knocks_) return false;
  knocks_ = knocks;
  return is_used_ = true;
}

// ---- out ----

// A group is told of before its rounds, and its end after them. That this rank leaves is told when nothing else is left
// to say.
bool LaneTraffic::next(Message& message) {
  if (!pair_.shape.lanes) return false;
  if (owes_farewell_) {
    owes_farewell_ = false;
    message.begin(kFarewell);
    return true;
  }
  return next_group(message, true) || next_taken(message) || next_round(message) || next_cell(message) ||
         next_group(message, false) || next_page(message);
}

bool LaneTraffic::next_group(Message& message, bool is_open) {
  for (uint32_t lane = 0; lane < pair_.shape.lanes; ++lane) {
    const uint64_t word = load_acquire(control_.groups[lane]);
    if (word == own_[lane].group || !(word & kClosed) != is_open) continue;
    own_[lane].group = word;
    // A lane is made ready for its group before it is said to serve it.
    own_[lane].taken = pair_.shape.pipe_bytes ? load_acquire(own(lane).pipe(pair_.peer_slot)->taken) : 0;
    message.begin(kGroup | uint64_t{lane} << 8, word, own_[lane].taken);
    return true;
  }
  return false;
}

bool LaneTraffic::next_taken(Message& message) {
  if (!pair_.shape.pipe_bytes) return false;
  for (uint32_t lane = 0; lane < pair_.shape.lanes; ++lane) {
    if (!own_[lane].group) continue;
    const uint64_t taken = load_acquire(own(lane).pipe(pair_.peer_slot)->taken);
    if (taken == own_[lane].taken) continue;
    own_[lane].taken = taken;
    is_used_ = true;
    message.begin(kTaken | uint64_t{lane} << 8, taken);
    return true;
  }
  return false;
}

bool LaneTraffic::next_round(Message& message) {
  for (uint32_t lane = 0; lane < pair_.shape.lanes; ++lane) {
    if (!load_relaxed(page().groups[lane])) continue;
    for (uint32_t part = 0; part < parts(); ++part) {
      const PartView mirror = mirrored(lane).part(part);
      const uint64_t last = there_[lane].round[part];
      Letter found = {};
      for (uint64_t half : {0, 1}) {
        if (!is_later(load_relaxed(letter_of(mirror, half).flag), last)) continue;
        const Letter letter = read_letter(letter_of(mirror, half));
        if (is_later(letter.flag, last) && (!found.flag || is_later(found.flag, letter.flag))) found = letter;
      }
      if (found.flag && send_round(message, lane, part, found)) return true;
    }
  }
  return false;
}

bool LaneTraffic::send_round(Message& message, uint32_t lane, uint32_t part, const Letter& letter) {
  const uint32_t from = own_lane(letter.group);
  if (from == pair_.shape.lanes) return false;  // the peer has to hear of the group first, or its lane serves another
  is_used_ = true;
  Own& own_lane = own_[from];
  const PartView outbox = own(from).part(part);
  const uint64_t half = letter.flag & 1, round = letter.flag >> 16 & EEP_ROUND_MASK;
  // A peer that is still in an earlier epoch, or in a group that this lane served before, may read what this round puts
  // there. It must find the stamp gone, and puts of one message need not come before those of the next. Later rounds
  // begin when the peer has come so far.
  if (round <= 2 && own_lane.is_stamped[part] && own_lane.cleared[part] != letter.flag) {
    own_lane.cleared[part] = letter.flag;
    message.begin(kClear);
    message.puts.push_back({area_, offset_of(outbox.stamp(half), pair_.region),
                            reinterpret_cast<const uint8_t*>(&kNoWord), sizeof kNoWord});
    return true;
  }
  own_lane.is_stamped[part] = true;
  there_[lane].round[part] = letter.flag;
  message.begin(kRound | uint64_t{lane} << 8 | uint64_t{from} << 16 | uint64_t{part} << 24, letter.flag, letter.group,
                letter.call, letter.bytes, letter.members);
  message.guards[0] = {outbox.stamp(half), letter.flag & ~uint64_t{0xffff}};
  message.guards[1] = {outbox.stamp(half) + 1, letter.group};
  for (int i : {0, 1}) {
    const uint64_t begin = std::min<uint64_t>(letter.parts.begin[i], pair_.shape.lane_bytes);
    const uint64_t size = std::min<uint64_t>(letter.parts.size[i], pair_.shape.lane_bytes - begin);
    const uint8_t* bytes = outbox.outbox(static_cast<uint32_t>(half)) + begin;
    if (size) message.puts.push_back({area_, offset_of(bytes, pair_.region), bytes, size});
  }
  return true;
}

bool LaneTraffic::next_cell(Message& message) {
  if (!pair_.shape.pipe_bytes) return false;
  for (uint32_t lane = 0; lane < pair_.shape.lanes; ++lane) {
    if (!load_relaxed(page().groups[lane])) continue;
    const LaneView mirror = mirrored(lane);
    const uint64_t last = there_[lane].cell, next = (last >> 16) + 1;
    for (const uint64_t sequence : {next, uint64_t{1}}) {
      const eep_pipe_cell& cell = *mirror.cell(pair_.own_slot, sequence);
      const uint64_t flag = load_acquire(cell.flag);
      if (!follows(flag, last)) continue;
      const uint64_t bytes = load_relaxed(cell.bytes), offset = load_relaxed(cell.offset);
      message.begin(kCell | uint64_t{lane} << 8, flag, load_relaxed(cell.group), load_relaxed(cell.tag), bytes, offset);
      message.guards[0] = {&cell.flag, flag};
      if (message.is_torn()) continue;
      is_used_ = true;
      there_[lane].cell = flag;
      const uint64_t size = offset < bytes ? std::min<uint64_t>(bytes - offset, pair_.shape.pipe_bytes) : 0;
      const uint8_t* payload = reinterpret_cast<const uint8_t*>(&cell + 1);
      // It lands in the pipe of our slot there too: that of the peer's mirror of us, which no kernel uses.
      if (size) message.puts.push_back({area_, offset_of(payload, pair_.mirror), payload, size});
      return true;
    }
  }
  return false;
}

bool LaneTraffic::next_page(Message& message) {
  const uint64_t state = load_acquire(control_.state), revoked = load_acquire(control_.revoked_epoch);
  if (state == told_state_ && revoked == told_revoked_) return false;
  told_state_ = state, told_revoked_ = revoked;
  message.begin(kPage, state, revoked);
  return true;
}

uint32_t LaneTraffic::own_lane(uint64_t group) const {
  for (uint32_t lane = 0; lane < pair_.shape.lanes; ++lane)
    if (group && own_[lane].group == group) return lane;
  return pair_.shape.lanes;
}

// ---- in ----

bool LaneTraffic::apply(const eep_signal& signal) {
  const uint64_t kind = signal.words[0] & 0xff;
  const uint32_t lane = signal.words[0] >> 8 & 0xff;
  if (kind < kPage || lane >= pair_.shape.lanes) return false;
  switch (kind) {
    case kPage:
      if (signal.words[1] > EEP_OWNER_LEFT) return true;  // there is no such state
      if (signal.words[1] == EEP_OWNER_LEFT) owes_farewell_ = true;
      store_release(page().revoked_epoch, signal.words[2]);
      store_release(page().state, signal.words[1]);
      has_page_ = true;
      ring_all(control_);
      return true;
    case kGroup:
      apply_group(lane, signal.words[1], signal.words[2]);
      return true;
    case kRound:
      fault::pass(fault::kHostsReceived);
      apply_round(signal, lane);
      return true;
    case kCell:
      fault::pass(fault::kHostsReceived);
      apply_cell(signal, lane);
      return true;
    case kTaken:
      if (pair_.shape.pipe_bytes) store_release(mirrored(lane).pipe(pair_.own_slot)->taken, signal.words[1]);
      ring(control_);
      return true;
    case kFarewell:
      is_farewelled_ = true;
      return true;
    default:
      return kind == kClear;
  }
}

// The peer's lane serves another group: what our kernels wrote for the last one is not to be sent any more, and what it
// took of it says nothing of the next. Our kernels write for the new one when they see the word.
void LaneTraffic::apply_group(uint32_t lane, uint64_t word, uint64_t taken) {
  if (!(word & kClosed)) {
    const LaneView mirror = mirrored(lane);
    for (uint32_t part = 0; part < parts(); ++part)
      for (uint64_t half : {0, 1}) store_relaxed(letter_of(mirror.part(part), half).flag, uint64_t{0});
    if (pair_.shape.pipe_bytes) {
      for (uint64_t cell = 0; cell < EEP_PIPE_CELLS; ++cell)
        store_relaxed(mirror.cell(pair_.own_slot, cell)->flag, uint64_t{0});
      store_relaxed(mirror.pipe(pair_.own_slot)->taken, taken);
    }
    there_[lane] = {};
  }
  store_release(page().groups[lane], word);
  ring_all(control_);
}

void LaneTraffic::apply_round(const eep_signal& signal, uint32_t lane) {
  const uint32_t from = signal.words[0] >> 16 & 0xff, part = signal.words[0] >> 24 & 0xff;
  if (from >= pair_.shape.lanes || part >= parts()) return;
  const uint64_t flag = signal.words[1], group = signal.words[2], half = flag & 1;
  // The kernels read the stamp as if this were the outbox of the peer: first it is gone, then the group is named.
  uint64_t* stamp = mirrored(from).part(part).stamp(static_cast<uint32_t>(half));
  store_relaxed(*stamp, uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  store_relaxed(stamp[1], group);
  store_release(*stamp, flag & ~uint64_t{0xffff});
  eep_lane_mailbox& mailbox = *own(lane).part(part).mailbox(pair_.peer_slot);
  store_relaxed(mailbox.group, group);
  store_relaxed(mailbox.call[half], signal.words[3]);
  store_relaxed(mailbox.bytes[half], signal.words[4]);
  store_relaxed(mailbox.members[half], signal.words[5]);
  store_release(mailbox.flag, flag);
  ring(control_);
}

void LaneTraffic::apply_cell(const eep_signal& signal, uint32_t lane) {
  if (!pair_.shape.pipe_bytes) return;
  const uint64_t flag = signal.words[1], sequence = flag >> 16 & EEP_ROUND_MASK, bytes = signal.words[4],
                 offset = signal.words[5];
  const uint64_t size = offset < bytes ? std::min<uint64_t>(bytes - offset, pair_.shape.pipe_bytes) : 0;
  eep_pipe_cell& cell = *own(lane).cell(pair_.peer_slot, sequence);
  // As a source on this host would write it.
  store_relaxed(cell.flag, uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  store_relaxed(cell.group, signal.words[2]);
  store_relaxed(cell.tag, signal.words[3]);
  store_relaxed(cell.bytes, bytes);
  store_relaxed(cell.offset, offset);
  if (size) std::memcpy(&cell + 1, mirrored(lane).cell(pair_.peer_slot, sequence) + 1, size);
  store_release(cell.flag, flag);
  ring(control_);
}

}  // namespace eep::hosts
