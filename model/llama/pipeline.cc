#include "model/llama/pipeline.h"

#include <algorithm>
#include <bit>

#include "base/clock.h"
#include "base/status.h"
#include "model/llama/llama_step.h"

namespace xpyd::model {
namespace {

// Tokens of a piece are worth cutting off from here on: fewer would read all weights for little.
constexpr int kLeastPieceTokens = 64;
constexpr int kPiecesPerStage = 4;

}  // namespace

Pipeline::Pipeline(std::shared_ptr<const Weights> weights, const ShardOptions& o, int max_step_tokens, int max_logits,
                   const Kernels& kernels)
    : weights_(std::move(weights)),
      max_step_tokens_(max_step_tokens),
      max_logits_(max_logits),
      shards_(o.shards),
      piece_tokens_(o.piece_tokens),
      window_(o.window > 0 ? o.window : 2 * o.shards.pp),
      places_(std::bit_ceil(unsigned(std::min(window_, 2 * o.shards.pp)))),
      crowded_(shards_.n_ranks() * o.threads_per_rank > allowed_cpus()),
      observers_(size_t(shards_.pp)),
      waves_(std::bit_ceil(size_t(window_))),
      jobs_(std::bit_ceil(size_t(std::max(window_, kPiecesPerStage * shards_.pp)))),
      done_(std::make_unique<WaitWord[]>(size_t(shards_.n_ranks()))) {
  XPYD_CHECK(max_step_tokens > 0 && max_logits >= 0 && shards_.pp > 1);
  for (int stage = 0; stage < shards_.pp; ++stage) {
    const int places = stage + 1 < shards_.pp ? places_ : 1;
    stages_.push_back(
        std::make_unique<StageRanks>(weights_, o, stage, nullptr, max_step_tokens, places, kernels, crowded_));
    observers_[size_t(stage)].pipeline = this;
  }
  for (Wave& wave : waves_) wave.seconds.resize(size_t(shards_.pp));
  for (int rank = 0; rank < shards_.n_ranks(); ++rank) threads_.emplace_back([this, rank] { run_rank(rank); });
}

Pipeline::~Pipeline() {
  while (first_ != begun_) {
    if (wait()) end(nullptr);
  }
  stop_ = true;
  posted_.add(1);
  for (std::thread& thread : threads_) thread.join();
}

size_t Pipeline::scratch_bytes() const {
  size_t total = 0;
  for (const auto& stage : stages_) total += stage->scratch_bytes();
  return total;
}

// ---- The engine's thread.

void Pipeline::forward(const StepInput& step, float* logits) {
  check_step(step, config(), max_step_tokens_, max_logits_, 0, shards_.n_ranks());
  XPYD_CHECK(first_ == begun_);
  Wave& wave = wave_of(begun_);
  wave.by_layer = step.observer;
  wave.told = false;
  const int n = int(step.token_ids.size()), least = piece_tokens_ > 0 ? piece_tokens_ : kLeastPieceTokens;
  post(step, std::clamp(n / least, 1, piece_tokens_ > 0 ? n : kPiecesPerStage * shards_.pp), logits);
  for (int told = 0; first_ != begun_;) {
    const bool over = wait();
    if (step.observer)
      for (const int layers = wave.layers.load(std::memory_order_acquire); told < layers; ++told)
        step.observer->layer_done(told);
    if (over) end(nullptr);
  }
}

void Pipeline::begin(const StepInput& step, std::span<const Draw>, float* logits) {
  check_step(step, config(), max_step_tokens_, max_logits_, 0, shards_.n_ranks());
  XPYD_CHECK(int(begun_ - first_) < window_);
  Wave& wave = wave_of(begun_);
  wave.by_layer = step.observer;
  wave.told = step.watched;
  keep(wave, step);
  StepInput kept = step;
  kept.token_ids = wave.token_ids;
  kept.views = wave.views;
  post(kept, 1, logits);
}

// What the engine may change while the wave is under way. (Ranks of one pool have one block table.)
void Pipeline::keep(Wave& wave, const StepInput& step) {
  wave.token_ids.assign(step.token_ids.begin(), step.token_ids.end());
  wave.views.assign(step.views.begin(), step.views.end());
  const size_t n_seqs = step.kv_lengths.size();
  wave.tables.resize(std::max(wave.tables.size(), wave.views.size()));
  for (size_t i = 0; i < wave.views.size(); ++i) {
    KvView& view = wave.views[i];
    if (view.contiguous()) continue;
    const size_t s = i % n_seqs;
    if (i >= n_seqs && view.block_table == step.views[s].block_table) {
      view.block_table = wave.views[s].block_table;
      continue;
    }
    const int n_blocks = (step.kv_lengths[s] + view.layout->block_tokens - 1) / view.layout->block_tokens;
    wave.tables[i].assign(view.block_table, view.block_table + n_blocks);
    view.block_table = wave.tables[i].data();
  }
}

// Of a wave's tokens those that are one job.
void Pipeline::fill(Job& job, const StepInput& step, Range tokens, size_t& next_logit) {
  const size_t n_seqs = step.kv_lengths.size();
  job.first_token = tokens.begin;
  job.q_offsets.assign(1, 0);
  job.kv_lengths.clear();
  job.logit_rows.clear();
  job.views.clear();
  size_t first = 0, end = 0;  // its sequences: those that have tokens in it
  for (size_t s = 0; s < n_seqs; ++s) {
    const int begin = std::max(step.q_offsets[s], tokens.begin), until = std::min(step.q_offsets[s + 1], tokens.end);
    if (begin >= until) continue;
    if (end == 0) first = s;
    // One without tokens among them stands for itself: it has none here either.
    for (size_t skipped = end == 0 ? s : end; skipped < s; ++skipped) {
      job.q_offsets.push_back(job.q_offsets.back());
      job.kv_lengths.push_back(step.kv_lengths[skipped]);
    }
    end = s + 1;
    job.q_offsets.push_back(until - tokens.begin);
    job.kv_lengths.push_back(step.kv_lengths[s] - (step.q_offsets[s + 1] - until));
  }
  for (int rank = 0; rank < shards_.n_ranks(); ++rank) {
    const auto views = step.views.subspan(size_t(rank) * n_seqs, n_seqs);
    job.views.insert(job.views.end(), views.begin() + ptrdiff_t(first), views.begin() + ptrdiff_t(end));
  }
  for (; next_logit < step.logit_rows.size() && step.logit_rows[next_logit] < tokens.end; ++next_logit)
    job.logit_rows.push_back(step.logit_rows[next_logit] - tokens.begin);
  job.step = {.token_ids = step.token_ids.subspan(size_t(tokens.begin), size_t(tokens.end - tokens.begin)),
              .q_offsets = job.q_offsets,
              .kv_lengths = job.kv_lengths,
              .views = {},
              .logit_rows = job.logit_rows};
}

void Pipeline::post(const StepInput& step, int n_jobs, float* logits) {
  if (size_t(n_jobs) > jobs_.size()) {  // of a wave that is alone: nobody looks at the ring
    jobs_ = std::vector<Job>(std::bit_ceil(size_t(n_jobs)));
  }
  Wave& wave = wave_of(begun_);
  wave.layers = 0;
  std::fill(wave.seconds.begin(), wave.seconds.end(), 0.0);
  const int n = int(step.token_ids.size());
  size_t next_logit = 0;
  for (int j = 0; j < n_jobs; ++j) {
    Job& job = jobs_[(n_jobs_ + uint32_t(j)) % jobs_.size()];
    job.logits = logits + next_logit * size_t(config().vocab);
    fill(job, step, share(n, j, n_jobs), next_logit);
    job.wave = begun_;
    job.last = j + 1 == n_jobs;
    job.ended = 0;
  }
  ++begun_;
  n_jobs_ += uint32_t(n_jobs);
  posted_.add(uint32_t(n_jobs));
}

// False: there is news that is not the oldest wave's end.
bool Pipeline::wait() {
  for (;;) {
    const uint32_t news = news_.value.load();
    if (ended()) return true;
    if (std::exchange(seen_, news) != news) return false;
    news_.sleep_until([news](uint32_t now) { return now != news; });
  }
}

int Pipeline::layers_written(int wave) const {
  return wave_of(first_ + uint32_t(wave)).layers.load(std::memory_order_acquire);
}

void Pipeline::end(Chosen*) {
  XPYD_CHECK(ended());
  stage_seconds_ = wave_of(first_++).seconds;
}

// ---- The ranks' threads.

void Pipeline::written(Wave& wave, int layers) {
  wave.layers.store(layers, std::memory_order_release);
  news_.add(1);
}

void Pipeline::run_rank(int rank) {
  WaitWord& before = rank < shards_.tp ? posted_ : done_[size_t(rank - shards_.tp)];
  for (uint32_t number = 0;; ++number) {
    const auto is_due = [&](uint32_t n) { return int32_t(n - number) > 0; };
    before.wait([&](uint32_t n) { return is_due(n); }, crowded_);
    if (stop_ && !is_due(before.value.load() - 1)) break;
    // Its place is free when the next stage has done what stood there. (Pieces of one wave have one place.)
    if (window_ > places_ && rank + shards_.tp < shards_.n_ranks())
      done_[size_t(rank + shards_.tp)].wait([&](uint32_t n) { return int32_t(n + uint32_t(places_) - number) > 0; },
                                            crowded_);
    run_job(rank, jobs_[number % jobs_.size()]);
    done_[size_t(rank)].add(1);
  }
  done_[size_t(rank)].add(1);  // whoever waits for its next job stops, too
}

void Pipeline::run_job(int rank, Job& job) {
  const int stage = shards_.stage_of(rank), tensor_rank = shards_.tensor_rank_of(rank);
  Wave& wave = wave_of(job.wave);
  const size_t hidden = size_t(config().hidden), place = size_t(job.first_token) * hidden;
  const auto x_of = [&](int s) {
    const int slot = s + 1 < shards_.pp ? int(job.wave % uint32_t(places_)) : 0;
    return stages_[size_t(s)]->rank(tensor_rank).x(slot) + place;
  };
  StepInput step = job.step;
  const size_t n_seqs = step.kv_lengths.size();
  step.views = std::span(job.views).subspan(size_t(rank) * n_seqs, n_seqs);
  const bool observed = wave.by_layer && job.last;  // then every token's KV is there
  if (observed && tensor_rank == 0) {
    observers_[size_t(stage)].wave = &wave;
    step.observer = &observers_[size_t(stage)];
  }
  const double began = RealClock().now();
  stages_[size_t(stage)]
      ->rank(tensor_rank)
      .run(step, stage == 0 ? nullptr : x_of(stage - 1), x_of(stage), observed, job.logits);
  if (tensor_rank == 0) wave.seconds[size_t(stage)] += RealClock().now() - began;
  const bool last = job.last;
  const uint32_t number = job.wave;
  const int ended = job.ended.fetch_add(1) + 1;  // after this the job may be another one
  // The last of a stage's ranks: each begins when its like of the stage before has ended.
  if (!last || ended < (stage + 1) * shards_.tp) return;
  if (stage + 1 < shards_.pp) {
    if (wave.told && !wave.by_layer) written(wave, shards_.layers(stage).end);
    return;
  }
  over_.store(number + 1, std::memory_order_release);
  news_.add(1);
}

}  // namespace xpyd::model
