// Creation, checks of what the caller gives us, and the prologue that every round begins with.
#include "cpu/context.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "cpu/wait.h"

namespace eep {
namespace {
thread_local char last_error[512] = "";

int check_shape(const eep_shape& shape) {
  if (shape.max_ranks < 1 || shape.max_ranks > EEP_MAX_RANKS)
    return fail(EEP_ERROR_ARGUMENT, "max_ranks must be between 1 and %d, got %u", EEP_MAX_RANKS, shape.max_ranks);
  if (shape.max_tokens < 1 || shape.max_tokens > EEP_MAX_TOKENS)
    return fail(EEP_ERROR_ARGUMENT, "max_tokens must be between 1 and %d, got %u", EEP_MAX_TOKENS, shape.max_tokens);
  if (shape.hidden < 1 || shape.hidden > 1u << 20)
    return fail(EEP_ERROR_ARGUMENT, "hidden must be between 1 and %u, got %u", 1u << 20, shape.hidden);
  if (shape.max_topk < 1 || shape.max_topk > EEP_MAX_TOPK)
    return fail(EEP_ERROR_ARGUMENT, "max_topk must be between 1 and %d, got %u", EEP_MAX_TOPK, shape.max_topk);
  if (shape.local_experts < 1 || shape.local_experts > 1u << 16)
    return fail(EEP_ERROR_ARGUMENT, "local_experts must be between 1 and %u, got %u", 1u << 16, shape.local_experts);
  if (shape.layout > EEP_LAYOUT_EXPERT) return fail(EEP_ERROR_ARGUMENT, "unknown layout %u", shape.layout);
  if (shape.wire_type > EEP_TYPE_FP8_UE8M0) return fail(EEP_ERROR_ARGUMENT, "unknown wire type %u", shape.wire_type);
  if (shape.combine_type > EEP_TYPE_BF16)
    return fail(EEP_ERROR_ARGUMENT, "expert outputs must be f32 or bf16, got type %u", shape.combine_type);
  if (shape.channels < 1 || shape.channels > EEP_MAX_CHANNELS)
    return fail(EEP_ERROR_ARGUMENT, "channels must be between 1 and %d, got %u", EEP_MAX_CHANNELS, shape.channels);
  if (eep_is_fp8(shape.wire_type) && shape.hidden % EEP_SCALE_GROUP)
    return fail(EEP_ERROR_ARGUMENT, "fp8 needs a hidden size that is a multiple of %d, got %u", EEP_SCALE_GROUP,
                shape.hidden);
  return EEP_OK;
}
}  // namespace

int fail(eep_error code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  return code;
}

void take_snapshot(eep_context& context, eep_snapshot& snapshot) {
  const eep_peer_table& table = context.table;
  snapshot.deadline_ns = table.deadline_ns;
  snapshot.active = 0;
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
    snapshot.active |= rank_bit(rank);
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
  snapshot.received = 0;
  take_snapshot(context, snapshot);
  std::memset(snapshot.count, 0, sizeof snapshot.count);
}

bool leave_if_revoked(eep_context& context, eep_snapshot& snapshot) {
  if (!is_revoked(*context.control, snapshot.epoch)) return false;
  report(*context.control, EEP_STATUS_REVOKED);
  snapshot.active = 0;
  snapshot.received = 0;
  return true;
}

int check_phase(const eep_context& context, uint32_t channel, eep_phase expected, const char* call) {
  if (channel >= context.shape.channels)
    return fail(EEP_ERROR_ARGUMENT, "channel %u does not exist, the buffer has %u", channel, context.shape.channels);
  const eep_snapshot& snapshot = context.snapshots[channel];
  const bool view_changed = snapshot.epoch != context.table.epoch;
  if (expected == EEP_PHASE_IDLE && view_changed) return EEP_OK;  // a new view abandons what was in flight
  if (snapshot.phase != static_cast<uint32_t>(expected)) {
    static const char* const next[] = {"a dispatch", "the receive phase of the dispatch", "a combine",
                                       "the receive phase of the combine"};
    return fail(EEP_ERROR_PHASE, "%s called out of turn: channel %u expects %s next", call, channel,
                next[snapshot.phase]);
  }
  if (view_changed)
    return fail(EEP_ERROR_VIEW, "%s: the view changed from epoch %llu to %llu since the dispatch; start the step again",
                call, static_cast<unsigned long long>(snapshot.epoch),
                static_cast<unsigned long long>(context.table.epoch));
  return EEP_OK;
}

int check_in_view(const eep_context& context, const char* call) {
  if (context.table.peers[context.table.rank].active) return EEP_OK;
  return fail(EEP_ERROR_VIEW, "%s: rank %u is not part of its own view; connect it first", call, context.table.rank);
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

using eep::fail;

uint32_t eep_abi_version(void) { return EEP_ABI_VERSION; }
const char* eep_last_error(void) { return eep::last_error; }

int eep_region_layout_compute(const eep_shape* shape, eep_region_layout* out) {
  if (const int error = eep::check_shape(*shape)) return error;
  *out = eep_region_layout_of(shape);
  return EEP_OK;
}

int eep_create(const eep_shape* shape, uint32_t rank, void* region, eep_control_page* control, eep_context** out) {
  if (const int error = eep::check_shape(*shape)) return error;
  if (rank >= shape->max_ranks)
    return fail(EEP_ERROR_ARGUMENT, "rank %u is outside the capacity of %u ranks", rank, shape->max_ranks);
  if (!region || !control) return fail(EEP_ERROR_ARGUMENT, "a region and a control page are needed");
  auto context = std::make_unique<eep_context>();
  context->shape = *shape;
  context->at = eep_region_layout_of(shape);
  context->region = static_cast<uint8_t*>(region);
  context->control = control;
  context->table.rank = rank;
  context->table.max_ranks = shape->max_ranks;
  for (uint32_t channel = 0; channel < shape->channels; ++channel)
    context->row_scratch[channel] = std::make_unique<uint8_t[]>(context->at.row_bytes + context->at.scale_bytes);
  *out = context.release();
  return EEP_OK;
}

void eep_destroy(eep_context* context) { delete context; }
eep_peer_table* eep_table(eep_context* context) { return &context->table; }
const eep_snapshot* eep_snapshot_of(eep_context* context, uint32_t channel) {
  return channel < context->shape.channels ? &context->snapshots[channel] : nullptr;
}
