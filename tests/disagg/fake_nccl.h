// NCCL's point-to-point calls without a card. Bytes go over a socket between two ranks, in one process or in two, on
// streams that are threads. NCCL answers some mistakes with a hang or with wrong bytes, and this library aborts the
// program instead: sizes that do not match in order, calls outside a group, and calls on a communicator that is
// aborted, not ready or still enqueueing. An operation whose peer does not come or has died waits until it is aborted.
// A communicator becomes ready, and a group is enqueued, only after its state has been asked for.
#pragma once

#include <memory>

#include "disagg/transport/transport.h"

namespace xpyd::testing {

// The nccl transport over these calls, with such a stream in place of options.queue.
Result<std::unique_ptr<KvTransport>> make_fake_nccl_transport(const TransportOptions& options);

// From now on every communicator of this process breaks while it is made, or none does.
void fail_fake_joins(bool fail);
// Breaks every communicator of this process, as a failing network does.
void break_fake_comms();
int fake_comms_made();  // by this process so far
int fake_reclaims();    // of aborted communicators that threads still work on

}  // namespace xpyd::testing
