// Published traces of requests, read into one form for the simulator: when a request arrives, how long its prompt and
// its answer are, which of its blocks other requests share, and which request it waits for.
//
// A rule supplies what a file does not contain, and a note says so. Without times, requests that wait for nothing
// arrive at options.rate. Without hashes, each block belongs to its request alone. Texts count as one token for each
// four bytes.
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
  double arrival_s = 0;  // after the trace's first request; if the request waits for another: as recorded
  int prompt_tokens = 0, output_tokens = 0;  // each at least 1
  // One id for each block_tokens of the prompt; the last block may be partial. An id stands for its block and all
  // blocks before it: in the whole trace, equal ids mean equal tokens after equal prefixes.
  std::vector<uint64_t> blocks;
  int session = -1;  // requests of one session continue each other; -1: none
  // In a closed loop the request arrives think_s after the end of request `after`, which has a smaller index. `after`
  // is the previous request of its session. For the first request of a sub-agent it is the call that started the
  // sub-agent; for the first request after sub-agents, the last request of the sub-agent that ended last. -1: the
  // request arrives at arrival_s.
  int after = -1;
  double think_s = 0;
};

struct Trace {
  std::vector<TraceRequest> requests;  // sorted by arrival_s
  int block_tokens = 0;
  bool closed_loop = false;        // requests wait for `after`; false: arrival_s holds, and `after` is only information
  std::vector<std::string> notes;  // sentences on what was dropped or made up
};

struct TraceOptions {
  int limit = 0;        // number of requests; 0: all
  double speed = 1;     // divides arrival times; think times stay
  double jitter_s = 0;  // uniform in [0, jitter_s), added to requests that wait for nothing, before `speed`
  int repeat = 1;       // repetitions, one after the other; each has its own blocks and sessions
  uint64_t seed = 0;
  double rate = 1;            // arrivals per second where the file has no times; infinite: all at once
  double think_s = 0;         // between the turns of a conversation where the file has no times
  int clients = 100;          // servegen: clients in the pool
  int hash_block_tokens = 0;  // mooncake: tokens of each hash id; 0: 512
};

struct TraceFormat {
  const char* name;
  Result<Trace> (*load)(const std::string& path, const TraceOptions& options);
  int block_tokens;
  const char* source;
};
const std::vector<TraceFormat>& trace_formats();
inline const TraceFormat* find_trace_format(std::string_view name) { return find_row(trace_formats(), name); }

// Seeded requests with published marginals (generate.cc). generate_tool_agent applies only the seed;
// generate_client_pool applies seed, rate, clients and limit (0: 10,000 requests).
Trace generate_tool_agent(const TraceOptions& options);
Trace generate_client_pool(const TraceOptions& options);

}  // namespace xpyd::disagg
