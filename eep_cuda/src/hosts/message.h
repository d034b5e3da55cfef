// A message as it goes out: any number of puts, and the signal that ends it.
#ifndef EEP_HOSTS_MESSAGE_H_
#define EEP_HOSTS_MESSAGE_H_

#include <vector>

#include "common/shared_words.h"
#include "eep/hosts.h"

namespace eep::hosts {

struct Put {
  uint32_t area;
  uint64_t offset;
  const uint8_t* from;
  uint64_t bytes;
};

// What a signal means: the low byte of its first word.
enum Kind : uint64_t {
  kHello = 1,
  kDispatch,
  kCombine,
  kBarrier,
  kRevoke,
  kPage,      // what the sender says of itself
  kGroup,     // the group that a lane of the sender serves
  kRound,     // the sender has entered a round of a collective
  kCell,      // a part of a message between ranks
  kTaken,     // the receiver is done with such parts
  kClear,     // nothing: what was put is all
  kFarewell,  // the peer's goodbye was heard
};

// Words that must still be so when all puts have been read: what was put is what the signal says.
struct Guard {
  const uint64_t* word = nullptr;
  uint64_t value = 0;

  bool holds() const { return !word || load_acquire(*word) == value; }
};

struct Message {
  std::vector<Put> puts;
  eep_signal signal = {};
  Guard guards[2];

  void begin(uint64_t first, uint64_t second = 0, uint64_t third = 0, uint64_t fourth = 0, uint64_t fifth = 0,
             uint64_t sixth = 0) {
    puts.clear();
    signal = {{first, second, third, fourth, fifth, sixth}};
    guards[0] = guards[1] = {};
  }
  bool is_guarded() const { return guards[0].word; }
  bool is_torn() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return !guards[0].holds() || !guards[1].holds();
  }
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_MESSAGE_H_
