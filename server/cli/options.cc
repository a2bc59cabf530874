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
#include "disagg/conductor/order.h"
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

constexpr OptionTarget kByName;  // of a row without a field in a struct

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

std::vector<std::string> one_or_none(const std::string& text) {
  return text.empty() ? std::vector<std::string>() : std::vector{text};
}

// This function stays whole because it is one table.
std::vector<OptionRow> make_rows() {
  // The rows keep pointers into these strings. A new row of another table is a new choice here.
  static const std::string allocators = names_of(kv_schemes(), "|"), batchings = names_of(batch_policies(), "|"),
                           admissions = "auto|" + names_of(admission_rules(), "|"),
                           chunks = names_of(chunk_policies(), "|"), placements = names_of(placement_policies(), "|"),
                           fetches = names_of(fetch_policies(), "|"),
                           replications = names_of(replication_policies(), "|"),
                           slo_admissions = names_of(admission_policies(), "|"),
                           orders = names_of(disagg_policies(), "|"), transport_names = names_of(transports(), "|"),
                           device_names = names_of(devices(), "|"), evictions = names_of(kEvictionPolicies, "|"),
                           gemms = available(gemm_variants()), attentions = available(attention_variants()),
                           isas = "auto|" + names_of(kIsas, "|"), drafts = names_of(drafters(), "|");
  // name, kind, default, unit, choices, min, max, help, group, field, also
  return {
      // Places and the model.
      {"topology", text, "1P1D", "", "xPyDzC", 0, 0, "instances: 1P1D, 2P3D, 1C (colocated) or a mix such as 2C1P1D",
       "serve"},
      {"topology", text, "1C", "", "xPyDzC", 0, 0, "instances: 1P1D, 2P3D, 1C (colocated) or a mix such as 2C1P1D",
       "generate"},
      {"prefill-tp", integer, "1", "ranks", "", 1, 1024,
       "tensor-parallel ranks of each prefill or colocated instance, a thread each with its own KV memory", kShape,
       sets<&ClusterOptions::prefill_tp>, "tensor-parallel-size tp tp-size"},
      {"prefill-pp", integer, "1", "stages", "", 1, 1024, "pipeline stages of each prefill or colocated instance",
       kShape, sets<&ClusterOptions::prefill_pp>, "pipeline-parallel-size pp pp-size"},
      {"decode-tp", integer, "1", "ranks", "", 1, 1024, "tensor-parallel ranks of each decode instance", kEngine,
       sets<&ClusterOptions::decode_tp>, "tensor-parallel-size tp tp-size"},
      {"decode-pp", integer, "1", "stages", "", 1, 1024, "pipeline stages of each decode instance", kEngine,
       sets<&ClusterOptions::decode_pp>, "pipeline-parallel-size pp pp-size"},
      {"pipeline-window", integer, "0", "waves", "", 0, 1024,
       "waves that an instance with several stages keeps under way; 0: two for each stage; 1: a step is waited for",
       kEngine, sets<&ClusterOptions::pipeline_window>},
      {"ranks", choice, "threads", "", "threads|processes", 0, 0,
       "what the stages of an instance with several are: threads of its process, or processes of their own, whose "
       "tensor-parallel ranks are threads (with --processes; --transport shm or tcp)",
       kCluster},
      {"ranks", choice, "threads", "", "threads|processes|remote", 0, 0,
       "what the stages of an instance with several are: threads of this process, processes that it starts, or remote: "
       "processes, of other hosts maybe, that join it at --rank-bind (xpyd worker --rank N; --transport tcp, not "
       "decode)",
       "worker"},
      {"rank-bind", text, "127.0.0.1:0", "ADDRESS", "HOST:PORT", 0, 0, "--ranks remote: where its stages join",
       "worker"},
      {"device", choice, "cpu", "", device_names.c_str(), 0, 0, "where weights, KV and the model are", kShape,
       sets_as<find_device, &BackendOptions::device>},
      {"dtype", choice, "f32", "", "f32|bf16", 0, 0,
       "element type of the embedding in memory, and of the weight matrices where nothing else is said of them", kShape,
       sets_as<find_dtype, &BackendOptions::load, &LoadOptions::dtype>},
      {"weight-dtype", choice, "auto", "", "auto|f32|bf16|f16|int8|int4|fp8", 0, 0,
       "element type of the weight matrices in memory: int8, int4, fp8 are made at load where the folder has none; "
       "auto: as a GPTQ or FP8 folder has them, else --dtype. --device cuda takes --dtype and the three",
       kShape, sets_as<weight_dtype, &BackendOptions::load, &LoadOptions::weight_dtype>},
      {"weight-group", integer, "0", "inputs", "", 0, 1 << 20,
       "inputs of an output that share a scale, where codes are made at load (32 to 128 are usual); 0: 128 for int4, "
       "all of them for int8 and fp8",
       kShape, sets<&BackendOptions::load, &LoadOptions::weight_group>},
      {"exact", flag, "off", "", "", 0, 0,
       "products of activations as they are, not rounded to what a faster row of --gemm auto multiplies", kShape},
      {"load-format", choice, "auto", "", "auto|dummy", 0, 0,
       "dummy: only config.json (or params.json) is read and the weights are seeded random numbers", kEngine,
       sets_as<is<"dummy">, &BackendOptions::load, &LoadOptions::dummy>},
      {"max-model-len", integer, "0", "tokens", "", 0, kMaxTokens,
       "longest sequence, prompt and output; 0: the model's own context length", kShape,
       sets<&ConductorOptions::max_model_len>},

      // KV memory.
      {"kv-dtype", choice, "f32", "", "f32|bf16|int8|int4|fp8_e4m3|fp8_e5m2", 0, 0,
       "element type of the KV cache; int8, int4: a scale and a zero per token and head; fp8: --device cpu", kShape,
       sets_as<find_dtype, &ClusterOptions::kv, &KvOptions::shape, &KvShape::dtype>},
      {"allocator", choice, "paged", "", allocators.c_str(), 0, 0, "KV memory scheme", kEngine,
       sets_as<find_kv_scheme, &ClusterOptions::kv_scheme>},
      {"allocator", choice, "paged", "", "paged|vattention", 0, 0,
       "vattention: page groups that appear and stay behind the addresses of sequences that come, grow and end",
       "tour"},
      {"block-tokens", integer, "16", "tokens", "", 1, 4096, "tokens of one KV block (paged)", kShape,
       sets<&ClusterOptions::kv, &KvOptions::block_tokens>, "block-size page-size"},
      {"kv-bytes", bytes, "512MiB", "bytes", "", 1, kMaxBytes,
       "KV pool of each instance, exactly; with --transport handoff they share one pool of the sum (workers: of as "
       "much each as the conductor's)",
       kShape, sets<&ClusterOptions::kv, &KvOptions::pool_bytes>,
       "gpu-memory-utilization kv-cache-memory-bytes mem-fraction-static"},
      {"page-group-bytes", bytes, "64KiB", "bytes", "", 4096, 1 << 30,
       "what one map call backs (vattention): a multiple of the page, on CUDA of 2MiB, which is the default there",
       kShape, sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::page_group_bytes>},
      {"kv-backing", choice, "allocation", "", "allocation|groups", 0, 0,
       "what KV pools other than vattention's lie in: one allocation, in huge pages where the system grants them, or "
       "page groups, the pages that vattention has",
       kEngine, sets_as<is<"groups">, &ClusterOptions::kv, &KvOptions::pool_in_groups>},
      {"page-op-us", number, "0", "us", "", 0, 1e6,
       "every map and unmap call takes that much longer (vattention): another device's latency", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::page_call_us>},
      {"kv-map-ahead", choice, "on", "", "on|off", 0, 0, "map in the background what the next steps need (vattention)",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::map_ahead>},
      {"kv-guard", choice, "off", "", "on|off", 0, 0,
       "a touch of KV addresses without memory stops the program (vattention)", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::guard>},
      {"kv-layout", choice, "layer_major", "", "layer_major|token_major", 0, 0, "order of KV bytes in the pool",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::order>},
      {"prefix-cache", choice, "blocks", "", "off|blocks|radix|on", 0, 0,
       "reuse the KV of prompts that begin alike, of what the pool holds (not contiguous); what tiers hold is reused "
       "in any case. blocks: whole blocks, found by their hash; radix: to the token, by a tree, the rows of a block "
       "that is alike in part copied (paged and token, instances in one process); on: blocks",
       kEngine, kPrefixCache},
      {"slot-prealloc", text, "all", "slots", "all|none|N", 0, 0,
       "slots: how many get memory at a time: all, at the start; one, when a sequence first needs it (none); or N",
       kEngine, sets_as<slot_chunk, &ClusterOptions::kv, &KvOptions::slot_chunk>},
      {"kv-share", choice, "alias", "", "off|alias|takeover|copy", 0, 0,
       "how vattention reuses it: map the page groups a second time, go on in the slot of a sequence that has ended, "
       "or copy",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::vattention, &VattentionOptions::share>},
      {"host-kv-bytes", bytes, "0", "bytes", "", 0, kMaxBytes,
       "host memory of each instance for KV that its pool has no room for; 0: none", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::host_bytes>},
      {"disk-kv-dir", text, "", "", "DIR", 0, 0,
       "folder on a disk for KV that host-kv-bytes has no room for; empty: none", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::disk_dir>},
      {"disk-kv-bytes", bytes, "4GiB", "bytes", "", 1, kMaxBytes, "what each instance takes of that disk", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::disk_bytes>},
      {"tier-block-tokens", integer, "16", "tokens", "", 1, 4096,
       "--host-kv-bytes: tokens of one block on the host and the disk", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::block_tokens>},
      {"kv-copy-gbps", number, "0", "GB/s", "", 0, 1e6,
       "--device cpu: copies between KV pool and host take at least that long; 0: no limit", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::copy_gbps>},
      {"kv-copy-wait", choice, "off", "", "on|off", 0, 0,
       "the engine waits for every copy between KV pool and host: what is gained by not waiting", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::wait_for_copies>},
      {"kv-arrival", choice, "layers", "", "layers|whole", 0, 0,
       "KV that comes for a prompt, from the host or (--kv-fetch) another instance: the prompt begins with the first "
       "layer of it, and its step waits for each layer's, or it waits for all",
       kEngine, sets_as<is<"layers">, &ClusterOptions::kv_by_layer>},
      {"kv-load", choice, "always", "", "always|cost", 0, 0,
       "--host-kv-bytes: what the host and the disk have of a prompt's prefix is loaded always, or where that is "
       "predicted to take less time than to compute it",
       kEngine, sets_as<is<"cost">, &ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::load_by_cost>},
      {"host-eviction", choice, "lru", "", evictions.c_str(), 0, 0, "--host-kv-bytes: which KV leaves the host first",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::host_eviction>},
      {"disk-eviction", choice, "lru", "", evictions.c_str(), 0, 0, "--disk-kv-dir: which KV leaves the disk first",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::disk_eviction>},
      {"host-high-watermark", number, "0.9", "", "", 0, 1,
       "--disk-kv-dir: share of the host in use from which on it gives up what the disk has, too, before its room is "
       "wanted; 1: never",
       kEngine, sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::high_watermark>},
      {"host-low-watermark", number, "0.85", "", "", 0, 1, "--disk-kv-dir: … and down to which", kEngine,
       sets<&ClusterOptions::kv, &KvOptions::tiers, &OffloadOptions::low_watermark>},

      // Batching.
      {"batching", choice, "chunked", "", batchings.c_str(), 0, 0,
       "which sequences run in a step, and how many tokens of each", kEngine,
       sets_as<find_batch_policy, &ClusterOptions::batching>},
      {"admit", choice, "auto", "", admissions.c_str(), 0, 0,
       "memory that must be there for a sequence to start; auto: the batching policy's own rule", kEngine,
       sets_as<find_admission_rule, &ClusterOptions::admit>},
      {"chunk-tokens", integer, "512", "tokens", "", 1, 1 << 20, "chunked: tokens of one step at most", kShape, kByName,
       "max-num-batched-tokens chunked-prefill-size"},
      {"chunk-policy", choice, "fixed", "", chunks.c_str(), 0, 0,
       "how many tokens of each prompt a step computes; equal_time follows from what steps take", kEngine,
       sets_as<find_chunk_policy, &ClusterOptions::chunks, &ChunkOptions::policy>},
      {"request-chunk-tokens", integer, "0", "tokens", "", 0, 1 << 20,
       "of one prompt in a step at most; 0: as the step", kEngine,
       sets<&ClusterOptions::chunks, &ChunkOptions::request_tokens>},
      {"chunk-min", integer, "0", "tokens", "", 0, 1 << 20,
       "of a prompt in a step at least, unless the prompt has fewer; 0: a quarter of the most (--chunk-policy fixed: "
       "none)",
       kEngine, sets<&ClusterOptions::chunks, &ChunkOptions::minimum>},
      {"speculate", choice, "off", "", drafts.c_str(), 0, 0,
       "tokens that may come next are computed with the next one, as far as a step has room for them (of "
       "--chunk-tokens, of --max-batch rows of logits, and of free blocks), and kept where they are right; ngram: what "
       "followed where a sequence's last tokens have stood in it before; mtp: of the model's own multi-token head",
       kEngine, sets_as<find_drafter, &ClusterOptions::speculation, &SpeculationOptions::drafter>},
      {"speculate-tokens", text, "turbo", "tokens", "turbo|1..64", 0, 0,
       "--speculate: drafts of a sequence in a step at most; turbo: as many as pay, by how many of its last ones were "
       "right and by what steps take",
       kEngine, sets_as<draft_tokens, &ClusterOptions::speculation, &SpeculationOptions::tokens>},
      {"ngram-min", integer, "2", "tokens", "", 1, 64, "--speculate ngram: that must be alike", kEngine,
       sets<&ClusterOptions::speculation, &SpeculationOptions::ngram_min>},
      {"ngram-max", integer, "4", "tokens", "", 1, 64, "--speculate ngram: that are looked for first", kEngine,
       sets<&ClusterOptions::speculation, &SpeculationOptions::ngram_max>},
      {"max-step-tokens", integer, "2048", "tokens", "", 1, 1 << 20,
       "other batching policies: tokens of one step at most; a longer prompt takes several", kShape},
      {"max-batch", integer, "64", "sequences", "", 1, 65536, "sequences running at once, each instance", kShape,
       sets<&ClusterOptions::max_batch>, "max-num-seqs max-running-requests parallel"},
      {"max-queue-bytes", bytes, "256MiB", "bytes", "", 0, kMaxBytes,
       "memory of requests that wait for their first step: 4 KiB and 4 bytes per prompt token of each; beyond it: 503 "
       "and Retry-After; 0: one waits",
       kEngine, sets<&ConductorOptions::max_queue_bytes>},

      // Prefill/decode disaggregation.
      {"disagg", choice, "prefill_first", "", orders.c_str(), 0, 0,
       "how P and D share a request, or when one does both", kCluster,
       sets_as<find_disagg_policy, &ConductorOptions::disagg>},
      {"kv-transfer", choice, "push", "", "push|pull", 0, 0,
       "prefill_first: P writes while it computes, or D reads when P is done", kCluster,
       sets_as<is<"pull">, &ConductorOptions::disagg_options, &DisaggOptions::pull>},
      {"max-local-prefill", integer, "1000", "tokens", "", 0, kMaxTokens,
       "conditional_threshold 0.1: longer uncached prompts are computed remotely", kCluster,
       sets<&ConductorOptions::disagg_options, &DisaggOptions::max_local_prefill_tokens>},
      {"max-prefill-queue", integer, "2", "jobs", "", 0, 1 << 20,
       "conditional_threshold 0.1: unless so many wait already", kCluster,
       sets<&ConductorOptions::disagg_options, &DisaggOptions::max_prefill_queue>},
      {"disagg-generation", choice, "0.1", "", "0.1|1.x", 0, 0, "conditional_threshold: which of Dynamo's two rules",
       kCluster, sets_as<is<"0.1">, &ConductorOptions::disagg_options, &DisaggOptions::first_generation>},
      {"append-tbt-weight", number, "1", "", "", 0, 1e6,
       "append_cost: of the share that an append on D adds to TBT there, beside the share of TTFT that it saves",
       kPolicy, sets<&ConductorOptions::disagg_options, &DisaggOptions::append_tbt_weight>},
      {"kv-checksum", choice, "off", "", "on|off", 0, 0, "of all KV that crosses; a difference is a recompute", kEngine,
       sets<&ClusterOptions::kv_checksum>},
      {"transport", text, "local", "", transport_names.c_str(), 0, 0,
       "how KV goes from P to D: copied, or handed over as block ids of one shared pool (between processes: of one "
       "host and user, on the CPU, not with vattention); with --processes not given: shm; "
       "fault:WIRE,seed=7,drop=0.01,delay=2ms: made worse on purpose",
       kEngine},
      {"rdma-nics", text, "", "", "mlx5_0:1,...", 0, 0, "--transport rdma: devices and ports; empty: all that are up",
       kEngine, sets<&ClusterOptions::nics>},
      {"stream-kv", choice, "layer", "", "layer|chunk|request", 0, 0,
       "when KV is sent: after each layer, each chunk, or the whole prompt", kEngine,
       sets<&ConductorOptions::stream_kv>},
      {"reservation", choice, "off", "", "off|escrow", 0, 0,
       "a prompt whose KV goes to D begins when P has set room for all of it aside, its cached prefix pinned, and, "
       "with --kv-transfer push, D has, too; off: as soon as P has room, whether D has any or not",
       kEverywhere, sets_as<is<"escrow">, &ConductorOptions::reserve_blocks>},
      {"placement", choice, "least_loaded", "", placements.c_str(), 0, 0, "which P and which D take a request", kPolicy,
       sets_as<find_placement_policy, &ConductorOptions::placement>},
      {"fetch-threshold", number, "1.5", "times", "", 0, INFINITY,
       "--placement mooncake: a prefix is fetched where another instance has so many times of it", kPolicy,
       sets<&ConductorOptions::placement_options, &PlacementOptions::fetch_threshold>},
      {"kv-fetch", choice, "never", "", fetches.c_str(), 0, 0,
       "what another instance has of a prompt's prefix is got from there: never, whenever it has more, or where that "
       "is "
       "predicted to take less time than to compute it",
       kPolicy, sets_as<find_fetch_policy, &ConductorOptions::fetch>},
      {"replication", choice, "side_effect", "", replications.c_str(), 0, 0,
       "--kv-fetch: whether what was fetched stays for others: always, where it is read .8 times a second and by one "
       "instance alone, or never (--allocator paged)",
       "serve generate", sets_as<find_replication_policy, &ConductorOptions::replication>},
      {"admission", choice, "none", "", slo_admissions.c_str(), 0, 0,
       "whether a request is taken that would miss its objectives, or would make others miss theirs; else 429 and "
       "Retry-After",
       kPolicy, sets_as<find_admission_policy, &ConductorOptions::admission>},
      {"slo-ttft", number, "0", "s", "", 0, 1e6, "objective: time to the first token; 0: none (or x-slo-ttft-ms)",
       kEverywhere, sets<&ConductorOptions::objectives, &Objectives::ttft_s>},
      {"slo-tbt", number, "0", "s", "", 0, 1e6,
       "objective: time between tokens, the mean of a choice's longest tenth; 0: none (or x-slo-tbt-ms)", kEverywhere,
       sets<&ConductorOptions::objectives, &Objectives::tbt_s>},
      {"admission-decode", choice, "mean", "", "fixed|mean|quantile|oracle", 0, 0,
       "predicted: how long a decode is said to last; oracle: simulate alone, each as long as it will", kPolicy,
       sets<&ConductorOptions::admission_options, &AdmissionOptions::decode>},
      {"admission-decode-s", number, "20", "s", "", 0, 1e6, "predicted, fixed: so long", kPolicy,
       sets<&ConductorOptions::admission_options, &AdmissionOptions::fixed_s>},
      {"admission-quantile", number, "0.9", "", "", 0, 1, "predicted, quantile: of the last decodes", kPolicy,
       sets<&ConductorOptions::admission_options, &AdmissionOptions::quantile>},

      {"event-log", text, "", "", "FILE", 0, 0,
       "every decision with what it saw, every step, every request's life (xpyd replay, trace, explain); a worker's "
       "part is in FILE.pidN, N its process; empty: none",
       kEverywhere},
      {"event-log-bytes", bytes, "1GiB", "bytes", "", 4096, kMaxBytes,
       "a file's size at most; the last line counts "
       "the lines that are left out",
       kEverywhere},
      {"kv-events", text, "", "ADDRESS", "tcp://HOST:PORT", 0, 0,
       "where an instance tells, over ZeroMQ, in the words of vLLM's KV events, what its prefix cache and its "
       "tiers come to hold and lose, tokens of prompts among it; instance N of the topology, a thread or a process, is "
       "data_parallel_rank N and at port + N; empty: nowhere",
       kEngine, sets<&ClusterOptions::kv_events, &KvEventsOptions::endpoint>},
      {"kv-events-replay", text, "", "ADDRESS", "tcp://HOST:PORT", 0, 0,
       "--kv-events: where who has missed messages gets them again, also at port + N; empty: nowhere", kEngine,
       sets<&ClusterOptions::kv_events, &KvEventsOptions::replay>},
      {"kv-events-topic", text, "", "", "TOPIC", 0, 0, "--kv-events: the first frame of each message", kEngine,
       sets<&ClusterOptions::kv_events, &KvEventsOptions::topic>},
      {"kv-events-rank", integer, "0", "", "", 0, 65535,
       "--kv-events: this worker's data_parallel_rank, which is added to both ports (serve gives each of its own one)",
       "worker", sets<&ClusterOptions::kv_events, &KvEventsOptions::rank>},

      // Instances as processes.
      {"processes", flag, "off", "", "", 0, 0, "every instance in a process of its own", kCluster},
      {"start-workers", choice, "on", "", "on|off", 0, 0,
       "--processes: starts a worker for each instance of --topology; off: all come from elsewhere (xpyd worker), and "
       "/ready says 503 until there are some for prefill and for decode",
       kCluster, sets<&ProcessOptions::start_workers>},
      {"restart-workers", choice, "on", "", "on|off", 0, 0,
       "--processes: a worker that ends is started again; a silent one is killed for it", kCluster,
       sets<&SupervisorOptions::restart>},
      {"worker-start-timeout", number, "600", "s", "", 1, 86400,
       "--processes: a worker that does not serve after it, its model loaded, is started again", kCluster,
       sets<&SupervisorOptions::start_s>},
      {"lease", number, "3", "s", "", 0.05, 3600,
       "--processes: without a word for so long a worker, or KV that is held for one, is given up", kCluster,
       sets<&ProcessOptions::lease_s>},
      {"cluster-bind", text, "", "ADDRESS", "HOST:PORT or unix:/path", 0, 0,
       "--processes: where workers join; empty: a socket of this user's in a private folder", kCluster,
       sets<&ProcessOptions::bind>},
      {"cluster-key-file", text, "", "", "FILE", 0, 0, "--processes: the cluster's secret; needed beyond this host",
       "serve generate worker", sets<&ProcessOptions::key_file>},
      {"role", choice, "colocated", "", "prefill|decode|colocated", 0, 0, "of this worker", "worker",
       sets<&WorkerOptions::role>},
      {"join", text, "", "ADDRESS", "HOST:PORT or unix:/path", 0, 0, "the conductor's address", "worker",
       sets<&WorkerOptions::join>},
      {"rank", integer, "-1", "", "", -1, 1023,
       "a stage of an instance (--ranks), from 0, instead of an instance: --join is that instance's address (its "
       "--rank-bind), or --registry says it, by --rank-group; -1: none",
       "worker"},
      {"rank-group", text, "0", "NAME", "", 0, 0, "--registry: names the instance whose stages are remote, to them",
       "worker"},
      {"registry", text, "", "", "etcd://HOST:PORT[/prefix]", 0, 0,
       "--processes: where the conductor says its address and workers look for it; serve needs --cluster-bind. While "
       "another one serves by it, it stands by, without an HTTP port, and takes its place when that one is gone",
       "serve generate worker", sets<&ProcessOptions::registry_url>},
      {"peer-bind", text, "127.0.0.1:0", "ADDRESS", "HOST:PORT", 0, 0, "where other workers reach this one", "worker",
       sets<&WorkerOptions::listen>},
      {"give-up", number, "0", "s", "", 0, 86400,
       "without a conductor for so long the worker ends; 0: it waits for one", "worker",
       sets<&WorkerOptions::give_up_s>},

      // The machine.
      {"threads", integer, "0", "threads", "", 0, 1024,
       "of each instance; 0: the cores of this machine divided by the instances", kShape,
       sets<&BackendOptions::threads>},
      {"pin", choice, "off", "", "on|off", 0, 0, "bind each thread to a core of its own", kEngine,
       sets<&BackendOptions::pin>},
      {"cpu-kernels", choice, "auto", "", isas.c_str(), 0, 0,
       "the newest instruction set that kernels use: of each kind the best one that needs no more; auto: all that this "
       "CPU has (--gemm and --attention, where they are given, are those)",
       "serve generate worker info peak"},
      {"cpus", text, "", "", "P0=0-3,D0=4+6", 0, 0,
       "--device cpu: the cores of each instance: its threads, as many, are bound to them, and its KV, scratch and, "
       "with --processes, weights are memory of their NUMA node; empty: any",
       kCluster},
      {"cpus", text, "", "", "0-3", 0, 0,
       "--device cpu: the cores of this worker, and so the node of its memory; empty: any", "worker"},
      {"huge-pages", choice, "transparent", "", "off|transparent", 0, 0,
       "pages of weights, KV pools and scratch: of 4 KiB, or of 2 MiB as far as the kernel has them", kEngine},
      {"gemm", choice, "auto", "", gemms.c_str(), 0, 0, "matrix product variant, of those that this CPU can run",
       kShape, sets_as<row_named<gemm_variants>, &BackendOptions::kernels, &Kernels::gemm>},
      {"attention", choice, "auto", "", attentions.c_str(), 0, 0, "attention variant, of those that this CPU can run",
       kShape, sets_as<row_named<attention_variants>, &BackendOptions::kernels, &Kernels::attention>},
      {"cuda-prefill-attention", text, "auto", "", "VARIANT", 0, 0,
       "--device cuda: attention of steps with several query tokens; auto: the fastest that takes the KV; "
       "naive for f32",
       kEngine, sets<&BackendOptions::cuda_prefill_attention>},
      {"cuda-decode-attention", text, "auto", "", "VARIANT", 0, 0,
       "--device cuda: attention of steps with one query token per sequence", kEngine,
       sets<&BackendOptions::cuda_decode_attention>},
      {"gpu-split", text, "priority", "", "off|priority|SMs", 0, 0,
       "--device cuda: how P and D share the card: by stream priority (D first), or that many SMs for P", kEngine,
       sets<&BackendOptions::gpu_split>},
      {"async-scheduling", choice, "on", "", "on|off", 0, 0,
       "--device cuda: plan the next step and choose tokens on the card while it computes", kEngine,
       sets<&ClusterOptions::ahead>},
      {"cuda-graphs", choice, "on", "", "on|off", 0, 0, "--device cuda: replay decode steps as captured graphs",
       kEngine, sets<&BackendOptions::cuda_graphs>},

      // The frontend.
      {"port", integer, "8000", "", "", 0, 65535, "TCP port; 0: any free one", "serve", sets<&HttpListenOptions::port>,
       "p"},
      {"host", text, "127.0.0.1", "", "ADDRESS", 0, 0, "address to listen on", "serve", sets<&HttpListenOptions::host>},
      {"served-model-name", text, "", "", "NAME,...", 0, 0,
       "names in the API, the first in answers; MODEL_DIR as given is one, too; empty: the name of the model's folder",
       "serve", sets<&ServedModel::names>},
      {"log-level", choice, "info", "", "debug|info|warning|error", 0, 0,
       "least of the log on stderr: debug tells of every answer, info of every completion, warning of those refused "
       "and of trouble, error of what failed here",
       "serve worker", sets<&ServerOptions::log_level>},
      {"chat-template", text, "auto", "", "FILE|auto|plain|none", 0, 0,
       "Jinja template that makes chat messages a prompt; auto: the model folder's; plain: their text, one per line",
       kEngine},
      {"generation-config", choice, "auto", "", "auto|none", 0, 0,
       "what a request that says nothing of it has as temperature, top_k, top_p, min_p and repetition_penalty; auto: "
       "what the model folder's generation_config.json says; none: 1, 0, 1, 0 and 1",
       "serve"},
      {"api-key", text, "", "secret", "KEY", 0, 0, "clients must send it as a Bearer token; empty: open", "serve",
       sets_as<one_or_none, &ServerOptions::api_keys>},
      {"api-key-file", text, "", "", "FILE", 0, 0,
       "more such keys, one on a line, which only the file's owner may read", "serve",
       sets<&ServerOptions::api_key_file>},
      {"insecure", flag, "off", "", "", 0, 0, "serve without a key also on an address that other machines can reach",
       "serve", sets<&ServerOptions::insecure>},
      {"allowed-hosts", text, "", "", "NAME,...", 0, 0,
       "names of this server in the Host header, and pages' that may use it, beside addresses, localhost and this "
       "machine's name; *: any",
       "serve", sets<&ServerOptions::allowed_hosts>},
      {"allowed-origins", text, "", "", "ORIGIN,...", 0, 0,
       "of pages elsewhere that browsers may let use this server (CORS), as https://app.example.com; *: any", "serve",
       sets<&ServerOptions::allowed_origins>},
      {"max-connections", integer, "2048", "connections", "", 1, 65536,
       "at once; beyond it the one without a request for longest is closed, or new ones wait", "serve",
       sets<&HttpListenOptions::max_connections>},
      {"request-timeout", number, "600", "s", "", 0, 86400, "of a request as a whole, queue included; 0: none", "serve",
       sets<&ServerOptions::request_timeout_s>},
      {"max-sessions", integer, "1024", "sessions", "", 1, 1 << 20,
       "conversations (session_id) that the server keeps, of each key an equal share; the one not used for longest "
       "goes first",
       "serve", sets<&ServerOptions::max_sessions>},
      {"session-bytes", bytes, "64MiB", "bytes", "", 4096, kMaxBytes, "of all conversations that the server keeps",
       "serve", sets<&ServerOptions::session_bytes>},
      {"metrics-prefix", text, "vllm", "", "PREFIX", 0, 0, "of the names in /metrics", "serve",
       sets<&ServerOptions::metrics_prefix>},
      {"dev-endpoints", flag, "off", "", "", 0, 0,
       "also answer /reset_prefix_cache, /retire_instance and /server_info, to loopback only", "serve",
       sets<&ServerOptions::dev_endpoints>},

      // generate.
      {"prompt", text, "", "", "TEXT", 0, 0, "what to continue", "generate", kByName, "p"},
      {"chat", flag, "off", "", "", 0, 0, "the prompt is a user's message: apply the chat template", "generate"},
      {"max-tokens", integer, "128", "tokens", "", 1, kMaxTokens, "output tokens at most", "generate",
       sets<&Request::max_tokens>},
      {"temperature", number, "0", "", "", 0, 100, "0: greedy", "generate",
       sets<&Request::sampling, &SamplingParams::temperature>},
      {"top-k", integer, "0", "tokens", "", 0, kMaxTokens, "sample among the k likeliest; 0: all", "generate",
       sets<&Request::sampling, &SamplingParams::top_k>},
      {"top-p", number, "1", "", "", 0, 1, "sample among the likeliest that together reach p", "generate",
       sets<&Request::sampling, &SamplingParams::top_p>},

      // info.
      {"tokens", integer, "2048", "tokens", "", 1, 1 << 17, "prompt length for which a transfer is worked out", "info"},
      {"ranks", text, "", "", "[xPyD:]AxB:CxD", 0, 0,
       "who sends what to whom: from prefill ranks, tp x pp, to decode ranks, as in 2x1:4x1, or of several instances, "
       "2P3D:2x1:4x1; the rank table of a design on NCCL groups, and what its notes print wrong",
       "info"},

      {"break-even", number, "0", "TFLOP/s", "", 0, 1e9,
       "from what bandwidth on the KV of a prefix is brought in less time than a machine that reaches so many TFLOP/s "
       "computes it; 0: not asked",
       "info"},
      {"link-gbps", number, "100", "Gb/s", "", 0.001, 1e6, "--break-even: of a link whose time is set beside it",
       "info"},

      // peak.
      {"threads", integer, "0", "threads", "", 0, 1024, "0: all cores of this machine", "peak"},
      {"device", choice, "cpu", "", device_names.c_str(), 0, 0,
       "what to measure; cuda: copies, products and launches of the card", "peak"},

      // Every subcommand.
      {"seed", integer, "0", "", "", 0, kMaxSeed, "of everything random", "serve generate worker simulate",
       sets<&ConductorOptions::seed>},
      {"json", text, "", "", "FILE", 0, 0, "also write the result there", "bench peak info prefix-stats simulate"},
      {"config", text, "", "", "FILE", 0, 0, "read options from FILE, lines `name = value`; the command line wins",
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
  if (options.values().contains("ngram-min") && options.integer("ngram-min") > options.integer("ngram-max"))
    return invalid("--ngram-min " + options.text("ngram-min") + ": expected at most --ngram-max, " +
                   options.text("ngram-max"));
  if (group == "worker" && options.text("join").empty() == options.text("registry").empty())
    return invalid("--join: expected the conductor's address, or --registry, where it is to be found");
  if (group == "serve") {
    const std::string names = "," + options.text("served-model-name") + ",";
    if (names != ",," && names.find(",,") != names.npos)
      return invalid("--served-model-name: expected NAME or NAME,NAME, got an empty one");
    if (std::any_of(names.begin(), names.end(), [](char c) { return uint8_t(c) < ' ' || c == 127; }))
      return invalid("--served-model-name: expected no control characters");
  }
  if (group == "serve" && options.given("registry") && options.text("cluster-bind").empty())
    return invalid("--registry: needs --cluster-bind, an address that workers can reach");
  if ((group == "serve" || group == "generate") && options.text("start-workers") == "off" &&
      (options.text("cluster-bind").empty() || options.text("cluster-key-file").empty()))
    return invalid("--start-workers off: needs --cluster-bind and --cluster-key-file, for workers from elsewhere");
  if ((group == "serve" || group == "generate" || group == "worker") && !options.text("disk-kv-dir").empty() &&
      options.integer("host-kv-bytes") == 0)
    return invalid("--disk-kv-dir: needs --host-kv-bytes, through which KV goes to the disk");
  if ((group == "serve" || group == "generate") && options.text("admission-decode") == "oracle")
    return invalid("--admission-decode oracle: nobody knows how long an answer will be: expected it of xpyd simulate");
  if (group == "generate" && options.text("prompt").empty()) return invalid("--prompt: expected a text to continue");
  return ok();
}

std::vector<std::string> without_effect(const Options& options) {
  std::vector<std::string> all;
  const auto& values = options.values();
  const auto ranks = values.find("ranks");  // stages as processes make instances processes, too
  for (const OptionRow& row : options.rows()) {
    const std::string_view help = row.help, needs = help.substr(0, help.find(':'));
    if (!needs.starts_with("--") || !values.contains(row.name) || !options.given(row.name)) continue;
    const size_t blank = std::min(needs.find(' '), needs.size());
    const auto other = values.find(needs.substr(2, blank - 2));  // a worker has no --processes
    if (needs == "--processes" && ranks != values.end() && ranks->second == "processes") continue;
    const std::string value(blank < needs.size() ? needs.substr(blank + 1) : "");
    if (other == values.end()) continue;
    const std::string& is = other->second;
    const bool none = is.empty() || is == "off" || is == "0" || is == "never";
    if (value.empty() ? none : is.find(value) == std::string::npos)
      all.push_back("--" + std::string(row.name) + " is for " + std::string(needs) + " alone");
  }
  return all;
}

}  // namespace xpyd::server
