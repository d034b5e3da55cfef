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
  uint64_t whole;     // whose blocks are whole
  uint64_t mismatch;  // 1: a member called something else, and there are no blocks
  uint64_t reserved[6];
};
static_assert(sizeof(Note) == kAlignment);

// The members of each host, in the order of the group; hosts in the order of their first members.
struct Hosts {
  uint32_t count = 0, own = 0;
  uint64_t members[EEP_MAX_RANKS] = {};
  uint32_t leader[EEP_MAX_RANKS] = {};

  explicit Hosts(const Members& all) {
    uint64_t id[EEP_MAX_RANKS];
    for (uint32_t position = 0; position < all.size; ++position) {
      const uint32_t rank = all.ranks[position];
      if (!(all.active & rank_bit(rank))) continue;
      uint32_t host = 0;
      while (host < count && id[host] != all.host[rank]) ++host;
      if (host == count) id[host] = all.host[rank], leader[host] = rank, ++count;
      members[host] |= rank_bit(rank);
      if (rank == all.me) own = host;
    }
  }
  uint64_t leaders() const {
    uint64_t ranks = 0;
    for (uint32_t host = 0; host < count; ++host) ranks |= rank_bit(leader[host]);
    return ranks;
  }
};

Members only(const Members& all, uint64_t ranks) {
  Members some = all;
  some.active &= ranks;
  some.remote &= ranks;
  return some;
}

class Call {
 public:
  Call(eep_context& context, const Members& members, eep_collective_args& args, const HierarchicalCall& call)
      : context_(context),
        members_(members),
        args_(args),
        reduce_(call.reduce),
        hosts_(members),
        local_members_(only(members, hosts_.members[hosts_.own])),
        leader_members_(only(members, hosts_.leaders())),
        leader_(hosts_.leader[hosts_.own]),
        local_(context, local_members_, call.header, args.bytes, call.deadline_ns, kHostPart),
        leaders_(context, leader_members_, call.header, args.bytes, call.deadline_ns, kLeaderPart),
        whole_(members.active) {}

  int run() {
    const uint64_t count = static_cast<uint64_t>(std::popcount(members_.active));
    const uint64_t chunk = (context_.shape.lane_bytes - sizeof(Note)) / count / kAlignment * kAlignment;
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
    if (!local_.is_over() && !leaders_.is_over())
      args_.answered = whole_ & (local_.answered() | ~local_members_.active);
    return EEP_OK;
  }

 private:
  // Brings the blocks of this host across, and those of all to this host.
  void lead(uint64_t begin, uint64_t size) {
    const uint64_t here = local_.await(local_members_.active);
    Note own{here, local_.is_mismatch(), {}};
    uint8_t* out = leaders_.begin();
    if (!out) return pass_on({0, leaders_.is_mismatch(), {}}, size);
    uint64_t sent = 0;
    if (!own.mismatch)
      in_order(local_members_.active, [&](uint32_t, uint32_t rank) {
        if (size && here & rank_bit(rank)) std::memcpy(out + sizeof own + sent, local_.outbox(rank), size);
        sent += size;
      });
    own.whole &= local_.taken(here);
    std::memcpy(out, &own, sizeof own);
    leaders_.publish([&](uint32_t) { return Parts{{0, 0}, {sizeof own + sent, 0}}; });
    if (own.mismatch) return;  // the members of this host have found out themselves
    const uint64_t usable = leaders_.await(leader_members_.active);
    if (leaders_.is_mismatch()) return pass_on({0, 1, {}}, size);
    gather(begin, size, usable);
  }

  // The blocks that the leaders have, to the members of this host: all of them, or what they are reduced to.
  void gather(uint64_t begin, uint64_t size, uint64_t usable) {
    uint8_t* half = local_.begin();
    if (!half) return;
    Note all{0, 0, {}};
    const uint8_t* block[EEP_MAX_RANKS] = {};
    for (uint32_t host = 0; host < hosts_.count; ++host) {
      const uint32_t leader = hosts_.leader[host];
      if (!(usable & rank_bit(leader))) continue;
      const uint8_t* at = leaders_.outbox(leader);
      Note note;
      std::memcpy(&note, at, sizeof note);
      all.whole |= note.whole & hosts_.members[host];
      all.mismatch |= note.mismatch;
      at += sizeof note;
      in_order(hosts_.members[host], [&](uint32_t, uint32_t rank) { block[rank] = at, at += size; });
    }
    uint8_t* to = half + sizeof all;
    if (reduce_) {
      const uint8_t* sources[EEP_MAX_RANKS];
      uint32_t count = 0;
      in_order(all.whole, [&](uint32_t, uint32_t rank) { sources[count++] = block[rank]; });
      if (size && count) reduce_(sources, count, size, to);
    } else {
      in_order(members_.active, [&](uint32_t, uint32_t rank) {
        if (size && all.whole & rank_bit(rank)) std::memcpy(to, block[rank], size);
        to += size;
      });
    }
    const uint64_t torn = usable & ~leaders_.taken(usable);
    for (uint32_t host = 0; host < hosts_.count; ++host)
      if (torn & rank_bit(hosts_.leader[host])) all.whole &= ~hosts_.members[host];
    std::memcpy(half, &all, sizeof all);
    local_.publish([](uint32_t) { return Parts{}; });
    take(all, half + sizeof all, begin, size);
  }

  // Nothing came of it: the members of this host must hear so, or they wait.
  void pass_on(const Note& note, uint64_t) {
    uint8_t* half = local_.begin();
    if (!half) return;
    std::memcpy(half, &note, sizeof note);
    local_.publish([](uint32_t) { return Parts{}; });
    whole_ &= note.whole;
  }

  void follow(uint64_t begin, uint64_t size) {
    if (!local_.begin()) return;
    local_.publish([](uint32_t) { return Parts{}; });
    if (!local_.await(rank_bit(leader_))) {
      whole_ &= ~rank_bit(leader_);
      return;
    }
    Note note;
    std::memcpy(&note, local_.outbox(leader_), sizeof note);
    take(note, local_.outbox(leader_) + sizeof note, begin, size);
    if (!local_.taken(rank_bit(leader_))) whole_ &= ~rank_bit(leader_);
  }

  void take(const Note& note, const uint8_t* from, uint64_t begin, uint64_t size) {
    if (note.mismatch) {
      fail(EEP_ERROR_MISMATCH,
           "the ranks of another host called something else than this rank; the first rank of each host says what");
      return local_.refuse();
    }
    whole_ &= note.whole;
    if (const uint64_t missing = members_.active & ~note.whole) {
      set_bits(context_.control->dropped, missing & ~rank_bit(members_.me));
      report(*context_.control, EEP_STATUS_SUSPECT);
    }
    if (!size) return;
    if (reduce_) {
      std::memcpy(static_cast<uint8_t*>(args_.out) + begin, from, size);
      return;
    }
    in_order(members_.active, [&](uint32_t position, uint32_t rank) {
      if (note.whole & rank_bit(rank))
        std::memcpy(static_cast<uint8_t*>(args_.out_blocks[position]) + begin, from, size);
      from += size;
    });
  }

  template <typename Visit>
  void in_order(uint64_t ranks, Visit visit) const {
    for (uint32_t position = 0; position < members_.size; ++position)
      if (ranks & rank_bit(members_.ranks[position])) visit(position, members_.ranks[position]);
  }

  eep_context& context_;
  const Members& members_;
  eep_collective_args& args_;
  const Reduce reduce_;
  const Hosts hosts_;
  const Members local_members_, leader_members_;
  const uint32_t leader_;
  Rounds local_, leaders_;
  uint64_t whole_;
};

}  // namespace

bool is_hierarchical(const eep_context& context, const Members& members) {
  if (!members.remote || context.shape.lane_parts < kHostParts) return false;
  const Hosts hosts(members);
  const uint64_t count = static_cast<uint64_t>(std::popcount(members.active));
  return hosts.count > 1 && hosts.count < count && context.shape.lane_bytes >= sizeof(Note) + count * kAlignment;
}

int run_hierarchical(eep_context& context, const Members& members, eep_collective_args& args,
                     const HierarchicalCall& call) {
  return Call(context, members, args, call).run();
}

}  // namespace eep
