// rdma: one-sided verbs (libibverbs, reliable connections) between instances of any process or host.
// The parts: rdma_verbs (devices), rdma_link (queue pairs), rdma_messages and rdma_channel (what the
// sides tell each other over TCP), rdma_serving (windows and keys), rdma_posting (transfers).
#pragma once

#include "disagg/transport/rdma_verbs.h"
#include "disagg/transport/transport.h"

namespace xpyd {

// Error: no device, no permission, not enough locked memory, no such port, and so on.
Result<std::unique_ptr<KvTransport>> make_rdma_transport(const TransportOptions& options);
// The same with a choice of keys, for tests.
Result<std::unique_ptr<KvTransport>> make_rdma_transport(const TransportOptions& options,
                                                         rdma::Keys keys);

}  // namespace xpyd
