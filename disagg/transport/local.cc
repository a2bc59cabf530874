// local: the peers are transports of the same process and keep their KV on one device. The initiator's queue copies,
// after the work that fills the source. On the CPU nothing is in flight after post(). On a GPU the copies overlap with
// the next computation only as far as the queue allows, because it runs in order.
//
// A copy that is enqueued cannot be called back. After cancel(), a deadline or disconnect() the queue finishes its
// copies, and a registration stays closing until its initiator has polled or is destroyed.

#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "disagg/transport/posting_transport.h"
#include "disagg/transport/transports.h"

namespace xpyd::disagg {
namespace {

// The part of a transport that others of this process may use. It lives as long as one of them holds it.
struct Node {
  Node(const TransportOptions& options) : registrations(options.regions), regions(options.regions) {}
  RegistrationTable registrations;
  const std::vector<MemoryRange> regions;
  std::string address;
  std::atomic<bool> ended{false};
  bool dead() const { return ended; }
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

struct InFlight {
  std::shared_ptr<Node> peer;
  KvTransfer what;
  int64_t mark;
  TransferState state = TransferState::in_flight;
  bool wanted = true;
};

class LocalTransport final : public PostingTransport<Node, InFlight> {
 public:
  explicit LocalTransport(const TransportOptions& options)
      : PostingTransport("local", options), node_(std::make_shared<Node>(options)) {
    registry().add(node_);
  }
  ~LocalTransport() override {
    registry().remove(*node_);
    node_->ended = true;
    node_->registrations.shut();
    for (auto& [id, posted] : transfers_) {
      if (!posted.transfer || posted.transfer->state != TransferState::in_flight) continue;
      options_.queue->wait();
      posted.transfer->peer->registrations.leave(posted.transfer->what.registration, false);
    }
  }

  std::string address() const override { return node_->address; }

 private:
  Result<std::shared_ptr<Node>> connect_peer(PeerId peer, const std::string& address) override {
    auto node = registry().find(address);
    if (!node) return Error{ErrorCode::unavailable, "local: this process has no instance with the address " + address};
    node_->registrations.connect(peer);
    return node;
  }
  void leave(PeerId peer, const std::shared_ptr<Node>&) override { node_->registrations.disconnect(peer); }
  std::shared_ptr<InFlight> begin(TransferId, const std::shared_ptr<Node>& peer, const KvTransfer& what,
                                  const TransferPlan& plan) override {
    if (!peer->registrations.enter(what.registration, options_.self, what.op, plan.copies)) return nullptr;
    options_.queue->copy(plan.copies, false);
    auto transfer = std::make_shared<InFlight>(InFlight{peer, what, options_.queue->mark()});
    progress(*transfer, false);
    return transfer;
  }
  TransferState progress(InFlight& t, bool unwanted) override {
    t.wanted &= !unwanted;
    if (t.state != TransferState::in_flight || !options_.queue->reached(t.mark)) return t.state;
    const bool wanted = t.wanted && peers_.count(t.what.peer) > 0;
    const bool arrived = t.peer->registrations.leave(t.what.registration, wanted) && wanted;
    return t.state = arrived ? TransferState::done : TransferState::failed;
  }
  RegistrationTable& registrations() const override { return node_->registrations; }

  const std::shared_ptr<Node> node_;
};

}  // namespace

MadeTransport make_local_transport(const TransportOptions& options) {
  XPYD_CHECK(options.queue && options.clock);
  return std::unique_ptr<KvTransport>(std::make_unique<LocalTransport>(options));
}

}  // namespace xpyd::disagg
