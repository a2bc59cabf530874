// shm: the peers are processes of one machine and one user. A pool is a memfd that the peer maps;
// posting is copying, with non-temporal stores, straight into the other's pool (or out of it).
//
// Who copies: a post of up to kInline bytes the poster itself, in post(), because waking a thread
// costs more; larger ones a thread of the wire, while the poster computes the next layer. A piece
// of a large one is kPiece bytes; before each the window is asked again (shm_table.h).
//
// Until a peer has ended, what it is inside of stays in quarantine, disconnect() or not
// (shared_memory.h).

#include <unordered_map>

#include "disagg/transport/shm_owner.h"
#include "disagg/transport/shm_poster.h"
#include "disagg/transport/wires.h"

namespace xpyd::shm {
namespace {

class ShmTransport final : public KvTransport {
 public:
  ShmTransport(const TransportOptions& options, std::unique_ptr<Owner> owner)
      : options_(options), calls_("shm", options_), owner_(std::move(owner)) {}

  std::string address() const override { return owner_->address(); }
  Result<bool> connect(PeerId peer, const std::string& address) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->gone()) {
      if (known->second->address == address) return true;
      return invalid("shm: instance " + std::to_string(peer) + " has another address already");
    }
    auto met = calls_.ask(peer, address,
                          [&](const auto& answer) { return shm::call(owner_->meeting(), address, answer); });
    if (!met) return met.error();
    if (!met.value()) return false;
    auto remote = map_remote(std::move(*met.value()), address, options_.self);
    if (!remote) return remote.error();
    peers_[peer] = remote.value();
    owner_->connect(peer);
    return true;
  }
  void disconnect(PeerId peer) override {
    calls_.give_up(peer);
    if (auto at = peers_.find(peer); at != peers_.end()) {
      *at->second->ended = true;
      peers_.erase(at);
    }
    owner_->disconnect(peer);
  }
  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return found->second->regions[size_t(region)].data();
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return owner_->open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return owner_->close(window); }
  int arrived(const WindowKey& window) const override { return owner_->arrived(window); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    auto t = std::make_shared<Transfer>();
    transfers_[id] = t;
    t->what = what;
    t->state = Transfer::failed;
    auto peer = peers_.find(what.peer);
    if (peer == peers_.end() || late(*t)) return id;
    t->peer = peer->second;
    t->bytes = plan.bytes;
    t->descriptors = int64_t(plan.copies.size());
    if (plan.bytes <= shm::kInline) {
      t->state = shm::run(*t, plan.copies, 0) ? Transfer::done : Transfer::failed;
      return id;
    }
    t->copies = plan.copies;
    t->state = Transfer::queued;
    copier_.add(t);
    return id;
  }

  TransferState poll(TransferId id) override {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    Transfer& t = *at->second;
    Transfer::State state = t.state.load(std::memory_order_acquire);
    if (state == Transfer::queued || state == Transfer::running) {
      if (late(t) || t.peer->gone()) t.cancelled = true;
      // Not begun: it ends here. Begun: the copier sees it before the next piece.
      auto expected = Transfer::queued;
      if (!t.cancelled || !t.state.compare_exchange_strong(expected, Transfer::failed)) return TransferState::in_flight;
      state = Transfer::failed;
    }
    const bool done = state == Transfer::done;
    if (done) stats_.bytes += int64_t(t.bytes), stats_.descriptors += t.descriptors;
    stats_.failed += !done;
    transfers_.erase(at);
    return done ? TransferState::done : TransferState::failed;
  }

  void cancel(TransferId id) override {
    if (auto at = transfers_.find(id); at != transfers_.end()) at->second->cancelled = true;
  }
  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = owner_->refused() + owner_->meeting().refused();
    return stats;
  }

 private:
  bool late(const Transfer& t) const { return t.what.deadline_s > 0 && options_.clock->now() >= t.what.deadline_s; }
  const TransportOptions options_;
  Calls<Met> calls_;
  std::unordered_map<PeerId, std::shared_ptr<Remote>> peers_;
  std::unordered_map<TransferId, std::shared_ptr<Transfer>> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::unique_ptr<Owner> owner_;
  shm::Copier copier_;  // last: its thread ends first
};

}  // namespace
}  // namespace xpyd::shm

namespace xpyd {

MadeTransport make_shm_transport(const TransportOptions& options) {
  auto owner = shm::Owner::make(options);
  if (!owner.ok()) return owner.error();
  return std::unique_ptr<KvTransport>(std::make_unique<shm::ShmTransport>(options, std::move(owner).value()));
}

}  // namespace xpyd
