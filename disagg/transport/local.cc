// local: both instances are threads of one process and keep their KV on one device; the sender's
// queue copies, behind the work that fills the source. On the CPU nothing is in flight after
// post(); on a GPU the copies overlap with what the sender computes next only as far as its queue
// allows (they are in order).

#include "disagg/transport/transport.h"

namespace xpyd {
namespace {

class LocalTransport final : public KvTransport {
 public:
  explicit LocalTransport(DeviceQueue& queue) : queue_(queue) {}
  TransferId post(const TransferPlan& plan) override {
    queue_.copy(plan.copies, false);
    return queue_.mark();
  }
  TransferState poll(TransferId id) override {
    return queue_.reached(id) ? TransferState::done : TransferState::in_flight;
  }

 private:
  DeviceQueue& queue_;
};

}  // namespace

std::unique_ptr<KvTransport> make_local_transport(DeviceQueue& sender) {
  return std::make_unique<LocalTransport>(sender);
}

}  // namespace xpyd
