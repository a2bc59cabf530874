// The least that a small write can cost on a device: libibverbs alone, no wire.
#pragma once

#include <string>

namespace xpyd::testing {

// Half of a round of two writes of 8 bytes, median and least in us, on stdout. notice: with
// immediate data, seen as a completion of a shared receive queue, as the rdma wire does it; else
// seen in memory, as ib_write_lat does it. One of two processes; `socket` leads to the other.
void bare_latency(const std::string& device, int socket, bool poster, bool notice);

}  // namespace xpyd::testing
