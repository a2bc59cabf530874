// The transport suite (transport_test.cc) over NCCL itself, on a card. Two processes share the card by distinct
// NCCL_HOSTID values, so NCCL takes them for two machines and uses sockets. Memory is pinned host memory, which NCCL's
// kernels and the suite both reach. The interpreter has no NCCL.
#include "base/device/device_cuda.h"
#include "disagg/transport/nccl/nccl_api.h"
#include "disagg/transport/transports.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing {
namespace {

struct OnCard {
  std::unique_ptr<Device> device = make_cuda_device();
  std::unique_ptr<DeviceQueue> queue = device->make_queue();
};
OnCard& on_card() {
  static auto* card = new OnCard;  // never destroyed, because the driver goes before statics
  return *card;
}

std::string missing() {
  static const std::string why = []() -> std::string {
    const Result<cuda::Card> card = cuda::open();
    if (!card) return "NCCL itself: " + card.error().message;
    if (card.value().name == "SIMT interpreter") return "NCCL itself needs a card";
    const auto api = load_nccl();
    return api ? "" : api.error().message;
  }();
  return why;
}

const RegisterTransport nccl_row({.name = "nccl on a card",
                                   .make =
                                       [](const TransportOptions& options) {
                                         TransportOptions ours = options;
                                         ours.queue = on_card().queue.get();
                                         return make_nccl_transport(ours);
                                       },
                                   .memory =
                                       [](size_t bytes) { return on_card().device->allocate_host(bytes).value(); },
                                   .shares_process = false,
                                   .environment = "NCCL_HOSTID",
                                   .missing = missing});

}  // namespace
}  // namespace xpyd::testing
