// Fetch or compute: whether an instance gets the part of a prompt's prefix that another one has and it has not, before
// it computes the rest. Mooncake's Algorithm 1 fetches where the best hit is so many times the one here, and vLLM's
// store connector whenever there is a longer one; the time saved is compared with the time spent by `cost` alone.
//
// Thread safety: pure functions.
#pragma once

#include <span>
#include <string_view>

namespace xpyd::disagg {

// One prompt at the instance where it was placed, and who has most of it.
struct FetchView {
  int prompt_tokens = 0;
  int cached_tokens = 0;  // here already
  int holder_tokens = 0;  // at the best holder, more than here
  // Predicted, in seconds (scoreboard.h).
  double bytes_s = 0;      // the difference on the wire, by its measured rate
  double handshake_s = 0;  // from asking a holder until it has answered, as measured
  double queue_s = 0;      // what the holder is already sending others
  double saved_s = 0;      // the prompt with what is here, less the prompt with what the holder has
};

inline double fetch_seconds(const FetchView& view) { return view.queue_s + view.handshake_s + view.bytes_s; }

struct FetchPolicy {
  const char* name;
  bool (*fetches)(const FetchView& view);  // null: never, and nobody need be asked
  double most;  // times what it saves that it may take before it is given up; 0: there is no such limit
  const char* source;
};

std::span<const FetchPolicy> fetch_policies();
const FetchPolicy* find_fetch_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
