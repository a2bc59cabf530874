// speculate: How many drafts are accepted, and how many tokens/s do they gain, by number of drafts, batch and text?
// Paper: TurboSpec (arXiv 2406.14066); no figure for these models is published.
// Set-up: engines over one model take turns step by step: one for each --speculate-tokens, from off to turbo. All must
//   end with the text and the logits hash of `off`. loops: random weights, greedy, with repeated tokens made likelier.
//   chat: the demo model reads 20 facts and is asked for one; "mtp" is its own multi-token head. wrong: random
//   weights at temperature 1 with a drafter that always proposes 16 tokens, all wrong.
// Command: make exp-speculate (2 minutes; measured, counted, computed).
// Expected, llama-1b: a step reads 2.5 GB, 100 ms, and each further token takes 10 ms. k drafts that are right with
//   probability a give (1 - a^(k+1)) / (1 - a) tokens in 1 + .1 k steps: 2 to 3.6 over 32 tokens of a loop, turbo 1.6
//   to 5; in `wrong` turbo tries in one step of four and loses 3 to 4 %. llama-mini: .15 of a step per token alone,
//   nearly 1 with 64. The demo model's head is right 97 of 100 times: 1.97 / 1.9 = 1.04.
// Found: 4 drafts 2.8 times, turbo 2.7 times on a loop; turbo loses 4 % where no draft is right.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "batch/draft_length.h"
#include "batch/drafter.h"
#include "experiments/contestant.h"
#include "experiments/demo_facts.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"
#include "model/cost/step_cost.h"
#include "model/folder.h"
#include "model/model.h"
#include "model/text/tokenizer.h"
#include "model/weights/weights.h"

namespace xpyd::experiments::speculate_experiment {
namespace {

namespace live {

constexpr int kPrompt = 16, kMostDraftsHere = 8, kMostBatch = 64, kStepTokens = 1024;
constexpr size_t kLongestPrompt = 512;

// Always proposes as many tokens as are wanted. They are right by chance alone.
class WrongDrafter final : public Drafter {
 public:
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes)
      while (int(wish.drafts.size()) < wish.most) wish.drafts.push_back(int32_t(++turn_ * 7919 % 97));
  }

 private:
  uint64_t turn_ = 0;
};
constexpr DrafterRow kWrong = {
    "wrong", [](const DrafterParts&) -> std::unique_ptr<Drafter> { return std::make_unique<WrongDrafter>(); }, ""};

struct How {
  const char* name;
  int tokens;  // -1: off; 0: turbo
  const char* drafter = "ngram";
};

struct Case {
  const char *model, *text;
  int batch, tokens;
  std::vector<How> hows;
};

constexpr How kOff = {"off", -1}, kOne = {"1", 1}, kTwo = {"2", 2}, kFour = {"4", 4}, kEight = {"8", 8},
              kTurbo = {"turbo", 0}, kHeadOne = {"mtp 1", 1, "mtp"}, kHeadTwo = {"mtp 2", 2, "mtp"},
              kHeadTurbo = {"mtp turbo", 0, "mtp"};

std::vector<Case> cases(bool tiny) {
  const std::vector<How> all = {kOff, kOne, kTwo, kFour, kEight, kTurbo};
  if (tiny)
    return {{"llama-tiny", "loops", 2, 12, all},
            {"demo", "chat", 2, 8, {kOff, kFour, kHeadTwo}},
            {"llama-tiny", "wrong", 2, 12, {kOff, kFour, kTurbo}}};
  std::vector<Case> made = {{"llama-1b", "loops", 1, 32, {kOff, kFour, kTurbo}},
                            {"llama-1b", "wrong", 1, 24, {kOff, kTurbo}}};
  for (const auto& [batch, tokens] : {std::pair(1, 48), {kMostBatch, 12}})
    made.push_back({"llama-mini", "loops", batch, tokens, all});
  made.push_back({"demo", "chat", 1, 48, {kOff, kOne, kTwo, kFour, kEight, kTurbo, kHeadOne, kHeadTwo, kHeadTurbo}});
  return made;
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Case& c : cases(setting.tiny)) all.push_back({{"model", c.model}, {"text", c.text}, {"batch", c.batch}});
  return all;
}

struct Served {
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
  std::unique_ptr<Model> model, headed;        // headed: the demo model with its multi-token head
  std::unique_ptr<const Tokenizer> tokenizer;  // null: random weights
};

struct Racer {
  How how;
  std::unique_ptr<Contestant> engine;
  StepCost cost = {};
  StepShape seen = {.steps = 0};
  EngineStats before = {};
  double seconds = 0;

  int64_t generated() const { return engine->engine().stats().generated_tokens - before.generated_tokens; }
  void step() {
    const double s = engine->step();
    seconds += s;
    StepShape shape = engine->engine().stats().work;
    shape.add(seen, -1);
    if (seen.steps > 0) cost.saw(shape, s);  // as StepCosts does
    seen = engine->engine().stats().work;
    engine->engine().know_cost(cost.terms());
  }
};

class Bed {
 public:
  explicit Bed(const Setting& setting) : setting_(setting) {}

  Result<Finding> measure(const Case& c) {
    Served& served = served_[c.model];
    if (!served.model)
      if (Status made = load(served, c.model); !made) return made.error();
    std::vector<Racer>& racers = racers_[std::string(c.model) + c.text + std::to_string(c.batch)];
    if (racers.empty())
      if (Status made = make(racers, c, served); !made) return made.error();
    for (int i = 0; i < c.batch; ++i) {
      const std::vector<int32_t> prompt = prompt_of(served);
      for (Racer& r : racers) r.engine->submit(prompt, c.tokens);
    }
    for (Racer& r : racers) {  // each computes its prompts and a first token
      r.before = r.engine->engine().stats();
      while (r.generated() < c.batch) r.step();
      r.before = r.engine->engine().stats();
      r.seconds = 0;
    }
    for (bool some = true; some; ++turn_) {
      some = false;
      for (size_t n = 0; n < racers.size(); ++n) {
        Racer& r = racers[(n + turn_) % racers.size()];  // rotates who is first
        if (r.engine->engine().idle()) continue;
        r.step();
        some = true;
      }
    }
    Finding found;
    const double plain = double(racers[0].generated()) / racers[0].seconds;
    for (const Racer& r : racers) {
      if (found.wrong = r.engine->wrong(); !found.wrong.empty()) return found;
      if (r.engine->logits_hash() != racers[0].engine->logits_hash())
        found.wrong = "the logits with drafts '" + std::string(r.how.name) + "' differ from those without drafts";
      const EngineStats& now = r.engine->engine().stats();
      const double drafted = double(now.draft_tokens - r.before.draft_tokens),
                   accepted = double(now.accepted_tokens - r.before.accepted_tokens),
                   steps = double(now.steps - r.before.steps), generated = double(r.generated());
      found.rows.push_back({{"how", r.how.name},
                            {"tokens_per_s", generated / r.seconds},
                            {"gain", generated / r.seconds / plain},
                            {"step_ms", 1e3 * r.seconds / steps},
                            {"tokens_per_step", generated / steps / c.batch},
                            {"drafted", drafted / generated},
                            {"acceptance", drafted > 0 ? accepted / drafted : 0.0}});
    }
    return found;
  }

 private:
  Status load(Served& served, const std::string& name) {
    const bool demo = name == "demo";
    const std::string dir = demo ? kDemoModel : "experiments/models/" + name;
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    served.config = config.value();
    auto weights = load_weights(dir, served.config, {.dtype = Dtype::bf16, .dummy = !demo}, team_);
    if (!weights) return weights.error();
    if (demo) {
      auto tokenizer = Tokenizer::load(dir);
      if (!tokenizer) return tokenizer.error();
      served.tokenizer = std::move(tokenizer).value();
    }
    const int rows = rows_of(name);
    served.model = make_llama(weights.value(), team_, std::max(rows, kStepTokens), rows);
    if (!demo) return ok();
    ModelConfig headed = served.config;
    if (Status made = predict_next_tokens(headed); !made) return made;
    auto with_head = load_weights(dir, headed, {.dtype = Dtype::bf16}, team_);
    if (!with_head) return with_head.error();
    served.headed = make_llama(with_head.value(), team_, std::max(rows, kStepTokens), rows);
    return ok();
  }

  static int rows_of(const std::string& name) { return (name == "llama-1b" ? 1 : kMostBatch) * (1 + kMostDraftsHere); }

  Status make(std::vector<Racer>& racers, const Case& c, Served& served) {
    for (const How& how : c.hows) {
      Model& model = how.drafter == std::string("mtp") ? *served.headed : *served.model;
      KvOptions kv{.shape = kv_shape(model.config(), Dtype::f32), .prefix_cache = false};
      kv.pool_bytes = size_t(c.batch) * (kLongestPrompt + size_t(c.tokens) + 32) * kv.shape.token_bytes();
      EngineOptions options{.policy = find_batch_policy("chunked"),
                            .max_batch = c.batch * (1 + kMostDraftsHere),
                            .step_tokens = kStepTokens};
      if (how.tokens >= 0)
        options.speculation = {.drafter = c.text == std::string("wrong") ? &kWrong : find_drafter(how.drafter),
                               .tokens = how.tokens};
      auto made = Contestant::create("paged", model, kv, options);
      if (!made) return made.error();
      racers.push_back({.how = how, .engine = std::move(made).value()});
      SamplingParams& sampling = racers.back().engine->sampling;
      if (c.text == std::string("loops")) sampling.repetition_penalty = .1f, sampling.frequency_penalty = -2;
      if (c.text == std::string("wrong")) sampling.temperature = 1;
      sampling.seed = setting_.seed + 1;
      for (int i = 0; i < 2; ++i) {  // as in a server that has served, the cost of tokens is known
        racers.back().engine->submit(std::vector<int32_t>(32, 5 + i), 1);
        while (!racers.back().engine->engine().idle()) racers.back().step();
      }
    }
    return ok();
  }

  std::vector<int32_t> prompt_of(const Served& served) {
    Random random(setting_.seed * 100000 + ++prompts_);
    if (served.tokenizer) {
      std::vector<int32_t> tokens = served.tokenizer->encode(facts_and_answers(random, 20, 1));
      XPYD_CHECK(tokens.size() <= kLongestPrompt, "the facts are longer than the longest prompt");
      return tokens;
    }
    std::vector<int32_t> tokens;
    while (tokens.size() < kPrompt) tokens.push_back(int32_t(random.below(uint64_t(served.config.vocab))));
    return tokens;
  }

  Setting setting_;
  ThreadTeam team_{1};  // one thread, so that other programs' turns stop no team mates
  std::map<std::string, Served> served_;
  std::map<std::string, std::vector<Racer>> racers_;
  uint64_t prompts_ = 0;
  size_t turn_ = 0;
};

Measure open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(setting);
  return [bed, setting](const Values& point) -> Result<Finding> {
    for (const Case& c : cases(setting.tiny))
      if (std::string(point["model"]) == c.model && std::string(point["text"]) == c.text &&
          int(point["batch"]) == c.batch)
        return bed->measure(c);
    return invalid("the point is not one of the cases");
  };
}

REGISTER_EXPERIMENT("speculate", "cpu", points, open);

}  // namespace live

// speculate/optimum: the best number of ngram's drafts by arithmetic: Llama-2-7B on one H100 after 500 tokens. A step
// of B sequences with k drafts takes c + s B (k + 1) + B L max(v, (k + 1) l). `max`: the slower of bandwidth and
// products.
//
// Expected: c = 6.25 ms, s = 31 us: 9 to 12 drafts alone at a = .7. If bandwidth and products add up, turbo's k differs
// by at most one.
namespace optimum {

constexpr int kMostHere = 24;

struct Target {
  double launch_s, weights_s, token_s, kv_s, look_s;
  bool overlaps = false;

  double step(double batch, double context, double k) const {
    const double kv = batch * context * kv_s, look = batch * context * look_s * (k + 1);
    const double products = token_s * batch * (k + 1);
    const double verify = overlaps ? std::max(weights_s + kv, products + look)
                                   : weights_s + products + std::max(kv, look);
    return launch_s + verify;
  }
};

double ended(double a, double k) { return (1 - std::pow(a, k + 1)) / (1 - a); }

// The k with the greatest f(k).
template <class F>
int best(F&& f) {
  int found = 0;
  for (int k = 1; k <= kMostHere; ++k)
    if (f(k) > f(found)) found = k;
  return found;
}

// The mean number of drafts that the engine's rule takes for each of `batch` sequences whose drafts have been right
// with rate `a`.
double turbo(const Target& t, int batch, double context, double a) {
  DraftRecord record;
  for (int i = 0; i < 1000; ++i) record.saw(1, i * 7 % 10 < std::lround(10 * a));
  const double off = t.step(batch, context, 0);
  DraftRate rate{.tokens = double(batch), .seconds = off, .token_seconds = (t.step(batch, context, 1) - off) / batch};
  int taken = 0;
  for (int i = 0; i < batch; ++i) taken += rate.take(record, kMostHere);
  return double(taken) / batch;
}

Result<Finding> optimum(const Values& point, const Setting&) {
  const disagg::SimulatedModel model{"llama-2-7b", 32, 32, 128, 6.74e9, 6.74e9, 2 * 32 * 128, 2, 2, ""};
  const disagg::Hardware card = disagg::find_hardware("h100x1").value();
  const StepCost::Terms terms = disagg::step_cost(model, card).terms();
  Finding found;
  for (bool overlaps : {false, true}) {
    const Target t{card.step_s, terms[0] - card.step_s, terms[4], terms[2], 2 * terms[3], overlaps};
    const double batch = point["batch"], a = point["right"], context = 500;
    const int k = best([&](int n) { return ended(a, n) / t.step(batch, context, n); });
    const auto rate = [&](double n) { return ended(a, n) / t.step(batch, context, n) * t.step(batch, context, 0); };
    found.rows.push_back(
        {{"cost", overlaps ? "max" : "sum"},
         {"k", k},
         {"gain", rate(k)},
         {"turbo_k", turbo(t, point["batch"], context, a)},
         {"gain_of_turbo", rate(turbo(t, point["batch"], context, a))},
         {"least_right", (t.step(batch, context, 1) - t.step(batch, context, 0)) / t.step(batch, context, 0)},
         {"step_ms", 1e3 * t.step(batch, context, 0)}});
  }
  return found;
}

std::vector<Values> optimum_points(const Setting&) {
  std::vector<Values> all;
  for (double right : {.3, .5, .7, .9})
    for (int batch = 1; batch <= 256; batch *= 2) all.push_back({{"right", right}, {"batch", batch}});
  return all;
}

REGISTER_EXPERIMENT("speculate/optimum", "cpu", optimum_points, each<optimum>);

}  // namespace optimum

}  // namespace
}  // namespace xpyd::experiments::speculate_experiment
