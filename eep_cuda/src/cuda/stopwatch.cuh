// Notes when a block of a dispatch or a combine passed its stations, so that a benchmark can say where the time goes.
// Otherwise compiled away.
#ifndef EEP_CUDA_STOPWATCH_CUH_
#define EEP_CUDA_STOPWATCH_CUH_

#include "cuda/device.cuh"

namespace eep {

enum Station : uint32_t {
  kStarted,
  kMembersRead,
  // of a dispatch
  kRowsIssued,
  kRowsCounted,
  kFlagsSent,
  kFlagsSeen,
  // of a combine
  kAnswered = kRowsIssued,
  kPartsFound,
  kOutboxesSeen,
  kSummed,
  kEnded,
};
static_assert(kEnded + 1 == EEP_STATIONS && kFlagsSeen == kSummed);

// Where the stamps of a kernel begin.
enum Stamps : uint32_t { kDispatchStamps = 0, kCombineStamps = EEP_STAMPED_BLOCKS };

// Thread 0 of each block takes the times, with the clock of its multiprocessor: finer than the timer that all share,
// which is read at both ends to tell how the clocks of different blocks lie to each other.
template <bool kOn>
class Stopwatch {
 public:
  __device__ Stopwatch(const Home& home, Stamps of)
      : stamps_(home.state->stamps + of + (blockIdx.y * gridDim.x + blockIdx.x) % EEP_STAMPED_BLOCKS) {
    if constexpr (kOn)
      if (threadIdx.x == 0) {
        stamps_->began_ns = now_ns();
        for (int64_t& time : stamps_->clock) time = 0;  // not every block passes every station
      }
    stamp(kStarted);
  }
  __device__ void stamp(Station station) const {
    if constexpr (kOn)
      if (threadIdx.x == 0) {
        stamps_->clock[station] = clock64();
        if (station == kEnded) stamps_->ended_ns = now_ns();
      }
  }

 private:
  eep_block_stamps* stamps_;
};

}  // namespace eep

#endif  // EEP_CUDA_STOPWATCH_CUH_
