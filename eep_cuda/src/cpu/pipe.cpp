// Messages between two ranks of a group.
//
// A message is cut into parts that go through the cells of a pipe, in the region of the destination. The source fills a
// cell again when the destination has taken what was in it before; cells are counted per pair and epoch.
//
// A message belongs to its view, and the two ends enter a view one after the other. A source that is ahead leaves the
// cells alone until the destination has taken all of the old epoch or has left that epoch itself. What the destination
// has not taken by then is lost with the view. An end that is behind may wait for what the other end will not do any
// more in that epoch. The first cell of a later epoch tells it so, or the first `taken` word; then it leaves as if
// revoked.
#include <algorithm>
#include <cstring>

#include "common/fault.h"
#include "cpu/context.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// As in the rounds of a collective: a peer that leaves or opens a lane does not ring our doorbell.
constexpr uint64_t kLookForLeft = 20'000'000, kLookForLane = 1'000'000;

int check_peer(const eep_context& context, const Members& members, uint32_t rank, const char* call) {
  if (!context.shape.pipe_bytes)
    return fail(EEP_ERROR_ARGUMENT, "%s: this region has no pipes for messages; make it with shape.pipe_bytes", call);
  if (rank >= EEP_MAX_RANKS || !has(members.active, rank) || rank == members.me)
    return fail(EEP_ERROR_ARGUMENT, "%s: rank %u is this rank itself, or not an active member of the group", call,
                rank);
  return EEP_OK;
}

enum class Look { kNotYet, kReady, kNever };

// Waits until `look()`, which depends on one peer alone, says that all is ready; false when it will not be, and the
// control page says why.
template <typename Looks>
bool wait_for_peer(eep_context& context, const Members& members, uint32_t rank, uint64_t deadline_ns,
                   uint64_t longest_sleep_ns, Looks look) {
  if (is_revoked(*context.control, members.epoch)) {
    report(*context.control, EEP_STATUS_REVOKED);
    return false;
  }
  if (has(given_up(*context.control), rank)) return false;
  const RankSet peer = only(rank);
  BoundedWait wait(*context.control, members.epoch, deadline_ns, longest_sleep_ns);
  while (true) {
    wait.begin_look();
    const RankSet left = wait.is_slow() ? left_among(members, peer, context.shape.lanes) : RankSet{};
    const Look seen = look();
    if (seen == Look::kReady) return true;
    if (seen == Look::kNever) {
      report(*context.control, EEP_STATUS_REVOKED);
      return false;
    }
    if (is_empty(wait.pause(peer, left))) return false;
  }
}

// ---- source ----

Lane::Stream& sent_in(Lane::Stream& stream, const Members& members, uint32_t to) {
  if (stream.epoch == members.epoch) return stream;
  uint64_t before = stream.sequence ? eep_flag_make(stream.epoch, stream.sequence, 0) : stream.before;
  if (stream.incarnation != members.incarnation[to]) before = 0;  // its successor has pipes of its own
  stream = {members.epoch, 0, before, 0, members.incarnation[to]};
  return stream;
}

bool find_lane_of(eep_context& context, const Members& members, uint32_t to, uint64_t deadline_ns,
                  Lane::Stream& stream) {
  if (stream.sequence && load_acquire(members.page[to]->groups[stream.lane]) == members.group) return true;
  knock(members, only(to));
  return wait_for_peer(context, members, to, deadline_ns, kLookForLane, [&] {
    const int lane = find_lane(members, to, context.shape.lanes);
    if (lane >= 0) stream.lane = static_cast<uint32_t>(lane);
    return lane >= 0 ? Look::kReady : Look::kNotYet;
  });
}

// Whether the next cell may be filled: what it held before was taken, or is wanted no more.
Look look_for_room(const eep_pipe& pipe, const eep_control_page& destination, Lane::Stream& stream) {
  const uint64_t taken = load_acquire(pipe.taken), epoch = taken >> 40;
  if (epoch > stream.epoch) return Look::kNever;
  if (const uint64_t before = stream.before) {
    if (epoch <= before >> 40 && taken != before && !is_revoked(destination, before >> 40)) return Look::kNotYet;
    stream.before = 0;
  }
  const uint64_t last = epoch == stream.epoch ? taken >> 16 : 0;
  return ((stream.sequence + 1 - last) & EEP_ROUND_MASK) <= EEP_PIPE_CELLS ? Look::kReady : Look::kNotYet;
}

// ---- destination ----

// Tells the source at once that we take nothing of an earlier epoch any more.
Lane::Stream& received_in(eep_context& context, const Members& members, uint32_t source) {
  Lane::Stream& stream = context.lanes.lane[members.lane].received[source];
  if (stream.epoch == members.epoch) return stream;
  const LaneView own(context.shape, context.at, context.region, members.lane);
  stream = {members.epoch, 0, 0, 0, members.incarnation[source]};
  store_release(own.pipe(members.slot[source])->taken, eep_flag_make(members.epoch, 0, 0));
  ring(*members.control[source]);
  return stream;
}

// Whether the source fills cells of a later epoch: then no more of ours will come.
bool is_ahead(const eep_context& context, const Members& members, uint32_t source) {
  const LaneView own(context.shape, context.at, context.region, members.lane);
  for (uint64_t i = 0; i < EEP_PIPE_CELLS; ++i) {
    const eep_pipe_cell& cell = *own.cell(members.slot[source], i);
    if (load_acquire(cell.flag) >> 40 > members.epoch && load_relaxed(cell.group) == members.group) return true;
  }
  return false;
}

const eep_pipe_cell* next_cell(const eep_context& context, const Members& members, uint32_t source, uint64_t sequence) {
  const LaneView own(context.shape, context.at, context.region, members.lane);
  const eep_pipe_cell& cell = *own.cell(members.slot[source], sequence);
  const bool there =
      load_acquire(cell.flag) == eep_flag_make(members.epoch, sequence, 0) && load_relaxed(cell.group) == members.group;
  return there ? &cell : nullptr;
}

bool is_unchanged(const eep_pipe_cell& cell, uint64_t epoch, uint64_t sequence) {
  std::atomic_thread_fence(std::memory_order_acquire);
  return load_acquire(cell.flag) == eep_flag_make(epoch, sequence, 0);
}

// The same, for a message that was asked for: only a source in a later epoch fills a cell before it was taken.
bool is_still_there(eep_context& context, const eep_pipe_cell& cell, uint64_t epoch, uint64_t sequence) {
  const bool unchanged = is_unchanged(cell, epoch, sequence);
  if (!unchanged) report(*context.control, EEP_STATUS_REVOKED);
  return unchanged;
}

void condemn(eep_context& context, uint32_t rank) {
  set_bit(context.control->corrupt, rank);
  set_bit(context.control->dropped, rank);
  report(*context.control, EEP_STATUS_CORRUPT);
}

// The next message of `rank`, if it is there; otherwise `ahead` says whether none will come in this epoch.
bool find_message(eep_context& context, const Members& members, uint32_t rank, RankSet& ahead, eep_message& message) {
  const uint64_t sequence = received_in(context, members, rank).sequence + 1;
  const eep_pipe_cell* cell = next_cell(context, members, rank, sequence);
  if (!cell && is_ahead(context, members, rank)) add(ahead, rank);
  if (!cell) return false;
  const eep_message found{load_relaxed(cell->tag), load_relaxed(cell->bytes), rank, 1};
  const uint64_t offset = load_relaxed(cell->offset);
  if (!is_unchanged(*cell, members.epoch, sequence)) return false;
  if (offset)
    condemn(context, rank);
  else
    message = found;
  return !offset;
}

}  // namespace
}  // namespace eep

int eep_send(eep_context* context, uint32_t lane, uint32_t to, uint64_t tag, const void* data, uint64_t bytes,
             uint64_t deadline_ns, uint32_t* done) {
  using namespace eep;
  Members members;
  if (const int error = take_members(*context, lane, "send", members)) return error;
  if (const int error = check_peer(*context, members, to, "send")) return error;
  if (bytes && !data) return fail(EEP_ERROR_ARGUMENT, "send: the message has bytes, but no address was given for them");
  *done = 0;
  Lane::Stream& stream = sent_in(context->lanes.lane[lane].sent[to], members, to);
  if (!find_lane_of(*context, members, to, deadline_ns, stream)) return EEP_OK;
  const LaneView there(context->shape, context->at, members.region[to], stream.lane);
  const uint32_t slot = members.slot[members.me];
  const uint64_t part = context->shape.pipe_bytes;
  uint64_t offset = 0;
  do {
    if (!wait_for_peer(*context, members, to, deadline_ns, kLookForLeft,
                       [&] { return look_for_room(*there.pipe(slot), *members.page[to], stream); }))
      return EEP_OK;
    const uint64_t sequence = stream.sequence + 1;
    eep_pipe_cell& cell = *there.cell(slot, sequence);
    // A destination that still reads a cell of an epoch that is over finds the flag gone.
    store_relaxed(cell.flag, uint64_t{0});
    std::atomic_thread_fence(std::memory_order_release);
    const uint64_t size = std::min(part, bytes - offset);
    store_relaxed(cell.group, members.group);
    store_relaxed(cell.tag, tag);
    store_relaxed(cell.bytes, bytes);
    store_relaxed(cell.offset, offset);
    if (size) std::memcpy(&cell + 1, static_cast<const uint8_t*>(data) + offset, size);
    store_release(cell.flag, eep_flag_make(members.epoch, sequence, 0));
    ring(*members.control[to]);
    stream.sequence = sequence;
    offset += size;
    if (offset < bytes) fault::pass(fault::kSendMidMessage);
  } while (offset < bytes);
  *done = 1;
  return EEP_OK;
}

int eep_probe(eep_context* context, uint32_t lane, const eep_rank_set* asked, uint32_t pokes, uint64_t deadline_ns,
              eep_message* message) {
  using namespace eep;
  Members members;
  if (const int error = take_members(*context, lane, "probe", members)) return error;
  if (!context->shape.pipe_bytes)
    return fail(EEP_ERROR_ARGUMENT, "probe: this region has no pipes for messages; make it with shape.pipe_bytes");
  *message = {};
  RankSet sources = (*asked & members.active) - only(members.me), ahead = {};
  BoundedWait wait(*context->control, members.epoch, deadline_ns, kLookForLeft);
  while (!is_revoked(*context->control, members.epoch)) {
    wait.begin_look();
    sources -= given_up(*context->control);
    const RankSet left = wait.is_slow() ? left_among(members, sources, context->shape.lanes) : RankSet{};
    bool is_found = false;
    for_each_rank(sources, [&](uint32_t rank) {
      if (!is_found) is_found = find_message(*context, members, rank, ahead, *message);
    });
    if (is_found) return EEP_OK;
    // No rank is at fault when this wait ends: the control page names none.
    if (!is_empty(ahead) && is_empty(sources - ahead)) report(*context->control, EEP_STATUS_REVOKED);
    sources -= left | ahead;
    if (is_empty(sources) || !deadline_ns || context->pokes.load(std::memory_order_seq_cst) != pokes || !wait.rest(1))
      break;
  }
  return EEP_OK;
}

uint32_t eep_pokes(eep_context* context) { return context->pokes.load(std::memory_order_seq_cst); }

void eep_poke(eep_context* context) {
  context->pokes.fetch_add(1, std::memory_order_seq_cst);
  eep::ring_all(*context->control);
}

int eep_recv(eep_context* context, uint32_t lane, uint32_t source, void* data, uint64_t bytes, uint64_t deadline_ns,
             uint32_t* done) {
  using namespace eep;
  Members members;
  if (const int error = take_members(*context, lane, "receive", members)) return error;
  if (const int error = check_peer(*context, members, source, "receive")) return error;
  if (bytes && !data)
    return fail(EEP_ERROR_ARGUMENT, "receive: the message has bytes, but no address was given to put them");
  *done = 0;
  Lane::Stream& stream = received_in(*context, members, source);
  const LaneView own(context->shape, context->at, context->region, lane);
  const uint64_t part = context->shape.pipe_bytes;
  uint64_t offset = 0, tag = 0;
  do {
    const uint64_t sequence = stream.sequence + 1;
    const eep_pipe_cell* cell = nullptr;
    if (!wait_for_peer(*context, members, source, deadline_ns, kLookForLeft, [&] {
          cell = next_cell(*context, members, source, sequence);
          if (cell) return Look::kReady;
          return is_ahead(*context, members, source) ? Look::kNever : Look::kNotYet;
        }))
      return EEP_OK;
    const uint64_t whole = load_relaxed(cell->bytes), at = load_relaxed(cell->offset), name = load_relaxed(cell->tag);
    if (!is_still_there(*context, *cell, members.epoch, sequence)) return EEP_OK;
    if (!offset) {
      if (whole != bytes && !at)
        return fail(EEP_ERROR_ARGUMENT, "receive: the message from rank %u has %llu bytes, there is room for %llu",
                    source, static_cast<unsigned long long>(whole), static_cast<unsigned long long>(bytes));
      tag = name;
    }
    if (whole != bytes || at != offset || name != tag) {
      condemn(*context, source);
      return EEP_OK;
    }
    const uint64_t size = std::min(part, bytes - offset);
    if (size) std::memcpy(static_cast<uint8_t*>(data) + offset, cell + 1, size);
    if (!is_still_there(*context, *cell, members.epoch, sequence)) return EEP_OK;
    stream.sequence = sequence;
    store_release(own.pipe(members.slot[source])->taken, eep_flag_make(members.epoch, sequence, 0));
    ring(*members.control[source]);
    offset += size;
  } while (offset < bytes);
  *done = 1;
  return EEP_OK;
}
