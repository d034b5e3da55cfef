// Dispatch, first half: put each token once into the inbox of every rank that hosts one of its experts. For ranks on
// other hosts it is put into our own inbox: a row has the same number everywhere, so one copy serves all links.
#include <algorithm>
#include <cstring>

#include "common/fault.h"
#include "cpu/context.h"
#include "cpu/formats.h"
#include "cpu/send_half.h"

namespace eep {
namespace {

// Bytes of rows after which they are sent while others are written. Less would wake the thread that sends too often.
constexpr uint64_t kOffered = 512 << 10;

class Sender {
 public:
  Sender(eep_context& context, const eep_dispatch_send_args& args, const eep_snapshot& snapshot)
      : context_(context), args_(args), snapshot_(snapshot), own_slot_(snapshot.slot[context.table.rank]) {
    // A suspect is not written to again in its epoch: it may still be reading what we sent before.
    targets_ = snapshot.active - given_up(*context.control);
    // A row for any of these goes into our own inbox.
    ours_ = only(context.table.rank);
    for_each_rank(targets_, [&](uint32_t rank) {
      if (context.table.peers[rank].transport == EEP_TRANSPORT_REMOTE) add(ours_, rank);
    });
    fp8_ = eep_is_fp8(args.wire_type);
    row_bytes_ = context.shape.hidden * eep_element_bytes(args.wire_type);
    x_row_bytes_ = context.shape.hidden * eep_element_bytes(args.x_type);
  }

  void send_token(uint32_t token) {
    const int64_t* experts = args_.topk_idx + uint64_t{token} * args_.topk;
    const RankSet hosts = write_routing(token, experts);
    const uint8_t* row = static_cast<const uint8_t*>(args_.x) + token * x_row_bytes_;
    const uint8_t* scales = nullptr;
    if (fp8_ && !is_empty(hosts)) {
      uint8_t* scratch = context_.row_scratch[args_.channel].get();
      quantize_row(row, args_.x_type, context_.shape.hidden, args_.wire_type, scratch, scratch + row_bytes_);
      row = scratch;
      scales = scratch + row_bytes_;
    }
    const auto put = [&](const ChannelView& inbox) {
      std::memcpy(inbox.row(own_slot_, token, row_bytes_), row, row_bytes_);
      if (scales) std::memcpy(inbox.scales(own_slot_, token), scales, scale_bytes());
    };
    if (!is_empty(hosts & ours_)) put(context_.own(args_.channel));
    for_each_rank(hosts - ours_, [&](uint32_t rank) { put(context_.of_peer(snapshot_, rank, args_.channel)); });
  }

  // Rows of the tokens before `end`, for ranks on other hosts, while this kernel writes the others.
  void offer_rows(uint32_t end, const hosts::Loan& loan) const {
    const uint64_t round = eep_flag_make(snapshot_.epoch, snapshot_.round, 0);
    loan.offer_rows(snapshot_, targets_, {args_.channel, round, envelope(), end});
  }

  // An injected fault: the others will not hear of this round. This rank knows of its own part.
  void lose_flags() { targets_ &= only(context_.table.rank); }

  void send_flags(hosts::Loan& loan) {
    const uint64_t flag = eep_flag_make(snapshot_.epoch, snapshot_.round, args_.tokens);
    uint32_t sent = 0;
    for_each_rank(targets_, [&](uint32_t rank) {
      eep_mailbox& mailbox = *context_.of_peer(snapshot_, rank, args_.channel).mailbox(own_slot_);
      store_relaxed(mailbox.envelope, envelope());
      store_release(mailbox.dispatch_flag, flag);
      auto& page = *reinterpret_cast<eep_control_page*>(snapshot_.control[rank]);
      if (!loan.looks_at(&page)) ring(page);
      if (++sent == 1) fault::pass(fault::kDispatchMidFlags);
    });
    loan.turn();
  }

 private:
  // Tells every target which of its experts the token wants; returns the targets that get the row itself.
  RankSet write_routing(uint32_t token, const int64_t* experts) {
    // Each expert is divided once, whatever the number of targets.
    uint32_t rank_of[EEP_MAX_TOPK];
    int32_t local[EEP_MAX_TOPK];
    RankSet hosts = {};
    for (uint32_t k = 0; k < args_.topk; ++k) {
      const uint32_t expert = static_cast<uint32_t>(experts[k]), experts_each = context_.shape.local_experts;
      rank_of[k] = experts[k] >= 0 ? expert / experts_each : kNoRank;
      local[k] = static_cast<int32_t>(expert - rank_of[k] * experts_each);
      if (experts[k] >= 0) add(hosts, rank_of[k]);
    }
    if (!is_empty(hosts - snapshot_.active)) report(*context_.control, EEP_STATUS_MISROUTED);
    const float* weights = args_.topk_weights ? args_.topk_weights + uint64_t{token} * args_.topk : nullptr;
    for_each_rank(targets_, [&](uint32_t rank) {
      const ChannelView inbox = context_.of_peer(snapshot_, rank, args_.channel);
      int32_t* idx = inbox.topk_idx(own_slot_, token);
      float* weight = inbox.topk_weights(own_slot_, token);
      for (uint32_t k = 0; k < args_.topk; ++k) {
        const bool here = rank_of[k] == rank;
        idx[k] = here ? local[k] : -1;
        weight[k] = !here ? 0.0f : weights ? weights[k] : 1.0f;
      }
    });
    return hosts & targets_;
  }

  uint64_t envelope() const { return eep_envelope(args_.wire_type, args_.topk, context_.shape.hidden); }

  uint64_t scale_bytes() const {
    const uint64_t groups = context_.shape.hidden / EEP_SCALE_GROUP;
    return args_.wire_type == EEP_TYPE_FP8_UE8M0 ? groups : groups * sizeof(float);
  }

  static constexpr uint32_t kNoRank = ~uint32_t{0};

  eep_context& context_;
  const eep_dispatch_send_args& args_;
  const eep_snapshot& snapshot_;
  const uint32_t own_slot_;
  RankSet targets_, ours_;
  uint64_t row_bytes_, x_row_bytes_;
  bool fp8_;
};

}  // namespace

int dispatch_send(eep_context* context, const eep_dispatch_send_args* args, hosts::Loan& loan) {
  if (const int error =
          check_turn(context->shape, args->channel, context->turn(args->channel), EEP_PHASE_IDLE, "dispatch"))
    return error;
  if (const int error = check_in_view(context->table, "dispatch")) return error;
  if (const int error = check_dispatch_send(context->shape, *args)) return error;
  if (const int error = check_experts(*context, args->topk_idx, args->tokens, args->topk)) return error;
  begin_round(*context, args->channel);
  eep_snapshot& snapshot = context->snapshots[args->channel];
  snapshot.tokens = args->tokens;
  snapshot.phase = EEP_PHASE_SENT;
  if (leave_if_revoked(*context, snapshot)) return EEP_OK;
  fault::pass(fault::kDispatchBeforeRows);
  Sender sender(*context, *args, snapshot);
  const uint32_t at_once = static_cast<uint32_t>(std::max<uint64_t>(1, kOffered / context->at.row_bytes));
  for (uint32_t token = 0; token < args->tokens; ++token) {
    if (token == args->tokens / 2) fault::pass(fault::kDispatchMidRows);
    sender.send_token(token);
    if ((token + 1) % at_once == 0 && token + 1 < args->tokens) sender.offer_rows(token + 1, loan);
  }
  if (fault::loses(fault::kDispatchAfterRows)) sender.lose_flags();
  loan.take();
  sender.send_flags(loan);
  fault::pass(fault::kDispatchAfterFlags);
  return EEP_OK;
}

}  // namespace eep

int eep_dispatch_send(eep_context* context, const eep_dispatch_send_args* args, void*) {
  eep::hosts::Loan loan(context->table, args->tokens * context->at.row_bytes);
  return eep::dispatch_send(context, args, loan);
}
