// What a round of a collective leaves in the landing and in mirrors, for the proxy to send: the bytes of a half, and
// letters. Only kernels of ranks that have a landing know of it.
#ifndef EEP_CUDA_LANE_LANDING_CUH_
#define EEP_CUDA_LANE_LANDING_CUH_

#include "common/lane_letters.h"
#include "cuda/party.cuh"

namespace eep {

// What of our half members on other hosts read: those of this host help themselves.
struct Reads {
  uint64_t readers;                    // by rank
  uint64_t head;                       // the first bytes, which all of them read
  uint64_t begin, stride, bytes, end;  // and the member at a place so many from begin + place * stride, up to `end`
};

__device__ inline Parts parts_for(const Reads& reads, uint32_t rank, uint32_t place) {
  Parts parts;
  if (!(reads.readers >> rank & 1)) return parts;
  parts.size[0] = reads.head;
  parts.begin[1] = min(reads.begin + place * reads.stride, reads.end);
  parts.size[1] = min(reads.bytes, reads.end - parts.begin[1]);
  return parts;
}

// The stamp of a half in the landing, at which the proxy looks. By one thread. A GPU and a CPU have no words of 16
// bytes in common, and need none: the proxy looks at either word only when it has seen a flag that was written later.
__device__ inline void stamp_landing(const Home& home, const Party<true>& party, uint32_t half, uint64_t stamp,
                                     uint64_t group) {
  uint64_t* words = part_at(home, party.landing).stamp(half);
  store_relaxed_sys(words, stamp);
  store_relaxed_sys(words + 1, group);
}

// Copies to the landing what members on other hosts read of our half. Called by all threads.
__device__ inline void carry_half(const Home& home, const Party<true>& party, const Reads& reads) {
  const uint8_t* from = part_at(home, party.part[home.rank]).outbox(party.half);
  uint8_t* to = part_at(home, party.landing).outbox(party.half);
  const auto carry = [&](uint64_t begin, uint64_t bytes) {
    // Whole vectors, and a half is a number of them: what is carried too much is not sent.
    const uint64_t first = begin / sizeof(uint4), end = (begin + bytes + sizeof(uint4) - 1) / sizeof(uint4);
    for (uint64_t i = first + threadIdx.x; i < end; i += kLaneThreads)
      store_row(reinterpret_cast<uint4*>(to) + i, load_shared_row(reinterpret_cast<const uint4*>(from) + i));
  };
  bool has_head = false, has_body = false;
  for (uint32_t place = 0; place < party.count; ++place) {
    const uint32_t rank = party.rank[place];
    if (!party.is_remote(rank) || !party.has(rank)) continue;
    const Parts parts = parts_for(reads, rank, place);
    if (!has_head) carry(0, parts.size[0]);
    has_head |= parts.size[0] != 0;
    if (!has_body) carry(parts.begin[1], parts.size[1]);
    has_body |= parts.size[1] != 0 && !reads.stride;  // all read the same
  }
}

// Leaves letters for the proxy, but for their flags, which are stored after the fence of meet(). Called by one warp.
__device__ inline void write_letters(const Home& home, const Party<true>& party, const Statement& said,
                                     const Reads& reads, uint64_t others) {
  const uint64_t remote = others & party.remote;
  const auto for_each = [&](auto visit) {
    for (uint32_t place = threadIdx.x; place < party.count; place += 32)
      if (remote >> party.rank[place] & 1)
        visit(letter_of(part_at(home, party.part[party.rank[place]]), party.half), place);
  };
  for_each([](Letter& letter, uint32_t) { store_relaxed_sys(&letter.flag, 0); });
  fence_sys();  // a proxy that reads on meanwhile finds the flag gone
  for_each([&](Letter& letter, uint32_t place) {
    const Parts parts = parts_for(reads, party.rank[place], place);
    store_relaxed_sys(&letter.group, party.group);
    store_relaxed_sys(&letter.call, said.call);
    store_relaxed_sys(&letter.bytes, said.bytes);
    store_relaxed_sys(&letter.members, said.taken);
    for (int i = 0; i < 2; ++i) {
      store_relaxed_sys(&letter.parts.begin[i], parts.begin[i]);
      store_relaxed_sys(&letter.parts.size[i], parts.size[i]);
    }
  });
  __syncwarp();
}

}  // namespace eep

#endif  // EEP_CUDA_LANE_LANDING_CUH_
