#include "experiments/timed_cluster.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <semaphore>
#include <thread>
#include <unordered_map>

#include "disagg/conductor.h"
#include "disagg/messages.h"
#include "disagg/instance.h"
#include "disagg/cluster.h"
#include "disagg/transport/forwarding.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments {
namespace {

constexpr int kVocab = 64;
constexpr uint64_t kStart = 0x243f6a8885a308d3u;

uint64_t mix(uint64_t h, uint64_t x) {
  h = (h ^ x) * 0x9e3779b97f4a7c15u;
  return h ^ (h >> 29);
}

ModelConfig llama_8b() {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = 32;
  c.hidden = 4096;
  c.intermediate = 14336;
  c.n_heads = 32;
  c.n_kv_heads = 8;
  c.head_dim = 128;
  c.vocab = 128256;
  c.max_position = 131072;
  return c;
}

// What the engine moves: as many layers, eight bytes of K and of V in each.
ModelConfig small_shape() {
  ModelConfig c = llama_8b();
  c.n_heads = c.n_kv_heads = 1;
  c.head_dim = 4;
  c.hidden = c.intermediate = 8;
  c.vocab = kVocab;
  return c;
}

const KvShape kShape = kv_shape(small_shape(), Dtype::bf16);

std::vector<int32_t> prompt_of(size_t request, int length) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < length; ++i) prompt.push_back(int32_t((size_t(i) * 7 + request) % kVocab));
  return prompt;
}

// Virtual time, and who does what in it.
class Timeline {
 public:
  VirtualClock clock;
  std::function<void(double seconds)> passes;  // called before time does

  void at(double time_s, std::function<void()> what) {
    events_.emplace(std::pair(std::max(time_s, clock.seconds), ++number_), std::move(what));
  }
  void run() {
    while (!events_.empty()) {
      auto event = events_.extract(events_.begin());
      if (event.key().first > clock.seconds) {
        passes(event.key().first - clock.seconds);
        clock.seconds = event.key().first;
      }
      event.mapped()();
    }
  }

 private:
  std::map<std::pair<double, uint64_t>, std::function<void()>> events_;
  uint64_t number_ = 0;
};

// A thread that runs only while the timeline waits for it.
class Turntaker {
 public:
  Turntaker(Timeline& timeline, std::function<void(Turntaker&)> body)
      : timeline_(timeline), thread_([this, body = std::move(body)] {
          mine_.acquire();
          if (!over_) body(*this);
          ended_ = true;
          theirs_.release();
        }) {}
  ~Turntaker() {
    over_ = true;
    while (!ended_) go();
    thread_.join();
  }
  bool over() const { return over_; }

  // The timeline's: until it sleeps.
  void wake() {
    if (!parked_ || ended_) return;
    parked_ = false;
    go();
  }
  // Its own.
  void sleep(double seconds) {
    timeline_.at(timeline_.clock.seconds + seconds, [this] { go(); });
    give_turn();
  }
  void park() {
    parked_ = true;
    give_turn();
  }

 private:
  void go() {
    mine_.release();
    theirs_.acquire();
  }
  void give_turn() {
    theirs_.release();
    mine_.acquire();
  }

  Timeline& timeline_;
  bool over_ = false, ended_ = false, parked_ = true;
  std::binary_semaphore mine_{0}, theirs_{0};
  std::thread thread_;
};

// Takes the time of the real model, layer by layer where a prompt is computed and somebody looks.
// What it computes of each layer is a hash of the tokens so far.
class ChainModel final : public Model {
 public:
  ChainModel(double share, std::function<void(double)> sleep)
      : cost_{timed_model_cost(), {share * kTimedRates.flops_per_s, share * kTimedRates.bytes_per_s}},
        sleep_(std::move(sleep)) {}
  const ModelConfig& config() const override { return config_; }

  void forward(const StepInput& step, float* logits) override {
    const double step_s = cost_.seconds(step);
    const bool prompts = step.token_ids.size() > step.views.size();
    const bool by_layer = prompts && step.observer;
    for (int layer = 0; layer < config_.n_layers; ++layer) {
      if (by_layer) sleep_(step_s / config_.n_layers);
      for (size_t s = 0; s < step.views.size(); ++s) write(step, s, layer);
      if (by_layer) step.observer->layer_done(layer);
    }
    if (!by_layer) sleep_(step_s);
    size_t s = 0;
    for (int32_t row : step.logit_rows) {
      while (row >= step.q_offsets[s + 1]) ++s;
      std::fill_n(logits, kVocab, 0.0f);
      logits[token_of(step.views[s], step.kv_lengths[s] - 1)] = 1;
      logits += kVocab;
    }
  }
  Work work(const StepInput&) const override { return {}; }
  size_t weight_bytes() const override { return 0; }
  size_t scratch_bytes() const override { return 0; }

 private:
  static void write(const StepInput& step, size_t s, int layer) {
    const KvView& view = step.views[s];
    const int begin = step.q_offsets[s], end = step.q_offsets[s + 1];
    int position = step.kv_lengths[s] - (end - begin);
    uint64_t chain = kStart;
    if (position > 0) std::memcpy(&chain, view.row(layer, 0, position - 1, 0), sizeof chain);
    for (int i = begin; i < end; ++i, ++position) {
      chain = mix(chain, uint64_t(step.token_ids[size_t(i)]));
      std::memcpy(view.row(layer, 0, position, 0), &chain, sizeof chain);
      std::memcpy(view.row(layer, 1, position, 0), &chain, sizeof chain);
    }
  }
  // All layers say the same where nothing went wrong.
  static int32_t token_of(const KvView& view, int position) {
    uint64_t first = 0, all = 0;
    for (int layer = 0; layer < view.layout->shape.n_layers; ++layer) {
      uint64_t chain;
      std::memcpy(&chain, view.row(layer, 0, position, 0), sizeof chain);
      if (layer == 0) first = all = chain;
      all += (chain ^ first) * 0x9e3779b97f4a7c15u;
    }
    return int32_t(all % kVocab);
  }

  const ModelConfig config_ = small_shape();
  const StepCost cost_;
  std::function<void(double)> sleep_;
};

// When the links of two instances have carried so many bytes: first come, first served.
struct Links {
  double bytes_per_s = 0;
  std::map<PeerId, double> out_free_s, in_free_s;
  double bytes = 0;
  double carry(PeerId from, PeerId to, double n, double now_s) {
    double &out = out_free_s[from], &in = in_free_s[to];
    const double end = std::max({now_s, out, in}) + n / bytes_per_s;
    bytes += n;
    return out = in = end;
  }
};

// The local wire, which copies when the links have carried it. `wake`: both ends of a transfer, then.
class PacedWire final : public ForwardingTransport {
 public:
  PacedWire(const TransportOptions& options, Links& links, Timeline& timeline, std::function<void(PeerId)> wake)
      : ForwardingTransport(find_transport("local")->make(options).value()),
        self_(options.self),
        links_(links),
        timeline_(timeline),
        wake_(std::move(wake)) {}

  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    static const double scale = timed_model_cost().kv_token_bytes() / double(kShape.token_bytes());
    const bool writes = transfer.op == KvOp::write;
    const double due = links_.carry(writes ? self_ : transfer.peer, writes ? transfer.peer : self_,
                                    double(plan.bytes) * scale, timeline_.clock.seconds);
    const TransferId id = ++last_;
    flights_[id] = TransferState::in_flight;
    timeline_.at(due, [this, id, transfer, plan] {
      auto flight = flights_.find(id);
      if (flight == flights_.end() || flight->second != TransferState::in_flight) return;
      flight->second = inner().poll(inner().post(transfer, plan));
      wake_(self_);
      wake_(transfer.peer);
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
  const PeerId self_;
  Links& links_;
  Timeline& timeline_;
  std::function<void(PeerId)> wake_;
  std::unordered_map<TransferId, TransferState> flights_;
  TransferId last_ = 0;
};

class TimedCluster final : public Post {
 public:
  explicit TimedCluster(const TimedOptions& options);
  ~TimedCluster() override;
  TimedRun run(const std::vector<TimedRequest>& requests);

 private:
  struct Node {
    Role role = Role::colocated;
    std::unique_ptr<DeviceQueue> queue;
    std::unique_ptr<Instance> instance;
    std::unique_ptr<Turntaker> thread;
    int64_t held() const {
      const KvStats kv = instance->memory().stats();
      return kv.capacity - kv.free - kv.cached;
    }
  };
  class Client final : public EventSink {
   public:
    explicit Client(TimedCluster& cluster) : cluster_(cluster) {}
    void on_event(TokenEvent event) override { cluster_.on_event(event); }

   private:
    TimedCluster& cluster_;
  };

  ConductorOptions conductor_options() const;
  void add(Role role, int index, size_t n, std::shared_ptr<KvPool> shared);
  void send(InstanceId from, InstanceId to, Message message) override;
  void on_event(const TokenEvent& event);

  const TimedOptions options_;
  Timeline timeline_;
  Links links_;
  std::unique_ptr<Conductor> conductor_;
  std::vector<Node> nodes_;
  std::map<std::pair<InstanceId, InstanceId>, double> last_due_s_;
  std::unordered_map<AttemptId, size_t> request_of_;
  struct Expected {
    uint64_t chain = kStart;
    int output = 0;
    bool ended = false;
  };
  std::vector<Expected> expected_;
  TimedRun run_;
};

ConductorOptions TimedCluster::conductor_options() const {
  return {.placement = find_placement_policy("least_loaded"),
          .disagg = find_disagg_policy(options_.disagg),
          .disagg_options = options_.disagg_options,
          .zero_copy = options_.wire_gbps == 0,
          .max_model_len = options_.pool_tokens,
          .max_queue_bytes = int64_t{1} << 50,
          .seed = options_.seed,
          .chunk_tokens = options_.step_tokens,
          .stream_kv = options_.stream_kv,
          .prior = CostPrior{timed_model_cost(), kTimedRates}};
}

TimedCluster::TimedCluster(const TimedOptions& options) : options_(options) {
  links_.bytes_per_s = options.wire_gbps * 1e9 / 8;
  conductor_ = std::make_unique<Conductor>(conductor_options(), timeline_.clock, *this);
  const double block_gb = 16 * timed_model_cost().kv_token_bytes() * 1e-9;
  timeline_.passes = [this, block_gb](double seconds) {
    for (const Node& node : nodes_)
      (node.role == Role::prefill ? run_.prefill_gb_s : run_.decode_gb_s) += double(node.held()) * block_gb * seconds;
  };
  const std::vector<Role> roles = parse_topology(options.topology).value();
  nodes_.resize(roles.size());
  std::shared_ptr<KvPool> shared;
  if (options.wire_gbps == 0) {
    KvOptions kv{.shape = kShape, .prefix_cache = false};
    kv.pool_bytes = size_t(options.pool_tokens) * kShape.token_bytes() * roles.size();
    shared = make_block_pool("paged", kv).value();
  }
  int counts[3] = {0, 0, 0};
  for (Role role : roles) add(role, counts[int(role)]++, roles.size(), shared);
  for (const Node& node : nodes_)
    conductor_->joined(node.instance->info(), std::make_shared<LocalProbe>(*node.instance));
}

TimedCluster::~TimedCluster() {
  for (Node& node : nodes_) node.thread.reset();
}

void TimedCluster::add(Role role, int index, size_t n, std::shared_ptr<KvPool> shared) {
  const InstanceId id = conductor_->new_id();
  Node& node = nodes_[size_t(id)];
  node.role = role;
  node.queue = cpu_device().make_queue(Device::Phase::both);
  KvOptions kv{.shape = kShape, .prefix_cache = false};
  kv.pool_bytes = size_t(options_.pool_tokens) * kShape.token_bytes() * (shared ? n : 1);
  kv.max_sequence_tokens = options_.pool_tokens;
  kv.vattention.max_sequences = max_sequences(options_.max_batch);
  kv.n_memories = int(n);
  kv.keep_idle = !shared;
  kv.queue = node.queue.get();
  auto memory = find_kv_scheme("paged")->make(shared ? shared : make_block_pool("paged", kv).value(), kv);
  TransportOptions wire{.regions = {{memory->base(), memory->layout().pool_bytes()}},
                        .queue = node.queue.get(),
                        .clock = &timeline_.clock,
                        .self = id};
  auto wake = [this](PeerId peer) { nodes_[size_t(peer)].thread->wake(); };
  std::unique_ptr<KvTransport> transport;
  if (shared)
    transport = find_transport("handoff")->make(wire).value();
  else
    transport = std::make_unique<PacedWire>(wire, links_, timeline_, wake);
  InstanceOptions instance{
      .id = id, .name = instance_name(role, index), .role = role, .stream_kv = options_.stream_kv, .checksum = !shared};
  instance.engine = {
      .policy = find_batch_policy("chunked"), .max_batch = options_.max_batch, .step_tokens = options_.step_tokens};
  auto model = std::make_unique<ChainModel>(options_.share, [&node](double s) { node.thread->sleep(s); });
  node.instance = std::make_unique<Instance>(std::move(instance), std::move(model), std::move(memory),
                                             std::move(transport), timeline_.clock, *this);
  node.thread = std::make_unique<Turntaker>(timeline_, [&node](Turntaker& self) {
    while (!self.over())
      if (!node.instance->turn()) self.park();
  });
}

void TimedCluster::send(InstanceId from, InstanceId to, Message message) {
  if (auto* start = std::get_if<StartRequest>(&message)) {
    request_of_[start->attempt] = size_t(start->request->id);
    run_.records[size_t(start->request->id)].order = start->order;
  }
  if (auto* progress = std::get_if<AttemptProgress>(&message);
      progress && progress->stage == AttemptProgress::prompt_done)
    run_.records[request_of_.at(progress->attempt)].prompt_done_s = timeline_.clock.seconds;
  double& due = last_due_s_[{from, to}];
  due = std::max(due, timeline_.clock.seconds + options_.message_s);
  timeline_.at(due, [this, from, to, letter = std::make_shared<Message>(std::move(message))] {
    if (to == kConductor) return conductor_->receive(from, std::move(*letter));
    Node& node = nodes_[size_t(to)];
    node.instance->send(from, std::move(*letter));
    node.thread->wake();
  });
}

void TimedCluster::on_event(const TokenEvent& event) {
  TimedRecord& record = run_.records[size_t(event.request_id)];
  Expected& expected = expected_[size_t(event.request_id)];
  if (event.token >= 0) {
    if (event.token != int32_t(expected.chain % kVocab)) run_.wrong = "a token is wrong";
    expected.chain = mix(expected.chain, uint64_t(event.token));
    record.token_s.push_back(timeline_.clock.seconds);
  }
  if (event.finish == FinishReason::none) return;
  if (event.finish != FinishReason::length || expected.ended || int(record.token_s.size()) != expected.output)
    run_.wrong = "a request ended by " + std::string(finish_reason_name(event.finish)) + " " + event.error;
  expected.ended = true;
  run_.end_s = timeline_.clock.seconds;
}

TimedRun TimedCluster::run(const std::vector<TimedRequest>& requests) {
  run_.records.resize(requests.size());
  expected_.resize(requests.size());
  auto client = std::make_shared<Client>(*this);
  for (size_t i = 0; i < requests.size(); ++i)
    timeline_.at(requests[i].arrival_s, [this, i, client, &asked = requests[i]] {
      auto request = std::make_shared<Request>();
      request->id = i;
      request->prompt = prompt_of(i, asked.prompt);
      request->sampling.temperature = 0;
      request->max_tokens = expected_[i].output = asked.output;
      request->ignore_eos = true;
      request->arrival_s = asked.arrival_s;
      for (int32_t token : request->prompt) expected_[i].chain = mix(expected_[i].chain, uint64_t(token));
      if (Status taken = conductor_->submit(request, client); !taken) run_.wrong = taken.error().message;
    });
  timeline_.run();
  for (size_t i = 0; i < requests.size(); ++i)
    if (!expected_[i].ended && run_.wrong.empty()) run_.wrong = "request " + std::to_string(i) + " never ended";
  for (const Node& node : nodes_) {
    const InstanceStats stats = node.instance->stats();
    run_.preemptions += stats.preemptions;
    run_.steps += stats.steps;
    node.instance->memory().check_invariants(true);
    if (run_.wrong.empty() && stats.kv_refused > 0) run_.wrong = "KV arrived changed";
    if (run_.wrong.empty() && node.held() > 0) run_.wrong = stats.name + " still holds KV";
  }
  run_.wire_gb = links_.bytes * 1e-9;
  return std::move(run_);
}

}  // namespace

CostModel timed_model_cost() { return {.config = llama_8b()}; }

TimedRun run_timed(const TimedOptions& options, const std::vector<TimedRequest>& requests) {
  return TimedCluster(options).run(requests);
}

}  // namespace xpyd::experiments
