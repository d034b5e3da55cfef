// The collectives of a process group. Each is a few rounds (rounds.h); a payload larger than half an outbox is taken in
// chunks. No bytes are still one round: members meet and their calls are compared.
#include <algorithm>
#include <cstring>

#include "common/fault.h"
#include "cpu/block_sizes.h"
#include "cpu/hierarchy.h"
#include "cpu/reduce.h"
#include "cpu/rounds.h"
#include "cpu/wait.h"

namespace eep {
namespace {

constexpr uint64_t kAlignment = 64;  // of everything within a half; a multiple of every element
// As long as all values of all ranks are no more than this, every rank reduces everything itself, which saves a round.
constexpr uint64_t kReduceAtOnce = 128 * 1024;

void copy(void* to, const void* from, uint64_t bytes) {
  if (bytes && to != from) std::memmove(to, from, bytes);
}

const uint8_t* at(const void* base, uint64_t offset) { return static_cast<const uint8_t*>(base) + offset; }
uint8_t* at(void* base, uint64_t offset) { return static_cast<uint8_t*>(base) + offset; }

// One call: the rounds it is made of, and what it is about.
struct Call {
  Rounds& rounds;
  const Members& members;
  const eep_collective_args& args;
  const uint64_t half_bytes;
  const Reduce reduce;  // null where nothing is reduced

  const RankSet& all() const { return members.active; }
  RankSet root() const { return only(args.root); }
  bool is_root() const { return args.root == members.me; }
  uint32_t own() const { return members.position[members.me]; }

  template <typename Visit>
  void in_order(const RankSet& ranks, Visit visit) const {
    eep::in_order(members, ranks, visit);
  }
  // Calls `visit(begin, size)` for each chunk of the payload, once for no payload at all, until the call is over.
  template <typename Visit>
  void in_chunks(uint64_t chunk, Visit visit) const {
    uint64_t begin = 0;
    do {
      visit(begin, std::min(chunk, args.bytes - begin));
      begin += chunk;
    } while (begin < args.bytes && !rounds.is_over());
  }
  // The part of a half that each member gets where a half is divided among them.
  uint64_t share(uint64_t head = 0) const { return (half_bytes - head) / members.size / kAlignment * kAlignment; }

  // What a member reads of a half whose first `size` bytes are for those of `readers`.
  auto first_bytes(uint64_t size, const RankSet& readers) const {
    return [=](uint32_t rank) { return Parts{{0, 0}, {has(readers, rank) ? size : 0, 0}}; };
  }
  // The same for one that is divided among them.
  auto own_share(uint64_t size, uint64_t share) const {
    return [=, this](uint32_t rank) { return Parts{{members.position[rank] * share, 0}, {size, 0}}; };
  }

  // Reduces what the given members have at `offset` of their outboxes.
  void reduce_from(const RankSet& ranks, uint64_t offset, uint64_t size, void* out) const {
    const uint8_t* sources[EEP_MAX_RANKS];
    uint32_t count = 0;
    in_order(ranks, [&](uint32_t, uint32_t rank) { sources[count++] = rounds.outbox(rank) + offset; });
    if (size && count) reduce(sources, count, size, static_cast<uint8_t*>(out));
  }
};

void barrier(const Call& call) {
  if (!call.rounds.begin()) return;
  call.rounds.publish(call.first_bytes(0, {}));
  call.rounds.await(call.all());
}

void broadcast(const Call& call) {
  call.in_chunks(call.half_bytes, [&](uint64_t begin, uint64_t size) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    if (call.is_root()) copy(half, at(call.args.in, begin), size);
    call.rounds.publish(call.first_bytes(size, call.is_root() ? call.all() : RankSet{}));
    if (call.is_root()) return;
    if (is_empty(call.rounds.await(call.root()))) return;
    copy(at(call.args.out, begin), call.rounds.outbox(call.args.root), size);
    call.rounds.taken(call.root());
  });
}

// gather and all_gather
void gather(const Call& call) {
  const bool takes = call.args.kind == EEP_ALL_GATHER || call.is_root();
  call.in_chunks(call.half_bytes, [&](uint64_t begin, uint64_t size) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    copy(half, at(call.args.in, begin), size);
    call.rounds.publish(call.first_bytes(size, call.args.kind == EEP_ALL_GATHER ? call.all() : call.root()));
    if (!takes) return;
    const RankSet usable = call.rounds.await(call.all());
    call.in_order(usable, [&](uint32_t position, uint32_t rank) {
      const void* from = rank == call.members.me ? at(call.args.in, begin) : call.rounds.outbox(rank);
      copy(at(call.args.out_blocks[position], begin), from, size);
    });
    call.rounds.taken(usable);
  });
}

void scatter(const Call& call) {
  const uint64_t share = call.share();
  call.in_chunks(share, [&](uint64_t begin, uint64_t size) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    if (call.is_root())
      call.in_order(call.all(), [&](uint32_t position, uint32_t rank) {
        const uint8_t* from = at(call.args.in_blocks[position], begin);
        copy(rank == call.members.me ? at(call.args.out, begin) : half + position * share, from, size);
      });
    call.rounds.publish(call.own_share(call.is_root() ? size : 0, share));
    if (call.is_root() || is_empty(call.rounds.await(call.root()))) return;
    copy(at(call.args.out, begin), call.rounds.outbox(call.args.root) + call.own() * share, size);
    call.rounds.taken(call.root());
  });
}

// reduce, and all_reduce where it is small
void reduce_at_once(const Call& call) {
  const bool takes = call.args.kind == EEP_ALL_REDUCE || call.is_root();
  call.in_chunks(call.half_bytes, [&](uint64_t begin, uint64_t size) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    copy(half, at(call.args.in, begin), size);
    call.rounds.publish(call.first_bytes(size, call.args.kind == EEP_ALL_REDUCE ? call.all() : call.root()));
    if (!takes) return;
    const RankSet usable = call.rounds.await(call.all());
    call.reduce_from(usable, 0, size, at(call.args.out, begin));
    call.rounds.taken(usable);
  });
}

// The segments of a chunk of an all_reduce, one for each active member.
struct Segments {
  const Call& call;
  const uint64_t count, size;  // of members; of this chunk

  struct Segment {
    uint64_t begin, size;
  };
  // The one that an active member reduces, as far as there are bytes for it.
  Segment of(uint32_t rank) const {
    const uint64_t most = eep_align_up((size + count - 1) / count, kAlignment);
    const uint64_t begin = std::min(call.members.place[rank] * most, size);
    return {begin, std::min(most, size - begin)};
  }
  // Calls `visit(rank, begin, size)` for each active member that has one.
  template <typename Visit>
  void each(Visit visit) const {
    call.in_order(call.all(), [&](uint32_t, uint32_t rank) {
      if (const Segment segment = of(rank); segment.size) visit(rank, segment.begin, segment.size);
    });
  }
};

// Every member reduces a segment of each chunk and the others copy it. A round brings the values of a chunk and the
// reduced segments of the one before, so that there is one round more than there are chunks, not two for each.
void all_reduce(const Call& call) {
  const uint32_t me = call.members.me;
  const uint64_t members = count(call.all()), bytes = call.args.bytes;
  const uint64_t chunk = (call.half_bytes - kAlignment) * members / (members + 1) / kAlignment * kAlignment;
  const uint64_t chunks = (bytes + chunk - 1) / chunk;
  const auto segments_of = [&](uint64_t i) { return Segments{call, members, std::min(chunk, bytes - i * chunk)}; };
  RankSet usable = {};
  for (uint64_t i = 0; i <= chunks; ++i) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    if (i < chunks)  // but for our own segment, which no other rank reads
      segments_of(i).each([&](uint32_t rank, uint64_t begin, uint64_t size) {
        if (rank != me) copy(half + begin, at(call.args.in, i * chunk + begin), size);
      });
    const uint64_t before = i ? (i - 1) * chunk : 0;
    if (i) {
      if (const auto own = segments_of(i - 1).of(me); own.size) {
        const uint8_t* sources[EEP_MAX_RANKS];
        uint32_t found = 0;
        call.in_order(usable, [&](uint32_t, uint32_t source) {
          sources[found++] =
              source == me ? at(call.args.in, before + own.begin) : call.rounds.outbox(source, true) + own.begin;
        });
        if (found) call.reduce(sources, found, own.size, half + chunk);
      }
      call.rounds.taken_before(usable);
    }
    call.rounds.publish([&](uint32_t to) {
      Parts parts;
      if (i < chunks) {
        const auto theirs = segments_of(i).of(to);
        parts.begin[0] = theirs.begin, parts.size[0] = theirs.size;
      }
      if (i) parts.begin[1] = chunk, parts.size[1] = segments_of(i - 1).of(me).size;
      return parts;
    });
    usable = call.rounds.await(call.all());
    if (!i) continue;
    segments_of(i - 1).each([&](uint32_t rank, uint64_t begin, uint64_t size) {
      if (has(usable, rank)) copy(at(call.args.out, before + begin), call.rounds.outbox(rank) + chunk, size);
    });
    usable = call.rounds.taken(usable);
  }
}

void reduce_scatter(const Call& call) {
  const uint64_t share = call.share();
  call.in_chunks(share, [&](uint64_t begin, uint64_t size) {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    call.in_order(call.all(), [&](uint32_t position, uint32_t) {
      copy(half + position * share, at(call.args.in_blocks[position], begin), size);
    });
    call.rounds.publish(call.own_share(size, share));
    const RankSet usable = call.rounds.await(call.all());
    call.reduce_from(usable, call.own() * share, size, at(call.args.out, begin));
    call.rounds.taken(usable);
  });
}

void all_to_all(const Call& call) {
  const uint64_t head = eep_align_up(BlockSizes::bytes(call.members.size), kAlignment), share = call.share(head);
  uint64_t largest = 0;  // of all blocks of all members, once the first round has told
  uint64_t begin = 0;
  do {
    uint8_t* half = call.rounds.begin();
    if (!half) return;
    if (!begin) write_sizes(call.members, call.args.in_bytes, call.args.out_bytes, half);
    const auto part = [&](uint64_t bytes) { return bytes > begin ? std::min(share, bytes - begin) : 0; };
    call.in_order(call.all() - only(call.members.me), [&](uint32_t to, uint32_t) {
      const uint64_t bytes = part(call.args.in_bytes[to]);
      if (bytes) copy(half + head + to * share, at(call.args.in_blocks[to], begin), bytes);
    });
    call.rounds.publish([&](uint32_t rank) {
      const uint32_t to = call.members.position[rank];
      return Parts{{0, head + to * share}, {begin ? 0 : head, part(call.args.in_bytes[to])}};
    });
    const RankSet usable = call.rounds.await(call.all());
    if (!begin) {
      call.in_order(usable, [&](uint32_t, uint32_t rank) { largest = std::max(largest, call.rounds.bytes_of(rank)); });
      const auto sizes_of = [&](uint32_t rank) { return BlockSizes(call.rounds.outbox(rank), call.members.size); };
      const bool agree = hashes_agree(call.members, usable, sizes_of) || sizes_agree(call.members, usable, sizes_of);
      if (call.rounds.taken(usable) == usable && !agree) return call.rounds.refuse();
    }
    const uint32_t own = call.own();
    call.in_order(usable, [&](uint32_t from, uint32_t rank) {
      const uint64_t bytes = part(call.args.out_bytes[from]);
      if (!bytes) return;
      const uint8_t* source =
          rank == call.members.me ? at(call.args.in_blocks[own], begin) : call.rounds.outbox(rank) + head + own * share;
      copy(at(call.args.out_blocks[from], begin), source, bytes);
    });
    call.rounds.taken(usable);
    begin += share;
  } while (begin < largest && !call.rounds.is_over());
}

// The same on every member, as it depends on nothing but what they agree on.
bool is_small(const Call& call) {
  return call.args.bytes <= std::min(kReduceAtOnce / call.members.size, call.half_bytes);
}

void perform(const Call& call) {
  switch (call.args.kind) {
    case EEP_BARRIER:
      return barrier(call);
    case EEP_BROADCAST:
      return broadcast(call);
    case EEP_ALL_REDUCE:
      return is_small(call) ? reduce_at_once(call) : all_reduce(call);
    case EEP_REDUCE:
      return reduce_at_once(call);
    case EEP_ALL_GATHER:
    case EEP_GATHER:
      return gather(call);
    case EEP_SCATTER:
      return scatter(call);
    case EEP_REDUCE_SCATTER:
      return reduce_scatter(call);
    case EEP_ALL_TO_ALL:
      return all_to_all(call);
  }
}

// ---- what the caller gave ----

bool has_root(uint32_t kind) {
  return kind == EEP_BROADCAST || kind == EEP_REDUCE || kind == EEP_GATHER || kind == EEP_SCATTER;
}
bool reduces(uint32_t kind) { return kind == EEP_ALL_REDUCE || kind == EEP_REDUCE || kind == EEP_REDUCE_SCATTER; }

bool blocks_are_there(const void* const* blocks, const uint64_t* bytes, uint64_t each, uint32_t size) {
  for (uint32_t i = 0; i < size; ++i)
    if ((bytes ? bytes[i] : each) && (!blocks || !blocks[i])) return false;
  return true;
}

int check_buffers(const eep_collective_args& args, const Members& members) {
  const bool root = args.root == members.me;
  bool in = false, out = false, in_blocks = false, out_blocks = false;
  switch (args.kind) {
    case EEP_BROADCAST:
      in = root, out = !root;
      break;
    case EEP_ALL_REDUCE:
      in = out = true;
      break;
    case EEP_REDUCE:
      in = true, out = root;
      break;
    case EEP_ALL_GATHER:
      in = out_blocks = true;
      break;
    case EEP_GATHER:
      in = true, out_blocks = root;
      break;
    case EEP_SCATTER:
      in_blocks = root, out = true;
      break;
    case EEP_REDUCE_SCATTER:
      in_blocks = out = true;
      break;
    case EEP_ALL_TO_ALL:
      if (!args.in_bytes || !args.out_bytes)
        return fail(EEP_ERROR_ARGUMENT, "all_to_all: give in_bytes and out_bytes, one size per member");
      in_blocks = out_blocks = true;
      break;
  }
  const bool sized = args.kind == EEP_ALL_TO_ALL;
  if ((in && args.bytes && !args.in) || (out && args.bytes && !args.out) ||
      (in_blocks && !blocks_are_there(args.in_blocks, sized ? args.in_bytes : nullptr, args.bytes, members.size)) ||
      (out_blocks && !blocks_are_there(const_cast<const void* const*>(args.out_blocks),
                                       sized ? args.out_bytes : nullptr, args.bytes, members.size)))
    return fail(EEP_ERROR_ARGUMENT, "collective %u: this rank gave no address for an input or output that it needs",
                args.kind);
  return EEP_OK;
}

int check_call(const eep_collective_args& args, const Members& members) {
  if (args.kind > EEP_ALL_TO_ALL)
    return fail(EEP_ERROR_ARGUMENT, "there is no collective %u; see eep_collective_kind", args.kind);
  const uint32_t size = element_size(args.element);
  if (!size) return fail(EEP_ERROR_ARGUMENT, "there is no element type %u; see eep_element", args.element);
  if (args.bytes % size)
    return fail(EEP_ERROR_ARGUMENT, "%llu bytes are not a whole number of elements of %u bytes",
                static_cast<unsigned long long>(args.bytes), size);
  if (reduces(args.kind) && !find_reduce(args.element, args.reduction))
    return fail(EEP_ERROR_ARGUMENT,
                "elements of type %u cannot be reduced by operation %u; see eep_element and eep_reduction",
                args.element, args.reduction);
  if (has_root(args.kind) && (args.root >= EEP_MAX_RANKS || !has(members.active, args.root)))
    return fail(EEP_ERROR_ARGUMENT, "the root, rank %u, is not an active member of the group; name one that is",
                args.root);
  return check_buffers(args, members);
}

// What all members must agree on; what does not matter to a call is not compared.
uint64_t header_of(const eep_collective_args& args) {
  if (args.kind == EEP_BARRIER) return eep_call_make(EEP_BARRIER, 0, 0, 0);
  return eep_call_make(args.kind, args.element, reduces(args.kind) ? args.reduction : 0,
                       has_root(args.kind) ? args.root : 0);
}

uint64_t bytes_of(const eep_collective_args& args, uint32_t size) {
  if (args.kind == EEP_BARRIER) return 0;
  return args.kind == EEP_ALL_TO_ALL ? *std::max_element(args.in_bytes, args.in_bytes + size) : args.bytes;
}

}  // namespace
}  // namespace eep

int eep_collective(eep_context* context, eep_collective_args* args, void*) {
  using namespace eep;
  Members members;
  if (const int error = take_members(*context, args->lane, "collective", members)) return error;
  if (const int error = check_call(*args, members)) return error;
  args->answered = {};
  if (is_revoked(*context->control, members.epoch)) {
    report(*context->control, EEP_STATUS_REVOKED);
    return EEP_OK;
  }
  fault::pass(fault::kCollectiveEntered);
  if ((args->kind == EEP_ALL_GATHER || args->kind == EEP_ALL_REDUCE) && is_hierarchical(*context, members))
    return run_hierarchical(*context, members, *args,
                            {header_of(*args), args->deadline_ns,
                             reduces(args->kind) ? find_reduce(args->element, args->reduction) : nullptr});
  Rounds rounds(*context, members, members.active, header_of(*args), bytes_of(*args, members.size), args->deadline_ns);
  perform({rounds, members, *args, context->shape.lane_bytes,
           reduces(args->kind) ? find_reduce(args->element, args->reduction) : nullptr});
  args->answered = rounds.answered();
  return rounds.is_mismatch() ? EEP_ERROR_MISMATCH : EEP_OK;
}
