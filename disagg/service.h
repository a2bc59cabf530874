// What a frontend needs from the cluster behind it. Any thread may call any of these.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/kv_memory.h"
#include "batch/request.h"
#include "disagg/block_map.h"
#include "disagg/request_trace.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

enum class Role : uint8_t { prefill, decode, colocated };

// Why admission (--admission) refuses a request, and with which prediction; none: it does not.
struct Refusal {
  enum Why : uint8_t { none, ttft, tbt, room, load };
  Why why = none;
  double predicted = 0, objective = 0;  // seconds; of room: tokens; of load: a probability
  double retry_s = 0;                   // when it may be otherwise
  explicit operator bool() const { return why != none; }
};

inline constexpr int kRefusals = int(Refusal::load) + 1;

// A turn of an instance's loop is as long as its step; a very long prompt on a slow machine stays well below this.
inline constexpr double kLongestTurnSeconds = 60;

// Prefixes that instances get from each other (pool/). Cumulative, but for ask_s.
struct FetchStats {
  int64_t fetches = 0, tokens = 0;    // here: that brought something, and what
  int64_t failed = 0;                 // parts that did not come, or came changed
  int64_t lent = 0, lent_tokens = 0;  // from here
  int64_t expired = 0;                // … whose reader fell silent
  double seconds = 0;                 // of all fetches, from asking to the end
  double wait_s = 0;                  // that steps stood still for a layer of theirs
  double regret_s = 0;                // that they took beyond what they were worth
  double ask_s = 0;                   // from asking a holder to its answer: a moving mean
};

// What an instance's requests have cost. Cumulative, but for peak_tflops.
struct Spent {
  // The integral of the KV held here over time, in GB s: by prompts that are computed, by sequences that decode, and
  // for KV that comes or goes. A block that several hold counts for each.
  double prefill_gb_s = 0, decode_gb_s = 0, transfer_gb_s = 0;
  double tflop = 0;        // 10^12 FLOPs of steps, as the model counts them
  double peak_tflops = 0;  // 10^12 FLOP/s that its threads can do (base/peak/peak.h); 0: not known
};

// One instance, as /metrics and the demo page show it. Counters are cumulative.
struct InstanceStats {
  std::string name;  // "P0", "D0", "C0"
  int running = 0, waiting = 0;
  int queue_remote_prefilling = 0, queue_prefill_sending = 0;  // P/D queues (disagg/handover)
  KvStats kv;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, preemptions = 0;
  int64_t draft_tokens = 0, accepted_tokens = 0;          // as EngineStats
  int64_t chunk_decisions = 0, chunk_extrapolations = 0;  // …
  double step_seconds = 0, schedule_seconds = 0;          // in forward + sampling; in planning
  double wait_seconds = 0;                                // of step_seconds: waiting for the model
  int64_t transfers = 0;                                  // of prompts' KV, posted here: by P, or pulled by D
  int64_t transfer_bytes = 0, transfer_descriptors = 0;   // of them
  double transfer_seconds = 0;                            // of its thread: planning and posting
  double wire_s_per_byte = 0;                             // from post to done, over its last posts; 0: not known
  int64_t kv_refused = 0;      // received: short or changed, so that the prompt was computed again
  int64_t leases_expired = 0;  // promises to a peer that fell silent
  FetchStats fetch;
  Spent spent;
  double heartbeat_s = 0;      // Clock seconds of the last loop turn
  StepCost::Terms cost = {};   // of its steps (model/cost/step_cost.h), fitted to them
  PredictionError cost_error;  // of these, before each was seen
};

// Why a try at serving a request's choices failed.
enum class AttemptFailure : uint8_t {
  instance_gone,    // its connection to the conductor ended
  instance_silent,  // the conductor heard nothing of it for a lease
  peer_silent,      // one instance heard nothing of the other, or of the attempt, for a lease
  peer_unknown,     // one is not (or not any more) connected to the other
  connection_lost,  // between the two
  given_up,         // by the other one, which no longer has it
  refused,          // what one said or wanted the other could not take
};
inline constexpr int kAttemptFailures = int(AttemptFailure::refused) + 1;
const char* failure_name(AttemptFailure why);

// Of the conductor; cumulative.
struct ConductorStats {
  int64_t attempts = 0, failed_attempts = 0, replaced_choices = 0;
  std::array<int64_t, kAttemptFailures> failed_by = {};  // of failed_attempts
  int64_t late_tokens = 0;                               // of attempts that were given up
  int64_t joined = 0, left = 0;
  int prefill_jobs = 0;                            // now in the global prefill queue
  int64_t refused_early = 0, refused_late = 0;     // requests, on arrival and when their prompt was done
  std::array<int64_t, kRefusals> refused_by = {};  // of both: Refusal::Why
  double wasted_prefill_s = 0;                     // predicted, of those refused late
  double regret = 0;                               // sum of regret_ratio() of all attempts
  PredictionError ttft_error, tbt_error;  // of what was predicted at placement; TBT: the mean of a choice's gaps
  int64_t ended = 0, kept = 0;            // choices that ended by stop or length; of them, within both objectives
};

// One pool that processes share, counted where it was made.
struct SharedPoolStats {
  int blocks = 0, free = 0;
  int64_t bytes = 0, block_bytes = 0;
};

struct ServiceStats {
  ConductorStats conductor;
  std::vector<InstanceStats> instances;
  bool shared_pool = false;  // all instances draw from one pool: their `kv` blocks are the same blocks
  // All instances are processes on one pool: `kv` is what each holds, and `kv.free` the pool's.
  std::optional<SharedPoolStats> process_pool;
};

// What the server's page draws beside these.
struct ServicePicture {
  double t = 0;                                                 // Clock: now
  std::map<std::string, std::shared_ptr<const BlockMap>> maps;  // by instance; where it can be asked, and has answered
  std::vector<RequestTrace> traces;  // some that are not over (ended 0), and the last that are; without gaps
};

class Service {
 public:
  virtual ~Service() = default;
  // Takes a request or refuses it: `unavailable` (queue full, draining), `invalid_argument` (can
  // never fit). Once taken, `sink` sees each of its choices end exactly once.
  virtual Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) = 0;
  // Ends the request at the next iteration boundary; its choices end with `abort`. Unknown ids are ignored.
  virtual void abort(uint64_t request_id) = 0;
  virtual ServiceStats stats() const = 0;
  virtual ServicePicture picture() const { return {}; }
  // Why requests would not be served now; "": they are. Every role that is needed is there, and
  // every engine thread turned its loop recently.
  virtual std::string trouble() const = 0;
};

// A Service with its instances, whether they are threads (cluster.h) or processes (process_cluster.h).
class Runtime : public Service {
 public:
  // Where several of them stand beside each other, one serves: waits until it is this one. Error `cancelled`: drained.
  virtual Status stand_by() { return ok(); }
  virtual Status start() = 0;
  virtual void drain() = 0;                    // refuses new requests from now on
  virtual bool wait_idle(double seconds) = 0;  // true: nothing in flight any more
  virtual void stop() = 0;                     // ends what is left with `abort`
  // Order-independent sum over the choices that ended by stop or length of their logits hash.
  virtual uint64_t logits_hash() const = 0;
  virtual void clear_prefix_caches() = 0;
  // An instance gets nothing new; when it is empty it ends, or comes back as another role. Errors:
  // not_found; invalid_argument: its instances do not come and go.
  virtual Status retire(const std::string& name, std::optional<Role> role) {
    (void)name, (void)role;
    return invalid("instances are threads of one process: they come and go with --processes");
  }
};

}  // namespace xpyd::disagg
