// NCCL's point-to-point calls without a card: bytes go over a socket between two ranks, in one process or in two, on
// streams that are threads. As strict as NCCL is careless: what the library answers with a hang or with wrong bytes
// (sizes that do not match in order, a call on a communicator that is aborted, not ready or still enqueueing, calls
// outside of a group) aborts the program here. An operation whose peer does not come, or has died, waits until it is
// aborted; a communicator is not ready, and a group not enqueued, before it has been asked for its state.
#pragma once

#include <memory>

#include "disagg/transport/nccl/nccl_api.h"
#include "disagg/transport/transport.h"

namespace xpyd::testing {

const NcclApi& fake_nccl();
// A DeviceQueue whose work is done by a thread of its own, over memory of the host.
std::unique_ptr<DeviceQueue> make_fake_stream();

// The nccl wire over these, with the queue in place of options.queue.
Result<std::unique_ptr<KvTransport>> make_fake_nccl_transport(const TransportOptions& options);

// From now on communicators of this process break while they are being made, or no more.
void fail_fake_joins(bool fail);
// Every communicator of this process that stands breaks, as when a network fails.
void break_fake_comms();
int fake_comms_made();  // by this process, so far
int fake_reclaims();    // of aborted communicators that threads are still at

}  // namespace xpyd::testing
