// The table of transports and their makers. A new transport needs its files, and a line and a row here. The error of a
// maker says why the transport cannot work here.
#pragma once

#include "disagg/transport/shared_memory.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

struct NcclApi;

using MadeTransport = Result<std::unique_ptr<KvTransport>>;

MadeTransport make_local_transport(const TransportOptions& options);
MadeTransport make_handoff_transport(const TransportOptions& options);
MadeTransport make_shm_transport(const TransportOptions& options);
MadeTransport make_tcp_transport(const TransportOptions& options);
MadeTransport make_rdma_transport(const TransportOptions& options);
MadeTransport make_nccl_transport(const TransportOptions& options);

inline constexpr TransportRow kTransports[] = {
    {"local", make_local_transport, false, false, nullptr, false, "within one process: one copy by the sender's queue"},
    {"handoff", make_handoff_transport, true, false, nullptr, false,
     "the instances of one process share one pool: no copy, block ids are handed over"},
    {"shm", make_shm_transport, false, true, shared_memory_device, true,
     "between processes of one machine: one copy into the peer's memfd"},
    {"tcp", make_tcp_transport, false, true, nullptr, false,
     "sockets that read from and write into the KV pools directly"},
    {"rdma", make_rdma_transport, false, true, nullptr, true,
     "RDMA cards: one-sided writes and reads (libibverbs, RC)"},
    {"nccl", make_nccl_transport, false, true, nullptr, false,
     "CUDA cards: grouped ncclSend and ncclRecv (libnccl.so.2, loaded when needed)"},
};

// For tests: with NCCL functions of the caller.
MadeTransport make_nccl_transport(const TransportOptions& options, const NcclApi& api);

}  // namespace xpyd::disagg
