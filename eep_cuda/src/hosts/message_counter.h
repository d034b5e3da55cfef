// Which messages of a peer are whole: puts are counted as they arrive, and signals are shown in the order in which they
// were sent. No network here.
#ifndef EEP_HOSTS_MESSAGE_COUNTER_H_
#define EEP_HOSTS_MESSAGE_COUNTER_H_

#include <array>
#include <cstdint>

#include "eep/hosts.h"

namespace eep::hosts {

class MessageCounter {
 public:
  // How far a network may get messages out of order. A link sends fewer before it knows that the first has arrived.
  static constexpr uint32_t kWindow = 64;

  // A put of message `sequence` has arrived.
  void put_arrived(uint32_t sequence) {
    if (Message* message = find(sequence)) ++message->arrived;
  }

  // The signal of message `sequence` has arrived, which has `puts` puts. False if no such message can be on its way.
  bool signal_arrived(uint32_t sequence, uint32_t puts, const eep_signal& signal) {
    Message* message = find(sequence);
    if (!message || message->is_signalled) return false;
    message->is_signalled = true;
    message->puts = puts;
    message->signal = signal;
    return true;
  }

  bool take(eep_signal& signal) {
    Message& message = messages_[next_ % kWindow];
    if (!message.is_signalled || message.arrived != message.puts) return false;
    signal = message.signal;
    message = {};
    ++next_;
    return true;
  }

 private:
  struct Message {
    uint32_t arrived = 0, puts = 0;
    bool is_signalled = false;
    eep_signal signal = {};
  };

  Message* find(uint32_t sequence) { return sequence - next_ < kWindow ? &messages_[sequence % kWindow] : nullptr; }

  uint32_t next_ = 0;  // wraps, as what peers send does
  std::array<Message, kWindow> messages_;
};

}  // namespace eep::hosts

#endif  // EEP_HOSTS_MESSAGE_COUNTER_H_
