// Shared by the computed experiments on chunked pipeline prefill: the seconds of a chunk, rules that cut a prompt into
// chunks, and the stream of chunks through a pipeline.
//
// t(L, x) = c + b x + gamma L + a (2 L x + x^2) for x tokens after L tokens. SGLang, vllm-ascend and ATOM fit the same
// terms.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "experiments/pipeline_time.h"
#include "experiments/simulate/hardware.h"

namespace xpyd::experiments {

struct ChunkCost {
  double stage_s = 0;                 // fixed part of every stage, for launches
  double c = 0, b = 0, g = 0, a = 0;  // of all layers together; a stage has 1 / n of them

  // Seconds on one of `n` equal stages.
  double seconds(double L, double x, int n) const {
    return stage_s + (c + b * x + g * L + a * (2 * L * x + x * x)) / n;
  }
  // The largest x for which a stage takes T; 0 if there is none.
  double tokens(double L, double T, int n) const {
    const double rest = n * (T - stage_s) - c - g * L, linear = 2 * a * L + b;
    if (rest <= 0) return 0;
    return a > 0 ? (std::sqrt(linear * linear + 4 * a * rest) - linear) / (2 * a) : rest / b;
  }
};

// The cost on one card of this kind.
inline ChunkCost chunk_cost(const disagg::SimulatedModel& model, const disagg::Hardware& card) {
  const auto terms = disagg::step_cost(model, card).terms();
  return {card.step_s, terms[0] - card.step_s, terms[1], terms[2], terms[3]};
}

struct Chunk {
  double L = 0, x = 0;  // tokens before the chunk, and in it
};

// The number of tokens in the next chunk after L tokens.
using ChunkRule = std::function<double(double L)>;
constexpr double kChunkPage = 64;

inline std::vector<Chunk> cut(double cached, double tokens, const ChunkRule& next) {
  std::vector<Chunk> chunks;
  for (double L = cached, end = cached + tokens; L < end;) {
    const double x = std::min(end - L, std::max(kChunkPage, std::floor(next(L) / kChunkPage) * kChunkPage));
    chunks.push_back({L, x});
    L += x;
  }
  return chunks;
}

inline ChunkRule fixed_chunks(double x) {
  return [x](double) { return x; };
}

inline ChunkRule equal_time_chunks(const ChunkCost& cost, double T, int n) {
  return [=](double L) { return cost.tokens(L, T, n); };
}

inline std::vector<double> stage_seconds(const ChunkCost& cost, const std::vector<Chunk>& chunks, int n) {
  std::vector<double> seconds;
  for (const Chunk& chunk : chunks) seconds.push_back(cost.seconds(chunk.L, chunk.x, n));
  return seconds;
}

// Equal-time chunks of one prompt alone, with the earliest end by the closed form. T is searched on a grid of 2 %.
inline std::vector<Chunk> best_equal_time(const ChunkCost& cost, double cached, double tokens, int n) {
  const double whole = cost.seconds(cached, tokens, n);
  std::vector<Chunk> best;
  double earliest = 0;
  for (double T = whole; T > whole / 2000 && T > cost.seconds(cached + tokens, kChunkPage, n); T /= 1.02) {
    std::vector<Chunk> chunks = cut(cached, tokens, equal_time_chunks(cost, T, n));
    const double end = pipeline_seconds(stage_seconds(cost, chunks, n), n);
    if (best.empty() || end < earliest) best = std::move(chunks), earliest = end;
  }
  return best.empty() ? cut(cached, tokens, fixed_chunks(tokens)) : best;
}

// `queued` prompts of these chunks, all present at time 0. A boundary takes `token_s` per token plus `link_s`.
inline std::vector<PipelineChunk> stream(const ChunkCost& cost, const std::vector<Chunk>& chunks, int n, int queued,
                                         double token_s = 0, double link_s = 0) {
  std::vector<PipelineChunk> all;
  for (int i = 0; i < queued; ++i)
    for (const Chunk& chunk : chunks)
      all.push_back({.stage_s = std::vector<double>(size_t(n), cost.seconds(chunk.L, chunk.x, n)),
                     .boundary_s = chunk.x * token_s + link_s});
  return all;
}

}  // namespace xpyd::experiments
