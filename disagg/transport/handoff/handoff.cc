// handoff: zero copy (CONTRIBUTING.md, decision D8). P and D draw from one pool. KvDelivered carries a sequence's
// block ids (paged) or slot (contiguous) to D.

#include "disagg/transport/transports.h"

namespace xpyd::disagg {
namespace {

class HandoffTransport final : public KvTransport {
 public:
  bool zero_copy() const override { return true; }
  Result<bool> connect(PeerId, const std::string&) override { return true; }
  void disconnect(PeerId) override {}
  std::byte* remote(PeerId, int) const override { return nullptr; }
  Result<RemoteKey> open(PeerId, KvOp, std::span<const MemoryRange>) override {
    return invalid("handoff: a zero-copy transport has no memory to register");
  }
  bool close(const RemoteKey&) override { return true; }
  int arrived(const RemoteKey&) const override { return 0; }
  TransferId post(const KvTransfer&, const TransferPlan&) override {
    XPYD_CHECK(false, "a zero-copy transport has nothing to post");
    return 0;
  }
  TransferState poll(TransferId) override { return TransferState::failed; }
  void cancel(TransferId) override {}
};

}  // namespace

MadeTransport make_handoff_transport(const TransportOptions&) {
  return std::unique_ptr<KvTransport>(std::make_unique<HandoffTransport>());
}

}  // namespace xpyd::disagg
