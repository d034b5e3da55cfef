#if __has_include(<rdma/fabric.h>)

#include "hosts/fabric_library.h"

#include <dlfcn.h>
#include <rdma/fi_errno.h>
#include <signal.h>

#include <array>

#include "common/checks.h"
#include "eep/eep.h"

namespace eep::hosts {
namespace {

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// libfabric brings libraries of old network cards along, which take signals of the process to write a .btr file into
// its directory. What a process does with a signal is its own affair.
void* open_and_keep_signal_actions(const char* name) {
  std::array<struct sigaction, NSIG> actions;
  std::array<bool, NSIG> is_known;
  for (int signal = 1; signal < NSIG; ++signal) is_known[signal] = sigaction(signal, nullptr, &actions[signal]) == 0;
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  for (int signal = 1; signal < NSIG; ++signal)
    if (is_known[signal]) sigaction(signal, &actions[signal], nullptr);
  return library;
}

bool load(FabricLibrary& found) {
  void* library = open_and_keep_signal_actions("libfabric.so.1");
  return library && find(library, "fi_getinfo", found.getinfo) && find(library, "fi_freeinfo", found.freeinfo) &&
         find(library, "fi_dupinfo", found.dupinfo) && find(library, "fi_fabric", found.fabric) &&
         find(library, "fi_strerror", found.strerror);
}

}  // namespace

const FabricLibrary* fabric_library() {
  static FabricLibrary library;
  static const bool is_loaded = load(library);
  if (is_loaded) return &library;
  fail(EEP_ERROR_DEVICE, "libfabric.so.1 cannot be loaded: install libfabric (Debian: libfabric1)");
  return nullptr;
}

}  // namespace eep::hosts

#endif
