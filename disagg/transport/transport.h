// KvTransport: how KV bytes cross from one instance to another. Specification of every wire.
//
// Thread safety: one transport object belongs to one sending instance and its thread.
//
// post() starts the copies of a plan. From post until poll says done or failed, the source rows are
// final and stay where they are, and the destination rows belong to this transfer alone: nobody
// reads, writes or frees them. Transfers may finish in any order. A failed transfer may have
// written part of its destination. poll() must not block. An id is forgotten once poll has said
// done or failed.
//
// A zero-copy transport (`handoff`) moves no bytes: the two instances share one pool, and block ids
// pass in the delivery message itself. post() is then never called.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/device.h"
#include "disagg/transfer_plan.h"

namespace xpyd {

using TransferId = int64_t;
enum class TransferState { in_flight, done, failed };

class KvTransport {
 public:
  virtual ~KvTransport() = default;
  virtual bool zero_copy() const { return false; }
  virtual TransferId post(const TransferPlan& plan) = 0;
  virtual TransferState poll(TransferId id) = 0;
};

struct TransportRow {
  const char* name;
  std::unique_ptr<KvTransport> (*make)(DeviceQueue& sender);  // the sending instance's queue
  bool shared_pool;  // the instances must draw from one pool
  const char* source;
};

std::span<const TransportRow> transports();
const TransportRow* find_transport(std::string_view name);  // null: no such wire

std::unique_ptr<KvTransport> make_local_transport(DeviceQueue& sender);
std::unique_ptr<KvTransport> make_handoff_transport(DeviceQueue& sender);

}  // namespace xpyd
