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
// flag of round n, and a destination sends that flag only when it is done with the rows of round n. A source
// that was dropped is not written to again in that epoch, and whoever it still reads from re-stamps the
// outbox first.
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

#define EEP_ABI_VERSION 1
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
  EEP_STATUS_SUSPECT = 2,     // a source was dropped: its deadline passed, or somebody said not to wait for it
  EEP_STATUS_CORRUPT = 4,     // a source sent what cannot be; it was dropped
  EEP_STATUS_MISROUTED = 8,   // a token was routed to a rank that is not in the view
  EEP_STATUS_TORN = 16,       // an outbox changed while it was read
  EEP_STATUS_BAD_TABLE = 32,  // an entry of this rank's peer table makes no sense; it was skipped
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

// ---- shapes ----

typedef struct {
  uint32_t max_ranks;
  uint32_t max_tokens;  // per rank and round
  uint32_t hidden;
  uint32_t max_topk;
  uint32_t local_experts;  // slots per rank; expert e lives on rank e / local_experts
  uint32_t layout;         // eep_layout
  uint32_t wire_type;      // eep_type: the widest that a dispatch may send
  uint32_t combine_type;   // eep_type: of expert outputs, f32 or bf16
  uint32_t channels;
  uint32_t reserved;
} eep_shape;

// What both sides of a message must agree on; it travels beside the flag.
EEP_INLINE uint64_t eep_envelope(uint32_t wire_type, uint32_t topk, uint32_t hidden) {
  return (uint64_t)hidden << 32 | (uint64_t)topk << 8 | wire_type;
}

EEP_INLINE int eep_is_fp8(uint32_t type) { return type >= EEP_TYPE_FP8; }
EEP_INLINE uint64_t eep_element_bytes(uint32_t type) {
  return type == EEP_TYPE_F32 ? 4 : type == EEP_TYPE_BF16 ? 2 : 1;
}

// ---- the region ----

// Everything a source signals, in one cache line per slot. Only that source writes it.
typedef struct {
  uint64_t dispatch_flag;
  uint64_t envelope;
  uint64_t combine_flag;
  uint64_t barrier_flag;
  uint64_t reserved[4];
} eep_mailbox;

// Byte offsets, counted from the start of a channel; channel c starts at c * channel_bytes.
typedef struct {
  uint64_t total_bytes;
  uint64_t channel_bytes;
  uint64_t mailboxes;     // eep_mailbox [slots]
  uint64_t outbox_stamp;  // uint64: the flag whose rows the outbox holds; 0 while they are being written
  uint64_t topk_idx;      // int32 [slots, max_tokens, max_topk]: local expert, -1 where it is not here
  uint64_t topk_weights;  // float [slots, max_tokens, max_topk]
  uint64_t rows;          // [slots, max_tokens, row_bytes]
  uint64_t scales;        // float or byte [slots, max_tokens, scales_per_row]
  uint64_t outbox;        // rank layout: [slots, max_tokens, hidden]; expert: [ranks, max_tokens, max_topk, hidden]
  uint64_t row_bytes;
  uint64_t scale_bytes;  // per row
  uint64_t outbox_row_bytes;
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
  at.outbox_row_bytes = shape->hidden * eep_element_bytes(shape->combine_type);
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
  at.total_bytes = at.channel_bytes * shape->channels;
  return at;
}

#endif  // EEP_PROTOCOL_H_
