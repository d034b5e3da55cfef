// Pages of a copy of contexts, filled from a cache on a GPU: gathered there, brought to the host in one piece, and put
// into place. One call does all of it, so that the thread that asks holds no lock of its interpreter meanwhile.
#include <cstring>

#include "cuda/device.cuh"

namespace eep {
namespace {

constexpr uint32_t kWarp = 32, kWarps = 8;
constexpr uint32_t kLayersPerLaunch = 128;  // so that they fit among the parameters of a kernel

struct Layers {
  const uint8_t* from[kLayersPerLaunch];
  uint64_t row_bytes[kLayersPerLaunch];
  uint64_t start[kLayersPerLaunch];  // in a page
};

__device__ int32_t look_up(const eep_page_copy& copy, uint32_t page, uint32_t token) {
  return *const_cast<const volatile int32_t*>(copy.table + copy.places[page] + token);
}

__global__ void __launch_bounds__(kWarp) look_up_kernel(const __grid_constant__ eep_page_copy copy) {
  for (uint32_t token = threadIdx.x; token < copy.page_tokens; token += kWarp)
    copy.rows[static_cast<uint64_t>(blockIdx.x) * copy.page_tokens + token] = look_up(copy, blockIdx.x, token);
}

__global__ void __launch_bounds__(kWarp* kWarps)
    gather_kernel(const __grid_constant__ Layers layers, const __grid_constant__ eep_page_copy copy) {
  const uint32_t page = blockIdx.x, lane = threadIdx.x % kWarp;
  const uint64_t bytes = layers.row_bytes[blockIdx.y];
  uint8_t* first = copy.gathered + page * copy.page_bytes + layers.start[blockIdx.y];
  for (uint32_t token = threadIdx.x / kWarp; token < copy.page_tokens; token += kWarps) {
    uint8_t* to = first + token * bytes;
    const int64_t row = copy.rows[static_cast<uint64_t>(page) * copy.page_tokens + token];
    const uint8_t* from = layers.from[blockIdx.y] + row * static_cast<int64_t>(bytes);
    if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes) % sizeof(uint4)) {
      for (uint64_t i = lane; i < bytes; i += kWarp) to[i] = from[i];
      continue;
    }
    for (uint64_t i = lane; i < bytes / sizeof(uint4); i += kWarp)
      store_row(reinterpret_cast<uint4*>(to) + i, load_input(reinterpret_cast<const uint4*>(from) + i));
  }
}

__global__ void __launch_bounds__(kWarp) compare_kernel(const __grid_constant__ eep_page_copy copy) {
  bool same = true;
  for (uint32_t token = threadIdx.x; token < copy.page_tokens; token += kWarp)
    same &= copy.rows[static_cast<uint64_t>(blockIdx.x) * copy.page_tokens + token] == look_up(copy, blockIdx.x, token);
  same = __all_sync(0xffffffff, same);
  if (threadIdx.x == 0) copy.same[blockIdx.x] = same;
}

cudaError_t gather(const eep_page_copy& copy, uint32_t count, cudaStream_t stream) {
  look_up_kernel<<<count, kWarp, 0, stream>>>(copy);
  uint64_t start = 0;
  for (uint32_t done = 0; done < copy.layers; done += kLayersPerLaunch) {
    Layers some;
    const uint32_t layers = std::min(copy.layers - done, kLayersPerLaunch);
    for (uint32_t i = 0; i < layers; ++i) {
      some.from[i] = static_cast<const uint8_t*>(copy.from[done + i]);
      some.row_bytes[i] = copy.row_bytes[done + i];
      some.start[i] = start;
      start += some.row_bytes[i] * copy.page_tokens;
    }
    gather_kernel<<<dim3(count, layers), kWarp * kWarps, 0, stream>>>(some, copy);
  }
  if (const cudaError_t error = cudaGetLastError()) return error;
  const uint64_t bytes = count * copy.page_bytes;
  if (const cudaError_t error = cudaMemcpyAsync(copy.brought, copy.gathered, bytes, cudaMemcpyDeviceToHost, stream))
    return error;
  compare_kernel<<<count, kWarp, 0, stream>>>(copy);
  if (const cudaError_t error = cudaGetLastError()) return error;
  return cudaStreamSynchronize(stream);
}

}  // namespace

cudaError_t load_pages() { return load_kernels(look_up_kernel, gather_kernel, compare_kernel); }

}  // namespace eep

int eep_copy_pages(const eep_page_copy* copy, uint32_t count, const int64_t* pages, void* stream) {
  using namespace eep;
  if (const int error = check_page_copy(*copy, count, pages)) return error;
  if (!copy->gathered || !copy->brought)
    return fail(EEP_ERROR_ARGUMENT, "pages of a GPU cannot be copied: there is no room to gather them");
  if (!count) return EEP_OK;
  if (const int error = check_cuda(gather(*copy, count, static_cast<cudaStream_t>(stream)), "copying pages"))
    return error;
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(copy->pages + pages[i] * copy->page_bytes, copy->brought + i * copy->page_bytes, copy->page_bytes);
  return EEP_OK;
}
