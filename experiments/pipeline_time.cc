#include "experiments/pipeline_time.h"

#include <algorithm>

#include "base/status.h"

namespace xpyd::experiments {

PipelineTimes pipeline_times(std::span<const PipelineChunk> chunks, int window) {
  PipelineTimes times;
  if (chunks.empty()) return times;
  const size_t P = chunks[0].stage_s.size();
  XPYD_CHECK(P > 0 && window >= 0);
  times.n_stages = int(P);
  times.begin.resize(chunks.size() * P);
  times.done.resize(chunks.size() * P);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const PipelineChunk& chunk = chunks[i];
    XPYD_CHECK(chunk.stage_s.size() == P);
    double ready = chunk.arrival_s;
    if (window > 0 && i >= size_t(window)) ready = std::max(ready, times.done[(i - size_t(window) + 1) * P - 1]);
    for (size_t s = 0; s < P; ++s) {
      const double begin = i > 0 ? std::max(ready, times.done[(i - 1) * P + s]) : ready;
      times.begin[i * P + s] = begin;
      times.done[i * P + s] = begin + chunk.stage_s[s];
      ready = times.done[i * P + s] + chunk.boundary_s;
    }
  }
  return times;
}

double pipeline_seconds(std::span<const double> chunk_s, int n_stages) {
  double sum = 0, longest = 0;
  for (double t : chunk_s) sum += t, longest = std::max(longest, t);
  return sum + (n_stages - 1) * longest;
}

}  // namespace xpyd::experiments
