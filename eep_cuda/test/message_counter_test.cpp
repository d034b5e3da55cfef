// Messages between hosts are shown whole and in order, whatever a network does to their parts.
#include "hosts/message_counter.h"

#include "require.h"

namespace eep_test {
namespace {

using eep::hosts::MessageCounter;

eep_signal numbered(uint64_t number) { return {{number, 0, 0, 0}}; }

// The number of the signal that is shown next; 0 for none.
uint64_t taken(MessageCounter& counter) {
  eep_signal signal;
  return counter.take(signal) ? signal.words[0] : 0;
}

void test_a_signal_waits_for_all_puts() {
  MessageCounter counter;
  REQUIRE(counter.signal_arrived(0, 2, numbered(1)));
  REQUIRE(!taken(counter));
  counter.put_arrived(0);
  REQUIRE(!taken(counter));
  counter.put_arrived(0);
  REQUIRE(taken(counter) == 1);
  REQUIRE(!taken(counter));
}

void test_messages_are_shown_in_order() {
  MessageCounter counter;
  REQUIRE(counter.signal_arrived(2, 0, numbered(3)));
  REQUIRE(counter.signal_arrived(1, 1, numbered(2)));
  REQUIRE(!taken(counter));  // the first is missing
  REQUIRE(counter.signal_arrived(0, 0, numbered(1)));
  REQUIRE(taken(counter) == 1);
  REQUIRE(!taken(counter));  // a put of the second is missing: the third does not overtake it
  counter.put_arrived(1);
  REQUIRE(taken(counter) == 2);
  REQUIRE(taken(counter) == 3);
}

void test_what_cannot_be_is_refused() {
  MessageCounter counter;
  REQUIRE(!counter.signal_arrived(MessageCounter::kWindow, 0, numbered(1)));
  REQUIRE(counter.signal_arrived(0, 0, numbered(1)));
  REQUIRE(!counter.signal_arrived(0, 0, numbered(9)));  // twice
  REQUIRE(taken(counter) == 1);
  REQUIRE(!counter.signal_arrived(0, 0, numbered(9)));  // long ago
  counter.put_arrived(0);                               // of a message that was shown: it counts for no other
  REQUIRE(counter.signal_arrived(MessageCounter::kWindow, 1, numbered(9)));
  for (uint32_t sequence = 1; sequence < MessageCounter::kWindow; ++sequence) {
    REQUIRE(counter.signal_arrived(sequence, 0, numbered(2)));
    REQUIRE(taken(counter) == 2);
  }
  REQUIRE(!taken(counter));
  counter.put_arrived(MessageCounter::kWindow);
  REQUIRE(taken(counter) == 9);
}

}  // namespace

void test_message_counter() {
  test_a_signal_waits_for_all_puts();
  test_messages_are_shown_in_order();
  test_what_cannot_be_is_refused();
}

}  // namespace eep_test
