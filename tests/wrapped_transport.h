// A wire around another one, for tests that change a thing or two about it.
#pragma once

#include "disagg/transport/transport.h"

namespace xpyd::testing {

class WrappedTransport : public KvTransport {
 public:
  WrappedTransport(const char* wire, const TransportOptions& options)
      : inner_(find_transport(wire)->make(options).value()) {}
  bool zero_copy() const override { return inner_->zero_copy(); }
  std::string address() const override { return inner_->address(); }
  Status connect(PeerId peer, const std::string& address) override {
    return inner_->connect(peer, address);
  }
  void disconnect(PeerId peer) override { inner_->disconnect(peer); }
  std::byte* remote(PeerId peer, int region) const override { return inner_->remote(peer, region); }
  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return inner_->open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return inner_->close(window); }
  int arrived(const WindowKey& window) const override { return inner_->arrived(window); }
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    return inner_->post(transfer, plan);
  }
  TransferState poll(TransferId id) override { return inner_->poll(id); }
  void cancel(TransferId id) override { inner_->cancel(id); }
  TransportStats stats() const override { return inner_->stats(); }

 private:
  std::unique_ptr<KvTransport> inner_;
};

}  // namespace xpyd::testing
