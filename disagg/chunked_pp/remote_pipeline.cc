#include "disagg/chunked_pp/remote_pipeline.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/log.h"
#include "base/numbers.h"
#include "base/os.h"
#include "disagg/transport/shared_memory.h"
#include "model/llama/llama_rank.h"
#include "model/llama/llama_step.h"

namespace xpyd::disagg::ranks {
namespace {

// "stage1" gives 1; an id that is no stage's gives -1.
int stage_of(const std::string& id) {
  constexpr std::string_view kKind = "stage";
  int stage = -1;
  return id.starts_with(kKind) && read_number(std::string_view(id).substr(kKind.size()), stage) ? stage : -1;
}

// Reserves addresses without memory behind them.
Result<std::shared_ptr<std::byte>> reserved(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return Error{ErrorCode::unavailable, "mmap: " + os_text()};
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [bytes](std::byte* begin) { munmap(begin, bytes); });
}

}  // namespace

// ---- The head and its stages find each other.

RemotePipeline::RemotePipeline(HeadOptions options, const PoolPlan& plan, Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      shards_(plan.shards),
      window_(options_.window > 0 ? options_.window : 2 * plan.shards.pp),
      places_(std::bit_ceil(uint32_t(window_))),
      waves_(places_),
      kv_memory_(size_t(plan.shards.n_ranks())),
      stages_(size_t(plan.shards.pp)) {
  for (UnderWay& wave : waves_) wave.seconds.resize(size_t(shards_.pp));
}

Result<std::unique_ptr<RemotePipeline>> RemotePipeline::make(HeadOptions options, const PoolPlan& plan, Clock& clock) {
  std::unique_ptr<RemotePipeline> made(new RemotePipeline(std::move(options), plan, clock));
  if (Status status = made->set_up(plan); !status) return status.error();
  return made;
}

Status RemotePipeline::set_up(const PoolPlan& plan) try {
  const HeadOptions& o = options_;
  for (int rank = 0; rank < shards_.n_ranks(); ++rank) {
    KvLayout layout = plan.whole;
    layout.shape = rank_shape(layout.shape, shards_, rank);
    kv_bytes_.push_back(layout.pool_bytes());
  }
  const size_t most_logits = size_t(options_.max_logits) * size_t(o.config.vocab);
  in_ = need(BoundaryIn::make(*options_.transport, int(places_), most_logits));
  transport_ = need(options_.transport->make({.regions = {in_->region()},
                                              .queue = &cpu_queue(),
                                              .clock = &clock_,
                                              .self = shards_.pp,
                                              .host = options_.transport_host,
                                              .connections = 1}));
  const auto log = [](const std::string& text) { log_line(LogLevel::warning, "xpyd worker: %s", text.c_str()); };
  loop_ = std::make_unique<ControlLoop>(clock_, ChannelLimits{.silence_timeout_s = o.silence_s}, log);
  const std::string random = hex(random_secret()) + hex(random_secret());
  const std::string address = need(loop_->listen(
      {o.listen == "unix:@" ? o.listen + "xpyd-ranks-" + random : o.listen, o.key, {"head", o.fingerprint}},
      [this](const ChannelPtr& channel) { return on_open(channel); }));
  if (o.start) processes_ = need(o.start(address, shards_.pp));
  if (!processes_)
    log_line(LogLevel::info, "xpyd worker: waiting for %d stages to join at %s", shards_.pp, address.c_str());
  const Start start{.tp = shards_.tp,
                    .pp = shards_.pp,
                    .places = int32_t(places_),
                    .step_tokens = options_.step_tokens,
                    .max_logits = options_.max_logits,
                    .dtype = uint8_t(o.dtype),
                    .kv_dtype = uint8_t(plan.whole.shape.dtype),
                    .kv_order = uint8_t(plan.whole.order),
                    .block_tokens = plan.whole.block_tokens,
                    .n_blocks = plan.whole.n_blocks,
                    .far = o.far,
                    .instance = o.instance,
                    .transport = options_.transport->name};
  need(wait_for("joined", [](const StageEnd& stage) { return stage.channel != nullptr; }));
  for (StageEnd& stage : stages_) say_to(stage.channel, start);
  need(wait_for("loaded its part of the model", [](const StageEnd& stage) { return !stage.address.empty(); }));
  for (size_t s = 0; s < stages_.size(); ++s)
    say_to(stages_[s].channel, Peers{s > 0 ? stages_[s - 1].address : "",
                                     s + 1 < stages_.size() ? stages_[s + 1].address : transport_->address()});
  for (Naps naps; !need(transport_->connect(shards_.pp - 1, stages_.back().address)); naps.nap()) {
    if (std::lock_guard lock(mutex_); !failed_.empty()) return Error{ErrorCode::unavailable, failed_};
  }
  need(wait_for("connected", [](const StageEnd& stage) { return stage.connected.has_value(); }));
  registrations_ = need(in_->open(*transport_, shards_.pp - 1));
  std::lock_guard lock(mutex_);
  serves_ = failed_.empty();
  return serves_ ? ok() : Error{ErrorCode::unavailable, failed_};
} catch (const Error& error) {
  return error;
}

template <class There>
Status RemotePipeline::wait_for(const char* what, There there) {
  // Seconds for a failed stage's process to end, because its exit tells more. The stage gives up after one.
  constexpr double kSoon = 3;
  double failed_s = 0;
  for (std::unique_lock lock(mutex_);;) {
    if (!failed_.empty() && failed_s == 0) failed_s = clock_.now();
    if (!failed_.empty() && (!processes_ || clock_.now() > failed_s + kSoon))
      return Error{ErrorCode::unavailable, failed_};
    const auto missing = std::find_if_not(stages_.begin(), stages_.end(), there);
    if (missing == stages_.end()) return ok();
    if (options_.given_up && options_.given_up()) return Error{ErrorCode::unavailable, "the worker was told to end"};
    if (processes_)
      if (Status run = processes_->run(); !run) {
        changed_.wait_for(lock, std::chrono::milliseconds(200), [&] { return !failed_.empty(); });  // for its reason
        return Error{run.error().code, (failed_.empty() ? run.error().message : failed_) + ", before it had " + what};
      }
    changed_.wait_for(lock, std::chrono::milliseconds(20));
  }
}

ChannelEvents RemotePipeline::on_open(const ChannelPtr& channel) {
  const auto refuse = [&channel](const std::string& why) {
    log_line(LogLevel::warning, "xpyd worker: %s is refused: %s", channel->peer().id.c_str(), why.c_str());
    channel->close(why);
    return ChannelEvents();
  };
  const int stage = stage_of(channel->peer().id);
  if (stage < 0 || stage >= shards_.pp)
    return refuse("expected --rank 0 to " + std::to_string(shards_.pp - 1) + " of this instance");
  if (channel->peer().fingerprint != options_.fingerprint)
    return refuse("its model, options or version differ from those of the instance");
  std::lock_guard lock(mutex_);
  if (closing_) return refuse("the instance has ended");
  if (stages_[size_t(stage)].channel) return refuse("this stage has joined already");
  stages_[size_t(stage)].channel = channel;
  changed_.notify_all();
  const std::string name = "stage " + std::to_string(stage);
  return {[this, channel, stage](uint16_t type, std::string_view bytes) {
            if (Status status = on_frame(stage, type, bytes); !status)
              channel->close("message refused: " + status.error().message);
          },
          [this, name](const std::string& why) { break_up(name + ": " + why); }};
}

Status RemotePipeline::on_ready(int stage, const Ready& ready) {
  std::lock_guard lock(mutex_);
  StageEnd& from = stages_[size_t(stage)];
  if (!from.address.empty() || ready.address.empty() || (!far() && ready.files.size() != size_t(shards_.tp)))
    return invalid("the ready message came twice, without an address, or without the files of its KV");
  for (int r = 0; r < shards_.tp; ++r) {
    const auto rank = size_t(stage * shards_.tp + r);
    Result<std::shared_ptr<std::byte>> memory = far() ? reserved(kv_bytes_[rank])
                                                      : shared_pool_memory(ready.files[size_t(r)], kv_bytes_[rank]);
    if (!memory) return memory.error();
    kv_memory_[rank] = std::move(memory).value();
  }
  from.address = ready.address;
  changed_.notify_all();
  return ok();
}

RemotePipeline::~RemotePipeline() {
  while (first_ != begun_) {
    if (wait()) end(nullptr);
  }
  closing_ = true;
  {
    std::lock_guard lock(mutex_);  // a stage may be joining
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
  // All ranks have the same block table, because their memories are one pool.
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
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    const bool last = stage + 1 == stages_.size();
    wave.result = last ? registrations_[place] : stages_[stage + 1].connected->registrations[place];
    say_to(stages_[stage].channel, wave);  // if the stage is gone, its channel's on_closed breaks the instance
  }
}

// Returns false for news other than the end of the oldest wave.
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
  if (is_broken())  // `broken` keeps other instances from the results
    std::fill_n(wave.logits, floats, 0.0f);
  else
    std::memcpy(wave.logits, in_->take(place), floats * sizeof(float));
}

// ---- The channels' thread.

Status RemotePipeline::on_frame(int stage, uint16_t type, std::string_view bytes) try {
  if (type == kType<Ready>) return on_ready(stage, need(from_bytes<Ready>(bytes)));
  if (type == kType<Connected>) {
    Connected connected = need(from_bytes<Connected>(bytes));
    if (connected.registrations.size() != (stage > 0 ? places_ : 0))
      return invalid("registrations: expected one for each of " + std::to_string(places_) + " places");
    std::lock_guard lock(mutex_);
    stages_[size_t(stage)].connected = std::move(connected);
    changed_.notify_all();
    return ok();
  }
  if (type == kType<Outcome> && far()) {
    kv_news_.send({stage, need(from_bytes<Outcome>(bytes))});
    return ok();
  }
  if (type != kType<Progress>) return invalid("unexpected message of kind " + std::to_string(type));
  on_progress(stage, need(from_bytes<Progress>(bytes)));
  return ok();
} catch (const Error& error) {
  return error;
}

void RemotePipeline::on_progress(int stage, const Progress& made) {
  if (is_broken()) return;  // all waves count as ended then
  UnderWay& wave = wave_of(made.wave);
  if (int(made.layers) > wave.layers) wave.layers = int(made.layers);
  if (made.done) {
    wave.seconds[size_t(stage)] = made.seconds;
    std::lock_guard lock(mutex_);
    stages_[size_t(stage)].experts = made.experts;
    if (wave.done.fetch_add(1) + 1 < shards_.pp && !wave.watched) return;  // no news
  }
  news_.add(1);
}

ExpertLoad RemotePipeline::expert_load() const {
  std::lock_guard lock(mutex_);
  ExpertLoad sum;
  for (const StageEnd& stage : stages_) sum.add(stage.experts);
  return sum;
}

void RemotePipeline::break_up(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (closing_ || !failed_.empty()) return;
    failed_ = why;
    changed_.notify_all();
    if (!serves_) return;
  }
  options_.broken(why);  // before the engine sees that waves have ended
  broken_.store(true, std::memory_order_release);
  news_.add(1);
}

}  // namespace xpyd::disagg::ranks
