// Copies of expert weights: many in few launches. A block for each chunk, which ends with it, comes closest to the
// speed of a memcpy; blocks that stay and take one chunk after the other were slower (docs/design/data-plane.md).
#include "cuda/device.cuh"

namespace eep {
namespace {

constexpr uint32_t kThreads = 1024, kAtOnce = 4;
constexpr uint64_t kChunkBytes = kThreads * kAtOnce * sizeof(uint4);
constexpr uint32_t kCopiesPerLaunch = 96;  // so that they fit among the parameters of a kernel

struct Batch {
  uint8_t* to[kCopiesPerLaunch];
  const uint8_t* from[kCopiesPerLaunch];
  uint64_t bytes[kCopiesPerLaunch];
  uint64_t first_chunk[kCopiesPerLaunch + 1];
  uint32_t count;
};

// Bytes [begin, end) of a copy whose ends are not aligned to each other, or a tail.
__device__ void copy_bytes(uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin + threadIdx.x; i < end; i += kThreads) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads, 1) copy_kernel(const __grid_constant__ Batch batch) {
  const uint64_t chunk = blockIdx.x;
  uint32_t copy = 0;  // the last one that begins at this chunk or before it
  for (uint32_t step = 64; step; step /= 2)
    if (copy + step < batch.count && batch.first_chunk[copy + step] <= chunk) copy += step;
  const uint64_t begin = (chunk - batch.first_chunk[copy]) * kChunkBytes;
  const uint64_t end = min(begin + kChunkBytes, batch.bytes[copy]);
  uint8_t* to = batch.to[copy];
  const uint8_t* from = batch.from[copy];
  if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % sizeof(uint4)) {
    copy_bytes(to, from, begin, end);
    return;
  }
  const uint64_t first = begin / sizeof(uint4) + threadIdx.x, vectors = end / sizeof(uint4);
  uint4 data[kAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; ++i)
    if (first + i * kThreads < vectors)
      data[i] = load_input(reinterpret_cast<const uint4*>(from) + first + i * kThreads);
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; ++i)
    if (first + i * kThreads < vectors) store_row(reinterpret_cast<uint4*>(to) + first + i * kThreads, data[i]);
  copy_bytes(to, from, vectors * sizeof(uint4), end);
}

}  // namespace

cudaError_t load_weights() { return load_kernels(copy_kernel); }

}  // namespace eep

int eep_copy_batch(uint32_t count, void* const* to, const void* const* from, const uint64_t* bytes, void* stream) {
  using namespace eep;
  if (const int error = check_copies(count, to, from, bytes)) return error;
  for (uint32_t done = 0; done < count; done += kCopiesPerLaunch) {
    Batch batch;
    batch.count = std::min(count - done, kCopiesPerLaunch);
    batch.first_chunk[0] = 0;
    for (uint32_t i = 0; i < batch.count; ++i) {
      batch.to[i] = static_cast<uint8_t*>(to[done + i]);
      batch.from[i] = static_cast<const uint8_t*>(from[done + i]);
      batch.bytes[i] = bytes[done + i];
      batch.first_chunk[i + 1] = batch.first_chunk[i] + (batch.bytes[i] + kChunkBytes - 1) / kChunkBytes;
    }
    const uint64_t blocks = batch.first_chunk[batch.count];  // fewer than a grid may have: that would be 128 TiB
    if (blocks) copy_kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(batch);
    if (const int error = check_cuda(cudaGetLastError(), "copying weights")) return error;
  }
  return EEP_OK;
}
