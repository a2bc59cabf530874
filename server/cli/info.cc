// xpyd info: a model's shape, the memory that it takes, and the copies of one KV transfer. Reads only config.json.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/pool/block_pool.h"
#include "allocator/schemes.h"
#include "allocator/vattention/page_group_rows.h"
#include "attention/attention.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/cpu.h"
#include "base/utf8.h"
#include "disagg/handover/transfer_plan.h"
#include "model/cost/cost_model.h"
#include "model/folder.h"
#include "model/gemm/gemm.h"
#include "model/gemm/ops.h"
#include "model/moe/moe.h"
#include "model/weights/weights.h"
#include "server/build.h"
#include "server/cli/commands.h"

namespace xpyd::server {
namespace {

using nlohmann::json;

std::string mib(double bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.0f bytes (%.2f MiB)", bytes, bytes / (1 << 20));
  return text;
}

// Bytes of the loaded weights, as Weights::bytes() counts them: matrices in `dtype`, quantised ones with their scales,
// routers of experts, norms and biases in f32, and a tied embedding twice, as table and as packed lm_head. A card keeps
// a tied embedding once, unless one of the two is quantised, and has RoPE's table in f32 (CudaWeights).
double weight_bytes(const ModelConfig& c, Dtype table, Dtype dtype, int group, bool on_card) {
  double q = double(c.n_heads) * c.head_dim, kv = double(c.n_kv_heads) * c.head_dim, h = c.hidden;
  double layer = 2 * h;
  if (c.qkv_bias) layer += q + 2 * kv;
  if (c.o_bias) layer += h;
  if (c.mlp_bias) layer += 2.0 * c.intermediate + h;
  if (c.qk_norm) layer += 2.0 * c.head_dim;
  double vectors = c.n_layers * layer + h, routers = double(c.sparse_layers()) * c.experts.count * h;
  double matrices = double(c.parameters()) - vectors - routers - (c.tied_embeddings ? 0 : c.vocab * h);
  const double turns = on_card ? double(c.max_position) * c.head_dim : 0;
  const double tables = on_card && c.tied_embeddings ? 0 : 1;
  const double bits = stored_bits(dtype, group > 0 ? group : dtype == Dtype::int4 ? 128 : 0);
  return matrices * bits / 8 + tables * c.vocab * h * double(dtype_bytes(table)) + (vectors + routers + turns) * 4;
}

// Copies of one transfer of `tokens` tokens between two pools of this kind. Blocks are taken two apart, as in a pool in
// use, where neighbours in the sequence are not neighbours in memory.
size_t descriptors(const KvShape& shape, KvOrder order, int block_tokens, int tokens) {
  int blocks = (tokens + block_tokens - 1) / block_tokens;
  KvLayout layout{shape, order, block_tokens, 2 * blocks};
  std::vector<int32_t> table;
  for (int i = 0; i < blocks; ++i) table.push_back(2 * i);
  // Only addresses are computed; nothing is read there.
  auto* from = reinterpret_cast<std::byte*>(uintptr_t{1} << 44);
  auto* to = reinterpret_cast<std::byte*>(uintptr_t{1} << 45);
  KvView source{from, &layout, table.data(), 0}, destination{to, &layout, table.data(), 0};
  // Layers of layer_major memory never touch, so the count of one layer holds for all.
  int layers = order == KvOrder::layer_major ? 1 : shape.n_layers;
  TransferPlan plan;
  plan_transfer(source, destination, {0, tokens, 0, layers}, plan);
  return plan.copies.size() * size_t(shape.n_layers / layers);
}

// Prints a table's variants on one line. The chosen one is marked by name, because the machine's default may be a copy.
template <class Variant>
json describe_variants(const char* title, std::span<const Variant> variants, const Variant* wanted,
                       const Variant& otherwise) {
  const std::string chosen = (wanted ? *wanted : otherwise).name;
  json list = json::array();
  std::printf("%s (* chosen):", title);
  for (const Variant& variant : variants) {
    if (!variant.available()) continue;
    std::printf(" %s%s", variant.name, variant.name == chosen ? "*" : "");
    list.push_back({{"name", variant.name}, {"chosen", variant.name == chosen}});
  }
  std::printf("\n");
  return list;
}

// The inputs of info_main's parts.
struct Subject {
  ModelConfig config;
  ClusterOptions cluster;
  BackendOptions backend;
  int tokens = 0;  // of the transfer that is shown
};

json describe_model(const ModelConfig& c) {
  std::printf("model %s (%s)\n", c.name.c_str(), c.family.c_str());
  std::printf("  layers %d, hidden %d, intermediate %d, heads %d, KV heads %d, head dim %d\n", c.n_layers, c.hidden,
              c.intermediate, c.n_heads, c.n_kv_heads, c.head_dim);
  std::printf("  vocabulary %d, context %d tokens, sliding window %d%s\n", c.vocab, c.max_position, c.sliding_window,
              c.tied_embeddings ? ", tied embeddings" : "");
  std::printf("  parameters %ld%s\n\n", c.parameters(),
              c.n_predict_heads > 0 ? ", plus a multi-token prediction head (--speculate mtp)" : "");
  return {{"n_layers", c.n_layers},
          {"hidden", c.hidden},
          {"intermediate", c.intermediate},
          {"n_heads", c.n_heads},
          {"n_kv_heads", c.n_kv_heads},
          {"head_dim", c.head_dim},
          {"vocab", c.vocab},
          {"max_position", c.max_position},
          {"sliding_window", c.sliding_window},
          {"tied_embeddings", c.tied_embeddings}};
}

// What experts save: a token's share of the parameters, and the bytes and FLOPs of decode steps of several sizes.
json describe_experts(const Subject& subject) {
  const ModelConfig& c = subject.config;
  const Experts& e = c.experts;
  const LoadOptions& load = subject.backend.load;
  const CostModel cost{c, matrix_dtype(c, load), load.dtype, subject.cluster.kv.shape.dtype};
  std::printf("experts: %d in each of %d sparse layers, %d used by a token, intermediate %d\n", e.count,
              c.sparse_layers(), e.used, e.intermediate);
  std::printf("  %ld of %ld parameters are active\n", c.active_parameters(), c.parameters());
  json steps = json::array();
  for (const int tokens : {1, 4, 16, 64, 256}) {
    const Work work = cost.decode(tokens, 1);
    std::printf("  a decode step of %3d tokens uses %.1f experts of a layer: %.2f GB, %.2f GFLOP\n", tokens,
                e.touched(tokens), work.bytes / 1e9, work.flops / 1e9);
    steps.push_back({{"tokens", tokens}, {"experts", e.touched(tokens)}, {"bytes", work.bytes}, {"flops", work.flops}});
  }
  std::printf("\n");
  return {{"count", e.count},
          {"used", e.used},
          {"intermediate", e.intermediate},
          {"sparse_layers", c.sparse_layers()},
          {"active_parameters", c.active_parameters()},
          {"decode_steps", steps}};
}

json describe_weights(const Subject& subject) {
  json out;
  std::printf("memory for weights, by --weight-dtype (* chosen)\n");
  const LoadOptions& load = subject.backend.load;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::fp8, Dtype::int8, Dtype::int4}) {
    bool chosen = dtype == matrix_dtype(subject.config, load);
    const bool table = dtype == Dtype::f32 || dtype == Dtype::bf16;  // --dtype also sets the table's type
    const bool on_card = subject.backend.device->name != std::string("cpu");
    if (on_card && !table) continue;
    double bytes = weight_bytes(subject.config, table && (on_card || !load.weight_dtype) ? dtype : load.dtype, dtype,
                                load.weight_group, on_card);
    std::printf("  %c %-5s %s\n", chosen ? '*' : ' ', dtype_name(dtype), mib(bytes).c_str());
    out[dtype_name(dtype)] = bytes;
  }
  return out;
}

json describe_kv_tokens(const Subject& subject) {
  const ModelConfig& c = subject.config;
  json out;
  std::printf("\nKV of one token, by --kv-dtype (* chosen)\n");
  const double f16 = double(kv_shape(c, Dtype::f16).token_bytes());
  for (Dtype dtype : kKvDtypes) {
    const KvShape shape = kv_shape(c, dtype);
    if (!kv_rows_supported(shape)) continue;  // int4 of an odd head_dim
    const size_t bytes = shape.token_bytes();
    bool chosen = dtype == subject.cluster.kv.shape.dtype;
    std::printf("  %c %-8s %zu bytes, %zu per layer: %zu tokens per GiB, %.2f times as many as with f16\n",
                chosen ? '*' : ' ', dtype_name(dtype), bytes, bytes / size_t(c.n_layers), (size_t{1} << 30) / bytes,
                f16 / double(bytes));
    out[dtype_name(dtype)] = bytes;
  }
  // The xPyD notes' arithmetic: prompts of 10,000 tokens/s produce 3 GB of KV a second (LLaMA-2-70B in f16).
  const double rate = 1e4, made = rate * double(subject.cluster.kv.shape.token_bytes());
  std::printf("  a prefill of %.0f tokens/s makes %.2f GB of KV per second: %.1f Gb/s between P and D\n", rate,
              made / 1e9, 8 * made / 1e9);
  return out;
}

// The virtual buffers of one rank as the vAttention paper counts them (section 5.2): one for K and one for V of each
// layer, of B sequences of L tokens of S bytes. B is --max-batch. An instance reserves twice as much, because the KV of
// as many further sequences may be in transfer. Its ranks are compared with what one process has.
json describe_addresses(const ClusterOptions& cluster) {
  const KvShards shards = cluster.shards(Role::prefill);
  KvShape rank;            // the rank with the most bytes
  double token_bytes = 0;  // of all ranks
  for (int i = 0; i < shards.n_ranks(); ++i) {
    const KvShape own = rank_shape(cluster.kv.shape, shards, i);
    token_bytes += double(own.token_bytes());
    if (own.token_bytes() > rank.token_bytes()) rank = own;
  }
  const double reserved = token_bytes * cluster.max_model_len * max_sequences(cluster.max_batch);
  const double n = 2.0 * rank.n_layers, batch = double(cluster.max_batch);
  const double token = double(rank.token_bytes()) / n, buffer = batch * cluster.max_model_len * token;
  std::printf(
      "    addresses   %.0f buffers of %.0f sequences x %d tokens x %.0f bytes = %.0f bytes, %.0f bytes in all%s\n", n,
      batch, cluster.max_model_len, token, buffer, n * buffer, shards.n_ranks() > 1 ? ", on each rank" : "");
  std::printf("    reserved    %.0f bytes by an instance: %.2f %% of the 2^47 (128 TiB) that a process has\n", reserved,
              100 * reserved / allocator::kProcessAddresses);
  return {{"buffers", n},
          {"sequences", batch},
          {"tokens", cluster.max_model_len},
          {"token_bytes", token},
          {"buffer_bytes", buffer},
          {"bytes", n * buffer},
          {"ranks", shards.n_ranks()},
          {"reserved_bytes", reserved},
          {"process_share", reserved / allocator::kProcessAddresses}};
}

json describe_pool(const Subject& subject, const KvScheme& scheme) {
  const KvOptions& kv = subject.cluster.kv;
  auto plan = plan_pool(scheme.name, kv);
  if (!plan) {
    std::printf("  %-11s not possible: %s\n", scheme.name, plan.error().message.c_str());
    json none = {{"scheme", scheme.name}, {"error", plan.error().message}};
    if (scheme.page_groups) none["addresses"] = describe_addresses(subject.cluster);
    return none;
  }
  const KvLayout& layout = plan.value();
  int64_t tokens = int64_t(layout.n_blocks) * layout.block_tokens;
  const size_t block_bytes = scheme.block_bytes(kv);
  size_t unused = kv.pool_bytes - size_t(layout.n_blocks) * block_bytes;
  // A slot is never in a prefix cache.
  bool shares = scheme.prefix_index && layout.block_tokens < subject.cluster.max_model_len;
  size_t tables = allocator::BlockPool::metadata_bytes(layout, shares);
  std::printf("  %-11s %d blocks of %d tokens, %zu bytes each: %ld tokens, %zu bytes unused; block tables %zu bytes\n",
              scheme.name, layout.n_blocks, layout.block_tokens, block_bytes, long(tokens), unused, tables);
  json out = {{"scheme", scheme.name},      {"blocks", layout.n_blocks}, {"block_tokens", layout.block_tokens},
              {"block_bytes", block_bytes}, {"tokens", tokens},          {"unused_bytes", unused},
              {"table_bytes", tables}};
  if (scheme.page_groups) out["addresses"] = describe_addresses(subject.cluster);
  for (auto [order, name] : {std::pair{KvOrder::layer_major, "layer_major"}, {KvOrder::token_major, "token_major"}}) {
    const int run = scheme.page_groups ? kv.max_sequence_tokens : layout.block_tokens;  // contiguous, in tokens
    size_t copies = descriptors(kv.shape, order, run, subject.tokens);
    size_t bytes = size_t(subject.tokens) * kv.shape.token_bytes();
    std::printf("    %-11s %zu transfer descriptors for %d tokens, %zu bytes each on average\n", name, copies,
                subject.tokens, bytes / copies);
    out["transfer"][name] = {{"tokens", subject.tokens}, {"descriptors", copies}, {"bytes", bytes}};
  }
  return out;
}

// Ranks of P and D, as --ranks gives them.
struct Ranks {
  KvShards p, d;
};

Ranks read_ranks(const std::string& text, const ModelConfig& c) {
  const KvShards one{.n_layers = c.n_layers, .n_kv_heads = c.n_kv_heads};
  Ranks ranks{.p = one, .d = one};
  auto& [p, d] = ranks;
  char more;
  if (std::sscanf(text.c_str(), "%4dx%4d:%4dx%4d%c", &p.tp, &p.pp, &d.tp, &d.pp, &more) != 4)
    throw invalid("--ranks: expected tp x pp of both sides, such as 2x1:4x1, got '" + printable(text) + "'");
  need(check_model_shards(c, p, "--ranks: prefill tp", "prefill pp"));
  need(check_model_shards(c, d, "--ranks: decode tp", "decode pp"));
  return ranks;
}

// The experts that each tensor rank of a side holds whole with --expert-parallel.
json describe_expert_ranks(const char* side, const Experts& e, const KvShards& shards) {
  json ranks = json::array();
  for (int r = 0; r < shards.tp; ++r) {
    const Range own = rank_experts(e.count, r, shards.tp);
    std::printf("  %s tensor rank %-2d  ", side, r);
    if (own.begin == own.end)
      std::printf("no expert\n");
    else
      std::printf("experts %d to %d of every sparse layer\n", own.begin, own.end);
    ranks.push_back({own.begin, own.end});
  }
  return ranks;
}

json describe_ranks(const KvShape& shape, const Experts& experts, const Ranks& ranks) {
  const auto& [p, d] = ranks;
  json moves = json::array();
  std::printf("KV of one token, from P (tp %d, pp %d) to D (tp %d, pp %d)\n", p.tp, p.pp, d.tp, d.pp);
  for (const ShardMove& move : map_shards(p, d).moves) {
    const auto [layers, heads] = move.rect;
    KvShape part = shape;
    part.n_layers = layers.size();
    part.n_kv_heads = heads.size();
    std::printf("  P rank %-2d -> D rank %-2d  layers %d to %d, KV heads %d to %d: %zu bytes\n", move.source_rank,
                move.destination_rank, layers.begin, layers.end, heads.begin, heads.end, part.token_bytes());
    moves.push_back({{"from", move.source_rank},
                     {"to", move.destination_rank},
                     {"layers", {layers.begin, layers.end}},
                     {"heads", {heads.begin, heads.end}},
                     {"bytes", part.token_bytes()}});
  }
  if (experts.count == 0) return {{"moves", moves}};
  std::printf(
      "\nexperts with --expert-parallel on; off: each rank holds a slice of every expert. KV does not change.\n");
  const json on_p = describe_expert_ranks("P", experts, p), on_d = describe_expert_ranks("D", experts, d);
  return {{"moves", moves}, {"experts", {{"prefill", on_p}, {"decode", on_d}}}};
}

}  // namespace

int info_main(const Options& options) try {
  const std::string dir = model_dir(options);
  need(check_result_file(options));
  need(check_model_folder(dir));
  Result<ModelConfig> loaded = load_model_config(dir);
  if (!loaded) throw invalid(loaded.error().message);
  Subject subject{.config = loaded.value()};
  const ModelConfig& config = subject.config;
  ClusterOptions& cluster = subject.cluster;
  read_options(options, cluster, subject.backend);
  int& max_len = cluster.max_model_len;
  if (max_len > config.max_position)
    throw invalid("--max-model-len: exceeds the model's context of " + std::to_string(config.max_position) + " tokens");
  if (max_len == 0) max_len = config.max_position;
  const int tokens = int(options.integer("tokens"));
  subject.tokens = std::min(tokens, max_len);
  if (options.given("tokens") && tokens > max_len)
    throw invalid("--tokens: exceeds the longest sequence of " + std::to_string(max_len) + " tokens");
  cluster.kv.shape = kv_shape(config, cluster.kv.shape.dtype);
  cluster.kv.max_sequence_tokens = max_len;
  cluster.kv.vattention.max_sequences = max_sequences(cluster.max_batch);
  need(check_model_shards(config, cluster.shards(Role::prefill), "--prefill-tp", "--prefill-pp"));

  if (const std::string& ranks = options.text("ranks"); !ranks.empty()) {  // answered alone
    json answer = {{"model", config.name},
                   {"ranks", describe_ranks(cluster.kv.shape, config.experts, read_ranks(ranks, config))}};
    std::fflush(stdout);
    need(write_result_file(options, std::move(answer)));
    return 0;
  }
  json out = {{"model", config.name}, {"family", config.family}, {"parameters", config.parameters()}};
  out["config"] = describe_model(config);
  if (config.experts.count > 0) out["experts"] = describe_experts(subject);
  out["weight_bytes"] = describe_weights(subject);
  out["kv_bytes_per_token"] = describe_kv_tokens(subject);
  std::printf("pool of --kv-bytes %s, by --allocator\n", mib(double(cluster.kv.pool_bytes)).c_str());
  for (const KvScheme& scheme : kv_schemes()) out["pools"].push_back(describe_pool(subject, scheme));
  out["cpu_kernels"] = best_row(kIsas).name;
  std::printf("\nCPU kernels: %s\n", best_row(kIsas).name);
  for (const IsaRow& row : kIsas)
    if (const char* lacks = cpu_lacks(row.needs); *lacks)
      std::printf("  %s cannot be used: this CPU lacks %s\n", row.name, lacks);
  out["gemm"] = describe_variants("gemm variants", gemm_variants(), subject.backend.kernels.gemm, default_gemm());
  out["attention"] = describe_variants("attention variants", attention_variants(), subject.backend.kernels.attention,
                                       default_attention());
  out["ops"] = describe_variants("row operation variants", ops_variants(), static_cast<const Ops*>(nullptr),
                                 default_ops());
  std::fflush(stdout);
  need(write_result_file(options, std::move(out)));
  return 0;
} catch (const Error& error) {
  return fail(": info", error);
}

}  // namespace xpyd::server
