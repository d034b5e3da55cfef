// What the data plane asks of a network: few calls, so that another network is another small class. See eep/hosts.h for
// what a link promises.
#ifndef EEP_HOSTS_TRANSPORT_H_
#define EEP_HOSTS_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "eep/hosts.h"

namespace eep::hosts {

enum class Outcome {
  kDone,
  kLater,   // the network takes no more just now
  kBroken,  // for good; Link::trouble() says why
};

class Link {
 public:
  virtual ~Link() = default;  // afterwards nothing that the peer puts is written anywhere
  virtual const eep_link_offer& offer() const = 0;
  virtual int connect(const eep_link_offer& peer, const eep_link_secret& secret) = 0;
  virtual Outcome put(uint32_t area, uint64_t offset, const void* from, uint64_t bytes) = 0;
  virtual Outcome signal(const eep_signal& signal) = 0;
  // How many puts are still being read here.
  virtual uint32_t unread() const = 0;
  // Whether nothing of ours is on its way that progress() must move.
  virtual bool is_idle() const = 0;
  // Moves bytes, both ways.
  virtual void progress() = 0;
  // The next signal of the peer that is complete; false if there is none.
  virtual bool take(eep_signal& signal) = 0;
  virtual uint64_t refused() const = 0;
  // Why the link is of no use any more; empty while it is.
  virtual const std::string& trouble() const = 0;
  // A descriptor that becomes readable when progress() has something to do; only after may_sleep() said yes.
  virtual int descriptor() const = 0;
  virtual bool may_sleep() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Null if it cannot be opened; eep_last_error() says why.
  virtual std::unique_ptr<Link> open_link(const eep_area* areas, uint32_t count, const eep_link_secret& secret) = 0;
};

// Null if it cannot be opened; eep_last_error() says why.
std::unique_ptr<Transport> open_fabric(const char* provider, const char* address);

}  // namespace eep::hosts

#endif  // EEP_HOSTS_TRANSPORT_H_
