#include "hosts/transport.h"

#if __has_include(<rdma/fabric.h>)

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>

#include <cstring>

#include "common/checks.h"
#include "hosts/fabric_link.h"
#include "hosts/fabric_transport.h"

namespace eep::hosts {
namespace {

// What libfabric calls the provider that the caller named. Verbs by itself wants all memory to be registered from which
// anything is sent (FI_MR_LOCAL), as no other provider here does; ofi_rxm does that for us, and keeps what it
// registered.
std::string name_in_libfabric(const std::string& provider) { return provider == "verbs" ? "verbs;ofi_rxm" : provider; }

}  // namespace

bool FabricTransport::open(const std::string& provider, const char* address) {
  Info wanted{library_, library_.dupinfo(nullptr)};
  if (!wanted.info) return no("fi_dupinfo", -FI_ENOMEM);
  const bool has_connections = provider == "tcp";
  wanted.info->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV;
  wanted.info->ep_attr->type = has_connections ? FI_EP_MSG : FI_EP_RDM;
  // Rows, and then the signal that stands for them.
  if (has_connections) {
    wanted.info->tx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_SAW | FI_ORDER_SAS;
    wanted.info->rx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_SAW | FI_ORDER_SAS;
  } else {
    wanted.info->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  }
  wanted.info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  wanted.info->domain_attr->threading = FI_THREAD_DOMAIN;
  // Our thread wakes when there is something to move; one of the provider's would only stand in its way.
  wanted.info->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  wanted.info->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  wanted.info->fabric_attr->prov_name = strdup(name_in_libfabric(provider).c_str());  // fi_freeinfo() frees it
  if (const int error = library_.getinfo(FI_VERSION(1, 14), address, nullptr, FI_SOURCE, wanted.info, &chosen_.info)) {
    fail(EEP_ERROR_DEVICE, "libfabric has no provider %s with the address %s: %s", provider.c_str(), address,
         name_of(-error));
    return false;
  }
  if (const int error = library_.fabric(chosen_.info->fabric_attr, fabric_.out(), nullptr))
    return no("fi_fabric", error);
  if (const int error = fi_domain(fabric_.get(), chosen_.info, domain_.out(), nullptr)) return no("fi_domain", error);
  return !has_connections || listen();
}

bool FabricTransport::listen() {
  fi_eq_attr attributes = {};
  attributes.wait_obj = FI_WAIT_FD;
  if (const int error = fi_eq_open(fabric_.get(), &attributes, requests_.out(), nullptr))
    return no("fi_eq_open", error);
  int error = fi_passive_ep(fabric_.get(), chosen_.info, listener_.out(), nullptr);
  if (!error) error = fi_pep_bind(listener_.get(), &requests_->fid, 0);
  if (!error) error = fi_listen(listener_.get());
  if (!error) return true;
  fail(EEP_ERROR_DEVICE, "cannot listen at what was given as the address of this host: %s", name_of(-error));
  return false;
}

void FabricTransport::accept_requests() {
  if (!requests_) return;
  alignas(fi_eq_cm_entry) uint8_t space[sizeof(fi_eq_cm_entry) + 256];
  for (;;) {
    uint32_t event = 0;
    const ssize_t bytes = fi_eq_read(requests_.get(), &event, space, sizeof space, 0);
    if (bytes == -FI_EAVAIL) {
      fi_eq_err_entry error = {};
      fi_eq_readerr(requests_.get(), &error, 0);
      continue;
    }
    if (bytes < 0) return;
    if (event != FI_CONNREQ) continue;
    auto* entry = reinterpret_cast<fi_eq_cm_entry*>(space);
    Info theirs{library_, entry->info};
    ConnectionRequest request = {};
    // A provider may pad what was said.
    const size_t said = static_cast<size_t>(bytes) - sizeof *entry;
    if (said >= sizeof request) std::memcpy(&request, entry->data, sizeof request);
    bool is_accepted = false;
    for (FabricLink* link : links_)
      if (link->is_meant_by(request)) is_accepted = link->accept(theirs.info);
    if (!is_accepted) fi_reject(listener_.get(), theirs.info->handle, nullptr, 0);
  }
}

std::unique_ptr<Link> FabricTransport::open_link(const eep_area* areas, uint32_t count, const eep_link_secret& secret) {
  auto link = std::make_unique<FabricLink>(*this);
  if (!link->open(areas, count, secret)) return nullptr;
  return link;
}

bool FabricTransport::no(const char* call, int64_t error) const {
  fail(EEP_ERROR_DEVICE, "%s of libfabric failed: %s", call, name_of(-error));
  return false;
}

std::unique_ptr<Transport> open_fabric(const char* provider, const char* address) {
  const FabricLibrary* library = fabric_library();
  if (!library) return nullptr;
  auto transport = std::make_unique<FabricTransport>(*library);
  if (!transport->open(provider, address)) return nullptr;
  return transport;
}

}  // namespace eep::hosts

#else

#include "common/checks.h"

namespace eep::hosts {

std::unique_ptr<Transport> open_fabric(const char*, const char*) {
  fail(EEP_ERROR_DEVICE,
       "this library was built without the headers of libfabric: install them (Debian: libfabric-dev) and build again");
  return nullptr;
}

}  // namespace eep::hosts

#endif
