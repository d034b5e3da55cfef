// The thread that moves everything between a rank and its peers on other hosts. It sleeps while there is nothing to
// move.
#ifndef EEP_HOSTS_PROXY_H_
#define EEP_HOSTS_PROXY_H_

#include <poll.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hosts/peer_traffic.h"

struct eep_proxy {
 public:
  eep_proxy(const eep_shape& shape, uint32_t rank, void* region, eep_control_page& control, eep_control_page& waits);
  ~eep_proxy();

  int open(const char* provider, const char* address);
  int invite(const eep_remote_peer& peer, const eep_link_secret& secret, eep_link_offer& offer, uint32_t& id);
  int connect(uint32_t id, const eep_link_offer& offer, const eep_link_secret& secret);
  int is_up(uint32_t id, uint32_t& is_up);
  int dismiss(uint32_t id);
  int ended(uint32_t id, int& descriptor);
  bool take_leave(uint64_t deadline_ns);
  void watch();

  // ---- for Loan: a kernel that waits for links does the work of the thread meanwhile ----
  // The proxy that waits at that page; null if there is none, or if its work is lent already.
  static eep_proxy* lend(const eep_control_page& waits);
  void take_back();
  // Has the thread of that proxy work now, also if a kernel had its work just before.
  static void call(const eep_control_page& waits);
  // Has that thread send rows of which no flag tells yet.
  static void offer_rows(const eep_control_page& waits, eep::hosts::RemoteRows rows);
  bool turn_for_kernel();
  void sleep_for_kernel(std::chrono::nanoseconds longest);

 private:
  // The links are the thread's, but for as long as somebody visits.
  class Visit {
   public:
    explicit Visit(eep_proxy& proxy);
    ~Visit();

   private:
    eep_proxy& proxy_;
    std::unique_lock<std::mutex> lock_;
  };

  void run();
  void forward_rings();
  bool turn();
  void send_ahead();
  bool is_spared() const;
  void sleep_spared(uint32_t doorbell);
  void sleep(uint32_t doorbell);
  void nap(std::chrono::nanoseconds idle);
  bool may_sleep(std::vector<pollfd>& waited, bool& is_held_up);
  void wake();
  eep::hosts::PeerTraffic* find(uint32_t id);

  const eep_shape shape_;
  const eep_region_layout at_;
  const uint32_t rank_;
  uint8_t* const region_;
  eep_control_page& control_;
  eep_control_page& waits_;
  std::unique_ptr<eep::hosts::Transport> transport_;
  std::map<uint32_t, std::unique_ptr<eep::hosts::PeerTraffic>> peers_;
  uint32_t last_id_ = 0;
  std::mutex offer_mutex_;
  eep::hosts::RemoteRows offered_{};  // with no mirrors: nothing
  std::mutex mutex_;
  std::atomic<uint32_t> visitors_{0};
  std::atomic<bool> is_stopping_{false}, is_asleep_{false}, is_lent_{false}, is_called_{false}, is_watching_{false};
  std::atomic<int64_t> spared_until_ns_{0};
  int wake_ = -1;  // an eventfd
  std::thread thread_, bell_;
};

#endif  // EEP_HOSTS_PROXY_H_
