#include "cpu/lanes.h"

#include <cstring>

#include "common/control.h"
#include "common/mirrors.h"
#include "cpu/context.h"

namespace eep {
namespace {

int check_group(const eep_context& context, const eep_group& group) {
  if (!group.id || group.id >= EEP_GROUP_LIMIT)
    return fail(EEP_ERROR_ARGUMENT, "the id of a group must not be 0, which marks a free lane, and be below 2^39");
  if (!group.size || group.size > context.shape.max_ranks)
    return fail(EEP_ERROR_ARGUMENT, "a group has between 1 and %u members, got %u", context.shape.max_ranks,
                group.size);
  RankSet members = {};
  for (uint32_t i = 0; i < group.size; ++i) {
    const uint32_t rank = group.ranks[i];
    if (rank >= context.shape.max_ranks)
      return fail(EEP_ERROR_ARGUMENT, "rank %u of the group is outside the capacity of %u ranks", rank,
                  context.shape.max_ranks);
    if (has(members, rank)) return fail(EEP_ERROR_ARGUMENT, "rank %u is in the group more than once", rank);
    add(members, rank);
  }
  if (!has(members, context.table.rank))
    return fail(EEP_ERROR_ARGUMENT, "rank %u does not belong to the group that it opens", context.table.rank);
  return EEP_OK;
}

// No member of the new group knows this lane yet: what lies here is of another group, and nothing can be lost.
void clear(const eep_context& context, uint32_t lane) {
  const LaneView own(context.shape, context.at, context.region, lane);
  for (uint32_t slot = 0; slot < context.at.slots; ++slot) {
    for (uint32_t part = 0; part < context.shape.lane_parts; ++part)
      store_relaxed(own.part(part).mailbox(slot)->flag, uint64_t{0});
    if (!context.shape.pipe_bytes) continue;
    store_relaxed(own.pipe(slot)->taken, uint64_t{0});
    for (uint32_t cell = 0; cell < EEP_PIPE_CELLS; ++cell) store_relaxed(own.cell(slot, cell)->flag, uint64_t{0});
  }
}

// The lane whose word is that, or -1.
int find(const eep_control_page& page, uint64_t word, uint32_t lanes) {
  for (uint32_t lane = 0; lane < lanes; ++lane)
    if (load_acquire(page.groups[lane]) == word) return static_cast<int>(lane);
  return -1;
}

// The lane that a group gets: its own if it has one, else one that was never used, else the one that was closed first.
// A member that comes late may still want to read what a group left in its lane.
uint32_t choose_lane(const eep_context& context, uint64_t group) {
  const uint32_t lanes = context.shape.lanes;
  const Lane* lane = context.lanes.lane.get();
  uint32_t chosen = lanes;
  for (uint32_t i = 0; i < lanes; ++i) {
    if (lane[i].group.id == group) return i;
    if (!lane[i].group.id && (chosen == lanes || lane[i].closed < lane[chosen].closed)) chosen = i;
  }
  return chosen;
}

int check_open(const eep_context& context, uint32_t lane, const char* call) {
  if (lane < context.shape.lanes && context.lanes.lane[lane].group.id) return EEP_OK;
  return fail(EEP_ERROR_ARGUMENT, "%s: lane %u serves no group; open one first (there are %u lanes)", call, lane,
              context.shape.lanes);
}

// Ranks on other hosts hear of a lane from the proxy.
void tell_proxy(const eep_context& context) {
  for (uint32_t rank = 0; rank < context.shape.max_ranks; ++rank) {
    const eep_peer& peer = context.table.peers[rank];
    if (!peer.active || peer.transport != EEP_TRANSPORT_REMOTE || !peer.control) continue;
    ring(*reinterpret_cast<eep_control_page*>(peer.control));
    return;  // they have one page in common
  }
}

}  // namespace

int take_members(eep_context& context, uint32_t lane, const char* call, Members& members) {
  if (const int error = check_in_view(context.table, call)) return error;
  const std::lock_guard lock(context.lanes.mutex);
  if (const int error = check_open(context, lane, call)) return error;
  const eep_group& group = context.lanes.lane[lane].group;
  members.group = group.id;
  members.epoch = context.table.epoch;
  members.me = context.table.rank;
  members.lane = lane;
  members.size = group.size;
  members.active = members.remote = {};
  uint32_t places = 0;
  for (uint32_t i = 0; i < group.size; ++i) {
    const uint32_t rank = group.ranks[i];
    const eep_peer& peer = context.table.peers[rank];
    members.ranks[i] = rank;
    members.position[rank] = i;
    if (!peer.active) continue;
    // A table that was scribbled over must cost us a peer, not the process.
    if (!peer.region || !peer.control || peer.slot != eep_slot_of(rank, peer.incarnation, context.shape.max_ranks)) {
      report(*context.control, EEP_STATUS_BAD_TABLE);
      continue;
    }
    add(members.active, rank);
    members.place[rank] = places++;
    members.slot[rank] = peer.slot;
    members.incarnation[rank] = peer.incarnation;
    members.region[rank] = reinterpret_cast<uint8_t*>(peer.region);
    members.control[rank] = reinterpret_cast<eep_control_page*>(peer.control);
    members.page[rank] = members.control[rank];
    members.host[rank] = load_relaxed(context.control->host);
    if (peer.transport != EEP_TRANSPORT_REMOTE) continue;
    add(members.remote, rank);
    members.page[rank] = page_behind(members.region[rank], context.at);
    members.host[rank] = load_relaxed(members.page[rank]->host);
  }
  return EEP_OK;
}

int find_lane(const Members& members, uint32_t rank, uint32_t lanes) {
  return find(*members.page[rank], members.group, lanes);
}

int find_lane_to_read(const Members& members, uint32_t rank, uint32_t lanes) {
  const int open = find_lane(members, rank, lanes);
  return open >= 0 ? open : find(*members.page[rank], eep_group_closed(members.group, members.epoch), lanes);
}

void knock(const Members& members, const RankSet& ranks) {
  for_each_rank(ranks & members.remote, [&](uint32_t rank) {
    ring(*members.page[rank]);
    ring(*members.control[rank]);
  });
}

RankSet left_among(const Members& members, const RankSet& ranks, uint32_t lanes) {
  RankSet left = {};
  for_each_rank(ranks, [&](uint32_t rank) {
    const eep_control_page& page = *members.page[rank];
    if (load_acquire(page.state) == EEP_OWNER_LEFT ||
        find(page, eep_group_closed(members.group, members.epoch), lanes) >= 0)
      add(left, rank);
  });
  return left;
}

}  // namespace eep

int eep_lane_open(eep_context* context, const eep_group* group, uint32_t* lane) {
  using namespace eep;
  if (const int error = check_group(*context, *group)) return error;
  const std::lock_guard lock(context->lanes.mutex);
  const uint32_t lanes = context->shape.lanes, chosen = choose_lane(*context, group->id);
  if (chosen == lanes)
    return fail(EEP_ERROR_ARGUMENT, "all %u lanes serve a group already; close one, or make the region with more",
                lanes);
  Lane& taken = context->lanes.lane[chosen];
  if (taken.group.id != group->id) {
    // A member that still reads the last round of the group that was here is not disturbed by the first of this one.
    uint64_t half[Lane::kParts];
    for (uint32_t part = 0; part < Lane::kParts; ++part) half[part] = taken.calls[part].half;
    const uint32_t ranks = context->shape.max_ranks;
    taken = Lane{};
    taken.sent.resize(ranks), taken.received.resize(ranks);
    for (uint32_t part = 0; part < Lane::kParts; ++part) {
      taken.calls[part].half = half[part];
      taken.calls[part].lane_of.resize(ranks), taken.calls[part].incarnation.resize(ranks);
    }
    clear(*context, chosen);
  }
  taken.group = *group;
  store_release(context->control->groups[chosen], group->id);
  tell_proxy(*context);
  *lane = chosen;
  return EEP_OK;
}

int eep_lane_close(eep_context* context, uint32_t lane) {
  using namespace eep;
  const std::lock_guard lock(context->lanes.mutex);
  if (const int error = check_open(*context, lane, "close")) return error;
  Lane& closed = context->lanes.lane[lane];
  store_release(context->control->groups[lane], eep_group_closed(closed.group.id, context->table.epoch));
  tell_proxy(*context);
  closed.group.id = 0;
  closed.closed = ++context->lanes.closings;
  return EEP_OK;
}
