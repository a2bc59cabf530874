// A whole step of a 1-billion-parameter Llama (random weights, bf16): decoding at batch 1 and 8,
// and a prefill of 512 tokens.
//
// Expected: decoding reads every matrix once, 2.47 GB: at 33 GB/s 75 ms, of which the norms, RoPE, SwiGLU and attention
// at 512 tokens of context (33 MB of KV) should take less than the 12 % that the target leaves. A 512-token prefill is
// 2 * 0.97e9 * 512 = 1.0 TFLOP less the last layer's rows that nobody asks for (5 %): 5 s at 190 GFLOP/s.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <vector>

#include "base/random.h"
#include "experiments/bench/harness.h"
#include "model/model.h"

namespace xpyd::experiments {
namespace {

constexpr int kContext = 512, kPrompt = 512, kMaxBatch = 8;

class Steps {
 public:
  Steps(std::shared_ptr<const Weights> weights, ThreadTeam& team)
      : model_(make_llama(std::move(weights), team, kPrompt, kMaxBatch)),
        layout_{kv_shape(model_->config(), Dtype::f32), KvOrder::layer_major, kContext, kMaxBatch},
        pool_(layout_.pool_bytes()),
        logits_(size_t(model_->config().vocab) * kMaxBatch) {
    Random random(1);
    for (size_t i = 0; i < pool_.size() / sizeof(float); ++i) pool_.as<float>()[i] = float(random.uniform() * 2 - 1);
    for (int i = 0; i < kPrompt; ++i) tokens_.push_back(int32_t(random.below(uint64_t(model_->config().vocab))));
    for (int i = 0; i < kMaxBatch; ++i) views_.push_back({pool_.data(), &layout_, nullptr, i});
  }

  // `batch` sequences, each with its last `n` tokens of a KV length of `length`.
  void set(int batch, int n, int length) {
    offsets_.resize(size_t(batch) + 1);
    for (int s = 0; s <= batch; ++s) offsets_[size_t(s)] = s * n;
    lengths_.assign(size_t(batch), length);
    rows_.clear();
    for (int s = 1; s <= batch; ++s) rows_.push_back(s * n - 1);
  }
  StepInput step(int first_token = 0) const {
    const size_t batch = lengths_.size(), n = size_t(offsets_.back());
    return {.token_ids = std::span(tokens_).subspan(size_t(first_token), n),
            .q_offsets = offsets_,
            .kv_lengths = lengths_,
            .views = std::span(views_).first(batch),
            .logit_rows = rows_};
  }
  void run(int first_token = 0) { model_->forward(step(first_token), logits_.data()); }
  Work work() const { return model_->work(step()); }

  // The logits after 20 tokens have the same bits whether they came in one step, or 12, then 7,
  // then one as in decoding; and are numbers.
  std::string check() {
    const size_t vocab = size_t(model_->config().vocab);
    set(1, 20, 20);
    run();
    const std::vector<float> whole(logits_.begin(), logits_.begin() + long(vocab));
    for (int done = 0; int n : {12, 7, 1}) {
      set(1, n, done + n);
      run(done);
      done += n;
    }
    if (std::memcmp(whole.data(), logits_.data(), vocab * sizeof(float)) != 0)
      return "a prompt in three steps has other logits than in one";
    for (float x : whole)
      if (!std::isfinite(x)) return "a logit is not finite";
    return "";
  }

 private:
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer pool_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_, offsets_, lengths_, rows_;
  std::vector<KvView> views_;
};

void bench_model(Bench& bench) {
  const std::string dir = "experiments/models/llama-1b";
  const int all = bench.max_threads();
  auto config = load_model_config(dir);
  XPYD_CHECK(config.ok(), config ? "" : config.error().message);
  auto weights = load_weights(dir, config.value(), {.dtype = Dtype::bf16, .dummy = true}, bench.team(all));
  XPYD_CHECK(weights.ok(), weights ? "" : weights.error().message);

  std::vector<int> teams = {1};
  if (all > 1) teams.push_back(all);
  std::map<int, Steps> steps;
  for (int n : teams) steps.try_emplace(n, weights.value(), bench.team(n));

  struct Shape {
    const char* name;
    int batch, n, length;
    Limit limit;
    double target;
    bool one_thread_too;
  };
  const Shape shapes[] = {
      {"decode batch 1, 512 tokens of context", 1, 1, kContext, Limit::read, 0.88, true},
      {"decode batch 8, 512 tokens of context", 8, 1, kContext, Limit::roofline, 0, true},
      {"prefill 512 tokens", 1, kPrompt, kPrompt, Limit::fma, 0.75, false},
  };
  for (const Shape& s : shapes) {
    std::vector<BenchCase> cases;
    for (int n : teams) {
      if (n != all && !s.one_thread_too) continue;
      Steps& data = steps.at(n);
      data.set(s.batch, s.n, s.length);
      cases.push_back({.name = std::string("llama-1b bf16, ") + s.name,
                       .n_threads = n,
                       .run = [&data] { data.run(); },
                       .check =
                           [&data, &s] {
                             std::string wrong = data.check();
                             data.set(s.batch, s.n, s.length);
                             return wrong;
                           },
                       .work = data.work(),
                       .limit = s.limit,
                       .target = n == all ? s.target : 0,
                       .versus = {}});
    }
    bench.measure(cases);
  }
}

REGISTER_BENCH("model", bench_model);

}  // namespace
}  // namespace xpyd::experiments
