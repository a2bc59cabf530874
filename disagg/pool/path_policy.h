// Over which path a prefix that lies elsewhere comes to the prefill instance: read by itself, or by the decode instance
// of the same placement, over its link, and then from there (DualPath). It loads a lot and decode instances load
// nothing, so that the queue at its link is long where the other one's is empty.
//
// Thread safety: pure functions.
#pragma once

#include <span>
#include <string_view>

namespace xpyd::disagg {

// One prefix, P and the relay. Predicted, in seconds.
struct PathView {
  double direct_queue_s = 0;  // what is on its way to P
  double direct_s = 0;        // what P lacks
  double relay_queue_s = 0;   // what is on its way to the relay
  double relay_s = 0;         // what the relay lacks
  double hop_s = 0;           // what P lacks, from the relay
};

struct PathPolicy {
  const char* name;
  bool (*relays)(const PathView& view);  // null: never, and nobody need be asked
  const char* source;
};

std::span<const PathPolicy> path_policies();
const PathPolicy* find_path_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
