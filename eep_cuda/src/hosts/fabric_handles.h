// Objects of libfabric that are given back with their owner.
#ifndef EEP_HOSTS_FABRIC_HANDLES_H_
#define EEP_HOSTS_FABRIC_HANDLES_H_

#include <rdma/fabric.h>

#include "hosts/fabric_library.h"

namespace eep::hosts {

template <typename T>
class Handle {
 public:
  Handle() = default;
  Handle(Handle&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Handle& operator=(Handle&&) = delete;
  ~Handle() { close(); }
  void close() {
    if (handle_) fi_close(&handle_->fid);
    handle_ = nullptr;
  }
  T** out() { return &handle_; }
  T* operator->() const { return handle_; }
  T* get() const { return handle_; }
  explicit operator bool() const { return handle_; }

 private:
  T* handle_ = nullptr;
};

struct Info {
  const FabricLibrary& library;
  fi_info* info = nullptr;
  ~Info() {
    if (info) library.freeinfo(info);
  }
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_FABRIC_HANDLES_H_
