// speculate_optimum: how many drafts are best, by arithmetic, against the batch.
//
// k drafts, each right with probability a where those before it are, end E = (1 - a^(k+1)) / (1 - a) tokens in one step
// of B sequences behind L tokens: c + s B (k + 1) + B L max(v, (k + 1) l), by the cards' figures
// (disagg/simulate/hardware.cc): weights and launches c, products s a token, KV v and scores l for each token that is
// looked at. That is the sum of what bandwidth and what products take; `max` is the slower of both, as if all of one
// were done under the other. A draft costs what made it, besides: nothing (`ngram`); a model of 160 M parameters that
// is run once for each (`model`: launches of .5 ms, and 2.4 % of the rest); a head of one layer of 61 (`mtp`).
//
// optimum. Llama-2-7B in bf16 on one H100, .44 of 989 TFLOP/s, .7 of 3.35 TB/s, L = 500: c = .5 + 5.75 ms, s = 31 us, v L =
// .11 ms. A draft pays while a^(k+1) / what it costs > E / step. a = .7 alone: by a model .63 ms of 6.4, so a^(k+1) >
// .1 E / (1 + .1 k): 4 (published 4 to 5); a = .5: 2 (published 3); a = .9: 9 to 12 (published 7); ngram's cost 31 us:
// 9 to 12 at .7. At B = 64 the step is 15.4 ms, of which KV is 7.2, and a draft 2.7 by a model: 2 to 4 (published 1 to 2).
// Off where a < (s B + made) / step: as KV grows with B, too, that is .18 at most, so for a = .5 never (published: from 16
// on). The draft that would not pay at 16 costs half a step, 4.3 ms, 3.6 more than these are: what was measured there was
// not the cards. `turbo` is the rule of draft_length.h: the same k as the best of all, to one.
#include <algorithm>
#include <cmath>

#include "batch/draft_length.h"
#include "disagg/simulate/hardware.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::speculate_costs_experiment {
namespace {

constexpr int kMostHere = 24;

struct Target {
  double launch_s, weights_s, token_s, kv_s, look_s, prompt_token_s, prompt_pair_s;
  double made_launch = 0, made_share = 0;  // of a draft
  bool overlaps = false;

  double made(double batch) const { return made_launch * launch_s + made_share * (weights_s + token_s * batch); }
  double step(double batch, double context, double k) const {
    const double kv = batch * context * kv_s, look = batch * context * look_s * (k + 1);
    const double products = token_s * batch * (k + 1);
    const double verify = overlaps ? std::max(weights_s + kv, products + look) : weights_s + products + std::max(kv, look);
    return launch_s + verify + k * made(batch);
  }
};

Target target(const disagg::SimulatedModel& model, const disagg::Hardware& h, const std::string& drafter) {
  const StepCost::Terms t = disagg::step_cost(model, h).terms();
  Target made{h.step_s, t[0] - h.step_s, t[4], t[2], 2 * t[3], t[1], t[3]};
  if (drafter == "model") made.made_launch = 1, made.made_share = .024;
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
  DraftRate rate{.tokens = double(batch), .seconds = off, .token_seconds = (t.step(batch, context, 1) - off) / batch,
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
  for (const char* drafter : {"ngram", "model"})
    for (bool overlaps : {false, true}) {
      Target t = target(model, card.value(), drafter);
      t.overlaps = overlaps;
      const double batch = point["batch"], a = point["right"], context = 500;
      const int k = best([&](int n) { return ended(a, n) / t.step(batch, context, n); });
      const auto rate = [&](double n) { return ended(a, n) / t.step(batch, context, n) * t.step(batch, context, 0); };
      found.rows.push_back({{"drafter", drafter},
                            {"cost", overlaps ? "max" : "sum"},
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

std::vector<Values> optimum_points(const Setting&) {
  std::vector<Values> all;
  for (double right : {.3, .5, .7, .9})
    for (int batch = 1; batch <= 256; batch *= 2) all.push_back({{"right", right}, {"batch", batch}});
  return all;
}

Measure open_optimum(const Setting&) { return optimum; }
REGISTER_EXPERIMENT("speculate_optimum", "cpu", optimum_points, open_optimum);

}  // namespace
}  // namespace xpyd::experiments::speculate_costs_experiment
