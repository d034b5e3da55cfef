// Memory that kernels have in common with the proxy. Host code; what passes through it is in landing.cu.
//
// It is ordinary memory of the process, registered with the GPU part by part. Kernels use the addresses that the host
// uses, so that the proxy, the peer table and the views of a region need no other addresses than they have.
#include "cuda/state.cuh"
#include "eep/hosts.h"
#include "hosts/kernel_ranges.h"

namespace eep {
namespace {

void hide(std::vector<void*>& parts) {
  for (void* part : parts) cudaHostUnregister(part);
  parts.clear();
}

int show_part(uint8_t* part, uint64_t bytes, std::vector<void*>& shown) {
  if (const int error = check_cuda(cudaHostRegister(part, bytes, cudaHostRegisterMapped),
                                   "memory for ranks on other hosts cannot be shown to the GPU"))
    return error;
  shown.push_back(part);
  void* there = nullptr;
  if (const int error = check_cuda(cudaHostGetDevicePointer(&there, part, 0), "memory of the host has no GPU address"))
    return error;
  if (there == part) return EEP_OK;
  return fail(EEP_ERROR_DEVICE,
              "this GPU does not reach memory of the host at the addresses that the host uses, which ranks on several "
              "hosts need");
}

int show(eep_context* context, void* memory, const std::vector<hosts::Range>& ranges) {
  if (!memory || context->shown.count(memory))
    return fail(EEP_ERROR_ARGUMENT, "memory for ranks on other hosts has no address, or is shown to the GPU already");
  std::vector<void*> shown;
  for (const hosts::Range& range : ranges)
    if (const int error = show_part(static_cast<uint8_t*>(memory) + range.offset, range.bytes, shown)) {
      hide(shown);
      return error;
    }
  context->shown[memory] = std::move(shown);
  return EEP_OK;
}

}  // namespace

void hide_all(eep_context* context) {
  for (auto& [memory, parts] : context->shown) hide(parts);
  context->shown.clear();
}

}  // namespace eep

int eep_span_hosts(eep_context* context, void* landing, const eep_rank_set* remote) {
  eep::Home& home = context->home;
  if (home.landing) return eep::fail(EEP_ERROR_PHASE, "this buffer or process group has a landing already");
  const auto ranges = eep::hosts::landing_ranges(home.shape, home.rank, *remote);
  if (const int error = eep::show(context, landing, ranges)) return error;
  home.landing = static_cast<uint8_t*>(landing);
  return EEP_OK;
}

int eep_show_mirror(eep_context* context, void* mirror, uint32_t own_incarnation) {
  const eep::Home& home = context->home;
  const uint32_t own_slot = eep_slot_of(home.rank, own_incarnation, home.shape.max_ranks);
  return eep::show(context, mirror, eep::hosts::mirror_ranges(home.shape, home.rank, own_slot));
}

int eep_hide_mirror(eep_context* context, void* mirror) {
  const auto found = context->shown.find(mirror);
  if (found == context->shown.end())
    return eep::fail(EEP_ERROR_ARGUMENT, "a mirror is to be hidden that was not shown to the GPU");
  // A kernel of a step that is over may still read there, and under MPS its fault would end every process on that GPU.
  if (const int error = eep::check_cuda(cudaDeviceSynchronize(), "before a mirror is hidden")) return error;
  eep::hide(found->second);
  context->shown.erase(found);
  return EEP_OK;
}
