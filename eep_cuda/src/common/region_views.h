// Typed access to a region, ours or a peer's: the one place that turns eep_region_layout into addresses, for host and
// device code alike. A view holds references to shape and layout, which must outlive it; on a GPU both are kernel
// parameters, so that every offset is a constant of the launch.
#ifndef EEP_COMMON_REGION_VIEWS_H_
#define EEP_COMMON_REGION_VIEWS_H_

#include <cstdint>

#include "eep/protocol.h"

#if defined(__CUDACC__)
#define EEP_HOST_DEVICE __host__ __device__
#else
#define EEP_HOST_DEVICE
#endif

namespace eep {

// One channel: what dispatch and combine exchange.
struct ChannelView {
  uint8_t* base;
  const eep_shape& shape;
  const eep_region_layout& at;

  EEP_HOST_DEVICE ChannelView(const eep_shape& shape, const eep_region_layout& at, uint8_t* region, uint32_t channel)
      : base(region + channel * at.channel_bytes), shape(shape), at(at) {}

  EEP_HOST_DEVICE eep_mailbox* mailbox(uint32_t slot) const {
    return reinterpret_cast<eep_mailbox*>(base + at.mailboxes) + slot;
  }
  EEP_HOST_DEVICE uint64_t* outbox_stamp() const { return reinterpret_cast<uint64_t*>(base + at.outbox_stamp); }
  EEP_HOST_DEVICE uint64_t row_index(uint32_t slot, uint32_t token) const {
    return static_cast<uint64_t>(slot) * shape.max_tokens + token;
  }
  EEP_HOST_DEVICE int32_t* topk_idx(uint32_t slot, uint32_t token) const {
    return reinterpret_cast<int32_t*>(base + at.topk_idx) + row_index(slot, token) * shape.max_topk;
  }
  EEP_HOST_DEVICE float* topk_weights(uint32_t slot, uint32_t token) const {
    return reinterpret_cast<float*>(base + at.topk_weights) + row_index(slot, token) * shape.max_topk;
  }
  // A narrower type than the widest one leaves a gap behind each slot, never between rows.
  EEP_HOST_DEVICE uint8_t* row(uint32_t slot, uint32_t token, uint64_t bytes) const {
    return base + at.rows + row_index(slot, 0) * at.row_bytes + token * bytes;
  }
  EEP_HOST_DEVICE uint8_t* scales(uint32_t slot, uint32_t token) const {
    return base + at.scales + row_index(slot, token) * at.scale_bytes;
  }
  EEP_HOST_DEVICE uint8_t* outbox_row(uint64_t index) const { return base + at.outbox + index * at.outbox_row_bytes; }
  // rank layout: what was made of `token` of the source in `slot`
  EEP_HOST_DEVICE uint8_t* outbox_by_slot(uint32_t slot, uint32_t token) const {
    return outbox_row(row_index(slot, token));
  }
  // expert layout: what its k-th expert made of `token` of `rank`
  EEP_HOST_DEVICE uint8_t* outbox_by_choice(uint32_t rank, uint32_t token, uint32_t k) const {
    return outbox_row(row_index(rank, token) * shape.max_topk + k);
  }
};

// One part of a lane: what one thread block of a GPU, or a CPU, meets the same part of the other members in.
struct PartView {
  uint8_t* base;
  const eep_shape& shape;
  const eep_region_layout& at;

  EEP_HOST_DEVICE PartView(const eep_shape& shape, const eep_region_layout& at, uint8_t* base)
      : base(base), shape(shape), at(at) {}

  EEP_HOST_DEVICE eep_lane_mailbox* mailbox(uint32_t slot) const {
    return reinterpret_cast<eep_lane_mailbox*>(base + at.lane_mailboxes) + slot;
  }
  // Two words: epoch | round, and the group.
  EEP_HOST_DEVICE uint64_t* stamp(uint32_t half) const {
    return reinterpret_cast<uint64_t*>(base + at.lane_stamps + half * 64);
  }
  EEP_HOST_DEVICE uint8_t* outbox(uint32_t half) const {
    return base + at.lane_outbox + static_cast<uint64_t>(half) * shape.lane_bytes;
  }
};

// One lane: its parts, and the pipes behind them.
struct LaneView {
  uint8_t* base;
  const eep_shape& shape;
  const eep_region_layout& at;

  EEP_HOST_DEVICE LaneView(const eep_shape& shape, const eep_region_layout& at, uint8_t* region, uint32_t lane)
      : base(region + at.lanes + lane * at.lane_bytes), shape(shape), at(at) {}

  EEP_HOST_DEVICE PartView part(uint32_t number) const { return {shape, at, base + number * at.part_bytes}; }
  EEP_HOST_DEVICE eep_pipe* pipe(uint32_t slot) const {
    return reinterpret_cast<eep_pipe*>(base + at.pipes + slot * at.pipe_stride);
  }
  EEP_HOST_DEVICE eep_pipe_cell* cell(uint32_t slot, uint64_t sequence) const {
    const uint64_t stride = sizeof(eep_pipe_cell) + shape.pipe_bytes;
    return reinterpret_cast<eep_pipe_cell*>(base + at.pipes + slot * at.pipe_stride + sizeof(eep_pipe) +
                                            sequence % EEP_PIPE_CELLS * stride);
  }
};

}  // namespace eep

#endif  // EEP_COMMON_REGION_VIEWS_H_
