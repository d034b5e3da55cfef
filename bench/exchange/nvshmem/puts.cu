// The exchange of the contest through NVSHMEM, behind a C interface: the yardstick of fixed membership. Built with the
// headers and libraries of the package nvidia-nvshmem-cu13; see put_library.py.
//
// A rank is a PE. Each has a workspace at the same place of its symmetric heap. There is no table of peers, no epoch,
// no deadline and no look for torn rows: a PE that dies leaves the others waiting for ever.
//
// Why no buffer is written while it is read: a PE writes into a peer of round n+1 only after it has heard the answers
// of all PEs in round n, and a peer answers in stream order, behind whatever reads what it received. In the other
// direction a peer answers in round n+1 only after it has heard from all PEs in round n+1, each of which has added up
// round n by then.
//
// Blocks wait for blocks of other PEs, which share the GPU: all kernels here have blocks of one size, and the PEs
// together start no more of them than fit at once.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

extern "C" {

// As in put_library.py. The addresses from `heard` to `returned` are in the workspace of the calling PE.
struct PutExchange {
  int32_t ranks, rank, experts, topk, tokens, hidden, blocks, way;
  uint64_t *heard, *answered, *round;
  int32_t* experts_of_rows;
  float* weights_of_rows;
  void *rows, *outputs, *returned;
  const void* x;
  const int32_t* experts_of_tokens;
  const float* weights;
  void* out;
};

}  // extern "C"

namespace {

enum Way {
  kPuts,      // a block puts a row; rows come back by puts
  kWarpPuts,  // a warp puts a row; rows come back by puts
  kStores,    // a row is loaded once and stored to all its ranks; combine reads it where its rank left it
};

constexpr int kThreads = 448;  // each moves two times 16 bytes of a row of 7168
constexpr int kBlocksAtOnce = 3;
constexpr int kMostRanks = 64;
constexpr int kMostTopk = 16;
constexpr int kInFlight = 4;  // rows that a thread of a combine loads at once

struct Vector {
  __nv_bfloat162 pair[4];
};
static_assert(sizeof(Vector) == 16);

__device__ uint64_t hosts_of(const PutExchange& at, const int32_t* experts) {
  const int local = at.experts / at.ranks;
  uint64_t hosts = 0;
  for (int i = 0; i < at.topk; ++i) hosts |= uint64_t{1} << (experts[i] / local);
  return hosts;
}

__device__ size_t row_bytes(const PutExchange& at) { return size_t{2} * at.hidden; }

// The row of a token in a buffer with room for those of all ranks.
template <typename T>
__device__ T* row_of(const PutExchange& at, T* rows, int rank, int token) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<Byte*>(rows) + (size_t{1} * rank * at.tokens + token) * row_bytes(at);
}

// Has the block put rows, `unit` by `unit`; `put(rank, token)` is called by a block or a warp.
template <Way kWay, typename Put>
__device__ void for_each_row(const PutExchange& at, Put put) {
  const int units = at.tokens * at.ranks;
  if constexpr (kWay == kWarpPuts) {
    constexpr int kWarps = kThreads / 32;
    for (int unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < units; unit += kWarps * gridDim.x)
      put(unit % at.ranks, unit / at.ranks);
  } else {
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) put(unit % at.ranks, unit / at.ranks);
  }
}

template <Way kWay>
__device__ void put_row(const PutExchange& at, void* to, const void* from, int rank) {
  if constexpr (kWay == kWarpPuts) {
    nvshmemx_putmem_nbi_warp(to, from, row_bytes(at), rank);
  } else {
    nvshmemx_putmem_nbi_block(to, from, row_bytes(at), rank);
  }
}

// Tells each rank that this block has put all it had to put.
__device__ void tell_all(const PutExchange& at, uint64_t* words) {
  __syncthreads();
  if (threadIdx.x < at.ranks) {
    nvshmem_fence();
    nvshmemx_signal_op(words + at.rank, 1, NVSHMEM_SIGNAL_ADD, threadIdx.x);
  }
}

__device__ void hear_all(const PutExchange& at, uint64_t* words, uint64_t count) {
  if (threadIdx.x < at.ranks) nvshmem_signal_wait_until(words + threadIdx.x, NVSHMEM_CMP_GE, count);
  __syncthreads();
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) dispatch_rows(const PutExchange at) {
  const uint64_t round = *at.round + 1;
  if constexpr (kWay == kStores) {
    __shared__ char* rows_at[kMostRanks];
    if (threadIdx.x < at.ranks) rows_at[threadIdx.x] = static_cast<char*>(nvshmem_ptr(at.rows, threadIdx.x));
    __syncthreads();
    const int vectors = at.hidden / 8, pieces = (vectors + kThreads - 1) / kThreads;
    for (int unit = blockIdx.x; unit < at.tokens * pieces; unit += gridDim.x) {
      const int token = unit / pieces, place = unit % pieces * kThreads + threadIdx.x;
      if (place >= vectors) continue;
      const uint4 value = static_cast<const uint4*>(at.x)[size_t{1} * token * vectors + place];
      const size_t offset = (size_t{1} * at.rank * at.tokens + token) * row_bytes(at) + size_t{16} * place;
      for (uint64_t left = hosts_of(at, at.experts_of_tokens + token * at.topk); left; left &= left - 1)
        *reinterpret_cast<uint4*>(rows_at[__ffsll(left) - 1] + offset) = value;
    }
  } else {
    for_each_row<kWay>(at, [&](int rank, int token) {
      if (!(hosts_of(at, at.experts_of_tokens + token * at.topk) >> rank & 1)) return;
      put_row<kWay>(at, row_of(at, at.rows, at.rank, token), row_of(at, at.x, 0, token), rank);
    });
  }
  // Which of the rows are there, and for whom, follows from the routing.
  const int choices = at.tokens * at.topk;
  for (int rank = blockIdx.x; rank < at.ranks; rank += gridDim.x) {
    nvshmemx_putmem_nbi_block(at.experts_of_rows + at.rank * choices, at.experts_of_tokens, size_t{4} * choices, rank);
    nvshmemx_putmem_nbi_block(at.weights_of_rows + at.rank * choices, at.weights, size_t{4} * choices, rank);
  }
  tell_all(at, at.heard);
  if (blockIdx.x) return;
  // All blocks of this kernel have read the round by then: this rank hears itself, too.
  hear_all(at, at.heard, round * gridDim.x);
  if (threadIdx.x == 0) *at.round = round;
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) combine_rows(const PutExchange at) {
  const uint64_t round = *at.round;
  __shared__ const char* partial_at[kMostRanks];  // the outputs of a rank for the tokens of this one
  if constexpr (kWay == kStores) {
    if (blockIdx.x == 0) tell_all(at, at.answered);
    if (threadIdx.x < at.ranks)
      partial_at[threadIdx.x] = static_cast<const char*>(nvshmem_ptr(row_of(at, at.outputs, at.rank, 0), threadIdx.x));
    hear_all(at, at.answered, round);
  } else {
    for_each_row<kWay>(at, [&](int rank, int token) {
      const int32_t* experts = at.experts_of_rows + (rank * at.tokens + token) * at.topk;
      if (!(hosts_of(at, experts) >> at.rank & 1)) return;
      put_row<kWay>(at, row_of(at, at.returned, at.rank, token), row_of(at, at.outputs, rank, token), rank);
    });
    tell_all(at, at.answered);
    if (threadIdx.x < at.ranks)
      partial_at[threadIdx.x] = static_cast<const char*>(row_of(at, at.returned, threadIdx.x, 0));
    hear_all(at, at.answered, round * gridDim.x);
  }
  const int vectors = at.hidden / 8, pieces = (vectors + kThreads - 1) / kThreads;
  for (int unit = blockIdx.x; unit < at.tokens * pieces; unit += gridDim.x) {
    const int token = unit / pieces, place = unit % pieces * kThreads + threadIdx.x;
    if (place >= vectors) continue;
    const size_t offset = token * row_bytes(at) + size_t{16} * place;
    float2 sum[4] = {};
    // In the order of the ranks, some of which are loaded at once.
    for (uint64_t left = hosts_of(at, at.experts_of_tokens + token * at.topk); left;) {
      Vector loaded[kInFlight] = {};
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (!left) break;
        loaded[i] = *reinterpret_cast<const Vector*>(partial_at[__ffsll(left) - 1] + offset);
        left &= left - 1;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 values = __bfloat1622float2(loaded[i].pair[j]);
          sum[j].x += values.x;
          sum[j].y += values.y;
        }
    }
    Vector result;
    for (int j = 0; j < 4; ++j) result.pair[j] = __float22bfloat162_rn(sum[j]);
    *reinterpret_cast<Vector*>(static_cast<char*>(at.out) + offset) = result;
  }
}

using Kernel = void (*)(PutExchange);
constexpr Kernel kDispatch[] = {dispatch_rows<kPuts>, dispatch_rows<kWarpPuts>, dispatch_rows<kStores>};
constexpr Kernel kCombine[] = {combine_rows<kPuts>, combine_rows<kWarpPuts>, combine_rows<kStores>};

}  // namespace

extern "C" {

uint64_t id_bytes() { return sizeof(nvshmemx_uniqueid_t); }

// One PE makes the id by which all of them find each other; it answers the others for as long as it lives.
int make_id(void* id) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int error = nvshmemx_get_uniqueid(&made);
  std::memcpy(id, &made, sizeof(made));
  return error;
}

// By all PEs at once, each with a CUDA context. NVSHMEM ends the process if it cannot start. The answer is
// nvshmemx_init_status: 2: a GPU for each PE; 3: PEs share a GPU without MPS; 4: they share it under MPS.
int start_pe(const void* id, int rank, int ranks) {
  nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
  std::memcpy(&made, id, sizeof(made));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(rank, ranks, &made, &attributes);
  nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  return nvshmemx_init_status();
}

// By all PEs at once: memory at the same place of each PE's heap. Null if there is too little, or if a peer's is not
// mapped here.
void* take_memory(uint64_t bytes) {
  void* memory = nvshmem_malloc(bytes);
  for (int pe = 0; memory && pe < nvshmem_n_pes(); ++pe)
    if (!nvshmem_ptr(memory, pe)) return nullptr;
  return memory;
}

// By all PEs at once.
void stop_pe(void* memory) {
  nvshmem_free(memory);
  nvshmem_finalize();
}

// How many blocks each of `ranks` PEs may start, so that those of all fit at once. It also loads the kernels: one that
// is loaded at its first launch waits for those that wait for it. cudaError_t.
int blocks_of_a_pe(int ranks, int* blocks) {
  int device, processors;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
    return error;
  int at_once = kBlocksAtOnce;
  for (const auto& kernels : {kDispatch, kCombine})
    for (int way = kPuts; way <= kStores; ++way) {
      int fit;
      if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernels[way], kThreads, 0))
        return error;
      at_once = std::min(at_once, fit);
    }
  *blocks = processors * at_once / ranks;
  return cudaSuccess;
}

int clear_words(void* words, uint64_t bytes) {
  if (const cudaError_t error = cudaMemset(words, 0, bytes)) return error;
  return cudaDeviceSynchronize();
}

int copy_words(void* to, const void* from, uint64_t bytes) {
  if (const cudaError_t error = cudaDeviceSynchronize()) return error;
  if (const cudaError_t error = cudaMemcpy(to, from, bytes, cudaMemcpyDefault)) return error;
  return cudaDeviceSynchronize();
}

int put_rows(const PutExchange* at, void* stream) {
  if (at->ranks > kMostRanks || at->topk > kMostTopk || at->hidden % 8 || at->way > kStores)
    return cudaErrorInvalidValue;
  kDispatch[at->way]<<<at->blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*at);
  return cudaGetLastError();
}

int return_rows(const PutExchange* at, void* stream) {
  kCombine[at->way]<<<at->blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*at);
  return cudaGetLastError();
}

}  // extern "C"
