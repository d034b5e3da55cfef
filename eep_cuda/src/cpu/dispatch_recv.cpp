// Dispatch, second half: wait for every source, take each whole or not at all, and lay out what came.
#include <algorithm>
#include <cstring>

#include "common/fault.h"
#include "cpu/context.h"
#include "cpu/send_half.h"
#include "cpu/wait.h"

namespace eep {
namespace {

// Whether what a source says of its tokens can be: the size and types are ours. Which experts it names is checked as
// they are read: a peer may change them at any time.
bool is_sound(const eep_context& context, const eep_dispatch_recv_args& args, uint64_t envelope, uint32_t count) {
  return count <= context.shape.max_tokens && envelope == eep_envelope(args.wire_type, args.topk, context.shape.hidden);
}

// Reads which of our experts a token wants, each once; false if it names one that we do not have.
bool read_experts(const eep_context& context, const int32_t* from, uint32_t topk, int32_t* experts) {
  bool known = true;
  for (uint32_t k = 0; k < topk; ++k) {
    experts[k] = load_relaxed(from[k]);
    known &= experts[k] >= -1 && experts[k] < static_cast<int32_t>(context.shape.local_experts);
  }
  return known;
}

// Takes nothing of a source after all: what it sent cannot be used.
void refuse(eep_context& context, eep_snapshot& snapshot, uint32_t rank) {
  remove(snapshot.received, rank);
  snapshot.count[rank] = 0;
  set_bit(context.control->corrupt, rank);
  report(*context.control, EEP_STATUS_CORRUPT);
}

// Waits for the sources of the round and notes those that arrived whole.
void receive(eep_context& context, const eep_dispatch_recv_args& args, eep_snapshot& snapshot, hosts::Loan& loan) {
  const ChannelView inbox = context.own(args.channel);
  const RankSet sources = snapshot.active - given_up(*context.control);
  const auto has_arrived = [&](uint32_t rank) {
    const uint64_t flag = load_acquire(inbox.mailbox(snapshot.slot[rank])->dispatch_flag);
    if (!eep_flag_is(flag, snapshot.epoch, snapshot.round)) return false;
    snapshot.count[rank] = eep_flag_count(flag);
    return true;
  };
  const RankSet arrived = wait_for(
      sources, {*context.control, snapshot.epoch, snapshot.deadline_ns, BoundedWait::kUntilRung, &loan}, has_arrived);
  for_each_rank(arrived, [&](uint32_t rank) {
    const uint64_t envelope = load_relaxed(inbox.mailbox(snapshot.slot[rank])->envelope);
    if (is_sound(context, args, envelope, snapshot.count[rank]))
      add(snapshot.received, rank);
    else
      refuse(context, snapshot, rank);
  });
}

// rank layout: rows stay where they are; rows that no source sent are told apart by an expert of -1.
void copy_routing(eep_context& context, const eep_dispatch_recv_args& args, eep_snapshot& snapshot) {
  const ChannelView inbox = context.own(args.channel);
  const uint64_t per_slot = uint64_t{context.shape.max_tokens} * args.topk;
  std::fill_n(args.topk_idx, context.at.slots * per_slot, -1);
  for_each_rank(snapshot.received, [&](uint32_t rank) {
    const uint32_t slot = snapshot.slot[rank];
    for (uint32_t token = 0; token < snapshot.count[rank]; ++token) {
      const uint64_t at = slot * per_slot + uint64_t{token} * args.topk;
      if (!read_experts(context, inbox.topk_idx(slot, token), args.topk, args.topk_idx + at)) {
        std::fill_n(args.topk_idx + slot * per_slot, per_slot, -1);
        return refuse(context, snapshot, rank);
      }
      std::memcpy(args.topk_weights + at, inbox.topk_weights(slot, token), args.topk * sizeof(float));
    }
  });
}

// expert layout: one row per (token, local expert), packed per expert, sources in rank order.
class Packer {
 public:
  Packer(eep_context& context, const eep_dispatch_recv_args& args, eep_snapshot& snapshot)
      : context_(context), args_(args), snapshot_(snapshot), inbox_(context.own(args.channel)) {
    row_bytes_ = context.shape.hidden * eep_element_bytes(args.wire_type);
    rows_per_expert_ = uint64_t{context.shape.max_ranks} * context.shape.max_tokens;
  }

  void pack() {
    const uint32_t experts = context_.shape.local_experts, ranks = context_.shape.max_ranks;
    std::fill_n(args_.packed_count, experts, 0);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint32_t expert = 0; expert < experts; ++expert)
        range(expert, rank) = int64_t{args_.packed_count[expert]} << 32;
      if (!has(snapshot_.received, rank) || pack_source(rank)) continue;
      for (uint32_t expert = 0; expert < experts; ++expert) {
        const int64_t begin = range(expert, rank) >> 32;
        args_.packed_count[expert] = static_cast<int32_t>(begin);
        range(expert, rank) = begin << 32;
      }
      refuse(context_, snapshot_, rank);
    }
  }

 private:
  int64_t& range(uint32_t expert, uint32_t rank) {
    return args_.layout_range[uint64_t{expert} * context_.shape.max_ranks + rank];
  }

  // False if it names an expert that we do not have; part of it is packed then.
  bool pack_source(uint32_t rank) {
    const uint32_t slot = snapshot_.slot[rank];
    int32_t idx[EEP_MAX_TOPK];
    for (uint32_t token = 0; token < snapshot_.count[rank]; ++token) {
      if (!read_experts(context_, inbox_.topk_idx(slot, token), args_.topk, idx)) return false;
      for (uint32_t k = 0; k < args_.topk; ++k) {
        // Named twice by one token, an expert still gets it once.
        if (idx[k] < 0 || std::find(idx, idx + k, idx[k]) != idx + k) continue;
        const uint32_t expert = static_cast<uint32_t>(idx[k]);
        const uint32_t position = static_cast<uint32_t>(args_.packed_count[expert]++);
        ++range(expert, rank);
        args_.src_info[expert * rows_per_expert_ + position] = static_cast<int32_t>(token);
        std::memcpy(static_cast<uint8_t*>(args_.packed_rows) + (expert * rows_per_expert_ + position) * row_bytes_,
                    inbox_.row(slot, token, row_bytes_), row_bytes_);
        if (eep_is_fp8(args_.wire_type)) pack_scales(expert, position, inbox_.scales(slot, token));
      }
    }
    return true;
  }

  // Grouped matrix kernels read scales column by column: 4-byte words, `position` fastest. Exponent bytes go
  // four to a word.
  void pack_scales(uint32_t expert, uint32_t position, const uint8_t* scales) {
    const uint64_t groups = context_.shape.hidden / EEP_SCALE_GROUP;
    const uint64_t words = args_.wire_type == EEP_TYPE_FP8_UE8M0 ? groups / 4 : groups;
    uint8_t* column =
        static_cast<uint8_t*>(args_.packed_scales) + (expert * words * rows_per_expert_ + position) * sizeof(uint32_t);
    for (uint64_t word = 0; word < words; ++word)
      std::memcpy(column + word * rows_per_expert_ * sizeof(uint32_t), scales + word * sizeof(uint32_t),
                  sizeof(uint32_t));
  }

  eep_context& context_;
  const eep_dispatch_recv_args& args_;
  eep_snapshot& snapshot_;
  const ChannelView inbox_;
  uint64_t row_bytes_, rows_per_expert_;
};

int dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, hosts::Loan& loan) {
  if (const int error =
          check_turn(context->shape, args->channel, context->turn(args->channel), EEP_PHASE_SENT, "receive"))
    return error;
  if (const int error = check_dispatch_recv(context->shape, *args)) return error;
  eep_snapshot& snapshot = context->snapshots[args->channel];
  snapshot.phase = EEP_PHASE_RECEIVED;
  if (!leave_if_revoked(*context, snapshot)) {
    loan.take();
    receive(*context, *args, snapshot, loan);
  }
  loan.give_back();
  if (context->shape.layout == EEP_LAYOUT_RANK)
    copy_routing(*context, *args, snapshot);
  else
    Packer(*context, *args, snapshot).pack();
  for (uint32_t rank = 0; rank < context->shape.max_ranks; ++rank)
    args->count[rank] = static_cast<int32_t>(snapshot.count[rank]);
  // From here on the experts may write the outbox. A peer that we dropped may still be reading the last round
  // from it: it finds the stamp gone.
  store_relaxed(*context->own(args->channel).outbox_stamp(), uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  fault::pass(fault::kDispatchReceived);
  return EEP_OK;
}

}  // namespace
}  // namespace eep

int eep_dispatch_recv(eep_context* context, const eep_dispatch_recv_args* args, void*) {
  eep::hosts::Loan loan(context->table, context->round_bytes(args->channel));
  return eep::dispatch_recv(context, args, loan);
}

int eep_dispatch(eep_context* context, const eep_dispatch_send_args* send, const eep_dispatch_recv_args* recv, void*) {
  eep::hosts::Loan loan(context->table, send->tokens * context->at.row_bytes);
  if (const int error = eep::dispatch_send(context, send, loan)) return error;
  return eep::dispatch_recv(context, recv, loan);
}
