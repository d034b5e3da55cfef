// The C ABI of the data plane. Each backend (libeep_cpu.so, libeep_cuda.so) is one library that implements
// it, with raw pointers and a stream, no dependence on torch or Python.
//
// Every function that returns int answers 0, or a negative eep_error after which nothing has changed and
// eep_last_error() says in a sentence what is wrong. What goes wrong with a *peer* is never an error here:
// kernels drop the peer, go on, and say so in the control page, because a captured graph has nobody to return
// an error to.
#ifndef EEP_EEP_H_
#define EEP_EEP_H_

#include "eep/protocol.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EEP_API __attribute__((visibility("default")))

typedef enum {
  EEP_OK = 0,
  EEP_ERROR_ARGUMENT = -1,  // a shape, size or index that cannot be
  EEP_ERROR_PHASE = -2,     // dispatch and combine called out of turn
  EEP_ERROR_VIEW = -3,      // the view changed between a dispatch and its combine: start the step again
  EEP_ERROR_DEVICE = -4,    // the device or its driver refused
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

// CUDA: how many thread blocks a kernel takes (0: as before), each of which fills a multiprocessor; and, for
// benchmarks, membership as launch parameters instead of memory. A CPU has neither and answers EEP_OK.
EEP_API int eep_tune(eep_context* context, uint32_t blocks, uint32_t fixed_membership);

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
                            // expert layout: as packed_rows. Either of combine_type
  const int32_t* src_info;  // expert layout: as dispatch gave them
  const int64_t* layout_range;
  uint32_t topk;
  uint32_t channel;
} eep_combine_send_args;

typedef struct {
  void* out;                  // [tokens, hidden] of combine_type
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

// ---- control ----

// Ends `epoch` and all before it for the owner of this page; whoever waits there leaves at once.
EEP_API void eep_control_revoke(eep_control_page* page, uint64_t epoch);
// Tells the owner not to wait for these ranks (a bit mask) in its current epoch.
EEP_API void eep_control_suspect(eep_control_page* page, uint64_t ranks);
// Revokes for this rank and for every peer in its table.
EEP_API void eep_revoke(eep_context* context, uint64_t epoch);

// ---- fault injection: what happens when a kernel passes a named point ----

typedef enum { EEP_FAULT_OFF = 0, EEP_FAULT_KILL = 1, EEP_FAULT_STOP = 2, EEP_FAULT_SLEEP = 3 } eep_fault_action;

EEP_API uint32_t eep_fault_count(void);
EEP_API const char* eep_fault_name(uint32_t point);
// Acts once, the (skip + 1)-th time that the point is passed. `sleep_us` is for EEP_FAULT_SLEEP.
EEP_API int eep_fault_arm(uint32_t point, uint32_t action, uint32_t skip, uint32_t sleep_us);

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
