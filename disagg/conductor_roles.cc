// Conductor: what its roles policy sees, and which instance changes (roles.h).
#include <algorithm>

#include "disagg/conductor.h"
#include "disagg/event_log.h"

namespace xpyd::disagg {

// Tokens/s of a D that is as full as its memory, its batch and the objective allow.
double Conductor::decode_velocity(const Member& member) const {
  const StepCost cost = board_.cost(member.probe->stats());
  const double context = std::max(1.0, demand_.context());
  const auto step_s = [&](double n) { return cost.seconds({.decodes = n, .decode_context = n * context}); };
  double n = std::min(double(member.info.max_batch),
                      double(member.info.capacity_blocks) * member.info.block_tokens / context);
  if (const double tbt_s = options_.objectives.tbt_s; tbt_s > 0 && step_s(n) > tbt_s)
    n = n * (tbt_s - step_s(0)) / (step_s(n) - step_s(0));  // a step's time is linear in n
  n = std::max(1.0, n);
  return n / step_s(n);
}

std::optional<RoleMove> Conductor::change_roles() {
  constexpr double kEverySeconds = 1;
  std::lock_guard lock(mutex_);
  const double now = clock_.now();
  if (now < roles_.now_s + kEverySeconds || demand_.output() == 0) return {};
  roles_.now_s = now;
  roles_.prefill = roles_.decode = 0;
  const Member *prefill = nullptr, *decode = nullptr;  // those with the least to do
  for (const auto& [id, member] : members_) {
    if (member.draining) return {};  // one at a time
    if (member.info.role == Role::prefill) {
      ++roles_.prefill;
      if (!prefill || member.load.queued_tokens < prefill->load.queued_tokens) prefill = &member;
    } else if (member.info.role == Role::decode) {
      ++roles_.decode;
      if (!decode || member.load.context_tokens < decode->load.context_tokens) decode = &member;
    }
  }
  if (!prefill || !decode) return {};
  const PlacedPrompt prompt = board_.prompt(std::max(1, int(demand_.uncached())), 0);
  roles_.prompt_tokens_s = demand_.prompt_tokens_s(now);
  roles_.output_tokens_s = demand_.requests_s(now) * demand_.output();
  roles_.prefill_velocity = double(prompt.tokens) / board_.cost(prefill->probe->stats()).seconds(prompt.work);
  roles_.decode_velocity = decode_velocity(*decode);
  const RoleChange change = options_.roles->decide(roles_, options_.roles_options);
  if (options_.log) options_.log->decided(now, "role", options_.roles->name, 0, roles_, options_.roles_options, change);
  if (change == RoleChange::none) return {};
  roles_.changed_s = now;
  ++totals_.role_changes;
  if (change == RoleChange::to_prefill) return RoleMove{decode->info.id, decode->info.name, Role::prefill};
  return RoleMove{prefill->info.id, prefill->info.name, Role::decode};
}

}  // namespace xpyd::disagg
