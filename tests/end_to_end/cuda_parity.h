#pragma once

namespace xpyd::testing {

// Every `stride`-th combination of memory, batching, topology, wire, graphs and planning ahead on
// CUDA has the first one's hash, and the CPU's tokens.
void check_cuda_parity(int stride);

}  // namespace xpyd::testing
