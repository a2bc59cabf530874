// Sends requests at their times into a cluster in this process and records what users would see. It measures what `xpyd
// bench` measures, but without HTTP and the front end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "experiments/experiment.h"
#include "experiments/load/bench.h"
#include "experiments/load/datasets.h"
#include "server/build.h"

namespace xpyd::experiments {

struct Run {
  BenchResult result;           // TTFT, TPOT, ITL as `xpyd bench` defines them
  std::vector<double> gaps_ms;  // gaps between tokens of one request, of all requests, ascending
  std::vector<double> ttft_ms;  // in the order of the requests
  std::vector<double> tpot_ms;  // the same; requests of one token have none
  std::vector<double> tail_ms;  // per request: mean of its longest 10 % of gaps (Mooncake's TBT)
  double hit_share = 0;         // share of prompt tokens found in a prefix cache
  uint64_t logits_hash = 0;     // of all requests, whatever their order
  std::string wrong;            // "" if every request got all its tokens
};

// With an empty `due`, sends each request when the one before has ended. Else sends requests[i] at due[i] seconds.
Run run_load(Build& build, const std::vector<BenchRequest>& requests, const std::vector<double>& due);

// Clusters over one model and device, of which one is open at a time. Before timing, each is compared with the plainest
// cluster: 1C, whole prompts, contiguous memory, no prefix cache.
class Bed {
 public:
  // `common` are the serve options of every cluster. The model's folder comes first.
  Bed(const Setting& setting, std::vector<std::string> common);
  // Opens a cluster with these options and the common ones, or keeps it if it is open. Returns an error, or a message
  // if its logits are wrong, or "".
  Result<std::string> open(const std::vector<std::string>& options);
  Build& build() { return *build_; }
  void close() { build_.reset(); }  // until the next open()
  // Requests per second that one colocated instance with every core completes when all `requests` are present at once:
  // the unit of `load`. The first call measures it and closes the open cluster.
  Result<double> capacity(const std::vector<BenchRequest>& requests);

 private:
  Result<std::unique_ptr<Build>> make(const std::vector<std::string>& options) const;

  Setting setting_;
  std::vector<std::string> common_, options_;
  std::unique_ptr<Build> build_;
  uint64_t plain_hash_ = 0;
  bool has_plain_ = false;
  double capacity_ = 0;
};

// The columns of a run: TTFT, TPOT and ITL under vLLM's names; percentiles, "" if the run has too few requests
// (values.h); the hash.
Values run_values(const Run& run);

}  // namespace xpyd::experiments
