// The options of an instance.
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
  DisaggOrder order = DisaggOrder::push;  // as in Welcome
  StreamKv stream_kv = StreamKv::layer;
  bool reserve_blocks = false;  // see handover/reservation.h
  EngineOptions engine;
  StepCost cost;                         // initial step cost
  bool cost_known = false;               // the cost is exact (simulation)
  double lease_s = 0;                    // see InstanceParts; reports and renewals leave every quarter of it
  bool post_by_stage = false;            // see InstanceParts
  std::shared_ptr<PrefixLog> cache_log;  // changes of its memory, for CacheReports; null: not wanted
  double report_every_s = 0.01;          // least time between two CacheReports
  handover::Visits* visits = nullptr;    // of a test; may be null
  std::shared_ptr<EventLog> log;         // gets its plans, steps and transfers; null: none
  double bytes_scale = 1;                // factor on transferred bytes (a simulation's KV is small)
  double peak_tflops = 0;                // 10^12 FLOP/s of its threads; 0: unknown
};

}  // namespace xpyd::disagg
