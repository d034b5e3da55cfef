// Named points at which a test kills, stops or delays a process, or loses a message.
#ifndef EEP_COMMON_FAULT_H_
#define EEP_COMMON_FAULT_H_

#include <atomic>
#include <cstdint>

namespace eep::fault {

enum Point : uint32_t {
  kDispatchBeforeRows,
  kDispatchMidRows,
  kDispatchAfterRows,
  kDispatchMidFlags,
  kDispatchAfterFlags,
  kDispatchReceived,
  kCombineBeforeRows,
  kCombineAfterRows,
  kCombineMidFlags,
  kCombineAfterFlags,
  kCombineMidPull,
  kCollectiveEntered,
  kCollectiveFilled,
  kCollectiveMidFlags,
  kCollectiveAfterFlags,
  kCollectiveBeforeCopy,
  kSendMidMessage,
  kHostsMidRows,
  kHostsAfterRows,
  kHostsReceived,
  kPointCount,
};

extern std::atomic<uint32_t> armed;  // how many points are armed: one load is all that production pays
bool act(Point point);

inline void pass(Point point) {
  if (armed.load(std::memory_order_relaxed)) [[unlikely]]
    act(point);
}

// The same where a message is about to be sent: returns whether to lose it.
inline bool loses(Point point) {
  if (armed.load(std::memory_order_relaxed)) [[unlikely]]
    return act(point);
  return false;
}

}  // namespace eep::fault

#endif  // EEP_COMMON_FAULT_H_
