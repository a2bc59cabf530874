// Tensor-parallel ranks and pipeline stages have the bits of one rank, for every shape.
#include <numeric>
#include <thread>

#include "attention/attention.h"
#include "model/llama/llama_rank.h"
#include "model/weights/weights.h"
#include "tests/model/llama_cases.h"

namespace xpyd::testing::sharded_llama_test {

// KV of up to `n_slots` sequences, with a memory for each rank. It is NaN where nothing was written.
struct RankedKv {
  RankedKv(const ModelConfig& config, const KvShards& shards, int max_tokens, int n_slots = 1,
           KvOrder order = KvOrder::layer_major, Dtype dtype = Dtype::f32)
      : n_ranks(shards.n_ranks()) {
    for (int rank = 0; rank < n_ranks; ++rank) {
      layouts.push_back({rank_shape(kv_shape(config, dtype), shards, rank), order, max_tokens, n_slots});
      pools.emplace_back(layouts.back().pool_bytes());
      std::memset(pools.back().data(), 0xff, pools.back().size());
    }
  }
  // [n_ranks, slots]
  std::vector<KvView> views(const std::vector<int>& slots) const {
    std::vector<KvView> all;
    for (int rank = 0; rank < n_ranks; ++rank)
      for (int slot : slots) all.push_back({pools[size_t(rank)].data(), &layouts[size_t(rank)], nullptr, slot});
    return all;
  }
  int n_ranks;
  std::vector<KvLayout> layouts;
  std::vector<Buffer> pools;
};

const char* kWide = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
  "hidden_size": 40, "intermediate_size": 91, "num_hidden_layers": 3, "num_attention_heads": 8,
  "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 117, "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
  "attention_bias": true, "mlp_bias": true
})";

// A sparse layer, then a dense one, then a sparse one. 27 columns of an expert, so that K-groups are unequal.
const char* kExperts = R"({
  "model_type": "qwen3_moe", "hidden_size": 40, "intermediate_size": 91, "moe_intermediate_size": 27,
  "num_experts": 10, "num_experts_per_tok": 4, "norm_topk_prob": true, "mlp_only_layers": [1],
  "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 117,
  "max_position_embeddings": 256
})";

struct Loaded {
  Loaded(const std::string& text, Dtype dtype) {
    auto parsed = parse_model_config(text, "wide/config.json");
    INFO((parsed ? "" : parsed.error().message));
    REQUIRE(parsed.ok());
    config = parsed.value();
    weights = load_weights("wide", config, {.weight_dtype = dtype, .weight_group = 16, .dummy = true, .seed = 5}, team)
                  .value();
  }
  explicit Loaded(const std::string& fixture) {
    config = load_model_config(data_path("models/" + fixture)).value();
    weights = load_weights(data_path("models/" + fixture), config, {}, team).value();
  }
  KvShards shards(int tp, int pp) const {
    return {.n_layers = config.n_layers, .n_kv_heads = config.n_kv_heads, .tp = tp, .pp = pp};
  }
  ThreadTeam team{1};
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
};

constexpr int kScript[][3] = {{19, 33, 0}, {0, 5, 9}, {1, 0, 4}, {1, 1, 21}, {1, 1, 1}};

// Three sequences: the first in one step, the second in two, the third in chunks beside the last tokens of the others.
// Returns all logits in order.
std::vector<float> run_script(Model& model, const RankedKv& kv) {
  auto token = [&](int i) { return int32_t((i * 31 + 7) % model.config().vocab); };
  std::vector<int> lengths(3, 0);
  std::vector<float> all;
  for (const auto& step : kScript) {
    std::vector<std::vector<int32_t>> tokens;
    std::vector<int> slots, past;
    for (int s = 0; s < 3; ++s) {
      if (step[s] == 0) continue;
      slots.push_back(2 - s);
      past.push_back(lengths[size_t(s)]);
      tokens.emplace_back();
      for (int i = 0; i < step[s]; ++i) tokens.back().push_back(token(100 * s + lengths[size_t(s)]++));
    }
    const auto logits = run_step(model, kv.views(slots), tokens, past);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

// The same script with each step as a wave, as many under way as allowed. The arguments of begin() are destroyed right
// after the call.
std::vector<float> run_in_waves(Model& model, const RankedKv& kv, bool watched, int& unwritten) {
  std::vector<int> lengths(3, 0);
  std::vector<std::vector<float>> logits;
  int begun = 0, ended = 0;
  const auto end = [&] {
    while (!model.wait()) {
      // The layers that a wave reports as written are there. This looks at the stages' layers of the script's first
      // sequence.
      const int layers = model.layers_written(0);
      CHECK(layers <= model.config().n_layers);
      if (ended > 0 || layers == 0) continue;
      const auto views = kv.views({2});
      const KvShards shards{.n_layers = model.config().n_layers, .n_kv_heads = 1, .pp = model.stages()};
      for (int stage = 0; shards.layers(stage).end <= layers; ++stage)
        for (int t = 0; t < kScript[0][0]; ++t)
          unwritten += std::isnan(*reinterpret_cast<const float*>(views[size_t(stage)].row(0, 0, t, 0)));
      if (layers == model.config().n_layers) break;
    }
    CHECK(model.ended());
    model.end(nullptr);
    CHECK(model.stage_seconds().size() == size_t(model.stages()));
    for (double seconds : model.stage_seconds()) CHECK(seconds > 0);
    ++ended;
  };
  for (const auto& step : kScript) {
    std::vector<int32_t> ids, offsets = {0}, kv_lengths;
    std::vector<int> slots;
    for (int s = 0; s < 3; ++s) {
      if (step[s] == 0) continue;
      slots.push_back(2 - s);
      for (int i = 0; i < step[s]; ++i)
        ids.push_back(int32_t((31 * (100 * s + lengths[size_t(s)]++) + 7) % model.config().vocab));
      offsets.push_back(int32_t(ids.size()));
      kv_lengths.push_back(lengths[size_t(s)]);
    }
    std::vector<int32_t> rows(ids.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<KvView> views = kv.views(slots);
    // Slots serve as blocks: one block each, with a table that is overwritten afterwards.
    std::vector<int32_t> tables(views.size());
    for (size_t i = 0; i < views.size(); ++i) {
      tables[i] = std::exchange(views[i].slot, 0);
      views[i].block_table = &tables[i];
    }
    if (begun - ended == model.window()) end();
    logits.emplace_back(rows.size() * size_t(model.config().vocab));
    model.begin({.token_ids = ids,
                 .q_offsets = offsets,
                 .kv_lengths = kv_lengths,
                 .views = views,
                 .logit_rows = rows,
                 .watched = watched},
                {}, logits.back().data());
    ++begun;
    for (auto* gone : {&ids, &offsets, &kv_lengths, &rows, &tables}) std::fill(gone->begin(), gone->end(), 1 << 20);
  }
  while (ended < begun) end();
  std::vector<float> all;
  for (const auto& one : logits) all.insert(all.end(), one.begin(), one.end());
  return all;
}

std::vector<float> on_one_rank(const Loaded& loaded, Dtype kv_dtype = Dtype::f32) {
  ThreadTeam team(1);
  auto model = make_llama(loaded.weights, team, 64, 64);
  return run_script(*model, {loaded.config, loaded.shards(1, 1), 64, 3, KvOrder::layer_major, kv_dtype});
}

TEST_CASE("sharded llama: logits have the bits of one rank, for tp 1 to 8 and pp 1 to 3", "[shards][model]") {
  for (const auto& [text, dtype] : {std::pair(kWide, Dtype::f32),
                                    {kWide, Dtype::bf16},
                                    {kWide, Dtype::int8},
                                    {kWide, Dtype::int4},
                                    {kWide, Dtype::fp8},
                                    {kExperts, Dtype::f32},
                                    {kExperts, Dtype::int4}}) {
    Loaded loaded(text, dtype);
    const auto expected = on_one_rank(loaded);
    for (float logit : expected) REQUIRE(std::isfinite(logit));
    for (int tp : {1, 2, 4, 8})
      for (int pp : {1, 2, 3})
        for (int threads : {1, 2}) {
          const KvShards shards = loaded.shards(tp, pp);
          const bool whole = loaded.config.experts.count > 0 && threads == 1;
          auto model = make_sharded_llama(
              loaded.weights, {.shards = shards, .threads_per_rank = threads, .whole_experts = whole}, 64, 64);
          CAPTURE(dtype_name(dtype), tp, pp, threads);
          const KvOrder order = pp == 2 ? KvOrder::token_major : KvOrder::layer_major;
          CHECK(same_bits(run_script(*model, {loaded.config, shards, 64, 3, order}), expected));
        }
  }
}

void check_waves(const std::string& text, const std::vector<int>& tps) {
  Loaded loaded(text, Dtype::f32);
  const auto expected = on_one_rank(loaded);
  for (int tp : tps)
    for (int pp : {2, 3})
      for (int window : {0, 2, 3, 5, 64})
        for (bool watched : {false, true})
          for (int again = 0; again < 3; ++again) {
            const KvShards shards = loaded.shards(tp, pp);
            auto model = make_sharded_llama(loaded.weights, {.shards = shards, .window = window}, 64, 64);
            CAPTURE(tp, pp, window, watched, again);
            CHECK(model->window() == (window == 0 ? 2 * pp : window));
            const RankedKv kv(loaded.config, shards, 64, 3);
            int unwritten = 0;
            CHECK(same_bits(run_in_waves(*model, kv, watched && tp == 1, unwritten), expected));
            CHECK(unwritten == 0);
            if (again == 2) CHECK(same_bits(run_script(*model, {loaded.config, shards, 64, 3}), expected));
          }
}

TEST_CASE("sharded llama: waves have the bits of steps that are waited for", "[shards][model][waves]") {
  for (const auto& [text, tps] : {std::pair(kWide, std::vector{1, 2, 4}), {kExperts, std::vector{2}}})
    check_waves(text, tps);
}

TEST_CASE("sharded llama: waiting for a wave can be interrupted, and a wave under way outlives its caller",
          "[shards][model][waves]") {
  Loaded loaded(kWide, Dtype::f32);
  const KvShards shards = loaded.shards(1, 2);
  const RankedKv kv(loaded.config, shards, 64, 1);
  auto model = make_sharded_llama(loaded.weights, {.shards = shards}, 64, 64);
  CHECK(!model->ended());
  std::thread other([&] { model->interrupt(); });
  CHECK(!model->wait());  // nothing is under way
  other.join();
  const std::vector<int32_t> ids(40, 3), offsets = {0, 40}, lengths = {40};
  const auto views = kv.views({0});
  model->begin({ids, offsets, lengths, views, {}, nullptr}, {}, nullptr);
  model.reset();
  for (int rank = 0; rank < 2; ++rank)
    CHECK(std::isfinite(*reinterpret_cast<const float*>(views[size_t(rank)].row(0, 0, 39, 0))));
}

TEST_CASE("sharded llama: every expert has one rank, and ranks have as many as they can evenly",
          "[shards][model][moe]") {
  for (int count : {1, 3, 8, 10, 128})
    for (int tp : {1, 2, 4, 8}) {
      for (int e = 0; e < count; ++e) {
        const Range own = rank_experts(count, expert_rank(e, count, tp), tp);
        CHECK((own.begin <= e && e < own.end));
      }
      for (int r = 0; r < tp; ++r) {
        const Range own = rank_experts(count, r, tp);
        CHECK((own.end - own.begin == count / tp || own.end - own.begin == (count + tp - 1) / tp));
      }
    }
}

TEST_CASE("sharded llama: rows of experts are counted, by rank and with what crosses", "[shards][model][moe]") {
  Loaded loaded(kExperts, Dtype::f32);
  const Experts& e = loaded.config.experts;
  int64_t tokens = 0;
  for (const auto& step : kScript) tokens += step[0] + step[1] + step[2];
  const int64_t rows = 2 * tokens * e.used;  // two sparse layers, which compute every token's logits
  for (const auto& [tp, pp, whole] : {std::tuple(1, 1, false), {2, 1, false}, {4, 1, true}, {2, 3, true}}) {
    CAPTURE(tp, pp, whole);
    const KvShards shards = loaded.shards(tp, pp);
    auto model = make_sharded_llama(loaded.weights, {.shards = shards, .whole_experts = whole}, 64, 64);
    run_script(*model, {loaded.config, shards, 64, 3});
    const ExpertLoad load = model->expert_load();
    REQUIRE((load.rows.size() == size_t(e.count) && load.rank_rows.size() == size_t(tp)));
    CHECK(std::accumulate(load.rows.begin(), load.rows.end(), int64_t{0}) == rows);
    CHECK(load.layers == 2 * int64_t(std::size(kScript)));
    for (int r = 0; r < tp; ++r) {
      const Range own = whole ? rank_experts(e.count, r, tp) : Range{0, e.count};
      CHECK(load.rank_rows[size_t(r)] ==
            std::accumulate(load.rows.begin() + own.begin, load.rows.begin() + own.end, int64_t{0}));
    }
    const double mean = load.imbalance / double(load.layers);
    CHECK((whole ? mean > 1.01 && mean < tp : mean == 1));
    CHECK(load.exchanged_bytes == 4.0 * loaded.config.hidden * double(rows) * (tp - 1) * (whole ? 1 : tp));
  }
  ThreadTeam team(1);
  CHECK(make_llama(Loaded(kWide, Dtype::f32).weights, team, 64, 64)->expert_load().rows.empty());
}

TEST_CASE("sharded llama: every family has the bits of one rank", "[shards][model]") {
  int ran = 0;
  for (const std::string& name : kFixtures) {
    Loaded loaded(name);
    const auto expected = on_one_rank(loaded);
    for (int tp : {1, 2, 4, 8})
      for (int pp : {1, 2}) {
        const KvShards shards = loaded.shards(tp, pp);
        if (!check_model_shards(loaded.config, shards)) continue;
        CAPTURE(name, tp, pp);
        auto model = make_sharded_llama(loaded.weights, {.shards = shards}, 64, 64);
        CHECK(same_bits(run_script(*model, {loaded.config, shards, 64, 3}), expected));
        ++ran;
      }
  }
  CHECK(ran == 30);
}

TEST_CASE("sharded llama: more heads than K-groups, and quantised KV, have the bits of one rank", "[shards][model]") {
  const std::string text = [] {
    std::string t = kWide;
    t.replace(t.find("\"num_attention_heads\": 8"), 24, "\"num_attention_heads\": 16");
    return t;
  }();
  Loaded loaded(text, Dtype::f32);
  for (Dtype kv_dtype : kKvDtypes) {
    const auto expected = on_one_rank(loaded, kv_dtype);
    for (int tp : {4, 8}) {
      const KvShards shards = loaded.shards(tp, 1);
      auto model = make_sharded_llama(loaded.weights, {.shards = shards}, 64, 64);
      CAPTURE(tp, dtype_name(kv_dtype));
      CHECK(same_bits(run_script(*model, {loaded.config, shards, 64, 3, KvOrder::layer_major, kv_dtype}), expected));
    }
  }
}

TEST_CASE("sharded llama: impossible shapes are refused by name", "[shards][model]") {
  const Loaded loaded(kWide, Dtype::f32);
  auto message = [&](int tp, int pp) {
    const Status status = check_model_shards(loaded.config, loaded.shards(tp, pp), "--prefill-tp", "--prefill-pp");
    return status ? std::string() : status.error().message;
  };
  CHECK(message(8, 3) == "");
  CHECK(message(3, 1) == "--prefill-tp 3 does not divide the model's 8 attention heads");
  CHECK(message(1, 4) == "--prefill-pp 4: there are more stages than the 3 layers");
  CHECK(message(0, 1) == "--prefill-tp 0: expected at least 1");
  ModelConfig six = loaded.config;
  six.n_heads = 6;
  CHECK(check_model_shards(six, loaded.shards(6, 1)).error().message ==
        "tp 6 is not supported (expected 1, 2, 4 or 8)");
  ModelConfig many = loaded.config;
  many.n_heads = many.n_kv_heads = 128;
  many.n_layers = 80;
  KvShards shards{.n_layers = 80, .n_kv_heads = 128, .tp = 8, .pp = 16};
  CHECK(check_model_shards(many, shards).error().message.find("128 ranks, each a thread") != std::string::npos);
}

}  // namespace xpyd::testing::sharded_llama_test
