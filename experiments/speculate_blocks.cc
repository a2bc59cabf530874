// speculate_blocks: what a prefix hit loses where the drafter runs one token ahead of what is known, and that it loses
// nothing here.
//
// A conversation of L tokens whose KV is in blocks of u leaves floor((L - 1) / u) whole ones: its last token was never
// computed. vLLM's drafters (EAGLE, MTP) give one of them up with every hit, because theirs looks at the token behind
// (vllm #54360): max(0, floor((L - 1) / u) - 1) u. Here a block is known by what is right in it alone.
//
// agents: the 40 recorded sessions of coding agents (traces/weka). Of each prompt L is what it has in common with one
// before it in its session, in whole blocks of 64 as they are recorded; the answers' blocks are not, and do not
// count. The prompts are 105,000 tokens in the mean, nearly all known: a block of 16 is .02 % of them, 256 .25 %, the
// 1,600 and 2,144 of hybrid models 1.5 and 2 %, beside half a block that is lost anyway. `turns`: the same law for
// prompts that grow from nothing by so much, 16 of them; known are 8 turns in the mean, so u = 2,144 is half of turns
// of 512 and an eighth of 2,048. (#38182: 92 to 71 % of hits: conversations of a few blocks.)
//
// live: the engine, llama-tiny on paged memory, 4 conversations of 4 turns of 40 tokens and answers of 12, one at a
// time: its hits are the law's exactly, with `ngram` and with `off`.
#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "base/random.h"
#include "batch/drafter.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/simulate/traces.h"
#include "model/model.h"
#include "model/weights.h"

namespace xpyd::experiments::speculate_blocks_experiment {
namespace {

double kept(double tokens, double block) { return std::floor(std::max(0.0, tokens - 1) / block) * block; }
double dropped(double tokens, double block) { return std::max(0.0, kept(tokens, block) - block); }

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int block : {16, 64, 256, 1600, 2144}) {
    if (!setting.traces.empty()) all.push_back({{"part", "agents"}, {"block", block}, {"turn", 0}});
    for (int turn : {512, 2048, 8192}) all.push_back({{"part", "turns"}, {"block", block}, {"turn", turn}});
  }
  for (int block : {4, 16}) all.push_back({{"part", "live"}, {"block", block}, {"turn", 52}});
  return all;
}

struct Hits {
  double prompts = 0, tokens = 0, known = 0, kept = 0, dropped = 0;
  void add(double prompt, double common, double block) {
    prompts += 1, tokens += prompt, known += common;
    kept += speculate_blocks_experiment::kept(common, block);
    dropped += speculate_blocks_experiment::dropped(common, block);
  }
  Finding found() const {
    return {{{{"prompts", prompts},
              {"prompt_tokens", tokens / prompts},
              {"known", known / tokens},
              {"hits", kept / tokens},
              {"hits_less_one", dropped / tokens},
              {"hits_off", ""},  // of the engine, live
              {"hits_ngram", ""},
              {"accepted", ""}}},
            ""};
  }
};

Result<Finding> agents(const Setting& setting, double block) {
  Result<disagg::Trace> trace = disagg::find_trace_format("weka")->load(setting.traces + "/weka", {});
  if (!trace) return trace.error();
  std::unordered_set<uint64_t> seen;  // ids stand for all before them, too, and are a session's own
  Hits hits;
  for (const disagg::TraceRequest& r : trace.value().requests) {
    size_t common = 0;
    while (common < r.blocks.size() && seen.contains(r.blocks[common])) ++common;
    hits.add(r.prompt_tokens, std::min<double>(r.prompt_tokens, 64.0 * double(common) + 1), block);
    seen.insert(r.blocks.begin(), r.blocks.end());
  }
  return hits.found();
}

Result<Finding> turns(double block, double turn) {
  Hits hits;
  for (int i = 1; i < 16; ++i) hits.add((i + 1) * turn, i * turn, block);
  return hits.found();
}

Result<Finding> live(const Setting& setting, int block) {
  const std::string dir = "experiments/models/llama-tiny";
  ThreadTeam team(1);
  Result<ModelConfig> config = load_model_config(dir);
  if (!config) return config.error();
  auto weights = load_weights(dir, config.value(), {.dummy = true}, team);
  if (!weights) return weights.error();
  const auto model = make_llama(weights.value(), team, 512, 8);
  constexpr int kTalks = 4, kTurns = 4, kSaid = 40, kAnswer = 12;
  int64_t hits[2], accepted = 0;
  Hits law;
  for (const char* drafter : {"off", "ngram"}) {
    const bool on = drafter == std::string("ngram");
    KvOptions kv{.shape = kv_shape(model->config(), Dtype::f32), .block_tokens = block};
    kv.pool_bytes = size_t(kTalks * kTurns * (kSaid + kAnswer)) * 2 * kv.shape.token_bytes();
    EngineOptions options{.policy = find_batch_policy("chunked"), .max_batch = 8, .step_tokens = 512};
    options.speculation = {.drafter = find_drafter(drafter), .tokens = 4, .ngram_min = 1};
    auto made = Contestant::create("paged", *model, kv, options);
    if (!made) return made.error();
    Contestant& engine = *made.value();
    for (int talk = 0; talk < kTalks; ++talk) {
      Random random(setting.seed * 100 + uint64_t(talk));
      std::vector<int32_t> text;
      for (int turn = 0; turn < kTurns; ++turn) {
        if (on && turn > 0) law.add(double(text.size()) + kSaid, double(text.size()), block);
        for (int i = 0; i < kSaid; ++i) text.push_back(int32_t(random.below(uint64_t(config.value().vocab))));
        engine.submit(text, kAnswer);
        while (!engine.engine().idle()) engine.step();
        const std::vector<int32_t>& answer = engine.last_answer();
        text.insert(text.end(), answer.begin(), answer.end());
      }
    }
    if (!engine.wrong().empty()) return Finding{{}, engine.wrong()};
    hits[on] = engine.memory().stats().prefix_hit_tokens;
    accepted = engine.engine().stats().accepted_tokens;
  }
  Finding found = law.found();
  found.rows[0].update({{"hits_off", double(hits[0]) / law.tokens},
                        {"hits_ngram", double(hits[1]) / law.tokens},
                        {"accepted", accepted}});
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) -> Result<Finding> {
    const std::string part = point["part"];
    const int block = point["block"];
    return part == "agents"  ? agents(setting, block)
           : part == "turns" ? turns(block, point["turn"])
                             : live(setting, block);
  };
}

REGISTER_EXPERIMENT("speculate_blocks", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::speculate_blocks_experiment
