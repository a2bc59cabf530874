#include "experiments/event_log/replay.h"

#include <algorithm>
#include <utility>

#include "base/table.h"
#include "batch/policies/admission.h"
#include "disagg/conductor/event_log.h"
#include "experiments/event_log/json_in.h"
#include "experiments/event_log/read_log.h"
#include "experiments/published_routers.h"

namespace xpyd::disagg {
namespace {

using nlohmann::json;

template <class T>
T part(const json& line, const char* name, JsonIn::Keep& keep) {
  T x{};
  JsonIn(line, keep)(name, x);
  return x;
}

template <class T>
std::string text_of(const T& x) {
  JsonText text;
  JsonOut(text).write(x);
  return text.take();
}

template <class Row>
const Row& row(const Row* found, const std::string& name) {
  if (!found) throw std::runtime_error("this build has no policy \"" + name + "\"");
  return *found;
}

std::string place_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed& count) {
  const auto view = part<ClusterView>(line, "view", keep);
  const auto recorded = part<Placement>(line, "answer", keep);
  const Placement now = row(find_router(policy), policy).place(view, part<PlacementOptions>(line, "options", keep));
  const auto regret = [&](const Placement& p) {
    return p.prefill >= 0 && p.prefill < int(view.instances.size()) ? regret_ratio(view, p.prefill) : 0;
  };
  count.regret += regret(recorded), count.regret_now += regret(now);
  return text_of(now);
}

template <bool kJoins>
std::string admit_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed&) {
  auto view = part<ClusterAdmission>(line, "view", keep);
  const model::StepCost cost(part<model::StepCost::Terms>(line, "cost", keep));
  view.cost = &cost;
  const AdmissionPolicy& policy_row = row(find_admission_policy(policy), policy);
  const auto rule = kJoins ? policy_row.joins : policy_row.arrives;  // null: the policy refuses nobody at this point
  return text_of(rule ? rule(view, part<AdmissionOptions>(line, "options", keep)) : Refusal{});
}

std::string order_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed&) {
  const DisaggOrder order = row(find_disagg_policy(policy), policy)
                                .decide(part<DisaggView>(line, "view", keep),
                                        part<DisaggOptions>(line, "options", keep));
  return std::to_string(int(order));
}

std::string fetch_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed&) {
  const auto fetches = row(find_fetch_policy(policy), policy).fetches;
  return text_of(fetches && fetches(part<FetchView>(line, "view", keep)));
}

std::string plan_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed&) {
  auto view = part<BatchView>(line, "view", keep);
  const auto admission = part<std::string>(line, "admission", keep);
  if (!admission.empty()) view.admission = &row(find_admission_rule(admission), admission);
  if (view.block_tokens < 1) throw std::runtime_error("block_tokens: expected at least 1");
  BatchPlan plan;
  row(find_batch_policy(policy), policy).plan(view, plan);
  return text_of(plan);
}

// The index of the block that the policy evicts first. Among equal ranks, the larger position goes first.
std::string evict_again(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed&) {
  const auto shown = part<std::span<const BlockUse>>(line, "view", keep);
  if (shown.empty()) throw std::runtime_error("blocks: expected at least one");
  const EvictionPolicy& rule = row(find_row(kEvictionPolicies, policy), policy);
  const auto place = [&](const BlockUse& use) { return std::pair(rule.rank(use), -int64_t(use.position)); };
  return std::to_string(std::ranges::min_element(shown, {}, place) - shown.begin());
}

struct Kind {
  const char* name;
  std::string (*again)(const json& line, const std::string& policy, JsonIn::Keep& keep, Replayed& count);
};
constexpr Kind kKinds[] = {
    {"place", place_again},
    {"admit", admit_again<false>},
    {"join", admit_again<true>},
    {"order", order_again},
    {"fetch_or_compute", fetch_again},
    {"plan", plan_again},
    {"evict", evict_again},
};

// The answer exactly as it was written, because a written answer omits zeros.
std::string recorded_answer(const std::string& line) {
  const size_t at = line.rfind("\"answer\":");
  return at == std::string::npos ? "" : line.substr(at + 9, line.size() - at - 10);
}

}  // namespace

Result<std::map<std::string, Replayed>> replay(
    std::span<const std::string> paths, const ReplayOptions& options,
    const std::function<void(const std::string& line, const std::string& answer)>& differs) {
  std::map<std::string, Replayed> counts;
  const Status read = read_event_logs(paths, [&](const std::string& text, const json& line) {
    const Kind* kind = find_row(kKinds, line.value("e", ""));
    if (!kind) return;  // not a decision
    const auto instead = options.instead.find(kind->name);
    const std::string policy = instead == options.instead.end() ? line.value("policy", "") : instead->second;
    Replayed& count = counts[kind->name];
    ++count.decisions;
    JsonIn::Keep keep;
    const std::string again = kind->again(line, policy, keep, count);
    if (again == recorded_answer(text)) return;
    ++count.differ;
    differs(text, again);
  });
  if (!read) return read.error();
  return counts;
}

}  // namespace xpyd::disagg
