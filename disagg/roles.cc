#include "disagg/roles.h"

#include <algorithm>
#include <cmath>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

RoleChange fixed(const RolesView&, const RolesOptions&) { return RoleChange::none; }

// An instance of the role with the lesser pressure changes where the other's is above what is meant, and greater by
// more than the band, and where that makes the greater of the two smaller: so it does not change back while the load
// stays.
RoleChange velocity(const RolesView& view, const RolesOptions& options) {
  if (view.now_s < view.changed_s + options.cool_down_s) return RoleChange::none;
  if (view.prefill_velocity <= 0 || view.decode_velocity <= 0) return RoleChange::none;
  const auto prefill = [&](int n) { return view.prompt_tokens_s / (n * view.prefill_velocity); };
  const auto decode = [&](int n) { return view.output_tokens_s / (n * view.decode_velocity); };
  const double p = prefill(view.prefill), d = decode(view.decode);
  if (std::max(p, d) < options.pressure) return RoleChange::none;
  if (p > options.band * d && view.decode > options.at_least && decode(view.decode - 1) < p)
    return RoleChange::to_prefill;
  if (d > options.band * p && view.prefill > options.at_least && prefill(view.prefill - 1) < d)
    return RoleChange::to_decode;
  return RoleChange::none;
}

constexpr RolesPolicy kPolicies[] = {
    {"fixed", fixed, "every published P/D system's default"},
    {"velocity", velocity,
     "TokenScale (2025): token velocity; hysteresis and cool-down as SGLang's and Dynamo's planners"},
};

}  // namespace

double Demand::fade(double now_s) const { return std::exp((at_s_ - now_s) / kSeconds); }

void Demand::placed(int64_t uncached, int64_t prompt, double now_s) {
  const double left = fade(now_s);
  requests_ = requests_ * left + 1 / kSeconds;
  tokens_ = tokens_ * left + double(uncached) / kSeconds;
  at_s_ = now_s;
  mean(uncached_, double(uncached));
  mean(prompt_, double(prompt));
}

std::span<const RolesPolicy> roles_policies() { return kPolicies; }
const RolesPolicy* find_roles_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg
