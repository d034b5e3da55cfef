// The memory that stands for the region of a rank on another host: laid out like that region, and behind it a control
// page in which the proxy repeats what that rank says of itself.
#ifndef EEP_COMMON_MIRRORS_H_
#define EEP_COMMON_MIRRORS_H_

#include "eep/protocol.h"

namespace eep {

inline eep_control_page* page_behind(uint8_t* mirror, const eep_region_layout& at) {
  return reinterpret_cast<eep_control_page*>(mirror + at.total_bytes);
}

}  // namespace eep

#endif  // EEP_COMMON_MIRRORS_H_
