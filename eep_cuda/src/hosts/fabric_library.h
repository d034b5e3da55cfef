// libfabric, loaded when a transport is first opened: a machine that has one host needs none.
#ifndef EEP_HOSTS_FABRIC_LIBRARY_H_
#define EEP_HOSTS_FABRIC_LIBRARY_H_

#include <rdma/fabric.h>

namespace eep::hosts {

// The functions that libfabric exports; all others are reached through what these return.
struct FabricLibrary {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
};

// Null if it is not installed; eep_last_error() says so.
const FabricLibrary* fabric_library();

}  // namespace eep::hosts

#endif  // EEP_HOSTS_FABRIC_LIBRARY_H_
