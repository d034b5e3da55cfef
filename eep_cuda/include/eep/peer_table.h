// What a rank knows about its peers, and how the world outside reaches its kernels.
//
// Three structures, all of fixed size and at fixed addresses for the life of a buffer, so that a captured
// graph can hold pointers to them: the peer table, which the host patches between two steps; the snapshot of
// it that one dispatch and its combine read; and the control page, which the supervisor and the peers write
// while kernels run. Plain C, mirrored field by field in eep/abi/peer_table.py; eep_abi_fields() exports the
// offsets that a test compares.
#ifndef EEP_PEER_TABLE_H_
#define EEP_PEER_TABLE_H_

#include <stdint.h>

#include "eep/rank_set.h"

#define EEP_MAX_CHANNELS 2  // independent dispatch/combine pairs that may be in flight at once
#define EEP_MAX_LANES 64    // process groups that one region can serve
#define EEP_INCARNATIONS 2  // inbox slots per rank: an incarnation and its successor never share one

typedef enum {
  EEP_TRANSPORT_NONE = 0,
  EEP_TRANSPORT_LOCAL = 1,   // the rank itself
  EEP_TRANSPORT_MAPPED = 2,  // load/store through a mapping of the peer's region
  EEP_TRANSPORT_REMOTE = 3,  // load/store in a mirror of it, from which a proxy sends; see eep/hosts.h
} eep_transport;

typedef struct {
  uint64_t region;       // the peer's symmetric region, as mapped here; 0 when it is not
  uint64_t control;      // the peer's control page, as mapped here
  uint32_t active;       // 1 while the peer is in the view
  uint32_t transport;    // eep_transport
  uint32_t incarnation;  // which life of that rank this is
  uint32_t slot;         // the inbox slot its messages use, in every region
  uint64_t epoch;        // the view that last changed this entry
  uint64_t reserved[3];  // a cache line per entry
} eep_peer;

typedef struct {
  uint64_t epoch;        // of the view this table shows; flags carry it
  uint64_t deadline_ns;  // how long a kernel waits for a source before it drops it
  uint32_t rank;         // whose table this is
  uint32_t max_ranks;    // capacity: everything is laid out by it
  uint64_t reserved[5];
  eep_peer peers[EEP_MAX_RANKS];
} eep_peer_table;

// The table as one round sees it.
typedef struct {
  uint64_t epoch;
  uint64_t round;  // starts at 1 in every epoch, counted where the kernels run
  uint64_t deadline_ns;
  eep_rank_set active;    // who takes part in this round; nobody when the epoch was revoked before it began
  eep_rank_set received;  // whose dispatch arrived whole
  uint32_t phase;         // eep_phase: what may come next
  uint32_t tokens;        // how many tokens this rank sent
  uint32_t slot[EEP_MAX_RANKS];
  uint32_t count[EEP_MAX_RANKS];  // tokens received from each rank
  uint64_t region[EEP_MAX_RANKS];
  uint64_t control[EEP_MAX_RANKS];
} eep_snapshot;

// Host memory even where the region is device memory: one store by a process without a CUDA context ends a wait. A word
// is written either from outside or by the kernels, never by both: a GPU and a CPU have no atomics in common over PCIe.
typedef struct {
  uint64_t revoked_epoch;  // outside: this epoch and every earlier one are over; only ever grows
  eep_rank_set suspects;   // outside: ranks not to wait for; cleared with a new view
  uint64_t reserved0[7];
  eep_rank_set dropped;  // kernels: ranks that were given up, at a deadline or as told; cleared with a new view
  eep_rank_set corrupt;  // kernels: ranks whose messages were malformed or contradicted the view
  uint64_t status;       // kernels: eep_status bits, why the step is not to be trusted; 0 while all is well
  uint64_t reserved1[7];
  uint32_t doorbell;  // CPU only, a futex: counts what a sleeping kernel may wait for
  uint32_t sleepers;  // how many sleep on it: none, and a ring needs no system call
  uint32_t wake_at;   // the doorbell's count at which a lone sleeper has all it waits for
  uint32_t reserved2[13];
  uint64_t state;  // owner: eep_owner_state
  uint64_t host;   // owner: ranks that have the same map each other's memory; 0 where there is one host
  uint64_t reserved3[6];
  uint64_t groups[EEP_MAX_LANES];  // owner: the process group that each of its lanes serves; 0 for none. CPU: one that
                                   // was closed stays until the lane is used again (eep_group_closed)
} eep_control_page;

// The id of a group is not 0, and below this.
#define EEP_GROUP_LIMIT (UINT64_C(1) << 39)
// What stands in `groups` for a group that its owner has closed in that epoch: what it owed to the others can be read
// for as long, and it will write no more.
static inline uint64_t eep_group_closed(uint64_t group, uint64_t epoch) {
  return UINT64_C(1) << 63 | epoch << 39 | group;
}

// What the owner of a control page says of itself. It is evidence, not membership.
typedef enum {
  EEP_OWNER_ALONE = 0,    // not asking for anything
  EEP_OWNER_WAITING = 1,  // has all it needs, and waits to be let in
  EEP_OWNER_LEFT = 2,     // closed on purpose: everything it owed was written
} eep_owner_state;

#endif  // EEP_PEER_TABLE_H_
