// ForwardingTransport passes every call to another transport. A transport that changes only a few calls derives from it.
#pragma once

#include <memory>

#include "disagg/transport/transport.h"

namespace xpyd::disagg {

class ForwardingTransport : public KvTransport {
 public:
  explicit ForwardingTransport(std::unique_ptr<KvTransport> inner) : inner_(std::move(inner)) {}
  bool zero_copy() const override { return inner_->zero_copy(); }
  std::string address() const override { return inner_->address(); }
  Result<bool> connect(PeerId peer, const std::string& address) override { return inner_->connect(peer, address); }
  void disconnect(PeerId peer) override { inner_->disconnect(peer); }
  std::byte* remote(PeerId peer, int region) const override { return inner_->remote(peer, region); }
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return inner_->open(peer, op, ranges);
  }
  bool close(const RemoteKey& registration) override { return inner_->close(registration); }
  int arrived(const RemoteKey& registration) const override { return inner_->arrived(registration); }
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    return inner_->post(transfer, plan);
  }
  TransferState poll(TransferId id) override { return inner_->poll(id); }
  void cancel(TransferId id) override { inner_->cancel(id); }

 protected:
  KvTransport& inner() const { return *inner_; }

 private:
  std::unique_ptr<KvTransport> inner_;
};

}  // namespace xpyd::disagg
