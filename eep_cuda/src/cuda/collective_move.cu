// The collectives that only move bytes: barrier, broadcast, all_gather, gather, scatter, all_to_all.
//
// A half of the outbox begins with the sizes that an all_to_all sends to each rank; behind them lies the payload, one
// piece for all, or one per place where each member gets something else.
#include "cuda/collective.cuh"
#include "cuda/lanes.cuh"

namespace eep {
namespace {

constexpr uint64_t kHead = EEP_MAX_CUDA_RANKS * sizeof(uint64_t);
constexpr uint64_t kLargestBlock = uint64_t{1} << 40;  // more than any GPU holds: a member that names more is lying

template <bool kAcrossHosts>
struct Move {
  const Home& home;
  const BlockCall& call;
  Party<kAcrossHosts>& party;
  uint64_t capacity;  // bytes of a piece
  bool is_root;
  bool has_a_piece_per_place;

  __device__ uint8_t* payload(uint32_t rank, uint32_t half) const {
    return part_at(home, party.part[rank]).outbox(half) + kHead;
  }
  __device__ Slice piece(uint64_t bytes, uint64_t i) const { return piece_of(slice_of(bytes), i, capacity); }

  // What no piece of a payload of `bytes` exceeds in round `i`.
  __device__ uint64_t most(uint64_t bytes, uint64_t i) const {
    return piece_of({0, share_of(bytes)}, i, capacity).bytes;
  }

  // What this rank puts into its outbox for the member at `place`, or for all (then `place` is our own).
  __device__ Copy fill(uint32_t place, uint64_t i) const {
    const uint32_t position = party.position[place];
    uint8_t* to = payload(home.rank, party.half);
    if (!has_a_piece_per_place) {
      const Slice piece_here = piece(call.bytes, i);
      return {static_cast<const uint8_t*>(call.in) + piece_here.begin, to, piece_here.bytes};
    }
    const Slice piece_here = piece(call.kind == EEP_ALL_TO_ALL ? call.in_bytes[position] : call.bytes, i);
    return {call.in_blocks[position] ? call.in_blocks[position] + piece_here.begin : nullptr, to + place * capacity,
            piece_here.bytes};
  }

  // What it takes from the member at `place`.
  __device__ Copy pull(uint32_t place, uint64_t i) const {
    const uint32_t position = party.position[place], rank = party.rank[place];
    if (!party.has(rank)) return {nullptr, nullptr, 0};
    const uint8_t* from = payload(rank, party.half_of[rank]) + (has_a_piece_per_place ? party.own * capacity : 0);
    if (call.kind == EEP_ALL_GATHER || call.kind == EEP_GATHER || call.kind == EEP_ALL_TO_ALL) {
      if (call.kind == EEP_GATHER && !is_root) return {nullptr, nullptr, 0};
      const Slice piece_here = piece(call.kind == EEP_ALL_TO_ALL ? call.out_bytes[position] : call.bytes, i);
      uint8_t* to = call.out_blocks[position];
      return {from, to ? to + piece_here.begin : nullptr, piece_here.bytes};
    }
    if (rank != call.root || (call.kind == EEP_BROADCAST && is_root)) return {nullptr, nullptr, 0};
    const Slice piece_here = piece(call.bytes, i);
    return {from, static_cast<uint8_t*>(call.out) + piece_here.begin, piece_here.bytes};
  }

  // What members on other hosts take of what this rank put there.
  __device__ Reads reads(bool fills, uint64_t i) const {
    if (!fills) return {};
    const uint64_t head = call.kind == EEP_ALL_TO_ALL && i == 0 ? kHead : 0;
    if (has_a_piece_per_place) return {party.active, head, kHead, capacity, most(call.bytes, i), home.shape.lane_bytes};
    const uint64_t readers = call.kind == EEP_GATHER ? rank_bit(call.root) : party.active;
    return {readers, head, kHead, 0, piece(call.bytes, i).bytes, home.shape.lane_bytes};
  }
};

// all_to_all: says how much each member gets.
template <bool kAcrossHosts>
__device__ void tell_sizes(const Move<kAcrossHosts>& move) {
  const Party<kAcrossHosts>& party = move.party;
  uint64_t* sizes = reinterpret_cast<uint64_t*>(move.payload(move.home.rank, party.half) - kHead);
  if (threadIdx.x < party.count) sizes[party.rank[threadIdx.x]] = move.call.in_bytes[party.position[threadIdx.x]];
}

// all_to_all: takes nothing from a member that sends another amount than we expect.
template <bool kAcrossHosts>
__device__ void check_sizes(const Move<kAcrossHosts>& move) {
  Party<kAcrossHosts>& party = move.party;
  if (threadIdx.x < 32) {
    uint64_t wrong = 0;
    for (uint32_t place = threadIdx.x; place < party.count; place += 32) {
      const uint32_t rank = party.rank[place];
      if (!party.has(rank)) continue;
      const uint8_t* head = move.payload(rank, party.half_of[rank]) - kHead;
      const uint64_t size = load_relaxed_sys(reinterpret_cast<const uint64_t*>(head) + move.home.rank);
      if (size != move.call.out_bytes[party.position[place]]) wrong |= rank_bit(rank);
    }
    wrong = reduce_or(wrong);
    if (threadIdx.x == 0 && wrong) {
      party.present &= ~wrong;
      complain(move.home, EEP_STATUS_MISMATCH);
    }
  }
  __syncthreads();
}

template <bool kAcrossHosts>
__global__ void __launch_bounds__(kLaneThreads)
    move_kernel(const __grid_constant__ Home home, const __grid_constant__ BlockCall call) {
  __shared__ Party<kAcrossHosts> party;
  __shared__ Copies copies;
  if (!join_party(home, call.lane, party)) return;
  const bool is_rooted = call.kind == EEP_BROADCAST || call.kind == EEP_GATHER || call.kind == EEP_SCATTER;
  if (is_rooted && !(party.active >> call.root & 1)) {
    if (threadIdx.x == 0) complain(home, EEP_STATUS_MISMATCH);  // no member can take part in that; all of them see it
    return;
  }
  const bool is_root = call.root == home.rank, is_all_to_all = call.kind == EEP_ALL_TO_ALL;
  const bool by_place = call.kind == EEP_SCATTER || is_all_to_all;
  const uint64_t room = home.shape.lane_bytes - kHead;
  const uint64_t capacity = (by_place ? room / party.count : room) / sizeof(uint4) * sizeof(uint4);
  const Move<kAcrossHosts> move{home, call, party, capacity, is_root, by_place};
  const Statement said{call.call, call.bytes, party.active, is_all_to_all};
  const bool fills = call.kind == EEP_ALL_GATHER || call.kind == EEP_GATHER || is_all_to_all ||
                     (is_root && (call.kind == EEP_BROADCAST || call.kind == EEP_SCATTER));

  // How long an all_to_all is, a rank knows only when the others have said how much they send.
  uint64_t rounds = is_all_to_all ? 1 : rounds_for(call.bytes, capacity), largest = call.bytes;
  for (uint64_t i = 0; i < rounds; ++i) {
    if (fills && by_place)
      run_copies(copies, party.count, move.most(call.bytes, i), [&](uint32_t place) { return move.fill(place, i); });
    else if (fills)
      run_copies(copies, 1, move.most(call.bytes, i), [&](uint32_t) { return move.fill(party.own, i); });
    if (is_all_to_all && i == 0) tell_sizes(move);
    meet(home, party, said, move.reads(fills, i));
    if (is_all_to_all && i == 0) {
      check_sizes(move);
      largest = party.largest;
      if (largest <= kLargestBlock)
        rounds = rounds_for(largest, capacity);
      else if (threadIdx.x == 0)
        complain(home, EEP_STATUS_CORRUPT);
    }
    if (largest)
      run_copies(copies, party.count, move.most(largest, i), [&](uint32_t place) { return move.pull(place, i); });
    end_round(home, party);
  }
  leave_party(home, call.lane, party);
}

}  // namespace

cudaError_t load_moves() { return load_kernels(move_kernel<false>, move_kernel<true>); }

int launch_move(const Home& home, const BlockCall& call, uint32_t parts, cudaStream_t stream) {
  const auto kernel = home.landing ? move_kernel<true> : move_kernel<false>;
  kernel<<<parts, kLaneThreads, 0, stream>>>(home, call);
  return check_cuda(cudaGetLastError(), "a collective");
}

}  // namespace eep
