// Elastic roles: whether an instance changes from prefill to decode or back, for what comes. Pure functions over a
// snapshot, asked every so often; the mechanism is the server's (Runtime::retire).
//
// Velocity (TokenScale, 2025): tokens per second that one instance of a role does, against tokens per
// second that come for it. A role's pressure is the second over what its instances do together; it is 1 where they
// just keep up.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace xpyd::disagg {

struct RolesView {
  double now_s = 0, changed_s = -1e9;                // Clock; the last change
  int prefill = 0, decode = 0;                       // instances
  double prompt_tokens_s = 0, output_tokens_s = 0;   // that come: uncached prompt tokens, and tokens to be put out
  double prefill_velocity = 0, decode_velocity = 0;  // tokens/s of one instance
};

struct RolesOptions {
  double band = 1.25;       // one role's pressure over the other's, before anything changes
  double cool_down_s = 30;  // between two changes
  int at_least = 1;         // instances of each role
};

enum class RoleChange : uint8_t { none, to_prefill, to_decode };

struct RolesPolicy {
  const char* name;
  RoleChange (*decide)(const RolesView& view, const RolesOptions& options);
  const char* source;
};

std::span<const RolesPolicy> roles_policies();
const RolesPolicy* find_roles_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
