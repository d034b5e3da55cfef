// A collective call as its kernel is told of it, and the two kernels. Sizes and pointers are launch parameters;
// everything else, who takes part above all, is read from memory.
#ifndef EEP_CUDA_COLLECTIVE_CUH_
#define EEP_CUDA_COLLECTIVE_CUH_

#include "cuda/state.cuh"

namespace eep {

struct BlockCall {
  uint64_t call;   // eep_call_make()
  uint64_t bytes;  // as in eep_lane_mailbox
  const void* in;
  void* out;
  uint32_t lane, kind, element, reduction, root;
  const uint8_t* in_blocks[EEP_MAX_CUDA_RANKS];  // by position in the group
  uint8_t* out_blocks[EEP_MAX_CUDA_RANKS];
  uint64_t in_bytes[EEP_MAX_CUDA_RANKS];
  uint64_t out_bytes[EEP_MAX_CUDA_RANKS];
};

// barrier, broadcast, all_gather, gather, scatter, all_to_all
int launch_move(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream);
// all_reduce, reduce, reduce_scatter
int launch_reduction(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream);
// The same, for a rank that has a landing.
int launch_far_reduction(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream);

}  // namespace eep

#endif  // EEP_CUDA_COLLECTIVE_CUH_
