// speculate_optimum, speculate_pd, speculate_mtp: how many drafts are best, by arithmetic: against the batch; on D,
// whose batch is not a colocated instance's, by the rate of the links; and what a multi-token head is worth to
// DeepSeek-V3.
//
// k drafts, each right with probability a where those before it are, end E = (1 - a^(k+1)) / (1 - a) tokens in one step
// of B sequences behind L tokens: c + s B (k + 1) + B L max(v, (k + 1) l), by the cards' figures
// (experiments/simulate/hardware.cc): weights and launches c, products s a token, KV v and scores l for each token that
// is looked at. That is the sum of what bandwidth and what products take; `max` is the slower of both, as if all of one
// were done under the other. A draft costs what made it, besides: nothing (`ngram`); a head of one layer of 61 (`mtp`).
//
// optimum. Llama-2-7B in bf16 on one H100, .44 of 989 TFLOP/s, .7 of 3.35 TB/s, L = 500: c = .5 + 5.75 ms, s = 31 us, v
// L = .11 ms. A draft of ngram costs 31 us of 6.4 ms and pays while a^(k+1) / what it costs > E / step: a = .7 alone: 9
// to 12. Off where a < s B / step: as KV grows with B, too, that is .18 at most. `turbo` is the rule of draft_length.h:
// the same k as the best of all, to one.
//
// pd. Llama-3-70B on 8 x H800, four instances, prompts of 4,096 and answers of 256, a = .7, ngram. c = 11.3 ms, s = 41
// us, a prompt .18 s. Colocated a step is 1 / (1 - u) as long for the prompts of its share u of the time, and so is B;
// D has none. 12 requests/s: 4C have 3 each, u = .55; 2P2D 6 for each D, and P .55 * 2 = more than 1: too few P; 3P1D
// 12 at one D. What arrives at D is at most what P computes and the links carry (1.34 GB a prompt: 9.3/s of 100
// Gb/s, 2.3 of 25). B = r o t / E, so twice the rate and half the step are about one batch. Ever more drafts pay where
// the batch is small: where the links are slow, k is larger by 1 to 5, for nothing: who waits for a link does not wait
// for D.
//
// mtp. DeepSeek-V3 in fp8 on 8 x H200 behind 4,096 tokens: c = 25.5 ms (all experts: true of batches of hundreds), s =
// 21 us, v L = 10.7 us, l L = 5.9. 3 drafts of which 1.18 are right (SGLang: 2.18 tokens a step): alone 2.18 / 1.05
// = 2.1; of hundreds (26.7 + .109 B) / (25.5 + .032 B): 1.24 at B = 340, 0.96 at 840, .64 for ever more. One draft,
// right in .85: 1.85 / 1.02 alone, 1.09 at last: never below 1. So a row from .96 to 1.24 is one of large batches, and
// of too many drafts.
#include <algorithm>
#include <cmath>

#include "batch/draft_length.h"
#include "experiments/experiment.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments::speculate_costs_experiment {
namespace {

constexpr int kMostHere = 24;

struct Target {
  double launch_s, weights_s, token_s, kv_s, look_s, prompt_token_s, prompt_pair_s;
  double made_share = 0;  // of a draft
  bool overlaps = false;

  double made(double batch) const { return made_share * (weights_s + token_s * batch); }
  double step(double batch, double context, double k) const {
    const double kv = batch * context * kv_s, look = batch * context * look_s * (k + 1);
    const double products = token_s * batch * (k + 1);
    const double verify = overlaps ? std::max(weights_s + kv, products + look)
                                   : weights_s + products + std::max(kv, look);
    return launch_s + verify + k * made(batch);
  }
};

Target target(const disagg::SimulatedModel& model, const disagg::Hardware& h, const std::string& drafter) {
  const StepCost::Terms t = disagg::step_cost(model, h).terms();
  Target made{h.step_s, t[0] - h.step_s, t[4], t[2], 2 * t[3], t[1], t[3]};
  if (drafter == "mtp") made.made_share = 1.0 / model.n_layers;
  return made;
}

double ended(double a, double k) { return (1 - std::pow(a, k + 1)) / (1 - a); }

// The k of which f(k) is the most.
template <class F>
int best(F&& f) {
  int found = 0;
  for (int k = 1; k <= kMostHere; ++k)
    if (f(k) > f(found)) found = k;
  return found;
}

// What the engine's rule takes for each of `batch` sequences, in the mean, whose drafts have been right that often.
double turbo(const Target& t, int batch, double context, double a) {
  DraftRecord record;
  for (int i = 0; i < 1000; ++i) record.saw(1, i * 7 % 10 < std::lround(10 * a));
  const double off = t.step(batch, context, 0);
  DraftRate rate{.tokens = double(batch),
                 .seconds = off,
                 .token_seconds = (t.step(batch, context, 1) - off) / batch,
                 .credit = 1e9};
  int taken = 0;
  for (int i = 0; i < batch; ++i) taken += rate.take(record, kMostHere);
  return double(taken) / batch;
}

Result<Finding> optimum(const Values& point) {
  const disagg::SimulatedModel model{"llama-2-7b", 32, 32, 128, 6.74e9, 6.74e9, 2 * 32 * 128, 2, 2, ""};
  Result<disagg::Hardware> card = disagg::find_hardware("h100x1");
  if (!card) return card.error();
  Finding found;
  for (bool overlaps : {false, true}) {
    Target t = target(model, card.value(), "ngram");
    t.overlaps = overlaps;
    const double batch = point["batch"], a = point["right"], context = 500;
    const int k = best([&](int n) { return ended(a, n) / t.step(batch, context, n); });
    const auto rate = [&](double n) { return ended(a, n) / t.step(batch, context, n) * t.step(batch, context, 0); };
    found.rows.push_back(
        {{"cost", overlaps ? "max" : "sum"},
         {"k", k},
         {"gain", rate(k)},
         {"gain_of_4", rate(4)},
         {"turbo_k", turbo(t, point["batch"], context, a)},
         {"gain_of_turbo", rate(turbo(t, point["batch"], context, a))},
         {"least_right", (t.step(batch, context, 1) - t.step(batch, context, 0)) / t.step(batch, context, 0)},
         {"step_ms", 1e3 * t.step(batch, context, 0)}});
  }
  return found;
}

// `rate` requests/s at one instance that also computes `busy` of the time, k drafts: sequences at once; negative: it
// cannot keep up.
double batch_of(const Target& t, double rate, double output, double context, double busy, double a, int k) {
  const double fixed = t.step(0, context, k), each = t.step(1, context, k) - fixed;
  const double tokens = rate * output, room = ended(a, k) * (1 - busy) - tokens * each;
  return room > 0 ? tokens * fixed / room : -1;
}

Result<Finding> pd(const Values& point) {
  Result<disagg::SimulatedModel> model = disagg::find_simulated_model("llama-3-70b");
  Result<disagg::Hardware> h = disagg::find_hardware("h800x8");
  if (!model || !h) return model ? h.error() : model.error();
  const Target t = target(model.value(), h.value(), "ngram");
  constexpr double kPrompt = 4096, kOutput = 256, kRight = .7, kContext = kPrompt + kOutput / 2, kInstances = 4;
  const double prompt_s = kPrompt * t.prompt_token_s + kPrompt * kPrompt * t.prompt_pair_s;
  const double asked = point["rate"];
  Finding found;
  const auto add = [&](const char* who, double gbps, double rate, double busy) {
    const auto seconds = [&](int k) {  // of a token; -: none
      const double batch = batch_of(t, rate, kOutput, kContext, busy, kRight, k);
      return batch < 0 ? INFINITY : t.step(batch, kContext, k) / (1 - busy) / ended(kRight, k);
    };
    const int k = best([&](int n) { return -seconds(n); });
    const double batch = batch_of(t, rate, kOutput, kContext, busy, kRight, k);
    found.rows.push_back({{"who", who},
                          {"gbps", gbps},
                          {"arrives", rate},
                          {"k", k},
                          {"batch", batch},
                          {"batch_off", batch_of(t, rate, kOutput, kContext, busy, kRight, 0)},
                          {"tbt_ms", 1e3 * seconds(k)},
                          {"gain", seconds(0) / seconds(k)}});
  };
  add("4C", 0, asked / kInstances, asked / kInstances * prompt_s);
  for (int n_decode : {1, 2})
    for (double gbps : {10., 25., 100., 400.}) {
      const double computed = std::min(asked, (kInstances - n_decode) / prompt_s);
      const double carried = gbps / 8 * 1e9 / (kPrompt * model.value().kv_token_bytes());
      add(n_decode == 1 ? "3P1D" : "2P2D", gbps, std::min(computed / n_decode, carried), 0);
    }
  return found;
}

Result<Finding> mtp(const Values& point) {
  Result<disagg::SimulatedModel> model = disagg::find_simulated_model("deepseek-v3");
  Result<disagg::Hardware> h = disagg::find_hardware("h200x8");
  if (!model || !h) return model ? h.error() : model.error();
  const Target t = target(model.value(), h.value(), "mtp");
  Finding found;
  const int k = point["k"];
  const double tokens = k == 1 ? 1.85 : 2.18, batch = point["batch"], context = 4096;
  const double cost = t.step(batch, context, k) / t.step(batch, context, 0);
  found.rows.push_back({{"tokens_per_step", tokens}, {"step", cost}, {"gain", tokens / cost}});
  return found;
}

std::vector<Values> optimum_points(const Setting&) {
  std::vector<Values> all;
  for (double right : {.3, .5, .7, .9})
    for (int batch = 1; batch <= 256; batch *= 2) all.push_back({{"right", right}, {"batch", batch}});
  return all;
}

std::vector<Values> pd_points(const Setting&) {
  std::vector<Values> all;
  for (double rate : {2., 4., 8., 12.}) all.push_back({{"rate", rate}});
  return all;
}

std::vector<Values> mtp_points(const Setting&) {
  std::vector<Values> all;
  for (int k : {1, 3})
    for (int batch = 1; batch <= 4096; batch *= 2) all.push_back({{"k", k}, {"batch", batch}});
  return all;
}

Measure open_optimum(const Setting&) { return optimum; }
Measure open_pd(const Setting&) { return pd; }
Measure open_mtp(const Setting&) { return mtp; }

REGISTER_EXPERIMENT("speculate_optimum", "cpu", optimum_points, open_optimum);
REGISTER_EXPERIMENT("speculate_pd", "cpu", pd_points, open_pd);
REGISTER_EXPERIMENT("speculate_mtp", "cpu", mtp_points, open_mtp);

}  // namespace
}  // namespace xpyd::experiments::speculate_costs_experiment
