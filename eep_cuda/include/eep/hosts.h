// Between hosts: links over which one rank puts rows into memory that another has registered for it.
//
// A link joins one life of a rank to one life of another, and each end has its own. An end registers *areas*: the peer
// can write there and nowhere else, and only with the secret that the owner of the areas made for this link. What a
// peer sends is a message: any number of puts, and then one *signal* of six words. The receiving end shows a signal
// when every put of its message has arrived, and every message before it: it counts, so that nothing depends on the
// order in which a network delivers. A link that lost something shows nothing more. It is never mended; another life
// gets another link.
//
// One thread at a time may use a transport and all links that were opened with it.
#ifndef EEP_HOSTS_H_
#define EEP_HOSTS_H_

#include "eep/eep.h"

#ifdef __cplusplus
extern "C" {
#endif

#define EEP_MAX_AREAS 16
#define EEP_TOKEN_BYTES 16
#define EEP_ADDRESS_BYTES 64
#define EEP_SIGNAL_WORDS 6

typedef struct eep_hosts eep_hosts;  // a transport: one per process and network interface
typedef struct eep_link eep_link;

// Memory that a peer may write, all of it and nothing else.
typedef struct {
  uint64_t address;
  uint64_t bytes;
} eep_area;

// What a peer must know to write: made anew for every link by the end that owns the areas. It is never sent: both ends
// make it from the key of the job.
typedef struct {
  uint8_t token[EEP_TOKEN_BYTES];  // goes with every signal
  uint64_t keys[EEP_MAX_AREAS];    // of the areas, where the provider lets us choose
} eep_link_secret;

// How a peer reaches one end of a link. It is handed back to the provider, and never read as an address here.
typedef struct {
  uint32_t version;
  uint32_t areas;
  uint32_t provider_keys;  // 1: the provider chose the keys
  uint32_t address_bytes;
  uint8_t address[EEP_ADDRESS_BYTES];
  uint64_t base[EEP_MAX_AREAS];
  uint64_t bytes[EEP_MAX_AREAS];
  uint64_t keys[EEP_MAX_AREAS];  // 0 unless the provider chose them
} eep_link_offer;

typedef struct {
  uint64_t words[EEP_SIGNAL_WORDS];
} eep_signal;

// `provider` is "tcp", "verbs", "efa", or a name that libfabric knows; `address` is the one of this host that peers
// connect to.
EEP_API int eep_hosts_open(const char* provider, const char* address, eep_hosts** out);
EEP_API void eep_hosts_close(eep_hosts* hosts);  // after its links

EEP_API int eep_link_open(eep_hosts* hosts, const eep_area* areas, uint32_t count, const eep_link_secret* secret,
                          eep_link** out);
EEP_API void eep_link_offered(eep_link* link, eep_link_offer* out);
// `secret` is the one that the peer made for its end.
EEP_API int eep_link_connect(eep_link* link, const eep_link_offer* peer, const eep_link_secret* secret);
// `done` is 0 if the network takes no more just now: call eep_link_progress() and try again. The bytes at `from` are
// read until eep_link_unread() says 0.
EEP_API int eep_link_put(eep_link* link, uint32_t area, uint64_t offset, const void* from, uint64_t bytes,
                         uint32_t* done);
// Ends the message. `done` as in eep_link_put().
EEP_API int eep_link_signal(eep_link* link, const eep_signal* signal, uint32_t* done);
EEP_API uint32_t eep_link_unread(eep_link* link);
// Moves bytes, both ways. Gives up to `most` signals of the peer, in the order in which it sent them.
EEP_API int eep_link_progress(eep_link* link, eep_signal* signals, uint32_t most, uint32_t* count);
// Signals that did not verify: dropped and counted.
EEP_API uint64_t eep_link_refused(eep_link* link);
// Moves bytes until all that was put has been read, or the deadline has passed; `done` says which. Signals of the peer
// stay where they are.
EEP_API int eep_link_drain(eep_link* link, uint64_t deadline_ns, uint32_t* done);
// From now on nothing that the peer puts is written anywhere.
EEP_API void eep_link_close(eep_link* link);

// ---- the proxy: dispatch, combine, barriers and process groups across links ----
// A peer-table entry that is EEP_TRANSPORT_REMOTE points at a *mirror*: memory of this process that is laid out as the
// region of that peer. Kernels write rows and flags there as if it were that region. A thread, the proxy, sees the flag
// and sends what belongs to it; at the other end a proxy writes rows and flag into the region, and rings. What a peer
// made of our tokens arrives in its mirror, from which the kernels pull it, and so do the outboxes of its lanes. The
// control page of all such entries is one page of this process, at which the proxy waits, and through which it hears of
// a revoke. What a peer says of itself and its groups is in a control page of its own, behind its mirror.

typedef struct eep_proxy eep_proxy;

typedef struct {
  uint64_t mirror;  // the address of as many bytes as a region and a control page behind it have, zeroed
  uint32_t rank;
  uint32_t incarnation;
  uint32_t own_incarnation;
  uint32_t reserved;
} eep_remote_peer;

// `region` and `control` are this rank's, `waits` is the page at which the proxy waits; all must outlive the proxy.
EEP_API int eep_proxy_start(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control,
                            eep_control_page* waits, const char* provider, const char* address, eep_proxy** out);
EEP_API void eep_proxy_stop(eep_proxy* proxy);
// Opens a link for one life of a rank. No other life of it may have the same slot meanwhile.
EEP_API int eep_proxy_invite(eep_proxy* proxy, const eep_remote_peer* peer, const eep_link_secret* secret,
                             eep_link_offer* offer, uint32_t* id);
EEP_API int eep_proxy_connect(eep_proxy* proxy, uint32_t id, const eep_link_offer* offer,
                              const eep_link_secret* secret);
// Whether both ends have heard of each other. EEP_ERROR_DEVICE: it is broken.
EEP_API int eep_proxy_is_up(eep_proxy* proxy, uint32_t id, uint32_t* is_up);
// Closes the link: afterwards nothing of that peer is written here, and its mirror may go. No kernel may run.
EEP_API int eep_proxy_dismiss(eep_proxy* proxy, uint32_t id);
// A descriptor that becomes readable when the link ends by itself. It is the proxy's, and goes with the link.
EEP_API int eep_proxy_ended(eep_proxy* proxy, uint32_t id, int* descriptor);
// For a rank that has said that it leaves (EEP_OWNER_LEFT): waits until every peer knows, and with it has got all that
// it was owed in its groups. 0 if the deadline has passed.
EEP_API uint32_t eep_proxy_take_leave(eep_proxy* proxy, uint64_t deadline_ns);
// Kernels of a GPU ring at no page. From now on the proxy looks by itself whether they have written, the more often the
// less time has passed since they last did.
EEP_API void eep_proxy_watch(eep_proxy* proxy);

// ---- ranks on a GPU: what kernels and the proxy share is memory of the host, at the same addresses for both ----
// Towards ranks on other hosts the *landing* stands for the region of a rank on a GPU. It is memory of the host, laid
// out as the region, and eep_proxy_start() is given it in place of the region. Kernels put there what is to be sent,
// and carry from there to the region what has come.

// `landing` is the address of as many bytes as a region has, zeroed; it must outlive the context. `remote` are the
// ranks that may be on other hosts while the context lives. To be said before a graph is captured. A CPU needs no
// landing, and refuses one.
EEP_API int eep_span_hosts(eep_context* context, void* landing, const eep_rank_set* remote);
// Lets kernels reach a mirror: before the table has it, and until the table has it no more.
EEP_API int eep_show_mirror(eep_context* context, void* mirror, uint32_t own_incarnation);
EEP_API int eep_hide_mirror(eep_context* context, void* mirror);

#ifdef __cplusplus
}
#endif
#endif  // EEP_HOSTS_H_
