#include "cpu/hierarchy.h"

#include <algorithm>
#include <cstring>

#include "cpu/rounds.h"
#include "cpu/wait.h"

namespace eep {
namespace {

constexpr uint64_t kAlignment = 64;

// What a leader says of the blocks behind it.
struct Note {
  RankSet whole;      // whose blocks are whole
  uint64_t mismatch;  // 1: a member called something else, and there are no blocks
  uint64_t reserved[7];
};
static_assert(sizeof(Note) % kAlignment == 0);

// Which host each member is on; hosts in the order of their first members.
class Hosts {
 public:
  explicit Hosts(const Members& all) {
    in_order(all, all.active, [&](uint32_t, uint32_t rank) {
      uint16_t& slot = slot_of(all, all.host[rank]);
      if (!slot) leader_[count_] = rank, slot = static_cast<uint16_t>(++count_);
      host_of_[rank] = static_cast<uint16_t>(slot - 1);
    });
    own_ = host_of_[all.me];
    in_order(all, all.active, [&](uint32_t, uint32_t rank) {
      if (host_of_[rank] == own_) add(near_, rank);
    });
    for (uint32_t host = 0; host < count_; ++host) add(leaders_, leader_[host]);
  }

  uint32_t count() const { return count_; }
  uint32_t host_of(uint32_t rank) const { return host_of_[rank]; }
  uint32_t leader_of(uint32_t host) const { return leader_[host]; }
  uint32_t own_leader() const { return leader_[own_]; }
  const RankSet& near() const { return near_; }  // the members of this host
  const RankSet& leaders() const { return leaders_; }

 private:
  static constexpr uint32_t kSlots = 2 * EEP_MAX_RANKS;

  // Where the number of a host is kept, counted from 1; 0 if it has none yet. A table of hashes: a search for every
  // member among all hosts would take the square of their number.
  uint16_t& slot_of(const Members& all, uint64_t id) {
    uint32_t at = eep_mix(id) % kSlots;
    while (number_[at] && all.host[leader_[number_[at] - 1]] != id) at = (at + 1) % kSlots;
    return number_[at];
  }

  uint16_t number_[kSlots] = {};
  uint16_t host_of_[EEP_MAX_RANKS] = {};  // by rank
  uint32_t leader_[EEP_MAX_RANKS];        // by host
  uint32_t count_ = 0, own_ = 0;
  RankSet near_ = {}, leaders_ = {};
};

class Call {
 public:
  Call(eep_context& context, const Members& members, eep_collective_args& args, const HierarchicalCall& call)
      : context_(context),
        members_(members),
        args_(args),
        reduce_(call.reduce),
        hosts_(members),
        leader_(hosts_.own_leader()),
        local_(context, members, hosts_.near(), call.header, args.bytes, call.deadline_ns, kHostPart),
        leaders_(context, members, hosts_.leaders(), call.header, args.bytes, call.deadline_ns, kLeaderPart),
        whole_(members.active) {}

  int run() {
    const uint64_t chunk =
        (context_.shape.lane_bytes - sizeof(Note)) / count(members_.active) / kAlignment * kAlignment;
    uint64_t begin = 0;
    do {
      const uint64_t size = std::min(chunk, args_.bytes - begin);
      uint8_t* half = local_.begin();
      if (!half) break;
      if (size) std::memcpy(half, static_cast<const uint8_t*>(args_.in) + begin, size);
      local_.publish([](uint32_t) { return Parts{}; });
      members_.me == leader_ ? lead(begin, size) : follow(begin, size);
      begin += size;
    } while (begin < args_.bytes && !local_.is_over() && !leaders_.is_over());
    if (local_.is_mismatch() || leaders_.is_mismatch()) return EEP_ERROR_MISMATCH;
    if (!local_.is_over() && !leaders_.is_over()) args_.answered = whole_ - (hosts_.near() - local_.answered());
    return EEP_OK;
  }

 private:
  // Brings the blocks of this host across, and those of all to this host.
  void lead(uint64_t begin, uint64_t size) {
    const RankSet here = local_.await(hosts_.near());
    Note own{here, local_.is_mismatch(), {}};
    uint8_t* out = leaders_.begin();
    if (!out) return pass_on({{}, leaders_.is_mismatch(), {}});
    uint64_t sent = 0;
    if (!own.mismatch)
      in_order(members_, hosts_.near(), [&](uint32_t, uint32_t rank) {
        if (size && has(here, rank)) std::memcpy(out + sizeof own + sent, local_.outbox(rank), size);
        sent += size;
      });
    own.whole &= local_.taken(here);
    std::memcpy(out, &own, sizeof own);
    leaders_.publish([&](uint32_t) { return Parts{{0, 0}, {sizeof own + sent, 0}}; });
    if (own.mismatch) return;  // the members of this host have found out themselves
    const RankSet usable = leaders_.await(hosts_.leaders());
    if (leaders_.is_mismatch()) return pass_on({{}, 1, {}});
    gather(begin, size, usable);
  }

  // The blocks that the leaders have, to the members of this host: all of them, or what they are reduced to.
  void gather(uint64_t begin, uint64_t size, const RankSet& usable) {
    uint8_t* half = local_.begin();
    if (!half) return;
    Note all{{}, 0, {}};
    const Note* note[EEP_MAX_RANKS];      // by host; null if there is nothing of that host
    const uint8_t* next[EEP_MAX_RANKS];   // by host: the block of its next member
    const uint8_t* block[EEP_MAX_RANKS];  // by rank, of those that are whole
    for (uint32_t host = 0; host < hosts_.count(); ++host) {
      note[host] = nullptr;
      if (!has(usable, hosts_.leader_of(host))) continue;
      const uint8_t* at = leaders_.outbox(hosts_.leader_of(host));
      note[host] = reinterpret_cast<const Note*>(at);
      next[host] = at + sizeof(Note);
      all.mismatch |= note[host]->mismatch;
    }
    in_order(members_, members_.active, [&](uint32_t, uint32_t rank) {
      const uint32_t host = hosts_.host_of(rank);
      if (!note[host]) return;
      if (has(note[host]->whole, rank)) add(all.whole, rank), block[rank] = next[host];
      next[host] += size;
    });
    const RankSet whole = all.whole;
    uint8_t* to = half + sizeof all;
    if (reduce_) {
      const uint8_t* sources[EEP_MAX_RANKS];
      uint32_t found = 0;
      in_order(members_, whole, [&](uint32_t, uint32_t rank) { sources[found++] = block[rank]; });
      if (size && found) reduce_(sources, found, size, to);
    } else {
      in_order(members_, members_.active, [&](uint32_t, uint32_t rank) {
        if (size && has(whole, rank)) std::memcpy(to, block[rank], size);
        to += size;
      });
    }
    const RankSet torn = usable - leaders_.taken(usable);
    if (!is_empty(torn))
      for_each_rank(whole, [&](uint32_t rank) {
        if (has(torn, hosts_.leader_of(hosts_.host_of(rank)))) remove(all.whole, rank);
      });
    std::memcpy(half, &all, sizeof all);
    local_.publish([](uint32_t) { return Parts{}; });
    take(all, half + sizeof all, begin, size);
  }

  // Nothing came of it: the members of this host must hear so, or they wait.
  void pass_on(const Note& note) {
    uint8_t* half = local_.begin();
    if (!half) return;
    std::memcpy(half, &note, sizeof note);
    local_.publish([](uint32_t) { return Parts{}; });
    whole_ &= note.whole;
  }

  void follow(uint64_t begin, uint64_t size) {
    if (!local_.begin()) return;
    local_.publish([](uint32_t) { return Parts{}; });
    const RankSet leader = only(leader_);
    if (is_empty(local_.await(leader))) {
      remove(whole_, leader_);
      return;
    }
    Note note;
    std::memcpy(&note, local_.outbox(leader_), sizeof note);
    take(note, local_.outbox(leader_) + sizeof note, begin, size);
    if (is_empty(local_.taken(leader))) remove(whole_, leader_);
  }

  void take(const Note& note, const uint8_t* from, uint64_t begin, uint64_t size) {
    if (note.mismatch) {
      fail(EEP_ERROR_MISMATCH,
           "the ranks of another host called something else than this rank; the first rank of each host says what");
      return local_.refuse();
    }
    whole_ &= note.whole;
    if (const RankSet missing = members_.active - note.whole; !is_empty(missing)) {
      set_bits(context_.control->dropped, missing - only(members_.me));
      report(*context_.control, EEP_STATUS_SUSPECT);
    }
    if (!size) return;
    if (reduce_) {
      std::memcpy(static_cast<uint8_t*>(args_.out) + begin, from, size);
      return;
    }
    in_order(members_, members_.active, [&](uint32_t position, uint32_t rank) {
      if (has(note.whole, rank)) std::memcpy(static_cast<uint8_t*>(args_.out_blocks[position]) + begin, from, size);
      from += size;
    });
  }

  eep_context& context_;
  const Members& members_;
  eep_collective_args& args_;
  const Reduce reduce_;
  const Hosts hosts_;
  const uint32_t leader_;
  Rounds local_, leaders_;
  RankSet whole_;
};

}  // namespace

bool is_hierarchical(const eep_context& context, const Members& members) {
  if (is_empty(members.remote) || context.shape.lane_parts < kHostParts) return false;
  const uint32_t hosts = Hosts(members).count(), size = count(members.active);
  return hosts > 1 && hosts < size && context.shape.lane_bytes >= sizeof(Note) + uint64_t{size} * kAlignment;
}

int run_hierarchical(eep_context& context, const Members& members, eep_collective_args& args,
                     const HierarchicalCall& call) {
  return Call(context, members, args, call).run();
}

}  // namespace eep
