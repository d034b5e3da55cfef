// The protocol between ranks: what a flag says, and where everything lies in a region.
//
// A region belongs to one rank and is mapped by its peers. Per channel it holds, for each *slot* (a rank in
// one of its incarnations): a mailbox with the flags of that source, its routing metadata, its token rows.
// Behind them lies the outbox, from which the peers pull what this rank's experts made of their tokens. A
// source writes token t into row t of its slot: no counters, no packing, and the same rows on every run.
//
//   source                                   destination
//   ------                                   -----------
//   rows, metadata, envelope                 wait: dispatch flag == epoch|round
//   dispatch flag (release)          ---->   read rows (acquire); a source is taken whole or not at all
//                                            experts write the outbox
//   wait: combine flag == epoch|round <----  stamp the outbox; combine flag (release)
//   pull rows in rank order; stamp unchanged?
//
// One buffer per channel is enough: a source writes round n+1 only after every live destination's combine
// flag of round n, and a destination sends that flag only when it is done with the rows of round n. No rank
// writes again to a source that it dropped in that epoch, and it re-stamps the outbox from which that source
// may still read.
#ifndef EEP_PROTOCOL_H_
#define EEP_PROTOCOL_H_

#include <stddef.h>
#include <stdint.h>

#include "eep/peer_table.h"

#if defined(__CUDACC__)
#define EEP_INLINE static __host__ __device__ inline
#else
#define EEP_INLINE static inline
#endif

#define EEP_ABI_VERSION 10
#define EEP_MAX_TOPK 16
#define EEP_MAX_TOKENS 65535  // a count must fit its field of a flag
#define EEP_SCALE_GROUP 128   // values that share one fp8 scale

typedef enum { EEP_LAYOUT_RANK = 0, EEP_LAYOUT_EXPERT = 1 } eep_layout;

typedef enum {
  EEP_TYPE_F32 = 0,
  EEP_TYPE_BF16 = 1,
  EEP_TYPE_FP8 = 2,        // e4m3, one fp32 scale per group
  EEP_TYPE_FP8_POW2 = 3,   // the same, scales rounded up to powers of two
  EEP_TYPE_FP8_UE8M0 = 4,  // the same, a scale is sent as its exponent byte
} eep_type;

// Why a step is not to be trusted.
typedef enum {
  EEP_STATUS_REVOKED = 1,     // the epoch was revoked while the step ran
  EEP_STATUS_SUSPECT = 2,     // a source was dropped: its deadline passed, or a word from outside said not to wait
  EEP_STATUS_CORRUPT = 4,     // a source sent a malformed message; it was dropped
  EEP_STATUS_MISROUTED = 8,   // a token was routed to a rank that is not in the view
  EEP_STATUS_TORN = 16,       // an outbox changed while it was read
  EEP_STATUS_BAD_TABLE = 32,  // an entry of this rank's peer table contradicts itself; it was skipped
  EEP_STATUS_MISMATCH = 64,   // a member of a group called something else, or met other ranks; its part was not taken
} eep_status;

typedef enum { EEP_PHASE_IDLE = 0, EEP_PHASE_SENT, EEP_PHASE_RECEIVED, EEP_PHASE_PUBLISHED } eep_phase;

// ---- flags: epoch (24 bits) | round (24 bits) | count (16 bits) ----
// A reader looks for one exact epoch and round, so flags need no clearing and stale writers never match.

#define EEP_EPOCH_LIMIT (1ull << 24)
#define EEP_ROUND_MASK ((1ull << 24) - 1)

EEP_INLINE uint64_t eep_flag_make(uint64_t epoch, uint64_t round, uint64_t count) {
  return epoch << 40 | (round & EEP_ROUND_MASK) << 16 | count;
}
EEP_INLINE uint32_t eep_flag_count(uint64_t flag) { return (uint32_t)(flag & 0xffff); }
EEP_INLINE int eep_flag_is(uint64_t flag, uint64_t epoch, uint64_t round) {
  return flag >> 16 == (epoch << 24 | (round & EEP_ROUND_MASK));
}
// Whether the source of a flag has come as far as that round. It may be one ahead of us already; it cannot be two.
EEP_INLINE int eep_flag_has_entered(uint64_t flag, uint64_t epoch, uint64_t round) {
  return eep_flag_is(flag, epoch, round) || eep_flag_is(flag, epoch, round + 1);
}
EEP_INLINE uint64_t eep_flag_epoch(uint64_t flag) { return flag >> 40; }

// ---- shapes ----

typedef struct {
  uint32_t max_ranks;
  uint32_t max_tokens;  // per rank and round
  uint32_t hidden;
  uint32_t max_topk;
  uint32_t local_experts;  // slots per rank; expert e lives on rank e / local_experts
  uint32_t layout;         // eep_layout
  uint32_t wire_type;      // eep_type: the widest that a dispatch may send
  uint32_t combine_type;   // eep_type: how expert outputs travel, as f32, bf16 or fp8; see eep_output_type()
  uint32_t channels;       // for dispatch and combine; 0 where a region only serves process groups
  uint32_t lanes;          // for process groups, one each; 0 for none
  uint32_t lane_parts;     // parts of a lane that never wait for each other: thread blocks of a GPU, 1 on a CPU
  uint32_t lane_bytes;     // of one half of a part's outbox
  uint32_t pipe_bytes;     // of one cell of a pipe, through which a lane's messages go; 0 for none
  uint32_t reserved;
} eep_shape;

// What both sides of a message must agree on; it travels beside the flag. So does the number of its pieces less one, in
// bits of its own, on which they need not agree.
EEP_INLINE uint64_t eep_envelope(uint32_t wire_type, uint32_t topk, uint32_t hidden) {
  return (uint64_t)hidden << 32 | (uint64_t)topk << 8 | wire_type;
}

// A GPU may send the tokens of a small round in pieces, so that no thread block waits for another: each says by itself
// that its tokens are there. All pieces have the same flag and the same envelope.
#define EEP_MAX_PIECES 4
#define EEP_PIECES_SHIFT 16
EEP_INLINE uint64_t eep_envelope_of_pieces(uint64_t envelope, uint32_t pieces) {
  return envelope | (uint64_t)(pieces - 1) << EEP_PIECES_SHIFT;
}
EEP_INLINE uint32_t eep_envelope_pieces(uint64_t envelope) {
  return (uint32_t)(envelope >> EEP_PIECES_SHIFT & (EEP_MAX_PIECES - 1)) + 1;
}

EEP_INLINE int eep_is_fp8(uint32_t type) { return type >= EEP_TYPE_FP8; }
EEP_INLINE uint64_t eep_element_bytes(uint32_t type) {
  return type == EEP_TYPE_F32 ? 4 : type == EEP_TYPE_BF16 ? 2 : 1;
}
// What experts give, and what a combine returns. Outputs that travel as fp8 are encoded on their way into the outbox:
// the values of a row, then a float for each group of them.
EEP_INLINE uint32_t eep_output_type(uint32_t combine_type) {
  return eep_is_fp8(combine_type) ? (uint32_t)EEP_TYPE_BF16 : combine_type;
}

// ---- the region ----

// What a source says of a piece beside the first.
typedef struct {
  uint64_t dispatch_flag;
  uint64_t envelope;
} eep_piece;

// Everything a source signals. Only that source writes it. The first cache line is all that there is to a round that is
// sent in one piece.
typedef struct {
  uint64_t dispatch_flag;
  uint64_t envelope;
  uint64_t combine_flag;
  uint64_t barrier_flag;    // the barrier that it has entered
  uint64_t barrier_before;  // the last one that it had entered when it came to the epoch of barrier_flag
  uint64_t reserved[3];
  eep_piece further[EEP_MAX_PIECES - 1];
  uint64_t reserved_too[2];
} eep_mailbox;

// Barriers count from 1 in every epoch, and ranks enter a view one after the other: a flag of a later epoch says that
// its source is done with ours. Whether it entered our barrier before it left, `before` tells.
typedef enum { EEP_BARRIER_NOT_YET = 0, EEP_BARRIER_ENTERED = 1, EEP_BARRIER_NEVER = 2 } eep_barrier_word;

// `latest` is any other flag of the source, read before `flag`, which was read before `before`.
EEP_INLINE eep_barrier_word eep_barrier_read(uint64_t latest, uint64_t flag, uint64_t before, uint64_t epoch,
                                             uint64_t round) {
  if (eep_flag_has_entered(flag, epoch, round)) return EEP_BARRIER_ENTERED;
  if (eep_flag_epoch(flag) > epoch)
    return eep_flag_has_entered(before, epoch, round) ? EEP_BARRIER_ENTERED : EEP_BARRIER_NEVER;
  return eep_flag_epoch(latest) > epoch ? EEP_BARRIER_NEVER : EEP_BARRIER_NOT_YET;
}

// ---- lanes: what a process group meets in ----
// Every call of a collective is a number of rounds. In a round a rank fills one half of its own outbox, stamps it, and
// tells every other member, in *their* mailboxes; each pulls from the outboxes what it needs. So no rank ever writes
// payload into memory of another, and a zombie can only spoil what no rank reads. Two halves are enough: a rank fills a
// half again, in round n, only when every member has entered round n-1 and hence is done with round n-2. The round
// before the first of an epoch is the last of the epoch before: ranks enter a view one after the other, and a rank that
// is behind must find there what it needs. So the halves of a rank alternate for ever, each rank's by its own count,
// and a flag of a later epoch says that its source is done with the earlier ones; whether it took part in their last
// round to the end, the stamp of its other half tells.

// What a source signals, in one cache line per slot and part. Only that source writes it. What it says of a round stays
// until it enters the round after the next, so that a member a round behind can still read it: hence two of each, by
// the half that the round uses.
typedef struct {
  uint64_t flag;     // epoch | round | half: it has entered that round, and that half of its outbox is filled
  uint64_t group;    // the group that it means; a lane may have served another one before
  uint64_t call[2];  // eep_call_make(): what it called
  uint64_t
      bytes[2];  // of the whole call, which all must agree on; all_to_all: of its largest block, which they need not
  uint64_t members[2];  // eep_members_word() of the ranks that it takes part with. The set shrinks when one is lost,
                        // and who sees another word than its own knows that the source's part is not what it needs
} eep_lane_mailbox;

// A word that looks random; no two words have the same (splitmix64).
EEP_INLINE uint64_t eep_mix(uint64_t word) {
  word += 0x9e3779b97f4a7c15ull;
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ word >> 27) * 0x94d049bb133111ebull;
  return word ^ word >> 31;
}

// A set of ranks in one word, so that what a source says of a round is one cache line, and one signal of a link. Of
// ranks below 64 it is the set itself. Beyond, it is a hash: two sets that differ have the same word once in 2^64.
EEP_INLINE uint64_t eep_members_word(const eep_rank_set* ranks) {
  uint64_t beyond = 0;
  for (int i = 1; i < EEP_RANK_WORDS; ++i)
    if (ranks->words[i]) beyond = eep_mix(ranks->words[i] ^ eep_mix(beyond + (uint64_t)i));
  return ranks->words[0] ^ beyond;
}

EEP_INLINE uint64_t eep_call_make(uint32_t collective, uint32_t element, uint32_t reduction, uint32_t root) {
  return (uint64_t)collective | (uint64_t)element << 8 | (uint64_t)reduction << 16 | (uint64_t)root << 24;
}

// A message of a source goes through cells of its pipe, in the region of the destination. The one payload that is
// pushed: it lands in the slot of the source's incarnation, like the rows of a dispatch.
#define EEP_PIPE_CELLS 4

typedef struct {
  uint64_t taken;  // epoch | sequence of the last cell that the destination is done with, 0 when it enters the epoch;
                   // written by the destination
  uint64_t reserved[7];
} eep_pipe;

typedef struct {
  uint64_t flag;   // epoch | sequence
  uint64_t group;  // as in a mailbox
  uint64_t tag;
  uint64_t bytes;   // of the whole message
  uint64_t offset;  // of this cell's part in it
  uint64_t reserved[3];
} eep_pipe_cell;  // followed by pipe_bytes of payload

// Byte offsets, counted from the start of a channel; channel c starts at c * channel_bytes. Lanes follow the channels.
typedef struct {
  uint64_t total_bytes;
  uint64_t channel_bytes;
  uint64_t mailboxes;     // eep_mailbox [slots]
  uint64_t outbox_stamp;  // uint64: the flag whose rows the outbox holds; 0 while they are being written
  uint64_t topk_idx;      // int32 [slots, max_tokens, max_topk]: local expert, -1 where it is not here
  uint64_t topk_weights;  // float [slots, max_tokens, max_topk]
  uint64_t rows;          // [slots, max_tokens, row_bytes]
  uint64_t scales;        // float or byte [slots, max_tokens, scales_per_row]
  uint64_t outbox;        // rank layout: [slots, max_tokens] rows; expert: [ranks, max_tokens, max_topk]
  uint64_t row_bytes;
  uint64_t scale_bytes;  // per row
  uint64_t outbox_row_bytes;
  uint64_t output_row_bytes;  // of a row that an expert gives, and of one that a combine returns
  uint64_t lanes;             // of the first lane, counted from the start of the region
  uint64_t lane_bytes;        // from a lane to the next
  uint64_t part_bytes;        // from a part to the next; a lane starts with its parts
  uint64_t lane_mailboxes;    // in a part: eep_lane_mailbox [slots]
  uint64_t lane_stamps;  // in a part: {uint64, uint64} [2], 64 bytes apart: epoch | round whose data a half holds, 0
                         // while it is filled; and the group that it is of
  uint64_t lane_outbox;  // in a part: [2, shape.lane_bytes]
  uint64_t pipes;        // in a lane: one per slot, pipe_stride apart: eep_pipe, then EEP_PIPE_CELLS cells
  uint64_t pipe_stride;
  uint32_t slots;  // max_ranks * EEP_INCARNATIONS
  uint32_t reserved;
} eep_region_layout;

EEP_INLINE uint32_t eep_slot_of(uint32_t rank, uint32_t incarnation, uint32_t max_ranks) {
  return rank + max_ranks * (incarnation % EEP_INCARNATIONS);
}

EEP_INLINE uint64_t eep_align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

EEP_INLINE eep_region_layout eep_region_layout_of(const eep_shape* shape) {
  const uint64_t page = 4096;
  eep_region_layout at;
  at.slots = shape->max_ranks * EEP_INCARNATIONS;
  at.reserved = 0;
  at.row_bytes = shape->hidden * eep_element_bytes(shape->wire_type);
  at.scale_bytes = shape->hidden / EEP_SCALE_GROUP * sizeof(float);
  at.output_row_bytes = shape->hidden * eep_element_bytes(eep_output_type(shape->combine_type));
  at.outbox_row_bytes =
      eep_is_fp8(shape->combine_type) ? eep_align_up(shape->hidden + at.scale_bytes, 16) : at.output_row_bytes;
  const uint64_t rows = (uint64_t)at.slots * shape->max_tokens;
  const uint64_t outbox_rows =
      shape->layout == EEP_LAYOUT_RANK ? rows : (uint64_t)shape->max_ranks * shape->max_tokens * shape->max_topk;
  uint64_t offset = 0;
  at.mailboxes = offset, offset += at.slots * sizeof(eep_mailbox);
  at.outbox_stamp = offset, offset += 64;
  at.topk_idx = offset = eep_align_up(offset, page), offset += rows * shape->max_topk * sizeof(int32_t);
  at.topk_weights = offset = eep_align_up(offset, page), offset += rows * shape->max_topk * sizeof(float);
  at.rows = offset = eep_align_up(offset, page), offset += rows * at.row_bytes;
  at.scales = offset = eep_align_up(offset, page), offset += rows * at.scale_bytes;
  at.outbox = offset = eep_align_up(offset, page), offset += outbox_rows * at.outbox_row_bytes;
  at.channel_bytes = eep_align_up(offset, page);
  at.lanes = at.channel_bytes * shape->channels;
  at.lane_mailboxes = offset = 0, offset += at.slots * sizeof(eep_lane_mailbox);
  at.lane_stamps = offset, offset += 2 * 64;
  at.lane_outbox = offset = eep_align_up(offset, page), offset += 2 * (uint64_t)shape->lane_bytes;
  at.part_bytes = eep_align_up(offset, page);
  at.pipe_stride = eep_align_up(sizeof(eep_pipe) + EEP_PIPE_CELLS * (sizeof(eep_pipe_cell) + shape->pipe_bytes), 64);
  at.pipes = offset = at.part_bytes * shape->lane_parts;
  if (shape->pipe_bytes) offset += at.slots * at.pipe_stride;
  at.lane_bytes = eep_align_up(offset, page);
  at.total_bytes = at.lanes + at.lane_bytes * shape->lanes;
  return at;
}

#endif  // EEP_PROTOCOL_H_
