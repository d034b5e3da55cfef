// A provider of libfabric. Two kinds:
// - one that has connections (tcp): the transport listens, and hands each request to the link whose token it
//   names. What is sent over a connection arrives in order, or the connection ends, and both ends know.
// - one that has none (verbs, efa): each link has an address of its own, and counts what arrives.
#ifndef EEP_HOSTS_FABRIC_TRANSPORT_H_
#define EEP_HOSTS_FABRIC_TRANSPORT_H_

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <set>
#include <string>

#include "hosts/fabric_handles.h"
#include "hosts/transport.h"

namespace eep::hosts {

class FabricLink;

// What the end that connects says first.
struct ConnectionRequest {
  char magic[8];
  uint8_t token[EEP_TOKEN_BYTES];  // of the end that accepts
};

class FabricTransport : public Transport {
 public:
  explicit FabricTransport(const FabricLibrary& library) : library_(library), chosen_{library} {}

  // False if it cannot be opened; eep_last_error() says why.
  bool open(const std::string& provider, const char* address);
  std::unique_ptr<Link> open_link(const eep_area* areas, uint32_t count, const eep_link_secret& secret) override;

  // Hands requests for connections to the links that they name; refuses all others.
  void accept_requests();
  void add(FabricLink* link) { links_.insert(link); }
  void remove(FabricLink* link) { links_.erase(link); }

  // Sets the last error; false.
  bool no(const char* call, int64_t error) const;
  const char* name_of(int64_t error) const { return library_.strerror(static_cast<int>(error)); }
  bool has_connections() const { return chosen_.info->ep_attr->type == FI_EP_MSG; }
  const FabricLibrary& library() const { return library_; }
  fid_fabric* fabric() const { return fabric_.get(); }
  fid_domain* domain() const { return domain_.get(); }
  fid_eq* requests() const { return requests_.get(); }
  fid_pep* listener() const { return listener_.get(); }
  fi_info* info() const { return chosen_.info; }

 private:
  bool listen();

  const FabricLibrary& library_;
  Info chosen_;
  Handle<fid_fabric> fabric_;
  Handle<fid_domain> domain_;
  Handle<fid_eq> requests_;
  Handle<fid_pep> listener_;
  std::set<FabricLink*> links_;
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_FABRIC_TRANSPORT_H_
