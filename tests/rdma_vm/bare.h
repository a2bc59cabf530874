// The least that a small write can cost on a device: libibverbs alone, without the transport.
#pragma once

#include <string>

namespace xpyd::testing {

// Prints half of a round of two writes of 8 bytes, median and least in us. With `notice` a write has immediate data and
// is seen as a completion of a shared receive queue, as in the rdma transport. Otherwise it is seen in memory, as by
// ib_write_lat. Each of two processes calls this; `socket` leads to the other.
void bare_latency(const std::string& device, int socket, bool poster, bool notice);

}  // namespace xpyd::testing
