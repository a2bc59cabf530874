#include "tests/disagg/sim_cluster.h"

#include <algorithm>

#include "allocator/kv_pool.h"
#include "allocator/offload/offloaded_memory.h"
#include "allocator/prefix_log.h"

namespace xpyd::testing {

class SimCluster::Probe final : public InstanceProbe {
 public:
  explicit Probe(NodePtr node) : node_(std::move(node)) {}
  InstanceStats stats() const override {
    if (node_->instance) stats_ = node_->instance->stats();
    return stats_;
  }
  std::optional<int> matched_tokens(std::span<const int32_t> tokens, uint64_t salt) const override {
    if (node_->log) return std::nullopt;
    return node_->instance ? node_->instance->memory().matched_tokens(tokens, salt) : 0;
  }

 private:
  NodePtr node_;
  mutable InstanceStats stats_;
};

void SimCluster::open(SimOptions options) {
  options_ = std::move(options);
  SimOptions& o = options_;
  scheme_ = find_kv_scheme(o.scheme);
  o.kv.shape = kv_shape(checksum_config(), Dtype::f32);
  if (o.kv.max_sequence_tokens == 0) o.kv.max_sequence_tokens = 160;
  if (o.kv.pool_bytes == 0) o.kv.pool_bytes = 640 * o.kv.shape.token_bytes();
  o.kv.vattention.max_sequences = max_sequences(o.max_batch);
  o.kv.vattention.page_group_bytes = 4096;
  o.kv.vattention.map_ahead = false;  // no thread of its own here
  if (!o.conductor.placement) o.conductor.placement = find_placement_policy("least_loaded");
  if (!o.conductor.disagg) o.conductor.disagg = find_disagg_policy("prefill_first");
  o.conductor.max_model_len = o.kv.max_sequence_tokens;
  o.conductor.lease_s = o.lease_s;
  if (o.kv.tiers.on()) link_ = std::make_unique<LinkDevice>(clock, o.tier_byte_s);
  if (!o.transport)
    o.transport = [](const TransportOptions& transport) { return find_transport("local")->make(transport).value(); };
  conductor_ = std::make_unique<Conductor>(o.conductor, clock, *this);
}

SimCluster::NodePtr SimCluster::add(Role role) {
  const SimOptions& o = options_;
  auto node = std::make_shared<Node>();
  node->id = conductor_->new_id();
  node->role = role;
  node->name = instance_name(role, node->id);
  node->queue = cpu_device().make_queue(Device::Phase::both);
  auto pool = make_block_pool(o.scheme, o.kv);
  if (o.far_caches) pool.value()->tell(node->log = std::make_shared<PrefixLog>());
  KvOptions kv = o.kv;
  kv.queue = node->queue.get();
  auto memory = scheme_->make(pool.value(), kv);
  if (kv.tiers.on()) {
    kv.device = link_.get();
    kv.clock = &clock;
    memory = make_offloaded(std::move(memory), kv).value();
  }
  const TransportOptions transport{.regions = {{memory->base(), memory->layout().pool_bytes()}},
                                   .queue = node->queue.get(),
                                   .clock = &clock,
                                   .self = node->id};
  InstanceOptions instance{.id = node->id,
                           .name = node->name,
                           .role = role,
                           .order = o.conductor.remote_order(),
                           .stream_kv = o.stream_kv,
                           .reserve_blocks = o.conductor.reserve_blocks,
                           .lease_s = o.lease_s,
                           .cache_log = node->log,
                           .log = o.conductor.log};
  instance.engine = {.policy = find_batch_policy("chunked"),
                     .max_batch = o.max_batch,
                     .step_tokens = o.step_tokens,
                     .speculation = o.speculation};
  node->instance = std::make_unique<Instance>(std::move(instance), make_checksum_model(), std::move(memory),
                                              o.transport(transport), clock, *this);
  nodes[node->id] = node;
  conductor_->joined(node->instance->info(), std::make_shared<Probe>(node));
  return node;
}

void SimCluster::add_all(const std::string& topology) {
  const std::vector<Role> roles = parse_topology(topology).value();
  for (Role role : roles) add(role);
}

void SimCluster::crash(InstanceId id, bool noticed) {
  NodePtr node = nodes.at(id);
  nodes.erase(id);  // first, so that nobody hears of its end
  node->instance.reset();
  if (noticed) conductor_->left(id, "its connection broke");
}

// Messages between two stay in order, as on a connection.
void SimCluster::send(InstanceId from, InstanceId to, Message message) {
  if (from != kConductor && !nodes.contains(from)) return;  // it crashed: its last messages are lost
  double when = due ? due(from, to, message) : clock.seconds;
  if (when < 0) return;
  double& last = last_due_s_[{from, to}];
  last = when = std::max(when, last);
  letters_.insert({when, ++letter_, from, to, std::move(message)});
}

void SimCluster::tick() {
  constexpr double kReadsLate = 0.02;
  clock.seconds += 0.001;
  const bool stopped = clock.seconds < conductor_stopped_until_s;
  while (!letters_.empty() && letters_.begin()->due_s <= clock.seconds) {
    Letter letter = std::move(letters_.extract(letters_.begin()).value());
    if (stopped && letter.to == kConductor) {
      letter.due_s = conductor_stopped_until_s + kReadsLate;
      last_due_s_[{letter.from, letter.to}] = letter.due_s;
      letters_.insert(std::move(letter));
      continue;
    }
    if (letter.to == kConductor) {
      conductor_->receive(letter.from, std::move(letter.message));
    } else if (auto found = nodes.find(letter.to); found != nodes.end()) {
      found->second->instance->send(letter.from, std::move(letter.message));
    }
  }
  if (ticks_++ % 10 == 0 && !stopped) conductor_->tick();
  std::vector<NodePtr> now;
  for (auto& [id, node] : nodes) now.push_back(node);
  for (auto& node : now) {
    if (clock.seconds < node->stopped_until_s) continue;
    if (node->zombie_turns > 0) --node->zombie_turns;
    node->instance->renew_leases();
    if (clock.seconds < node->busy_until_s) continue;
    const int64_t steps = node->instance->stats().steps;
    node->instance->turn();
    if (node->instance->stats().steps > steps) node->busy_until_s = clock.seconds + node->step_s;
  }
}

SimCluster::Node* SimCluster::find(const std::string& name) {
  for (auto& [id, node] : nodes)
    if (node->name == name) return node.get();
  return nullptr;
}

std::string SimCluster::check_memory(bool at_rest) const {
  for (const auto& [id, node] : nodes) {
    node->instance->check_invariants();
    if (!at_rest) continue;
    const KvStats kv = node->instance->memory().stats();
    if (!node->instance->idle()) return node->name + " is not idle";
    if (kv.free + kv.cached != kv.capacity)
      return node->name + " leaks " + std::to_string(kv.capacity - kv.free - kv.cached) + " blocks, " +
             std::to_string(kv.in_transfer) + " in transfer";
    if (kv.reserved_blocks != 0) return node->name + " keeps reserved blocks for nobody";
    const PlacedLoad load = conductor_->look([of = id](const ClusterState& cluster) {
      const Member* member = cluster.find(of);
      return member ? member->load : PlacedLoad{};
    });
    if (load.queued_requests || load.queued_tokens || load.sequences)
      return node->name + " has load that nobody placed";
  }
  return "";
}

const char* message_name(const Message& message) {
  // clang-format off
  static const char* const kNames[] = {
      "StartRequest", "AbortAttempt", "PeerJoined", "PeerGone", "TokenOf", "AttemptProgress", "AttemptFailed",
      "Report", "PrefillJob", "ReserveKv", "KvReserved", "KvDelivered", "ReservationCancelled", "KvOffered",
      "KvTaken", "KvRenewed", "ClearPrefixCache", "Welcome", "Retire", "JoinRequest", "Joined",
      "LeaveRequest", "CacheReport", "FetchKv", "KvLent", "FetchOver", "CopyKv"};
  // clang-format on
  static_assert(std::size(kNames) == std::variant_size_v<Message>);
  return kNames[message.index()];
}

}  // namespace xpyd::testing
