// speculate: how many drafts are right, and what they are worth in tokens/s against none, by how many are made, batch
// and text. Greedy loops, questions about facts, and text in which nothing is ever right.
//
// Engines over one model take turns, step by step: one for each --speculate-tokens, from 0 (off) to turbo, whose cost
// of a step is fitted to its own steps as an instance's is. All must end with the text and the logits' hash of `off`
// before anything is told. Prompts are computed first, and not timed.
//   loops    random weights, greedy, and what has been said is made likelier (repetition_penalty .1, frequency_penalty
//            -2): they say one thing over and over. ngram.
//   chat     the demo model is told 20 facts and asked for one; what it says then, and goes on to say, are those
//            sentences. ngram; "mtp": of its own multi-token head, by a model that computes it beside every step.
//   nothing  random weights at temperature 1: of 128,256 tokens hardly two come twice. ngram.
//   wrong    the same, and a drafter that always has 16, none of them right: nobody's text is worse.
//
// Arithmetic. llama-1b in bf16: a step reads 2.5 GB, 100 ms on two cores; each more token multiplies 2.5 GFLOP, 10 ms:
// a price p = .1 of a step. k drafts that are right with probability a each end (1 - a^(k+1)) / (1 - a) tokens in 1 + k
// p steps. A loop of one token has a = 1 once it is found, after 3 tokens of 32: k = 4 gives 5 / 1.4 = 3.6, 8 gives 9 /
// 1.8 = 5; over 32 tokens, of which the first are single and the last step is cut, 2 to 3.6 and 2 to 5. Turbo begins
// with few: 1.6 to 5. In `wrong` turbo may lose half a token at first, and then 1 % (draft_length.h): of 32 tokens .975
// at worst, and of a round that is not its first .98 to 1; four fixed drafts cost 1 / 1.4 = .7. `nothing` costs what
// looking does, a microsecond of 100 ms: 1.
// llama-mini in bf16: 54 MB, 3 to 5 ms a step, and .4 to .6 ms a token: p = .15 alone; 64 sequences take 5 + 32 ms, and
// a draft costs nearly what a token does. So what four drafts are worth falls with the batch: alone 5 / 1.6 = 3, at 64
// 5 / (5 * .9) = 1.1. The demo model (1.4 million parameters, 2.8 MB) is bound by its products at any batch, and by
// what a step costs beside them: p = .3 alone (a step of .2 ms is mostly not tokens), near 1 at 64. Its head is one
// layer more than its trunk's four, and a product with the embedding: a step with it 1.2, a draft of it .4 and its row
// .3; k = 1, right 97 of 100 times, 1.97 / 1.9 = 1.04.
#include <algorithm>
#include <map>
#include <memory>

#include "batch/drafter.h"
#include "experiments/contestant.h"
#include "experiments/demo_facts.h"
#include "experiments/experiment.h"
#include "model/folder.h"
#include "model/model.h"
#include "model/step_cost.h"
#include "model/tokenizer.h"
#include "model/weights.h"

namespace xpyd::experiments::speculate_experiment {
namespace {

constexpr int kPrompt = 16, kMostDraftsHere = 8, kMostBatch = 64, kStepTokens = 1024;
constexpr size_t kLongestPrompt = 512;

// Always as many as are wanted; right by chance alone.
class WrongDrafter final : public Drafter {
 public:
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes)
      while (int(wish.drafts.size()) < wish.most) wish.drafts.push_back(int32_t(++turn_ * 7919 % 97));
  }

 private:
  uint64_t turn_ = 0;
};
constexpr DrafterRow kWrong = {"wrong",
                               [](const SpeculationOptions&, const DrafterParts&) -> std::unique_ptr<Drafter> {
                                 return std::make_unique<WrongDrafter>();
                               },
                               ""};

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
                            {"llama-1b", "nothing", 1, 12, {kOff, kTurbo}},
                            {"llama-1b", "wrong", 1, 32, {kOff, kTurbo}}};
  for (const auto& [batch, tokens] : {std::pair(1, 48), {kMostBatch, 12}}) {
    made.push_back({"llama-mini", "loops", batch, tokens, all});
    made.push_back({"llama-mini", "wrong", batch, tokens, {kOff, kFour, kTurbo}});
    made.push_back(
        {"demo", "chat", batch, 48, {kOff, kOne, kTwo, kFour, kEight, kTurbo, kHeadOne, kHeadTwo, kHeadTurbo}});
  }
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
    if (seen.steps > 0) cost.saw(shape, s);  // as Instance::fit_cost does
    seen = engine->engine().stats().work;
    engine->engine().know_cost(cost.terms(), cost.steps_seen());
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
    for (Racer& r : racers) {  // prompts, and a first token each
      r.before = r.engine->engine().stats();
      while (r.generated() < c.batch) r.step();
      r.before = r.engine->engine().stats();
      r.seconds = 0;
    }
    for (bool some = true; some; ++turn_) {
      some = false;
      for (size_t n = 0; n < racers.size(); ++n) {
        Racer& r = racers[(n + turn_) % racers.size()];  // nobody is always the first
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
        found.wrong = std::string(r.how.name) + " drafts: other logits than off";
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
      if (c.text == std::string("nothing") || c.text == std::string("wrong")) sampling.temperature = 1;
      sampling.seed = setting_.seed + 1;
      for (int i = 0; i < 2; ++i) {  // a server that has served: what tokens take is known
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
      XPYD_CHECK(tokens.size() <= kLongestPrompt, "facts are longer than was planned");
      return tokens;
    }
    std::vector<int32_t> tokens;
    while (tokens.size() < kPrompt) tokens.push_back(int32_t(random.below(uint64_t(served.config.vocab))));
    return tokens;
  }

  Setting setting_;
  ThreadTeam team_{1};  // whoever else uses the machine takes turns with it, and does not stop its mates
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
    return invalid("no such case");
  };
}

REGISTER_EXPERIMENT("speculate", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::speculate_experiment
