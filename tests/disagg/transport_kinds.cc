// The transports that the suite (transport_test.cc) runs over on any machine. Those of rdma are in rdma_test.cc, and
// NCCL itself is in nccl_cuda_test.cu.

#include "disagg/transport/shared_memory.h"
#include "disagg/transport/transports.h"
#include "tests/disagg/fake_nccl.h"
#include "tests/disagg/transport_side.h"

namespace xpyd::testing {
namespace {

std::shared_ptr<std::byte> plain_memory(size_t bytes) { return cpu_device().allocate(bytes).value(); }

const RegisterTransport local_row({.name = "local",
                                   .make = make_local_transport,
                                   .memory = plain_memory,
                                   .leaves_process = false,
                                   .needs_owner = false});

const RegisterTransport shm_row({.name = "shm",
                                 .make = make_shm_transport,
                                 .memory = [](size_t bytes) { return shared_pool_memory(bytes).value(); },
                                 .needs_owner = false,
                                 .asks_ranges = false});

const RegisterTransport tcp_row({.name = "tcp", .make = make_tcp_transport, .memory = plain_memory});

// All of nccl except NCCL itself.
const RegisterTransport nccl_row({.name = "nccl", .make = make_fake_nccl_transport, .memory = plain_memory});

}  // namespace
}  // namespace xpyd::testing
