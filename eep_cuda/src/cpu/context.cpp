// Creation, and the prologue that every round begins with.
#include "cpu/context.h"

#include <cstring>

#include "cpu/wait.h"
#include "eep/hosts.h"

namespace eep {

const uint32_t kMostRanks = EEP_MAX_RANKS;

void take_snapshot(eep_context& context, eep_snapshot& snapshot) {
  const eep_peer_table& table = context.table;
  snapshot.deadline_ns = table.deadline_ns;
  snapshot.active = {};
  for (uint32_t rank = 0; rank < context.shape.max_ranks; ++rank) {
    const eep_peer& peer = table.peers[rank];
    if (!peer.active) continue;
    // A table that was scribbled over must cost us a peer, not the process.
    if (!peer.region || !peer.control || peer.slot != eep_slot_of(rank, peer.incarnation, context.shape.max_ranks)) {
      report(*context.control, EEP_STATUS_BAD_TABLE);
      continue;
    }
    snapshot.slot[rank] = peer.slot;
    snapshot.region[rank] = peer.region;
    snapshot.control[rank] = peer.control;
    add(snapshot.active, rank);
  }
}

void begin_round(eep_context& context, uint32_t channel) {
  eep_snapshot& snapshot = context.snapshots[channel];
  if (snapshot.epoch != context.table.epoch) {
    // Ranks enter a new view together, so that counting from one again keeps them in step, joiners included.
    snapshot.epoch = context.table.epoch;
    snapshot.round = 0;
  }
  ++snapshot.round;
  snapshot.received = {};
  take_snapshot(context, snapshot);
  std::memset(snapshot.count, 0, context.shape.max_ranks * sizeof *snapshot.count);
}

bool leave_if_revoked(eep_context& context, eep_snapshot& snapshot) {
  if (!is_revoked(*context.control, snapshot.epoch)) return false;
  report(*context.control, EEP_STATUS_REVOKED);
  snapshot.active = snapshot.received = {};
  return true;
}

int check_experts(const eep_context& context, const int64_t* topk_idx, uint32_t tokens, uint32_t topk) {
  const int64_t limit = int64_t{context.shape.max_ranks} * context.shape.local_experts;
  for (uint64_t i = 0; i < uint64_t{tokens} * topk; ++i)
    if (topk_idx[i] < -1 || topk_idx[i] >= limit)
      return fail(EEP_ERROR_ARGUMENT, "topk_idx[%u, %u] is %lld, expert slots go from 0 to %lld (-1 for none)",
                  static_cast<unsigned>(i / topk), static_cast<unsigned>(i % topk), static_cast<long long>(topk_idx[i]),
                  static_cast<long long>(limit - 1));
  return EEP_OK;
}

}  // namespace eep

int eep_create(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control, eep_context** out) {
  if (const int error = eep::check_create(*shape, rank, region, control)) return error;
  auto context = std::make_unique<eep_context>();
  context->shape = *shape;
  context->at = eep_region_layout_of(shape);
  context->region = static_cast<uint8_t*>(region);
  context->control = control;
  context->table.rank = rank;
  context->table.max_ranks = shape->max_ranks;
  for (uint32_t channel = 0; channel < shape->channels; ++channel)
    context->row_scratch[channel] = std::make_unique<uint8_t[]>(context->at.row_bytes + context->at.scale_bytes);
  if (shape->lanes) context->lanes.lane = std::make_unique<eep::Lane[]>(shape->lanes);
  *out = context.release();
  return EEP_OK;
}

int eep_publish_deadline(eep_context*) { return EEP_OK; }
int eep_tune(eep_context*, uint32_t, uint32_t) { return EEP_OK; }
int eep_share_gpu(eep_context*) { return EEP_OK; }
int eep_overlap(eep_context*) { return EEP_OK; }
int eep_show_mirror(eep_context*, void*, uint32_t) { return EEP_OK; }
int eep_hide_mirror(eep_context*, void*) { return EEP_OK; }

int eep_span_hosts(eep_context*, void*, const eep_rank_set*) {
  return eep::fail(EEP_ERROR_ARGUMENT, "a rank on a CPU needs no landing: the proxy reaches its region");
}

int eep_stamps(eep_context*, eep_block_stamps*, uint32_t) {
  return eep::fail(EEP_ERROR_ARGUMENT,
                   "only kernels of a GPU note when they pass their stations; use the CUDA library");
}
void eep_destroy(eep_context* context) { delete context; }
int eep_publish_table(eep_context* context) {
  eep::forget_trouble(*context->control);  // the kernels read the host's copy itself
  return EEP_OK;
}
eep_peer_table* eep_table(eep_context* context) { return &context->table; }
const eep_snapshot* eep_snapshot_of(eep_context* context, uint32_t channel) {
  return channel < context->shape.channels ? &context->snapshots[channel] : nullptr;
}
