#include "disagg/conductor/placement.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

bool prefills(const InstanceView& i) { return i.role != Role::decode; }
bool decodes(const InstanceView& i) { return i.role == Role::decode; }

// Returns the eligible instance with the least cost, the first among equals, or -1 if none is eligible.
template <class Eligible, class Cost>
int least(const ClusterView& view, Eligible eligible, Cost cost) {
  int best = -1;
  double best_cost = 0;
  for (int i = 0; i < int(view.instances.size()); ++i) {
    const InstanceView& instance = view.instances[size_t(i)];
    if (!eligible(instance)) continue;
    const double c = cost(instance);
    if (best < 0 || c < best_cost) best = i, best_cost = c;
  }
  return best;
}

// Returns eligible instance number k mod n, where n is the number of eligible ones, or -1 if there are none.
template <class Eligible>
int any_of(const ClusterView& view, Eligible eligible, uint64_t k) {
  const auto n = uint64_t(std::ranges::count_if(view.instances, eligible));
  if (n == 0) return -1;
  k %= n;
  for (int i = 0;; ++i)
    if (eligible(view.instances[size_t(i)]) && k-- == 0) return i;
}

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
double cached_of(const InstanceView& i) { return i.cached_tokens; }
double ttft_of(const InstanceView& i) { return i.queue_s + i.prefill_s; }
double uncached_of(const ClusterView& view, const InstanceView& i) {
  return double(view.prompt_tokens - i.cached_tokens);
}
double match_of(const ClusterView& view, const InstanceView& i) {
  return cached_of(i) / std::max(1, view.prompt_tokens);
}

// Policies that count place the decode on the instance with the fewest sequences.
int fewest_sequences(const ClusterView& view) {
  return least(view, decodes, [](const InstanceView& i) { return i.sequences; });
}
// Policies that predict take the shortest step with this request, among instances with room for its prompt if there are
// any.
int shortest_step(const ClusterView& view) {
  auto roomy = [&](const InstanceView& i) { return decodes(i) && i.available_tokens >= view.prompt_tokens; };
  auto step = [](const InstanceView& i) { return i.step_with_s; };
  const int best = least(view, roomy, step);
  return best >= 0 ? best : least(view, decodes, step);
}

Placement pair(const ClusterView& view, int prefill, int decode) {
  if (prefill >= 0 && view.instances[size_t(prefill)].role == Role::colocated) decode = prefill;
  return {prefill, decode};
}
template <class Cost>
Placement by(const ClusterView& view, Cost cost, int (*decode)(const ClusterView&) = fewest_sequences) {
  return pair(view, least(view, prefills, cost), decode(view));
}

Placement random(const ClusterView& view, const PlacementOptions&) {
  return pair(view, any_of(view, prefills, view.random), any_of(view, decodes, view.random >> 32));
}

Placement round_robin(const ClusterView& view, const PlacementOptions&) {
  return pair(view, any_of(view, prefills, view.number), any_of(view, decodes, view.number));
}

// Decodes of a colocated instance delay its prompts, so a sequence counts as one token.
Placement least_loaded(const ClusterView& view, const PlacementOptions&) {
  return by(view, [](const InstanceView& i) { return double(i.queued_tokens) + i.sequences; });
}

Placement least_tokens(const ClusterView& view, const PlacementOptions&) {
  auto tokens = [](const InstanceView& i) { return double(i.queued_tokens + i.context_tokens); };
  return pair(view, least(view, prefills, tokens), least(view, decodes, tokens));
}

// Cost: the tokens to compute before this prompt is done, which are those queued and its own uncached ones.
Placement prefix_aware(const ClusterView& view, const PlacementOptions&) {
  return by(view, [&](const InstanceView& i) { return double(i.queued_tokens) + i.sequences + uncached_of(view, i); });
}

// Lines 3 to 17 and 20 to 21 of Algorithm 1. The ratio in line 5 is infinite if this instance has no hit and another
// has one.
Placement mooncake(const ClusterView& view, const PlacementOptions& options) {
  const int holder = least(view, prefills, [](const InstanceView& i) { return -cached_of(i); });
  if (holder < 0) return {};
  const double best = cached_of(view.instances[size_t(holder)]);
  auto fetches = [&](const InstanceView& i) {
    return best > options.fetch_threshold * cached_of(i) && best > cached_of(i) && i.fetch_s < kNever;
  };
  Placement placed = by(
      view,
      [&](const InstanceView& i) { return i.queue_s + (fetches(i) ? i.fetch_s + i.fetched_prefill_s : i.prefill_s); },
      shortest_step);
  if (fetches(view.instances[size_t(placed.prefill)])) placed.source = holder;
  return placed;
}

// Without the + 1 an idle instance would cost 0 whatever its cache.
Placement lmetric(const ClusterView& view, const PlacementOptions&) {
  return by(view,
            [&](const InstanceView& i) { return (double(i.queued_tokens) + uncached_of(view, i)) * (i.load() + 1); });
}

Placement dynamo(const ClusterView& view, const PlacementOptions&) {
  const double block = view.block_tokens;
  auto decode_blocks = [&](const InstanceView& i) { return double(i.context_tokens + view.prompt_tokens) / block; };
  const int prefill = least(view, prefills, [&](const InstanceView& i) {
    const double credit = (i.cached_tokens + 0.75 * i.host_tokens + 0.25 * i.disk_tokens) / block;
    const double raw = double(i.queued_tokens + view.prompt_tokens) / block;
    return std::max(0.0, raw - credit) + (i.role == Role::colocated ? decode_blocks(i) : 0);
  });
  return pair(view, prefill, least(view, decodes, decode_blocks));
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

// Exploits a hit of more than half the prompt. Otherwise it explores: least of recent work, this prompt's work, and the
// tokens evicted for it.
Placement preble(const ClusterView& view, const PlacementOptions&) {
  const int holder = least(view, prefills, [](const InstanceView& i) { return -cached_of(i); });
  if (holder >= 0 && match_of(view, view.instances[size_t(holder)]) > 0.5)
    return pair(view, holder, fewest_sequences(view));
  return by(view, [&](const InstanceView& i) {
    const double unused = double(i.capacity_tokens - i.indexed_tokens - i.context_tokens);
    return double(i.recent_tokens) + uncached_of(view, i) + std::max(0.0, uncached_of(view, i) - std::max(0.0, unused));
  });
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

constexpr PlacementPolicy kPlacements[] = {
    {"random", random, false, "", "the baseline of Mooncake (FAST '25) section 5"},
    {"round_robin", round_robin, false, "", "vLLM's proxy examples"},
    {"least_loaded", least_loaded, false, "", "shortest queue; DistServe (OSDI '24) section 4.3"},
    {"least_tokens", least_tokens, false, "", "queued tokens and KV held; Dynamo's load-only router"},
    {"prefix_aware", prefix_aware, false, "", "Mooncake (FAST '25) Algorithm 1 without transfer terms"},
    {"mooncake", mooncake, true, "threshold 1.5 (not published)", "Mooncake (FAST '25) Algorithm 1"},
    {"lmetric", lmetric, false, "", "LMetric (OSDI '26): (queued + uncached tokens) x (requests + 1)"},
    {"dynamo", dynamo, false, "credit 1, .75 host, .25 disk; no decay; temperature 0",
     "Dynamo 1.x, kv-router selector"},
    {"dynamo_0_1", dynamo_0_1, false, "match 2, memory 1, waiting 1", "Dynamo 0.1, KV-aware router; ties at random"},
    {"sglang", sglang, false, "cache .3, balance 64 and 1.5",
     "SGLang router, cache_aware, defaults of its command line"},
    {"sglang_library", sglang_library, false, "cache .5, balance 32 and 1.0001",
     "SGLang router, cache_aware, defaults of its library"},
    {"llm_d", llm_d, false, "prefix 10, queue 1 (of 128), memory 1", "llm-d inference scheduler, precise prefix"},
    {"llm_d_latency", llm_d_latency, true, "TTFT .8, TPOT .2, affinity .8, 5 s; no exploration",
     "llm-d, predicted latency"},
    {"preble", preble, false, "match .5, window 180 s, an evicted token costs one", "Preble (ICLR '25), E2"},
    {"aibrix", aibrix, false, "gap 8, mean + 1 deviation", "AIBrix, prefix-cache router"},
    {"production_stack", production_stack, false, "beta 1", "vLLM production-stack, load-aware prefix router"},
    {"polyserve", polyserve, true, "TTFT 5 s, TPOT 40 ms, or the request's if stricter", "PolyServe (2025)"},
    {"eldr", eldr, false, "band .1", "ELDR (2026): least loaded near the best match"},
};

}  // namespace

std::span<const PlacementPolicy> placement_policies() { return kPlacements; }

const PlacementPolicy* find_placement_policy(std::string_view name) { return find_row(kPlacements, name); }

double regret_ratio(const ClusterView& view, int prefill) {
  const double best = spread(view, cached_of).most, chosen = cached_of(view.instances[size_t(prefill)]);
  const double lost = best - chosen, novel = view.prompt_tokens - best;
  return lost + novel > 0 ? lost / (lost + novel) : 0;
}

}  // namespace xpyd::disagg
