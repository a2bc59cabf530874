#include "disagg/processes/worker.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/log.h"
#include "disagg/messages.h"
#include "disagg/processes/codec.h"

namespace xpyd::disagg {
namespace {

NodeRole node_role(Role role) {
  return role == Role::prefill ? NodeRole::prefill : role == Role::decode ? NodeRole::decode : NodeRole::colocated;
}

void log_refusal(const std::string& text) { log_line(LogLevel::warning, "xpyd worker: %s", text.c_str()); }

ChannelEvents turned_away(const ChannelPtr& channel, const std::string& why) {
  log_refusal("the channel from " + channel->peer().id + " is refused: " + why);
  channel->close(why);
  return {};
}

std::chrono::duration<double> seconds(double s) { return std::chrono::duration<double>(s); }

}  // namespace

Worker::Worker(WorkerOptions options, Clock& clock) : options_(std::move(options)), clock_(clock) {}

Worker::~Worker() = default;

std::string process_name(int64_t pid) { return "pid" + std::to_string(pid); }

// "i7.ab12" is instance 7 of conductor "conductor.ab12". The suffix is needed because the next conductor has an
// instance 7, too. Before the worker is an instance, its id is its process.
NodeIdentity Worker::identity(InstanceId id) const {
  return {node_role(options_.role), id < 0 ? process_name(getpid()) : "i" + std::to_string(id) + members_of_,
          options_.fingerprint, codec_schema()};
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

// Serves as one instance. Its channels end with it.
Result<Worker::Outcome> Worker::serve_once() {
  ControlLoop loop(clock_, {}, log_refusal);
  Result<Outcome> outcome = serve_with(loop);
  std::lock_guard lock(mutex_);
  conductor_.reset();
  peers_.clear();
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
  const auto on_call = [this, own = as.id, members = members_of_](ChannelPtr c) {
    return on_dialled(own, members, std::move(c));
  };
  Result<std::string> listening = loop.listen({options_.listen, options_.key, identity(as.id)}, on_call);
  if (!listening) return listening.error();
  Result<BuiltInstance> built = build(as);
  if (!built) return built.error();
  Instance& instance = *built.value().instance;
  InstanceInfo info = instance.info();
  info.control = listening.value();
  {
    std::lock_guard lock(mutex_);
    instance_ = &instance;
    for (Envelope& e : early_) instance.send(e.from, std::move(e.message));
    early_.clear();
  }
  log_line(LogLevel::info, "xpyd worker: %s (instance %d) serves, control %s", as.name.c_str(), as.id,
           info.control.c_str());
  send(as.id, kConductor, Joined{info});
  std::atomic<bool> stop{false};
  std::thread thread([&] { instance.run(stop); });
  const bool goes = tend(loop, as, instance, conductor.id);
  stop = true;
  instance.poke();
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
      {conductor.address, options_.key, identity(-1)}, patience_s,
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
    const std::string& id = conductor_->peer().id;
    members_of_ = id.substr(std::min(id.find('.'), id.size()));
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
  Result<JoinedPool> joined = join_pool(own, as);
  if (!joined) {
    std::lock_guard lock(mutex_);  // if the conductor is gone, so is the address of its pool
    return Error{lost_ ? ErrorCode::unavailable : ErrorCode::invalid_argument, joined.error().message};
  }
  if (joined.value().pool) {
    own.kv.n_memories = joined.value().n_instances;
    own.kv.keep_idle = false;  // other instances may need what an idle one would keep
  }
  if (own.ranks) {
    own.ranks->broken = [this](const std::string& why) { give_up(why); };
    own.ranks->given_up = [this] {
      std::lock_guard lock(mutex_);
      return stopped_ || lost_ || leaving_;
    };
  }
  Result<BuiltInstance> built = build_instance(own, as, 0, std::move(joined.value().pool), clock_, *this,
                                               std::exchange(left_, {}));
  if (built) return built;
  const bool again = own.ranks && built.error().code == ErrorCode::unavailable;  // a stage is gone
  return Error{again ? ErrorCode::unavailable : ErrorCode::invalid_argument, built.error().message};
}

// Keeps channels and leases while the instance serves, and asks to leave. Returns true if another conductor holds the
// name and the instance moves to it.
bool Worker::tend(ControlLoop& loop, const Welcome& as, Instance& instance, const std::string& conductor) {
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
    dial_missing(loop);
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
  peers_.clear();
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

// ---- Connections.

ChannelEvents Worker::on_conductor(ChannelPtr channel) {
  return {[this, channel](uint16_t type, std::string_view payload) {
            Result<Envelope> got = decode(type, payload, clock_.now(), {kToInstance, limits(options_.cluster)});
            if (got) return on_message(kConductor, std::move(got.value().message));
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

ChannelEvents Worker::on_peer(InstanceId id, ChannelPtr channel) {
  return {
      [this, id, channel](uint16_t type, std::string_view payload) {
        Result<Envelope> got = decode(type, payload, clock_.now(), {kBetweenInstances, limits(options_.cluster)});
        if (got) return on_message(id, std::move(got.value().message));
        log_refusal("instance " + std::to_string(id) + " is refused, because of its message: " + got.error().message);
        channel->close("message refused: " + got.error().message);
      },
      [this, id, channel](const std::string&) {
        std::lock_guard lock(mutex_);
        auto found = peers_.find(id);
        if (found == peers_.end() || found->second.channel != channel) return;
        if (found->second.info.id < 0) {
          peers_.erase(found);
          return;
        }
        found->second.channel.reset();
        found->second.broken = true;
        if (instance_) instance_->send(kConductor, PeerBroken{id});
        changed_.notify_all();
      }};
}

// Accepts a channel from a peer. Of two instances the later one dials. `peer` is negative if the id is not an
// instance's.
ChannelEvents Worker::on_dialled(InstanceId self, const std::string& members, ChannelPtr channel) {
  const std::string& id = channel->peer().id;
  if (!id.ends_with(members)) return turned_away(channel, "the peer belongs to another conductor");
  const char* const end = id.data() + id.size() - members.size();
  InstanceId peer = -1;
  if (id.starts_with('i') && std::from_chars(id.data() + 1, end, peer).ptr != end) peer = -1;
  if (peer <= self) return turned_away(channel, "an instance only accepts peers that joined after it");
  return attach(peer, std::move(channel));
}

void Worker::on_message(InstanceId from, Message message) {
  std::lock_guard lock(mutex_);
  if (from == kConductor) {
    if (auto* welcome = std::get_if<Welcome>(&message)) {
      welcome_ = std::move(*welcome);
      changed_.notify_all();
      return;
    }
    if (auto* retire = std::get_if<Retire>(&message)) {
      retire_ = *retire;
      changed_.notify_all();
      return;
    }
    if (auto* joined = std::get_if<PeerJoined>(&message)) {
      peers_[joined->info.id].info = joined->info;
      changed_.notify_all();
    } else if (auto* gone = std::get_if<PeerGone>(&message)) {
      auto found = peers_.find(gone->id);
      if (found != peers_.end()) {
        if (found->second.channel) found->second.channel->close("the conductor says that this instance is gone");
        peers_.erase(found);
      }
    }
  }
  if (instance_) {
    instance_->send(from, std::move(message));
  } else {
    early_.push_back({from, -1, std::move(message)});
  }
}

// A channel to a peer is open, dialled by either side. Waiting messages go first. If it is not the peer's first
// channel, the instance is told that the peer has joined again. Any member may claim any instance's number, so a peer
// with an open channel is never replaced. A peer whose channel broke tries again until this side has noticed.
ChannelEvents Worker::attach(InstanceId id, ChannelPtr channel) {
  constexpr int kMostUntold = 64;
  std::lock_guard lock(mutex_);
  if (!peers_.contains(id)) {  // it dials before the conductor has announced it
    const auto untold = [](const auto& peer) { return peer.second.info.id < 0; };
    if (std::ranges::count_if(peers_, untold) >= kMostUntold)
      return turned_away(channel, "there are too many peers that the conductor has not announced");
  }
  Peer& peer = peers_[id];
  if (peer.channel && peer.channel->is_open()) return turned_away(channel, "this instance already has a channel here");
  peer.channel = channel;
  for (const std::string& frame : peer.waiting)
    channel->send(uint16_t(uint8_t(frame[0]) | uint8_t(frame[1]) << 8), std::string_view(frame).substr(2));
  peer.waiting.clear();
  if (std::exchange(peer.broken, false) && instance_ && peer.info.id >= 0)
    instance_->send(kConductor, PeerJoined{peer.info});
  return on_peer(id, std::move(channel));
}

// Dials earlier instances without waiting, so a stopped peer delays neither other channels nor this instance's
// renewals.
void Worker::dial_missing(ControlLoop& loop) {
  constexpr double kPatience = 5;  // seconds, equal to the acceptor's handshake limit
  std::vector<std::pair<InstanceId, std::string>> missing;
  InstanceId self;
  {
    std::lock_guard lock(mutex_);
    self = welcome_->id;
    for (auto& [id, peer] : peers_)
      if (!peer.channel && !peer.dialling && id < self && !peer.info.control.empty() && clock_.now() >= peer.again_s) {
        peer.dialling = true;
        missing.push_back({id, peer.info.control});
      }
  }
  for (auto& [missing_id, address] : missing)
    loop.dial(
        {address, options_.key, identity(self)}, kPatience,
        [this, id = missing_id](ChannelPtr c) { return attach(id, std::move(c)); },
        [this, id = missing_id, where = address](const Result<ChannelPtr>& channel) {
          std::lock_guard lock(mutex_);
          auto found = peers_.find(id);
          if (found == peers_.end() || !instance_) return;  // not needed any more
          found->second.dialling = false;
          found->second.again_s = clock_.now() + options_.retry_s;
          if (!channel)
            log_line(LogLevel::warning, "xpyd worker: instance %d at %s: %s", id, where.c_str(),
                     channel.error().message.c_str());
        });
}

// Any thread. Without a channel the message waits, because one may be on its way.
void Worker::send(InstanceId from, InstanceId to, Message message) {
  constexpr size_t kMostWaiting = 4096;
  const uint16_t type = frame_type(message);
  const std::string payload = encode(from, to, message, clock_.now());
  std::lock_guard lock(mutex_);
  if (lost_) return;
  if (to == kConductor) {
    if (conductor_) conductor_->send(type, payload);
    return;
  }
  auto found = peers_.find(to);
  if (found == peers_.end()) return;  // the peer is gone
  Peer& peer = found->second;
  if (peer.channel) {
    peer.channel->send(type, payload);
  } else if (peer.waiting.size() < kMostWaiting) {
    std::string frame{char(type & 0xff), char(type >> 8)};
    peer.waiting.push_back(std::move(frame) + payload);
  }
}

}  // namespace xpyd::disagg
