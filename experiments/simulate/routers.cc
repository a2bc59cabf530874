#include "experiments/simulate/routers.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {
namespace {

// Null if the message concerns no attempt.
AttemptId* attempt_of(Message& message) {
  return std::visit(
      [](auto& m) -> AttemptId* {
        if constexpr (requires { m.attempt; })
          return &m.attempt;
        else
          return nullptr;
      },
      message);
}

void add(PredictionError& sum, const PredictionError& more) {
  sum.n += more.n, sum.absolute += more.absolute, sum.signed_sum += more.signed_sum;
}

}  // namespace

Routers::Routers(const RouterOptions& options, const ConductorOptions& each, Timeline& timeline, MessageBus& bus)
    : options_(options), timeline_(timeline), bus_(bus) {
  for (int r = 0; r < options.routers; ++r) {
    ConductorOptions own = each;
    own.seed ^= uint64_t(r) << 53;  // above the bits that --seed can have
    routers_.push_back(std::make_unique<Router>(*this, r, own));
  }
}

// Messages that concern no attempt (membership) reach instances from the first router only.
void Routers::Router::send(InstanceId from, InstanceId to, Message message) {
  AttemptId* attempt = attempt_of(message);
  if (attempt) *attempt = *attempt * all.routers_.size() + AttemptId(number);
  if (attempt || number == 0) all.bus_.send(from, to, std::move(message));
}

InstanceId Routers::new_id() {
  InstanceId id = -1;
  for (const auto& router : routers_) id = router->conductor.new_id();
  return id;
}

void Routers::joined(const InstanceInfo& info, const std::shared_ptr<InstanceProbe>& probe) {
  for (const auto& router : routers_) router->conductor.joined(info, probe);
}

Status Routers::submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) {
  return routers_[next_++ % routers_.size()]->conductor.submit(std::move(request), std::move(sink));
}

void Routers::receive(InstanceId from, Message&& message) {
  if (AttemptId* attempt = attempt_of(message)) {
    Router& router = *routers_[size_t(*attempt % routers_.size())];
    *attempt /= routers_.size();
    router.conductor.receive(from, std::move(message));
  } else if (auto* report = std::get_if<CacheReport>(&message)) {
    for (const auto& router : routers_) heard(*router, from, *report);
  } else {
    for (const auto& router : routers_) router->conductor.receive(from, Message(message));
  }
}

void Routers::heard(Router& router, InstanceId from, CacheReport report) {
  if (options_.event_loss > 0)
    for (std::vector<uint64_t>* events : {&report.stored, &report.removed})
      std::erase_if(*events, [&](uint64_t) { return router.random.uniform() < options_.event_loss; });
  if (options_.event_delay_s <= 0) return router.conductor.receive(from, std::move(report));
  timeline_.at(timeline_.now() + options_.event_delay_s,
               [&router, from, late = std::move(report)] { router.conductor.receive(from, late); });
}

ConductorStats Routers::totals() const {
  ConductorStats sum = routers_.front()->conductor.stats().conductor;
  for (size_t r = 1; r < routers_.size(); ++r) {
    // Names every member, so that a new one fails to compile until it is added here.
    const auto& [attempts, failed, replaced, left, early, late, wasted_s, ttft, tbt, ended, kept,
                 logits_hash] = routers_[r]->conductor.stats().conductor;
    sum.attempts += attempts, sum.failed_attempts += failed, sum.replaced_choices += replaced;
    sum.left = std::max(sum.left, left);  // every router sees all of them
    sum.refused_early += early, sum.refused_late += late;
    sum.wasted_prefill_s += wasted_s, sum.ended += ended, sum.kept += kept, sum.logits_hash += logits_hash;
    add(sum.ttft_error, ttft), add(sum.tbt_error, tbt);
  }
  return sum;
}

}  // namespace xpyd::disagg
