// PostingTransport is what most transports share: the connected peers, and the transfers that have not been polled to
// their end. A transport adds how it connects to a peer, how a transfer begins, and how far it has come.
//
// A Peer must have address, regions (ranges of memory) and dead(). If dead(), its transfers fail, and it may be
// connected again. Registrations, the table of those that it opens for peers, must have open(), close() and arrived().
//
// Thread safety: its owner's thread.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "disagg/transport/registration_table.h"

namespace xpyd::disagg {

template <class Peer, class Transfer, class Registrations = RegistrationTable>
class PostingTransport : public KvTransport {
 public:
  Result<bool> connect(PeerId peer, const std::string& address) final {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->dead()) {
      if (known->second->address == address) return true;
      return invalid(std::string(transport_) + ": instance " + std::to_string(peer) +
                     " has a different address already");
    }
    auto met = connect_peer(peer, address);
    if (!met) return met.error();
    if (!met.value()) return false;
    peers_[peer] = std::move(met).value();
    return true;
  }
  void disconnect(PeerId peer) final {
    std::shared_ptr<Peer> gone;
    if (auto at = peers_.find(peer); at != peers_.end()) {
      gone = std::move(at->second);
      peers_.erase(at);
    }
    leave(peer, gone);
  }
  std::byte* remote(PeerId peer, int region) const final {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return begin_of(found->second->regions[size_t(region)]);
  }

  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) final {
    if (!peers_.contains(peer))
      return Error{ErrorCode::unavailable,
                   "registration for instance " + std::to_string(peer) + ": this instance is not connected"};
    return registrations().open(peer, op, ranges);
  }
  bool close(const RemoteKey& registration) final { return registrations().close(registration); }
  int arrived(const RemoteKey& registration) const final { return registrations().arrived(registration); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) final {
    const TransferId id = ++last_id_;
    Posted& posted = transfers_[id];
    posted.deadline_s = what.deadline_s;
    auto peer = peers_.find(what.peer);
    if (peer != peers_.end() && !peer->second->dead() && !late(what.deadline_s))
      posted.transfer = begin(id, peer->second, what, plan);
    return id;
  }
  TransferState poll(TransferId id) final {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    Posted& posted = at->second;
    const bool unwanted = posted.cancelled || late(posted.deadline_s);
    const TransferState state = posted.transfer ? progress(*posted.transfer, unwanted) : TransferState::failed;
    if (state != TransferState::in_flight) transfers_.erase(at);
    return state;
  }
  void cancel(TransferId id) final {
    if (auto at = transfers_.find(id); at != transfers_.end()) at->second.cancelled = true;
  }

 protected:
  PostingTransport(const char* transport, const TransportOptions& options) : options_(options), transport_(transport) {}

  const TransportOptions options_;
  struct Posted {
    double deadline_s = 0;  // Clock; 0: none
    std::shared_ptr<Transfer> transfer;  // null: it failed at once
    bool cancelled = false;
  };
  std::unordered_map<PeerId, std::shared_ptr<Peer>> peers_;
  std::unordered_map<TransferId, Posted> transfers_;

 private:
  // Null: not connected yet. Afterwards the peer is known, and open() accepts it.
  virtual Result<std::shared_ptr<Peer>> connect_peer(PeerId peer, const std::string& address) = 0;
  // `known` is null if the peer was not connected.
  virtual void leave(PeerId peer, const std::shared_ptr<Peer>& known) = 0;
  // Null: the owner refuses the transfer.
  virtual std::shared_ptr<Transfer> begin(TransferId id, const std::shared_ptr<Peer>& peer, const KvTransfer& what,
                                          const TransferPlan& plan) = 0;
  // `unwanted`: the transfer should end early.
  virtual TransferState progress(Transfer& transfer, bool unwanted) = 0;
  virtual Registrations& registrations() const = 0;

  static std::byte* begin_of(const MemoryRange& range) { return range.data(); }
  static std::byte* begin_of(const AddressRange& range) { return reinterpret_cast<std::byte*>(uintptr_t(range.begin)); }
  bool late(double deadline_s) const { return deadline_s > 0 && options_.clock->now() >= deadline_s; }

  const char* const transport_;
  TransferId last_id_ = 0;
};

}  // namespace xpyd::disagg
