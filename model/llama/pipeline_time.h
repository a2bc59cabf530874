// When each chunk leaves each stage of a pipeline that prefills: arithmetic on seconds, without a model and a clock.
//
// Chunks of one prompt or of many enter stage 0 in one order, which no stage changes. Stage s can begin chunk i when it
// has finished i - 1 and has i from stage s - 1; the KV of earlier chunks in its own layers is there by then. With a
// window, stage 0 begins chunk i only when chunk i - W has left the last stage:
//
//   begin[i][0] = max(arrival_i, done[i-1][0], done[i-W][P-1])
//   begin[i][s] = max(done[i-1][s], done[i][s-1] + boundary_i)         done[i][s] = begin[i][s] + t_i[s]
//
// Thread safety: plain functions.
#pragma once

#include <span>
#include <vector>

namespace xpyd::model {

struct PipelineChunk {
  std::vector<double> stage_s;  // [n_stages], seconds that each stage computes it
  double boundary_s = 0;        // from one stage to the next; stages compute meanwhile
  double arrival_s = 0;
};

struct PipelineTimes {
  int n_stages = 0;
  std::vector<double> begin, done;  // [n_chunks, n_stages]

  double begun(int chunk, int stage) const { return begin[size_t(chunk) * size_t(n_stages) + size_t(stage)]; }
  double left(int chunk, int stage) const { return done[size_t(chunk) * size_t(n_stages) + size_t(stage)]; }
  double end() const { return done.empty() ? 0 : done.back(); }
};

// `window`: chunks in flight at most; 0: any number. All chunks have the same number of stages, at least one.
PipelineTimes pipeline_times(std::span<const PipelineChunk> chunks, int window);

// The end of chunks that are all there at 0 and take chunk_s[i] on each of `n_stages` stages, with no window and no
// boundary: sum + (n_stages - 1) longest (a proportionate flow shop).
double pipeline_seconds(std::span<const double> chunk_s, int n_stages);

}  // namespace xpyd::model
