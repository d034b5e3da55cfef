// The kernel of the collectives that reduce: all_reduce, reduce, reduce_scatter.
//
// Every rank puts its input into its outbox and reads the outboxes of the others. In a large all_reduce a rank does not
// read every outbox whole: it reduces its share of a piece, and a second round hands the sums round. That is twice the
// rounds for a fraction of the bytes. Either way the same additions in the same order, so the same bits.
#ifndef EEP_CUDA_REDUCE_KERNEL_CUH_
#define EEP_CUDA_REDUCE_KERNEL_CUH_

#include "cuda/collective.cuh"
#include "cuda/lanes.cuh"
#include "cuda/reduce.cuh"

namespace eep {

constexpr uint64_t kOneRoundBytes = 128 << 10;  // up to here the second round costs more than it saves

struct Sources {
  const uint4* from[EEP_MAX_CUDA_RANKS];  // those present, in group order
  uint32_t count;
};

// Called by all threads: whom to add up, from `offset` in each outbox.
template <bool kAcrossHosts>
__device__ void find_sources(const Home& home, const Party<kAcrossHosts>& party, uint64_t offset, Sources& sources) {
  __syncthreads();
  if (threadIdx.x < party.count && party.has(party.rank[threadIdx.x])) {
    uint32_t before = 0;
    for (uint32_t place = 0; place < threadIdx.x; ++place) before += party.has(party.rank[place]);
    const uint32_t rank = party.rank[threadIdx.x];
    sources.from[before] =
        reinterpret_cast<const uint4*>(part_at(home, party.part[rank]).outbox(party.half_of[rank]) + offset);
  }
  if (threadIdx.x == 0) sources.count = __popcll(party.present);
  __syncthreads();
}

struct Target {
  uint8_t* out;   // the caller's, anyhow aligned
  uint4* outbox;  // null: nowhere else
};

template <typename T>
__device__ void store_sum(const Target& target, uint64_t vector, uint64_t bytes, const uint4& sum) {
  if (target.outbox) store_row(target.outbox + vector, sum);
  uint8_t* out = target.out + vector * sizeof(uint4);
  const uint64_t left = bytes - vector * sizeof(uint4);
  if (left >= sizeof(uint4) && (reinterpret_cast<uint64_t>(out) & 15) == 0) {
    store_row(reinterpret_cast<uint4*>(out), sum);
    return;
  }
  const T* values = reinterpret_cast<const T*>(&sum);
#pragma unroll
  for (uint32_t i = 0; i < sizeof(uint4) / sizeof(T); ++i)
    if (i * sizeof(T) < left) reinterpret_cast<T*>(out)[i] = values[i];
}

// Called by all threads: each reduces `kVectors` vectors at a time, with the loads of `kMembers` members of each in
// flight. The last vector may be read beyond `bytes`: outboxes are whole vectors.
template <typename T, bool kAdds, bool kAverages, uint32_t kVectors, uint32_t kMembers>
__device__ __forceinline__ void reduce_by(const Sources& sources, uint64_t bytes, uint32_t reduction,
                                          const Target& target) {
  const uint32_t vectors = static_cast<uint32_t>((bytes + sizeof(uint4) - 1) / sizeof(uint4));
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < vectors; first += kVectors * kLaneThreads) {
    VectorSum<T, kAdds, kAverages> sums[kVectors];
#pragma unroll 1
    for (uint32_t member = 0; member < sources.count; member += kMembers) {
      uint4 data[kVectors][kMembers];
#pragma unroll
      for (uint32_t m = 0; m < kMembers; ++m)
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v)
          if (first + v * kLaneThreads < vectors && member + m < sources.count)
            data[v][m] = load_shared_row(sources.from[member + m] + first + v * kLaneThreads);
#pragma unroll
      for (uint32_t m = 0; m < kMembers; ++m) {
        if (member + m >= sources.count) break;
#pragma unroll
        for (uint32_t v = 0; v < kVectors; ++v) {
          if (m == 0 && member == 0)
            sums[v].begin(data[v][m]);
          else
            sums[v].take(data[v][m], reduction);
        }
      }
    }
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v)
      if (first + v * kLaneThreads < vectors)
        store_sum<T>(target, first + v * kLaneThreads, bytes, sums[v].result(reduction, sources.count));
  }
}

template <typename T, bool kAdds, bool kAverages>
__device__ __forceinline__ void reduce(const Sources& sources, uint64_t bytes, uint32_t reduction,
                                       const Target& target) {
  if constexpr (!kAdds || sizeof(T) == 1)
    reduce_by<T, kAdds, kAverages, 1, 2>(sources, bytes, reduction, target);
  else if (sources.count <= 2)
    reduce_by<T, kAdds, kAverages, 2, 2>(sources, bytes, reduction, target);
  else
    reduce_by<T, kAdds, kAverages, 1, 8>(sources, bytes, reduction, target);
}

// Of a piece, what each member reduces in the first of two rounds.
__device__ inline uint64_t share_among(uint32_t members, uint64_t bytes) {
  return eep_align_up((bytes + members - 1) / members, sizeof(uint4));
}

// `kAdds`: only sums and averages, with nothing to decide for each element. Across hosts one kernel does all
// reductions: there the network is what takes time.
template <typename T, bool kAdds, bool kAcrossHosts>
__global__ void __launch_bounds__(kLaneThreads)
    reduce_kernel(const __grid_constant__ Home home, const __grid_constant__ BlockCall call) {
  __shared__ Party<kAcrossHosts> party;
  __shared__ Copies copies;
  __shared__ Sources sources;
  if (!join_party(home, call.lane, party)) return;
  if (call.kind == EEP_REDUCE && !(party.active >> call.root & 1)) {
    if (threadIdx.x == 0) complain(home, EEP_STATUS_MISMATCH);  // no member can take part in that; all of them see it
    return;
  }
  const bool scatters = call.kind == EEP_REDUCE_SCATTER;
  const bool in_two_rounds = call.kind == EEP_ALL_REDUCE && call.bytes > kOneRoundBytes && party.count > 2;
  const uint64_t capacity =
      (scatters ? home.shape.lane_bytes / party.count : home.shape.lane_bytes) / sizeof(uint4) * sizeof(uint4);
  const Slice slice = slice_of(call.bytes);
  const uint8_t* in = static_cast<const uint8_t*>(call.in);
  uint8_t* out = static_cast<uint8_t*>(call.out);
  const auto outbox = [&](uint32_t rank, uint32_t half) { return part_at(home, party.part[rank]).outbox(half); };

  const uint64_t rounds = rounds_for(call.bytes, capacity);
  for (uint64_t i = 0; i < rounds; ++i) {
    const Slice piece = piece_of(slice, i, capacity);
    uint8_t* own_half = outbox(home.rank, party.half);
    run_copies(copies, scatters ? party.count : 1, piece.bytes, [&](uint32_t place) {
      const uint8_t* block = scatters ? call.in_blocks[party.position[place]] : in;
      return Copy{block ? block + piece.begin : nullptr, own_half + place * capacity, piece.bytes};
    });
    const auto reads = [&]() -> Reads {
      if constexpr (!kAcrossHosts) return {};
      if (scatters) return {party.active, 0, 0, capacity, piece.bytes, home.shape.lane_bytes};
      if (call.kind == EEP_REDUCE) return {rank_bit(call.root), 0, 0, 0, piece.bytes, piece.bytes};
      const uint64_t share = in_two_rounds ? share_among(party.count, piece.bytes) : 0;
      return {party.active, 0, 0, share, in_two_rounds ? share : piece.bytes, piece.bytes};
    };
    meet(home, party, {call.call, call.bytes, party.active, false}, reads(), in_two_rounds);

    // In two rounds, our share of the piece also goes into the other half, from which the others take it in the second.
    const uint64_t share = in_two_rounds ? share_among(party.count, piece.bytes) : piece.bytes;
    const auto share_at = [&](uint32_t place) { return piece_of({0, piece.bytes}, place, share); };
    const Slice mine = in_two_rounds ? share_at(party.own) : Slice{0, piece.bytes};
    find_sources(home, party, scatters ? party.own * capacity : mine.begin, sources);
    if (call.kind != EEP_REDUCE || call.root == home.rank)
      reduce<T, kAdds, kAdds || kAcrossHosts>(
          sources, mine.bytes, call.reduction,
          {out + piece.begin + mine.begin,
           in_two_rounds ? reinterpret_cast<uint4*>(outbox(home.rank, 1 - party.half)) : nullptr});
    const uint64_t added = party.present;
    end_round(home, party);
    if (!in_two_rounds) continue;
    meet(home, party, {call.call, call.bytes, added, false}, {party.active, 0, 0, 0, mine.bytes, mine.bytes});
    run_copies(copies, party.count, share, [&](uint32_t place) {
      const uint32_t rank = party.rank[place];
      if (rank == home.rank || !party.has(rank)) return Copy{nullptr, nullptr, 0};
      const Slice theirs = share_at(place);
      return Copy{outbox(rank, party.half_of[rank]), out + piece.begin + theirs.begin, theirs.bytes};
    });
    end_round(home, party);
  }
  leave_party(home, call.lane, party);
}

}  // namespace eep

#endif  // EEP_CUDA_REDUCE_KERNEL_CUH_
