#include "disagg/instance/instance_status.h"

#include <algorithm>
#include <utility>

namespace xpyd::disagg {

// Changes during a step count from its end.
void InstanceStatus::charge_transfers() {
  const double now = parts_.clock.now();
  transfer_block_s_ += double(moving_blocks_) * (now - std::exchange(charged_s_, now));
  moving_blocks_ = 0;
  kv_.each_holder([this](uint64_t, KvHandle handle) { moving_blocks_ += parts_.memory.blocks(handle).size(); });
}

void InstanceStatus::saw(const StepCosts::Took& took) {
  std::lock_guard lock(mutex_);
  published_.cost_error.add(took.predicted_s, took.seconds);
}

void InstanceStatus::report_cache() {
  constexpr size_t kMost = 4096;  // hashes in one report, stored and removed together
  const double now = parts_.clock.now();
  if (!options_.cache_log || now < reported_s_ + options_.report_every_s) return;
  reported_s_ = now;
  const auto piece = [](const std::vector<uint64_t>& of, size_t at) {
    return std::vector<uint64_t>(of.begin() + long(std::min(at, of.size())),
                                 of.begin() + long(std::min(at + kMost / 2, of.size())));
  };
  for (const Tier tier : {Tier::device, Tier::host, Tier::disk}) {
    const PrefixChanges changes = options_.cache_log->take(tier);
    for (size_t at = 0; at < std::max(changes.stored.size(), changes.removed.size()); at += kMost / 2)
      parts_.tell(kConductor, CacheReport{tier, piece(changes.stored, at), piece(changes.removed, at)});
  }
}

void InstanceStatus::publish(const StepCost::Terms& cost) {
  const KvStats kv = parts_.memory.stats();
  const EngineStats& engine = engine_.stats();
  std::lock_guard lock(mutex_);
  InstanceStats& s = published_;
  s.running = engine_.running();
  s.waiting = engine_.waiting() + kv_.reservations.size();
  s.queue_remote_prefilling = kv_.receiver.expected();
  s.queue_prefill_sending = kv_.sender.sending();
  s.kv = kv;
  s.steps = engine.steps;
  s.prompt_tokens = engine.prompt_tokens;
  s.generated_tokens = engine.generated_tokens;
  s.preemptions = engine.preemptions;
  s.draft_tokens = engine.draft_tokens;
  s.accepted_tokens = engine.accepted_tokens;
  s.step_seconds = engine.step_seconds;
  s.wait_seconds = engine.wait_seconds;
  s.schedule_seconds = engine.schedule_seconds;
  const handover::ReceiverStats& received = kv_.receiver.stats();
  s.transfers = parts_.posted.transfers;
  s.transfer_bytes = parts_.posted.bytes;
  s.transfer_descriptors = parts_.posted.descriptors;
  s.transfer_seconds = parts_.posted.seconds;
  s.wire_s_per_byte = parts_.rate.s_per_byte();
  s.kv_refused = received.refused_kv;
  s.fetch = parts_.fetch;
  s.experts = engine_.expert_load();
  const double block_gb = 1e-9 * options_.bytes_scale * kv.block_tokens *
                          double(parts_.memory.layout().shape.token_bytes());
  s.spent = {.prefill_gb_s = block_gb * engine.prompt_block_s,
             .decode_gb_s = block_gb * engine.decode_block_s,
             .transfer_gb_s = block_gb * transfer_block_s_,
             .tflop = 1e-12 * engine.flops,
             .peak_tflops = options_.peak_tflops};
  s.heartbeat_s = parts_.clock.now();
  s.cost = cost;
  count_.fetch_add(1, std::memory_order_release);
}

InstanceStats InstanceStatus::stats() const {
  std::lock_guard lock(mutex_);
  return published_;
}

}  // namespace xpyd::disagg
