// Process groups on a GPU, the host's side: which lane serves which group, where the peers have theirs, and launching.
//
// A rank says in its control page which group each of its lanes serves. The pages of the peers are host memory, so it
// is the host that looks; what it finds goes into the lane table in device memory, which captured graphs read. It looks
// when a group is opened, when a view is shown, and before each launch.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "common/checks.h"
#include "common/mirrors.h"
#include "cuda/collective.cuh"

namespace eep {
namespace {

constexpr uint64_t kBytesPerBlock = 8 << 10;  // one 16-byte vector a thread: fewer bytes are not worth another block
constexpr uint64_t kNap_ns = 20'000;

bool is_in(const Lane& lane, uint32_t rank) {
  return std::find(lane.rank, lane.rank + lane.size, rank) != lane.rank + lane.size;
}

uint64_t load_acquire(uint64_t& word) { return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire); }

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// What a thread may ask of CUDA while one of its streams is being captured.
class CaptureUndisturbed {
 public:
  CaptureUndisturbed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureUndisturbed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Shows the kernels lanes [first, first + count). A copy engine does it, from pinned memory: it disturbs no capture,
// and needs no multiprocessor, all of which may hold kernels that wait for a peer.
int show_lanes(eep_context* context, uint32_t first, uint32_t count) {
  const CaptureUndisturbed guard;
  cudaMemcpyAsync(context->home.state->lanes + first, context->lanes + first, count * sizeof(Lane),
                  cudaMemcpyHostToDevice, context->side);
  return check_cuda(cudaStreamSynchronize(context->side), "showing a process group to the kernels");
}

// The lane that `rank` has for a group, by its control page.
uint32_t find_lane(const eep_context& context, uint32_t rank, uint64_t group, uint32_t last_known) {
  const eep_peer& peer = context.table.peers[rank];
  auto* page = reinterpret_cast<eep_control_page*>(peer.control);
  if (!page) return kUnknownLane;
  // What a rank on another host says of itself, the proxy repeats behind the mirror.
  if (peer.transport == EEP_TRANSPORT_REMOTE)
    page = page_behind(reinterpret_cast<uint8_t*>(peer.region), context.home.at);
  if (last_known < context.home.shape.lanes && load_acquire(page->groups[last_known]) == group) return last_known;
  for (uint32_t lane = 0; lane < context.home.shape.lanes; ++lane)
    if (load_acquire(page->groups[lane]) == group) return lane;
  return kUnknownLane;
}

struct Search {
  bool is_complete;  // every member in the view has its lane
  bool has_changed;
};
Search find_members(eep_context& context, Lane& lane) {
  Search search{true, false};
  for (uint32_t i = 0; i < lane.size; ++i) {
    const uint32_t rank = lane.rank[i];
    uint32_t found = kUnknownLane;
    if (context.table.peers[rank].active) {
      found = find_lane(context, rank, lane.group, lane.lane_at[rank]);
      search.is_complete &= found != kUnknownLane;
    }
    search.has_changed |= found != lane.lane_at[rank];
    lane.lane_at[rank] = found;
  }
  return search;
}

// Waits, up to the deadline of the kernels, until every member has opened the group. If one has not, the kernel finds
// that out and says so.
int await_members(eep_context* context, Lane& lane, bool may_wait) {
  eep_control_page& page = *context->control;
  bool has_changed = false;
  for (uint64_t began = now_ns();;) {
    const Search search = find_members(*context, lane);
    has_changed |= search.has_changed;
    if (search.is_complete || !may_wait || load_acquire(page.revoked_epoch) >= context->table.epoch ||
        load_acquire(page.status) || load_acquire(page.suspects.words[0]) ||
        now_ns() - began >= context->table.deadline_ns)
      break;
    const timespec nap{0, kNap_ns};
    nanosleep(&nap, nullptr);
  }
  return has_changed ? show_lanes(context, static_cast<uint32_t>(&lane - context->lanes), 1) : EEP_OK;
}

// The flags that ranks on other hosts have left for the group that had this lane before. No member knows the lane yet.
void clear_landing(const eep_context& context, uint32_t number) {
  const Home& home = context.home;
  if (!home.landing) return;
  const LaneView lane(home.shape, home.at, home.landing, number);
  for (uint32_t part = 0; part < home.shape.lane_parts; ++part)
    for (uint32_t slot = 0; slot < home.at.slots; ++slot)
      std::atomic_ref<uint64_t>(lane.part(part).mailbox(slot)->flag).store(0, std::memory_order_relaxed);
}

// ---- what a caller gives us ----

int check_group(const eep_context& context, const eep_group& group) {
  const uint32_t max_ranks = context.home.shape.max_ranks;
  if (!context.home.shape.lanes)
    return fail(EEP_ERROR_ARGUMENT,
                "this region has no lanes for process groups; make it with shape.lanes of at least 1");
  if (!group.id) return fail(EEP_ERROR_ARGUMENT, "the id of a group must not be 0: 0 marks a free lane");
  if (group.size < 1 || group.size > max_ranks)
    return fail(EEP_ERROR_ARGUMENT, "a group has between 1 and %u members, got %u", max_ranks, group.size);
  uint64_t seen = 0;
  for (uint32_t i = 0; i < group.size; ++i) {
    const uint32_t rank = group.ranks[i];
    if (rank >= max_ranks)
      return fail(EEP_ERROR_ARGUMENT, "rank %u of a group is outside the capacity of %u ranks", rank, max_ranks);
    if (seen >> rank & 1) return fail(EEP_ERROR_ARGUMENT, "rank %u is in a group more than once", rank);
    seen |= uint64_t{1} << rank;
  }
  if (!(seen >> context.home.rank & 1))
    return fail(EEP_ERROR_ARGUMENT, "rank %u does not belong to the group that it opens", context.home.rank);
  return EEP_OK;
}

uint32_t bytes_of(uint32_t element) {
  static constexpr uint8_t kBytes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};
  return kBytes[element];
}

bool reduces(uint32_t kind) { return kind == EEP_ALL_REDUCE || kind == EEP_REDUCE || kind == EEP_REDUCE_SCATTER; }

int check_reduction(const eep_collective_args& args) {
  const bool is_float = args.element >= EEP_ELEMENT_F16 && args.element <= EEP_ELEMENT_F64;
  if (args.element >= EEP_ELEMENT_BYTES)
    return fail(EEP_ERROR_ARGUMENT, "elements of type %u can be moved but not reduced", args.element);
  if (args.reduction > EEP_BXOR)
    return fail(EEP_ERROR_ARGUMENT, "there is no reduction %u; see eep_reduction", args.reduction);
  if (args.reduction >= EEP_BAND && is_float)
    return fail(EEP_ERROR_ARGUMENT,
                "a bitwise reduction needs integers, got floating-point elements; convert them first");
  if (args.reduction == EEP_AVG && args.element == EEP_ELEMENT_BOOL)
    return fail(EEP_ERROR_ARGUMENT, "bool has no average; convert the tensor to a number type first");
  if (args.bytes % bytes_of(args.element))
    return fail(EEP_ERROR_ARGUMENT, "%llu bytes are not a whole number of elements of %u bytes",
                static_cast<unsigned long long>(args.bytes), bytes_of(args.element));
  return EEP_OK;
}

// Which of its pointers a kind needs on this rank.
struct Needs {
  bool in, out, in_blocks, out_blocks, sizes;
};
Needs needs_of(uint32_t kind, bool is_root) {
  switch (kind) {
    case EEP_BROADCAST:
      return {is_root, !is_root, false, false, false};
    case EEP_ALL_REDUCE:
      return {true, true, false, false, false};
    case EEP_REDUCE:
      return {true, is_root, false, false, false};
    case EEP_ALL_GATHER:
      return {true, false, false, true, false};
    case EEP_GATHER:
      return {true, false, false, is_root, false};
    case EEP_SCATTER:
      return {false, true, is_root, false, false};
    case EEP_REDUCE_SCATTER:
      return {false, true, true, false, false};
    case EEP_ALL_TO_ALL:
      return {false, false, true, true, true};
    default:
      return {};
  }
}

int check_call(const eep_context& context, const eep_collective_args& args) {
  if (args.lane >= context.home.shape.lanes || !context.lanes[args.lane].group)
    return fail(EEP_ERROR_ARGUMENT, "lane %u serves no group; open one first", args.lane);
  const Lane& lane = context.lanes[args.lane];
  if (args.kind > EEP_ALL_TO_ALL)
    return fail(EEP_ERROR_ARGUMENT, "there is no collective %u; see eep_collective_kind", args.kind);
  if (reduces(args.kind))
    if (const int error = check_reduction(args)) return error;
  const bool is_rooted =
      args.kind == EEP_BROADCAST || args.kind == EEP_REDUCE || args.kind == EEP_GATHER || args.kind == EEP_SCATTER;
  if (is_rooted && !is_in(lane, args.root))
    return fail(EEP_ERROR_ARGUMENT, "the root, rank %u, is not in the group; name a member", args.root);
  const Needs needs = needs_of(args.kind, args.root == context.home.rank);
  if (needs.sizes && (!args.in_bytes || !args.out_bytes))
    return fail(EEP_ERROR_ARGUMENT, "all_to_all: give in_bytes and out_bytes, one size per member");
  const bool is_complete = (args.in || !needs.in) && (args.out || !needs.out) && (args.in_blocks || !needs.in_blocks) &&
                           (args.out_blocks || !needs.out_blocks);
  if (!is_complete && (args.bytes || needs.sizes))
    return fail(EEP_ERROR_ARGUMENT, "collective %u: this rank gave no address for an input or output that it needs",
                args.kind);
  return EEP_OK;
}

BlockCall call_of(const eep_context& context, const eep_collective_args& args) {
  const Lane& lane = context.lanes[args.lane];
  const Needs needs = needs_of(args.kind, args.root == context.home.rank);
  BlockCall call{};
  call.call = eep_call_make(args.kind, args.element, args.reduction, args.root);
  call.bytes = args.kind == EEP_BARRIER ? 0 : args.bytes;
  call.in = args.in;
  call.out = args.out;
  call.lane = args.lane;
  call.kind = args.kind;
  call.element = args.element;
  call.reduction = args.reduction;
  call.root = args.root;
  if (needs.sizes) call.bytes = 0;
  for (uint32_t i = 0; i < lane.size; ++i) {
    if (needs.in_blocks && args.in_blocks) call.in_blocks[i] = static_cast<const uint8_t*>(args.in_blocks[i]);
    if (needs.out_blocks && args.out_blocks) call.out_blocks[i] = static_cast<uint8_t*>(args.out_blocks[i]);
    if (!needs.sizes) continue;
    call.in_bytes[i] = args.in_bytes[i];
    call.out_bytes[i] = args.out_bytes[i];
    call.bytes = std::max(call.bytes, args.in_bytes[i]);
  }
  return call;
}

}  // namespace

int find_lanes(eep_context* context) {
  if (!context->lanes) return EEP_OK;
  for (uint32_t lane = 0; lane < context->home.shape.lanes; ++lane)
    if (context->lanes[lane].group) find_members(*context, context->lanes[lane]);
  return show_lanes(context, 0, context->home.shape.lanes);
}

}  // namespace eep

int eep_lane_open(eep_context* context, const eep_group* group, uint32_t* number) {
  using namespace eep;
  if (const int error = check_group(*context, *group)) return error;
  const eep_shape& shape = context->home.shape;
  Lane* const end = context->lanes + shape.lanes;
  Lane* lane = std::find_if(context->lanes, end, [&](const Lane& open) { return open.group == group->id; });
  const bool is_new = lane == end;
  const auto is_free = [](const Lane& open) { return !open.group; };
  // Of the last rounds of a group that was closed, a proxy may have some to send.
  if (is_new)
    lane = std::find_if(context->lanes, end, [&](const Lane& open) {
      return is_free(open) && !load_acquire(context->control->groups[&open - context->lanes]);
    });
  if (lane == end) lane = std::find_if(context->lanes, end, is_free);
  if (lane == end)
    return fail(EEP_ERROR_ARGUMENT, "all %u lanes of this region serve a group; close one, or make more", shape.lanes);
  const Lane before = *lane;
  *lane = {group->id, group->size, {}, {}};
  std::copy_n(group->ranks, group->size, lane->rank);
  std::fill(std::begin(lane->lane_at), std::end(lane->lane_at), kUnknownLane);
  for (uint32_t i = 0; i < before.size && !is_new; ++i)
    if (!is_in(*lane, before.rank[i])) {
      *lane = before;
      return fail(EEP_ERROR_ARGUMENT, "a group that is opened again keeps its members, and rank %u is not among them",
                  before.rank[i]);
    }
  const auto index = static_cast<uint32_t>(lane - context->lanes);
  int error = EEP_OK;
  if (is_new) {
    // The group that had this lane before may have left flags that look like those of our first rounds.
    const CaptureUndisturbed guard;
    const eep_region_layout& at = context->home.at;
    cudaMemset2DAsync(context->home.region + at.lanes + index * at.lane_bytes + at.lane_mailboxes, at.part_bytes, 0,
                      at.slots * sizeof(eep_lane_mailbox), shape.lane_parts, context->side);
    cudaMemset2DAsync(&context->home.state->parts[index]->epoch, sizeof(PartState), 0, sizeof(uint64_t), kMaxParts,
                      context->side);
    error = check_cuda(cudaStreamSynchronize(context->side), "opening a process group");
    clear_landing(*context, index);
  }
  // Only now may the others write here. We find ourselves by our own page, as the others do.
  if (!error) std::atomic_ref<uint64_t>(context->control->groups[index]).store(group->id, std::memory_order_release);
  if (!error) {
    find_members(*context, *lane);
    error = show_lanes(context, index, 1);
  }
  if (error) {
    std::atomic_ref<uint64_t>(context->control->groups[index]).store(before.group, std::memory_order_release);
    *lane = before;
    return error;
  }
  *number = index;
  return EEP_OK;
}

int eep_lane_close(eep_context* context, uint32_t number) {
  using namespace eep;
  if (number >= context->home.shape.lanes || !context->lanes[number].group)
    return fail(EEP_ERROR_ARGUMENT, "lane %u serves no group: it was closed already, or never opened", number);
  // A proxy sends the last rounds of a group before it tells of its end, and knows by this word that it has ended.
  const uint64_t word =
      context->home.landing ? eep_group_closed(context->lanes[number].group, context->table.epoch) : 0;
  std::atomic_ref<uint64_t>(context->control->groups[number]).store(word, std::memory_order_release);
  context->lanes[number] = {};
  return show_lanes(context, number, 1);
}

int eep_collective(eep_context* context, eep_collective_args* args, void* stream) {
  using namespace eep;
  if (const int error = check_call(*context, *args)) return error;
  if (const int error = check_in_view(context->table, "a collective")) return error;
  const auto on = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (const int error = check_cuda(cudaStreamIsCapturing(on, &capture), "a collective")) return error;
  // A rank that captures may be the only one to call this for a while; it finds the members when a view is shown.
  if (const int error = await_members(context, context->lanes[args->lane], capture == cudaStreamCaptureStatusNone))
    return error;
  const BlockCall call = call_of(*context, *args);
  // Every member takes the same number of blocks. Of an all_to_all only some may know that much is to be moved.
  const uint32_t parts = context->home.shape.lane_parts;
  const uint64_t wanted = args->kind == EEP_ALL_TO_ALL ? parts : (call.bytes + kBytesPerBlock - 1) / kBytesPerBlock;
  const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, parts));
  return reduces(args->kind) ? launch_reduction(context->home, call, blocks, on)
                             : launch_move(context->home, call, blocks, on);
}

// ---- messages: their two ends are hosts ----

static int no_messages() {
  return eep::fail(EEP_ERROR_ARGUMENT, "messages go between CPUs: use a region in host memory, or an all_to_all");
}

int eep_send(eep_context*, uint32_t, uint32_t, uint64_t, const void*, uint64_t, uint64_t, uint32_t*) {
  return no_messages();
}
int eep_probe(eep_context*, uint32_t, const eep_rank_set*, uint32_t, uint64_t, eep_message*) { return no_messages(); }
int eep_recv(eep_context*, uint32_t, uint32_t, void*, uint64_t, uint64_t, uint32_t*) { return no_messages(); }
uint32_t eep_pokes(eep_context*) { return 0; }
void eep_poke(eep_context*) {}
