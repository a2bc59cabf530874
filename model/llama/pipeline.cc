#include "model/llama/pipeline.h"

#include <algorithm>
#include <bit>

#include "base/clock.h"
#include "base/status.h"
#include "model/llama/llama_step.h"

namespace xpyd::model {

Pipeline::Pipeline(std::shared_ptr<const Weights> weights, const ShardOptions& o, int max_step_tokens, int max_logits,
                   const Kernels& kernels)
    : weights_(std::move(weights)),
      max_step_tokens_(max_step_tokens),
      max_logits_(max_logits),
      shards_(o.shards),
      window_(o.window > 0 ? o.window : 2 * o.shards.pp),
      places_(std::bit_ceil(unsigned(std::min(window_, 2 * o.shards.pp)))),
      crowded_(shards_.n_ranks() * o.threads_per_rank > allowed_cpus()),
      observers_(size_t(shards_.pp)),
      waves_(std::bit_ceil(size_t(window_))),
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

// ---- The engine's thread.

void Pipeline::begin(const StepInput& step, std::span<const Draw>, float* logits) {
  check_step(step, config(), max_step_tokens_, max_logits_, 0, shards_.n_ranks());
  XPYD_CHECK(int(begun_ - first_) < window_);
  Wave& wave = wave_of(begun_);
  wave.logits = logits;
  wave.by_layer = step.observer;
  wave.told = step.watched;
  wave.layers = wave.ranks_done = 0;
  std::fill(wave.seconds.begin(), wave.seconds.end(), 0.0);
  keep(wave, step);
  ++begun_;
  posted_.add(1);
}

void Pipeline::keep(Wave& wave, const StepInput& step) {
  const auto copy = [](auto& to, auto from) { to.assign(from.begin(), from.end()); };
  copy(wave.token_ids, step.token_ids);
  copy(wave.q_offsets, step.q_offsets);
  copy(wave.kv_lengths, step.kv_lengths);
  copy(wave.logit_rows, step.logit_rows);
  copy(wave.views, step.views);
  const size_t n_seqs = step.kv_lengths.size();
  wave.tables.resize(std::max(wave.tables.size(), wave.views.size()));
  for (size_t i = 0; i < wave.views.size(); ++i) {
    KvView& view = wave.views[i];
    if (view.contiguous()) continue;
    const size_t s = i % n_seqs;
    if (i >= n_seqs && view.block_table == step.views[s].block_table) {  // ranks of one pool share a block table
      view.block_table = wave.views[s].block_table;
      continue;
    }
    const int n_blocks = (step.kv_lengths[s] + view.layout->block_tokens - 1) / view.layout->block_tokens;
    wave.tables[i].assign(view.block_table, view.block_table + n_blocks);
    view.block_table = wave.tables[i].data();
  }
  wave.step = {.token_ids = wave.token_ids,
               .q_offsets = wave.q_offsets,
               .kv_lengths = wave.kv_lengths,
               .views = {},
               .logit_rows = wave.logit_rows};
}

// False: the news is not the end of the oldest wave.
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
    // The place is free once the next stage has finished the wave that used it before.
    if (window_ > places_ && rank + shards_.tp < shards_.n_ranks())
      done_[size_t(rank + shards_.tp)].wait([&](uint32_t n) { return int32_t(n + uint32_t(places_) - number) > 0; },
                                            crowded_);
    run_wave(rank, number);
    done_[size_t(rank)].add(1);
  }
  done_[size_t(rank)].add(1);  // the rank that waits for the next wave stops, too
}

void Pipeline::run_wave(int rank, uint32_t number) {
  const int stage = shards_.stage_of(rank), tensor_rank = shards_.tensor_rank_of(rank);
  Wave& wave = wave_of(number);
  const auto x_of = [&](int s) {
    const int slot = s + 1 < shards_.pp ? int(number % uint32_t(places_)) : 0;
    return stages_[size_t(s)]->rank(tensor_rank).x(slot);
  };
  StepInput step = wave.step;
  const size_t n_seqs = step.kv_lengths.size();
  step.views = std::span(wave.views).subspan(size_t(rank) * n_seqs, n_seqs);
  if (wave.by_layer && tensor_rank == 0) {
    observers_[size_t(stage)].wave = &wave;
    step.observer = &observers_[size_t(stage)];
  }
  const double began = RealClock().now();
  stages_[size_t(stage)]
      ->rank(tensor_rank)
      .run(step, stage == 0 ? nullptr : x_of(stage - 1), x_of(stage), wave.by_layer, wave.logits);
  if (tensor_rank == 0) wave.seconds[size_t(stage)] += RealClock().now() - began;
  const bool tell_stage = wave.told && !wave.by_layer;
  // Rank r begins a wave only after its counterpart in the previous stage, so the count reaches (stage + 1) * tp with
  // the last rank of this stage.
  if (wave.ranks_done.fetch_add(1) + 1 < (stage + 1) * shards_.tp) return;
  if (stage + 1 < shards_.pp) {
    if (tell_stage) written(wave, shards_.layers(stage).end);
    return;
  }
  over_.store(number + 1, std::memory_order_release);
  news_.add(1);
}

}  // namespace xpyd::model
