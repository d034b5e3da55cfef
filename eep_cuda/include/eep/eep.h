// The C ABI of the data plane. Each backend (libeep_cpu.so, libeep_cuda.so) is one library that implements
// it, with raw pointers and a stream, no dependence on torch or Python.
//
// Every function that returns int answers 0, or a negative eep_error after which nothing has changed and
// eep_last_error() says in a sentence what is wrong. What goes wrong with a *peer* is never an error here:
// kernels drop the peer, go on, and say so in the control page, because a captured graph has no caller to
// return an error to.
#ifndef EEP_EEP_H_
#define EEP_EEP_H_

#include "eep/protocol.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EEP_API __attribute__((visibility("default")))

typedef enum {
  EEP_OK = 0,
  EEP_ERROR_ARGUMENT = -1,  // a shape, size or index outside its limits
  EEP_ERROR_PHASE = -2,     // dispatch and combine called out of turn
  EEP_ERROR_VIEW = -3,      // the view changed between a dispatch and its combine: start the step again
  EEP_ERROR_DEVICE = -4,    // the device or its driver refused
  EEP_ERROR_MISMATCH =
      -5,  // the members of a group called different things, on a CPU; on a GPU the status word says so
} eep_error;

typedef struct eep_context eep_context;  // one per buffer; owned by the library

// ---- life of a buffer ----

EEP_API uint32_t eep_abi_version(void);
EEP_API const char* eep_last_error(void);  // of this thread
EEP_API int eep_region_layout_compute(const eep_shape* shape, eep_region_layout* out);

// `region` and `control` stay the caller's; they must outlive the context.
EEP_API int eep_create(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control,
                       eep_context** out);
EEP_API void eep_destroy(eep_context* context);
EEP_API eep_peer_table* eep_table(eep_context* context);  // the host's copy, patched between steps only
// Shows the kernels the table as it was patched, and forgets what they had found wrong in the last view.
EEP_API int eep_publish_table(eep_context* context);
EEP_API int eep_publish_deadline(eep_context* context);  // the same for a change of the deadline alone
EEP_API const eep_snapshot* eep_snapshot_of(eep_context* context, uint32_t channel);

// CUDA: how many thread blocks a kernel takes (0: as before), each of which fills a multiprocessor; and what benchmarks
// ask for, eep_bench bits. A CPU has neither and answers EEP_OK.
EEP_API int eep_tune(eep_context* context, uint32_t blocks, uint32_t bench);
// CUDA: other ranks run on this GPU too, and have work to do while this one waits for them. From now on only a few
// thread blocks wait, in kernels of their own; otherwise all blocks of a kernel do, which saves two launches a layer.
// To be said before a graph is captured. A CPU answers EEP_OK.
EEP_API int eep_share_gpu(eep_context* context);
// CUDA: the kernel behind one of ours, if it was launched for that (programmatic dependent launch), takes its place as
// soon as ours waits for no peer any more, and ours take theirs so, too. A kernel that is launched so has to wait until
// the one before it is over, before it reads what that one wrote. To be said before a graph is captured. A CPU answers
// EEP_OK.
EEP_API int eep_overlap(eep_context* context);

typedef enum {
  EEP_BENCH_FIXED_MEMBERSHIP = 1,  // membership as launch parameters instead of memory
  EEP_BENCH_STAMPS = 2,            // dispatch and combine note when each block passes its stations
  EEP_BENCH_UNCHECKED = 4,         // combine does not look whether an outbox changed while it was read
  EEP_BENCH_UNCLOSED = 8,          // dispatch leaves the stamp of the outbox as it is
  EEP_BENCH_WIDE = 16,             // blocks have many threads for few tokens, too
  EEP_BENCH_AT_ONCE = 32,          // of few tokens, kernels let the next one begin before they wait for peers
  EEP_BENCH_UNFENCED = 64,         // combine sends its flags without a fence before them
} eep_bench;

// Of a dispatch: start, members read, rows issued, rows counted, flags sent, flags seen, end. Of a combine: start,
// members read, answered, parts found, outboxes seen, summed, end.
#define EEP_STATIONS 7
#define EEP_STAMPED_KERNELS 2
#define EEP_STAMPED_BLOCKS 32  // of each kernel; those beyond share the stamps of others

typedef struct {
  uint64_t began_ns, ended_ns;  // by the timer that all blocks share
  int64_t clock[EEP_STATIONS];  // by the block's own clock; 0 where it did not pass
} eep_block_stamps;

// What the last dispatch of this context noted, EEP_STAMPED_BLOCKS blocks, and behind it the last combine; the first
// `blocks` of all these.
EEP_API int eep_stamps(eep_context* context, eep_block_stamps* stamps, uint32_t blocks);

// ---- the two kernels, each in a send and a receive phase ----

typedef struct {
  const void* x;              // [tokens, hidden] of x_type
  const int64_t* topk_idx;    // [tokens, topk]: global expert slots, -1 for none
  const float* topk_weights;  // [tokens, topk], or null for all ones
  uint32_t tokens;
  uint32_t topk;
  uint32_t x_type;     // f32 or bf16
  uint32_t wire_type;  // what travels; x_type or one of the fp8 types
  uint32_t channel;
  uint32_t reserved;
} eep_dispatch_send_args;

typedef struct {
  int32_t* count;  // [max_ranks]: tokens taken from each rank
  // rank layout: rows and scales lie in the region itself; the metadata is copied out, checked
  int32_t* topk_idx;    // [slots, max_tokens, topk]: local expert or -1
  float* topk_weights;  // [slots, max_tokens, topk]
  // expert layout: rows are packed per local expert, valid ones first
  void* packed_rows;      // [local_experts, max_ranks * max_tokens, hidden] of the wire type
  void* packed_scales;    // column-major in the last two dimensions; fp8 only
  int32_t* packed_count;  // [local_experts]
  int32_t* src_info;      // [local_experts, max_ranks * max_tokens]: token index at its source
  int64_t* layout_range;  // [local_experts, max_ranks]: begin << 32 | count
  uint32_t topk;
  uint32_t wire_type;
  uint32_t channel;
  uint32_t reserved;
} eep_dispatch_recv_args;

typedef struct {
  const void* x;            // rank layout: [slots * max_tokens, hidden], weighted and summed per token;
                            // expert layout: as packed_rows. Either of eep_output_type()
  const int32_t* src_info;  // expert layout: as dispatch gave them
  const int64_t* layout_range;
  uint32_t topk;
  uint32_t channel;
} eep_combine_send_args;

typedef struct {
  void* out;                  // [tokens, hidden] of eep_output_type()
  const int64_t* topk_idx;    // as dispatched
  const float* topk_weights;  // expert layout; null for all ones
  uint32_t tokens;
  uint32_t topk;
  uint32_t channel;
  uint32_t reserved;
} eep_combine_recv_args;

EEP_API int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void* stream);
EEP_API int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void* stream);
EEP_API int eep_combine_send(eep_context* context, const eep_combine_send_args* args, void* stream);
EEP_API int eep_combine_recv(eep_context* context, const eep_combine_recv_args* args, void* stream);

// Both halves at once: one launch where the backend can.
EEP_API int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* recv,
                         void* stream);
EEP_API int eep_combine(eep_context* context, const eep_combine_send_args* send, const eep_combine_recv_args* recv,
                        void* stream);

// Waits for every active rank, up to the deadline given here rather than the table's.
EEP_API int eep_barrier(eep_context* context, uint64_t deadline_ns, void* stream);

// ---- collectives of a process group ----

typedef enum {
  EEP_BARRIER = 0,
  EEP_BROADCAST = 1,       // in (at the root), out (elsewhere), bytes
  EEP_ALL_REDUCE = 2,      // in, out, bytes
  EEP_REDUCE = 3,          // in, out (at the root), bytes
  EEP_ALL_GATHER = 4,      // in, bytes, out_blocks
  EEP_GATHER = 5,          // in, bytes, out_blocks (at the root)
  EEP_SCATTER = 6,         // in_blocks (at the root), out, bytes
  EEP_REDUCE_SCATTER = 7,  // in_blocks, out, bytes
  EEP_ALL_TO_ALL = 8,      // in_blocks, in_bytes, out_blocks, out_bytes
} eep_collective_kind;

typedef enum {
  EEP_ELEMENT_U8 = 0,
  EEP_ELEMENT_I8,
  EEP_ELEMENT_U16,
  EEP_ELEMENT_I16,
  EEP_ELEMENT_U32,
  EEP_ELEMENT_I32,
  EEP_ELEMENT_U64,
  EEP_ELEMENT_I64,
  EEP_ELEMENT_F16,
  EEP_ELEMENT_BF16,
  EEP_ELEMENT_F32,
  EEP_ELEMENT_F64,
  EEP_ELEMENT_BOOL,   // sums and products are "or" and "and"
  EEP_ELEMENT_BYTES,  // anything else, which can be moved but not reduced
} eep_element;

typedef enum {
  EEP_SUM = 0,
  EEP_AVG,  // over the ranks that took part; integers are rounded towards zero
  EEP_MIN,
  EEP_MAX,
  EEP_PROD,
  EEP_BAND,
  EEP_BOR,
  EEP_BXOR,
} eep_reduction;

// A group, as every member sees it: the ranks of the instance that belong to it, in the order of the group.
typedef struct {
  uint64_t id;  // the same on every member, different for every group; never 0
  uint32_t size;
  uint32_t reserved;
  uint32_t ranks[EEP_MAX_RANKS];
} eep_group;

// A rank of the instance, not of the group, wherever a rank is meant; blocks are in the order of the group. The blocks
// of ranks that take no part keep what they held. Whatever is reduced is added in the order of the group: 16-bit floats
// in f32, rounded once at the end.
typedef struct {
  const void* in;
  void* out;  // may be `in`
  uint64_t bytes;
  const void* const* in_blocks;  // [group size]
  const uint64_t* in_bytes;
  void* const* out_blocks;
  const uint64_t* out_bytes;
  uint64_t deadline_ns;   // CPU; a GPU uses the table's
  eep_rank_set answered;  // CPU, out: the ranks whose part was taken; less than all active members means a bad status
  uint32_t lane;
  uint32_t kind;       // eep_collective_kind
  uint32_t element;    // eep_element
  uint32_t reduction;  // eep_reduction
  uint32_t root;
  uint32_t reserved;
} eep_collective_args;

// Takes a free lane for a group that this rank belongs to. Members find each other's lane by the id of the group, so
// that groups may be opened in any order. A group with another id and the same members is another group. Opening a
// group again with more members keeps its lane: that is how a group grows.
EEP_API int eep_lane_open(eep_context* context, const eep_group* group, uint32_t* lane);
EEP_API int eep_lane_close(eep_context* context, uint32_t lane);
// One call at a time per lane; lanes do not disturb each other, nor do messages.
EEP_API int eep_collective(eep_context* context, eep_collective_args* args, void* stream);

// ---- messages between two ranks of a group: CPU only ----

typedef struct {
  uint64_t tag;
  uint64_t bytes;
  uint32_t source;
  uint32_t arrived;  // 0: none came before the wait ended
} eep_message;

// Returns when the last part of the message is in the pipe. `done` is 0 if it could not be sent: the epoch ended, or
// the deadline passed, or `to` left.
EEP_API int eep_send(eep_context* context, uint32_t lane, uint32_t to, uint64_t tag, const void* data, uint64_t bytes,
                     uint64_t deadline_ns, uint32_t* done);
// Waits for a message of one of `sources` and describes it, without taking it. Ends, with nothing,
// when the epoch ends, the deadline passes, every source has left, or eep_poke() was called since `pokes` was read.
EEP_API int eep_probe(eep_context* context, uint32_t lane, const eep_rank_set* sources, uint32_t pokes,
                      uint64_t deadline_ns, eep_message* message);
EEP_API uint32_t eep_pokes(eep_context* context);
EEP_API void eep_poke(eep_context* context);
// Takes the message that eep_probe() showed for `source`. `done` as in eep_send().
EEP_API int eep_recv(eep_context* context, uint32_t lane, uint32_t source, void* data, uint64_t bytes,
                     uint64_t deadline_ns, uint32_t* done);

// ---- copies ----

// Copies `count` blocks, which do not overlap, to where they are wanted: between any memory that this device reaches,
// at the speed of a copy however small the blocks are. On a GPU in the order of `stream`; the arrays may go at once.
EEP_API int eep_copy_batch(uint32_t count, void* const* to, const void* const* from, const uint64_t* bytes,
                           void* stream);
// Copies rows between arrays that have as many bytes to a row: row `from_rows[i]` of each `from` becomes row
// `to_rows[i]` of the `to` with the same number. On a GPU in the order of `stream`, a launch for many arrays, and the
// lists of rows are in its memory; the other lists are the host's, and may go at once. The caller knows that the arrays
// have these rows.
EEP_API int eep_copy_rows(uint32_t arrays, void* const* to, const void* const* from, const uint64_t* row_bytes,
                          uint64_t rows, const int64_t* to_rows, const int64_t* from_rows, void* stream);

// Copies rows of many layers to pages in host memory. A page has, of each layer in turn, the rows of `page_tokens`
// places that follow each other in a table, which may change meanwhile.
typedef struct {
  const void* const* from;    // [layers]
  const uint64_t* row_bytes;  // [layers]
  const int32_t* table;       // of each place: which row of the layers it has
  uint8_t* pages;
  uint64_t page_bytes;
  int64_t* places;   // [most]: the first place of each page, written by the caller
  uint8_t* same;     // [most]: whether the table had the same for all of a page before it was copied and afterwards
  int32_t* rows;     // [most * page_tokens]: room for what is read of the table
  uint8_t* brought;  // CUDA: room for `most` pages on the host
  // CUDA: the same on the device, where the table and `rows` are. `places`, `same` and `brought` are the host's,
  // pinned.
  uint8_t* gathered;
  uint32_t layers;
  uint32_t page_tokens;
  uint32_t most;
  uint32_t reserved;
} eep_page_copy;
// The places of `copy->places[i]` go to page `pages[i]`. Returns when they are there; on a GPU it waits for `stream`
// alone.
EEP_API int eep_copy_pages(const eep_page_copy* copy, uint32_t count, const int64_t* pages, void* stream);

// ---- control ----

// Ends `epoch` and all before it for the owner of this page; its waits end at once.
EEP_API void eep_control_revoke(eep_control_page* page, uint64_t epoch);
// Tells the owner not to wait for these ranks in its current epoch.
EEP_API void eep_control_suspect(eep_control_page* page, const eep_rank_set* ranks);
// Says what the owner of a page is up to (eep_owner_state), and wakes all that wait at it.
EEP_API void eep_control_state(eep_control_page* page, uint64_t state);
// Revokes for this rank and for every peer in its table.
EEP_API void eep_revoke(eep_context* context, uint64_t epoch);

// ---- fault injection: what happens when a kernel passes a named point ----

typedef enum {
  EEP_FAULT_OFF = 0,
  EEP_FAULT_KILL = 1,
  EEP_FAULT_STOP = 2,
  EEP_FAULT_SLEEP = 3,
  EEP_FAULT_DROP = 4,
  EEP_FAULT_SPIN = 5,
} eep_fault_action;

EEP_API uint32_t eep_fault_count(void);
EEP_API const char* eep_fault_name(uint32_t point);
// Acts once, the (skip + 1)-th time that the point is passed. `amount` is how many microseconds EEP_FAULT_SLEEP sleeps
// or EEP_FAULT_SPIN computes, or how many messages in a row EEP_FAULT_DROP loses: the flags that would tell peers of
// them are not written. Only dispatch.after_rows and combine.after_rows have a message to lose.
EEP_API int eep_fault_arm(uint32_t point, uint32_t action, uint32_t skip, uint32_t amount);
// `fired` is called with the number of a point just before it acts, in the thread that passes it. Null: nothing is
// called.
EEP_API void eep_fault_notify(void (*fired)(uint32_t point));

// ---- the layout of the structures, for mirrors in other languages ----

typedef struct {
  const char* name;  // "eep_peer.slot", or "eep_peer" for the structure itself
  uint64_t offset;
  uint64_t size;
} eep_abi_field;

EEP_API const eep_abi_field* eep_abi_fields(uint32_t* count);

#ifdef __cplusplus
}
#endif
#endif  // EEP_EEP_H_
