// The rank of one guest: dispatch and combine with a rank of another guest over verbs, on the C ABI alone. The test at
// the other end of a virtual serial port plays the registry and the control plane. A command is a line, and so is an
// answer; each command has at least one:
//
//   invite RANK INCARNATION SECRET   offer OFFER
//   connect OFFER SECRET             up
//   dismiss                          dismissed
//   view EPOCH RANKS                 view EPOCH           RANKS is a mask
//   rounds COUNT                     round N exact ...    for each round; "round N lost ..." ends them, as does
//                                    done                 the last
//   packets                          packets N            that this guest's soft-RoCE device has sent
//
// Anything else is answered by "error" and a sentence.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "eep/hosts.h"

namespace {

constexpr uint32_t kRanks = 2, kTokens = 64, kHidden = 512, kTopk = 2, kLocalExperts = 2;
// An emulated guest on a busy machine is slow. And all of it is waited: soft-RoCE repeats without end what a lost peer
// does not acknowledge, and so the link does not show the loss.
constexpr uint64_t kDeadlineNs = 20'000'000'000;
constexpr auto kUpWithin = std::chrono::seconds(60);

// What ends a command: the test reads it.
struct Refusal {
  std::string why;
};

void require(int code) {
  if (code != EEP_OK) throw Refusal{eep_last_error()};
}

template <typename Fixed>
std::string to_hex(const Fixed& fixed) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&fixed);
  std::string hex;
  char two[3];
  for (size_t i = 0; i < sizeof fixed; ++i) std::snprintf(two, sizeof two, "%02x", bytes[i]), hex += two;
  return hex;
}

template <typename Fixed>
Fixed from_hex(const std::string& hex) {
  Fixed fixed;
  if (hex.size() != 2 * sizeof fixed) throw Refusal{"what was given in hexadecimal is not of the right length"};
  auto* bytes = reinterpret_cast<uint8_t*>(&fixed);
  for (size_t i = 0; i < sizeof fixed; ++i) bytes[i] = uint8_t(std::stoul(hex.substr(2 * i, 2), nullptr, 16));
  return fixed;
}

// What this rank sends in a round: no other life, round or token has the same row. Sums of these are exact.
struct Batch {
  Batch(uint32_t rank, uint32_t incarnation, uint32_t round, uint64_t members)
      : tokens((rank * 5 + round * 7) % (kTokens + 1)), x(tokens * kHidden), idx(tokens * kTopk), weights(idx.size()) {
    for (uint32_t i = 0; i < x.size(); ++i)
      x[i] = float(int((i * 31 + round * 101 + incarnation * 57 + rank * 13) % 2039) - 1000);
    for (uint32_t i = 0; i < idx.size(); ++i) {
      idx[i] = int64_t((i * 3 + round) % (kRanks * kLocalExperts));
      if (!(members >> (idx[i] / kLocalExperts) & 1)) idx[i] = rank * kLocalExperts + idx[i] % kLocalExperts;
      if (i % 7 == 6) idx[i] = -1;
      weights[i] = float(i % kTopk + 1);
    }
  }
  // Expert e gives back its input times e + 1.
  float expected(uint32_t i) const {
    float factor = 0;
    for (uint32_t k = i / kHidden * kTopk; k < (i / kHidden + 1) * kTopk; ++k)
      if (idx[k] >= 0) factor += weights[k] * float(idx[k] + 1);
    return factor * x[i];
  }

  uint32_t tokens;
  std::vector<float> x;
  std::vector<int64_t> idx;
  std::vector<float> weights;
};

class GuestRank {
 public:
  GuestRank(uint32_t rank, uint32_t incarnation, const char* address, FILE* answers)
      : rank_(rank), incarnation_(incarnation), answers_(answers) {
    require(eep_region_layout_compute(&kShape, &at_));
    region_ = std::make_unique<uint64_t[]>(at_.total_bytes / sizeof(uint64_t));
    require(eep_create(&kShape, rank, region_.get(), &control_, &context_));
    require(eep_proxy_start(&kShape, rank, region_.get(), &control_, &waits_, "verbs", address, &proxy_));
  }

  void obey(std::istringstream& line) {
    std::string command, offer, secret;
    line >> command;
    if (command == "invite") {
      uint32_t peer, incarnation;
      line >> peer >> incarnation >> secret;
      invite(peer, incarnation, from_hex<eep_link_secret>(secret));
    } else if (command == "connect") {
      line >> offer >> secret;
      connect(from_hex<eep_link_offer>(offer), from_hex<eep_link_secret>(secret));
    } else if (command == "dismiss") {
      require(eep_proxy_dismiss(proxy_, link_));
      answer("dismissed");
    } else if (command == "view") {
      uint64_t epoch;
      line >> epoch >> members_;
      show(epoch);
    } else if (command == "rounds") {
      uint32_t count;
      line >> count;
      while (count && take_round()) --count;
      answer("done");
    } else if (command == "packets") {
      std::ifstream counter("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts");
      std::string packets = "0";
      counter >> packets;
      answer("packets " + packets);
    } else {
      throw Refusal{"there is no command " + command};
    }
  }

  void answer(const std::string& text) {
    std::fprintf(answers_, "%s\n", text.c_str());
    std::fflush(answers_);
  }

 private:
  static constexpr eep_shape kShape = {.max_ranks = kRanks,
                                       .max_tokens = kTokens,
                                       .hidden = kHidden,
                                       .max_topk = kTopk,
                                       .local_experts = kLocalExperts,
                                       .layout = EEP_LAYOUT_RANK,
                                       .wire_type = EEP_TYPE_F32,
                                       .combine_type = EEP_TYPE_F32,
                                       .channels = 1,
                                       .lanes = 0,
                                       .lane_parts = 0,
                                       .lane_bytes = 0,
                                       .pipe_bytes = 0,
                                       .reserved = 0};

  void invite(uint32_t peer, uint32_t incarnation, const eep_link_secret& secret) {
    peer_incarnation_ = incarnation;
    mirror_ = std::make_unique<uint64_t[]>((at_.total_bytes + sizeof(eep_control_page)) / sizeof(uint64_t));
    const eep_remote_peer remote{.mirror = reinterpret_cast<uint64_t>(mirror_.get()),
                                 .rank = peer,
                                 .incarnation = incarnation,
                                 .own_incarnation = incarnation_,
                                 .reserved = 0};
    eep_link_offer offer;
    require(eep_proxy_invite(proxy_, &remote, &secret, &offer, &link_));
    answer("offer " + to_hex(offer));
  }

  void connect(const eep_link_offer& offer, const eep_link_secret& secret) {
    require(eep_proxy_connect(proxy_, link_, &offer, &secret));
    const auto end = std::chrono::steady_clock::now() + kUpWithin;
    for (uint32_t is_up = 0; !is_up;) {
      require(eep_proxy_is_up(proxy_, link_, &is_up));
      if (std::chrono::steady_clock::now() > end) throw Refusal{"the peer does not answer"};
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    answer("up");
  }

  void show(uint64_t epoch) {
    eep_peer_table* table = eep_table(context_);
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      const bool is_self = peer == rank_;
      eep_peer& entry = table->peers[peer];
      entry.active = members_ >> peer & 1;
      entry.transport = !entry.active ? EEP_TRANSPORT_NONE : is_self ? EEP_TRANSPORT_LOCAL : EEP_TRANSPORT_REMOTE;
      entry.region = entry.active ? reinterpret_cast<uint64_t>(is_self ? region_.get() : mirror_.get()) : 0;
      entry.control = entry.active ? reinterpret_cast<uint64_t>(is_self ? &control_ : &waits_) : 0;
      entry.incarnation = is_self ? incarnation_ : peer_incarnation_;
      entry.slot = eep_slot_of(peer, entry.incarnation, kRanks);
    }
    table->deadline_ns = kDeadlineNs;
    table->epoch = epoch;
    require(eep_publish_table(context_));
    answer("view " + std::to_string(epoch));
  }

  // False: it is not to be trusted, and no other round of this view would be.
  bool take_round() {
    const Batch batch(rank_, incarnation_, ++round_, members_);
    const uint64_t rows = uint64_t{at_.slots} * kTokens;
    std::vector<int32_t> count(kRanks), idx(rows * kTopk);
    std::vector<float> weights(idx.size()), results(rows * kHidden), out(batch.x.size(), -1);
    eep_dispatch_send_args send{};
    send.x = batch.x.data(), send.topk_idx = batch.idx.data(), send.topk_weights = batch.weights.data();
    send.tokens = batch.tokens, send.topk = kTopk;
    eep_dispatch_recv_args receive{};
    receive.count = count.data(), receive.topk_idx = idx.data(), receive.topk_weights = weights.data();
    receive.topk = kTopk;
    require(eep_dispatch(context_, &send, &receive, nullptr));
    compute(idx, weights, results);
    eep_combine_send_args publish{};
    publish.x = results.data(), publish.topk = kTopk;
    eep_combine_recv_args pull{};
    pull.out = out.data(), pull.topk_idx = batch.idx.data(), pull.topk_weights = batch.weights.data();
    pull.tokens = batch.tokens, pull.topk = kTopk;
    require(eep_combine(context_, &publish, &pull, nullptr));
    return judge(batch, out);
  }

  void compute(const std::vector<int32_t>& idx, const std::vector<float>& weights, std::vector<float>& results) const {
    const auto* inbox = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(region_.get()) + at_.rows);
    for (uint64_t row = 0; row < results.size() / kHidden; ++row) {
      float factor = 0;
      for (uint64_t k = row * kTopk; k < (row + 1) * kTopk; ++k)
        if (idx[k] >= 0) factor += weights[k] * float(rank_ * kLocalExperts + uint32_t(idx[k]) + 1);
      for (uint64_t i = row * kHidden; factor != 0 && i < (row + 1) * kHidden; ++i) results[i] = factor * inbox[i];
    }
  }

  bool judge(const Batch& batch, const std::vector<float>& out) {
    const uint64_t status = __atomic_load_n(&control_.status, __ATOMIC_ACQUIRE);
    const std::string name = "round " + std::to_string(round_);
    if (status) {
      uint32_t is_up;
      const bool is_broken = eep_proxy_is_up(proxy_, link_, &is_up) != EEP_OK;
      answer(name + " lost, status " + std::to_string(status) + ", the link " +
             (is_broken ? std::string("has ended: ") + eep_last_error() : "shows nothing"));
      return false;
    }
    for (uint32_t i = 0; i < out.size(); ++i) {
      const float expected = batch.expected(i);
      if (std::memcmp(&out[i], &expected, sizeof expected) == 0) continue;
      answer(name + " wrong at token " + std::to_string(i / kHidden) + ": " + std::to_string(out[i]) + " instead of " +
             std::to_string(expected));
      return false;
    }
    answer(name + " exact, " + std::to_string(batch.tokens) + " tokens");
    return true;
  }

  const uint32_t rank_, incarnation_;
  FILE* const answers_;
  eep_region_layout at_{};
  std::unique_ptr<uint64_t[]> region_, mirror_;
  eep_control_page control_{}, waits_{};
  eep_context* context_ = nullptr;
  eep_proxy* proxy_ = nullptr;
  uint64_t members_ = 0;
  uint32_t link_ = 0, peer_incarnation_ = 0, round_ = 0;
};

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  if (!value) throw Refusal{std::string("the kernel was started without ") + name};
  return value;
}

void serve(FILE* commands, FILE* answers) {
  GuestRank rank(uint32_t(std::atoi(setting("RANK"))), uint32_t(std::atoi(setting("INCARNATION"))), setting("ADDRESS"),
                 answers);
  rank.answer("ready");
  char* line = nullptr;
  size_t capacity = 0;
  while (getline(&line, &capacity, commands) > 0) {
    std::istringstream words(line);
    try {
      rank.obey(words);
    } catch (const Refusal& refusal) {
      rank.answer("error: " + refusal.why);
    }
  }
  std::free(line);
}

}  // namespace

// As process 1 it must not end: that would be a panic of the kernel, at which the guest ends as well.
int main(int count, char** words) {
  if (count != 2) return std::fprintf(stderr, "%s needs the serial port\n", words[0]), 1;
  const int port = open(words[1], O_RDWR | O_CLOEXEC);
  if (port < 0) return std::perror(words[1]), 1;
  FILE *commands = fdopen(port, "r"), *answers = fdopen(dup(port), "w");
  try {
    serve(commands, answers);
  } catch (const Refusal& refusal) {
    std::fprintf(answers, "error: %s\n", refusal.why.c_str());
    std::fflush(answers);
  }
  return 1;
}
