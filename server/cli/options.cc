#include <string>
#include <vector>

#include "allocator/eviction.h"
#include "allocator/kv_memory.h"
#include "attention/attention.h"
#include "base/cpu.h"
#include "base/table.h"
#include "batch/chunking/chunk_policy.h"
#include "batch/policies/admission.h"
#include "batch/policies/policy.h"
#include "disagg/conductor/placement.h"
#include "disagg/processes/worker.h"
#include "disagg/transport/transport.h"
#include "model/gemm/gemm.h"
#include "server/build.h"
#include "server/openai/api.h"
#include "server/workers/local_workers.h"

namespace xpyd::server {
namespace {

using enum OptionKind;

constexpr double kMaxBytes = double(1ll << 46);

constexpr OptionTarget kPrefixCache = {
    &kStructTag<ClusterOptions>, [](void* object, const Options& options, const char* name) {
      KvOptions& kv = static_cast<ClusterOptions*>(object)->kv;
      kv.prefix_cache = options.text(name) != "off", kv.radix = options.text(name) == "radix";
    }};

constexpr const char* kEngine = "serve generate worker";      // runs a model
constexpr const char* kShape = "serve generate worker info";  // knows a model
constexpr const char* kCluster = "serve generate";            // has a conductor
constexpr const char* kPolicy = "serve generate simulate";    // has a conductor, maybe a simulated one
constexpr const char* kEverywhere = "serve generate simulate worker";

std::optional<Dtype> weight_dtype(const std::string& name) {
  return name == "auto" ? std::nullopt : std::optional(find_dtype(name));
}

// Variants that this CPU can run.
template <class Rows>
std::string available(const Rows& rows) {
  std::string list = "auto";
  for (const auto& row : rows)
    if (row.available()) list += "|" + std::string(row.name);
  return list;
}

// The row of that name; null for "auto", the machine's default.
template <auto rows>
auto row_named(const std::string& name) {
  return find_row(rows(), name);
}

// Returns 0 for the word, -1 for anything but the word and numbers from 1 to `most`.
int word_or_number(const char* word, const std::string& text, int most) {
  if (text == word) return 0;
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  return error == std::errc() && end == text.data() + text.size() && n >= 1 && n <= most ? n : -1;
}
int draft_tokens(const std::string& text) { return word_or_number("turbo", text, kMostDrafts); }
int slot_chunk(const std::string& text) { return text == "none" ? 1 : word_or_number("all", text, INT_MAX); }

// This function stays whole because it is one table.
std::vector<OptionRow> make_rows() {
  // The rows keep pointers into these strings. A new row of another table is a new choice here.
  static const std::string allocators = names_of(kv_schemes(), "|"), batchings = names_of(batch_policies(), "|"),
                           admissions = "auto|" + names_of(admission_rules(), "|"),
                           chunks = names_of(chunk_policies(), "|"), placements = names_of(placement_policies(), "|"),
                           fetches = names_of(fetch_policies(), "|"),
                           slo_admissions = names_of(admission_policies(), "|"),
                           orders = names_of(disagg_policies(), "|"), transport_names = names_of(transports(), "|"),
                           device_names = names_of(devices(), "|"), evictions = names_of(kEvictionPolicies, "|"),
                           gemms = available(gemm_variants()), attentions = available(attention_variants()),
                           isas = "auto|" + names_of(kIsas, "|"), drafts = names_of(drafters(), "|");
  // name, kind, default, unit, choices, min, max, help, group, field
  return {
      // Places and the model.
      {"topology", text, "1P1D", "", "xPyDzC", 0, 0,
       "instances of the cluster: 1P1D, 2P3D, 1C (P prefill, D decode, C colocated) or a mix such as 2C1P1D", kCluster},
      {"prefill-tp", integer, "1", "ranks", "", 1, 1024,
       "tensor-parallel ranks of each prefill or colocated instance; each rank is a thread with its own KV memory",
       kShape, sets<&ClusterOptions::prefill_tp>},
      {"prefill-pp", integer, "1", "stages", "", 1, 1024, "pipeline stages of each prefill or colocated instance",
       kShape, sets<&ClusterOptions::prefill_pp>},
      {"decode-tp", integer, "1", "ranks", "", 1, 1024, "tensor-parallel ranks of each decode instance", kEngine,
       sets<&ClusterOptions::decode_tp>},
      {"decode-pp", integer, "1", "stages", "", 1, 1024, "pipeline stages of each decode instance", kEngine,
       sets<&ClusterOptions::decode_pp>},
      {"expert-parallel", choice, "off", "", "off|on|prefill|decode", 0, 0,
       "on: each tensor-parallel rank holds whole experts of a mixture of experts; off: a slice of every expert; "
       "prefill: on in prefill and colocated instances; decode: on in decode instances. Tokens do not change. "
       "With --device cuda: off",
       kEngine, sets<&BackendOptions::expert_parallel>},
      {"pipeline-window", integer, "0", "waves", "", 0, 1024,
       "number of waves (micro-batches) that a pipeline-parallel instance keeps in flight; 0: two per stage; 1: the "
       "next step starts when the last one has ended",
       kEngine, sets<&ClusterOptions::pipeline_window>},
      {"ranks", choice, "threads", "", "threads|processes", 0, 0,
       "how the pipeline stages of an instance run: as threads of its process, or as processes of their own, whose "
       "tensor-parallel ranks are threads (needs --processes and --transport shm or tcp)",
       kCluster},
      {"ranks", choice, "threads", "", "threads|processes|remote", 0, 0,
       "how the pipeline stages of an instance run: as threads of this process; as processes that it starts; or "
       "remote: as processes, which may be on other hosts and join it at --rank-bind (xpyd worker --rank N; needs "
       "--transport tcp and a role other than decode)",
       "worker"},
      {"rank-bind", text, "127.0.0.1:0", "ADDRESS", "HOST:PORT", 0, 0,
       "--ranks remote: address at which the stages join this instance", "worker"},
      {"device", choice, "cpu", "", device_names.c_str(), 0, 0,
       "device that holds the weights and the KV memory and runs the model", kShape,
       sets_as<find_device, &BackendOptions::device>},
      {"dtype", choice, "f32", "", "f32|bf16", 0, 0,
       "element type of the embedding in memory, and of the weight matrices unless --weight-dtype or the model folder "
       "says otherwise",
       kShape, sets_as<find_dtype, &BackendOptions::load, &LoadOptions::dtype>},
      {"weight-dtype", choice, "auto", "", "auto|f32|bf16|f16|int8|int4|fp8", 0, 0,
       "element type of the weight matrices in memory; int8, int4 and fp8 are quantised at load if the model folder is "
       "not; auto: the type of a GPTQ or FP8 folder, else --dtype; activations that meet int8 and int4 are rounded to "
       "8 or 16 bits, as --gemm says (--exact: not); with --device cuda: --dtype only",
       kShape, sets_as<weight_dtype, &BackendOptions::load, &LoadOptions::weight_dtype>},
      {"weight-group", integer, "0", "inputs", "", 0, 1 << 20,
       "group size of weights that are quantised at load: inputs that share a scale (32 to 128 are usual); 0: 128 for "
       "int4, all inputs for int8 and fp8",
       kShape, sets<&BackendOptions::load, &LoadOptions::weight_group>},
      {"exact", flag, "off", "", "", 0, 0,
       "matrix products do not round activations: --gemm auto then skips the faster variants that round them", kEngine},
      {"load-format", choice, "auto", "", "auto|dummy", 0, 0,
       "dummy: only config.json is read and the weights are seeded random numbers", kEngine,
       sets_as<is<"dummy">, &BackendOptions::load, &LoadOptions::dummy>},
      {"max-model-len", integer, "0", "tokens", "", 0, kMaxTokens,
       "longest sequence, prompt plus output; 0: the model's own context length", kShape,
       sets<&ConductorOptions::max_model_len>},

      // KV memory.
      {"kv-dtype", choice, "f32", "", "f32|bf16|int8|int4|fp8_e4m3|fp8_e5m2", 0, 0,
       "element type of the KV cache; int8 and int4 keep a scale and a zero point per token and head; with "
       "--device cuda: f32 or bf16",
       kShape, sets_as<find_dtype, &ClusterOptions::kv, &KvOptions::shape, &KvShape::dtype>},
      {"allocator", choice, "paged", "", allocators.c_str(), 0, 0, "KV memory scheme", kEngine,
       sets_as<find_kv_scheme, &ClusterOptions::kv_scheme>},
      {"allocator", choice, "paged", "", "paged|vattention", 0, 0,
       "memory scheme that the tour shows; vattention: page groups are mapped behind the addresses of sequences as "
       "these start, grow and end",
       "tour"},
      {"block-tokens", integer, "16", "tokens", "", 1, 4096, "tokens in one KV block (paged)", kShape,
       sets<&ClusterOptions::kv, &KvOptions::block_tokens>},
      {"kv-bytes", bytes, "512MiB", "bytes", "", 1, kMaxBytes,
       "exact size of each instance's KV pool; with --transport handoff all instances share one pool of the summed size",
       kShape, sets<&ClusterOptions::kv, &KvOptions::pool_bytes>},
      {"page-group-bytes", bytes, "64KiB", "bytes", "", 4096, 1 << 30,
       "vattention: bytes that one map call backs with memory; a multiple of the page size, with --device cuda of "
       "2MiB, which is the default there",
       kShape, sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::page_group_bytes>},
      {"kv-map-ahead", choice, "on", "", "on|off", 0, 0,
       "vattention: map the memory that the next steps need in the background", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::map_ahead>},
      {"kv-guard", choice, "off", "", "on|off", 0, 0,
       "vattention: an access to KV addresses without memory stops the program", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::guard>},
      {"kv-layout", choice, "layer_major", "", "layer_major|token_major", 0, 0,
       "order of KV elements in the pool: by layer, then token; or by token, then layer", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::order>},
      {"prefix-cache", choice, "blocks", "", "off|blocks|radix|on", 0, 0,
       "reuse the KV of equal prompt prefixes that the pool still holds (not with --allocator contiguous); KV in "
       "offload tiers is reused in any case. blocks: whole blocks, found by their hash; radix: to the token, found by "
       "a radix tree, which copies the common part of a partly equal block (needs --allocator paged, and "
       "instances in one process); on: the same as blocks",
       kEngine, kPrefixCache},
      {"slot-prealloc", text, "all", "slots", "all|none|N", 0, 0,
       "with --allocator slots: number of slots that get memory at a time: all of them at the start; N; or none: one, "
       "when "
       "a sequence first needs it",
       kEngine, sets_as<slot_chunk, &ClusterOptions::kv, &KvOptions::slot_chunk>},
      {"kv-share", choice, "alias", "", "off|alias|takeover|copy", 0, 0,
       "how vattention reuses a prefix: map its page groups a second time (alias), continue in the slot of an ended "
       "sequence (takeover), or copy it",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::share>},
      {"host-kv-bytes", bytes, "0", "bytes", "", 0, kMaxBytes,
       "host memory of each instance for KV that does not fit in its pool; 0: no host tier", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::host_bytes>},
      {"disk-kv-dir", text, "", "", "DIR", 0, 0,
       "folder on a disk for KV that does not fit in --host-kv-bytes; empty: no disk tier", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::disk_dir>},
      {"disk-kv-bytes", bytes, "4GiB", "bytes", "", 1, kMaxBytes, "disk space that each instance uses in --disk-kv-dir",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::disk_bytes>},
      {"kv-copy-gbps", number, "0", "GB/s", "", 0, 1e6,
       "--device cpu: limit on the bandwidth of copies between KV pool and host tier; 0: no limit", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::copy_gbps>},
      {"host-eviction", choice, "lru", "", evictions.c_str(), 0, 0,
       "--host-kv-bytes: which KV is evicted first from the host tier, and from the disk tier", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::eviction>},

      // Batching.
      {"batching", choice, "chunked", "", batchings.c_str(), 0, 0,
       "which sequences run in a step, and how many tokens each gets", kEngine,
       sets_as<find_batch_policy, &ClusterOptions::batching>},
      {"admit", choice, "auto", "", admissions.c_str(), 0, 0,
       "how much free memory a sequence needs to start; auto: the rule of the batching policy", kEngine,
       sets_as<find_admission_rule, &ClusterOptions::admit>},
      {"chunk-tokens", integer, "512", "tokens", "", 1, 1 << 20, "maximum tokens of one step with --batching chunked",
       kEngine},
      {"chunk-policy", choice, "fixed", "", chunks.c_str(), 0, 0,
       "how many tokens of each prompt a step computes; equal_time: as many as make steps take equally long", kEngine,
       sets_as<find_chunk_policy, &ClusterOptions::chunks>},
      {"speculate", choice, "off", "", drafts.c_str(), 0, 0,
       "speculative decoding: draft tokens are verified together with the next token and kept where they are right, as "
       "far as a step has room for them (in --chunk-tokens, in --max-batch rows of logits, and in free blocks); ngram: "
       "the tokens that followed the last occurrence of the sequence's last tokens; mtp: the model's own multi-token "
       "prediction head",
       kEngine, sets_as<find_drafter, &ClusterOptions::speculation, &SpeculationOptions::drafter>},
      {"speculate-tokens", text, "turbo", "tokens", "turbo|1..64", 0, 0,
       "--speculate: maximum draft tokens of a sequence in a step; turbo: adapts the number to the acceptance rate of "
       "the sequence and to the measured time of steps",
       kEngine, sets_as<draft_tokens, &ClusterOptions::speculation, &SpeculationOptions::tokens>},
      {"max-step-tokens", integer, "2048", "tokens", "", 1, 1 << 20,
       "maximum tokens of one step with the other batching policies; a longer prompt takes several steps", kEngine},
      {"max-batch", integer, "64", "sequences", "", 1, 65536, "maximum running sequences in each instance", kShape,
       sets<&ClusterOptions::max_batch>},

      // Prefill/decode disaggregation.
      {"disagg", choice, "prefill_first", "", orders.c_str(), 0, 0,
       "in which order P and D take a request, or when one instance does both phases; conditional_tbt: a prompt joins "
       "D's batch if one step holds all of it and is predicted to keep the request's TBT objective",
       kCluster,
       sets_as<find_disagg_policy, &ConductorOptions::disagg>},
      {"kv-transfer", choice, "push", "", "push|pull", 0, 0,
       "with --disagg prefill_first: P writes KV to D while it computes (push), or D reads it when P has finished "
       "(pull)",
       kCluster, sets_as<is<"pull">, &ConductorOptions::disagg_options, &DisaggOptions::pull>},
      {"max-local-prefill", integer, "1000", "tokens", "", 0, kMaxTokens,
       "with --disagg conditional_threshold: a prompt with more uncached tokens is prefilled remotely", kCluster,
       sets<&ConductorOptions::disagg_options, &DisaggOptions::max_local_prefill_tokens>},
      {"max-prefill-queue", integer, "2", "jobs", "", 0, 1 << 20,
       "with --disagg conditional_threshold: no remote prefill while so many prompts wait for P", kCluster,
       sets<&ConductorOptions::disagg_options, &DisaggOptions::max_prefill_queue>},
      {"transport", choice, "local", "", transport_names.c_str(), 0, 0,
       "how KV goes from P to D: the KV is copied, or block ids of one shared pool are handed over (handoff, within one "
       "process); the default with --processes is shm",
       kEngine, sets_as<find_transport, &ClusterOptions::transport>},
      {"rdma-nics", text, "", "", "mlx5_0:1,...", 0, 0,
       "--transport rdma: RDMA devices and their ports; empty: all ports that are up", kEngine,
       sets<&ClusterOptions::nics>},
      {"stream-kv", choice, "layer", "", "layer|chunk|request", 0, 0,
       "when P sends KV: after each layer, each chunk, or the whole prompt", kEngine,
       sets<&ConductorOptions::stream_kv>},
      {"reservation", choice, "off", "", "off|escrow", 0, 0,
       "escrow: a prompt whose KV goes to D starts when P has reserved blocks for all of it (its cached prefix stays "
       "pinned) and, with --kv-transfer push, D has reserved blocks too; off: it starts as soon as P has room, whether "
       "D has or not",
       kEverywhere, sets_as<is<"escrow">, &ConductorOptions::reserve_blocks>},
      {"placement", choice, "least_loaded", "", placements.c_str(), 0, 0,
       "how the conductor chooses P and D for a request", kCluster,
       sets_as<find_placement_policy, &ConductorOptions::placement>},
      {"kv-fetch", choice, "never", "", fetches.c_str(), 0, 0,
       "when an instance fetches a prompt's prefix from another instance: never; always if that one has more of it; or "
       "only if fetching is predicted to be faster than computing it (cost)",
       kPolicy, sets_as<find_fetch_policy, &ConductorOptions::fetch>},
      {"decode-copies", integer, "1", "instances", "", 1, 64,
       "decode instances that get the KV of a prompt: one computes the answer, the others read a copy from P into "
       "their prefix caches; if the one dies, another one continues without computing the prompt again",
       kCluster, sets<&ConductorOptions::decode_copies>},
      {"admission", choice, "none", "", slo_admissions.c_str(), 0, 0,
       "when a request is refused with 429 and Retry-After because it would miss its objectives or make others miss "
       "theirs",
       kPolicy, sets_as<find_admission_policy, &ConductorOptions::admission>},
      {"slo-ttft", number, "0", "s", "", 0, 1e6, "objective for the time to the first token; 0: none", kEverywhere,
       sets<&ConductorOptions::objectives, &Objectives::ttft_s>},
      {"slo-tbt", number, "0", "s", "", 0, 1e6,
       "objective for the time between tokens: the mean of the longest tenth of a choice's gaps; 0: none", kEverywhere,
       sets<&ConductorOptions::objectives, &Objectives::tbt_s>},

      {"event-log", text, "", "", "FILE", 0, 0,
       "file for every decision with its inputs, every step and every request trace (read by xpyd replay, trace, "
       "explain); a worker process N writes FILE.pidN; empty: no log",
       kEverywhere},
      {"kv-events", text, "", "ADDRESS", "tcp://HOST:PORT", 0, 0,
       "address at which an instance publishes, over ZeroMQ in vLLM's KV events schema, what its prefix cache and "
       "offload tiers store and remove, tokens of prompts included; instance N of the topology (thread or process) is "
       "data_parallel_rank N and uses port + N; empty: no events",
       kEngine, sets<&ClusterOptions::kv_events, &KvEventsOptions::endpoint>},
      {"kv-events-replay", text, "", "ADDRESS", "tcp://HOST:PORT", 0, 0,
       "--kv-events: address at which subscribers get missed messages again, also at port + N; empty: no replay",
       kEngine, sets<&ClusterOptions::kv_events, &KvEventsOptions::replay>},
      {"kv-events-rank", integer, "0", "", "", 0, 65535,
       "--kv-events: data_parallel_rank of this worker, which is added to both ports (serve gives each of its workers "
       "one)",
       "worker", sets<&ClusterOptions::kv_events, &KvEventsOptions::rank>},

      // Instances as processes.
      {"processes", flag, "off", "", "", 0, 0, "run every instance in a process of its own", kCluster},
      {"start-workers", choice, "on", "", "on|off", 0, 0,
       "--processes: start a worker for each instance of --topology; off: all workers join from elsewhere (xpyd "
       "worker), and /health answers 503 until there are some for prefill and for decode",
       kCluster, sets<&ProcessOptions::start_workers>},
      {"lease", number, "3", "s", "", 0.05, 3600,
       "--processes: time without a message after which a worker, and KV that is held for it, is given up", kCluster,
       sets<&ProcessOptions::lease_s>},
      {"cluster-bind", text, "", "ADDRESS", "HOST:PORT or unix:/path", 0, 0,
       "--processes: address at which workers join; empty: a Unix socket in a private folder of this user", kCluster,
       sets<&ProcessOptions::bind>},
      {"cluster-key-file", text, "", "", "FILE", 0, 0,
       "--processes: file with the cluster's secret key; required if workers join from other hosts",
       "serve generate worker", sets<&ProcessOptions::key_file>},
      {"role", choice, "colocated", "", "prefill|decode|colocated", 0, 0, "role of this worker", "worker",
       sets<&WorkerOptions::role>},
      {"join", text, "", "ADDRESS", "", 0, 0, "address of the conductor that this worker joins", "worker",
       sets<&WorkerOptions::join>},
      {"rank", integer, "-1", "", "", -1, 1023,
       "this worker is pipeline stage N (from 0) of an instance (--ranks) instead of an instance; --join then is that "
       "instance's address (its --rank-bind), or --registry has it under --rank-group; -1: an instance",
       "worker"},
      {"rank-group", text, "0", "NAME", "", 0, 0,
       "--registry: name under which an instance with remote stages and these stages find each other", "worker"},
      {"registry", text, "", "", "etcd://HOST:PORT[/prefix]", 0, 0,
       "--processes: etcd server in which the conductor publishes its address and workers find it; serve needs "
       "--cluster-bind. While another conductor is registered, this one stands by without an HTTP port and takes over "
       "when that one is gone",
       "serve generate worker", sets<&ProcessOptions::registry_url>},
      {"peer-host", text, "127.0.0.1", "ADDRESS", "HOST", 0, 0,
       "address of this host, as a number, at which the transports of other workers reach this one", "worker",
       sets<&ClusterOptions::transport_host>},
      {"give-up", number, "0", "s", "", 0, 86400,
       "the worker exits after this time without a conductor; 0: it waits for one", "worker",
       sets<&WorkerOptions::give_up_s>},

      // The machine.
      {"threads", integer, "0", "threads", "", 0, 1024,
       "compute threads of each instance; 0: the cores of this machine divided by the instances", kEngine,
       sets<&BackendOptions::threads>},
      {"cpu-kernels", choice, "auto", "", isas.c_str(), 0, 0,
       "newest instruction set that CPU kernels may use; auto: the newest of this CPU (--gemm and --attention, if "
       "given, override it)",
       "serve generate worker info peak"},
      {"huge-pages", choice, "transparent", "", "off|transparent", 0, 0,
       "page size for weights, KV pools and scratch: off: 4 KiB; transparent: 2 MiB as far as the kernel has such "
       "pages",
       kEngine},
      {"gemm", choice, "auto", "", gemms.c_str(), 0, 0,
       "matrix product variant, of those that this CPU can run (xpyd info describes them)", kShape,
       sets_as<row_named<gemm_variants>, &BackendOptions::kernels, &Kernels::gemm>},
      {"attention", choice, "auto", "", attentions.c_str(), 0, 0,
       "attention variant, of those that this CPU can run (xpyd info describes them)", kShape,
       sets_as<row_named<attention_variants>, &BackendOptions::kernels, &Kernels::attention>},
      {"cuda-prefill-attention", text, "auto", "", "VARIANT", 0, 0,
       "--device cuda: attention variant of steps with several query tokens per sequence; auto: the fastest that "
       "supports the KV; naive for f32",
       kEngine, sets<&BackendOptions::cuda_prefill_attention>},
      {"cuda-decode-attention", text, "auto", "", "VARIANT", 0, 0,
       "--device cuda: attention variant of steps with one query token per sequence", kEngine,
       sets<&BackendOptions::cuda_decode_attention>},
      {"gpu-split", choice, "priority", "", "off|priority", 0, 0,
       "--device cuda: how P and D share the card: by stream priority (D first), or without an order", kEngine,
       sets<&BackendOptions::gpu_split>},
      {"async-scheduling", choice, "on", "", "on|off", 0, 0,
       "--device cuda: plan the next step on the CPU and sample tokens on the card while it computes", kEngine,
       sets<&ClusterOptions::ahead>},

      // The frontend.
      {"port", integer, "8000", "", "", 0, 65535, "TCP port; 0: any free port", "serve",
       sets<&HttpListenOptions::port>},
      {"host", text, "127.0.0.1", "", "ADDRESS", 0, 0, "address to listen on", "serve", sets<&HttpListenOptions::host>},
      {"served-model-name", text, "", "", "NAME", 0, 0,
       "model name in requests and answers; MODEL_DIR as given is accepted, too; empty: the name of the model's folder",
       "serve", sets<&ServedModel::name>},
      {"log-level", choice, "info", "", "debug|info|warning|error", 0, 0,
       "lowest level of log lines on stderr; debug: every HTTP answer; info: every completion; warning: refused "
       "requests and trouble; error: failures of this server",
       "serve worker", sets<&ServerOptions::log_level>},
      {"chat-template", text, "auto", "", "FILE|auto|plain|none", 0, 0,
       "Jinja template that turns chat messages into a prompt; auto: the model folder's; plain: the messages' text, "
       "one per line; none: no chat",
       kEngine},
      {"api-key-file", text, "", "", "FILE", 0, 0,
       "file with the key that clients must send as a Bearer token; only its owner and group may read it; empty: no "
       "key "
       "is needed",
       "serve", sets<&ServerOptions::api_key_file>},
      {"allowed-hosts", text, "", "", "NAME,...", 0, 0,
       "names that requests may have in the Host header and pages in their Origin, beside IP addresses, localhost and "
       "this machine's name; *: any",
       "serve", sets<&ServerOptions::allowed_hosts>},
      {"max-connections", integer, "2048", "connections", "", 1, 65536,
       "maximum open connections; beyond it new ones wait to be accepted", "serve",
       sets<&HttpListenOptions::max_connections>},
      {"request-timeout", number, "600", "s", "", 0, 86400, "time limit of a request, queue time included; 0: none",
       "serve", sets<&ServerOptions::request_timeout_s>},
      {"max-sessions", integer, "1024", "sessions", "", 1, 1 << 20,
       "maximum conversations (session_id) that the server keeps; the least recently used one is dropped first",
       "serve", sets<&ServerOptions::max_sessions>},
      {"session-bytes", bytes, "64MiB", "bytes", "", 4096, kMaxBytes,
       "maximum memory of all conversations that the server keeps", "serve", sets<&ServerOptions::session_bytes>},

      // generate.
      {"prompt", text, "", "", "TEXT", 0, 0, "text to continue", "generate"},
      {"chat", flag, "off", "", "", 0, 0, "the prompt is a user's chat message: apply the chat template", "generate"},
      {"max-tokens", integer, "128", "tokens", "", 1, kMaxTokens, "maximum output tokens", "generate",
       sets<&Request::max_tokens>},
      {"temperature", number, "0", "", "", 0, 100, "sampling temperature; 0: greedy", "generate",
       sets<&Request::sampling, &SamplingParams::temperature>},

      // info.
      {"tokens", integer, "2048", "tokens", "", 1, 1 << 17, "prompt length for which the KV transfer is computed",
       "info"},
      {"ranks", text, "", "", "AxB:CxD", 0, 0,
       "print which rank sends which KV to which rank: prefill ranks, tp x pp, and decode ranks, as in 2x1:4x1",
       "info"},

      // peak.
      {"threads", integer, "0", "threads", "", 0, 1024, "threads; 0: all cores of this machine", "peak"},
      {"device", choice, "cpu", "", device_names.c_str(), 0, 0,
       "device to measure; cuda: copies, matrix products and kernel launches of the card", "peak"},

      // Every subcommand.
      {"seed", integer, "0", "", "", 0, kMaxSeed, "seed of every random number", "serve generate worker simulate",
       sets<&ConductorOptions::seed>},
      {"json", text, "", "", "FILE", 0, 0, "also write the result to FILE as JSON",
       "bench peak info prefix-stats simulate"},
      {"config", text, "", "", "FILE", 0, 0,
       "read options from FILE, with lines `name = value`; the command line overrides them",
       "serve generate worker bench peak info prefix-stats simulate"},
  };
}

}  // namespace

std::span<const OptionRow> option_table() {
  static const std::vector<OptionRow> rows = make_rows();
  return rows;
}

const IsaRow* cpu_kernels(const Options& options) {
  return options.values().contains("cpu-kernels") ? find_row(kIsas, options.text("cpu-kernels")) : nullptr;
}

Status check_options(const Options& options, std::string_view group) {
  if (const IsaRow* isa = cpu_kernels(options); isa && *cpu_lacks(isa->needs))
    return Error{ErrorCode::unavailable,
                 "--cpu-kernels " + std::string(isa->name) + ": this CPU lacks " + cpu_lacks(isa->needs)};
  if (options.values().contains("speculate-tokens") && draft_tokens(options.text("speculate-tokens")) < 0)
    return invalid("--speculate-tokens " + options.text("speculate-tokens") + ": expected turbo or 1 to " +
                   std::to_string(kMostDrafts));
  if (options.values().contains("slot-prealloc") && slot_chunk(options.text("slot-prealloc")) < 0)
    return invalid("--slot-prealloc " + options.text("slot-prealloc") + ": expected all, none or a number of slots");
  if (group == "worker" && options.text("join").empty() == options.text("registry").empty())
    return invalid("--join: expected the conductor's address here, or --registry to find it");
  if (group == "serve" &&
      std::ranges::any_of(options.text("served-model-name"), [](char c) { return uint8_t(c) < ' ' || c == 127; }))
    return invalid("--served-model-name: the name has a control character");
  if (group == "serve" && options.given("registry") && options.text("cluster-bind").empty())
    return invalid("--registry: serve also needs --cluster-bind, an address that workers can reach");
  if ((group == "serve" || group == "generate") && options.text("start-workers") == "off" &&
      (options.text("cluster-bind").empty() || options.text("cluster-key-file").empty()))
    return invalid(
        "--start-workers off: needs --cluster-bind and --cluster-key-file, so that workers from elsewhere can join");
  if ((group == "serve" || group == "generate" || group == "worker") && !options.text("disk-kv-dir").empty() &&
      options.integer("host-kv-bytes") == 0)
    return invalid("--disk-kv-dir: needs --host-kv-bytes, because KV goes to the disk through host memory");
  if (group == "generate" && options.text("prompt").empty()) return invalid("--prompt: expected the text to continue");
  return ok();
}

}  // namespace xpyd::server
