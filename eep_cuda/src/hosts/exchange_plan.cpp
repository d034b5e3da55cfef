#include "hosts/exchange_plan.h"

#include <algorithm>

#include "common/shared_words.h"

namespace eep::hosts {
namespace {

// Rows that are not wanted are sent along if there are so few bytes of them: another put costs more.
constexpr uint64_t kSmallGap = 4096;

// Rows of `bytes` each, of which only some are wanted, as few puts.
class RowRuns {
 public:
  RowRuns(std::vector<Put>& puts, uint32_t area, const uint8_t* first, uint64_t bytes)
      : puts_(puts), area_(area), first_(first), bytes_(bytes) {}

  void add(uint64_t row) {
    if (is_open_ && (row - end_) * bytes_ > kSmallGap) close();
    if (!is_open_) begin_ = row, is_open_ = true;
    end_ = row + 1;
  }

  void close() {
    if (is_open_) puts_.push_back({area_, begin_ * bytes_, first_ + begin_ * bytes_, (end_ - begin_) * bytes_});
    is_open_ = false;
  }

 private:
  std::vector<Put>& puts_;
  const uint32_t area_;
  const uint8_t* const first_;
  const uint64_t bytes_;
  uint64_t begin_ = 0, end_ = 0;
  bool is_open_ = false;
};

// A peer may change what it wrote at any time: each word is read once, and bounds do not depend on it.
bool wants(const int32_t* experts, uint32_t topk) {
  for (uint32_t k = 0; k < topk; ++k)
    if (load_relaxed(experts[k]) >= 0) return true;
  return false;
}

uint32_t topk_of(const eep_shape& shape, uint64_t envelope) {
  return std::min<uint32_t>(envelope >> 8 & 0xffffff, shape.max_topk);
}

}  // namespace

std::vector<eep_area> areas_of(const Pair& pair) {
  const eep_shape& shape = pair.shape;
  const bool by_rank = shape.layout == EEP_LAYOUT_RANK;
  const uint64_t routing = uint64_t{shape.max_tokens} * shape.max_topk * sizeof(int32_t);
  std::vector<eep_area> areas;
  const auto add = [&](const void* address, uint64_t bytes) {
    areas.push_back({reinterpret_cast<uint64_t>(address), bytes});
  };
  for (uint32_t channel = 0; channel < shape.channels; ++channel) {
    const ChannelView inbox = pair.own(channel), mirror = pair.mirrored(channel);
    add(inbox.topk_idx(pair.peer_slot, 0), routing);
    add(inbox.topk_weights(pair.peer_slot, 0), routing);
    add(inbox.row(pair.peer_slot, 0, 0), shape.max_tokens * pair.at.row_bytes);
    if (by_rank)
      add(mirror.outbox_by_slot(pair.own_slot, 0), shape.max_tokens * pair.at.outbox_row_bytes);
    else
      add(mirror.outbox_by_choice(pair.own_rank, 0, 0),
          uint64_t{shape.max_tokens} * shape.max_topk * pair.at.outbox_row_bytes);
    if (pair.at.scale_bytes) add(inbox.scales(pair.peer_slot, 0), shape.max_tokens * pair.at.scale_bytes);
  }
  if (shape.lanes) add(pair.mirror + pair.at.lanes, pair.at.total_bytes - pair.at.lanes);
  return areas;
}

void plan_rows(const Pair& pair, uint32_t channel, uint64_t envelope, Stretch tokens, std::vector<Put>& puts) {
  const ChannelView mirror = pair.mirrored(channel), own = pair.own(channel);
  const uint32_t slot = pair.own_slot, wire = envelope & 0xff, topk = topk_of(pair.shape, envelope);
  const uint64_t row_bytes = std::min(pair.shape.hidden * eep_element_bytes(wire), pair.at.row_bytes);
  RowRuns rows(puts, pair.area(kRows, channel), own.row(slot, 0, row_bytes), row_bytes);
  RowRuns scales(puts, pair.area(kScales, channel), own.scales(slot, 0), pair.at.scale_bytes);
  const bool has_scales = eep_is_fp8(wire) && pair.at.scale_bytes;
  for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
    if (!wants(mirror.topk_idx(slot, token), topk)) continue;
    rows.add(token);
    if (has_scales) scales.add(token);
  }
  rows.close();
  scales.close();
}

void plan_dispatch(const Pair& pair, uint32_t channel, uint64_t flag, uint64_t envelope, uint32_t first,
                   std::vector<Put>& puts) {
  const ChannelView mirror = pair.mirrored(channel);
  const uint32_t count = std::min(eep_flag_count(flag), pair.shape.max_tokens), slot = pair.own_slot;
  if (!count) return;
  const uint64_t routing = uint64_t{count} * pair.shape.max_topk * sizeof(int32_t);
  puts.push_back({pair.area(kIndices, channel), 0, reinterpret_cast<uint8_t*>(mirror.topk_idx(slot, 0)), routing});
  puts.push_back({pair.area(kWeights, channel), 0, reinterpret_cast<uint8_t*>(mirror.topk_weights(slot, 0)), routing});
  plan_rows(pair, channel, envelope, {first, count}, puts);
}

void plan_combine(const Pair& pair, uint32_t channel, uint32_t count, std::vector<Put>& puts) {
  const ChannelView own = pair.own(channel);
  const uint32_t slot = pair.peer_slot, topk = topk_of(pair.shape, load_relaxed(own.mailbox(slot)->envelope));
  const bool by_rank = pair.shape.layout == EEP_LAYOUT_RANK;
  const uint8_t* first = by_rank ? own.outbox_by_slot(slot, 0) : own.outbox_by_choice(pair.peer_rank, 0, 0);
  RowRuns rows(puts, pair.area(kOutbox, channel), first, pair.at.outbox_row_bytes);
  for (uint32_t token = 0; token < std::min(count, pair.shape.max_tokens); ++token) {
    const int32_t* experts = own.topk_idx(slot, token);
    if (by_rank) {
      if (wants(experts, topk)) rows.add(token);
      continue;
    }
    for (uint32_t k = 0; k < topk; ++k)
      if (load_relaxed(experts[k]) >= 0) rows.add(uint64_t{token} * pair.shape.max_topk + k);
  }
  rows.close();
}

}  // namespace eep::hosts
