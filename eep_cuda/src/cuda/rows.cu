// Copies of rows that are chosen by number, such as the entries of a request in a cache: one launch for many arrays, of
// which each warp copies a row.
#include "cuda/device.cuh"

namespace eep {
namespace {

constexpr uint32_t kWarp = 32, kWarps = 8;
constexpr uint32_t kArraysPerLaunch = 128;       // so that they fit among the parameters of a kernel
constexpr uint64_t kRowsPerLaunch = 1ull << 31;  // a grid has no more blocks than that

struct Arrays {
  uint8_t* to[kArraysPerLaunch];
  const uint8_t* from[kArraysPerLaunch];
  uint64_t row_bytes[kArraysPerLaunch];
};

__global__ void __launch_bounds__(kWarp* kWarps) copy_rows_kernel(const __grid_constant__ Arrays arrays, uint64_t rows,
                                                                  const int64_t* to_rows, const int64_t* from_rows) {
  const uint64_t row = static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint64_t bytes = arrays.row_bytes[blockIdx.y];
  uint8_t* to = arrays.to[blockIdx.y] + to_rows[row] * bytes;
  const uint8_t* from = arrays.from[blockIdx.y] + from_rows[row] * bytes;
  if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes) % sizeof(uint4)) {
    for (uint64_t i = lane; i < bytes; i += kWarp) to[i] = from[i];
    return;
  }
  for (uint64_t i = lane; i < bytes / sizeof(uint4); i += kWarp)
    store_row(reinterpret_cast<uint4*>(to) + i, load_input(reinterpret_cast<const uint4*>(from) + i));
}

}  // namespace

cudaError_t load_rows() { return load_kernels(copy_rows_kernel); }

}  // namespace eep

int eep_copy_rows(uint32_t arrays, void* const* to, const void* const* from, const uint64_t* row_bytes, uint64_t rows,
                  const int64_t* to_rows, const int64_t* from_rows, void* stream) {
  using namespace eep;
  if (const int error = check_row_copies(arrays, to, from, row_bytes, rows, to_rows, from_rows)) return error;
  if (rows > kRowsPerLaunch) return fail(EEP_ERROR_ARGUMENT, "at most 2^31 rows can be copied at once");
  for (uint32_t done = 0; done < arrays && rows; done += kArraysPerLaunch) {
    Arrays some;
    const uint32_t count = std::min(arrays - done, kArraysPerLaunch);
    for (uint32_t i = 0; i < count; ++i) {
      some.to[i] = static_cast<uint8_t*>(to[done + i]);
      some.from[i] = static_cast<const uint8_t*>(from[done + i]);
      some.row_bytes[i] = row_bytes[done + i];
    }
    const dim3 grid(static_cast<uint32_t>((rows + kWarps - 1) / kWarps), count);
    copy_rows_kernel<<<grid, kWarp * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(some, rows, to_rows, from_rows);
    if (const int error = check_cuda(cudaGetLastError(), "copying rows")) return error;
  }
  return EEP_OK;
}
