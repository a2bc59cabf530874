// The rdma wire: the suite (transport_test.cc) over it where there is a device, and everywhere what
// comes from outside as bytes.

#include "disagg/transport/rdma.h"
#include "disagg/transport/rdma_messages.h"
#include "tests/catch.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing {
namespace {

std::shared_ptr<std::byte> plain_memory(size_t bytes) {
  return cpu_device().allocate(bytes).value();
}

std::string missing() {
  auto memory = plain_memory(1 << 20);
  RealClock clock;
  TransportOptions options;
  options.regions.push_back({memory.get(), 1 << 20});
  options.clock = &clock;
  auto made = make_rdma_transport(options, rdma::Keys::automatic);
  return made ? "" : made.error().message;
}

const RegisterWire rdma_wire({.name = "rdma",
                              .make = [](const TransportOptions& options) {
                                return make_rdma_transport(options, rdma::Keys::automatic);
                              },
                              .memory = plain_memory,
                              .needs_owner = false,
                              .missing = missing});
}  // namespace
}  // namespace xpyd::testing
