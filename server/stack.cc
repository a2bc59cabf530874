#include "server/stack.h"

#include <algorithm>
#include <ctime>
#include <limits>
#include <sstream>
#include <thread>

#include "allocator/kv_plan.h"
#include "base/log.h"
#include "base/peak.h"
#include "base/version.h"
#include "batch/admission.h"
#include "model/folder.h"
#include "server/local_workers.h"

namespace xpyd {
namespace {

StreamKv stream_kv(const std::string& name) {
  return name == "layer" ? StreamKv::layer : name == "chunk" ? StreamKv::chunk : StreamKv::request;
}

KvShare kv_share(const std::string& name) {
  return name == "alias"      ? KvShare::alias
         : name == "takeover" ? KvShare::takeover
         : name == "copy"     ? KvShare::copy
                              : KvShare::off;
}

// Whether the model can be cut as the options say, for the roles that there are. Colocated
// instances take the prefill ones.
Status check_ranks(const Options& options, const ClusterOptions& cluster, const ModelConfig& config) {
  // A worker is told the options of the whole cluster.
  bool decodes = options.values().contains("role");
  for (Role role : cluster.topology) {
    const std::string side = role == Role::decode ? "--decode" : "--prefill";
    decodes = decodes || role == Role::decode;
    const KvShards shards = cluster.shards(role);
    if (Status status = check_model_shards(config, shards, side + "-tp", side + "-pp"); !status) return status;
    if (shards.n_ranks() > 1 && options.text("device") != "cpu")
      return invalid(side + "-tp " + std::to_string(shards.tp) + ", " + side + "-pp " + std::to_string(shards.pp) +
                     ": only --device cpu has more than one rank");
  }
  for (const char* name : {"decode-tp", "decode-pp"})
    if (!decodes && options.integer(name) > 1)
      return invalid(std::string("--") + name + " " + std::to_string(options.integer(name)) + ": --topology " +
                     options.text("topology") +
                     " has no decode instance; colocated instances take --prefill-tp and "
                     "--prefill-pp");
  return ok();
}

// What one of so many instances on this machine can do at most.
Result<Rates> instance_rates(const Options& options, size_t n_instances) {
  if (const auto peak = find_device(options.text("device"))->peak) {
    Result<DevicePeak> measured = peak();
    if (!measured) return measured.error();
    return measured.value().rates;
  }
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  size_t threads = size_t(options.integer("threads"));
  if (threads == 0) threads = std::max<size_t>(1, cores / n_instances);
  ThreadTeam team(int(std::min(threads, cores)));
  const PeakRow peak = cached_peak(team).all;
  return Rates{1e9 * peak.fma_gflops, 1e9 * peak.read_gbps};
}

}  // namespace

Role role_of(const std::string& name) {
  return name == "prefill" ? Role::prefill : name == "decode" ? Role::decode : Role::colocated;
}

std::string model_dir(const Options& options) {
  return options.positional().empty() ? kDemoModel : options.positional()[0];
}

Result<std::unique_ptr<Stack>> prepare_stack(const Options& options) {
  const auto has = [&](const char* name) { return options.values().contains(name); };
  const bool worker = has("role");
  Result<std::vector<Role>> topology = parse_topology(worker ? "1C" : options.text("topology"));
  if (!topology) return topology.error();

  auto stack = std::make_unique<Stack>();
  stack->model_dir = model_dir(options);
  const std::string& dir = stack->model_dir;
  const bool dummy = options.text("load-format") == "dummy";
  if (Status status = check_model_folder(dir, !dummy); !status) return status.error();
  Result<ModelConfig> config = load_model_config(dir);
  if (!config) return config.error();
  stack->config = config.value();
  if (!dummy || has_model_file(dir + "/tokenizer.json")) {
    Result<std::unique_ptr<const Tokenizer>> tokenizer = Tokenizer::load(dir);
    if (!tokenizer) return tokenizer.error();
    stack->tokenizer = std::move(tokenizer).value();
    if (stack->tokenizer->vocab_size() > stack->config.vocab)
      return invalid(dir + "/tokenizer.json has ids up to " + std::to_string(stack->tokenizer->vocab_size() - 1) +
                     ", config.json's vocab_size is " + std::to_string(stack->config.vocab));
    if (const std::string& name = options.text("chat-template"); name != "none") {
      auto chat = ChatTemplate::load(name, dir, [] { return int64_t{std::time(nullptr)}; });
      if (!chat) return chat.error();
      stack->chat_template = std::move(chat).value();
    }
  }
  stack->max_model_len = stack->config.max_position;
  if (int64_t wanted = options.integer("max-model-len"); wanted > 0) {
    if (wanted > stack->config.max_position)
      return invalid("--max-model-len " + std::to_string(wanted) + " exceeds the model's " +
                     std::to_string(stack->config.max_position));
    stack->max_model_len = int(wanted);
  }
  ClusterOptions& cluster = stack->options;
  cluster.topology = topology.value();
  if (worker) cluster.topology = {role_of(options.text("role"))};
  cluster.kv_scheme = find_kv_scheme(options.text("allocator"));
  cluster.kv.order = options.text("kv-layout") == "token_major" ? KvOrder::token_major : KvOrder::layer_major;
  cluster.kv.pool_bytes = size_t(options.integer("kv-bytes"));
  cluster.kv.block_tokens = int(options.integer("block-tokens"));
  cluster.kv.prefix_cache = options.text("prefix-cache") == "on";
  cluster.kv.vattention.page_group_bytes = page_group_bytes(options);
  cluster.kv.vattention.on_card = options.text("device") != "cpu";
  cluster.kv.pool_in_groups = options.text("kv-backing") == "groups";
  cluster.kv.vattention.page_call_us = options.number("page-op-us");
  cluster.kv.vattention.map_ahead = options.text("kv-map-ahead") == "on";
  cluster.kv.vattention.guard = options.text("kv-guard") == "on";
  cluster.kv.vattention.share = kv_share(options.text("kv-share"));
  cluster.kv.n_memories = int(cluster.topology.size());
  cluster.kv.tiers = {.host_bytes = size_t(options.integer("host-kv-bytes")),
                      .disk_dir = options.text("disk-kv-dir"),
                      .disk_bytes = size_t(options.integer("disk-kv-bytes")),
                      .block_tokens = int(options.integer("tier-block-tokens")),
                      .copy_gbps = options.number("kv-copy-gbps"),
                      .wait_for_copies = options.text("kv-copy-wait") == "on",
                      .host_eviction = options.text("host-eviction"),
                      .disk_eviction = options.text("disk-eviction")};
  cluster.batching = find_batch_policy(options.text("batching"));
  cluster.admission = find_admission_rule(options.text("admit"));
  if (!worker) {
    cluster.placement = find_placement_policy(options.text("placement"));
    cluster.disagg = find_disagg_policy(options.text("disagg"));
    cluster.disagg_options = {.pull = options.text("kv-transfer") == "pull",
                              .max_local_prefill_tokens = int(options.integer("max-local-prefill")),
                              .max_prefill_queue = int(options.integer("max-prefill-queue")),
                              .first_generation = options.text("disagg-generation") == "0.1"};
  }
  // Processes share no memory unless the wire makes it so.
  const bool processes = worker || options.flag("processes");
  const std::string wire = processes && !options.given("transport") ? "shm" : options.text("transport");
  Result<TransportChoice> choice = parse_transport(wire);
  if (!choice) return invalid("--transport: " + choice.error().message);
  cluster.transport = choice.value().row;
  cluster.faults = choice.value().faults;
  if (processes && !cluster.transport->leaves_process)
    return invalid("--transport " + wire + " stays within one process: expected, with processes, " +
                   "one of those that leave it");
  if (cluster.transport->shared_pool && cluster.disagg_options.pull)
    return invalid("--kv-transfer pull: --transport " + wire + " hands blocks over, and reads none");
  std::istringstream nics(options.text("rdma-nics"));
  for (std::string nic; std::getline(nics, nic, ',');) cluster.nics.push_back(nic);
  if (!worker && std::string(cluster.disagg->name) == "conditional_cost") {
    Result<Rates> rates = instance_rates(options, cluster.topology.size());
    if (!rates) return rates.error();
    const Dtype dtype = find_dtype(options.text("dtype"));
    cluster.prior = CostPrior{{stack->config, dtype, dtype, find_dtype(options.text("kv-dtype"))}, rates.value()};
  }
  cluster.kv_checksum = options.text("kv-checksum") == "on";
  cluster.stream_kv = stream_kv(options.text("stream-kv"));
  cluster.max_batch = int(options.integer("max-batch"));
  cluster.step_tokens = int(options.integer(cluster.batching->chunks ? "chunk-tokens" : "max-step-tokens"));
  cluster.max_model_len = stack->max_model_len;
  cluster.vocab = stack->config.vocab;
  cluster.max_queue_bytes = options.integer("max-queue-bytes");
  cluster.ahead = options.text("async-scheduling") == "on";
  cluster.eos_tokens = stack->config.eos_tokens;
  cluster.tokenizer = stack->tokenizer.get();
  cluster.seed = uint64_t(options.integer("seed"));
  cluster.kv.shape = kv_shape(stack->config, find_dtype(options.text("kv-dtype")));
  cluster.prefill_tp = int(options.integer("prefill-tp"));
  cluster.prefill_pp = int(options.integer("prefill-pp"));
  cluster.decode_tp = int(options.integer("decode-tp"));
  cluster.decode_pp = int(options.integer("decode-pp"));
  if (Status status = check_ranks(options, cluster, stack->config); !status) return status.error();
  if (Status status = check_shared_pool(cluster, processes); !status) return status.error();
  if (worker) {  // it keeps its ranks when it is given another role
    const KvShards own = cluster.shards(cluster.topology[0]);
    cluster.prefill_tp = cluster.decode_tp = own.tp;
    cluster.prefill_pp = cluster.decode_pp = own.pp;
  }
  // Without --max-model-len the context is what one pool holds, if that is less than the model's.
  if (!cluster.kv_scheme->whole_slots) {
    cluster.kv.max_sequence_tokens = stack->max_model_len;
    cluster.kv.vattention.max_sequences = max_sequences(cluster.max_batch);
    int64_t holds = std::numeric_limits<int64_t>::max();
    for (Role role : cluster.topology) {
      Result<PoolPlan> plan = plan_ranks(cluster.kv_scheme->name, cluster.kv, cluster.shards(role));
      if (!plan) return plan.error();
      const KvLayout& blocks = plan.value().whole;
      holds = std::min(holds, int64_t(blocks.n_blocks) * blocks.block_tokens);
    }
    if (holds < stack->max_model_len) {
      if (options.integer("max-model-len") > 0)
        return invalid("--max-model-len " + std::to_string(stack->max_model_len) + ": --kv-bytes holds " +
                       std::to_string(holds) + " tokens");
      log_line(LogLevel::warning, "xpyd: --kv-bytes holds %d tokens: --max-model-len is %d, the model's is %d",
               int(holds), int(holds), stack->max_model_len);
      stack->max_model_len = cluster.max_model_len = int(holds);
    }
  }
  return stack;
}

Status open_backend(Stack& stack, const Options& options) {
  ClusterOptions& cluster = stack.options;
  std::vector<KvShards> shards;
  for (Role role : cluster.topology) shards.push_back(cluster.shards(role));
  BackendOptions backend{.options = options,
                         .model_dir = stack.model_dir,
                         .config = stack.config,
                         .n_instances = int(cluster.topology.size()),
                         .shards = std::move(shards),
                         .max_step_tokens = std::max(cluster.step_tokens, cluster.max_batch),
                         .max_batch = cluster.max_batch,
                         .max_model_len = stack.max_model_len};
  Result<std::unique_ptr<Backend>> opened = find_device(options.text("device"))->open(backend);
  if (!opened) return opened.error();
  stack.backend = std::move(opened).value();
  cluster.device = &stack.backend->device();
  cluster.make_model = [&backend = *stack.backend](int i, DeviceQueue& queue) { return backend.make_model(i, queue); };
  return ok();
}

uint64_t fingerprint(const Stack& stack) {
  const ClusterOptions& o = stack.options;
  std::string text = std::string(version()) + " " + stack.config.name + " " + std::to_string(stack.config.vocab) + " " +
                     std::to_string(stack.max_model_len) + " " + o.transport->name;
  const KvShape& s = o.kv.shape;
  for (int n : {s.n_layers, s.n_kv_heads, s.head_dim, int(s.dtype)}) text += " " + std::to_string(n);
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
  return hash;
}

Result<std::unique_ptr<Stack>> build_stack(const Options& options) {
  Result<std::unique_ptr<Stack>> prepared = prepare_stack(options);
  if (!prepared) return prepared.error();
  Stack& stack = *prepared.value();
  if (options.flag("processes")) {
    const auto open = find_device(options.text("device"))->alone;
    if (open && stack.options.transport->shared_pool) {
      Result<std::unique_ptr<Device>> device = open();
      if (!device) return device.error();
      stack.pool_device = std::move(device).value();
      stack.options.device = stack.pool_device.get();
    }
    Result<std::unique_ptr<Runtime>> cluster = make_local_workers(stack, options);
    if (!cluster) return cluster.error();
    stack.runtime = std::move(cluster).value();
    return prepared;
  }
  if (Status opened = open_backend(stack, options); !opened) return opened.error();
  Result<std::unique_ptr<Cluster>> built = Cluster::create(stack.options, stack.clock);
  if (!built) return built.error();
  stack.cluster = built.value().get();
  stack.runtime = std::move(built).value();
  return prepared;
}

}  // namespace xpyd
