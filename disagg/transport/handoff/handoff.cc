// handoff: zero copies (README, Decisions: D8). Prefill and decode draw from one pool; a sequence changes hands as the
// ids of its blocks (paged) or of its slot (contiguous), inside the KvDelivered message.

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
    return invalid("handoff: a zero-copy transport has no windows");
  }
  bool close(const RemoteKey&) override { return true; }
  int arrived(const RemoteKey&) const override { return 0; }
  TransferId post(const KvTransfer&, const TransferPlan&) override {
    XPYD_CHECK(false, "a zero-copy transport has nothing to post");
    return 0;
  }
  TransferState poll(TransferId) override { return TransferState::failed; }
  void cancel(TransferId) override {}
  TransportStats stats() const override { return {}; }
};

}  // namespace

MadeTransport make_handoff_transport(const TransportOptions&) {
  return std::unique_ptr<KvTransport>(std::make_unique<HandoffTransport>());
}

}  // namespace xpyd::disagg
