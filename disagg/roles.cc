#include "disagg/roles.h"

#include <algorithm>

#include "base/table.h"

namespace xpyd::disagg {
namespace {

RoleChange fixed(const RolesView&, const RolesOptions&) { return RoleChange::none; }

// One instance changes where that makes the worse of the two pressures better, and by more than the band.
RoleChange velocity(const RolesView& view, const RolesOptions& options) {
  if (view.now_s < view.changed_s + options.cool_down_s) return RoleChange::none;
  if (view.prefill_velocity <= 0 || view.decode_velocity <= 0) return RoleChange::none;
  const auto worst = [&](int prefill, int decode) {
    return std::max(view.prompt_tokens_s / (prefill * view.prefill_velocity),
                    view.output_tokens_s / (decode * view.decode_velocity));
  };
  const double now = worst(view.prefill, view.decode);
  RoleChange best = RoleChange::none;
  double least = now / options.band;
  const auto consider = [&](RoleChange change, int prefill, int decode) {
    if (prefill < options.at_least || decode < options.at_least) return;
    if (const double then = worst(prefill, decode); then < least) best = change, least = then;
  };
  consider(RoleChange::to_prefill, view.prefill + 1, view.decode - 1);
  consider(RoleChange::to_decode, view.prefill - 1, view.decode + 1);
  return best;
}

constexpr RolesPolicy kPolicies[] = {
    {"fixed", fixed, "every published P/D system's default"},
    {"velocity", velocity,
     "TokenScale (2025): token velocity; hysteresis and cool-down as SGLang's and Dynamo's planners"},
};

}  // namespace

std::span<const RolesPolicy> roles_policies() { return kPolicies; }
const RolesPolicy* find_roles_policy(std::string_view name) { return find_row(kPolicies, name); }

}  // namespace xpyd::disagg
