#include "experiments/simulate/cluster.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <unordered_map>

#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "base/random.h"
#include "experiments/forwarding.h"
#include "experiments/simulate/links.h"
#include "experiments/simulate/node.h"

namespace xpyd::disagg {
namespace {

class Simulator final : public MessageBus {
 public:
  Simulator(const SimulationOptions& options, const Trace& trace);
  Status build();
  Simulation run();

 private:
  class SimulatedTransport;
  class LinkProbe;
  // The client of one request.
  class Client final : public EventSink {
   public:
    Client(Simulator& cluster, size_t request) : cluster_(cluster), request_(request) {}
    void on_event(TokenEvent event) override { cluster_.heard(request_, event); }

   private:
    Simulator& cluster_;
    const size_t request_;
  };

  struct Breath {
    InstanceId from;
    double at_s;
    uint64_t number;  // of its event on the timeline
    std::vector<Message> letters;
  };

  Status add(Role role, const std::string& name);
  void joins(const Node& node);
  void send(InstanceId from, InstanceId to, Message message) override;
  void deliver(InstanceId from, InstanceId to, Message message);
  void fetch(InstanceId to, StartRequest start);
  void arrives(size_t at);
  void goes_on(size_t at, std::vector<int32_t>& prompt);
  void heard(size_t at, const TokenEvent& event);
  double now(InstanceId id) const {
    return id >= 0 && nodes_[size_t(id)]->in_turn() ? nodes_[size_t(id)]->time().clock.seconds : timeline_.now();
  }

  const SimulationOptions options_;
  const Trace& trace_;
  Timeline timeline_;
  Links links_;
  std::unique_ptr<Routers> routers_;
  std::deque<std::atomic<uint64_t>> versions_;  // of the nodes, together: a view of the cluster reads all
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::vector<int>> next_;  // closed loop: by request, those that wait for its end
  struct Said {
    size_t request;
    std::vector<int32_t> tokens;  // prompt and answer
  };
  std::unordered_map<int, Said> said_;  // by session: its last request
  std::unordered_map<AttemptId, uint64_t> request_of_;
  const int n_layers_;  // of the shape that the engines see
  const double layer_share_, bytes_scale_;
  std::shared_ptr<Breath> breath_;  // the last one added
  size_t ended_ = 0;                // number of requests
  Simulation run_;
};

// The local transport, with transfers that arrive when the links have carried them. With streaming by layer, the first
// layer's KV leaves when the step has computed it, and the last layer's when the step ends. A simulated instance reads
// messages only between steps; a live one reads them between layers, too. So if D's answer came during a step, the
// transfer right after that step counts the bytes that a live instance would already have sent.
class Simulator::SimulatedTransport final : public ForwardingTransport {
 public:
  SimulatedTransport(const TransportOptions& options, int stages, Simulator& cluster)
      : ForwardingTransport(find_transport("local")->make(options).value()),
        self_(options.self),
        stages_(stages),
        cluster_(cluster) {}

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const bool writes = transfer.op == KvOp::write;
    const InstanceId from = writes ? self_ : transfer.peer, to = writes ? transfer.peer : self_;
    const double bytes = double(plan.bytes) * cluster_.bytes_scale_, ends_s = cluster_.now(self_);
    const double share = std::min(1.0, cluster_.layer_share_ * stages_),
                 rate = cluster_.options_.hardware.link_bytes_per_s;
    const NodeTime& time = cluster_.nodes_[size_t(self_)]->time();
    const bool late = writes && ends_s == time.last_ended_s;
    const double began_s = late ? std::max(time.last_began_s, time.heard_s)
                                : std::max(cluster_.timeline_.now(), time.began_s);
    double start_s = began_s + (ends_s - began_s) * share, gone = 0;
    if (late) {
      const double open = cluster_.links_.rate(from, to);
      start_s = std::clamp(start_s, gone_until_s_, std::max(gone_until_s_, ends_s));
      gone = std::min(bytes * (1 - share), open * std::max(0.0, ends_s - start_s));
      gone_until_s_ = start_s + gone / open;
    }
    const double last_s = ends_s + bytes * share / rate;
    cluster_.run_.kv_gb += bytes * 1e-9;
    const TransferId id = ++last_;
    flights_[id] = {};
    const auto posted = std::make_shared<const std::pair<KvTransfer, TransferPlan>>(transfer, plan);
    cluster_.timeline_.at(start_s, [this, id, from, to, left = bytes - gone, last_s, posted] {
      auto begun = flights_.find(id);
      if (begun == flights_.end() || begun->second.state != TransferState::in_flight) return;
      begun->second.link = cluster_.links_.send(
          from, to, left, cluster_.options_.hardware.link_s, [this, id, last_s, posted] {
            cluster_.timeline_.at(last_s, [this, id, posted] {
              auto flight = flights_.find(id);
              if (flight == flights_.end() || flight->second.state != TransferState::in_flight) return;
              flight->second.state = inner().poll(inner().post(posted->first, posted->second));
              cluster_.nodes_[size_t(self_)]->wake();
              Node& peer = *cluster_.nodes_[size_t(posted->first.peer)];
              if (peer.instance().counts_posts()) peer.wake();
            });
          });
    });
    return id;
  }
  TransferState poll(TransferId id) override {
    const TransferState state = flights_.at(id).state;
    if (state != TransferState::in_flight) flights_.erase(id);
    return state;
  }
  void cancel(TransferId id) override {
    flights_.at(id).state = TransferState::failed;
    cluster_.links_.cancel(flights_.at(id).link);
  }

 private:
  struct Flight {
    TransferState state = TransferState::in_flight;
    Links::Id link = 0;  // 0: the transfer has not begun
  };
  const InstanceId self_;
  const int stages_;  // a transfer belongs to one stage
  Simulator& cluster_;
  std::unordered_map<TransferId, Flight> flights_;
  TransferId last_ = 0;
  double gone_until_s_ = 0;  // until when late transfers occupy the outgoing link
};

// The conductor's view of a simulated instance, the same as of a live one. The prefix cache is known by its reports
// alone.
class Simulator::LinkProbe final : public InstanceProbe {
 public:
  LinkProbe(const Node& node, const Simulator& cluster, InstanceId id) : node_(node), cluster_(cluster), id_(id) {}
  InstanceStats stats() const override { return node_.instance().stats(); }
  std::optional<int> matched_tokens(std::span<const int32_t>, uint64_t) const override { return {}; }
  const std::atomic<uint64_t>* version() const override { return &node_.version(); }
  std::optional<double> fetch_s_per_token(InstanceId source) const override {
    return cluster_.options_.model.kv_token_bytes() / cluster_.links_.rate(source, id_);
  }

 private:
  const Node& node_;
  const Simulator& cluster_;
  const InstanceId id_;
};

Simulator::Simulator(const SimulationOptions& options, const Trace& trace)
    : options_(options),
      trace_(trace),
      links_(timeline_),
      next_(trace.requests.size()),
      n_layers_(std::lcm(options.prefill_pp, options.decode_pp)),
      layer_share_(options.conductor.stream_kv == StreamKv::layer ? 1.0 / options.model.n_layers : 1),
      bytes_scale_(options.model.kv_token_bytes() / double(small_kv(n_layers_).token_bytes())) {
  ConductorOptions conductor = options.conductor;
  conductor.kv_bytes_scale = bytes_scale_;
  if (options.fetch) conductor.fetch_s_per_token = options.model.kv_token_bytes() / options.hardware.link_bytes_per_s;
  routers_ = std::make_unique<Routers>(options.routers, conductor, timeline_, *this);
}

Status Simulator::build() {
  const Result<std::vector<Role>> roles = parse_topology(options_.topology, 4096);
  if (!roles) return roles.error();
  for (const auto& [option, pp] :
       {std::pair{"--prefill-pp ", options_.prefill_pp}, {"--decode-pp ", options_.decode_pp}})
    if (options_.model.n_layers % pp != 0)
      return invalid(option + std::to_string(pp) + " does not divide the " + std::to_string(options_.model.n_layers) +
                     " layers of --model " + options_.model.name);
  int counts[3] = {0, 0, 0};
  for (Role role : roles.value())
    if (Status added = add(role, instance_name(role, counts[int(role)]++)); !added) return added;
  for (const auto& node : nodes_) joins(*node);
  return ok();
}

Status Simulator::add(Role role, const std::string& name) {
  const InstanceId id = routers_->new_id();
  PacedPipeline pipeline{.stages = role == Role::decode ? options_.decode_pp : options_.prefill_pp};
  if (pipeline.stages > 1) {
    pipeline.window = options_.pipeline_window > 0 ? options_.pipeline_window : 2 * pipeline.stages;
    pipeline.boundary_s = options_.hardware.link_s;
    pipeline.boundary_s_per_token = options_.model.boundary_bytes() / options_.hardware.link_bytes_per_s;
  }
  const StepCost cost = step_cost(options_.model, options_.hardware, pipeline.stages);
  Node& node = *nodes_.emplace_back(std::make_unique<Node>(timeline_, versions_.emplace_back(1)));
  const double tokens = options_.kv_tokens > 0 ? options_.kv_tokens
                                               : kv_tokens(options_.model, options_.hardware, pipeline.stages);
  if (tokens < options_.block_tokens && options_.kv_tokens > 0)
    return invalid("--kv-tokens: expected at least one block, " + std::to_string(options_.block_tokens) + " tokens");
  if (tokens < options_.block_tokens)
    return invalid("--model " + options_.model.name + " leaves no memory for KV with --hardware " +
                   options_.hardware.name + ": expected --kv-tokens");
  if (options_.host_tokens > 0 && options_.hardware.host_bytes_per_s <= 0)
    return invalid("--host-tokens: --hardware " + options_.hardware.name + " has no host_bytes_per_s");
  KvOptions kv{.shape = small_kv(n_layers_), .block_tokens = options_.block_tokens, .proof_tokens = 1};
  kv.pool_bytes = size_t(tokens) * small_kv(n_layers_).token_bytes();
  kv.max_sequence_tokens = options_.conductor.max_model_len;
  kv.vattention.max_sequences = max_sequences(options_.engine.max_batch);
  kv.clock = &node.time().clock;
  kv.device = &node.device();
  kv.queue = &node.queue();
  kv.tiers.host_bytes = size_t(options_.host_tokens) * small_kv(n_layers_).token_bytes();
  kv.tiers.block_tokens = options_.block_tokens;
  kv.tiers.copy_gbps = options_.hardware.host_bytes_per_s / bytes_scale_ * 1e-9;
  // The conductor follows a D's prefix cache only for orders that may leave a prompt on D.
  const bool wanted = role != Role::decode || options_.conductor.disagg->stays;
  auto log = wanted ? std::make_shared<PrefixLog>() : nullptr;
  const KvShards shards{.n_layers = n_layers_, .n_kv_heads = 1};
  if (const auto plan = plan_ranks(options_.scheme, kv, shards); !plan) {
    if (options_.kv_tokens > 0) return invalid("--kv-tokens: " + plan.error().message);
    const std::string where = pipeline.stages == 1   ? "--hardware " + options_.hardware.name
                              : role == Role::decode ? "--decode-pp " + std::to_string(pipeline.stages)
                                                     : "--prefill-pp " + std::to_string(pipeline.stages);
    return invalid(where + ": the memory holds " + std::to_string(int64_t(tokens)) +
                   " tokens of KV, which is not a valid pool (" + plan.error().message + "): expected --kv-tokens");
  }
  if (log) kv.listeners = kv.tiers.listeners = {log};
  auto memory = make_ranked_memory(options_.scheme, kv, shards);
  if (memory && kv.tiers.on()) memory = make_offloaded(std::move(memory).value(), kv);
  if (!memory) return memory.error();
  links_.set_rate(id, options_.hardware.link_bytes_per_s);
  const TransportOptions transport{.regions = {{memory.value()->base(), memory.value()->layout().pool_bytes()}},
                                   .queue = &node.queue(),
                                   .clock = &node.time().clock,
                                   .self = id};
  InstanceOptions instance{.id = id, .name = name, .role = role, .cost = cost, .cost_known = true};
  instance.order = options_.conductor.remote_order();
  instance.cache_log = log;
  instance.report_every_s = 0;
  instance.log = options_.conductor.log;
  instance.bytes_scale = bytes_scale_;
  instance.stream_kv = options_.conductor.stream_kv == StreamKv::request ? StreamKv::request : StreamKv::chunk;
  instance.reserve_blocks = options_.conductor.reserve_blocks;
  instance.engine = options_.engine;
  node.start(std::make_unique<Instance>(
      std::move(instance), make_paced_model(cost.terms(), pipeline, n_layers_, node.time()), std::move(memory).value(),
      std::make_unique<SimulatedTransport>(transport, pipeline.stages, *this), node.time().clock, *this));
  return ok();
}

void Simulator::joins(const Node& node) {
  const InstanceInfo info = node.instance().info();
  routers_->joined(info, std::make_shared<LinkProbe>(node, *this, info.id));
}

void Simulator::send(InstanceId from, InstanceId to, Message message) {
  // Instances of one role exchange no messages, so they need not know each other. This drops half of all PeerJoined
  // messages.
  if (auto* joined = std::get_if<PeerJoined>(&message);
      joined && joined->info.role == nodes_[size_t(to)]->instance().options().role)
    return;
  if (auto* start = std::get_if<StartRequest>(&message)) {
    request_of_[start->attempt] = start->request->id;
    run_.records[start->request->id].order = start->remote ? options_.conductor.remote_order() : DisaggOrder::local;
  }
  if (auto* progress = std::get_if<AttemptProgress>(&message);
      progress && progress->stage == AttemptProgress::prompt_done)
    run_.records[request_of_.at(progress->attempt)].prompt_done_s = now(from);
  const double at_s = now(from) + options_.message_s;
  if (to != kConductor) {
    timeline_.at(at_s, [this, from, to, letter = std::make_shared<Message>(std::move(message))] {
      auto* start = std::get_if<StartRequest>(letter.get());
      if (start && start->fetch.holder >= 0) return fetch(to, std::move(*start));
      deliver(from, to, std::move(*letter));
    });
    return;
  }
  // Messages of one instance to the conductor at one time are delivered by one event. Most of them are tokens of one
  // step.
  if (breath_ && breath_->from == from && breath_->at_s == at_s && breath_->number == timeline_.last())
    return breath_->letters.push_back(std::move(message));
  breath_ = std::make_shared<Breath>(Breath{from, at_s, timeline_.last() + 1, {}});
  breath_->letters.reserve(64);
  breath_->letters.push_back(std::move(message));
  timeline_.at(at_s, [this, breath = breath_] {
    for (Message& letter : breath->letters) routers_->receive(breath->from, std::move(letter));
  });
}

void Simulator::deliver(InstanceId from, InstanceId to, Message message) {
  if (from != kConductor) nodes_[size_t(to)]->time().heard_s = timeline_.now();
  nodes_[size_t(to)]->instance().send(from, std::move(message));
  nodes_[size_t(to)]->wake();
}

// Fetches the part of the prefix that the source holds at this moment.
void Simulator::fetch(InstanceId to, StartRequest start) {
  const std::vector<int32_t>& prompt = start.request->prompt;
  const auto here = [&](InstanceId id) { return nodes_[size_t(id)]->instance().memory().probe(prompt, 0); };
  const InstanceId source = start.fetch.holder;
  const int tokens = here(source), missing = tokens - here(to);
  start.fetch.holder = -1;
  if (missing <= 0) return deliver(kConductor, to, std::move(start));
  links_.send(source, to, missing * options_.model.kv_token_bytes(), options_.hardware.link_s,
              [this, to, tokens, began_s = timeline_.now(), start = std::move(start)] {
                run_.fetches_s.push_back(timeline_.now() - began_s);
                Node& node = *nodes_[size_t(to)];
                node.first([this, &node, tokens, request = start.request] {
                  run_.fetched_tokens += node.store(std::span(request->prompt).first(size_t(tokens)));
                });
                deliver(kConductor, to, start);
              });
}

void Simulator::arrives(size_t at) {
  const TraceRequest& asked = trace_.requests[at];
  auto request = std::make_shared<Request>();
  request->id = at;
  request->prompt.resize(size_t(asked.prompt_tokens));
  auto at_token = request->prompt.begin();
  for (uint64_t block : asked.blocks) {
    const auto end = at_token + std::min<long>(trace_.block_tokens, request->prompt.end() - at_token);
    std::iota(at_token, end, int32_t(Random(block).next() >> 34));
    at_token = end;
  }
  if (options_.answers && asked.session >= 0) goes_on(at, request->prompt);
  request->sampling.temperature = 0;
  request->max_tokens = std::max(1, options_.output_tokens >= 0 ? options_.output_tokens : asked.output_tokens);
  request->ignore_eos = true;
  request->arrival_s = timeline_.now();
  if (options_.deadline_s > 0) request->deadline_s = request->arrival_s + options_.deadline_s;
  SimulatedRecord& record = run_.records[at];
  record.arrival_s = request->arrival_s;
  record.prompt = asked.prompt_tokens;
  Status taken = routers_->submit(std::move(request), std::make_shared<Client>(*this, at));
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
  ++ended_;
  record.end = event.finish == FinishReason::length    ? SimulatedEnd::completed
               : event.finish == FinishReason::refused ? SimulatedEnd::refused
                                                       : SimulatedEnd::failed;
  record.why = event.error;
  for (int next : next_[at])
    timeline_.at(timeline_.now() + trace_.requests[size_t(next)].think_s, [this, next] { arrives(size_t(next)); });
}

// Copies the session's earlier tokens into the prompt, as far as its blocks equal those of the session's previous
// request. If they cover the whole previous prompt and this prompt is longer than it and its answer, the answer is
// included, too. Every answer here consists of token 0.
void Simulator::goes_on(size_t at, std::vector<int32_t>& prompt) {
  const TraceRequest& asked = trace_.requests[at];
  auto [found, is_first] = said_.try_emplace(asked.session);
  Said& said = found->second;
  if (!is_first) {
    const TraceRequest& before = trace_.requests[said.request];
    const auto same = size_t(std::ranges::mismatch(before.blocks, asked.blocks).in1 - before.blocks.begin());
    const bool all = same >= size_t(before.prompt_tokens / trace_.block_tokens) && prompt.size() > said.tokens.size();
    const size_t n = all ? said.tokens.size()
                         : std::min({same * size_t(trace_.block_tokens), size_t(before.prompt_tokens), prompt.size()});
    std::copy_n(said.tokens.begin(), n, prompt.begin());
  }
  said = {at, prompt};
  const int answer = options_.output_tokens >= 0 ? options_.output_tokens : asked.output_tokens;
  said.tokens.resize(prompt.size() + size_t(answer), 0);
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
    const bool decodes = node->instance().options().role == Role::decode;
    if (!decodes) run_.prefill_evictions += stats.kv.evictions;
    (decodes ? run_.decode_busy_s : run_.prefill_busy_s) += stats.step_seconds;
    const double block_gb = options_.block_tokens * options_.model.kv_token_bytes() * 1e-9;
    (decodes ? run_.decode_gb_s : run_.prefill_gb_s) += node->held_block_s() * block_gb;
    run_.prompt_phase_gb_s += stats.spent.prefill_gb_s, run_.decode_phase_gb_s += stats.spent.decode_gb_s;
    run_.transfer_phase_gb_s += stats.spent.transfer_gb_s;
    run_.cost_error.n += stats.cost_error.n;
    run_.cost_error.absolute += stats.cost_error.absolute;
    run_.cost_error.signed_sum += stats.cost_error.signed_sum;
  }
  run_.conductor = routers_->totals();
  return std::move(run_);
}

}  // namespace

Result<Simulation> simulate(const SimulationOptions& options, const Trace& trace) {
  Simulator simulator(options, trace);
  if (Status built = simulator.build(); !built) return built.error();
  return simulator.run();
}

}  // namespace xpyd::disagg
