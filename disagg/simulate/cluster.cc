#include "disagg/simulate/cluster.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "allocator/kv_plan.h"
#include "base/random.h"
#include "disagg/simulate/links.h"
#include "disagg/simulate/node.h"
#include "disagg/transport/forwarding.h"

namespace xpyd::disagg {
namespace {

class Simulator final : public Post {
 public:
  Simulator(const SimulationOptions& options, const Trace& trace);
  Status build();
  Simulation run();

 private:
  class Wire;
  // A request's client.
  class Client final : public EventSink {
   public:
    Client(Simulator& cluster, size_t request) : cluster_(cluster), request_(request) {}
    void on_event(TokenEvent event) override { cluster_.heard(request_, event); }
    void on_run(const TokenEvent&, std::span<const int32_t>, std::span<const double> times_s) override {
      for (double time_s : times_s) cluster_.run_.records[request_].times.token(time_s);
    }

   private:
    Simulator& cluster_;
    const size_t request_;
  };

  Status add(Role role, const std::string& name);
  void send(InstanceId from, InstanceId to, Message message) override;
  void arrives(size_t at);
  void heard(size_t at, const TokenEvent& event);
  double now(InstanceId id) const {
    return id >= 0 && nodes_[size_t(id)]->in_turn() ? nodes_[size_t(id)]->time().clock.seconds : timeline_.now();
  }

  const SimulationOptions options_;
  const Trace& trace_;
  Timeline timeline_;
  Links links_;
  std::unique_ptr<Conductor> conductor_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::vector<int>> next_;  // closed loop: who waits for a request's end
  const double layer_share_, bytes_scale_;
  Simulation run_;
};

// The local wire, whose posts arrive when the links have carried them. Layer by layer, the first layer's KV leaves when
// the step has computed it, and the last one's when the step ends.
class Simulator::Wire final : public ForwardingTransport {
 public:
  Wire(const TransportOptions& options, Simulator& cluster)
      : ForwardingTransport(find_transport("local")->make(options).value()), self_(options.self), cluster_(cluster) {}

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const bool writes = transfer.op == KvOp::write;
    const InstanceId from = writes ? self_ : transfer.peer, to = writes ? transfer.peer : self_;
    const double bytes = double(plan.bytes) * cluster_.bytes_scale_, ends_s = cluster_.now(self_);
    const double began_s = std::max(cluster_.timeline_.now(), cluster_.nodes_[size_t(self_)]->time().began_s);
    const double start_s = began_s + (ends_s - began_s) * cluster_.layer_share_;
    const double last_s = ends_s + bytes * cluster_.layer_share_ / cluster_.options_.hardware.link_bytes_per_s;
    const TransferId id = ++last_;
    flights_[id] = TransferState::in_flight;
    cluster_.timeline_.at(start_s, [this, id, from, to, bytes, last_s, transfer, plan] {
      cluster_.links_.send(from, to, bytes, cluster_.options_.hardware.link_s, [this, id, last_s, transfer, plan] {
        cluster_.timeline_.at(last_s, [this, id, transfer, plan] {
          auto flight = flights_.find(id);
          if (flight == flights_.end() || flight->second != TransferState::in_flight) return;
          flight->second = inner().poll(inner().post(transfer, plan));
          cluster_.nodes_[size_t(self_)]->wake();
          cluster_.nodes_[size_t(transfer.peer)]->wake();
        });
      });
    });
    return id;
  }
  TransferState poll(TransferId id) override {
    const TransferState state = flights_.at(id);
    if (state != TransferState::in_flight) flights_.erase(id);
    return state;
  }
  void cancel(TransferId id) override { flights_.at(id) = TransferState::failed; }

 private:
  const InstanceId self_;
  Simulator& cluster_;
  std::unordered_map<TransferId, TransferState> flights_;
  TransferId last_ = 0;
};

Simulator::Simulator(const SimulationOptions& options, const Trace& trace)
    : options_(options),
      trace_(trace),
      links_(timeline_),
      next_(trace.requests.size()),
      layer_share_(options.conductor.stream_kv == StreamKv::layer ? 1.0 / options.model.n_layers : 1),
      bytes_scale_(options.model.kv_token_bytes() / double(small_kv().token_bytes())) {
  conductor_ = std::make_unique<Conductor>(options.conductor, timeline_.clock, *this);
}

Status Simulator::build() {
  const Result<std::vector<Role>> roles = parse_topology(options_.topology, 4096);
  if (!roles) return roles.error();
  int counts[3] = {0, 0, 0};
  for (Role role : roles.value())
    if (Status added = add(role, instance_name(role, counts[int(role)]++)); !added) return added;
  for (const auto& node : nodes_)
    conductor_->joined(node->instance().info(), std::make_shared<NodeProbe>(*node, timeline_));
  return ok();
}

Status Simulator::add(Role role, const std::string& name) {
  const InstanceId id = conductor_->new_id();
  const StepCost cost = step_cost(options_.model, options_.hardware);
  Node& node = *nodes_.emplace_back(std::make_unique<Node>(timeline_, cost, options_.message_s, options_.each_step));
  const double tokens = options_.kv_tokens > 0 ? options_.kv_tokens : kv_tokens(options_.model, options_.hardware);
  if (tokens < options_.block_tokens)
    return invalid("--model " + options_.model.name + " leaves no memory for KV on --hardware " +
                   options_.hardware.name);
  KvOptions kv{.shape = small_kv(), .block_tokens = options_.block_tokens};
  kv.pool_bytes = size_t(tokens) * small_kv().token_bytes();
  kv.max_sequence_tokens = options_.conductor.max_model_len;
  kv.vattention.max_sequences = max_sequences(options_.engine.max_batch);
  kv.queue = &node.queue();
  auto log = std::make_shared<PrefixLog>();
  auto memory = make_ranked_memory(options_.scheme, kv, {.n_layers = 1, .n_kv_heads = 1}, log);
  if (!memory) return memory.error();
  links_.set_rate(id, options_.hardware.link_bytes_per_s);
  const TransportOptions wire{.regions = {{memory.value()->base(), memory.value()->layout().pool_bytes()}},
                              .queue = &node.queue(),
                              .clock = &node.time().clock,
                              .self = id};
  InstanceOptions instance{.id = id, .name = name, .role = role, .cost = cost, .cost_known = true};
  instance.cache_log = log;
  instance.report_every_s = 0;
  instance.log = options_.conductor.log;
  instance.stream_kv = options_.conductor.stream_kv == StreamKv::request ? StreamKv::request : StreamKv::chunk;
  instance.engine = options_.engine;
  node.start(std::make_unique<Instance>(std::move(instance), node.make_model(), std::move(memory).value(),
                                        std::make_unique<Wire>(wire, *this), node.time().clock, *this));
  return ok();
}

void Simulator::send(InstanceId from, InstanceId to, Message message) {
  timeline_.at(now(from) + options_.message_s,
               [this, from, to, letter = std::make_shared<Message>(std::move(message))] {
                 if (to != kConductor) {
                   nodes_[size_t(to)]->instance().send(from, std::move(*letter));
                   return nodes_[size_t(to)]->wake();
                 }
                 if (auto* run = std::get_if<TokensOf>(letter.get()))
                   for (double& time_s : run->times_s) time_s += options_.message_s;
                 conductor_->receive(from, std::move(*letter));
               });
}

void Simulator::arrives(size_t at) {
  const TraceRequest& asked = trace_.requests[at];
  auto request = std::make_shared<Request>();
  request->id = at;
  request->prompt.reserve(size_t(asked.prompt_tokens));
  for (uint64_t block : asked.blocks) {
    const auto first = int32_t(Random(block).next() >> 34);
    const int n = std::min(trace_.block_tokens, asked.prompt_tokens - int(request->prompt.size()));
    for (int t = 0; t < n; ++t) request->prompt.push_back(first + t);
  }
  request->sampling.temperature = 0;
  request->max_tokens = std::max(1, options_.output_tokens >= 0 ? options_.output_tokens : asked.output_tokens);
  request->ignore_eos = true;
  request->arrival_s = timeline_.now();
  SimulatedRecord& record = run_.records[at];
  record.arrival_s = request->arrival_s;
  record.prompt = asked.prompt_tokens;
  Status taken = conductor_->submit(std::move(request), std::make_shared<Client>(*this, at));
  if (!taken) heard(at, {.finish = FinishReason::error, .error = taken.error().message});
}

void Simulator::heard(size_t at, const TokenEvent& event) {
  SimulatedRecord& record = run_.records[at];
  record.last_s = timeline_.now();
  if (event.token >= 0) {
    record.times.token(record.last_s);
    record.cached = event.cached_tokens;
  }
  if (event.finish == FinishReason::none) return;
  record.end = event.finish == FinishReason::length    ? SimulatedEnd::completed
               : event.finish == FinishReason::refused ? SimulatedEnd::refused
                                                       : SimulatedEnd::failed;
  record.why = event.error;
  for (int next : next_[at])
    timeline_.at(timeline_.now() + trace_.requests[size_t(next)].think_s, [this, next] { arrives(size_t(next)); });
}

Simulation Simulator::run() {
  run_.records.resize(trace_.requests.size());
  for (size_t i = 0; i < trace_.requests.size(); ++i) {
    const TraceRequest& request = trace_.requests[i];
    if (trace_.closed_loop && request.after >= 0)
      next_[size_t(request.after)].push_back(int(i));
    else
      timeline_.at(request.arrival_s, [this, i] { arrives(i); });
  }
  run_.events = timeline_.run();
  run_.end_s = timeline_.now();
  for (const auto& node : nodes_) {
    const InstanceStats stats = node->instance().stats();
    run_.steps += stats.steps, run_.preemptions += stats.preemptions;
    (node->instance().options().role == Role::decode ? run_.decode_busy_s : run_.prefill_busy_s) += stats.step_seconds;
    run_.cost_error.n += stats.cost_error.n;
    run_.cost_error.absolute += stats.cost_error.absolute;
    run_.cost_error.signed_sum += stats.cost_error.signed_sum;
  }
  run_.kv_gb = links_.bytes() * 1e-9;
  run_.conductor = conductor_->totals();
  return std::move(run_);
}

}  // namespace

Result<Simulation> simulate(const SimulationOptions& options, const Trace& trace) {
  Simulator simulator(options, trace);
  if (Status built = simulator.build(); !built) return built.error();
  return simulator.run();
}

}  // namespace xpyd::disagg
