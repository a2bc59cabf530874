// Fetch or compute: whether an instance fetches the part of a prefix that another instance has beyond its own.
// Mooncake's Algorithm 1 fetches if the best hit is larger than the local one by a factor. vLLM's store connector
// fetches every longer prefix. Only `cost` compares the time saved with the time spent.
//
// Thread safety: pure functions.
#pragma once

#include <span>
#include <string_view>

namespace xpyd::disagg {

// One prompt at the instance where it was placed, and its best holder.
struct FetchView {
  int prompt_tokens = 0;
  int cached_tokens = 0;  // on this instance
  int holder_tokens = 0;  // at the best holder; more than here
  // Predictions in seconds (cluster_state.h).
  double bytes_s = 0;      // transfer of the difference, at the measured rate
  double handshake_s = 0;  // from the question to the holder's answer, as measured
  double saved_s = 0;      // computing the prompt with cached_tokens, minus with holder_tokens
};

inline double fetch_seconds(const FetchView& view) { return view.handshake_s + view.bytes_s; }

struct FetchPolicy {
  const char* name;
  bool (*fetches)(const FetchView& view);  // null: never fetches
  double most;                             // the fetch is given up after `most` times what it saves; 0: no such limit
  const char* source;
};

std::span<const FetchPolicy> fetch_policies();
const FetchPolicy* find_fetch_policy(std::string_view name);  // null: no such policy

}  // namespace xpyd::disagg
