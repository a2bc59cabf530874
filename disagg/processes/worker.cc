#include "disagg/processes/worker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "base/log.h"
#include "base/numbers.h"
#include "base/siphash.h"
#include "disagg/messages.h"
#include "disagg/processes/codec.h"

namespace xpyd::disagg {
namespace {

void log_refusal(const std::string& text) { log_line(LogLevel::warning, "xpyd worker: %s", text.c_str()); }

std::chrono::duration<double> seconds(double s) { return std::chrono::duration<double>(s); }

}  // namespace

Worker::Worker(WorkerOptions options, Clock& clock) : options_(std::move(options)), clock_(clock) {}

Worker::~Worker() = default;

std::string process_name(int64_t pid) {
  std::string where;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> where;
  std::error_code none;
  where += std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
  return "pid" + std::to_string(pid) + "@" + hex(siphash({}, where));
}

void Worker::leave() {
  std::lock_guard lock(mutex_);
  leaving_ = true;
  changed_.notify_all();
}

void Worker::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void Worker::give_up(const std::string& why) {
  log_line(LogLevel::warning, "xpyd worker: the instance ends: %s", why.c_str());
  std::lock_guard lock(mutex_);
  lost_ = true;
  if (conductor_) conductor_->close(why);
  changed_.notify_all();
}

Status Worker::run() {
  double alone_since = clock_.now();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (stopped_ || (leaving_ && !conductor_)) return ok();
    }
    Result<Outcome> outcome = serve_once();
    if (outcome && outcome.value() == Outcome::done) return ok();
    if (!outcome && outcome.error().code != ErrorCode::unavailable) return outcome.error();
    if (outcome) alone_since = clock_.now();
    if (options_.give_up_s > 0 && clock_.now() > alone_since + options_.give_up_s)
      return outcome ? Error{ErrorCode::unavailable, "the conductor is gone"} : outcome.error();
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, seconds(options_.retry_s), [&] { return stopped_ || leaving_; });
  }
}

// Serves as one instance. Its channel ends with it.
Result<Worker::Outcome> Worker::serve_once() {
  ControlLoop loop(clock_, {}, log_refusal);
  Result<Outcome> outcome = serve_with(loop);
  std::lock_guard lock(mutex_);
  conductor_.reset();
  return outcome;
}

Result<Worker::Outcome> Worker::serve_with(ControlLoop& loop) {
  {
    std::lock_guard lock(mutex_);
    lost_ = leave_said_ = false;
    welcome_.reset();
    retire_.reset();
    early_.clear();
  }
  const NamedConductor conductor = options_.find_conductor ? options_.find_conductor()
                                                           : NamedConductor{.address = options_.join};
  Result<std::optional<Welcome>> welcome = join(loop, conductor);
  if (!welcome) return welcome.error();
  if (!welcome.value()) return Outcome::done;
  const Welcome as = std::move(*welcome.value());
  Result<BuiltInstance> built = build(as);
  if (!built) return built.error();
  Instance& instance = *built.value().instance;
  {
    std::lock_guard lock(mutex_);
    instance_ = &instance;
    for (Envelope& e : early_) instance.send(e.from, std::move(e.message));
    early_.clear();
  }
  log_line(LogLevel::info, "xpyd worker: %s (instance %d) serves", as.name.c_str(), as.id);
  send(as.id, kConductor, Joined{instance.info()});
  std::atomic<bool> stop{false};
  std::promise<void> ended;
  std::thread thread([&] {
    instance.run(stop);
    ended.set_value();
  });
  const bool goes = tend(as, instance, conductor.id);
  stop = true;
  instance.poke();
  if (ended.get_future().wait_for(seconds(options_.hung_s)) != std::future_status::ready) {
    log_line(LogLevel::error, "xpyd worker: a turn has taken %g s and does not end: the process ends", options_.hung_s);
    options_.hung();
  }
  thread.join();
  const Outcome outcome = end(goes);
  instance.shut_down(FinishReason::abort, "the worker ended");
  // (Without leases, copies to an offload tier still get a second.)
  if (outcome == Outcome::again) leave_memory(std::move(built).value(), std::max(as.lease_s, 1.0));
  return outcome;
}

// Connects to the conductor and joins as an instance. Returns nothing if stop() has been called.
Result<std::optional<Welcome>> Worker::join(ControlLoop& loop, const NamedConductor& conductor) {
  if (conductor.address.empty()) return Error{ErrorCode::unavailable, "the registry has no conductor"};
  const auto is_another = [&](const ChannelPtr& c) { return options_.find_conductor && c->peer().id != conductor.id; };
  // The registry names a dead conductor for a while, so a call that is not answered ends early.
  const double patience_s = options_.find_conductor ? 2 : 5;
  Result<ChannelPtr> channel = loop.connect(
      {conductor.address, options_.key, {process_name(getpid()), options_.fingerprint}}, patience_s,
      [&](ChannelPtr c) { return is_another(c) ? ChannelEvents{} : on_conductor(std::move(c)); });
  if (!channel) {
    // A wrong address on the command line stays wrong. The registry may give another one later.
    const bool wrong = channel.error().code == ErrorCode::invalid_argument;
    return Error{wrong && !options_.find_conductor ? ErrorCode::invalid_argument : ErrorCode::unavailable,
                 channel.error().message};
  }
  if (is_another(channel.value())) {  // a standby conductor at the address of the one that holds the name
    channel.value()->close("the registry names another conductor");
    return Error{ErrorCode::unavailable,
                 "the conductor at " + conductor.address + " is not the one that the registry names"};
  }
  {
    std::lock_guard lock(mutex_);
    conductor_ = channel.value();
  }
  send(-1, kConductor, JoinRequest{options_.role});
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, seconds(10), [&] { return welcome_ || lost_ || stopped_; });
  if (stopped_) return std::optional<Welcome>();
  if (!welcome_) return Error{ErrorCode::unavailable, "the conductor did not answer"};
  return welcome_;
}

// Makes the instance, with the memory that the one before has left.
Result<BuiltInstance> Worker::build(const Welcome& as) {
  ClusterOptions own = options_.cluster;
  if (own.ranks) {
    own.ranks->broken = [this](const std::string& why) { give_up(why); };
    own.ranks->given_up = [this] {
      std::lock_guard lock(mutex_);
      return stopped_ || lost_ || leaving_;
    };
  }
  Result<BuiltInstance> built = build_instance(own, as, 0, nullptr, clock_, *this, std::exchange(left_, {}));
  if (built) return built;
  const bool again = own.ranks && built.error().code == ErrorCode::unavailable;  // a stage is gone
  return Error{again ? ErrorCode::unavailable : ErrorCode::invalid_argument, built.error().message};
}

// Keeps leases while the instance serves, and asks to leave. Returns true if another conductor holds the
// name and the instance moves to it.
bool Worker::tend(const Welcome& as, Instance& instance, const std::string& conductor) {
  // If another conductor holds the name, the instance takes nothing new and has kFinishSeconds for what it has begun.
  constexpr double kFinishSeconds = 30;
  double replaced_s = kNever;  // Clock: another conductor has held the name since then
  bool goes = false;
  std::unique_lock lock(mutex_);
  while (!stopped_ && !lost_ && !retire_) {
    if ((leaving_ || goes) && !leave_said_) {
      leave_said_ = true;
      lock.unlock();
      send(as.id, kConductor, LeaveRequest{});
      lock.lock();
      continue;
    }
    lock.unlock();
    instance.renew_leases();
    const std::string holder = options_.find_conductor ? options_.find_conductor().id : "";
    replaced_s = holder.empty() || holder == conductor ? kNever : std::min(replaced_s, clock_.now());
    if (replaced_s < kNever && !std::exchange(goes, true))
      log_line(LogLevel::warning, "xpyd worker: the registry names another conductor; this instance joins that one");
    lock.lock();
    if (clock_.now() >= replaced_s + kFinishSeconds) lost_ = true;
    if (goes && !leave_said_) continue;
    changed_.wait_for(lock, seconds(as.lease_s > 0 ? std::min(options_.retry_s, as.lease_s / 8) : options_.retry_s));
  }
  return goes;
}

// Decides what follows the end of the instance's thread. `goes` is the result of tend().
Worker::Outcome Worker::end(bool goes) {
  std::lock_guard lock(mutex_);
  instance_ = nullptr;
  conductor_.reset();  // later messages are dropped
  Outcome outcome = Outcome::again;
  if (stopped_ || (retire_ && !retire_->rejoin && (leaving_ || !goes))) outcome = Outcome::done;
  if (retire_ && retire_->rejoin) options_.role = retire_->role;
  if (leaving_ && !retire_ && lost_) outcome = Outcome::done;
  return outcome;
}

// Waits until peers have left the KV and copies are over. The next instance then inherits the memory.
void Worker::leave_memory(BuiltInstance built, double patience_s) {
  InstanceMemory& own = built.memory;
  const auto in_use = [&] {
    const KvStats kv = own.memory->stats();
    return kv.active + kv.in_transfer > 0 || own.memory->copying();
  };
  const auto stopped = [&] {
    std::lock_guard lock(mutex_);
    return stopped_;
  };
  for (const double until = clock_.now() + patience_s; own.pool && in_use(); built.instance->turn()) {
    if (clock_.now() >= until || stopped()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  built.instance.reset();
  if (own.pool) left_ = std::move(own);
}

ChannelEvents Worker::on_conductor(ChannelPtr channel) {
  return {[this, channel](uint16_t type, std::string_view payload) {
            Result<Envelope> got = decode(type, payload, clock_.now());
            if (got) return on_message(std::move(got).value());
            log_refusal("the conductor is refused, because of its message: " + got.error().message);
            channel->close("message refused: " + got.error().message);
          },
          [this, channel](const std::string& why) {
            std::lock_guard lock(mutex_);
            if (conductor_ && conductor_ != channel) return;
            log_line(LogLevel::warning, "xpyd worker: the conductor's channel closed: %s", why.c_str());
            lost_ = true;
            changed_.notify_all();
          }};
}

void Worker::on_message(Envelope envelope) {
  std::lock_guard lock(mutex_);
  Message& message = envelope.message;
  if (auto* welcome = std::get_if<Welcome>(&message)) {
    welcome_ = std::move(*welcome);
    changed_.notify_all();
  } else if (auto* retire = std::get_if<Retire>(&message)) {
    retire_ = *retire;
    changed_.notify_all();
  } else if (instance_) {
    instance_->send(envelope.from, std::move(message));
  } else {
    early_.push_back(std::move(envelope));
  }
}

void Worker::send(InstanceId from, InstanceId to, Message message) {
  const uint16_t type = frame_type(message);
  const std::string payload = encode(from, to, message, clock_.now());
  std::lock_guard lock(mutex_);
  if (conductor_ && !lost_) conductor_->send(type, payload);
}

}  // namespace xpyd::disagg
