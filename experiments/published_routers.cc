#include "experiments/published_routers.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/table.h"
#include "disagg/conductor/placement_costs.h"

namespace xpyd::disagg {
namespace {

// Extremes and moments of a number over the instances that prefill.
struct Spread {
  double n = 0, least = std::numeric_limits<double>::infinity(), most = 0, mean = 0, deviation = 0;
};
template <class Of>
Spread spread(const ClusterView& view, Of of) {
  Spread s;
  double sum = 0, squares = 0;
  for (const InstanceView& i : view.instances) {
    if (!prefills(i)) continue;
    const double x = of(i);
    s.n += 1, sum += x, squares += x * x;
    s.least = std::min(s.least, x), s.most = std::max(s.most, x);
  }
  if (s.n == 0) return s;
  s.mean = sum / s.n;
  s.deviation = std::sqrt(std::max(0.0, squares / s.n - s.mean * s.mean));
  return s;
}

double load_of(const InstanceView& i) { return i.load(); }
double ttft_of(const InstanceView& i) { return i.queue_s + i.prefill_s; }
double match_of(const ClusterView& view, const InstanceView& i) {
  return cached_of(i) / std::max(1, view.prompt_tokens);
}

Placement least_tokens(const ClusterView& view, const PlacementOptions&) {
  auto tokens = [](const InstanceView& i) { return double(i.queued_tokens + i.context_tokens); };
  return pair(view, least(view, prefills, tokens), least(view, decodes, tokens));
}

// The score of Dynamo's first version. The highest score wins, and ties are broken at random. Available memory includes
// evictable blocks, as in vLLM's usage metric.
Placement dynamo_0_1(const ClusterView& view, const PlacementOptions&) {
  const double most_waiting = spread(view, [](const InstanceView& i) { return double(i.queued); }).most;
  auto score = [&](const InstanceView& i) {
    const double usage = i.capacity_tokens > 0 ? 1 - double(i.available_tokens) / double(i.capacity_tokens) : 0;
    const double waiting = most_waiting > 0 ? i.queued / most_waiting : 0;
    return 2 * match_of(view, i) - usage - waiting;
  };
  const int best = least(view, prefills, [&](const InstanceView& i) { return -score(i); });
  if (best < 0) return {};
  const double best_score = score(view.instances[size_t(best)]);
  auto ties = [&](const InstanceView& i) { return prefills(i) && score(i) == best_score; };
  return pair(view, any_of(view, ties, view.random), fewest_sequences(view));
}

Placement cache_aware(const ClusterView& view, double threshold, double absolute, double relative) {
  const Spread loads = spread(view, load_of);
  if (loads.most - loads.least > absolute && loads.most > relative * loads.least) return by(view, load_of);
  const int holder = least(view, prefills, [](const InstanceView& i) { return -cached_of(i); });
  if (holder >= 0 && match_of(view, view.instances[size_t(holder)]) > threshold)
    return pair(view, holder, fewest_sequences(view));
  return by(view, [](const InstanceView& i) { return double(i.indexed_tokens); });
}
Placement sglang(const ClusterView& view, const PlacementOptions&) { return cache_aware(view, 0.3, 64, 1.5); }
Placement sglang_library(const ClusterView& view, const PlacementOptions&) {
  return cache_aware(view, 0.5, 32, 1.0001);
}

Placement llm_d(const ClusterView& view, const PlacementOptions&) {
  const Spread hits = spread(view, cached_of);
  return by(view, [&](const InstanceView& i) {
    const double prefix = hits.most > hits.least ? (cached_of(i) - hits.least) / (hits.most - hits.least) : 1;
    const double queue = 0.5 * (1 - std::min(i.queued, 128) / 128.0);
    const double memory = i.capacity_tokens > 0 ? double(i.available_tokens) / double(i.capacity_tokens) : 1;
    return -(10 * prefix + queue + memory);
  });
}

// First choice: instances that have at least 0.8 of the prompt, unless their TTFT is 5 s above the best. Among them the
// one wins that keeps both objectives with the least slack, which leaves the others free for urgent requests. If none
// keeps them, the one that misses least wins.
Placement llm_d_latency(const ClusterView& view, const PlacementOptions&) {
  auto sticky = [&](const InstanceView& i) { return prefills(i) && match_of(view, i) >= 0.8; };
  const int nearest = least(view, sticky, ttft_of), quickest = least(view, prefills, ttft_of);
  const bool stay = nearest >= 0 &&
                    ttft_of(view.instances[size_t(nearest)]) <= ttft_of(view.instances[size_t(quickest)]) + 5;
  auto spare = [&](const InstanceView& i) {  // weights 0.8 and 0.2, each as a share of its objective
    return 0.8 * (1 - ttft_of(i) / view.objectives.ttft_s) + 0.2 * (1 - i.step_with_s / view.objectives.tbt_s);
  };
  auto keeps = [&](const InstanceView& i) {
    return ttft_of(i) <= view.objectives.ttft_s && i.step_with_s <= view.objectives.tbt_s;
  };
  auto eligible = [&](const InstanceView& i) { return stay ? sticky(i) : prefills(i); };
  int prefill = least(
      view, [&](const InstanceView& i) { return eligible(i) && keeps(i); }, spare);
  if (prefill < 0) prefill = least(view, eligible, [&](const InstanceView& i) { return -spare(i); });
  return pair(view, prefill, shortest_step(view));
}

Placement aibrix(const ClusterView& view, const PlacementOptions&) {
  const Spread loads = spread(view, load_of);
  if (loads.most - loads.least > 8) return by(view, load_of);
  auto eligible = [&](const InstanceView& i) { return prefills(i) && load_of(i) <= loads.mean + loads.deviation; };
  const int prefill = least(view, eligible,
                            [&](const InstanceView& i) { return -match_of(view, i) + 1e-9 * load_of(i); });
  return pair(view, prefill, fewest_sequences(view));
}

Placement production_stack(const ClusterView& view, const PlacementOptions&) {
  const double mean = spread(view, load_of).mean;
  return by(view, [&](const InstanceView& i) { return (load_of(i) - mean) / std::max(1.0, mean) - match_of(view, i); });
}

// The most loaded instance that still keeps the objectives. The others stay free for urgent requests or can be
// released.
Placement polyserve(const ClusterView& view, const PlacementOptions&) {
  const double ttft_s = std::min(5.0, view.objectives.ttft_s), tbt_s = std::min(0.04, view.objectives.tbt_s);
  auto most_loaded = [&](auto role, auto seconds, double bound, auto busy) {
    const int fit = least(
        view, [&](const InstanceView& i) { return role(i) && seconds(i) <= bound; }, busy);
    return fit >= 0 ? fit : least(view, role, seconds);
  };
  auto step = [](const InstanceView& i) { return i.step_with_s; };
  auto both = [&](const InstanceView& i) {  // a colocated instance's decode step counts too
    return std::max(ttft_of(i) / ttft_s, i.role == Role::colocated ? step(i) / tbt_s : 0);
  };
  return pair(view, most_loaded(prefills, both, 1, [](const InstanceView& i) { return -i.queue_s - i.step_s; }),
              most_loaded(decodes, step, tbt_s, [](const InstanceView& i) { return -i.sequences; }));
}

Placement eldr(const ClusterView& view, const PlacementOptions&) {
  const double best = spread(view, [&](const InstanceView& i) { return match_of(view, i); }).most;
  auto near = [&](const InstanceView& i) { return prefills(i) && match_of(view, i) >= best - 0.1; };
  return pair(view, least(view, near, load_of), fewest_sequences(view));
}

constexpr PlacementPolicy kRouters[] = {
    {"least_tokens", least_tokens, false, "queued tokens and KV held; Dynamo's load-only router"},
    {"dynamo_0_1", dynamo_0_1, false, "Dynamo 0.1, KV-aware router; ties at random"},
    {"sglang", sglang, false, "SGLang router, cache_aware, defaults of its command line"},
    {"sglang_library", sglang_library, false, "SGLang router, cache_aware, defaults of its library"},
    {"llm_d", llm_d, false, "llm-d inference scheduler, precise prefix"},
    {"llm_d_latency", llm_d_latency, true, "llm-d, predicted latency"},
    {"aibrix", aibrix, false, "AIBrix, prefix-cache router"},
    {"production_stack", production_stack, false, "vLLM production-stack, load-aware prefix router"},
    {"polyserve", polyserve, true, "PolyServe (2025)"},
    {"eldr", eldr, false, "ELDR (2026): least loaded near the best match"},
};

}  // namespace

std::span<const PlacementPolicy> published_routers() { return kRouters; }

const PlacementPolicy* find_router(std::string_view name) {
  const PlacementPolicy* const own = find_placement_policy(name);
  return own ? own : find_row(kRouters, name);
}

std::string router_names() { return names_of(placement_policies(), "|") + "|" + names_of(kRouters, "|"); }

double regret_ratio(const ClusterView& view, int prefill) {
  const double best = spread(view, cached_of).most, chosen = cached_of(view.instances[size_t(prefill)]);
  const double lost = best - chosen, novel = view.prompt_tokens - best;
  return lost + novel > 0 ? lost / (lost + novel) : 0;
}

}  // namespace xpyd::disagg
