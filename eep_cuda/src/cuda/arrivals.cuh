// What sources have said of a round so far, as a warp sees it.
#ifndef EEP_CUDA_ARRIVALS_CUH_
#define EEP_CUDA_ARRIVALS_CUH_

#include "cuda/members.cuh"

namespace eep {

// So many ranks may send in pieces: each lane of a warp looks for one.
constexpr uint32_t kMostRanksInPieces = 32 / EEP_MAX_PIECES;

// Lane i speaks for ranks i and i + 32.
struct Arrivals {
  uint64_t here;   // sources all of whose pieces are here, right or wrong
  uint64_t sound;  // of these, the ones that sent what this dispatch takes
  uint32_t count[2];
};

struct Said {
  bool is_here;
  uint64_t envelope;
  uint32_t count;
};

__device__ inline Said read_flag(const Members& members, const uint64_t* words) {
  uint64_t flag, envelope;
  load_pair_acquire_sys(words, flag, envelope);
  return {eep_flag_is(flag, members.epoch, members.round) != 0, envelope, eep_flag_count(flag)};
}

// Few ranks: lane 4 r + p looks for piece p of rank r.
__device__ inline Arrivals look_for_pieces(const Home& home, const ChannelView& inbox, const Members& members,
                                           uint64_t wanted, uint64_t envelope) {
  const uint32_t lane = threadIdx.x % 32, rank = lane / EEP_MAX_PIECES, piece = lane % EEP_MAX_PIECES;
  Said said{};
  if (wanted >> rank & 1) {
    const eep_mailbox* mailbox = inbox.mailbox(members.slot[rank]);
    said = read_flag(members, piece ? &mailbox->further[piece - 1].dispatch_flag : &mailbox->dispatch_flag);
  }
  const uint32_t first = lane - piece;  // the lane that has read the first piece
  const uint64_t first_envelope = __shfl_sync(~0u, said.envelope, first);
  const uint32_t first_count = __shfl_sync(~0u, said.count, first);
  const bool first_is_here = __shfl_sync(~0u, static_cast<int>(said.is_here), first) != 0;
  // Before the first piece is here nothing is known of the others, and of one that is wrong nothing is believed.
  const uint32_t named = eep_envelope_pieces(first_envelope);
  const bool fits = first_envelope == eep_envelope_of_pieces(envelope, named) && first_count <= home.shape.max_tokens;
  const uint32_t pieces = fits ? named : 1;
  const bool is_sound = fits && said.envelope == first_envelope && said.count == first_count;
  const bool counts = first_is_here && piece < pieces;
  const uint32_t missing = __ballot_sync(~0u, !first_is_here || (counts && !said.is_here));
  const uint32_t unsound = __ballot_sync(~0u, counts && !is_sound);
  // From now on lane i speaks for rank i.
  const uint32_t of_rank = lane % kMostRanksInPieces * EEP_MAX_PIECES, all = (1u << EEP_MAX_PIECES) - 1;
  const bool is_here = lane < kMostRanksInPieces && (wanted >> lane & 1) && !(missing >> of_rank & all);
  const uint32_t count = __shfl_sync(~0u, first_count, of_rank);
  const uint64_t here = __ballot_sync(~0u, is_here);
  const uint64_t sound = __ballot_sync(~0u, is_here && !(unsound >> of_rank & all));
  return {here, sound, {count, 0}};
}

__device__ inline Arrivals look_for_ranks(const Home& home, const ChannelView& inbox, const Members& members,
                                          uint64_t wanted, uint64_t envelope) {
  bool is_here[2], is_sound[2];
  Arrivals found{};
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t rank = threadIdx.x % 32 + 32 * half;
    is_here[half] = is_sound[half] = false;
    if (!(wanted >> rank & 1)) continue;
    const Said said = read_flag(members, &inbox.mailbox(members.slot[rank])->dispatch_flag);
    is_here[half] = said.is_here;
    is_sound[half] = said.is_here && said.envelope == envelope && said.count <= home.shape.max_tokens;
    found.count[half] = said.count;
  }
  found.here = vote(is_here[0], is_here[1]);
  found.sound = vote(is_sound[0], is_sound[1]);
  return found;
}

// By one warp, of the sources in `wanted`. Whether ranks may send in pieces, all of them know alike.
__device__ inline Arrivals look_for(const Home& home, const eep_dispatch_recv_args& args, const Members& members,
                                    uint64_t wanted) {
  const ChannelView inbox = own_channel(home, args.channel);
  const uint64_t envelope = eep_envelope(args.wire_type, args.topk, home.shape.hidden);
  return home.shape.max_ranks <= kMostRanksInPieces ? look_for_pieces(home, inbox, members, wanted, envelope)
                                                    : look_for_ranks(home, inbox, members, wanted, envelope);
}

}  // namespace eep

#endif  // EEP_CUDA_ARRIVALS_CUH_
