#include "tests/tiny_model.h"

#include "model/gemm/gemm.h"
#include "tests/catch.h"

namespace xpyd::testing {

namespace {

struct Tiny {
  explicit Tiny(int layers, bool head = false) {
    config = parse_model_config(R"({
      "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
      "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4,
      "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 512,
      "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false, "num_nextn_predict_layers": 1,
      "num_hidden_layers": )" + std::to_string(layers) +
                                    "}",
                                "tiny/config.json")
                 .value();
    if (head) REQUIRE(predict_next_tokens(config).ok());
    ThreadTeam team(1);
    weights = load_weights("tiny", config, {.dummy = true, .seed = 7}, team).value();
  }
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
};

const Tiny& tiny(int layers, bool head = false) {
  XPYD_CHECK(layers == 2 || layers == 4);
  static const Tiny two(2), four(4), two_and_head(2, true);
  if (head) return two_and_head;
  return layers == 2 ? two : four;
}

}  // namespace

const ModelConfig& tiny_config(int layers) { return tiny(layers).config; }
std::shared_ptr<const Weights> tiny_weights(int layers, Dtype dtype) {
  if (dtype == Dtype::f32) return tiny(layers).weights;
  static std::map<std::pair<int, Dtype>, std::shared_ptr<const Weights>> made;
  auto& weights = made[{layers, dtype}];
  ThreadTeam team(1);
  const LoadOptions options{.weight_dtype = dtype, .weight_group = 16, .dummy = true, .seed = 7};
  if (!weights) weights = load_weights("tiny", tiny_config(layers), options, team).value();
  return weights;
}

std::shared_ptr<const Weights> tiny_experts(const std::string& family, int layers, Dtype dtype) {
  static std::map<std::tuple<std::string, int, Dtype>, std::shared_ptr<const Weights>> made;
  auto& weights = made[{family, layers, dtype}];
  if (weights) return weights;
  ModelConfig config = parse_model_config(R"({
      "model_type": ")" + family + R"(", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
      "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 512, "rope_theta": 10000.0, )" +
                                              (family == "mixtral" ? R"("intermediate_size": 20,
      "num_local_experts": 5, "num_experts_per_tok": 2, )"
                                                                   : R"("intermediate_size": 44, "num_experts": 9,
      "moe_intermediate_size": 20, "num_experts_per_tok": 3, "norm_topk_prob": true, "mlp_only_layers": [1], )") +
                                              R"("num_hidden_layers": )" + std::to_string(layers) + "}",
                                          family + "/config.json")
                           .value();
  ThreadTeam team(1);
  const LoadOptions options{.weight_dtype = dtype, .weight_group = 16, .dummy = true, .seed = 7};
  return weights = load_weights(family, config, options, team).value();
}

std::string TinySetup::describe() const {
  return family + " " + topology + " layers " + std::to_string(layers) + " " + scheme + " block " +
         std::to_string(block_tokens) + (order == KvOrder::layer_major ? " layer_major " : " token_major ") +
         dtype_name(kv_dtype) + " " + batching + " step " + std::to_string(step_tokens) + " " + chunk_policy + " " +
         transport + " stream " + std::to_string(int(stream_kv)) + (reserve_blocks ? " escrow" : "") +
         (!prefix_cache ? " no prefix cache"
          : radix       ? " radix cache"
                        : " prefix cache") +
         " share " + std::to_string(int(share)) + " threads " + std::to_string(threads) + " tp " +
         std::to_string(prefill_tp) + ":" + std::to_string(decode_tp) + " pp " + std::to_string(prefill_pp) + ":" +
         std::to_string(decode_pp) + " whole experts " + std::to_string(prefill_whole) + ":" +
         std::to_string(decode_whole) + " window " + std::to_string(window) + " drafts " +
         (speculation.drafter ? speculation.drafter->name : "off") + " host " + std::to_string(tiers.host_bytes) +
         (tiers.disk_dir.empty() ? "" : " disk " + std::to_string(tiers.disk_bytes));
}

void Recorder::on_event(TokenEvent event) {
  std::lock_guard lock(mutex_);
  Choice& choice = choices_[{event.request_id, event.choice}];
  if (event.token >= 0) choice.tokens.push_back(event.token);
  if (event.finish != FinishReason::none) {
    ++choice.ends;
    choice.finish = event.finish;
    choice.logits_hash = event.logits_hash;
    choice.error = event.error;
  }
  choice.cached_tokens = event.cached_tokens;
}

Recorder::Choice Recorder::choice(uint64_t request, int index) const {
  std::lock_guard lock(mutex_);
  auto found = choices_.find({request, index});
  return found == choices_.end() ? Choice{} : found->second;
}

int Recorder::ended() const {
  std::lock_guard lock(mutex_);
  int n = 0;
  for (const auto& [key, choice] : choices_) n += choice.ends;
  return n;
}

TinyCluster::TinyCluster(const TinySetup& setup,
                         Result<std::unique_ptr<KvTransport>> (*transport)(const TransportOptions&)) {
  transport_row = *find_transport(setup.transport);
  if (transport) transport_row.make = transport;
  ClusterOptions options;
  options.topology = parse_topology(setup.topology).value();
  options.kv_scheme = find_kv_scheme(setup.scheme);
  options.kv.order = setup.order;
  options.kv.pool_bytes = setup.pool_bytes;
  options.kv.block_tokens = setup.block_tokens;
  options.kv.vattention.page_group_bytes = setup.page_group_bytes;
  options.kv.prefix_cache = setup.prefix_cache;
  options.kv.radix = setup.radix;
  options.kv.vattention.share = setup.share;
  options.kv.tiers = setup.tiers;
  options.batching = find_batch_policy(setup.batching);
  options.placement = find_placement_policy(setup.placement);
  options.transport = &transport_row;
  options.disagg = find_disagg_policy(setup.disagg);
  options.disagg_options = setup.disagg_options;
  options.stream_kv = setup.stream_kv;
  options.reserve_blocks = setup.reserve_blocks;
  options.decode_copies = setup.decode_copies;
  options.max_batch = setup.max_batch;
  options.step_tokens = setup.step_tokens;
  options.speculation = setup.speculation;
  options.chunks = find_chunk_policy(setup.chunk_policy);
  options.max_model_len = tiny_config(setup.layers).max_position;
  options.ahead = setup.ahead;
  options.admission = find_admission_policy(setup.admission);
  options.objectives = setup.objectives;
  options.fetch = find_fetch_policy(setup.fetch);
  options.log = setup.log;
  int max_step = std::max(setup.step_tokens, setup.max_batch);
  for (size_t i = 0; i < options.topology.size(); ++i) teams.push_back(std::make_unique<ThreadTeam>(setup.threads));
  const bool head = setup.speculation.on() && setup.speculation.drafter->uses_head;
  options.kv.shape = kv_shape(tiny(setup.layers, head).config, setup.kv_dtype);
  options.prefill_tp = setup.prefill_tp;
  options.prefill_pp = setup.prefill_pp;
  options.decode_tp = setup.decode_tp;
  options.decode_pp = setup.decode_pp;
  std::vector<ShardOptions> shards;
  for (Role role : options.topology)
    shards.push_back({.shards = options.shards(role),
                      .threads_per_rank = setup.threads,
                      .window = setup.window,
                      .whole_experts = role == Role::decode ? setup.decode_whole : setup.prefill_whole});
  const Kernels kernels{.gemm = setup.exact ? &default_gemm(true) : nullptr};
  const auto weights = setup.make_model          ? nullptr
                       : head                    ? tiny(setup.layers, true).weights
                       : setup.family != "llama" ? tiny_experts(setup.family, setup.layers, setup.weight_dtype)
                                                 : tiny_weights(setup.layers, setup.weight_dtype);
  options.make_model = [this, max_step, shards, setup, kernels, weights](int i, DeviceQueue&) {
    const ShardOptions& own = shards[size_t(i)];
    if (own.shards.n_ranks() > 1) return make_sharded_llama(weights, own, max_step, setup.max_batch, kernels);
    return make_llama(weights, *teams[size_t(i)], max_step, setup.max_batch, kernels);
  };
  options.device = setup.device;
  if (setup.make_model)
    options.make_model = [setup](int, DeviceQueue& queue) { return setup.make_model(setup, queue); };
  cluster = Cluster::create(std::move(options), clock).value();
}

Status TinyCluster::submit(std::shared_ptr<const Request> request) {
  return cluster->submit(std::move(request), recorder);
}

void TinyCluster::run() {
  while (cluster->turn()) {
  }
}

std::shared_ptr<Request> tiny_request(uint64_t id, std::vector<int32_t> prompt, int max_tokens) {
  auto request = std::make_shared<Request>();
  request->id = id;
  request->prompt = std::move(prompt);
  request->sampling.temperature = 0;
  request->max_tokens = max_tokens;
  return request;
}

std::vector<std::vector<int32_t>> ragged_prompts() {
  std::vector<std::vector<int32_t>> prompts;
  for (int length : {1, 5, 15, 16, 17, 33, 64, 65, 90}) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < length; ++i) prompt.push_back((i * 7 + (i < 40 ? 3 : length)) % 96);
    prompts.push_back(prompt);
  }
  return prompts;
}

RaggedRun run_ragged(const TinySetup& setup) {
  TinyCluster tiny(setup);
  uint64_t id = 0;
  auto prompts = ragged_prompts();
  for (const auto& prompt : prompts) REQUIRE(tiny.submit(tiny_request(id++, prompt, 6)).ok());
  // Some transports have threads of their own, a card copies by itself, and a request that waits for an offload tier
  // may be tried again after a time. Meanwhile nothing moves here.
  const bool alone = setup.device == &cpu_device() && setup.tiers.host_bytes == 0 &&
                     (setup.transport == "local" || setup.transport == "handoff");
  for (const double until = tiny.clock.now() + 30; tiny.run(), tiny.recorder->ended() < int(prompts.size());)
    REQUIRE((!alone && tiny.clock.now() < until));

  for (const auto& instance : tiny.cluster->instances())
    instance->check_invariants(tiny.cluster->stats().shared_pool == false);
  RaggedRun run{.hash = tiny.cluster->stats().conductor.logits_hash, .tokens = {}};
  for (const auto& instance : tiny.cluster->instances()) {
    run.hit_tokens += instance->memory().stats().prefix_hit_tokens;
    run.draft_tokens += instance->stats().draft_tokens;
    run.accepted_tokens += instance->stats().accepted_tokens;
  }
  for (uint64_t i = 0; i < id; ++i) run.tokens.push_back(tiny.recorder->choice(i).tokens);
  return run;
}

}  // namespace xpyd::testing
