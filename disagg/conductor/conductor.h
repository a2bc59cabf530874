// The conductor: which instances there are, where each request is served, and what becomes of it when one of them
// fails. It sees messages alone; threads, processes and the network are its callers'.
//
// A request's choices are served by attempts. An attempt that fails (an instance is gone, or has given it up) is placed
// anew, from the prompt and the tokens that the client has; tokens of attempts that were given up are dropped, so the
// client's stream goes on without a token twice or missing.
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "disagg/conductor/admission.h"
#include "disagg/conductor/order.h"
#include "disagg/conductor/placement.h"
#include "disagg/conductor/ranges.h"
#include "disagg/conductor/scoreboard.h"
#include "disagg/conductor/token_times.h"
#include "disagg/life.h"
#include "disagg/messages.h"
#include "disagg/pool/replication.h"
#include "disagg/service.h"
#include "model/cost/cost_model.h"

namespace xpyd::disagg {

class EventLog;

// What instances cost that have not been measured yet.
struct CostPrior {
  CostModel model;
  Rates rates;  // the machine's peaks
};

inline StepCost first_cost(const std::optional<CostPrior>& prior) {
  return prior ? StepCost(prior->model, prior->rates) : StepCost();
}

struct ConductorOptions {
  const PlacementPolicy* placement = nullptr;
  PlacementOptions placement_options;
  const DisaggPolicy* disagg = find_disagg_policy("prefill_first");
  DisaggOptions disagg_options;
  const AdmissionPolicy* admission = find_admission_policy("none");
  AdmissionOptions admission_options;
  Objectives objectives = {};             // of requests that have none; 0: none
  bool zero_copy = false;                 // the wire: nothing can be pulled
  int max_model_len = 0;                  // tokens: prompt and output together
  int64_t max_queue_bytes = 256ll << 20;  // queue_bytes() of requests that wait for their first step
  Limits limits = {};                     // of what comes from another process
  int prefill_window = 1;                 // decode_first: jobs that a prefill instance has not started yet
  int max_tries = 16;                     // attempts of one choice
  // Instances that may end in a row while they compute a choice, none of which got further than
  // crash_tokens with it; then it is what ends them. (Each attempt brings one or two: the prompt's
  // last logits give the first, maybe before another instance goes on.)
  int max_crashes = 2, crash_tokens = 4;
  double patience_s = 30;  // that a request waits for an instance to be there
  double lease_s = 0;      // an instance that is silent for so long is gone; 0: never
  uint64_t seed = 0;
  int step_tokens = 512;  // of one step
  StreamKv stream_kv = StreamKv::layer;
  bool escrow = false;  // InstanceOptions
  const FetchPolicy* fetch = find_fetch_policy("never");
  const ReplicationPolicy* replication = find_replication_policy("side_effect");
  double kv_bytes_scale = 1;     // of KV in the event log (a simulation's is small)
  double fetch_s_per_token = 0;  // of a prefix from another instance, until it is measured; 0: nobody fetches
  std::optional<CostPrior> prior = {};
  std::function<double(const Request&)> answer_tokens = {};  // that it will have; empty: nobody knows
  std::shared_ptr<EventLog> log = {};                        // null: none
};

// What a request holds here while it waits: its prompt, and some for all the rest.
int64_t queue_bytes(const Request& request);

class Conductor final : public Service {
 public:
  Conductor(ConductorOptions options, Clock& clock, Post& post);
  ~Conductor() override;

  InstanceId new_id();
  void joined(InstanceInfo info, std::shared_ptr<InstanceProbe> probe);
  // `refused`: it is there, and not listened to any more.
  void left(InstanceId id, const std::string& why, AttemptFailure reason = AttemptFailure::instance_gone);
  void drain(InstanceId id, bool on);  // it gets nothing new
  void receive(InstanceId from, Message message);
  void tick();  // every so often: who is silent, who has waited too long

  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override;
  void abort(uint64_t request_id) override;
  ServiceStats stats() const override;
  ServicePicture picture() const override;
  std::string trouble() const override;

  void drain();                    // refuses new requests from now on
  bool wait_idle(double seconds);  // true: nothing in flight any more
  bool idle(InstanceId id) const;  // nothing is placed there
  void end_all(const std::string& why);

  // Order-independent sum over the choices that ended by stop or length of their logits hash.
  uint64_t logits_hash() const;
  PlacedLoad load(InstanceId id) const;
  size_t known_blocks(InstanceId id) const;  // in its prefix cache, by its reports
  ConductorStats totals() const;
  std::vector<InstanceInfo> members() const;
  void set_shared_pool(bool shared) { shared_pool_ = shared; }

 private:
  struct Attempt {
    uint64_t request = 0;
    int first = 0, count = 1;  // choices
    int left = 1;              // of them, not ended
    DisaggOrder order = DisaggOrder::local;
    InstanceId prefill = -1, decode = -1;
    PlacedPrompt prompt;     // charged to `prefill`
    int64_t context = 0;     // tokens charged to `decode`
    double prompt_s = 0;     // that its prompt was said to take
    InstanceId lender = -1;  // charged for its prefix:
    double lends_s = 0;
    double joins_s = 0;                      // Clock: it decodes, or was said to begin to
    bool queued = false, prompting = false;  // charged: queued_requests, queued_tokens
    bool asked = false;                      // decode_first: its PrefillJob has come
  };
  struct Choice {
    std::vector<int32_t> output;
    uint64_t logits_hash = 0;
    bool ended = false;
    AttemptId attempt = 0;            // 0: parked
    InstanceId latest = -1;           // where its last token came from
    std::map<int, TokenEvent> early;  // by index: what overtook others
    int cached_tokens = -1;
    double scheduled_s = 0;
    int crashes = 0;    // instances that ended in a row while they computed it
    size_t placed = 0;  // output's length when its attempt began
    TokenTimes times;
    double ttft_s = 0, tbt_s = 0;  // predicted when it was placed first
  };
  struct Entry {
    std::shared_ptr<const Request> request;
    std::shared_ptr<EventSink> sink;
    std::vector<Choice> choices;
    int left = 0;
    int tries = 0;
    bool aborted = false;
    bool begun = false;   // else it counts in queued_bytes_
    bool guilty = false;  // it ends the instances that compute it
    RequestLife life;     // as far as life_of() does not know it
  };
  struct Parked {
    uint64_t request;
    int first, count;
    double since_s;
    double not_before_s;  // what fails again and again waits longer and longer
  };
  // Events to be passed on once the lock is free.
  struct Event {
    std::shared_ptr<EventSink> sink;
    TokenEvent event;
  };
  using Out = std::vector<Event>;

  void on(InstanceId from, TokenOf message, Out& out);
  void on(InstanceId from, AttemptProgress message, Out& out);
  void on(InstanceId from, AttemptFailed message, Out& out);
  void on(InstanceId from, PrefillJob message, Out& out);
  void on(InstanceId from, Report message, Out& out);
  void on(InstanceId from, CacheReport message, Out& out);
  template <class M>
  void on(InstanceId, M, Out&) {}  // between instances

  Status take_in(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink, Out& out);
  void take(Entry& entry, Choice& choice, TokenEvent event, Out& out);
  void end_choice(Entry& entry, int choice, FinishReason reason, const std::string& error, Out& out,
                  double retry_s = 0);
  bool mark(Entry& entry, double RequestLife::*when);
  static RequestLife life_of(const Entry& entry);
  void give_up(Entry& entry, int choice, bool late, const std::string& why, Out& out);
  void forget_choice(uint64_t request, Entry& entry);
  void add_costs(DisaggView& view, const InstanceStats& prefill, const InstanceStats& decode,
                 const KvShape& shape) const;
  bool start(uint64_t id, int first, int count, Out& out);
  ClusterAdmission admission(const Entry& entry, InstanceId decode, double ttft_s);
  void foresee(const Member& member);
  Objectives objectives(const Request& request) const;
  void refuse(Entry& entry, const Refusal& refusal, int64_t& counted, Out& out);
  bool refused_late(AttemptId number, Out& out);
  void fail(AttemptId attempt, AttemptFailure reason, const std::string& why, Out& out);
  void remove(InstanceId id, AttemptFailure reason, const std::string& why, Out& out);
  bool handed_over(const Attempt& attempt) const;
  bool computes(InstanceId id, const Attempt& attempt) const;
  void blame(InstanceId id, const std::vector<AttemptId>& attempts);
  bool suspect(uint64_t request, int choice) const;
  bool suspect_runs() const;
  void uncharge_prompt(Attempt& attempt);
  void begin(Entry& entry);
  void forget(AttemptId attempt);
  void call_off(AttemptId number, const Attempt& attempt);
  void retry_parked(Out& out);
  void dispatch_jobs();
  Member* find(InstanceId id);
  void charge(Attempt& attempt, Member& member);
  void uncharge_lender(Attempt& attempt);
  void emit(Entry& entry, TokenEvent event, Out& out);
  void pass_on(Out& out);
  // f(out) under the lock.
  template <class F>
  void act(F f) {
    Out out;
    {
      std::lock_guard lock(mutex_);
      f(out);
    }
    pass_on(out);
  }

  const ConductorOptions options_;
  Clock& clock_;
  Post& post_;
  bool shared_pool_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable idle_;
  bool draining_ = false;
  Random random_;
  std::map<InstanceId, Member> members_;
  Scoreboard board_;
  std::optional<PrefixHeat> heat_;             // where --replication asks for it
  StepCost decode_cost_;                       // admission()'s
  std::vector<DecodeView> decoding_, coming_;  // …
  double ticked_s_ = 0;                        // Clock: the last tick; 0: none yet
  InstanceId last_id_ = -1;
  AttemptId last_attempt_ = 0;
  std::unordered_map<uint64_t, Entry> requests_;
  std::unordered_map<AttemptId, Attempt> attempts_;
  std::deque<RequestLife> ended_;  // the last, without gaps; newest first
  std::vector<Parked> parked_;
  std::deque<PrefillJob> jobs_;  // the global prefill queue
  int64_t queued_bytes_ = 0;
  int64_t passing_ = 0;  // events on their way to their sinks
  uint64_t logits_hash_ = 0;
  ConductorStats totals_;
};

}  // namespace xpyd::disagg
