#include "common/fault.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "common/checks.h"

namespace eep::fault {
namespace {

constexpr const char* kNames[kPointCount] = {
    "dispatch.before_rows", "dispatch.mid_rows",    "dispatch.after_rows",    "dispatch.mid_flags",
    "dispatch.after_flags", "dispatch.received",    "combine.before_rows",    "combine.after_rows",
    "combine.mid_flags",    "combine.after_flags",  "combine.mid_pull",       "collective.entered",
    "collective.filled",    "collective.mid_flags", "collective.after_flags", "collective.before_copy",
    "send.mid_message",     "hosts.mid_rows",       "hosts.after_rows",       "hosts.received",
};

struct Plan {
  uint32_t action;
  uint32_t skip;
  uint32_t dropped;
  uint32_t amount;
} plans[kPointCount];

std::atomic<void (*)(uint32_t)> notify{nullptr};

void tell(Point point) {
  if (auto* fired = notify.load(std::memory_order_acquire)) fired(point);
}

void disarm(Plan& plan) {
  plan.action = EEP_FAULT_OFF;
  armed.fetch_sub(1, std::memory_order_relaxed);
}

// Loses this message and the next ones, until the plan has lost enough.
bool drop(Plan& plan, Point point) {
  if (!plan.dropped++) tell(point);
  if (plan.dropped >= plan.amount) disarm(plan);
  return true;
}

void spin(uint32_t microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace

std::atomic<uint32_t> armed{0};

// Returns whether to lose the message that is about to be sent.
bool act(Point point) {
  Plan& plan = plans[point];
  if (plan.action == EEP_FAULT_OFF) return false;
  if (plan.skip) {
    --plan.skip;
    return false;
  }
  if (plan.action == EEP_FAULT_DROP) return drop(plan, point);
  const uint32_t action = plan.action;
  disarm(plan);
  tell(point);
  if (action == EEP_FAULT_KILL) kill(getpid(), SIGKILL);
  if (action == EEP_FAULT_STOP) kill(getpid(), SIGSTOP);
  if (action == EEP_FAULT_SLEEP) usleep(plan.amount);
  if (action == EEP_FAULT_SPIN) spin(plan.amount);
  return false;
}

}  // namespace eep::fault

using namespace eep::fault;

uint32_t eep_fault_count(void) { return kPointCount; }
const char* eep_fault_name(uint32_t point) { return point < kPointCount ? kNames[point] : nullptr; }

void eep_fault_notify(void (*fired)(uint32_t)) { notify.store(fired, std::memory_order_release); }

int eep_fault_arm(uint32_t point, uint32_t action, uint32_t skip, uint32_t amount) {
  if (point >= kPointCount || action > EEP_FAULT_SPIN)
    return eep::fail(EEP_ERROR_ARGUMENT,
                     "there is no fault point %u, or no action %u; see eep_fault_name and eep_fault_action", point,
                     action);
  if (action == EEP_FAULT_DROP && point != kDispatchAfterRows && point != kCombineAfterRows)
    return eep::fail(EEP_ERROR_ARGUMENT, "no message is sent at %s that could be lost: use %s or %s", kNames[point],
                     kNames[kDispatchAfterRows], kNames[kCombineAfterRows]);
  const bool was = plans[point].action != EEP_FAULT_OFF, is = action != EEP_FAULT_OFF;
  plans[point] = {action, skip, 0, amount};
  if (is != was) armed.fetch_add(is ? 1 : -1, std::memory_order_relaxed);
  return EEP_OK;
}
