#include "disagg/chunked_pp/remote_pipeline.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "model/llama/llama_rank.h"
#include "model/llama/llama_step.h"

namespace xpyd::disagg::ranks {

RemotePipeline::~RemotePipeline() {
  while (first_ != begun_) {
    if (wait()) end(nullptr);
  }
  closing_ = true;
  {
    std::lock_guard lock(mutex_);  // one may be joining
    for (StageEnd& stage : stages_)
      if (stage.channel) stage.channel->close("the instance has ended");
  }
  loop_.reset();
}

Work RemotePipeline::work(const StepInput& step) const { return sharded_work(options_.config, options_.dtype, step); }

RemotePipeline::KvAddress RemotePipeline::find(const std::byte* address) const {
  for (int rank = 0; rank < shards_.n_ranks(); ++rank) {
    const std::byte* begin = kv_memory_[size_t(rank)].get();
    if (address >= begin && address < begin + kv_bytes_[size_t(rank)])
      return {shards_.stage_of(rank), shards_.tensor_rank_of(rank), uint64_t(address - begin)};
  }
  XPYD_CHECK(false, "an address outside of the KV");
  return {};
}

// ---- The engine's thread.

void RemotePipeline::begin(const StepInput& step, std::span<const Draw>, float* logits) {
  check_step(step, config(), options_.step_tokens, options_.max_logits, 0, shards_.n_ranks());
  XPYD_CHECK(int(begun_ - first_) < window_);
  const size_t n_seqs = step.kv_lengths.size(), place = begun_ % places_;
  UnderWay& under_way = wave_of(begun_);
  under_way.watched = step.watched;
  under_way.layers = under_way.done = 0;
  under_way.seconds.assign(size_t(shards_.pp), 0.0);
  under_way.logits = logits;
  under_way.n_logits = step.logit_rows.size();
  Wave wave{.number = begun_,
            .by_layer = step.observer != nullptr,
            .contiguous = n_seqs > 0 && step.views[0].contiguous(),
            .result = {},
            .token_ids = {step.token_ids.begin(), step.token_ids.end()},
            .q_offsets = {step.q_offsets.begin(), step.q_offsets.end()},
            .kv_lengths = {step.kv_lengths.begin(), step.kv_lengths.end()},
            .logit_rows = {step.logit_rows.begin(), step.logit_rows.end()},
            .blocks = {}};
  // One table for all ranks: their memories are one pool.
  for (size_t s = 0; s < n_seqs; ++s) {
    const KvView& view = step.views[s];
    XPYD_CHECK(view.pool == kv_memory_[0].get());
    if (wave.contiguous) {
      wave.blocks.push_back(view.slot);
      continue;
    }
    const int n_blocks = (step.kv_lengths[s] + view.layout->block_tokens - 1) / view.layout->block_tokens;
    wave.blocks.insert(wave.blocks.end(), view.block_table, view.block_table + n_blocks);
  }
  ++begun_;
  said_.store(begun_, std::memory_order_release);
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    wave.result = stage + 1 < stages_.size() ? stages_[stage + 1].windows[place] : own_windows_[place];
    say_to(stages_[stage].channel, wave);  // to one that is gone: its channel says so
  }
}

// False: there is news that is not the oldest wave's end.
bool RemotePipeline::wait() {
  for (;;) {
    const uint32_t news = news_.value.load();
    if (ended()) return true;
    if (std::exchange(seen_, news) != news) return false;
    news_.sleep_until([news](uint32_t now) { return now != news; });
  }
}

void RemotePipeline::end(Chosen*) {
  XPYD_CHECK(ended());
  const int place = int(first_ % places_);
  const UnderWay& wave = wave_of(first_++);
  stage_seconds_ = wave.seconds;
  const size_t floats = wave.n_logits * size_t(config().vocab);
  if (floats == 0) return;
  const float* rows = nullptr;
  if (!is_broken()) {
    // A stage that was stopped in the middle of a piece keeps it open until it is given up.
    bool closed = false;
    for (Naps naps; !is_broken() && !(closed = in_->close(*wire_, place));) naps.nap();
    if (closed) rows = in_->rows(place, floats);
    if (closed && !rows) break_up("the logits of a wave are not what the last stage has sent");
  }
  if (!rows) {  // nobody hears what is made of them
    std::fill_n(wave.logits, floats, 0.0f);
    return;
  }
  std::memcpy(wave.logits, rows, floats * sizeof(float));
  Result<WindowKey> window = in_->open(*wire_, shards_.pp - 1, place);
  if (!window) return break_up(window.error().message);
  own_windows_[size_t(place)] = window.value();
}

// ---- The channels' thread.

Status RemotePipeline::on_frame(int stage, uint16_t type, std::string_view bytes) {
  try {
    if (type == kType<Ready>) return on_ready(stage, need(from_bytes<Ready>(bytes)));
    if (type == kType<Connected>) {
      const Connected connected = need(from_bytes<Connected>(bytes));
      if (connected.windows.size() != (stage > 0 ? places_ : 0)) return invalid("its windows are not all");
      std::lock_guard lock(mutex_);
      StageEnd& from = stages_[size_t(stage)];
      if (from.address.empty() || from.connected) return invalid("it has connected already");
      from.windows = connected.windows;
      from.connected = true;
      changed_.notify_all();
      return ok();
    }
    if (type == kType<Layers>) {
      const Layers told = need(from_bytes<Layers>(bytes));
      if (told.written > uint32_t(config().n_layers)) return invalid("more layers than there are");
      if (is_broken()) return ok();
      if (!is_under_way(stage, told.wave)) return invalid("layers of a wave that is not under way there");
      std::atomic<int>& layers = wave_of(told.wave).layers;
      if (int(told.written) > layers) layers = int(told.written);
      news_.add(1);
      return ok();
    }
    if (type == kType<Met> || type == kType<Posted>) {
      std::lock_guard lock(mutex_);
      return kv_listener_ ? kv_listener_(stage, type, bytes) : ok();
    }
    if (type == kType<Done>) return on_done(stage, need(from_bytes<Done>(bytes)));
    return invalid("a message of kind " + std::to_string(type));
  } catch (const Error& error) {
    return error;
  }
}

// Stages end waves in order.
bool RemotePipeline::is_under_way(int stage, uint32_t wave) const {
  const StageEnd& from = stages_[size_t(stage)];
  return from.connected && wave == from.next_done && int32_t(said_.load(std::memory_order_acquire) - wave) > 0;
}

Status RemotePipeline::on_done(int stage, const Done& done) {
  if (is_broken()) return ok();  // waves end by themselves then
  if (!is_under_way(stage, done.wave)) return invalid("the end of a wave that is not under way there");
  ++stages_[size_t(stage)].next_done;
  UnderWay& wave = wave_of(done.wave);
  if (stage > 0) stages_[size_t(stage)].windows[done.wave % places_] = done.next;
  wave.seconds[size_t(stage)] = done.seconds;
  const int layers = shards_.layers(stage).end;
  if (layers > wave.layers) wave.layers = layers;
  if (wave.done.fetch_add(1) + 1 == shards_.pp || wave.watched) news_.add(1);
  return ok();
}

void RemotePipeline::break_up(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (closing_ || !failed_.empty()) return;
    failed_ = why;
    changed_.notify_all();
    if (!serves_) return;
  }
  options_.broken(why);  // before anybody sees how waves end
  broken_.store(true, std::memory_order_release);
  news_.add(1);
}

}  // namespace xpyd::disagg::ranks
