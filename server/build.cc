#include "server/build.h"

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <limits>
#include <thread>
#include <utility>

#include "allocator/schemes.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/numbers.h"
#include "base/peak/peak.h"
#include "base/version.h"
#include "disagg/conductor/event_log.h"
#include "model/folder.h"
#include "model/gemm/gemm.h"
#include "server/workers/local_workers.h"
#include "server/workers/rank_processes.h"

namespace xpyd::server {
namespace {

// A worker has a role and no topology.
bool is_worker(const Options& options) { return options.values().contains("role"); }

// Checks that the model can be sharded as the options say, for the roles of the topology. Colocated instances use the
// prefill shards.
void check_ranks(const Build& build) {
  const ClusterOptions& cluster = build.options;
  for (Role role : cluster.topology) {
    const std::string side = role == Role::decode ? "--decode" : "--prefill";
    const KvShards shards = cluster.shards(role);
    need(check_model_shards(build.config, shards, side + "-tp", side + "-pp"));
    if (shards.n_ranks() > 1 && cluster.kv.vattention.on_card)
      throw invalid(side + "-tp " + std::to_string(shards.tp) + ", " + side + "-pp " + std::to_string(shards.pp) +
                    ": more than one rank needs --device cpu");
  }
}

// Peak rates of one of n_instances on this machine, measured in about 50 ms.
Rates instance_rates(const BackendOptions& options, size_t n_instances) {
  if (options.device->peak) return need(options.device->peak()).rates;
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  auto threads = size_t(options.threads);
  if (threads == 0) threads = std::max<size_t>(1, cores / n_instances);
  ThreadTeam team(int(std::min(threads, cores)));
  PeakProbe probe(size_t(64) << 20);
  probe.read_gbps(team);  // a first pass warms up
  return {1e9 * probe.fma_gflops(team), 1e9 * probe.read_gbps(team)};
}

// The properties of the weights that KV depends on.
std::string weights_text(const Build& build) {
  const LoadOptions& load = build.backend_options.load;
  const Dtype dtype = matrix_dtype(build.config, load);
  const GemmVariant* gemm = build.backend_options.kernels.gemm;
  const GemmVariant& row = gemm ? *gemm : default_gemm();
  const bool bf16 = (dtype == Dtype::bf16 || load.dtype == Dtype::bf16) && row.needs == Isa::avx512_bf16;
  const bool codes = dtype == Dtype::int8 || dtype == Dtype::int4, rounds = !row.exact() && (codes || bf16);
  return dtype_name(dtype) + (load.weight_group > 0 ? " of " + std::to_string(load.weight_group) : "") +
         (load.dtype != dtype ? std::string(" beside ") + dtype_name(load.dtype) : "") + (rounds ? ", rounded" : "") +
         (rounds && codes ? " to " + std::to_string(row.activation_bits(dtype)) + " bits" : "");
}

// Checks that the model has a head, if drafts come from it.
void read_drafter(Build& build) {
  const ClusterOptions& cluster = build.options;
  if (!cluster.speculation.on() || !cluster.speculation.drafter->uses_head) return;
  const std::string name = std::string("--speculate ") + cluster.speculation.drafter->name;
  if (std::string(build.backend_options.device->name) != "cpu") throw invalid(name + ": expected --device cpu");
  need(predict_next_tokens(build.config), name + ": ");
  if (cluster.prefill_pp > 1 || cluster.decode_pp > 1)
    throw invalid(name + ": expected --prefill-pp 1 and --decode-pp 1");
}

// Reads the model's configuration, tokenizer and chat template.
void read_model(const Options& options, Build& build) {
  const bool dummy = build.backend_options.load.dummy;
  build.model_dir = model_dir(options);
  const std::string& dir = build.model_dir;
  need(check_model_folder(dir));
  build.config = need(load_model_config(dir));
  read_drafter(build);
  if (dummy && !has_model_file(dir + "/tokenizer.json")) return;
  build.tokenizer = need(Tokenizer::load(dir));
  if (build.tokenizer->vocab_size() > build.config.vocab)
    throw invalid(dir + "/tokenizer.json has token ids up to " + std::to_string(build.tokenizer->vocab_size() - 1) +
                  ", but config.json's vocab_size is " + std::to_string(build.config.vocab));
  if (const std::string& name = options.text("chat-template"); name != "none")
    build.chat_template = need(ChatTemplate::load(name, dir, [] { return int64_t{std::time(nullptr)}; }));
}

// Chooses the types of weights and KV and their kernels, within what device and allocator support.
void choose_numbers(const Options& options, Build& build) {
  BackendOptions& backend = build.backend_options;
  if (options.flag("exact")) {
    if (backend.kernels.gemm && !backend.kernels.gemm->exact())
      throw invalid(std::string("--exact: --gemm ") + backend.kernels.gemm->name + " rounds activations");
    if (!backend.kernels.gemm) backend.kernels.gemm = &default_gemm(true);
  }
  if (backend.expert_parallel != "off" && build.config.experts.count == 0)
    throw invalid("--expert-parallel " + backend.expert_parallel + ": model " + build.config.name + " has no experts");
  if (std::string(backend.device->name) == "cpu") return;
  if (backend.expert_parallel != "off")
    throw invalid("--expert-parallel " + backend.expert_parallel + ": --device " + backend.device->name +
                  " has one tensor rank, which holds every expert: expected off");
  if (const Dtype matrices = *backend.load.weight_dtype; matrices != backend.load.dtype)
    throw invalid(std::string("--weight-dtype ") + dtype_name(matrices) + ": --device " + backend.device->name +
                  " supports weight matrices of type --dtype only, here " + dtype_name(backend.load.dtype));
  if (const Dtype kv = build.options.kv.shape.dtype; kv != Dtype::f32 && kv != Dtype::bf16)
    throw invalid(std::string("--kv-dtype ") + dtype_name(kv) + ": --device " + backend.device->name +
                  " does not support it: expected f32 or bf16");
}

// Applies what follows from the model: vocabulary, KV shape, longest context.
void apply_model(Build& build) {
  ClusterOptions& cluster = build.options;
  cluster.vocab = build.config.vocab;
  cluster.eos_tokens = build.config.eos_tokens;
  cluster.tokenizer = build.tokenizer.get();
  cluster.kv.shape = kv_shape(build.config, cluster.kv.shape.dtype);
  if (cluster.max_model_len > build.config.max_position)
    throw invalid("--max-model-len " + std::to_string(cluster.max_model_len) + " exceeds the model's context of " +
                  std::to_string(build.config.max_position));
  if (cluster.max_model_len <= 0) cluster.max_model_len = build.config.max_position;
}

// Chooses the transport and checks that it suits the instances. Processes share memory only through a transport.
void choose_transport(const Options& options, Build& build) {
  ClusterOptions& cluster = build.options;
  const bool processes = build.processes = is_worker(options) || options.flag("processes") ||
                                           options.text("ranks") == "processes";
  if (processes && !options.given("transport")) cluster.transport = find_transport("shm");
  const std::string transport = cluster.transport->name;
  if (processes && !cluster.transport->leaves_process)
    throw invalid("--transport " + transport + " works within one process only: expected " +
                  "a transport that works between processes");
  if (cluster.kv.slot_chunk > 0 && cluster.transport->pool_device)
    throw invalid("--slot-prealloc: --transport " + transport +
                  " allocates the pool as a whole: expected --slot-prealloc all" +
                  (processes ? ", or --transport tcp" : ""));
  const std::string expected = std::string(": expected --transport ") + (processes ? "tcp" : "local or tcp");
  if (cluster.transport->pins_pool && cluster.kv_scheme->page_groups)
    throw invalid("--allocator " + std::string(cluster.kv_scheme->name) +
                  ": its page groups are mapped while it runs, and --transport " + transport +
                  " makes the pool known to its peers once" + expected);
  if (cluster.transport->shared_pool && cluster.disagg_options.pull)
    throw invalid("--kv-transfer pull: --transport " + transport + " hands blocks over and reads none: expected push");
  if (cluster.disagg_options.pull && cluster.disagg->remote(cluster.disagg_options) != DisaggOrder::pull)
    throw invalid("--kv-transfer pull: with --disagg " + std::string(cluster.disagg->name) +
                  " prefill instances write the KV: expected push");
}

// Checks that the allocator keeps blocks in a form that --kv-events and --prefix-cache can name.
void check_caches(const Build& build) {
  const ClusterOptions& cluster = build.options;
  const std::string scheme = cluster.kv_scheme->name;
  const bool tells = !cluster.kv_events.endpoint.empty();
  need(check_kv_events(cluster.kv_events));
  if (tells && !cluster.kv.tiers.on() && !(cluster.kv_scheme->prefix_index && cluster.kv.prefix_cache))
    throw invalid(
        "--kv-events: with these options no KV is kept for reuse: expected --prefix-cache blocks and --allocator "
        "paged, or --host-kv-bytes");
  if (!cluster.kv.radix) return;
  if (!cluster.kv_scheme->prefix_index)
    throw invalid("--prefix-cache radix: --allocator " + scheme +
                  " has no prefix blocks: expected paged, or --prefix-cache blocks");
  if (build.processes || tells)
    throw invalid(std::string("--prefix-cache radix: ") +
                  (build.processes ? "the conductor of worker processes" : "--kv-events") +
                  " needs hashes of blocks to name what is cached: expected --prefix-cache blocks" +
                  (build.processes ? ", or instances in one process" : ""));
}

// Checks that --decode-copies has instances, a sender and prefix caches. Workers may join later.
void check_copies(const Options& options, const ClusterOptions& cluster) {
  const std::string copies = "--decode-copies " + std::to_string(cluster.decode_copies) + ": ";
  if (cluster.decode_copies == 1) return;
  if (cluster.disagg->remote(cluster.disagg_options) == DisaggOrder::decode_first)
    throw invalid(copies + "with --disagg " + cluster.disagg->name +
                  " the prompt waits for one decode instance: expected prefill_first or conditional_tbt");
  if (cluster.transport->shared_pool)
    throw invalid(copies + "--transport " + cluster.transport->name +
                  " has one pool for all instances: expected a transport that copies");
  if (!cluster.kv_scheme->prefix_index || !cluster.kv.prefix_cache)
    throw invalid(copies + "a copy is kept in a prefix cache: expected --allocator paged with --prefix-cache blocks " +
                  "or radix");
  const auto decodes = std::ranges::count(cluster.topology, Role::decode);
  if (cluster.decode_copies > decodes && options.text("start-workers") != "off")
    throw invalid(copies + "--topology " + options.text("topology") + " has " + std::to_string(decodes) +
                  " decode instances: expected at least as many");
}

// Without --max-model-len the context is limited to what one pool holds.
void fit_context(ClusterOptions& cluster, int wanted_len) {
  if (cluster.kv_scheme->whole_slots) return;
  cluster.kv.max_sequence_tokens = cluster.max_model_len;
  cluster.kv.vattention.max_sequences = max_sequences(cluster.max_batch);
  int64_t holds = std::numeric_limits<int64_t>::max();
  for (Role role : cluster.topology) {
    const KvLayout blocks = need(plan_ranks(cluster.kv_scheme->name, cluster.kv, cluster.shards(role))).whole;
    holds = std::min(holds, int64_t(blocks.n_blocks) * blocks.block_tokens);
  }
  if (holds >= cluster.max_model_len) return;
  if (wanted_len > 0)
    throw invalid("--max-model-len " + std::to_string(wanted_len) + ": --kv-bytes holds only " + std::to_string(holds) +
                  " tokens");
  log_line(LogLevel::warning,
           "xpyd: --kv-bytes holds only %d tokens, so --max-model-len is %d instead of the model's %d", int(holds),
           int(holds), cluster.max_model_len);
  cluster.max_model_len = int(holds);
}

}  // namespace

Role role_of(const std::string& name) {
  return name == "prefill" ? Role::prefill : name == "decode" ? Role::decode : Role::colocated;
}

std::string model_dir(const Options& options) {
  return options.positional().empty() ? kDemoModel : options.positional()[0];
}

void read_options(const Options& options, ClusterOptions& cluster, BackendOptions& backend) {
  options.fill(cluster);
  options.fill(static_cast<ConductorOptions&>(cluster));
  options.fill(backend);
  if (!options.given("page-group-bytes")) cluster.kv.vattention.page_group_bytes = backend.device->page_group_bytes;
  cluster.kv.vattention.on_card = backend.device->name != std::string("cpu");
  // A card multiplies matrices of --dtype only, so the codes of a quantised folder are widened at load.
  if (cluster.kv.vattention.on_card && !backend.load.weight_dtype) backend.load.weight_dtype = backend.load.dtype;
}

Result<std::unique_ptr<Build>> prepare_build(const Options& options) try {
  const bool worker = is_worker(options);
  use_huge_pages(HugePages(options.choice("huge-pages")));
  auto build = std::make_unique<Build>();
  ClusterOptions& cluster = build->options;
  read_options(options, cluster, build->backend_options);
  build->backend_options.load.seed = cluster.seed;
  cluster.topology = worker ? std::vector{option_value<Role>(options, "role")}
                            : need(parse_topology(options.text("topology")));
  cluster.kv.n_memories = int(cluster.topology.size());

  read_model(options, *build);
  choose_numbers(options, *build);
  const int wanted_len = cluster.max_model_len;  // 0: as long as model and pool allow
  apply_model(*build);
  cluster.step_tokens = int(options.integer(cluster.batching->chunks ? "chunk-tokens" : "max-step-tokens"));
  choose_transport(options, *build);
  // If no policy predicts seconds, the cost model learns from steps alone.
  if (!worker && (cluster.placement->predicts || cluster.admission->arrives || cluster.fetch->most > 0)) {
    const LoadOptions& load = build->backend_options.load;
    cluster.prior = CostPrior{{build->config, matrix_dtype(build->config, load), load.dtype, cluster.kv.shape.dtype},
                              instance_rates(build->backend_options, cluster.topology.size())};
  }
  check_caches(*build);
  if (!worker) check_copies(options, cluster);
  cluster.log = open_event_log(options, worker ? ".pid" + std::to_string(getpid()) : "");
  check_ranks(*build);
  if (!worker || options.integer("rank") < 0) need(check_rank_processes(options, *build));
  need(check_shared_pool(cluster));
  if (worker) {  // it keeps its ranks when it gets another role
    const KvShards own = cluster.shards(cluster.topology[0]);
    cluster.prefill_tp = cluster.decode_tp = own.tp;
    cluster.prefill_pp = cluster.decode_pp = own.pp;
  }
  fit_context(cluster, wanted_len);
  return build;
} catch (const Error& error) {
  return error;
}

Status open_backend(Build& build) try {
  build.backend = need(build.backend_options.device->open(build));
  build.options.device = &build.backend->device();
  build.options.make_model = [&backend = *build.backend](int i, DeviceQueue& queue) {
    return backend.make_model(i, queue);
  };
  build.options.peak_flops = [&backend = *build.backend](int i) { return backend.peak_flops(i); };
  return ok();
} catch (const Error& error) {
  return error;
}

uint64_t fingerprint(const Build& build) {
  const ClusterOptions& o = build.options;
  std::string text = std::string(version()) + " " + commit() + " " + build.config.name + " " +
                     std::to_string(build.config.vocab) + " " + std::to_string(o.max_model_len) + " " +
                     o.transport->name + " " + weights_text(build);
  const KvShape& s = o.kv.shape;
  for (int n : {s.n_layers, s.n_kv_heads, s.head_dim, int(s.dtype)}) text += " " + std::to_string(n);
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (char c : text) hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
  return hash;
}

Result<std::unique_ptr<Build>> make_build(const Options& options) try {
  std::unique_ptr<Build> prepared = need(prepare_build(options));
  Build& build = *prepared;
  if (build.processes) {
    build.runtime = need(make_local_workers(build, options));
    return prepared;
  }
  need(open_backend(build));
  std::unique_ptr<Cluster> cluster = need(Cluster::create(build.options, build.clock));
  build.cluster = cluster.get();
  build.runtime = std::move(cluster);
  return prepared;
} catch (const Error& error) {
  return error;
}

std::shared_ptr<EventLog> open_event_log(const Options& options, const std::string& suffix) {
  if (options.text("event-log").empty()) return nullptr;
  JsonText shown;
  shown.open('{');
  for (const auto& [name, value] : options.shown_values()) shown.add(name.c_str(), value);
  return need(EventLog::create(options.text("event-log") + suffix, shown.close('}').take()), "--event-log: ");
}

}  // namespace xpyd::server
