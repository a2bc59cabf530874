// What makes each wire: the rows of the table in transport.cc. `Error` says why it cannot work
// here.
#pragma once

#include "disagg/transport/transport.h"

namespace xpyd {

using MadeTransport = Result<std::unique_ptr<KvTransport>>;

MadeTransport make_local_transport(const TransportOptions& options);
MadeTransport make_handoff_transport(const TransportOptions& options);
MadeTransport make_shm_transport(const TransportOptions& options);
MadeTransport make_nccl_transport(const TransportOptions& options);
MadeTransport make_rdma_transport(const TransportOptions& options);
MadeTransport make_tcp_transport(const TransportOptions& options);

}  // namespace xpyd
