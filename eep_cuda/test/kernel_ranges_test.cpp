// What is registered with a GPU of a landing and of a mirror: all that its kernels touch, and hardly more.
#include "hosts/kernel_ranges.h"

#include "common/region_views.h"
#include "eep/eep.h"
#include "require.h"

namespace eep_test {
namespace {

using eep::ChannelView;
using eep::RankSet;
using eep::hosts::Range;

constexpr uint32_t kRanks = 6, kOwn = 1;

eep_shape shape_of(eep_layout layout, uint32_t max_tokens) {
  return {kRanks, max_tokens, 512, 4, 2, uint32_t(layout), EEP_TYPE_FP8, EEP_TYPE_BF16, 2, 2, 3, 8192, 64, 0};
}

class Registered {
 public:
  Registered(const eep_shape& shape, const std::vector<Range>& ranges) : shape_(shape), ranges_(ranges) {
    REQUIRE(eep_region_layout_compute(&shape, &at) == EEP_OK);
    uint64_t end = 0;
    for (const Range& range : ranges) {
      REQUIRE(range.bytes && range.offset % 4096 == 0 && range.bytes % 4096 == 0);
      REQUIRE(range.offset > end || (!end && !range.offset));  // neighbours would be one: no page is registered twice
      end = range.offset + range.bytes;
      total += range.bytes;
    }
    REQUIRE(end <= at.total_bytes);
  }
  ChannelView channel(uint32_t number) const { return {shape_, at, nullptr, number}; }
  bool has(const void* begin, uint64_t bytes) const {
    const uint64_t from = reinterpret_cast<uint64_t>(begin);
    for (const Range& range : ranges_)
      if (range.offset <= from && from + bytes <= range.offset + range.bytes) return true;
    return false;
  }
  void require(const void* begin, uint64_t bytes) const { REQUIRE(has(begin, bytes)); }
  void require_flags(uint32_t number) const {
    require(channel(number).mailbox(0), at.slots * sizeof(eep_mailbox));
    require(channel(number).outbox_stamp(), sizeof(uint64_t));
  }
  void require_routing(uint32_t number, uint32_t slot) const {
    require(channel(number).topk_idx(slot, 0), shape_.max_tokens * shape_.max_topk * 4);
    require(channel(number).topk_weights(slot, 0), shape_.max_tokens * shape_.max_topk * 4);
  }
  void require_rows(uint32_t number, uint32_t slot) const {
    require(channel(number).row(slot, 0, at.row_bytes), shape_.max_tokens * at.row_bytes);
    require(channel(number).scales(slot, 0), shape_.max_tokens * at.scale_bytes);
  }
  void require_outbox(uint32_t number, uint32_t rank, uint32_t slot) const {
    if (shape_.layout == EEP_LAYOUT_RANK)
      require(channel(number).outbox_by_slot(slot, 0), shape_.max_tokens * at.outbox_row_bytes);
    else
      require(channel(number).outbox_by_choice(rank, 0, 0), shape_.max_tokens * shape_.max_topk * at.outbox_row_bytes);
  }
  void require_lanes() const {
    for (uint32_t lane = 0; lane < shape_.lanes; ++lane)
      require(eep::LaneView(shape_, at, nullptr, lane).part(0).base, at.part_bytes * shape_.lane_parts);
  }

  eep_region_layout at;
  uint64_t total = 0;

 private:
  const eep_shape shape_;
  const std::vector<Range> ranges_;
};

void test_landing(eep_layout layout, uint32_t max_tokens) {
  const eep_shape shape = shape_of(layout, max_tokens);
  RankSet remote = eep::only(4);
  eep::add(remote, 5);
  const Registered landing(shape, eep::hosts::landing_ranges(shape, kOwn, remote));
  for (uint32_t number = 0; number < shape.channels; ++number) {
    landing.require_flags(number);
    for (uint32_t life : {0, 1}) {
      landing.require_rows(number, eep_slot_of(kOwn, life, kRanks));
      for (uint32_t peer : {4, 5}) {
        const uint32_t slot = eep_slot_of(peer, life, kRanks);
        landing.require_routing(number, slot);
        landing.require_rows(number, slot);
        landing.require_outbox(number, peer, slot);
      }
    }
  }
  landing.require_lanes();
  if (max_tokens > 100) {
    const ChannelView channel = landing.channel(0);
    REQUIRE(!landing.has(channel.row(2, max_tokens / 2, landing.at.row_bytes), 1));
    REQUIRE(landing.total < landing.at.total_bytes * 2 / 3);
  }
}

void test_mirror(eep_layout layout, uint32_t max_tokens) {
  const eep_shape shape = shape_of(layout, max_tokens);
  const uint32_t own_slot = eep_slot_of(kOwn, 3, kRanks);
  const Registered mirror(shape, eep::hosts::mirror_ranges(shape, kOwn, own_slot));
  for (uint32_t number = 0; number < shape.channels; ++number) {
    mirror.require_flags(number);
    mirror.require_routing(number, own_slot);
    mirror.require_outbox(number, kOwn, own_slot);
    if (max_tokens > 100) REQUIRE(!mirror.has(mirror.channel(number).row(own_slot, max_tokens / 2, 512), 1));
  }
  mirror.require_lanes();
}

}  // namespace

void test_kernel_ranges() {
  for (const eep_layout layout : {EEP_LAYOUT_RANK, EEP_LAYOUT_EXPERT})
    for (const uint32_t max_tokens : {1u, 7u, 500u}) {
      test_landing(layout, max_tokens);
      test_mirror(layout, max_tokens);
    }
}

}  // namespace eep_test
