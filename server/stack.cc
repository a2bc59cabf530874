#include "server/stack.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "allocator/kv_plan.h"
#include "attention/attention.h"
#include "model/gemm.h"

namespace xpyd {
namespace {

constexpr const char* kNoDemoModel =
    "no MODEL_DIR was given, and this build does not carry the embedded demo model yet: give the "
    "folder of a "
    "Hugging Face model (config.json, model.safetensors, tokenizer.json), for example "
    "`make serve MODEL=path/to/model` or `xpyd serve path/to/model`";

StreamKv stream_kv(const std::string& name) {
  return name == "layer" ? StreamKv::layer : name == "chunk" ? StreamKv::chunk : StreamKv::request;
}

Dtype dtype(const std::string& name) { return name == "bf16" ? Dtype::bf16 : Dtype::f32; }

// The row of that name; null for "auto", which is the machine's default. The options table holds names of
// available rows only.
template <class Variant>
const Variant* variant(std::span<const Variant> rows, const std::string& name) {
  for (const Variant& row : rows) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

}  // namespace

Result<std::unique_ptr<Stack>> build_stack(const Options& options) {
  if (options.positional().empty()) return invalid(kNoDemoModel);
  const std::string& dir = options.positional()[0];
  if (!std::filesystem::is_directory(dir)) return invalid("MODEL_DIR " + dir + " is not a folder");
  Result<std::vector<Role>> topology = parse_topology(options.text("topology"));
  if (!topology) return topology.error();
  int n_instances = int(topology.value().size());
  int cores = std::max(1, int(std::thread::hardware_concurrency()));
  int threads = int(options.integer("threads"));
  if (threads == 0) threads = std::max(1, cores / n_instances);
  bool pin = options.text("pin") == "on";
  if (pin && threads * n_instances > cores)
    return invalid("--pin on: " + std::to_string(n_instances) + " instances of " +
                   std::to_string(threads) + " threads need more than the " +
                   std::to_string(cores) + " cores here");

  auto stack = std::make_unique<Stack>();
  Result<ModelConfig> config = load_model_config(dir);
  if (!config) return config.error();
  stack->config = config.value();
  bool dummy = options.text("load-format") == "dummy";
  if (!dummy || std::filesystem::exists(dir + "/tokenizer.json")) {
    Result<std::unique_ptr<const Tokenizer>> tokenizer = Tokenizer::load(dir);
    if (!tokenizer) return tokenizer.error();
    stack->tokenizer = std::move(tokenizer).value();
    if (stack->tokenizer->vocab_size() > stack->config.vocab)
      return invalid(dir + "/tokenizer.json has ids up to " +
                     std::to_string(stack->tokenizer->vocab_size() - 1) +
                     ", config.json's vocab_size is " + std::to_string(stack->config.vocab));
    if (const std::string& name = options.text("chat-template"); name != "none") {
      Result<const ChatTemplate*> chat = find_chat_template(name, dir, *stack->tokenizer);
      if (!chat) return chat.error();
      stack->chat_template = chat.value();
    }
  }
  stack->max_model_len = stack->config.max_position;
  if (int64_t wanted = options.integer("max-model-len"); wanted > 0) {
    if (wanted > stack->config.max_position)
      return invalid("--max-model-len " + std::to_string(wanted) + " exceeds the model's " +
                     std::to_string(stack->config.max_position));
    stack->max_model_len = int(wanted);
  }
  {
    ThreadTeam loaders(cores);
    LoadOptions load{.dtype = dtype(options.text("dtype")),
                     .dummy = dummy,
                     .seed = uint64_t(options.integer("seed"))};
    Result<std::shared_ptr<const Weights>> weights =
        load_weights(dir, stack->config, load, loaders);
    if (!weights) return weights.error();
    stack->weights = weights.value();
  }

  ClusterOptions cluster;
  cluster.topology = topology.value();
  cluster.kv_scheme = find_kv_scheme(options.text("allocator"));
  cluster.kv.order =
      options.text("kv-layout") == "token_major" ? KvOrder::token_major : KvOrder::layer_major;
  cluster.kv.pool_bytes = size_t(options.integer("kv-bytes"));
  cluster.kv.block_tokens = int(options.integer("block-tokens"));
  cluster.kv.prefix_cache = options.text("prefix-cache") == "on";
  cluster.batching = find_batch_policy(options.text("batching"));
  cluster.placement = find_placement_policy(options.text("placement"));
  cluster.transport = find_transport(options.text("transport"));
  cluster.stream_kv = stream_kv(options.text("stream-kv"));
  cluster.max_batch = int(options.integer("max-batch"));
  cluster.step_tokens = int(
      options.integer(options.text("batching") == "chunked" ? "chunk-tokens" : "max-step-tokens"));
  cluster.max_model_len = stack->max_model_len;
  cluster.max_queue = int(options.integer("max-queue"));
  cluster.eos_tokens = stack->config.eos_tokens;
  cluster.tokenizer = stack->tokenizer.get();
  cluster.seed = uint64_t(options.integer("seed"));
  int max_step = std::max(cluster.step_tokens, cluster.max_batch);
  for (int i = 0; i < n_instances; ++i) {
    std::vector<int> cpus;
    for (int t = 0; pin && t < threads; ++t) cpus.push_back(i * threads + t);
    stack->teams.push_back(std::make_unique<ThreadTeam>(threads, cpus));
  }
  Kernels kernels{variant(gemm_variants(), options.text("gemm")),
                  variant(attention_variants(), options.text("attention"))};
  cluster.make_model = [&stack = *stack, max_step, batch = cluster.max_batch, kernels](int i) {
    return make_llama(stack.weights, *stack.teams[size_t(i)], max_step, batch, kernels);
  };
  auto model = cluster.make_model(0);
  cluster.kv.shape = model->kv_shape(dtype(options.text("kv-dtype")));
  model.reset();
  // Without --max-model-len the context is what one pool holds, if that is less than the model's.
  if (cluster.kv_scheme->name != std::string("contiguous")) {
    Result<KvLayout> layout = plan_pool(cluster.kv_scheme->name, cluster.kv);
    if (!layout) return layout.error();
    int64_t holds = int64_t(layout.value().n_blocks) * layout.value().block_tokens;
    if (holds < stack->max_model_len) {
      if (options.integer("max-model-len") > 0)
        return invalid("--max-model-len " + std::to_string(stack->max_model_len) + ": --kv-bytes holds " +
                       std::to_string(holds) + " tokens");
      std::fprintf(stderr, "xpyd: --kv-bytes holds %d tokens: --max-model-len is %d, the model's is %d\n",
                   int(holds), int(holds), stack->max_model_len);
      stack->max_model_len = cluster.max_model_len = int(holds);
    }
  }
  Result<std::unique_ptr<Cluster>> built = Cluster::create(std::move(cluster), stack->clock);
  if (!built) return built.error();
  stack->cluster = std::move(built).value();
  return stack;
}

}  // namespace xpyd
