// What the host does to a control page: waking kernels that sleep on its doorbell, and clearing what was noted of the
// last view.
#ifndef EEP_COMMON_CONTROL_H_
#define EEP_COMMON_CONTROL_H_

#include "eep/peer_table.h"

namespace eep {
// After a flag: wakes a sleeper once all that it waits for may be there.
void ring(eep_control_page& page);
// After anything else that may end a wait: wakes every sleeper.
void ring_all(eep_control_page& page);
// Forgets suspects and status; part of showing a new view.
void forget_trouble(eep_control_page& page);
}  // namespace eep

#endif  // EEP_COMMON_CONTROL_H_
