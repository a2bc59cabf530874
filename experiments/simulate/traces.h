// Published traces of requests, each read into one plain form for the simulator: when a request arrives, how long its
// prompt and its answer are, which of its blocks others have too, and what it waits for.
//
// What a file does not say is made up by rule, and a note tells: where it has no times, what starts by itself arrives
// at options.rate; where it has no hashes, each block is its request's own; texts count as four bytes a token.
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/table.h"

namespace xpyd::disagg {

struct TraceRequest {
  double arrival_s = 0;  // after the trace's first; of one that waits for another: as it was recorded
  int prompt_tokens = 0, output_tokens = 0;  // at least 1 each
  // One for each block_tokens of the prompt, the last one partial. An id stands for its block and all before it: equal
  // ids are equal tokens after equal prefixes, in the whole trace.
  std::vector<uint64_t> blocks;
  int session = -1;  // requests that continue each other; -1: of none
  // In a closed loop it comes think_s after the end of request `after`, which stands before it: the one before it in
  // its session; for the first of a sub-agent, the call that started that; for the first after sub-agents, the last
  // one's last. -1: it arrives at arrival_s.
  int after = -1;
  double think_s = 0;
};

struct Trace {
  std::vector<TraceRequest> requests;  // by arrival_s
  int block_tokens = 0;
  bool closed_loop = false;        // `after` is how it was recorded; else it is known and not asked for
  std::vector<std::string> notes;  // what was dropped, and what was made up, in words
};

struct TraceOptions {
  int limit = 0;        // of requests; 0: all
  double speed = 1;     // arrivals are that much closer; think times stay
  double jitter_s = 0;  // added to what starts by itself: uniform in [0, jitter_s), before speed
  int repeat = 1;       // the trace laid end to end; blocks and sessions of each are its own
  uint64_t seed = 0;
  double rate = 1;            // starts per second where the file has no times; infinite: all at once
  double think_s = 0;         // between the turns of conversations where the file has no times
  int clients = 100;          // servegen: of the pool
  int hash_block_tokens = 0;  // mooncake: that an id of a row's hash_ids stands for; 0: 512
};

struct TraceFormat {
  const char* name;
  Result<Trace> (*load)(const std::string& path, const TraceOptions& options);
  int block_tokens;
  const char* source;
};
const std::vector<TraceFormat>& trace_formats();
inline const TraceFormat* find_trace_format(std::string_view name) { return find_row(trace_formats(), name); }

// Seeded requests with published marginals (generate.cc); options not applied but seed, limit and rate.
Trace generate_tool_agent(const TraceOptions& options);
Trace generate_client_pool(const TraceOptions& options);

}  // namespace xpyd::disagg
