// local: the peers are transports of the same process and keep their KV on one device; the poster's
// queue copies, behind the work that fills the source. On the CPU nothing is in flight after
// post(); on a GPU the copies overlap with what the poster computes next only as far as its queue
// allows (they are in order).
//
// A copy that is enqueued cannot be called back: cancel(), a deadline and disconnect() let what is
// in the queue run out, and a window stays closing until its poster has polled or is destroyed.

#include <unistd.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "disagg/transport/window_table.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

// What the others of this process may see of a transport. Outlives it as long as one of them looks.
struct Node {
  Node(const TransportOptions& options) : windows(options.regions), regions(options.regions) {}
  WindowTable windows;
  const std::vector<MemoryRange> regions;
  std::string address;
};

class Registry {
 public:
  void add(const std::shared_ptr<Node>& node) {
    std::lock_guard lock(mutex_);
    node->address = "local:" + std::to_string(getpid()) + ":" + std::to_string(++last_);
    nodes_[node->address] = node;
  }
  void remove(const Node& node) {
    std::lock_guard lock(mutex_);
    nodes_.erase(node.address);
  }
  std::shared_ptr<Node> find(const std::string& address) {
    std::lock_guard lock(mutex_);
    auto found = nodes_.find(address);
    return found == nodes_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Node>> nodes_;
  int64_t last_ = 0;
};

Registry& registry() {
  static Registry all;
  return all;
}

class LocalTransport final : public KvTransport {
 public:
  explicit LocalTransport(const TransportOptions& options) : options_(options), node_(std::make_shared<Node>(options)) {
    registry().add(node_);
  }
  ~LocalTransport() override {
    registry().remove(*node_);
    node_->windows.shut();
    if (!in_flight_.empty()) options_.queue->wait();
    for (auto& [id, transfer] : in_flight_) transfer.peer->windows.leave(transfer.what.window, false);
  }

  std::string address() const override { return node_->address; }

  Result<bool> connect(PeerId peer, const std::string& address) override {
    auto node = registry().find(address);
    if (!node) return Error{ErrorCode::unavailable, "local: no instance of this process has the address " + address};
    auto [at, added] = peers_.try_emplace(peer, node);
    if (!added && at->second != node)
      return invalid("local: instance " + std::to_string(peer) + " has another address already");
    node_->windows.connect(peer);
    return true;
  }
  void disconnect(PeerId peer) override {
    peers_.erase(peer);
    node_->windows.disconnect(peer);
  }
  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return found->second->regions[size_t(region)].data();
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return node_->windows.open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return node_->windows.close(window); }
  int arrived(const WindowKey& window) const override { return node_->windows.arrived(window); }

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    auto peer = peers_.find(transfer.peer);
    const bool late = transfer.deadline_s > 0 && options_.clock->now() >= transfer.deadline_s;
    if (late || peer == peers_.end() ||
        !peer->second->windows.enter(transfer.window, options_.self, transfer.op, plan.copies)) {
      settle(id, TransferState::failed);
      return id;
    }
    options_.queue->copy(plan.copies, false);
    auto [at, added] = in_flight_.emplace(
        id, InFlight{peer->second, transfer, options_.queue->mark(), int64_t(plan.bytes), int64_t(plan.copies.size())});
    progress(at);
    return id;
  }

  TransferState poll(TransferId id) override {
    if (auto at = in_flight_.find(id); at != in_flight_.end() && !progress(at)) return TransferState::in_flight;
    auto settled = settled_.find(id);
    XPYD_CHECK(settled != settled_.end(), "poll of a transfer that is not known");
    const TransferState state = settled->second;
    settled_.erase(settled);
    return state;
  }

  void cancel(TransferId id) override {
    if (auto at = in_flight_.find(id); at != in_flight_.end()) at->second.cancelled = true;
  }

  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = node_->windows.refused();
    return stats;
  }

 private:
  struct InFlight {
    std::shared_ptr<Node> peer;
    KvTransfer what;
    int64_t mark;
    int64_t bytes, descriptors;
    bool cancelled = false;
  };

  // True: the queue has got past it, and it is settled.
  bool progress(std::unordered_map<TransferId, InFlight>::iterator at) {
    InFlight& transfer = at->second;
    const KvTransfer& what = transfer.what;
    if (what.deadline_s > 0 && options_.clock->now() >= what.deadline_s) transfer.cancelled = true;
    if (!options_.queue->reached(transfer.mark)) return false;
    const bool wanted = !transfer.cancelled && peers_.count(what.peer) > 0;
    const bool arrived = transfer.peer->windows.leave(what.window, wanted, what.number) && wanted;
    if (arrived) stats_.bytes += transfer.bytes, stats_.descriptors += transfer.descriptors;
    settle(at->first, arrived ? TransferState::done : TransferState::failed);
    in_flight_.erase(at);
    return true;
  }
  void settle(TransferId id, TransferState state) {
    if (state == TransferState::failed) ++stats_.failed;
    settled_[id] = state;
  }

  const TransportOptions options_;
  std::shared_ptr<Node> node_;
  std::unordered_map<PeerId, std::shared_ptr<Node>> peers_;
  std::unordered_map<TransferId, InFlight> in_flight_;
  std::unordered_map<TransferId, TransferState> settled_;  // not polled yet
  TransferId last_id_ = 0;
  TransportStats stats_;
};

}  // namespace

MadeTransport make_local_transport(const TransportOptions& options) {
  XPYD_CHECK(options.queue && options.clock);
  return std::unique_ptr<KvTransport>(std::make_unique<LocalTransport>(options));
}

}  // namespace xpyd
