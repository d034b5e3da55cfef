// Whether a stamp that is loaded behind rows is ever older than they are, though no fence lies between: what combine
// and the collectives rely on (check_stamps() in combine.cu).
//
// One stream writes rounds: a kernel sets the stamp to n, the next fills all rows with n. Another reads meanwhile, as a
// combine does: rows, a store of what was made of them, a barrier of the block, the stamp. A row that is newer than the
// stamp is one that a combine would take for a row of its own round.
#include <cstdio>
#include <cstdlib>

#include "cuda/device.cuh"

namespace {

constexpr uint32_t kThreads = 1024, kReaders = 16, kFillers = 16;
constexpr uint64_t kLongestNs = 20'000'000'000;  // a reader ends by itself, whatever becomes of the writer

__global__ void set_word(uint64_t* word, uint64_t value) { eep::store_relaxed_sys(word, value); }

__global__ void fill(uint4* rows, uint32_t vectors, uint32_t round) {
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < vectors; i += gridDim.x * kThreads)
    eep::store_row(rows + i, make_uint4(round, round, round, round));
}

struct Seen {
  unsigned long long newer;  // a row was newer than the stamp
  unsigned long long mixed;  // rows of two rounds were read, so that the reader met the writer
  unsigned long long reads;
};

template <bool kStampFirst>
__global__ void __launch_bounds__(kThreads)
    read(const uint64_t* stamp, const uint4* rows, uint32_t vectors, uint4* sums, const uint64_t* stop, Seen* seen) {
  __shared__ uint32_t newest, oldest;
  __shared__ bool is_over;
  const uint32_t each = vectors / gridDim.x, begin = blockIdx.x * each;
  const uint64_t began_ns = eep::now_ns();
  while (true) {
    if (threadIdx.x == 0) {
      newest = 0, oldest = ~0u;
      is_over = eep::load_relaxed_sys(stop) || eep::now_ns() - began_ns > kLongestNs;
    }
    __syncthreads();
    if (is_over) return;
    uint64_t now = 0;
    if (kStampFirst && threadIdx.x == 0) now = eep::load_relaxed_sys(stamp);
    __syncthreads();
    uint32_t high = 0, low = ~0u;
    for (uint32_t i = threadIdx.x; i < each; i += kThreads) {
      const uint4 row = eep::load_shared_row(rows + begin + i);
      high = max(high, max(max(row.x, row.y), max(row.z, row.w)));
      low = min(low, min(min(row.x, row.y), min(row.z, row.w)));
      eep::store_row(sums + begin + i, make_uint4(row.x + 1, row.y + 1, row.z + 1, row.w + 1));
    }
    __syncthreads();
    if (!kStampFirst && threadIdx.x == 0) now = eep::load_relaxed_sys(stamp);
    atomicMax(&newest, high);
    atomicMin(&oldest, low);
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(&seen->reads, 1ull);
      if (newest > now) atomicAdd(&seen->newer, 1ull);
      if (newest != oldest) atomicAdd(&seen->mixed, 1ull);
    }
    __syncthreads();
  }
}

template <bool kStampFirst>
Seen run(uint32_t vectors, uint32_t rounds) {
  uint64_t *stamp, *stop;
  uint4 *rows, *sums;
  Seen *seen, found;
  cudaMalloc(&stamp, sizeof *stamp);
  cudaMalloc(&stop, sizeof *stop);
  cudaMalloc(&rows, vectors * sizeof *rows);
  cudaMalloc(&sums, vectors * sizeof *sums);
  cudaMalloc(&seen, sizeof *seen);
  cudaMemset(stop, 0, sizeof *stop);
  cudaMemset(seen, 0, sizeof *seen);
  cudaStream_t writer, reader;
  cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&reader, cudaStreamNonBlocking);
  // The first launch of a kernel loads it, which would wait for the kernel that reads, which waits for the writer.
  set_word<<<1, 1, 0, writer>>>(stamp, 0);
  fill<<<kFillers, kThreads, 0, writer>>>(rows, vectors, 0);
  cudaDeviceSynchronize();
  read<kStampFirst><<<kReaders, kThreads, 0, reader>>>(stamp, rows, vectors, sums, stop, seen);
  for (uint32_t round = 1; round <= rounds; ++round) {
    set_word<<<1, 1, 0, writer>>>(stamp, round);
    fill<<<kFillers, kThreads, 0, writer>>>(rows, vectors, round);
  }
  set_word<<<1, 1, 0, writer>>>(stop, 1);
  cudaDeviceSynchronize();
  const cudaError_t error = cudaMemcpy(&found, seen, sizeof found, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "CUDA says %s\n", cudaGetErrorString(error));
    std::exit(2);
  }
  cudaFree(stamp), cudaFree(stop), cudaFree(rows), cudaFree(sums), cudaFree(seen);
  cudaStreamDestroy(writer), cudaStreamDestroy(reader);
  return found;
}

}  // namespace

// Prints, for each order: reads, reads that met the writer, reads with a row newer than the stamp.
int main(int, char** arguments) {
  const uint32_t vectors = std::strtoul(arguments[1], nullptr, 10), rounds = std::strtoul(arguments[2], nullptr, 10);
  const Seen behind = run<false>(vectors, rounds), before = run<true>(vectors, rounds);
  std::printf("%llu %llu %llu\n%llu %llu %llu\n", behind.reads, behind.mixed, behind.newer, before.reads, before.mixed,
              before.newer);
  return 0;
}
