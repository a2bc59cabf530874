// What makes each wire: the rows of the table in transport.cc. `Error` says why it cannot work
// here.
#pragma once

#include "disagg/transport/transport.h"

namespace xpyd {

struct NcclApi;
namespace rdma {
enum class Keys;
}

using MadeTransport = Result<std::unique_ptr<KvTransport>>;

MadeTransport make_local_transport(const TransportOptions& options);
MadeTransport make_handoff_transport(const TransportOptions& options);
MadeTransport make_shm_transport(const TransportOptions& options);
MadeTransport make_nccl_transport(const TransportOptions& options);
MadeTransport make_rdma_transport(const TransportOptions& options);
MadeTransport make_tcp_transport(const TransportOptions& options);

// For tests: over NCCL functions of the caller's; with a choice of keys.
MadeTransport make_nccl_transport(const TransportOptions& options, const NcclApi& api);
MadeTransport make_rdma_transport(const TransportOptions& options, rdma::Keys keys);

}  // namespace xpyd
