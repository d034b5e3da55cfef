#include "common/fault.h"

#include <signal.h>
#include <unistd.h>

#include "common/checks.h"

namespace eep::fault {
namespace {

constexpr const char* kNames[kPointCount] = {
    "dispatch.before_rows", "dispatch.mid_rows",    "dispatch.after_rows",    "dispatch.mid_flags",
    "dispatch.after_flags", "dispatch.received",    "combine.before_rows",    "combine.after_rows",
    "combine.mid_flags",    "combine.after_flags",  "combine.mid_pull",       "collective.entered",
    "collective.filled",    "collective.mid_flags", "collective.after_flags", "collective.before_copy",
    "send.mid_message",
};

struct Plan {
  uint32_t action;
  uint32_t skip;
  uint32_t sleep_us;
} plans[kPointCount];

}  // namespace

std::atomic<uint32_t> armed{0};

void act(Point point) {
  Plan& plan = plans[point];
  if (plan.action == EEP_FAULT_OFF) return;
  if (plan.skip) {
    --plan.skip;
    return;
  }
  const uint32_t action = plan.action;
  plan.action = EEP_FAULT_OFF;
  armed.fetch_sub(1, std::memory_order_relaxed);
  if (action == EEP_FAULT_KILL) kill(getpid(), SIGKILL);
  if (action == EEP_FAULT_STOP) kill(getpid(), SIGSTOP);
  if (action == EEP_FAULT_SLEEP) usleep(plan.sleep_us);
}

}  // namespace eep::fault

using namespace eep::fault;

uint32_t eep_fault_count(void) { return kPointCount; }
const char* eep_fault_name(uint32_t point) { return point < kPointCount ? kNames[point] : nullptr; }

int eep_fault_arm(uint32_t point, uint32_t action, uint32_t skip, uint32_t sleep_us) {
  if (point >= kPointCount || action > EEP_FAULT_SLEEP)
    return eep::fail(EEP_ERROR_ARGUMENT, "no such fault point (%u) or action (%u)", point, action);
  const bool was = plans[point].action != EEP_FAULT_OFF, is = action != EEP_FAULT_OFF;
  plans[point] = {action, skip, sleep_us};
  if (is != was) armed.fetch_add(is ? 1 : -1, std::memory_order_relaxed);
  return EEP_OK;
}
