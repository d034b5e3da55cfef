#include "cpu/rounds.h"

#include <cstdio>
#include <initializer_list>

#include "common/fault.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// The longest sleep between two looks: a peer that leaves or opens its lane does not ring our doorbell.
constexpr uint64_t kLookForLeft = 20'000'000, kLookForLane = 1'000'000;

constexpr const char* kKinds[] = {"barrier", "broadcast", "all_reduce",     "reduce",    "all_gather",
                                  "gather",  "scatter",   "reduce_scatter", "all_to_all"};
constexpr const char* kElements[] = {"u8",  "i8",  "u16",  "i16", "u32", "i32",  "u64",
                                     "i64", "f16", "bf16", "f32", "f64", "bool", "bytes"};
constexpr const char* kReductions[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};

template <size_t count>
const char* name_of(const char* const (&names)[count], uint64_t index) {
  return index < count ? names[index] : "unknown";
}

struct Sentence {
  char text[160];
};

// "all_reduce (sum) of 64 bytes (f32)"
Sentence describe(uint64_t call, uint64_t bytes) {
  const uint64_t kind = call & 0xff;
  const bool reduces = kind == EEP_ALL_REDUCE || kind == EEP_REDUCE || kind == EEP_REDUCE_SCATTER;
  const bool rooted = kind == EEP_BROADCAST || kind == EEP_REDUCE || kind == EEP_GATHER || kind == EEP_SCATTER;
  char reduction[16] = "", root[24] = "";
  if (reduces) std::snprintf(reduction, sizeof reduction, " (%s)", name_of(kReductions, call >> 16 & 0xff));
  if (rooted) std::snprintf(root, sizeof root, " with root %u", unsigned(call >> 24 & 0xffff));
  Sentence sentence;
  if (kind == EEP_BARRIER)
    std::snprintf(sentence.text, sizeof sentence.text, "barrier");
  else
    std::snprintf(sentence.text, sizeof sentence.text, "%s%s of %llu bytes (%s)%s", name_of(kKinds, kind), reduction,
                  static_cast<unsigned long long>(bytes), name_of(kElements, call >> 8 & 0xff), root);
  return sentence;
}

}  // namespace

Rounds::Rounds(eep_context& context, const Members& members, const RankSet& active, uint64_t call, uint64_t bytes,
               uint64_t deadline_ns, uint32_t part)
    : context_(context),
      members_(members),
      active_(active),
      state_(context.lanes.lane[members.lane].calls[part]),
      part_(part),
      own_(LaneView(context.shape, context.at, context.region, members.lane).part(part)),
      call_(call),
      bytes_(bytes),
      deadline_ns_(deadline_ns),
      reachable_(active - (given_up(*context.control) - only(members.me))),
      sound_(reachable_),
      told_{},
      half_{} {
  if (state_.epoch != members.epoch) enter_epoch();
}

// All count from one again, so that joiners are in step.
void Rounds::enter_epoch() {
  if (state_.round) {
    state_.read_epoch = state_.epoch, state_.read_round = state_.round;
    state_.readers = state_.told_all ? state_.active - only(members_.me) : RankSet{};
    // A member that was not told of a round must not take an earlier stamp for one of what lies here now.
    if (!state_.told_all)
      for (uint64_t half : {0, 1}) store_relaxed(*own_.stamp(half), uint64_t{0});
  }
  RankSet same = {};
  for_each_rank(active_, [&](uint32_t rank) {
    if (state_.incarnation[rank] == members_.incarnation[rank]) add(same, rank);
    state_.incarnation[rank] = members_.incarnation[rank];
  });
  state_.readers &= same;
  state_.epoch = members_.epoch;
  state_.active = active_;
  state_.round = 0;
  state_.entered = state_.known = {};
  state_.told_all = true;
}

PartView Rounds::view(uint32_t rank) const {
  if (rank == members_.me) return own_;
  return LaneView(context_.shape, context_.at, members_.region[rank], state_.lane_of[rank]).part(part_);
}

void Rounds::drop(const RankSet& ranks) {
  reachable_ -= ranks;
  sound_ -= ranks;
}

void Rounds::distrust(const RankSet& ranks, eep_status why) {
  if (is_empty(ranks)) return;
  sound_ -= ranks;
  report(*context_.control, why);
}

// Members open their lanes in any order and at any time; one that has not done so yet is waited for like a flag.
void Rounds::find_lanes() {
  const RankSet others = reachable_ - only(members_.me);
  RankSet missing = {};
  for_each_rank(others, [&](uint32_t rank) {
    const bool known = has(state_.known, rank);
    if (!known || load_acquire(members_.page[rank]->groups[state_.lane_of[rank]]) != members_.group) add(missing, rank);
  });
  state_.known |= others - missing;
  knock(members_, missing);
  BoundedWait wait(*context_.control, members_.epoch, deadline_ns_, kLookForLane);
  while (!is_empty(missing)) {
    wait.begin_look();
    const RankSet left = left_among(members_, missing, context_.shape.lanes);
    for_each_rank(missing, [&](uint32_t rank) {
      const int lane = find_lane_to_read(members_, rank, context_.shape.lanes);
      if (lane < 0) return;
      state_.lane_of[rank] = static_cast<uint8_t>(lane);
      add(state_.known, rank);
      remove(missing, rank);
    });
    if (!is_empty(missing)) {
      const RankSet still = wait.pause(missing, missing & left);
      drop(missing - still);
      missing = still;
    }
  }
}

void Rounds::leave_epoch() {
  over_ = true;
  report(*context_.control, EEP_STATUS_REVOKED);
}

// Every member that entered the last round is done with the one before, whose half our next round uses. A member that
// left the epoch, or knows that it is over, needs nothing of it. A rank waits here only if it told all members of every
// round, and only for members that came less far than itself: so no circle of ranks can wait for each other.
void Rounds::wait_for_readers() {
  const RankSet readers = state_.readers & reachable_;
  const RankSet arrived =
      wait_for(readers, {*context_.control, members_.epoch, deadline_ns_, kLookForLeft}, [&](uint32_t rank) {
        const eep_lane_mailbox& mailbox = *own_.mailbox(members_.slot[rank]);
        const uint64_t flag = load_acquire(mailbox.flag), epoch = state_.read_epoch, round = state_.read_round;
        return flag >> 40 > epoch || eep_flag_is(flag, epoch, round) || eep_flag_is(flag, epoch, round + 1) ||
               is_revoked(*members_.page[rank], epoch);
      });
  drop(readers - arrived);
  state_.readers -= arrived;
}

// A lane may have served another group before, with rounds of the same numbers. The writer clears a stamp, then names
// the group, then stamps: so a group that is ours before the stamp is read rules out a stamp of an earlier group, and
// after it one of a later.
bool Rounds::is_held(uint32_t rank, uint64_t half, uint64_t round) const {
  const PartView theirs = view(rank);
  if (load_acquire(theirs.stamp(half)[1]) != members_.group) return false;
  if (load_acquire(*theirs.stamp(half)) != eep_flag_make(members_.epoch, round, 0)) return false;
  return load_relaxed(theirs.stamp(half)[1]) == members_.group;
}

bool Rounds::has_left_epoch(uint32_t rank) const {
  const eep_lane_mailbox& mailbox = *own_.mailbox(members_.slot[rank]);
  return load_acquire(mailbox.flag) >> 40 > members_.epoch && load_relaxed(mailbox.group) == members_.group;
}

int Rounds::find_half(uint32_t rank, uint64_t round) const {
  const eep_lane_mailbox& mailbox = *own_.mailbox(members_.slot[rank]);
  const uint64_t flag = load_acquire(mailbox.flag);
  const int told = flag & 1, other = 1 - told;
  if (load_relaxed(mailbox.group) != members_.group) return kNotYet;
  if (eep_flag_is(flag, members_.epoch, round)) return told;
  // A member may be one round ahead already; it cannot be two.
  if (eep_flag_is(flag, members_.epoch, round + 1)) return other;
  if (flag >> 40 <= members_.epoch) return kNotYet;
  return is_held(rank, static_cast<uint64_t>(other), round) ? other : kNever;
}

RankSet Rounds::wait_until_entered(const RankSet& sources, uint64_t round) {
  BoundedWait wait(*context_.control, members_.epoch, deadline_ns_, kLookForLeft);
  RankSet missing = sources, arrived = {};
  while (!is_empty(missing)) {
    wait.begin_look();
    // A member that says it left has written all that it owed before. What is not here on a look after that never
    // comes.
    const RankSet left = wait.is_slow() ? left_among(members_, missing, context_.shape.lanes) : RankSet{};
    for_each_rank(missing, [&](uint32_t rank) {
      const int half = find_half(rank, round);
      if (half == kNever) leave_epoch();
      if (half < 0) return;
      half_[round % 2][rank] = static_cast<uint8_t>(half);
      add(arrived, rank);
    });
    if (over_) return arrived;
    missing -= arrived;
    if (!is_empty(missing)) missing = wait.pause(missing, missing & left);
  }
  drop(sources - arrived);
  if (arrived != sources && is_revoked(*context_.control, members_.epoch)) over_ = true;
  return arrived;
}

bool Rounds::agrees(uint32_t rank, uint64_t round) {
  const eep_lane_mailbox& mailbox = *own_.mailbox(members_.slot[rank]);
  const uint64_t half = half_of(rank, round), call = load_relaxed(mailbox.call[half]),
                 bytes = load_relaxed(mailbox.bytes[half]), members = load_relaxed(mailbox.members[half]);
  std::atomic_thread_fence(std::memory_order_acquire);
  // Only a member that dropped us enters yet another round before we enter the next one.
  if (find_half(rank, round) != static_cast<int>(half)) {
    distrust(only(rank), EEP_STATUS_TORN);
    return false;
  }
  if (call != call_ || (bytes != bytes_ && (call & 0xff) != EEP_ALL_TO_ALL)) {
    fail(EEP_ERROR_MISMATCH, "rank %u called %s while this rank called %s", rank, describe(call, bytes).text,
         describe(call_, bytes_).text);
    refuse();
    return false;
  }
  if (members == told_[round % 2]) return true;
  distrust(only(rank), EEP_STATUS_SUSPECT);
  return false;
}

uint8_t* Rounds::begin() {
  if (is_over()) return nullptr;
  if (first_) find_lanes();
  if (!is_empty(state_.readers)) wait_for_readers();
  // Every member that entered the last round is done with the one before, whose half this round uses.
  if (const RankSet behind = reachable_ - state_.entered; state_.round && !is_empty(behind)) {
    const RankSet arrived = wait_until_entered(behind, state_.round);
    // A member that is done with this epoch will not enter another round of it.
    for_each_rank(arrived, [&](uint32_t rank) {
      if (has_left_epoch(rank)) leave_epoch();
    });
    // A member may have called something else, and this rank did not need to hear of it in time. Of an earlier call it
    // is no longer news.
    if (!first_ && !over_) for_each_rank(arrived, [&](uint32_t rank) { agrees(rank, state_.round); });
  }
  if (is_over() || is_revoked(*context_.control, members_.epoch)) {
    if (!mismatch_) leave_epoch();
    return nullptr;
  }
  first_ = false;
  ++state_.round;
  state_.half ^= 1;
  state_.entered = only(members_.me);
  half_[state_.round % 2][members_.me] = static_cast<uint8_t>(state_.half);
  store_relaxed(*own_.stamp(state_.half), uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  return own_.outbox(state_.half);
}

void Rounds::stamp() {
  fault::pass(fault::kCollectiveFilled);
  const uint64_t half = state_.half;
  store_relaxed(own_.stamp(half)[1], members_.group);
  store_release(*own_.stamp(half), eep_flag_make(members_.epoch, state_.round, 0));
  told_[state_.round % 2] = eep_members_word(&sound_);
  if (reachable_ != active_) state_.told_all = false;
}

void Rounds::tell(uint32_t rank) {
  const uint64_t half = state_.half;
  eep_lane_mailbox& mailbox = *view(rank).mailbox(members_.slot[members_.me]);
  store_relaxed(mailbox.group, members_.group);
  store_relaxed(mailbox.call[half], call_);
  store_relaxed(mailbox.bytes[half], bytes_);
  store_relaxed(mailbox.members[half], told_[state_.round % 2]);
  store_release(mailbox.flag, eep_flag_make(members_.epoch, state_.round, half));
  ring(*members_.control[rank]);
}

void Rounds::tell_remote(uint32_t rank, const Parts& parts) {
  const uint64_t half = state_.half;
  write_letter(letter_of(view(rank), half), {eep_flag_make(members_.epoch, state_.round, half),
                                             members_.group,
                                             call_,
                                             bytes_,
                                             told_[state_.round % 2],
                                             parts,
                                             {}});
  ring(*members_.control[rank]);
}

RankSet Rounds::await(const RankSet& asked) {
  const RankSet sources = asked & reachable_, own = only(members_.me);
  RankSet usable = sources & own;
  const RankSet arrived = wait_until_entered(sources - own, state_.round);
  state_.entered |= arrived;
  if (over_) return {};
  for_each_rank(arrived, [&](uint32_t rank) {
    if (!mismatch_ && agrees(rank, state_.round)) add(usable, rank);
  });
  if (mismatch_) return {};
  fault::pass(fault::kCollectiveBeforeCopy);
  return usable;
}

RankSet Rounds::unchanged(const RankSet& sources, uint64_t round) {
  std::atomic_thread_fence(std::memory_order_acquire);
  RankSet torn = {};
  for_each_rank(sources, [&](uint32_t rank) {
    if (!is_held(rank, half_of(rank, round), round)) add(torn, rank);
  });
  distrust(torn, EEP_STATUS_TORN);
  return sources - torn;
}

RankSet Rounds::taken(const RankSet& sources) { return unchanged(sources, state_.round); }
RankSet Rounds::taken_before(const RankSet& sources) { return unchanged(sources, state_.round - 1); }

}  // namespace eep
