#include "disagg/simulate/cluster.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "base/random.h"
#include "disagg/cluster.h"
#include "disagg/instance.h"
#include "disagg/simulate/links.h"
#include "disagg/transport/forwarding.h"

namespace xpyd::disagg {
namespace {

// What the engine moves: one layer, four bytes a token.
ModelConfig small_shape() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = c.head_dim = 1;
  c.hidden = c.intermediate = 8;
  c.vocab = 2;
  c.max_position = 1 << 30;
  return c;
}
const KvShape kShape = kv_shape(small_shape(), Dtype::bf16);

// Copies nothing, at once.
class NullQueue final : public DeviceQueue {
 public:
  void copy(std::span<const Copy>, bool) override {}
  int64_t mark() override { return 0; }
  bool reached(int64_t) override { return true; }
  void wait() override {}
};

// An instance's own time, and what its step is about.
struct NodeTime {
  VirtualClock clock;
  double began_s = 0;  // its last step
};

class PacedModel final : public Model {
 public:
  PacedModel(model::StepCost cost, NodeTime& time) : cost_(std::move(cost)), time_(time) {}
  const ModelConfig& config() const override { return config_; }
  void forward(const StepInput& step, float* logits) override {
    model::StepShape shape;
    for (size_t s = 0; s < step.views.size(); ++s) {
      const int n = step.q_offsets[s + 1] - step.q_offsets[s], before = step.kv_lengths[s] - n;
      if (n == 1 && before > 0)
        shape.add_decodes(1, before + 1);
      else
        shape.add_prompt(n, before);
    }
    time_.began_s = time_.clock.seconds;
    time_.clock.seconds += cost_.seconds(shape);
    if (step.observer) step.observer->layer_done(0);
    std::fill_n(logits, 2 * step.logit_rows.size(), 0.0f);
  }
  Work work(const StepInput&) const override { return {}; }
  size_t weight_bytes() const override { return 0; }
  size_t scratch_bytes() const override { return 0; }

 private:
  const ModelConfig config_ = small_shape();
  const model::StepCost cost_;
  NodeTime& time_;
};

class Simulator final : public Post {
 public:
  explicit Simulator(const SimulationOptions& options);
  Result<Simulation> run(const std::vector<SimulatedRequest>& requests, int trace_block_tokens);

 private:
  struct Node {
    NodeTime time;
    NullQueue queue;
    std::unique_ptr<Instance> instance;
    bool planned = false;
  };
  class Wire;
  class Client final : public EventSink {
   public:
    explicit Client(Simulator& cluster) : cluster_(cluster) {}
    void on_event(TokenEvent event) override { cluster_.on_event(event); }

   private:
    Simulator& cluster_;
  };

  void add(Role role, int index);
  void send(InstanceId from, InstanceId to, Message message) override;
  void on_event(const TokenEvent& event);
  void wake(InstanceId id);
  void turn(InstanceId id);
  double now(InstanceId id) const {
    return id >= 0 && turning_ == id ? nodes_[size_t(id)]->time.clock.seconds : timeline_.now();
  }

  const SimulationOptions options_;
  Timeline timeline_;
  Links links_;
  std::unique_ptr<Conductor> conductor_;
  std::vector<std::unique_ptr<Node>> nodes_;
  InstanceId turning_ = -1;
  std::shared_ptr<Client> client_ = std::make_shared<Client>(*this);
  double layer_share_, bytes_scale_;
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
    const double began_s = std::max(cluster_.timeline_.now(), cluster_.nodes_[size_t(self_)]->time.began_s);
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
          cluster_.wake(self_);
          cluster_.wake(transfer.peer);
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

Simulator::Simulator(const SimulationOptions& options)
    : options_(options),
      links_(timeline_),
      layer_share_(options.conductor.stream_kv == StreamKv::layer ? 1.0 / options.model.n_layers : 1),
      bytes_scale_(options.model.kv_token_bytes() / double(kShape.token_bytes())) {
  conductor_ = std::make_unique<Conductor>(options.conductor, timeline_.clock, *this);
  int counts[3] = {0, 0, 0};
  const std::vector<Role> roles = parse_topology(options.topology).value();
  for (Role role : roles) add(role, counts[int(role)]++);
  for (const auto& node : nodes_)
    conductor_->joined(node->instance->info(), std::make_shared<LocalProbe>(*node->instance));
}

void Simulator::add(Role role, int index) {
  const InstanceId id = conductor_->new_id();
  nodes_.push_back(std::make_unique<Node>());
  Node& node = *nodes_.back();
  const double tokens = options_.kv_tokens > 0 ? options_.kv_tokens : kv_tokens(options_.model, options_.hardware);
  KvOptions kv{.shape = kShape, .block_tokens = options_.block_tokens};
  kv.pool_bytes = size_t(tokens) * kShape.token_bytes();
  kv.max_sequence_tokens = options_.conductor.max_model_len;
  kv.vattention.max_sequences = max_sequences(options_.engine.max_batch);
  kv.queue = &node.queue;
  auto memory = find_kv_scheme(options_.scheme)->make(make_block_pool(options_.scheme.c_str(), kv).value(), kv);
  links_.set_rate(id, options_.hardware.link_bytes_per_s);
  TransportOptions wire{.regions = {{memory->base(), memory->layout().pool_bytes()}},
                        .queue = &node.queue,
                        .clock = &node.time.clock,
                        .self = id};
  InstanceOptions instance{.id = id, .name = instance_name(role, index), .role = role};
  instance.stream_kv = options_.conductor.stream_kv == StreamKv::request ? StreamKv::request : StreamKv::chunk;
  instance.engine = options_.engine;
  node.instance = std::make_unique<Instance>(
      std::move(instance), std::make_unique<PacedModel>(step_cost(options_.model, options_.hardware), node.time),
      std::move(memory), std::make_unique<Wire>(wire, *this), node.time.clock, *this);
}

void Simulator::send(InstanceId from, InstanceId to, Message message) {
  timeline_.at(now(from) + options_.message_s,
               [this, from, to, letter = std::make_shared<Message>(std::move(message))] {
                 if (to == kConductor) return conductor_->receive(from, std::move(*letter));
                 nodes_[size_t(to)]->instance->send(from, std::move(*letter));
                 wake(to);
               });
}

void Simulator::wake(InstanceId id) {
  Node& node = *nodes_[size_t(id)];
  if (std::exchange(node.planned, true)) return;
  timeline_.at(node.time.clock.seconds, [this, id] { turn(id); });
}

void Simulator::turn(InstanceId id) {
  Node& node = *nodes_[size_t(id)];
  node.planned = false;
  node.time.clock.seconds = node.time.began_s = timeline_.now();
  turning_ = id;
  const bool moved = node.instance->turn();
  turning_ = -1;
  if (moved) wake(id);
}

void Simulator::on_event(const TokenEvent& event) {
  SimulatedRecord& record = run_.records[size_t(event.request_id)];
  const double now_s = timeline_.now();
  if (event.token >= 0) {
    if (record.first_s < 0)
      record.first_s = now_s;
    else
      record.worst_gap_s = std::max(record.worst_gap_s, now_s - record.last_s);
    record.last_s = now_s;
    ++record.tokens;
    record.cached_tokens = event.cached_tokens;
  }
  if (event.finish != FinishReason::none && event.finish != FinishReason::length)
    run_.wrong = "a request ended by " + std::string(finish_reason_name(event.finish)) + " " + event.error;
}

Result<Simulation> Simulator::run(const std::vector<SimulatedRequest>& requests, int trace_block_tokens) {
  run_.records.resize(requests.size());
  for (size_t i = 0; i < requests.size(); ++i)
    timeline_.at(requests[i].arrival_s, [this, &requests, i, trace_block_tokens] {
      const SimulatedRequest& asked = requests[i];
      auto request = std::make_shared<Request>();
      request->id = i;
      request->prompt.reserve(size_t(asked.prompt));
      for (uint64_t block : asked.blocks) {
        const auto first = int32_t(Random(block).next() >> 34);
        for (int t = 0; t < trace_block_tokens && int(request->prompt.size()) < asked.prompt; ++t)
          request->prompt.push_back(first + t);
      }
      request->sampling.temperature = 0;
      request->max_tokens = asked.output;
      request->ignore_eos = true;
      request->arrival_s = asked.arrival_s;
      if (Status taken = conductor_->submit(request, client_); !taken) run_.wrong = taken.error().message;
    });
  run_.events = timeline_.run();
  run_.end_s = timeline_.now();
  for (size_t i = 0; i < requests.size(); ++i)
    if (run_.records[i].tokens != requests[i].output && run_.wrong.empty())
      run_.wrong = "request " + std::to_string(i) + " has not got its tokens";
  for (const auto& node : nodes_) {
    const InstanceStats stats = node->instance->stats();
    run_.steps += stats.steps, run_.preemptions += stats.preemptions;
  }
  run_.kv_gb = links_.bytes() * 1e-9;
  return std::move(run_);
}

}  // namespace

Result<Simulation> simulate(const SimulationOptions& options, const std::vector<SimulatedRequest>& requests,
                            int trace_block_tokens) {
  return Simulator(options).run(requests, trace_block_tokens);
}

}  // namespace xpyd::disagg
