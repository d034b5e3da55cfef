// The rounds of one call of a collective: entering them in step, saying so, and knowing whose part can be taken.
//
//   begin()    no member can be reading the half of our outbox that this round uses: fill it
//   publish()  stamp it and tell every member
//   await()    whose part is there, is of the same call, and was made with the same members
//   taken()    after reading: whose part did not change meanwhile
//
// A rank does not wait again for a member that is lost, and tells the others of the loss with the next round. So no
// member takes a sum that lacks a part for a whole one. The call goes on in step with those that are left; only a
// revoke and a mismatch end it early.
//
// Members enter a new view one after the other, and rounds begin at 1 again in each: a slow member may still be in the
// last round of the old epoch when a fast one enters the first of the new. So the halves alternate for ever, and the
// flag tells which half is meant. The first flag of the new epoch also says that its sender is done with the old one.
// Whether the sender left there what we want, the stamp of its other half tells. If not, it will never come, and the
// call ends as if revoked.
#ifndef EEP_CPU_ROUNDS_H_
#define EEP_CPU_ROUNDS_H_

#include "common/fault.h"
#include "common/lane_letters.h"
#include "cpu/context.h"

namespace eep {

class Rounds {
 public:
  // `active` are the members that take part: all that are active, unless some of them meet in a part of their own.
  Rounds(eep_context& context, const Members& members, const RankSet& active, uint64_t call, uint64_t bytes,
         uint64_t deadline_ns, uint32_t part = 0);

  // The half to fill, or null when the call is over.
  uint8_t* begin();
  // `parts_of(rank)` says what of the half a member reads. Those on other hosts get that and no more.
  template <typename PartsOf>
  void publish(PartsOf parts_of) {
    stamp();
    const RankSet others = reachable_ - only(members_.me);
    const uint32_t middle = count(others) / 2;
    uint32_t sent = 0;
    for_each_rank(others, [&](uint32_t rank) {
      if (sent++ == middle) fault::pass(fault::kCollectiveMidFlags);
      has(members_.remote, rank) ? tell_remote(rank, parts_of(rank)) : tell(rank);
    });
    fault::pass(fault::kCollectiveAfterFlags);
  }
  RankSet await(const RankSet& sources);
  RankSet taken(const RankSet& sources);
  // Ends the call with EEP_ERROR_MISMATCH; the sentence was given to fail().
  void refuse() { mismatch_ = true; }

  bool is_over() const { return over_ || mismatch_; }
  bool is_mismatch() const { return mismatch_; }
  // The members that took part from beginning to end, this rank included.
  RankSet answered() const { return is_over() ? RankSet{} : sound_; }

  // What `rank` put into its outbox in this round, or the one before.
  const uint8_t* outbox(uint32_t rank, bool previous = false) const {
    return view(rank).outbox(half_of(rank, state_.round - previous));
  }
  uint64_t bytes_of(uint32_t rank) const {
    if (rank == members_.me) return bytes_;
    return load_relaxed(own_.mailbox(members_.slot[rank])->bytes[half_of(rank, state_.round)]);
  }
  // As taken(), for what was read of the round before.
  RankSet taken_before(const RankSet& sources);

 private:
  void stamp();
  void tell(uint32_t rank);
  void tell_remote(uint32_t rank, const Parts& parts);
  PartView view(uint32_t rank) const;
  void find_lanes();
  void enter_epoch();
  // Until no member reads, in the epoch before, what our first round of this one overwrites.
  void wait_for_readers();
  // The half in which `rank` has its part of `round`, or one of these.
  enum : int { kNotYet = -1, kNever = -2 };
  int find_half(uint32_t rank, uint64_t round) const;
  bool has_left_epoch(uint32_t rank) const;
  // Whether that half of its outbox holds `round` of our group, as its stamp says.
  bool is_held(uint32_t rank, uint64_t half, uint64_t round) const;
  // The half that was found for a member, or our own.
  uint64_t half_of(uint32_t rank, uint64_t round) const { return half_[round % 2][rank]; }
  // A member is in a later epoch already: this one is over, though no revoke has reached us.
  void leave_epoch();
  RankSet wait_until_entered(const RankSet& sources, uint64_t round);
  // Whether the words of `rank` about `round` are those of our own call; sets what follows if they are not.
  bool agrees(uint32_t rank, uint64_t round);
  void drop(const RankSet& ranks);
  void distrust(const RankSet& ranks, eep_status why);
  RankSet unchanged(const RankSet& sources, uint64_t round);

  eep_context& context_;
  const Members& members_;
  const RankSet active_;
  Lane::Calls& state_;
  const uint32_t part_;
  const PartView own_;
  const uint64_t call_, bytes_, deadline_ns_;
  RankSet reachable_;  // the members that we tell and wait for
  RankSet sound_;      // those of them whose part was whole in every round; what we tell the others of this call
  uint64_t told_[2];   // eep_members_word() of what we told, by round % 2
  uint8_t half_[2][EEP_MAX_RANKS];  // by round % 2
  bool first_ = true, over_ = false, mismatch_ = false;
};

}  // namespace eep

#endif  // EEP_CPU_ROUNDS_H_
