#include "hosts/kernel_ranges.h"

#include <algorithm>

#include "common/region_views.h"

namespace eep::hosts {
namespace {

constexpr uint64_t kPage = 4096;

// Parts of a region, in any order, as whole pages in order.
class Pages {
 public:
  Pages(const eep_shape& shape, const eep_region_layout& at) : shape_(shape), at_(at) {}

  void add(uint64_t begin, uint64_t bytes) {
    if (!bytes) return;
    const uint64_t first = begin / kPage * kPage;
    ranges_.push_back({first, eep_align_up(begin + bytes, kPage) - first});
  }
  void add_flags(uint64_t channel) {
    add(channel + at_.mailboxes, at_.outbox_stamp + sizeof(uint64_t) - at_.mailboxes);
  }
  void add_routing(uint64_t channel, uint32_t slot) {
    const uint64_t bytes = uint64_t{shape_.max_tokens} * shape_.max_topk * sizeof(int32_t);
    add(channel + at_.topk_idx + slot * bytes, bytes);
    add(channel + at_.topk_weights + slot * bytes, bytes);
  }
  void add_rows(uint64_t channel, uint32_t slot) {
    add(channel + at_.rows + slot * shape_.max_tokens * at_.row_bytes, shape_.max_tokens * at_.row_bytes);
    add(channel + at_.scales + slot * shape_.max_tokens * at_.scale_bytes, shape_.max_tokens * at_.scale_bytes);
  }
  // `place`: a slot in the rank layout, a rank in the other.
  void add_outbox(uint64_t channel, uint32_t place) {
    const uint64_t rows = uint64_t{shape_.max_tokens} * (shape_.layout == EEP_LAYOUT_RANK ? 1 : shape_.max_topk);
    add(channel + at_.outbox + place * rows * at_.outbox_row_bytes, rows * at_.outbox_row_bytes);
  }
  // Kernels use all of a lane but the pipes, through which messages go between CPUs.
  void add_lanes() {
    for (uint32_t lane = 0; lane < shape_.lanes; ++lane) add(at_.lanes + lane * at_.lane_bytes, at_.pipes);
  }

  std::vector<Range> merged() {
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
    std::vector<Range> merged;
    for (const Range& range : ranges_) {
      if (merged.empty() || merged.back().offset + merged.back().bytes < range.offset) {
        merged.push_back(range);
        continue;
      }
      Range& last = merged.back();
      last.bytes = std::max(last.offset + last.bytes, range.offset + range.bytes) - last.offset;
    }
    return merged;
  }

 private:
  const eep_shape& shape_;
  const eep_region_layout& at_;
  std::vector<Range> ranges_;
};

}  // namespace

std::vector<Range> landing_ranges(const eep_shape& shape, uint32_t rank, const RankSet& remote) {
  const eep_region_layout at = eep_region_layout_of(&shape);
  const bool by_rank = shape.layout == EEP_LAYOUT_RANK;
  Pages pages(shape, at);
  for (uint32_t channel = 0; channel < shape.channels; ++channel) {
    const uint64_t begin = channel * at.channel_bytes;
    pages.add_flags(begin);
    // A process may become another life of its rank later, with the other slot.
    for (uint32_t life = 0; life < EEP_INCARNATIONS; ++life)
      pages.add_rows(begin, eep_slot_of(rank, life, shape.max_ranks));
    for_each_rank(remote - only(rank), [&](uint32_t peer) {
      for (uint32_t life = 0; life < EEP_INCARNATIONS; ++life) {
        const uint32_t slot = eep_slot_of(peer, life, shape.max_ranks);
        pages.add_routing(begin, slot);
        pages.add_rows(begin, slot);
        if (by_rank) pages.add_outbox(begin, slot);
      }
      if (!by_rank) pages.add_outbox(begin, peer);
    });
  }
  pages.add_lanes();
  return pages.merged();
}

std::vector<Range> mirror_ranges(const eep_shape& shape, uint32_t rank, uint32_t own_slot) {
  const eep_region_layout at = eep_region_layout_of(&shape);
  Pages pages(shape, at);
  for (uint32_t channel = 0; channel < shape.channels; ++channel) {
    const uint64_t begin = channel * at.channel_bytes;
    pages.add_flags(begin);
    pages.add_routing(begin, own_slot);
    pages.add_outbox(begin, shape.layout == EEP_LAYOUT_RANK ? own_slot : rank);
  }
  pages.add_lanes();
  return pages.merged();
}

}  // namespace eep::hosts
