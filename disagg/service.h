// What a frontend needs from the cluster behind it. Any thread may call any of these.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/request.h"

namespace xpyd {

// One instance, as /metrics and the demo page show it. Counters are cumulative.
struct InstanceStats {
  std::string name;  // "P0", "D0", "C0"
  int running = 0, waiting = 0;
  int queue_remote_prefilling = 0, queue_prefill_sending = 0;  // P/D queues (disagg/README.md)
  KvStats kv;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  double step_seconds = 0, schedule_seconds = 0;  // in forward + sampling; in planning
  double wait_seconds = 0;                        // of step_seconds: waiting for the model
  int64_t transfer_bytes = 0, transfer_descriptors = 0, transfers = 0;  // sent by this instance
  double transfer_seconds = 0;
  int64_t kv_refused = 0;      // received: short or changed, so that the prompt was computed again
  int64_t leases_expired = 0;  // promises to a peer that fell silent
  double heartbeat_s = 0;  // Clock seconds of the last loop turn
};

struct ServiceStats {
  std::vector<InstanceStats> instances;
  bool shared_pool = false;  // all instances draw from one pool: their `kv` blocks are the same blocks
};

class Service {
 public:
  virtual ~Service() = default;
  // Takes a request or refuses it: `unavailable` (queue full, draining), `invalid_argument` (can never fit).
  // Once taken, `sink` sees each of its choices end exactly once.
  virtual Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) = 0;
  // Ends the request at the next iteration boundary; its choices end with `abort`. Unknown ids are ignored.
  virtual void abort(uint64_t request_id) = 0;
  virtual ServiceStats stats() const = 0;
  virtual bool healthy() const = 0;  // every engine thread turned its loop recently
};

// A Service with its instances, whether they are threads (cluster.h) or processes (process_cluster.h).
class Runtime : public Service {
 public:
  virtual Status start() = 0;
  virtual void drain() = 0;                    // refuses new requests from now on
  virtual bool wait_idle(double seconds) = 0;  // true: nothing in flight any more
  virtual void stop() = 0;                     // ends what is left with `abort`
  // Order-independent sum over the choices that ended by stop or length of their logits hash
  // (DESIGN D1).
  virtual uint64_t logits_hash() const = 0;
  virtual void clear_prefix_caches() = 0;
};

}  // namespace xpyd
