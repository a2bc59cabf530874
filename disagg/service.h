// Service: the interface between a frontend and the cluster behind it, and the numbers that the cluster reports.
//
// Thread safety: any thread may call a Service. The structs are plain values.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/request.h"
#include "disagg/net/fields.h"
#include "disagg/request_trace.h"
#include "model/cost/step_cost.h"
#include "model/expert_load.h"

namespace xpyd::disagg {

enum class Role : uint8_t { prefill, decode, colocated };

// Why admission (--admission) refuses a request, and by which prediction. none: it accepts the request.
struct Refusal {
  enum Why : uint8_t { none, ttft, tbt, room };
  Why why = none;
  double predicted = 0, objective = 0;  // seconds; room: tokens
  explicit operator bool() const { return why != none; }
};

// An instance whose loop has not begun an iteration for this long counts as hung. An iteration takes as long as its
// step, and a very long prompt on a slow machine stays well below this.
inline constexpr double kLongestTurnSeconds = 60;

// Prefixes that an instance fetches from others and lends to them (pool/). Cumulative, except ask_s.
struct FetchStats {
  int64_t fetches = 0, tokens = 0;    // fetches that brought tokens; these tokens
  int64_t failed = 0;                 // fetches that did not arrive, those of copies too
  int64_t lent = 0, lent_tokens = 0;  // prefixes lent to other instances
  int64_t expired = 0;                // of these, given up because the reader was silent
  // Copies of prompts whose answers another decode instance computes (--decode-copies): made here; their bytes; not
  // made, because there was no room or the KV did not arrive.
  int64_t copies = 0, copy_bytes = 0, copies_dropped = 0;
  double ask_s = 0;                   // moving mean of the time from the question to a holder's answer
};

// The cost of an instance's requests. Cumulative, except peak_tflops.
struct Spent {
  // The integral of the KV held here over time, in GB s: for prompts that are computed, for sequences that decode, and
  // for KV in transfer. A block that several sequences hold counts once for each.
  double prefill_gb_s = 0, decode_gb_s = 0, transfer_gb_s = 0;
  double tflop = 0;        // 10^12 FLOPs of steps, as the model counts them
  double peak_tflops = 0;  // 10^12 FLOP/s that the instance's threads can do (base/peak/peak.h); 0: not known
};

XPYD_FIELDS(ExpertLoad, rows, rank_rows, layers, imbalance, exchanged_bytes)

// One instance, as /metrics and the demo page show it. Counters are cumulative.
struct InstanceStats {
  std::string name;  // "P0", "D0", "C0"
  int running = 0, waiting = 0;
  int queue_remote_prefilling = 0, queue_prefill_sending = 0;  // prompts that wait for KV; that send KV (handover/)
  KvStats kv;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  int64_t draft_tokens = 0, accepted_tokens = 0;         // as in EngineStats
  double step_seconds = 0, schedule_seconds = 0;         // in forward and sampling; in the rest of a step
  double wait_seconds = 0;                               // waiting for the model
  int64_t transfers = 0;                                 // of KV, started here: pushed, pulled or fetched
  int64_t transfer_bytes = 0, transfer_descriptors = 0;  // of these transfers
  double transfer_seconds = 0;                           // in which the instance's thread planned and started them
  double wire_s_per_byte = 0;                            // from post() to done, over the last transfers; 0: not known
  int64_t kv_refused = 0;  // arrived KV that was short or changed, so that the prompt was computed again
  FetchStats fetch;
  ExpertLoad experts;
  Spent spent;
  double heartbeat_s = 0;      // Clock seconds of the last iteration of its loop
  StepCost::Terms cost = {};   // cost of a step (model/cost/step_cost.h), fitted to the steps
  PredictionError cost_error;  // of these predictions, each made before its step
};

// Why an attempt to serve a request's choices failed.
// The conductor. Cumulative.
struct ConductorStats {
  int64_t attempts = 0, failed_attempts = 0, replaced_choices = 0;
  int64_t left = 0;                             // instances
  int64_t refused_early = 0, refused_late = 0;  // requests, on arrival; after their prompt was computed
  double wasted_prefill_s = 0;                  // predicted prefill time of those refused late
  PredictionError ttft_error, tbt_error;        // of predictions at placement; TBT: the mean of a choice's gaps
  int64_t ended = 0, kept = 0;  // choices that ended by stop or length; of these, within both objectives
  uint64_t logits_hash = 0;     // the sum of the logits hashes of those that ended so; their order does not matter
};

struct ServiceStats {
  ConductorStats conductor;
  std::vector<InstanceStats> instances;
  bool shared_pool = false;  // all instances take blocks from one pool: their `kv` blocks are the same blocks
};

// The data of the server's status page, beside ServiceStats.
struct ServicePicture {
  double t = 0;                      // Clock: now
  std::vector<RequestTrace> traces;  // some running requests (ended = 0) and the last that have ended; without gaps
};

class Service {
 public:
  virtual ~Service() = default;
  // Takes a request. Errors: `unavailable` (no instance is there, or the service drains),
  // `invalid_argument` (the request can never fit). After ok, `sink` sees each choice of the request end exactly once.
  virtual Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) = 0;
  // Ends the request at the next iteration boundary. Its choices end with `abort`. Unknown ids are ignored.
  virtual void abort(uint64_t request_id) = 0;
  virtual ServiceStats stats() const = 0;
  virtual ServicePicture picture() const { return {}; }
  // Returns why requests cannot be served now, or "". It names a missing role, or an instance that hangs
  // (kLongestTurnSeconds).
  virtual std::string trouble() const = 0;
};

// A Service with its instances, which are threads (cluster.h) or processes (process_cluster.h).
class Runtime : public Service {
 public:
  // With several conductors, waits until this one is elected to serve. Error `cancelled`: drain() was called.
  virtual Status stand_by() { return ok(); }
  virtual Status start() = 0;
  virtual void drain() = 0;                    // refuses new requests from now on
  virtual bool wait_idle(double seconds) = 0;  // waits; true: no request is left
  virtual void stop() = 0;                     // ends the requests that are left with `abort`
  virtual void clear_prefix_caches() = 0;
  // Gives an instance nothing new. When it is empty it ends, or joins again in another role. Errors: not_found;
  // invalid_argument if instances cannot leave (threads).
  virtual Status retire(const std::string& name, std::optional<Role> role) {
    (void)name, (void)role;
    return invalid("instances are threads of one process; to add or remove them, the server needs --processes");
  }
};

}  // namespace xpyd::disagg
