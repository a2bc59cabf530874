// Whole steps of a model with the shape of an 8-billion-parameter Llama and random weights, alone and through the
// engine.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "attention/cuda/attention_cuda.h"
#include "base/device/device_cuda.h"
#include "base/random.h"
#include "disagg/instance/cluster.h"
#include "experiments/gpu/rounds.h"
#include "model/cuda/model_cuda.h"

namespace xpyd::experiments::gpu {
namespace {

constexpr int kBlock = 16;
constexpr int kBatch = 64;

struct Setting {
  ModelConfig config;
  std::shared_ptr<const CudaWeights> weights;
  cuda::Card card;
  bool tiny;

  CudaModelOptions options(int max_step_tokens, int batch, int max_length, const char* prefill = "auto") const {
    return {.max_step_tokens = max_step_tokens,
            .max_logits = batch,
            .max_seqs = batch,
            .max_kv_length = max_length,
            .max_table_entries = (max_length + kBlock - 1) / kBlock,
            .prefill_attention = prefill};
  }
};

std::unique_ptr<CudaModel> make_model(const Setting& setting, cuda::Stream& stream, const CudaModelOptions& options) {
  auto made = make_cuda_llama(setting.weights, setting.card, stream, options);
  XPYD_CHECK(made.ok(), made.ok() ? "" : made.error().message);
  return std::move(made).value();
}

// The last n_q tokens of n_seqs sequences of `length`, over blocks in random order.
struct Step {
  Step(const ModelConfig& config, const KvLayout& layout, std::byte* pool, int n_seqs, int n_q, int length)
      : table(size_t(layout.n_blocks)) {
    std::iota(table.begin(), table.end(), 0);
    Random random(3);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    const int blocks = (length + kBlock - 1) / kBlock;
    for (int i = 0; i < n_seqs; ++i) {
      for (int t = 0; t < n_q; ++t) ids.push_back((i * 131 + t * 7) % config.vocab);
      offsets.push_back(int32_t(ids.size()));
      lengths.push_back(length);
      rows.push_back(int32_t(ids.size()) - 1);
      views.push_back({pool, &layout, table.data() + i * blocks, 0});
    }
  }
  StepInput input() const {
    return {.token_ids = ids, .q_offsets = offsets, .kv_lengths = lengths, .views = views, .logit_rows = rows};
  }
  std::vector<int32_t> table, ids, offsets{0}, lengths, rows;
  std::vector<KvView> views;
};

struct Shape {
  int n_seqs, n_q, length;
  Limit limit;
  double target;
  std::string name;
};

// Consecutive steps of one shape by one model.
class Steps {
 public:
  Steps(const Setting& setting, const KvLayout& layout, std::byte* pool, CudaModel& llama, const Shape& shape)
      : llama_(llama),
        shape_(shape),
        step_(setting.config, layout, pool, shape.n_seqs, shape.n_q, shape.length),
        greedy_(size_t(shape.n_seqs)),
        chosen_(size_t(shape.n_seqs)) {}
  Case make_case() {
    return {.name = shape_.name,
            .run = [this] { next(); },
            .check = [this] { return wrong(); },
            .work = llama_.work(step_.input()),
            .limit = shape_.limit,
            .target = shape_.target};
  }
  std::string wrong() {
    while (under_way_ > 0) end();
    return n_nans_ ? std::to_string(n_nans_) + " logits are NaN" : std::string();
  }
  BenchRow begin_row() const {
    return {.name = shape_.name + ": begin() on the CPU", .seconds = begin_seconds_ / n_begun_};
  }

 private:
  // In decode, the next step is enqueued before the end of this one, with the tokens that this one will choose.
  bool ahead() const { return shape_.n_q == 1; }
  void end() {
    llama_.end(chosen_.data());
    for (const Chosen& c : chosen_) n_nans_ += c.nan_logits;
    --under_way_;
  }
  void next() {
    if (ahead() && under_way_ > 0)
      for (int i = 0; i < shape_.n_seqs; ++i) step_.ids[size_t(i)] = -1 - i;
    const double before = clock_.now();
    llama_.begin(step_.input(), greedy_, nullptr);
    begin_seconds_ += clock_.now() - before, ++n_begun_;
    if (++under_way_ > (ahead() ? 1 : 0)) end();
  }

  CudaModel& llama_;
  const Shape shape_;
  Step step_;
  const std::vector<Draw> greedy_;
  std::vector<Chosen> chosen_;
  RealClock clock_;
  int under_way_ = 0, n_nans_ = 0, n_begun_ = 0;
  double begin_seconds_ = 0;
};

// One shape by several models in the same rounds. All but the first are also reported as multiples of the first one's
// speed.
void measure_steps(Rounds& rounds, const Setting& setting, const std::vector<std::pair<CudaModel*, Shape>>& all) {
  int blocks = 0;
  for (const auto& [llama, s] : all) blocks = std::max(blocks, s.n_seqs * ((s.length + kBlock - 1) / kBlock));
  const KvLayout layout{kv_shape(setting.config, Dtype::bf16), KvOrder::layer_major, kBlock, blocks};
  cuda::Memory pool = cuda::Memory::device(layout.pool_bytes()).value();
  fill_random(pool.data(), layout.pool_bytes() / sizeof(bf16), 5, 1, rounds.stream());
  std::vector<std::unique_ptr<Steps>> steps;
  std::vector<Case> cases;
  for (const auto& [llama, shape] : all) {
    steps.push_back(std::make_unique<Steps>(setting, layout, pool.data(), *llama, shape));
    cases.push_back(steps.back()->make_case());
    if (cases.size() > 1) cases.back().versus = cases[0].name;
  }
  rounds.measure(cases);
  for (size_t i = 0; i < steps.size(); ++i) {
    if (const std::string wrong = steps[i]->wrong(); !wrong.empty()) rounds.found_wrong(cases[i].name, wrong);
    if (all[i].second.n_q == 1) rounds.bench().report(steps[i]->begin_row());
  }
}

class NoSink final : public EventSink {
 public:
  void on_event(TokenEvent) override {}
};

// Full batches through the engine, as in a server: the CPU's part of a step, and the duration of a step. Without
// planning ahead, the first would add to the second.
void measure_engine(Rounds& rounds, const Setting& setting) {
  const int batch = setting.tiny ? 4 : kBatch, prompt = setting.tiny ? 8 : 256, warm_up = setting.tiny ? 2 : 20,
            measured = setting.tiny ? 4 : 200, length = prompt + warm_up + measured + 16;
  for (bool ahead : {true, false}) {
    std::unique_ptr<Device> device = make_cuda_device();
    ClusterOptions options;
    options.topology = parse_topology("1C").value();
    options.kv_scheme = find_kv_scheme("paged");
    options.kv.shape = kv_shape(setting.config, Dtype::bf16);
    options.kv.block_tokens = kBlock;
    options.kv.prefix_cache = true;
    options.kv.pool_bytes = size_t(batch) * size_t(length / kBlock + 2) * kBlock * options.kv.shape.token_bytes();
    options.batching = find_batch_policy("chunked");
    options.placement = find_placement_policy("least_loaded");
    options.transport = find_transport("local");
    options.max_batch = batch;
    options.step_tokens = setting.tiny ? 16 : 2048;
    options.max_model_len = length;
    options.ahead = ahead;
    options.device = device.get();
    options.make_model = [&](int, DeviceQueue& queue) {
      return Result<std::unique_ptr<Model>>(
          make_model(setting, stream_of(queue), setting.options(options.step_tokens, batch, length)));
    };
    RealClock clock;
    auto cluster = Cluster::create(options, clock);
    XPYD_CHECK(cluster.ok(), cluster.ok() ? "" : cluster.error().message);
    auto sink = std::make_shared<NoSink>();
    for (int i = 0; i < batch; ++i) {
      auto request = std::make_shared<Request>();
      request->id = uint64_t(i);
      for (int t = 0; t < prompt; ++t) request->prompt.push_back((i * 131 + t * 7 + 1) % setting.config.vocab);
      request->sampling.temperature = 0;
      request->ignore_eos = true;
      request->max_tokens = length - prompt;
      const Status taken = cluster.value()->submit(request, sink);
      XPYD_CHECK(taken.ok(), taken.ok() ? "" : taken.error().message);
    }
    auto stats = [&] { return cluster.value()->stats().instances[0]; };
    // Until all prompts are done, and a few steps more.
    while (stats().generated_tokens < int64_t(batch) * warm_up && cluster.value()->turn()) continue;
    const InstanceStats before = stats();
    const double begin = clock.now();
    while (stats().steps < before.steps + measured && cluster.value()->turn()) continue;
    const double wall = clock.now() - begin;
    const InstanceStats after = stats();
    const double steps = double(after.steps - before.steps);
    auto spent = [&](double InstanceStats::*what) { return after.*what - before.*what; };
    const double cpu = (spent(&InstanceStats::schedule_seconds) + spent(&InstanceStats::step_seconds) -
                        spent(&InstanceStats::wait_seconds)) /
                       steps;
    const std::string name = "8B decode, batch " + std::to_string(batch) + " in the engine, " +
                             (ahead ? "a step ahead" : "step by step");
    BenchRow row{.name = name + ": CPU time of a step", .seconds = cpu};
    if (ahead) {
      row.measure = "x 100 us";
      row.share = row.share_p10 = row.share_p90 = 100e-6 / cpu;
      row.target = 1;
    }
    rounds.bench().report(std::move(row));
    rounds.bench().report({.name = name + ": a step", .seconds = wall / steps});
    cluster.value()->stop();
  }
  rounds.bench().write_files();
}

}  // namespace

void whole_model(Rounds& rounds, const cuda::Card& card, bool tiny) {
  const char* dir = tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-8b";
  Result<ModelConfig> loaded = load_model_config(dir);
  XPYD_CHECK(loaded.ok(), loaded.ok() ? "" : loaded.error().message);
  Setting setting{loaded.value(), nullptr, card, tiny};
  {
    ThreadTeam team(tiny ? 1 : 16);
    auto host = load_weights(dir, setting.config, {.dtype = Dtype::bf16, .dummy = true}, team);
    XPYD_CHECK(host.ok(), host.ok() ? "" : host.error().message);
    auto uploaded = upload_weights(*host.value(), rounds.stream());
    XPYD_CHECK(uploaded.ok(), uploaded.ok() ? "" : uploaded.error().message);
    setting.weights = uploaded.value();
  }
  const int prompt = tiny ? 24 : 8192, batch = tiny ? 4 : kBatch, context = tiny ? 32 : 1024;
  {
    std::vector<std::unique_ptr<CudaModel>> models;
    std::vector<std::pair<CudaModel*, Shape>> one, full;
    for (auto [name, graphs] : {std::pair("", true), {", kernel by kernel", false}}) {
      CudaModelOptions options = setting.options(batch, batch, context);
      options.graphs = graphs;
      models.push_back(make_model(setting, rounds.stream(), options));
      // Batch 1 streams the weights. The target of a full batch is 1.15 times the roofline's time.
      const bool served = models.size() == 1;
      one.push_back({models.back().get(),
                     {1, 1, context, Limit::copy, served ? 0.80 : 0, std::string("8B decode, batch 1") + name}});
      full.push_back({models.back().get(),
                      {batch, 1, context, Limit::roofline, served ? 1 / 1.15 : 0,
                       "8B decode, batch " + std::to_string(batch) + " x " + std::to_string(context) + name}});
    }
    measure_steps(rounds, setting, one);
    measure_steps(rounds, setting, full);
  }
  measure_engine(rounds, setting);
  // The newest variant comes last, so a fault in it keeps the rows of the others.
  for (const CudaAttentionVariant& v : cuda_attention_variants()) {
    if (v.phase != CudaAttentionVariant::prefill || v.name == std::string("naive")) continue;
    const CudaModelOptions options = setting.options(prompt, 1, prompt, v.name);
    const KvLayout layout{kv_shape(setting.config, Dtype::bf16), KvOrder::layer_major, kBlock, 1};
    if (Status fits = check_cuda_attention(options, setting.config, Dtype::bf16, layout, false, card); !fits) {
      std::printf("8B prefill, %s: refused: %s\n", v.name, fits.error().message.c_str());
      continue;
    }
    auto llama = make_model(setting, rounds.stream(), options);
    measure_steps(
        rounds, setting,
        {{llama.get(),
          {1, prompt, prompt, Limit::gemm, 0.60, "8B prefill of " + std::to_string(prompt) + ", " + v.name}}});
  }
}

}  // namespace xpyd::experiments::gpu
