// What every kernel needs: ordered loads and stores across GPUs, and the one bounded wait.
#ifndef EEP_CUDA_DEVICE_CUH_
#define EEP_CUDA_DEVICE_CUH_

#include <cstdint>

#include "cuda/state.cuh"

namespace eep {

// ---- words that another rank reads or writes while we do: always of system scope ----

__device__ inline uint64_t load_acquire_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline uint64_t load_relaxed_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_release_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Two neighbouring words as one, aligned to 16 bytes: no reader ever sees one of them without the other.
__device__ inline void load_pair_acquire_sys(const uint64_t* words, uint64_t& first, uint64_t& second) {
  asm volatile("{.reg .b128 pair; ld.acquire.sys.global.b128 pair, [%2]; mov.b128 {%0, %1}, pair;}"
               : "=l"(first), "=l"(second)
               : "l"(words)
               : "memory");
}
__device__ inline void store_pair_relaxed_sys(uint64_t* words, uint64_t first, uint64_t second) {
  asm volatile("{.reg .b128 pair; mov.b128 pair, {%1, %2}; st.relaxed.sys.global.b128 [%0], pair;}" ::"l"(words),
               "l"(first), "l"(second)
               : "memory");
}
__device__ inline void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- words that only this GPU's blocks share ----

__device__ inline uint64_t load_acquire_gpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_release_gpu(uint64_t* word, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A load that is issued where it stands, so that several are on their way at once.
template <typename Word>
__device__ inline Word load_now(const Word* word) {
  return *static_cast<const volatile Word*>(word);
}

// ---- rows: 16 bytes a thread, not kept in L1 ----

__device__ inline uint4 load_input(const uint4* at) {  // written before this kernel began
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}
__device__ inline uint4 load_shared_row(const uint4* at) {  // written by a peer while this kernel ran
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
__device__ inline float load_shared_float(const float* at) {  // the same
  float value;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_row(uint4* at, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// ---- kernels that overlap: see launch() in launch.h ----

// Until the kernel before this one is over, if this one was launched early. Comes before anything that it wrote is
// read, and before anything that it reads is written.
__device__ inline void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may take room on the GPU from now on. Never before a wait for peers is over: what waits may take
// that room from the rank that it waits for.
__device__ inline void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ inline uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

__device__ inline uint64_t rank_bit(uint32_t rank) { return uint64_t{1} << rank; }

// A warp's vote on both halves of a set of ranks: lane i speaks for ranks i and i + 32.
__device__ inline uint64_t vote(bool low, bool high) {
  return __ballot_sync(~0u, low) | static_cast<uint64_t>(__ballot_sync(~0u, high)) << 32;
}

// ---- trouble: noted in device memory, shown to the host in its control page ----

__device__ inline void note(Trouble* trouble, eep_status why, uint64_t dropped = 0, uint64_t corrupt = 0) {
  if (dropped) atomicOr(reinterpret_cast<unsigned long long*>(&trouble->dropped), dropped);
  if (corrupt) atomicOr(reinterpret_cast<unsigned long long*>(&trouble->corrupt), corrupt);
  atomicOr(reinterpret_cast<unsigned long long*>(&trouble->status), why);
}

// Called by one thread that has seen trouble. The last thread to come shows all of it: masks first, then the status.
__device__ inline void show_trouble(Trouble* trouble, eep_control_page* page) {
  __threadfence();
  const uint64_t status = *static_cast<volatile uint64_t*>(&trouble->status);
  if (!status) return;
  store_relaxed_sys(&page->dropped.words[0], *static_cast<volatile uint64_t*>(&trouble->dropped));
  store_relaxed_sys(&page->corrupt.words[0], *static_cast<volatile uint64_t*>(&trouble->corrupt));
  store_release_sys(&page->status, status);
}

// ---- the wait ----

struct WaitFor {
  eep_control_page* page;  // host memory: a look costs a trip over the bus, so only while nothing comes
  Trouble* trouble;
  uint64_t epoch;
  uint64_t deadline_ns;
  uint64_t hopeless;  // eep_status bits: once one of them is noted, what is missing will not come, for that reason
};

// Waits, as one full warp, until all of `sources` have arrived; returns those that have. `look(missing)`: which of
// these have, as the warp sees it. Ends on arrival, on a revoke of the epoch, on a word from outside not to wait, or at
// the deadline. Never traps.
template <typename Look>
__device__ uint64_t wait_by(const WaitFor& wait, uint64_t sources, Look look) {
  constexpr uint32_t kLooksBetweenGlances = 128;
  const uint32_t lane = threadIdx.x % 32;
  uint64_t arrived = 0, missing = sources, began_ns = 0;
  bool last_look = false;
  for (uint32_t looks = 1; missing; ++looks) {
    arrived |= look(missing);
    missing &= ~arrived;
    if (!missing || (looks % kLooksBetweenGlances && !last_look)) continue;
    uint64_t given_up = 0;
    eep_status why = EEP_STATUS_SUSPECT;
    if (lane == 0) {
      const uint64_t now = now_ns();
      if (!began_ns) began_ns = now;
      const uint64_t noted = *static_cast<volatile uint64_t*>(&wait.trouble->status) & wait.hopeless;
      given_up = load_relaxed_sys(&wait.page->suspects.words[0]) & missing;
      if (load_relaxed_sys(&wait.page->revoked_epoch) >= wait.epoch) {
        why = EEP_STATUS_REVOKED;
        given_up = missing;
      } else if (noted) {
        why = static_cast<eep_status>(noted);
        given_up = missing;
      } else if (last_look) {
        given_up = missing;
      }
      if (given_up) note(wait.trouble, why, why == EEP_STATUS_SUSPECT ? given_up : 0);
      // The stopped clock of a preempted kernel must not cost a peer its place: look once more after it.
      last_look = now - began_ns >= wait.deadline_ns;
    }
    missing &= ~__shfl_sync(~0u, given_up, 0);
    last_look = __shfl_sync(~0u, last_look, 0);
  }
  return arrived;
}

// The same, where each lane looks for itself: `has_arrived(rank)`.
template <typename HasArrived>
__device__ uint64_t wait_for(const WaitFor& wait, uint64_t sources, HasArrived has_arrived) {
  const uint32_t lane = threadIdx.x % 32;
  return wait_by(wait, sources, [&](uint64_t missing) {
    const bool low = (missing >> lane & 1) && has_arrived(lane);
    const bool high = (missing >> (lane + 32) & 1) && has_arrived(lane + 32);
    return vote(low, high);
  });
}

}  // namespace eep

#endif  // EEP_CUDA_DEVICE_CUH_
