#include "common/checks.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace eep {
namespace {
thread_local char last_error[512] = "";

int check_lanes(const eep_shape& shape) {
  if (shape.lanes > EEP_MAX_LANES)
    return fail(EEP_ERROR_ARGUMENT, "lanes must be at most %d, got %u", EEP_MAX_LANES, shape.lanes);
  if (!shape.lanes) return EEP_OK;
  if (shape.lane_parts < 1 || shape.lane_parts > 64)
    return fail(EEP_ERROR_ARGUMENT, "lane_parts must be between 1 and 64, got %u", shape.lane_parts);
  // A round must move at least one block of 64 bytes to each rank, and the sizes of an all_to_all.
  const uint32_t least = std::max(8192u, (shape.max_ranks * 80u + 128u + 4095u) / 4096u * 4096u);
  if (shape.lane_bytes < least || shape.lane_bytes > 1u << 30 || shape.lane_bytes % 4096)
    return fail(EEP_ERROR_ARGUMENT, "lane_bytes must be a multiple of 4096 between %u and %u with %u ranks, got %u",
                least, 1u << 30, shape.max_ranks, shape.lane_bytes);
  if (shape.pipe_bytes > 1u << 30 || shape.pipe_bytes % 64)
    return fail(EEP_ERROR_ARGUMENT, "pipe_bytes must be a multiple of 64 up to %u, got %u", 1u << 30, shape.pipe_bytes);
  return EEP_OK;
}

int check_shape(const eep_shape& shape) {
  if (shape.max_ranks < 1 || shape.max_ranks > kMostRanks)
    return fail(EEP_ERROR_ARGUMENT,
                "max_ranks must be between 1 and %u, got %u (a CPU serves up to %d, a GPU up to %d)", kMostRanks,
                shape.max_ranks, EEP_MAX_RANKS, EEP_MAX_CUDA_RANKS);
  if (const int error = check_lanes(shape)) return error;
  if (shape.lanes && !shape.channels) return EEP_OK;  // for process groups only
  if (shape.max_tokens < 1 || shape.max_tokens > EEP_MAX_TOKENS)
    return fail(EEP_ERROR_ARGUMENT, "max_tokens must be between 1 and %d, got %u", EEP_MAX_TOKENS, shape.max_tokens);
  if (shape.hidden < 1 || shape.hidden > 1u << 20)
    return fail(EEP_ERROR_ARGUMENT, "hidden must be between 1 and %u, got %u", 1u << 20, shape.hidden);
  if (shape.max_topk < 1 || shape.max_topk > EEP_MAX_TOPK)
    return fail(EEP_ERROR_ARGUMENT, "max_topk must be between 1 and %d, got %u", EEP_MAX_TOPK, shape.max_topk);
  if (shape.local_experts < 1 || shape.local_experts > 1u << 16)
    return fail(EEP_ERROR_ARGUMENT, "local_experts must be between 1 and %u, got %u", 1u << 16, shape.local_experts);
  if (shape.layout > EEP_LAYOUT_EXPERT)
    return fail(EEP_ERROR_ARGUMENT, "there is no layout %u; see eep_layout", shape.layout);
  if (shape.wire_type > EEP_TYPE_FP8_UE8M0)
    return fail(EEP_ERROR_ARGUMENT, "there is no wire type %u; see eep_type", shape.wire_type);
  if (shape.combine_type > EEP_TYPE_FP8)
    return fail(EEP_ERROR_ARGUMENT, "expert outputs travel as f32, bf16 or fp8, not as type %u", shape.combine_type);
  if (shape.channels < 1 || shape.channels > EEP_MAX_CHANNELS)
    return fail(EEP_ERROR_ARGUMENT, "channels must be between 1 and %d, got %u", EEP_MAX_CHANNELS, shape.channels);
  if ((eep_is_fp8(shape.wire_type) || eep_is_fp8(shape.combine_type)) && shape.hidden % EEP_SCALE_GROUP)
    return fail(EEP_ERROR_ARGUMENT, "fp8 needs a hidden size that is a multiple of %d, got %u", EEP_SCALE_GROUP,
                shape.hidden);
  return EEP_OK;
}

int check_topk(const eep_shape& shape, uint32_t topk) {
  if (topk >= 1 && topk <= shape.max_topk) return EEP_OK;
  return fail(EEP_ERROR_ARGUMENT, "top-k must be between 1 and %u, got %u", shape.max_topk, topk);
}
}  // namespace

int fail(eep_error code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof last_error, format, args);
  va_end(args);
  return code;
}

int check_create(const eep_shape& shape, uint32_t rank, const void* region, const eep_control_page* control) {
  if (const int error = check_shape(shape)) return error;
  if (rank >= shape.max_ranks)
    return fail(EEP_ERROR_ARGUMENT, "rank %u is outside the capacity of %u ranks", rank, shape.max_ranks);
  if (!region || !control)
    return fail(EEP_ERROR_ARGUMENT, "rank %u gave no address for its region or its control page", rank);
  return EEP_OK;
}

int check_turn(const eep_shape& shape, uint32_t channel, const Turn& turn, eep_phase expected, const char* call) {
  if (channel >= shape.channels)
    return fail(EEP_ERROR_ARGUMENT, "channel %u does not exist, the buffer has %u", channel, shape.channels);
  const bool view_changed = turn.epoch != turn.table_epoch;
  if (expected == EEP_PHASE_IDLE && view_changed) return EEP_OK;  // a new view abandons what was in flight
  if (turn.phase != static_cast<uint32_t>(expected)) {
    static const char* const next[] = {"a dispatch", "the receive phase of the dispatch", "a combine",
                                       "the receive phase of the combine"};
    return fail(EEP_ERROR_PHASE, "%s called out of turn: channel %u expects %s next", call, channel, next[turn.phase]);
  }
  if (view_changed)
    return fail(EEP_ERROR_VIEW, "%s: the view changed from epoch %llu to %llu since the dispatch; start the step again",
                call, static_cast<unsigned long long>(turn.epoch), static_cast<unsigned long long>(turn.table_epoch));
  return EEP_OK;
}

int check_in_view(const eep_peer_table& table, const char* call) {
  if (table.peers[table.rank].active) return EEP_OK;
  return fail(EEP_ERROR_VIEW, "%s: rank %u is not part of its own view; connect it first", call, table.rank);
}

int check_dispatch_send(const eep_shape& shape, const eep_dispatch_send_args& args) {
  if (args.tokens > shape.max_tokens)
    return fail(EEP_ERROR_ARGUMENT, "%u tokens are more than the maximum of %u this buffer was made for", args.tokens,
                shape.max_tokens);
  if (const int error = check_topk(shape, args.topk)) return error;
  if (args.tokens && (!args.x || !args.topk_idx))
    return fail(EEP_ERROR_ARGUMENT, "dispatch of %u tokens: x or topk_idx is missing", args.tokens);
  if (args.x_type > EEP_TYPE_BF16) return fail(EEP_ERROR_ARGUMENT, "x must be f32 or bf16, got type %u", args.x_type);
  if (args.wire_type > EEP_TYPE_FP8_UE8M0)
    return fail(EEP_ERROR_ARGUMENT, "there is no wire type %u; see eep_type", args.wire_type);
  if (eep_is_fp8(args.wire_type) ? shape.hidden % EEP_SCALE_GROUP != 0 : args.wire_type != args.x_type)
    return fail(
        EEP_ERROR_ARGUMENT,
        "x of type %u cannot travel as wire type %u: send the type of x, or fp8 with a hidden size that is a multiple "
        "of %d",
        args.x_type, args.wire_type, EEP_SCALE_GROUP);
  if (eep_element_bytes(args.wire_type) > eep_element_bytes(shape.wire_type))
    return fail(EEP_ERROR_ARGUMENT,
                "wire type %u is wider than type %u, which this buffer was made for; make it with the wider one",
                args.wire_type, shape.wire_type);
  // Rows are used where they lie in the rank layout, so that their type cannot change from call to call.
  if (shape.layout == EEP_LAYOUT_RANK && args.wire_type != shape.wire_type)
    return fail(EEP_ERROR_ARGUMENT, "a buffer of the rank layout sends only the type it was made for, %u, not type %u",
                shape.wire_type, args.wire_type);
  return EEP_OK;
}

int check_dispatch_recv(const eep_shape& shape, const eep_dispatch_recv_args& args) {
  if (const int error = check_topk(shape, args.topk)) return error;
  const bool complete = shape.layout == EEP_LAYOUT_RANK
                            ? args.topk_idx && args.topk_weights
                            : args.packed_rows && args.packed_count && args.src_info && args.layout_range &&
                                  (args.packed_scales || !eep_is_fp8(args.wire_type));
  if (!args.count || !complete)
    return fail(EEP_ERROR_ARGUMENT,
                "dispatch: a tensor that the layout of this buffer needs for its output is missing");
  return EEP_OK;
}

int check_combine_send(const eep_shape& shape, const eep_combine_send_args& args) {
  if (const int error = check_topk(shape, args.topk)) return error;
  if (!args.x || (shape.layout == EEP_LAYOUT_EXPERT && (!args.src_info || !args.layout_range)))
    return fail(EEP_ERROR_ARGUMENT, "combine: x is missing, or src_info or layout_range in the expert layout");
  return EEP_OK;
}

int check_combine_recv(const eep_shape& shape, const eep_combine_recv_args& args, uint32_t dispatched_tokens) {
  if (args.tokens != dispatched_tokens)
    return fail(EEP_ERROR_ARGUMENT, "combine of %u tokens after a dispatch of %u: give as many as were dispatched",
                args.tokens, dispatched_tokens);
  if (const int error = check_topk(shape, args.topk)) return error;
  if (args.tokens && (!args.out || !args.topk_idx))
    return fail(EEP_ERROR_ARGUMENT, "combine of %u tokens: out or topk_idx is missing", args.tokens);
  return EEP_OK;
}

int check_copies(uint32_t count, void* const* to, const void* const* from, const uint64_t* bytes) {
  for (uint32_t i = 0; i < count; ++i)
    if (bytes[i] && (!to[i] || !from[i]))
      return fail(EEP_ERROR_ARGUMENT, "copy %u has bytes, but no source or no target address", i);
  return EEP_OK;
}

int check_row_copies(uint32_t arrays, void* const* to, const void* const* from, const uint64_t* row_bytes,
                     uint64_t rows, const int64_t* to_rows, const int64_t* from_rows) {
  if (rows && (!to_rows || !from_rows)) return fail(EEP_ERROR_ARGUMENT, "there are rows to copy, but no list of them");
  return rows ? check_copies(arrays, to, from, row_bytes) : EEP_OK;
}

int check_page_copy(const eep_page_copy& copy, uint32_t count, const int64_t* pages) {
  if (count > copy.most)
    return fail(EEP_ERROR_ARGUMENT, "%u pages are more than the %u that there is room for", count, copy.most);
  if (!copy.from || !copy.row_bytes || !copy.table || !copy.pages || !copy.places || !copy.same || !copy.rows)
    return fail(EEP_ERROR_ARGUMENT, "pages cannot be copied: an address is missing");
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < copy.layers; ++layer) bytes += copy.row_bytes[layer] * copy.page_tokens;
  if (bytes > copy.page_bytes)
    return fail(EEP_ERROR_ARGUMENT, "the layers have %llu bytes for a page of %llu",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(copy.page_bytes));
  if (count && !pages) return fail(EEP_ERROR_ARGUMENT, "there are pages to copy, but no list of them");
  return EEP_OK;
}

}  // namespace eep

uint32_t eep_abi_version(void) { return EEP_ABI_VERSION; }
const char* eep_last_error(void) { return eep::last_error; }

int eep_region_layout_compute(const eep_shape* shape, eep_region_layout* out) {
  if (const int error = eep::check_shape(*shape)) return error;
  *out = eep_region_layout_of(shape);
  return EEP_OK;
}
