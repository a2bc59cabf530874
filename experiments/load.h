// Requests at their times into a cluster of this process, and what their users would have seen. No
// HTTP between: what `xpyd bench` sees from outside, less the front end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "experiments/experiment.h"
#include "experiments/load/bench.h"
#include "experiments/load/datasets.h"
#include "server/stack.h"

namespace xpyd::experiments {

struct Run {
  BenchResult result;           // TTFT, TPOT, ITL as `xpyd bench` defines them
  std::vector<double> gaps_ms;  // between tokens of one request, pooled, ascending
  std::vector<double> ttft_ms;  // in the order of the requests
  std::vector<double> tpot_ms;  // the same; none of a request of one token
  std::vector<double> tail_ms;  // per request: mean of its longest 10 % of gaps (Mooncake's TBT)
  double hit_share = 0;         // prompt tokens found in a prefix cache
  uint64_t logits_hash = 0;     // of these requests together, whatever their order
  std::string wrong;            // "": every request got all its tokens
};

// One request at a time, each sent when the one before has ended, when `due` is empty; else
// requests[i] at due[i] seconds.
Run run_load(Stack& stack, const std::vector<BenchRequest>& requests, const std::vector<double>& due);

// Clusters over one model and device, of which one is open at a time. Each is compared with the
// plainest one before anything is timed: 1C, whole prompts, contiguous memory, no prefix cache.
class Bed {
 public:
  // `common`: serve options of every cluster, the model's folder first.
  Bed(const Setting& setting, std::vector<std::string> common);
  // Opens (or keeps) the cluster with these options on top of the common ones. The error, or what
  // is wrong with its logits, or "".
  Result<std::string> open(const std::vector<std::string>& options);
  Stack& stack() { return *stack_; }
  void close() { stack_.reset(); }  // until the next open()
  // Requests per second that one colocated instance with every core ends when `requests` are all
  // there at once. Measured once, before the first open(): the unit of `load`.
  Result<double> capacity(const std::vector<BenchRequest>& requests);

 private:
  Result<std::unique_ptr<Stack>> build(const std::vector<std::string>& options) const;

  Setting setting_;
  std::vector<std::string> common_, options_;
  std::unique_ptr<Stack> stack_;
  uint64_t plain_hash_ = 0;
  bool has_plain_ = false;
  double capacity_ = 0;
};

// What a run is in a CSV: vLLM's names of TTFT, TPOT and ITL; percentiles, "" where the run has too
// few (values.h); the hash.
Values run_values(const Run& run);

}  // namespace xpyd::experiments
