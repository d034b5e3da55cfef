// What a rank tells a peer on another host of a round of a collective. Such a peer has a mirror here, and in the mirror
// of a lane these letters lie where a region has mailboxes. The kernel writes them, the proxy sends them.
//
// There is one for each half, because a rank may be a round ahead of what was sent: it enters round n+2 only when the
// peer has entered round n+1, and for that the peer has got round n.
#ifndef EEP_COMMON_LANE_LETTERS_H_
#define EEP_COMMON_LANE_LETTERS_H_

#include <initializer_list>

#include "common/region_views.h"
#include "common/shared_words.h"

namespace eep {

// What of a half a member reads: two ranges, either of which may be empty.
struct Parts {
  uint64_t begin[2] = {}, size[2] = {};
};

struct Letter {
  uint64_t flag;  // as in a mailbox; 0 while the rest is written
  uint64_t group, call, bytes, members;
  Parts parts;
  uint64_t reserved[7];
};
static_assert(sizeof(Letter) == 2 * sizeof(eep_lane_mailbox), "two ranks have four mailboxes: room for two letters");

EEP_HOST_DEVICE inline Letter& letter_of(const PartView& mirror, uint64_t half) {
  return reinterpret_cast<Letter*>(mirror.base + mirror.at.lane_mailboxes)[half];
}

inline void write_letter(Letter& letter, const Letter& words) {
  store_relaxed(letter.flag, uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  store_relaxed(letter.group, words.group);
  store_relaxed(letter.call, words.call);
  store_relaxed(letter.bytes, words.bytes);
  store_relaxed(letter.members, words.members);
  for (int i : {0, 1}) {
    store_relaxed(letter.parts.begin[i], words.parts.begin[i]);
    store_relaxed(letter.parts.size[i], words.parts.size[i]);
  }
  store_release(letter.flag, words.flag);
}

// The letter as it is now; its flag is 0 if it was being written.
inline Letter read_letter(const Letter& letter) {
  Letter words = {};
  words.flag = load_acquire(letter.flag);
  words.group = load_relaxed(letter.group);
  words.call = load_relaxed(letter.call);
  words.bytes = load_relaxed(letter.bytes);
  words.members = load_relaxed(letter.members);
  for (int i : {0, 1}) {
    words.parts.begin[i] = load_relaxed(letter.parts.begin[i]);
    words.parts.size[i] = load_relaxed(letter.parts.size[i]);
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (load_acquire(letter.flag) != words.flag) words.flag = 0;
  return words;
}

}  // namespace eep

#endif  // EEP_COMMON_LANE_LETTERS_H_
