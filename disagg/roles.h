// Elastic roles: whether an instance changes from prefill to decode or back, for what comes. Pure functions over a
// snapshot, asked every so often (Conductor::change_roles); the mechanism is the server's (Runtime::retire).
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
  double pressure = 0.7;    // that is meant: below, nothing changes
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

// What comes, as the conductor places it and sees it end: rates over about the last 30 s, and means.
class Demand {
 public:
  void placed(int64_t uncached, int64_t prompt, double now_s);
  void ended(int64_t output) { mean(output_, double(output)); }  // tokens of a choice

  double requests_s(double now_s) const { return requests_ * fade(now_s); }
  double prompt_tokens_s(double now_s) const { return tokens_ * fade(now_s); }  // uncached
  double uncached() const { return uncached_; }                                 // tokens of a prompt
  double output() const { return output_; }
  double context() const { return prompt_ + output_ / 2; }  // tokens of KV of a sequence that decodes

 private:
  static constexpr double kSeconds = 30, kShare = 0.05;
  double fade(double now_s) const;
  static void mean(double& of, double x) { of += of == 0 ? x : kShare * (x - of); }
  double requests_ = 0, tokens_ = 0, at_s_ = 0;
  double uncached_ = 0, prompt_ = 0, output_ = 0;
};

std::span<const RolesPolicy> roles_policies();
const RolesPolicy* find_roles_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
