// How a head and its stages find each other.
#include <sys/mman.h>

#include <bit>
#include <chrono>

#include "base/log.h"
#include "base/numbers.h"
#include "base/os.h"
#include "disagg/chunked_pp/remote_pipeline.h"
#include "disagg/transport/shared_memory.h"

namespace xpyd::disagg::ranks {
namespace {

// "stage1" -> 1; -1: no stage's name.
int stage_of(const std::string& id) {
  constexpr std::string_view kKind = "stage";
  int stage = -1;
  return id.starts_with(kKind) && read_number(std::string_view(id).substr(kKind.size()), stage) ? stage : -1;
}

// Addresses that nothing is behind.
Result<std::shared_ptr<std::byte>> reserved(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return Error{ErrorCode::unavailable, "mmap: " + os_text()};
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(at), [bytes](std::byte* begin) { munmap(begin, bytes); });
}

}  // namespace

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
  in_ = need(BoundaryIn::make(*options_.wire, int(places_), most_logits, options_.checksum));
  wire_ = need(options_.wire->make({.regions = {in_->region()},
                                    .queue = &cpu_queue(),
                                    .clock = &clock_,
                                    .self = shards_.pp,
                                    .host = options_.wire_host,
                                    .connections = 1}));
  const auto log = [](const std::string& text) { log_line(LogLevel::warning, "xpyd worker: %s", text.c_str()); };
  loop_ = std::make_unique<ControlLoop>(
      clock_, ChannelLimits{.silence_timeout_s = o.silence_s, .max_files = size_t(o.far ? 0 : shards_.tp)}, log);
  const std::string random = hex(random_secret()) + hex(random_secret());
  const std::string address = need(loop_->listen(
      {o.listen == "unix:@" ? o.listen + "xpyd-ranks-" + random : o.listen, o.key, identity_of("head", o.fingerprint)},
      [this](const ChannelPtr& channel) { return on_open(channel); }));
  if (o.start) processes_ = need(o.start(address, shards_.pp));
  if (!processes_) log_line(LogLevel::info, "xpyd worker: waits for %d stages at %s", shards_.pp, address.c_str());
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
                    .checksum = options_.checksum,
                    .far = o.far,
                    .instance = o.instance,
                    .wire = options_.wire->name};
  need(wait_for("joined", [](const StageEnd& stage) { return stage.channel != nullptr; }));
  for (StageEnd& stage : stages_) say_to(stage.channel, start);
  need(wait_for("loaded its part of the model", [](const StageEnd& stage) { return !stage.address.empty(); }));
  for (size_t s = 0; s < stages_.size(); ++s)
    say_to(stages_[s].channel, Peers{s > 0 ? stages_[s - 1].address : "",
                                     s + 1 < stages_.size() ? stages_[s + 1].address : wire_->address()});
  for (Naps naps; !need(wire_->connect(shards_.pp - 1, stages_.back().address)); naps.nap()) {
    if (std::lock_guard lock(mutex_); !failed_.empty()) return Error{ErrorCode::unavailable, failed_};
  }
  need(wait_for("connected", [](const StageEnd& stage) { return stage.connected; }));
  for (int place = 0; place < int(places_); ++place)
    own_windows_.push_back(need(in_->open(*wire_, shards_.pp - 1, place)));
  std::lock_guard lock(mutex_);
  serves_ = failed_.empty();
  return serves_ ? ok() : Error{ErrorCode::unavailable, failed_};
} catch (const Error& error) {
  return error;
}

template <class There>
Status RemotePipeline::wait_for(const char* what, There there) {
  constexpr double kSoon = 1;  // seconds, for the process of a stage that has failed to end: its exit says more
  double failed_s = 0;
  for (std::unique_lock lock(mutex_);;) {
    if (!failed_.empty() && failed_s == 0) failed_s = clock_.now();
    if (!failed_.empty() && (!processes_ || clock_.now() > failed_s + kSoon))
      return Error{ErrorCode::unavailable, failed_};
    const auto missing = std::find_if_not(stages_.begin(), stages_.end(), there);
    if (missing == stages_.end()) return ok();
    if (options_.given_up && options_.given_up()) return Error{ErrorCode::unavailable, "told to end"};
    if (processes_)
      if (Status run = processes_->run(); !run) {
        changed_.wait_for(lock, std::chrono::milliseconds(200), [&] { return !failed_.empty(); });  // it may say why
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
    return refuse("another model, other options or another version than the instance's head");
  std::lock_guard lock(mutex_);
  if (closing_) return refuse("the instance has ended");
  if (stages_[size_t(stage)].channel) return refuse("that stage is there");
  stages_[size_t(stage)].channel = channel;
  changed_.notify_all();
  const std::string name = "stage " + std::to_string(stage);
  return {[this, channel, stage](uint16_t type, std::string_view bytes) {
            if (Status status = on_frame(stage, type, bytes); !status)
              channel->close("refused: it said " + status.error().message);
          },
          [this, name](const std::string& why) { break_up(name + ": " + why); }};
}

Status RemotePipeline::on_ready(int stage, const Ready& ready) {
  std::lock_guard lock(mutex_);
  StageEnd& from = stages_[size_t(stage)];
  std::vector<Fd> files = from.channel->take_files();
  if (!from.address.empty() || ready.address.empty() || (!far() && files.size() != size_t(shards_.tp)))
    return invalid("it is ready without the files of its KV");
  for (int r = 0; r < shards_.tp; ++r) {
    const auto rank = size_t(stage * shards_.tp + r);
    Result<std::shared_ptr<std::byte>> memory = far()
                                                    ? reserved(kv_bytes_[rank])
                                                    : shared_pool_memory(std::move(files[size_t(r)]), kv_bytes_[rank]);
    if (!memory) return memory.error();
    kv_memory_[rank] = std::move(memory).value();
  }
  from.address = ready.address;
  weight_bytes_ += ready.weight_bytes;
  scratch_bytes_ += ready.scratch_bytes;
  changed_.notify_all();
  return ok();
}

}  // namespace xpyd::disagg::ranks
