// handoff: zero copies (DESIGN D8). Prefill and decode draw from one pool; a sequence changes hands
// as the ids of its blocks (paged) or of its slot (contiguous), inside the KvDelivered message.

#include "base/status.h"
#include "disagg/transport/transport.h"

namespace xpyd {
namespace {

class HandoffTransport final : public KvTransport {
 public:
  bool zero_copy() const override { return true; }
  TransferId post(const TransferPlan&) override {
    XPYD_CHECK(false, "a zero-copy transport has nothing to post");
    return 0;
  }
  TransferState poll(TransferId) override { return TransferState::failed; }
};

}  // namespace

std::unique_ptr<KvTransport> make_handoff_transport(DeviceQueue&) {
  return std::make_unique<HandoffTransport>();
}

}  // namespace xpyd
