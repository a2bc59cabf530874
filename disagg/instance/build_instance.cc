// Builds an instance part by part: inherited memory, stages, memory, model, transport.
#include "allocator/kv_pool.h"
#include "allocator/offload/offloaded_memory.h"
#include "allocator/schemes.h"
#include "disagg/chunked_pp/far_kv.h"
#include "disagg/conductor/event_log.h"
#include "disagg/instance/cluster.h"

namespace xpyd::disagg {
namespace {

// Returns what an instance of this role can inherit, always with a name and a queue. The rest is destroyed here, which
// frees its ports and files.
InstanceMemory take_over(InstanceMemory left, const ClusterOptions& o, const Welcome& as) {
  InstanceMemory own;
  if (left.pool && left.role == as.role && left.local == as.local && bool(left.cache_log) == as.report_cache)
    own = std::move(left);
  { const InstanceMemory gone = std::move(left); }
  own.role = as.role, own.local = as.local;
  if (!own.name) own.name = std::make_shared<std::string>();
  *own.name = as.name;
  if (!own.queue)
    own.queue = o.device->make_queue(as.role == Role::prefill  ? Device::Phase::prefill
                                     : as.role == Role::decode ? Device::Phase::decode
                                                               : Device::Phase::both);
  return own;
}

KvOptions memory_options(const ClusterOptions& o, const InstanceMemory& own, bool shared_pool, Clock& clock) {
  KvOptions kv = kv_options(o);
  kv.queue = own.queue.get();
  kv.clock = &clock;
  if (o.transport->pool_device) {
    if (o.device != &cpu_device())
      throw invalid(std::string("--transport ") + o.transport->name +
                    ": KV must be in host memory, but --device has its own memory");
    kv.device = &o.transport->pool_device();
  }
  if (shared_pool) kv.pool_bytes *= size_t(kv.n_memories);
  if (o.log) {
    kv.tiers.stores = [log = o.log, name = own.name](const StoredBlocks& s) {
      log->happened("store", StoreTrace{*name, s.begin_s, s.end_s - s.begin_s, s.blocks, double(s.bytes)});
    };
    kv.tiers.evicts = [log = o.log, name = own.name, &clock](const EvictionPolicy& policy,
                                                             std::span<const BlockUse> first) {
      log->decided(clock.now(), "evict", policy.name, 0, first, NoOptions{}, 0, "instance", *name);
    };
  }
  return kv;
}

// Makes the stages that are processes, on this host or others.
std::unique_ptr<ranks::RemotePipeline> make_pipeline(const ClusterOptions& o, const Welcome& as, const PoolPlan& plan,
                                                     Clock& clock) {
  ranks::HeadOptions head = *o.ranks;
  head.window = o.pipeline_window;
  head.step_tokens = std::max(o.step_tokens, o.max_batch);
  head.max_logits = o.max_batch;
  if (head.far && as.role == Role::decode)
    throw invalid(
        "--ranks remote: other instances cannot send KV to stages on other hosts: expected --role prefill or "
        "colocated");
  if (head.far && as.role == Role::prefill && as.order == DisaggOrder::pull)
    throw invalid(
        "--ranks remote: other instances cannot read KV from stages on other hosts: expected --kv-transfer push");
  head.instance = as.id;
  head.silence_s = std::max(head.silence_s, as.lease_s);
  head.transport = o.transport;
  head.transport_host = o.transport_host;
  return need(ranks::RemotePipeline::make(std::move(head), plan, clock));
}

// Adds the listeners of block changes. `pool` is null if the instance has a pool of its own.
void add_listeners(const ClusterOptions& o, const Welcome& as, int model_index, const PoolPlan& plan, KvPool* pool,
                   KvOptions& kv, InstanceMemory& own) {
  if (as.report_cache && !pool) {
    kv.listeners.push_back(own.cache_log = std::make_shared<PrefixLog>());
    if (kv.tiers.block_tokens == plan.whole.block_tokens)
      kv.tiers.listeners.push_back(own.cache_log);  // otherwise the hashes differ
  }
  if (o.kv_events.endpoint.empty()) return;
  KvEventsOptions to = o.kv_events;
  to.rank += model_index;
  own.events = need(KvEvents::open(to));
  kv.listeners.push_back(own.events);
  kv.tiers.listeners.push_back(own.events);
  if (pool && model_index == 0) pool->tell(own.events);  // threads publish a shared pool once
}

// Makes the memory over `pool`, or over a new pool. The instance can leave the new pool unless stages hold it.
void make_memory(const ClusterOptions& o, const KvShards& shards, const KvOptions& kv, std::shared_ptr<KvPool> pool,
                 bool of_stages, InstanceMemory& own) {
  if (!pool) {
    pool = need(make_ranked_pool(o.kv_scheme->name, kv, shards), "--kv-bytes: ");
    for (const auto& listener : kv.listeners) pool->tell(listener);
    if (!of_stages) own.pool = pool;
  }
  std::unique_ptr<KvMemory> memory = o.kv_scheme->make(std::move(pool), kv);
  if (o.kv.tiers.on() || !o.kv.tiers.disk_dir.empty()) memory = need(make_offloaded(std::move(memory), kv));
  own.memory = std::move(memory);
}

// `far`: the stages on other hosts that hold the KV; null: it is here.
std::unique_ptr<KvTransport> make_transport(const ClusterOptions& o, const Welcome& as, const InstanceMemory& own,
                                            ranks::RemotePipeline* far, Clock& clock) {
  std::vector<MemoryRange> regions;  // one for each rank
  for (int rank = 0; rank < own.memory->n_ranks(); ++rank) {
    KvLayout layout = own.memory->layout();
    layout.shape = rank_shape(layout.shape, o.shards(as.role), rank);
    regions.push_back({own.memory->base(rank), layout.pool_bytes()});
  }
  const TransportOptions transport_options{.regions = std::move(regions),
                                           .queue = own.queue.get(),
                                           .clock = &clock,
                                           .self = as.id,
                                           .host = o.transport_host,
                                           .nics = o.nics};
  std::unique_ptr<KvTransport> transport = need(o.transport->make(transport_options), "--transport: ");
  if (far) transport = ranks::make_far_transport(std::move(transport), *far, transport_options);
  return transport;
}

InstanceOptions instance_options(const ClusterOptions& o, const Welcome& as, bool far) {
  InstanceOptions options{.id = as.id,
                          .name = as.name,
                          .role = as.role,
                          .order = as.order,
                          .stream_kv = o.stream_kv,
                          .reserve_blocks = o.reserve_blocks,
                          .cost = first_cost(o.prior),
                          .lease_s = as.lease_s,
                          .post_by_stage = far,
                          .log = o.log};
  options.engine = {.policy = o.batching,
                    .admission = o.admit,
                    .max_batch = o.max_batch,
                    .step_tokens = o.step_tokens,
                    .chunks = o.chunks,
                    .ahead = o.ahead,
                    .eos_tokens = o.eos_tokens,
                    .tokenizer = o.tokenizer};
  const bool leaves = as.role == Role::prefill;  // its sequences leave with their first token
  if (!leaves) options.engine.speculation = o.speculation;
  return options;
}

}  // namespace

Result<BuiltInstance> build_instance(const ClusterOptions& o, const Welcome& as, int model_index,
                                     std::shared_ptr<KvPool> pool, Clock& clock, MessageBus& bus,
                                     InstanceMemory left) try {
  BuiltInstance built{.memory = take_over(std::move(left), o, as)};
  InstanceMemory& own = built.memory;
  KvOptions kv = memory_options(o, own, pool != nullptr, clock);
  const KvShards shards = o.shards(as.role);
  const PoolPlan plan = need(plan_ranks(o.kv_scheme->name, kv, shards));
  std::unique_ptr<ranks::RemotePipeline> pipeline;
  if (o.ranks && shards.pp > 1) {
    pipeline = make_pipeline(o, as, plan, clock);
    kv.rank_memory = pipeline->kv_memory();
  }
  ranks::RemotePipeline* const far = pipeline && pipeline->far() ? pipeline.get() : nullptr;
  if (far) {
    own.queue = std::make_unique<ranks::FarQueue>(*far);
    kv.queue = own.queue.get();
  }
  if (!own.memory) {
    add_listeners(o, as, model_index, plan, pool.get(), kv, own);
    make_memory(o, shards, kv, std::move(pool), pipeline != nullptr, own);
  } else if (own.cache_log) {
    own.cache_log->begin_anew();  // the new conductor knows nothing of the cache
  }
  InstanceOptions options = instance_options(o, as, far != nullptr);
  options.cache_log = own.cache_log;
  std::unique_ptr<Model> model = std::move(pipeline);
  if (!model) {
    model = need(o.make_model(model_index, *own.queue));
    if (o.peak_flops) options.peak_tflops = 1e-12 * o.peak_flops(model_index);
  }
  std::unique_ptr<KvTransport> transport = make_transport(o, as, own, far, clock);
  built.instance = std::make_unique<Instance>(std::move(options), std::move(model), own.memory, std::move(transport),
                                              clock, bus);
  return built;
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::disagg
