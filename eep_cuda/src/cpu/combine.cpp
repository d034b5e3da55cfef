// Combine: publish what the experts made, then pull and add up what the others made of our tokens.
#include <algorithm>
#include <cstring>

#include "common/fault.h"
#include "cpu/context.h"
#include "cpu/formats.h"
#include "cpu/row_sums.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// ---- publish ----

void put_output(const eep_context& context, uint8_t* to, const uint8_t* from) {
  const uint32_t hidden = context.shape.hidden;
  if (eep_is_fp8(context.shape.combine_type))
    quantize_row(from, EEP_TYPE_BF16, hidden, EEP_TYPE_FP8, to, to + hidden);
  else
    std::memcpy(to, from, context.at.outbox_row_bytes);
}

// rank layout: one row per token that wanted an expert here. Nothing to do where the experts wrote the
// outbox.
void publish_by_rank(const eep_context& context, const eep_combine_send_args& args, const eep_snapshot& snapshot) {
  const ChannelView own = context.own(args.channel);
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  if (x == own.outbox_row(0) && !eep_is_fp8(context.shape.combine_type)) return;
  for_each_rank(snapshot.received, [&](uint32_t rank) {
    const uint32_t slot = snapshot.slot[rank];
    for (uint32_t token = 0; token < snapshot.count[rank]; ++token) {
      const int32_t* idx = own.topk_idx(slot, token);
      if (std::all_of(idx, idx + args.topk, [](int32_t expert) { return expert < 0; })) continue;
      const uint64_t row = uint64_t{slot} * context.shape.max_tokens + token;
      put_output(context, own.outbox_row(row), x + row * context.at.output_row_bytes);
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
            put_output(
                context, own.outbox_by_choice(rank, token, k),
                static_cast<const uint8_t*>(args.x) + (expert * rows_per_expert + row) * context.at.output_row_bytes);
      }
    });
  }
}

// `lost`: an injected fault, the others will not hear of this outbox.
void send_flags(eep_context& context, uint32_t channel, const eep_snapshot& snapshot, bool lost, hosts::Loan& loan) {
  const uint32_t own_slot = snapshot.slot[context.table.rank];
  uint32_t sent = 0;
  const RankSet reached = lost ? snapshot.active & only(context.table.rank) : snapshot.active;
  for_each_rank(reached - given_up(*context.control), [&](uint32_t rank) {
    // The count tells the source whether we took its tokens: if not, it must not believe the sum.
    store_release(context.of_peer(snapshot, rank, channel).mailbox(own_slot)->combine_flag,
                  eep_flag_make(snapshot.epoch, snapshot.round, snapshot.count[rank]));
    auto& page = *reinterpret_cast<eep_control_page*>(snapshot.control[rank]);
    if (!loan.looks_at(&page)) ring(page);
    if (++sent == 1) fault::pass(fault::kCombineMidFlags);
  });
  loan.turn();
}

// ---- pull ----

// Waits for the outboxes of the round; returns the ranks whose outbox holds what they made of our tokens.
RankSet await_outboxes(eep_context& context, uint32_t channel, const eep_snapshot& snapshot, hosts::Loan& loan) {
  const ChannelView own = context.own(channel);
  RankSet usable = {};
  wait_for(snapshot.active - given_up(*context.control),
           {*context.control, snapshot.epoch, snapshot.deadline_ns, BoundedWait::kUntilRung, &loan},
           [&](uint32_t rank) {
             const uint64_t flag = load_acquire(own.mailbox(snapshot.slot[rank])->combine_flag);
             if (!eep_flag_is(flag, snapshot.epoch, snapshot.round)) return false;
             if (eep_flag_count(flag) == snapshot.tokens) {
               add(usable, rank);
             } else {
               set_bit(context.control->corrupt, rank);
               report(*context.control, EEP_STATUS_CORRUPT);
             }
             return true;
           });
  return usable;
}

void pull(const eep_context& context, const eep_combine_recv_args& args, const eep_snapshot& snapshot,
          const RankSet& usable) {
  const uint32_t me = context.table.rank, own_slot = snapshot.slot[me];
  const bool by_rank = context.shape.layout == EEP_LAYOUT_RANK;
  // In the rank layout the experts have weighted and summed already.
  const AddRows add_up = find_add_rows(context.shape.combine_type, !by_rank);
  for (uint32_t token = 0; token < args.tokens; ++token) {
    if (token == args.tokens / 2) fault::pass(fault::kCombineMidPull);
    const int64_t* experts = args.topk_idx + uint64_t{token} * args.topk;
    const uint8_t* rows[EEP_MAX_TOPK];
    float weights[EEP_MAX_TOPK];
    uint32_t count = 0;
    if (by_rank) {
      RankSet hosts = {};
      for (uint32_t k = 0; k < args.topk; ++k)
        if (experts[k] >= 0) add(hosts, context.rank_of_expert(experts[k]));
      for_each_rank(hosts & usable, [&](uint32_t rank) {
        rows[count++] = context.of_peer(snapshot, rank, args.channel).outbox_by_slot(own_slot, token);
      });
    } else {
      for (uint32_t k = 0; k < args.topk; ++k) {
        if (experts[k] < 0) continue;
        const uint32_t rank = context.rank_of_expert(experts[k]);
        if (!has(usable, rank)) continue;
        rows[count] = context.of_peer(snapshot, rank, args.channel).outbox_by_choice(me, token, k);
        weights[count++] = args.topk_weights ? args.topk_weights[uint64_t{token} * args.topk + k] : 1.0f;
      }
    }
    add_up(rows, weights, count, context.shape.hidden,
           static_cast<uint8_t*>(args.out) + token * context.at.output_row_bytes);
  }
}

// A rank that dropped us does not wait for us to finish reading. Its stamp tells.
void check_stamps(eep_context& context, uint32_t channel, const eep_snapshot& snapshot, const RankSet& usable) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for_each_rank(usable, [&](uint32_t rank) {
    const uint64_t stamp = load_acquire(*context.of_peer(snapshot, rank, channel).outbox_stamp());
    if (stamp != eep_flag_make(snapshot.epoch, snapshot.round, 0)) report(*context.control, EEP_STATUS_TORN);
  });
}

int combine_send(eep_context* context, const eep_combine_send_args* args, hosts::Loan& loan) {
  const Turn turn = context->turn(args->channel);
  if (const int error = check_turn(context->shape, args->channel, turn, EEP_PHASE_RECEIVED, "combine")) return error;
  if (const int error = check_combine_send(context->shape, *args)) return error;
  const bool by_rank = context->shape.layout == EEP_LAYOUT_RANK;
  eep_snapshot& snapshot = context->snapshots[args->channel];
  snapshot.phase = EEP_PHASE_PUBLISHED;
  if (leave_if_revoked(*context, snapshot)) return EEP_OK;
  fault::pass(fault::kCombineBeforeRows);
  (by_rank ? publish_by_rank : publish_by_expert)(*context, *args, snapshot);
  const bool lost = fault::loses(fault::kCombineAfterRows);
  store_release(*context->own(args->channel).outbox_stamp(), eep_flag_make(snapshot.epoch, snapshot.round, 0));
  loan.take();
  send_flags(*context, args->channel, snapshot, lost, loan);
  fault::pass(fault::kCombineAfterFlags);
  return EEP_OK;
}

int combine_recv(eep_context* context, const eep_combine_recv_args* args, hosts::Loan& loan) {
  const Turn turn = context->turn(args->channel);
  if (const int error = check_turn(context->shape, args->channel, turn, EEP_PHASE_PUBLISHED, "combine's receive"))
    return error;
  eep_snapshot& snapshot = context->snapshots[args->channel];
  if (const int error = check_combine_recv(context->shape, *args, snapshot.tokens)) return error;
  if (const int error = check_experts(*context, args->topk_idx, args->tokens, args->topk)) return error;
  RankSet usable = {};
  if (!leave_if_revoked(*context, snapshot)) {
    loan.take();
    usable = await_outboxes(*context, args->channel, snapshot, loan);
  }
  loan.give_back();
  pull(*context, *args, snapshot, usable);
  check_stamps(*context, args->channel, snapshot, usable);
  snapshot.phase = EEP_PHASE_IDLE;
  return EEP_OK;
}

}  // namespace
}  // namespace eep

int eep_combine_send(eep_context* context, const eep_combine_send_args* args, void*) {
  eep::hosts::Loan loan(context->table, context->round_bytes(args->channel));
  return eep::combine_send(context, args, loan);
}

int eep_combine_recv(eep_context* context, const eep_combine_recv_args* args, void*) {
  eep::hosts::Loan loan(context->table, context->round_bytes(args->channel));
  return eep::combine_recv(context, args, loan);
}

int eep_combine(eep_context* context, const eep_combine_send_args* send, const eep_combine_recv_args* recv, void*) {
  eep::hosts::Loan loan(context->table, context->round_bytes(send->channel));
  if (const int error = eep::combine_send(context, send, loan)) return error;
  return eep::combine_recv(context, recv, loan);
}
