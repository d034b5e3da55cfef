// all_gather and all_reduce over several hosts: what crosses from a host to another goes once, from the first member of
// the one to the first of the other, its leaders.
//
//   member               leader, host A                          leader, host B           member
//   ------               --------------                          --------------           ------
//   block        ---->   blocks of A     ===== one crossing ===> blocks of B, A    ---->  takes what it needs
//
// Values cross and no partial sums: whatever is reduced is added in the order of the group, with the same bits as on
// one host. Members of a host meet in a part of the lane that is theirs, leaders in another.
#ifndef EEP_CPU_HIERARCHY_H_
#define EEP_CPU_HIERARCHY_H_

#include "cpu/lanes.h"
#include "cpu/reduce.h"

namespace eep {

// Parts of a lane on a CPU, where there are other hosts.
enum : uint32_t { kFlatPart = 0, kHostPart = 1, kLeaderPart = 2, kHostParts = 3 };

struct HierarchicalCall {
  uint64_t header, deadline_ns;
  Reduce reduce;  // null for all_gather
};

// Whether the members are on several hosts, of which one has several of them: the same on all.
bool is_hierarchical(const eep_context& context, const Members& members);

// Runs the call; EEP_OK or EEP_ERROR_MISMATCH.
int run_hierarchical(eep_context& context, const Members& members, eep_collective_args& args,
                     const HierarchicalCall& call);

}  // namespace eep

#endif  // EEP_CPU_HIERARCHY_H_
