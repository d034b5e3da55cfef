// What kernels of a GPU touch of the memory that they have in common with the proxy. The rest of a landing and of a
// mirror is addresses only, and is not registered with the GPU: that would take memory for all of it. Pure.
#ifndef EEP_HOSTS_KERNEL_RANGES_H_
#define EEP_HOSTS_KERNEL_RANGES_H_

#include <cstdint>
#include <vector>

#include "common/rank_sets.h"
#include "eep/protocol.h"

namespace eep::hosts {

struct Range {
  uint64_t offset, bytes;  // whole pages

  bool operator==(const Range&) const = default;
};

// Of the landing of `rank`: what comes from `remote` and what goes there. In order, and no two of them meet.
std::vector<Range> landing_ranges(const eep_shape& shape, uint32_t rank, const RankSet& remote);
// Of a mirror: what goes from our slot there to the peer, and what the peer made of it.
std::vector<Range> mirror_ranges(const eep_shape& shape, uint32_t rank, uint32_t own_slot);

}  // namespace eep::hosts

#endif  // EEP_HOSTS_KERNEL_RANGES_H_
