// When each chunk leaves each stage of a prefill pipeline: arithmetic on seconds, without a model or a clock.
//
// Chunks of one or many prompts enter stage 0 in one order, and every stage keeps it. Stage s can begin chunk i when it
// has finished chunk i - 1 and has received chunk i from stage s - 1. The KV of earlier chunks is then in its layers.
// With a window W, stage 0 begins chunk i only when chunk i - W has left the last stage:
//
//   begin[i][0] = max(arrival_i, done[i-1][0], done[i-W][P-1])
//   begin[i][s] = max(done[i-1][s], done[i][s-1] + boundary_i)         done[i][s] = begin[i][s] + t_i[s]
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <vector>

namespace xpyd::experiments {

struct PipelineChunk {
  std::vector<double> stage_s;  // [n_stages]: compute time in each stage
  double boundary_s = 0;        // transfer to the next stage; stages compute meanwhile
  double arrival_s = 0;
};

struct PipelineTimes {
  int n_stages = 0;
  std::vector<double> begin, done;  // [n_chunks, n_stages]

  double begun(int chunk, int stage) const { return begin[size_t(chunk) * size_t(n_stages) + size_t(stage)]; }
  double left(int chunk, int stage) const { return done[size_t(chunk) * size_t(n_stages) + size_t(stage)]; }
  double end() const { return done.empty() ? 0 : done.back(); }
};

// Applies the recurrence. `window`: most chunks in flight; 0: no limit. All chunks have the same n_stages >= 1.
PipelineTimes pipeline_times(std::span<const PipelineChunk> chunks, int window);

// Returns when the last of chunks that all arrive at 0 is done. Chunk i takes chunk_s[i] on each stage, without window
// and boundary: sum + (n_stages - 1) * longest (a proportionate flow shop).
double pipeline_seconds(std::span<const double> chunk_s, int n_stages);

}  // namespace xpyd::experiments
