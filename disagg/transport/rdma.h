// rdma: one-sided verbs (libibverbs, reliable connections) between instances of any process or
// host. The parts: rdma_verbs (devices), rdma_link (queue pairs), rdma_messages and side_channel
// (what the sides tell each other over TCP), rdma_plan (ranges, requests, batches: arithmetic that
// needs no device), rdma_serving (windows; _keys: how keys are made and revoked), rdma_posting
// (transfers; _lines: what goes out, comes back, breaks and is renewed).
#pragma once

#include "disagg/transport/rdma_verbs.h"
#include "disagg/transport/wires.h"

namespace xpyd {

// make_rdma_transport (wires.h) with a choice of keys, for tests. Error: no device, no permission,
// not enough locked memory, no such port, and so on.
MadeTransport make_rdma_transport(const TransportOptions& options, rdma::Keys keys);

}  // namespace xpyd
