#include "disagg/instance/cluster.h"

#include <algorithm>
#include <chrono>

#include "allocator/schemes.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

Result<std::vector<Role>> parse_topology(const std::string& text, int most) {
  auto error = [&](const char* why) {
    return invalid("--topology " + text + ": " + why + "; expected a form such as 1C, 1P1D, 2P3D or 2C1P1D");
  };
  int counts[3] = {0, 0, 0};  // C, P, D
  for (size_t i = 0; i < text.size();) {
    size_t digits = 0;
    int n = 0;
    while (i < text.size() && text[i] >= '0' && text[i] <= '9' && digits < 4) {
      n = n * 10 + (text[i++] - '0');
      ++digits;
    }
    if (digits == 0 || i == text.size()) return error("expected a number before each letter");
    size_t kind = std::string("CPD").find(text[i++]);
    if (kind == std::string::npos) return error("expected the letters C, P and D only");
    if (n < 1 || n > most || counts[kind] != 0)
      return error(("expected each letter once, with 1 to " + std::to_string(most) + " instances").c_str());
    counts[kind] = n;
  }
  if (text.empty()) return error("it is empty");
  if ((counts[1] == 0) != (counts[2] == 0)) return error("P and D need each other");
  std::vector<Role> roles;
  constexpr Role kinds[] = {Role::colocated, Role::prefill, Role::decode};
  for (int kind = 0; kind < 3; ++kind) roles.insert(roles.end(), size_t(counts[kind]), kinds[kind]);
  return roles;
}

KvOptions kv_options(const ClusterOptions& o) {
  KvOptions kv = o.kv;
  kv.max_sequence_tokens = o.max_model_len;
  kv.vattention.max_sequences = max_sequences(o.max_batch);
  kv.device = o.device;
  return kv;
}

ConductorOptions conductor_options(const ClusterOptions& o) {
  ConductorOptions conductor = o;
  conductor.zero_copy = o.transport->shared_pool;
  if (o.fetch->fetches && o.prior)  // a local copy is the lower bound of any transport
    conductor.fetch_s_per_token = 2 * double(o.kv.shape.token_bytes()) / o.prior->rates.bytes_per_s;
  return conductor;
}

Status check_shared_pool(const ClusterOptions& o) {
  if (!o.transport->shared_pool || o.topology.size() < 2) return ok();
  const KvShards shards = o.shards(o.topology[0]);
  const auto ranks = [](const KvShards& s) { return "tp " + std::to_string(s.tp) + ", pp " + std::to_string(s.pp); };
  for (Role role : o.topology)
    if (const KvShards others = o.shards(role); others != shards)
      return invalid(
          std::string("--transport ") + o.transport->name + ": one instance has " + ranks(shards) + ", another one " +
          ranks(others) +
          ", so the layout of a block differs: expected equal ranks on one pool, or a transport that copies");
  if (o.kv_scheme->contiguous)
    return invalid("--allocator " + std::string(o.kv_scheme->name) + ": --transport " + o.transport->name +
                   " hands over tables of blocks: expected --allocator paged, or a transport that copies");
  return ok();
}

std::string instance_name(Role role, int index) {
  const char* letter = role == Role::prefill ? "P" : role == Role::decode ? "D" : "C";
  return letter + std::to_string(index);
}

std::vector<std::string> instance_names(const std::vector<Role>& topology) {
  std::vector<std::string> names;
  int counts[3] = {0, 0, 0};
  for (Role role : topology) names.push_back(instance_name(role, counts[int(role)]++));
  return names;
}

Cluster::Cluster(const ClusterOptions& options, Clock& clock) : conductor_(conductor_options(options), clock, *this) {}

Result<std::unique_ptr<Cluster>> Cluster::create(ClusterOptions o, Clock& clock) try {
  auto cluster = std::unique_ptr<Cluster>(new Cluster(o, clock));
  const size_t n = o.topology.size();
  o.kv.n_memories = int(n);
  need(check_shared_pool(o));
  std::shared_ptr<KvPool> shared_pool;
  if (o.transport->shared_pool && n > 1) {
    KvOptions pool_options = kv_options(o);
    pool_options.pool_bytes *= n;
    const KvShards shards = o.shards(o.topology[0]);
    need(plan_ranks(o.kv_scheme->name, pool_options, shards));
    shared_pool = need(make_ranked_pool(o.kv_scheme->name, pool_options, shards), "--kv-bytes: ");
  }

  const std::vector<std::string> names = instance_names(o.topology);
  for (size_t i = 0; i < n; ++i) {
    const Role role = o.topology[i];
    const Welcome as{.id = cluster->conductor_.new_id(),
                     .name = names[i],
                     .role = role,
                     .local = o.disagg->stays != nullptr,
                     .order = conductor_options(o).remote_order()};
    BuiltInstance built = need(build_instance(o, as, int(i), shared_pool, clock, *cluster));
    cluster->memories_.push_back(std::move(built.memory));
    cluster->instances_.push_back(std::move(built.instance));
  }
  for (auto& instance : cluster->instances_)
    cluster->conductor_.joined(instance->info(), std::make_shared<LocalProbe>(*instance));
  return cluster;
} catch (const Error& error) {
  return error;
}

Cluster::~Cluster() { stop(); }

void Cluster::send(InstanceId from, InstanceId to, Message message) {
  if (to == kConductor) return conductor_.receive(from, std::move(message));
  instances_[size_t(to)]->send(from, std::move(message));
}

Status Cluster::start() {
  for (size_t i = 0; i < instances_.size(); ++i) threads_.emplace_back([this, i] { instances_[i]->run(stop_); });
  threads_.emplace_back([this] {
    std::unique_lock lock(stop_mutex_);
    while (!stopping_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stop_.load(); }))
      conductor_.tick();
  });
  return ok();
}

void Cluster::clear_prefix_caches() {
  for (auto& instance : instances_) instance->memory().clear_prefix_cache();
}

bool Cluster::turn() {
  bool moved = false;
  conductor_.tick();
  for (auto& instance : instances_) moved |= instance->turn();
  return moved;
}

void Cluster::stop() {
  drain();
  {
    std::lock_guard lock(stop_mutex_);
    stop_.store(true);
    stopping_.notify_all();
  }
  for (auto& instance : instances_) instance->poke();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (auto& instance : instances_) instance->shut_down(FinishReason::abort, "the server was stopped");
  conductor_.end_all("the server was stopped");
}

}  // namespace xpyd::disagg
