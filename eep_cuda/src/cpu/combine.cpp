// Combine: publish what the experts made, then pull and add up what the others made of our tokens.
#include <algorithm>
#include <cstring>

#include "cpu/context.h"
#include "cpu/fault.h"
#include "cpu/formats.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// ---- publish ----

// rank layout: one row per token that wanted an expert here. Nothing to do where the experts wrote the
// outbox.
void publish_by_rank(const eep_context& context, const eep_combine_send_args& args, const eep_snapshot& snapshot) {
  const ChannelView own = context.own(args.channel);
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  if (x == own.outbox_row(0)) return;
  for_each_rank(snapshot.received, [&](uint32_t rank) {
    const uint32_t slot = snapshot.slot[rank];
    for (uint32_t token = 0; token < snapshot.count[rank]; ++token) {
      const int32_t* idx = own.topk_idx(slot, token);
      if (std::all_of(idx, idx + args.topk, [](int32_t expert) { return expert < 0; })) continue;
      const uint64_t row = uint64_t{slot} * context.shape.max_tokens + token;
      std::memcpy(own.outbox_row(row), x + row * context.at.outbox_row_bytes, context.at.outbox_row_bytes);
    }
  });
}

// expert layout: one row per choice of a token. Indices come from the caller, so each is checked before use.
void publish_by_expert(const eep_context& context, const eep_combine_send_args& args, const eep_snapshot& snapshot) {
  const ChannelView own = context.own(args.channel);
  const uint64_t rows_per_expert = uint64_t{context.shape.max_ranks} * context.shape.max_tokens;
  for (uint32_t expert = 0; expert < context.shape.local_experts; ++expert) {
    for_each_rank(snapshot.received, [&](uint32_t rank) {
      const int64_t range = args.layout_range[uint64_t{expert} * context.shape.max_ranks + rank];
      const uint64_t begin = static_cast<uint64_t>(range) >> 32, count = range & 0xffffffff;
      for (uint64_t row = begin; row < std::min(begin + count, rows_per_expert); ++row) {
        const int32_t token = args.src_info[expert * rows_per_expert + row];
        if (token < 0 || static_cast<uint32_t>(token) >= snapshot.count[rank]) continue;
        const int32_t* idx = own.topk_idx(snapshot.slot[rank], token);
        for (uint32_t k = 0; k < args.topk; ++k)
          if (idx[k] == static_cast<int32_t>(expert))
            std::memcpy(
                own.outbox_by_choice(rank, token, k),
                static_cast<const uint8_t*>(args.x) + (expert * rows_per_expert + row) * context.at.outbox_row_bytes,
                context.at.outbox_row_bytes);
      }
    });
  }
}

void send_flags(eep_context& context, uint32_t channel, const eep_snapshot& snapshot) {
  const uint32_t own_slot = snapshot.slot[context.table.rank];
  uint32_t sent = 0;
  for_each_rank(snapshot.active & ~given_up(*context.control), [&](uint32_t rank) {
    // The count tells the source whether we took its tokens: if not, it must not believe the sum.
    store_release(context.of_peer(snapshot, rank, channel).mailbox(own_slot).combine_flag,
                  eep_flag_make(snapshot.epoch, snapshot.round, snapshot.count[rank]));
    ring(*reinterpret_cast<eep_control_page*>(snapshot.control[rank]));
    if (++sent == 1) fault::pass(fault::kCombineMidFlags);
  });
}

// ---- pull ----

// Waits for the outboxes of the round; returns the ranks whose outbox holds what they made of our tokens.
uint64_t await_outboxes(eep_context& context, uint32_t channel, const eep_snapshot& snapshot) {
  const ChannelView own = context.own(channel);
  uint64_t usable = 0;
  wait_for(snapshot.active & ~given_up(*context.control), *context.control, snapshot.epoch, snapshot.deadline_ns,
           [&](uint32_t rank) {
             const uint64_t flag = load_acquire(own.mailbox(snapshot.slot[rank]).combine_flag);
             if (!eep_flag_is(flag, snapshot.epoch, snapshot.round)) return false;
             if (eep_flag_count(flag) == snapshot.tokens) {
               usable |= rank_bit(rank);
             } else {
               set_bits(context.control->corrupt, rank_bit(rank));
               report(*context.control, EEP_STATUS_CORRUPT);
             }
             return true;
           });
  return usable;
}

float load(const uint8_t* row, uint32_t i, uint32_t type) {
  return type == EEP_TYPE_F32 ? reinterpret_cast<const float*>(row)[i]
                              : float_of_bf16(reinterpret_cast<const uint16_t*>(row)[i]);
}

// Adds up to `max_topk` rows in the order given. In blocks, so that the partial sums stay in registers or L1.
template <uint32_t type>
void add_rows(const uint8_t* const* rows, const float* weights, uint32_t count, uint32_t hidden, uint8_t* out) {
  constexpr uint32_t kBlock = 256;
  float sum[kBlock];
  for (uint32_t begin = 0; begin < hidden; begin += kBlock) {
    const uint32_t size = std::min(kBlock, hidden - begin);
    std::fill_n(sum, size, 0.0f);
    for (uint32_t row = 0; row < count; ++row)
      for (uint32_t i = 0; i < size; ++i) sum[i] += weights[row] * load(rows[row], begin + i, type);
    for (uint32_t i = 0; i < size; ++i) {
      if constexpr (type == EEP_TYPE_F32)
        reinterpret_cast<float*>(out)[begin + i] = sum[i];
      else
        reinterpret_cast<uint16_t*>(out)[begin + i] = bf16_of_float(sum[i]);
    }
  }
}

void pull(const eep_context& context, const eep_combine_recv_args& args, const eep_snapshot& snapshot,
          uint64_t usable) {
  const uint32_t me = context.table.rank, own_slot = snapshot.slot[me];
  const bool by_rank = context.shape.layout == EEP_LAYOUT_RANK;
  const auto add = context.shape.combine_type == EEP_TYPE_F32 ? add_rows<EEP_TYPE_F32> : add_rows<EEP_TYPE_BF16>;
  for (uint32_t token = 0; token < args.tokens; ++token) {
    if (token == args.tokens / 2) fault::pass(fault::kCombineMidPull);
    const int64_t* experts = args.topk_idx + uint64_t{token} * args.topk;
    const uint8_t* rows[EEP_MAX_TOPK];
    float weights[EEP_MAX_TOPK];
    uint32_t count = 0;
    if (by_rank) {
      uint64_t hosts = 0;
      for (uint32_t k = 0; k < args.topk; ++k)
        if (experts[k] >= 0) hosts |= rank_bit(context.rank_of_expert(experts[k]));
      for_each_rank(hosts & usable, [&](uint32_t rank) {
        rows[count] = context.of_peer(snapshot, rank, args.channel).outbox_by_slot(own_slot, token);
        weights[count++] = 1.0f;  // the experts have weighted and summed already
      });
    } else {
      for (uint32_t k = 0; k < args.topk; ++k) {
        if (experts[k] < 0) continue;
        const uint32_t rank = context.rank_of_expert(experts[k]);
        if (!(usable & rank_bit(rank))) continue;
        rows[count] = context.of_peer(snapshot, rank, args.channel).outbox_by_choice(me, token, k);
        weights[count++] = args.topk_weights ? args.topk_weights[uint64_t{token} * args.topk + k] : 1.0f;
      }
    }
    add(rows, weights, count, context.shape.hidden,
        static_cast<uint8_t*>(args.out) + token * context.at.outbox_row_bytes);
  }
}

// A rank that dropped us does not wait for us to finish reading. Its stamp tells.
void check_stamps(eep_context& context, uint32_t channel, const eep_snapshot& snapshot, uint64_t usable) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for_each_rank(usable, [&](uint32_t rank) {
    const uint64_t stamp = load_acquire(context.of_peer(snapshot, rank, channel).outbox_stamp());
    if (stamp != eep_flag_make(snapshot.epoch, snapshot.round, 0)) report(*context.control, EEP_STATUS_TORN);
  });
}

}  // namespace
}  // namespace eep

int eep_combine_send(eep_context* context, const eep_combine_send_args* args, void*) {
  using namespace eep;
  if (const int error = check_phase(*context, args->channel, EEP_PHASE_RECEIVED, "combine")) return error;
  const bool by_rank = context->shape.layout == EEP_LAYOUT_RANK;
  if (!args->x || args->topk < 1 || args->topk > context->shape.max_topk ||
      (!by_rank && (!args->src_info || !args->layout_range)))
    return fail(EEP_ERROR_ARGUMENT, "an input of the combine is missing or its top-k is not that of the dispatch");
  eep_snapshot& snapshot = context->snapshots[args->channel];
  snapshot.phase = EEP_PHASE_PUBLISHED;
  if (leave_if_revoked(*context, snapshot)) return EEP_OK;
  fault::pass(fault::kCombineBeforeRows);
  (by_rank ? publish_by_rank : publish_by_expert)(*context, *args, snapshot);
  fault::pass(fault::kCombineAfterRows);
  store_release(context->own(args->channel).outbox_stamp(), eep_flag_make(snapshot.epoch, snapshot.round, 0));
  send_flags(*context, args->channel, snapshot);
  fault::pass(fault::kCombineAfterFlags);
  return EEP_OK;
}

int eep_combine_recv(eep_context* context, const eep_combine_recv_args* args, void*) {
  using namespace eep;
  if (const int error = check_phase(*context, args->channel, EEP_PHASE_PUBLISHED, "combine's receive")) return error;
  eep_snapshot& snapshot = context->snapshots[args->channel];
  if (args->tokens != snapshot.tokens)
    return fail(EEP_ERROR_ARGUMENT, "combine of %u tokens after a dispatch of %u", args->tokens, snapshot.tokens);
  if (args->topk < 1 || args->topk > context->shape.max_topk)
    return fail(EEP_ERROR_ARGUMENT, "top-k must be between 1 and %u, got %u", context->shape.max_topk, args->topk);
  if (args->tokens && (!args->out || !args->topk_idx))
    return fail(EEP_ERROR_ARGUMENT, "an output tensor and topk_idx are needed");
  if (const int error = check_experts(*context, args->topk_idx, args->tokens, args->topk)) return error;
  uint64_t usable = 0;
  if (!leave_if_revoked(*context, snapshot)) usable = await_outboxes(*context, args->channel, snapshot);
  pull(*context, *args, snapshot, usable);
  check_stamps(*context, args->channel, snapshot, usable);
  snapshot.phase = EEP_PHASE_IDLE;
  return EEP_OK;
}
