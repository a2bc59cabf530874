#include "disagg/cluster.h"

#include <algorithm>

#include "allocator/kv_plan.h"
#include "allocator/tiered.h"

namespace xpyd {

Result<std::vector<Role>> parse_topology(const std::string& text) {
  auto error = [&](const char* why) {
    return invalid("--topology " + text + ": " + why +
                   "; expected a form like 1C, 1P1D, 2P3D or 2C1P1D");
  };
  int counts[3] = {0, 0, 0};  // C, P, D
  for (size_t i = 0; i < text.size();) {
    size_t digits = 0;
    int n = 0;
    while (i < text.size() && text[i] >= '0' && text[i] <= '9' && digits < 4) {
      n = n * 10 + (text[i++] - '0');
      ++digits;
    }
    if (digits == 0 || i == text.size()) return error("a number must stand before each letter");
    size_t kind = std::string("CPD").find(text[i++]);
    if (kind == std::string::npos) return error("the letters are C, P and D");
    if (n < 1 || n > 64 || counts[kind] != 0)
      return error("each letter once, with 1 to 64 instances");
    counts[kind] = n;
  }
  if (text.empty()) return error("it is empty");
  if ((counts[1] == 0) != (counts[2] == 0)) return error("P and D need each other");
  std::vector<Role> roles;
  constexpr Role kinds[] = {Role::colocated, Role::prefill, Role::decode};
  for (int kind = 0; kind < 3; ++kind) roles.insert(roles.end(), size_t(counts[kind]), kinds[kind]);
  return roles;
}

struct Cluster::InFlight {
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  std::atomic<int> choices_left{0};
  Placement placement;
  int n = 1;
};

class Cluster::Delivery final : public EventSink {
 public:
  Delivery(Cluster& cluster, std::shared_ptr<EventSink> sink, std::shared_ptr<InFlight> entry)
      : cluster_(cluster), sink_(std::move(sink)), entry_(std::move(entry)) {}

  void on_event(TokenEvent event) override {
    FinishReason finish = event.finish;
    uint64_t id = event.request_id;
    if (finish == FinishReason::stop || finish == FinishReason::length)
      cluster_.logits_hash_.fetch_add(event.logits_hash);
    sink_->on_event(std::move(event));
    if (finish != FinishReason::none && entry_->choices_left.fetch_sub(1) == 1)
      cluster_.finished(id);
  }

 private:
  Cluster& cluster_;
  std::shared_ptr<EventSink> sink_;
  std::shared_ptr<InFlight> entry_;
};

Cluster::Cluster(ClusterOptions options, Clock& clock)
    : options_(std::move(options)), clock_(clock), random_(options_.seed) {}

Result<std::unique_ptr<Cluster>> Cluster::create(ClusterOptions options, Clock& clock) {
  auto cluster = std::unique_ptr<Cluster>(new Cluster(std::move(options), clock));
  ClusterOptions& o = cluster->options_;
  size_t n = o.topology.size();
  bool shared = o.transport->shared_pool && n > 1;
  o.kv.max_sequence_tokens = o.max_model_len;
  o.kv.max_sequences = max_sequences(o.max_batch);
  o.kv.n_memories = int(n);
  o.kv.keep_idle = !shared;  // an idle instance would keep what another one needs
  KvOptions pool_options = o.kv;
  if (shared) pool_options.pool_bytes *= n;
  Result<KvLayout> layout = plan_pool(o.kv_scheme->name, pool_options);
  if (!layout) return layout.error();
  pool_options.device = o.kv.device = o.device;
  if (shared) {
    auto pool = make_block_pool(o.kv_scheme->name, pool_options);
    if (!pool) return Error{pool.error().code, "--kv-bytes: " + pool.error().message};
    cluster->shared_pool_ = pool.value();
  }

  std::vector<Instance*> peers;
  int counts[3] = {0, 0, 0};
  for (size_t i = 0; i < n; ++i) {
    Role role = o.topology[i];
    const char* letter = role == Role::prefill ? "P" : role == Role::decode ? "D" : "C";
    InstanceOptions options_i;
    options_i.name = letter + std::to_string(counts[int(role)]++);
    options_i.role = role;
    options_i.stream_kv = o.stream_kv;
    options_i.engine = {.policy = o.batching,
                        .admission = o.admission,
                        .max_batch = o.max_batch,
                        .step_tokens = o.step_tokens,
                        .ahead = o.ahead,
                        .eos_tokens = o.eos_tokens,
                        .tokenizer = o.tokenizer};
    cluster->queues_.push_back(o.device->make_queue(role == Role::prefill  ? Device::Phase::prefill
                                                    : role == Role::decode ? Device::Phase::decode
                                                                           : Device::Phase::both));
    DeviceQueue& queue = *cluster->queues_.back();
    std::shared_ptr<BlockPool> pool = cluster->shared_pool_;
    if (!shared) {
      auto own = make_block_pool(o.kv_scheme->name, o.kv);
      if (!own) return Error{own.error().code, "--kv-bytes: " + own.error().message};
      pool = own.value();
    }
    pool_options.queue = &queue;
    std::unique_ptr<KvMemory> memory = o.kv_scheme->make(pool, pool_options);
    if (o.kv.tiers.on() || !o.kv.tiers.disk_dir.empty()) {
      auto tiered = make_tiered(std::move(memory), pool_options);
      if (!tiered) return tiered.error();
      memory = std::move(tiered).value();
    }
    Result<std::unique_ptr<Model>> model = o.make_model(int(i), queue);
    if (!model) return model.error();
    cluster->instances_.push_back(std::make_unique<Instance>(
        std::move(options_i), std::move(model).value(), std::move(memory),
        o.transport->make(queue), clock));
    peers.push_back(cluster->instances_.back().get());
  }
  for (size_t i = 0; i < n; ++i) peers[i]->connect(peers, int(i));
  return cluster;
}

Cluster::~Cluster() { stop(); }

void Cluster::start() {
  for (auto& instance : instances_) {
    threads_.emplace_back([this, &instance = *instance] { instance.run(stop_); });
  }
}

bool Cluster::turn() {
  bool moved = false;
  for (auto& instance : instances_) moved |= instance->turn();
  return moved;
}

void Cluster::drain() {
  std::lock_guard lock(mutex_);
  draining_ = true;
}

bool Cluster::wait_idle(double seconds) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                        [&] { return in_flight_.empty(); });
}

void Cluster::stop() {
  drain();
  stop_.store(true);
  for (auto& instance : instances_) instance->poke();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (auto& instance : instances_) instance->shut_down(FinishReason::abort, "the server stopped");
}

// The conductor's part of a request: a snapshot and a pure policy; submit() then sends one message.
Placement Cluster::place(const Request& request) {
  views_.clear();
  for (auto& instance : instances_) {
    InstanceView view;
    view.role = instance->options().role;
    view.queued_tokens = instance->queued_tokens.load();
    view.sequences = instance->decoding_sequences.load();
    KvStats kv = instance->memory().stats();
    view.available_blocks = kv.available();
    if (view.role != Role::decode)
      view.cached_tokens = instance->memory().promise(request.prompt, request.cache_salt);
    views_.push_back(view);
  }
  return options_.placement->place(
      {.instances = views_, .prompt_tokens = int(request.prompt.size()), .random = random_.next()});
}

Status Cluster::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  int prompt = int(request->prompt.size());
  long longest = long(prompt) + request->max_tokens;
  if (longest > options_.max_model_len)
    return invalid("prompt and max_tokens need " + std::to_string(longest) +
                   " tokens, the context has " + std::to_string(options_.max_model_len));
  if (request->n > options_.max_batch)
    return invalid("n is " + std::to_string(request->n) + ", --max-batch is " +
                   std::to_string(options_.max_batch));
  KvStats kv = instances_[0]->memory().stats();
  long blocks = (longest + kv.block_tokens - 1) / kv.block_tokens;
  if (blocks > kv.capacity)
    return invalid("prompt and max_tokens need " + std::to_string(blocks) +
                   " KV blocks, an instance has " + std::to_string(kv.capacity));

  std::lock_guard lock(mutex_);
  if (draining_) return Error{ErrorCode::unavailable, "the server is shutting down"};
  Placement placement = place(*request);
  Instance& prefill = *instances_[size_t(placement.prefill)];
  Instance& decode = *instances_[size_t(placement.decode)];
  if (prefill.queued_requests.load() >= options_.max_queue)
    return Error{ErrorCode::unavailable, "the queue of " + prefill.options().name + " is full"};

  auto entry = std::make_shared<InFlight>();
  entry->choices_left = request->n;
  entry->placement = placement;
  entry->n = request->n;
  in_flight_[request->id] = entry;
  decode.decoding_sequences.fetch_add(request->n);
  auto sequence = make_sequence(request, std::make_shared<Delivery>(*this, std::move(sink), entry),
                                entry->cancelled);
  int uncached = prompt - views_[size_t(placement.prefill)].cached_tokens;
  prefill.queued_requests.fetch_add(1);
  prefill.queued_tokens.fetch_add(uncached);
  sequence->queue_ticket =
      std::shared_ptr<void>(nullptr, [&prefill](void*) { prefill.queued_requests.fetch_sub(1); });
  sequence->prompt_ticket = std::shared_ptr<void>(
      nullptr, [&prefill, uncached](void*) { prefill.queued_tokens.fetch_sub(uncached); });
  if (placement.prefill != placement.decode) {
    sequence->leaves = true;
    sequence->decode_instance = placement.decode;
  }
  prefill.send(StartRequest{std::move(sequence)});
  return ok();
}

void Cluster::finished(uint64_t request_id) {
  std::lock_guard lock(mutex_);
  auto found = in_flight_.find(request_id);
  instances_[size_t(found->second->placement.decode)]->decoding_sequences.fetch_sub(
      found->second->n);
  in_flight_.erase(found);
  if (in_flight_.empty()) idle_.notify_all();
}

void Cluster::abort(uint64_t request_id) {
  std::lock_guard lock(mutex_);
  auto found = in_flight_.find(request_id);
  if (found == in_flight_.end()) return;
  found->second->cancelled->store(true);
  for (int i : {found->second->placement.prefill, found->second->placement.decode})
    instances_[size_t(i)]->poke();
}

ServiceStats Cluster::stats() const {
  ServiceStats all;
  all.shared_pool = shared_pool_ != nullptr;
  for (const auto& instance : instances_) all.instances.push_back(instance->stats());
  return all;
}

// A turn is as long as its step; a very long prompt on a slow machine stays well below this.
bool Cluster::healthy() const {
  constexpr double kSilence = 60;  // seconds
  double now = clock_.now();
  return std::all_of(instances_.begin(), instances_.end(), [&](const auto& instance) {
    return now - instance->stats().heartbeat_s < kSilence;
  });
}

}  // namespace xpyd
