// The C functions of eep/hosts.h over a transport and its links.
#include <time.h>

#include <memory>

#include "common/checks.h"
#include "hosts/transport.h"

struct eep_hosts {
  std::unique_ptr<eep::hosts::Transport> transport;
};

struct eep_link {
  std::unique_ptr<eep::hosts::Link> link;
};

namespace eep::hosts {
namespace {

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

int answer(eep_link* link, Outcome outcome, uint32_t* done) {
  *done = outcome == Outcome::kDone;
  if (outcome != Outcome::kBroken) return EEP_OK;
  return fail(EEP_ERROR_DEVICE, "the link to a peer is broken: %s", link->link->trouble().c_str());
}

}  // namespace
}  // namespace eep::hosts

int eep_hosts_open(const char* provider, const char* address, eep_hosts** out) {
  using namespace eep;
  if (!provider || !*provider || !address || !*address)
    return fail(EEP_ERROR_ARGUMENT, "a transport needs the name of a provider and an address of this host");
  auto transport = hosts::open_fabric(provider, address);
  if (!transport) return EEP_ERROR_DEVICE;
  *out = new eep_hosts{std::move(transport)};
  return EEP_OK;
}

void eep_hosts_close(eep_hosts* hosts) { delete hosts; }

int eep_link_open(eep_hosts* hosts, const eep_area* areas, uint32_t count, const eep_link_secret* secret,
                  eep_link** out) {
  using namespace eep;
  if (count > EEP_MAX_AREAS)
    return fail(EEP_ERROR_ARGUMENT, "a link has at most %d areas, %u were given", EEP_MAX_AREAS, count);
  for (uint32_t i = 0; i < count; ++i)
    if (!areas[i].address || !areas[i].bytes)
      return fail(EEP_ERROR_ARGUMENT, "area %u of a link has no address or no bytes", i);
  auto link = hosts->transport->open_link(areas, count, *secret);
  if (!link) return EEP_ERROR_DEVICE;
  *out = new eep_link{std::move(link)};
  return EEP_OK;
}

void eep_link_offered(eep_link* link, eep_link_offer* out) { *out = link->link->offer(); }

int eep_link_connect(eep_link* link, const eep_link_offer* peer, const eep_link_secret* secret) {
  return link->link->connect(*peer, *secret);
}

int eep_link_put(eep_link* link, uint32_t area, uint64_t offset, const void* from, uint64_t bytes, uint32_t* done) {
  if (!from || !bytes) return eep::fail(EEP_ERROR_ARGUMENT, "a put has no bytes, or no address to read them from");
  return eep::hosts::answer(link, link->link->put(area, offset, from, bytes), done);
}

int eep_link_signal(eep_link* link, const eep_signal* signal, uint32_t* done) {
  return eep::hosts::answer(link, link->link->signal(*signal), done);
}

uint32_t eep_link_unread(eep_link* link) { return link->link->unread(); }

int eep_link_progress(eep_link* link, eep_signal* signals, uint32_t most, uint32_t* count) {
  link->link->progress();
  *count = 0;
  while (*count < most && link->link->take(signals[*count])) ++*count;
  if (*count || link->link->trouble().empty()) return EEP_OK;
  return eep::fail(EEP_ERROR_DEVICE, "the link to a peer is broken: %s", link->link->trouble().c_str());
}

uint64_t eep_link_refused(eep_link* link) { return link->link->refused(); }

int eep_link_drain(eep_link* link, uint64_t deadline_ns, uint32_t* done) {
  const uint64_t began = eep::hosts::now_ns();
  while (link->link->unread() && link->link->trouble().empty() && eep::hosts::now_ns() - began < deadline_ns)
    link->link->progress();
  *done = link->link->unread() == 0;
  return EEP_OK;
}

void eep_link_close(eep_link* link) { delete link; }
