// What an instance is told when it is made.
//
// Thread safety: a plain value.
#pragma once

#include <memory>
#include <string>

#include "allocator/prefix_log.h"
#include "batch/engine/engine_parts.h"
#include "disagg/messages.h"
#include "model/cost/step_cost.h"

namespace xpyd::disagg {

namespace handover {
struct Visits;
}
class EventLog;

struct InstanceOptions {
  InstanceId id = 0;
  std::string name;
  Role role = Role::colocated;
  StreamKv stream_kv = StreamKv::layer;
  bool escrow = false;  // prompts that leave begin when all that they need is held (handover/reservation.h)
  EngineOptions engine;
  StepCost cost;            // before the first step
  bool cost_known = false;  // steps take just that (a simulation's)
  double lease_s = 0;       // see InstanceParts; also: reports and renewals go out every quarter of it
  bool checksum = false;
  bool post_by_stage = false;            // InstanceParts
  std::shared_ptr<PrefixLog> cache_log;  // of its memory, for CacheReports; null: not wanted
  double report_every_s = 0.01;          // … at most
  handover::Visits* visits = nullptr;    // of a test
  std::shared_ptr<EventLog> log;         // of its plans, steps and transfers; null: none
  double bytes_scale = 1;                // of what crosses (a simulation's KV is small)
  double peak_tflops = 0;                // 10^12 FLOP/s that its threads can do; 0: not known
};

}  // namespace xpyd::disagg
