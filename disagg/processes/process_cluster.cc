#include "disagg/processes/process_cluster.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/log.h"
#include "base/numbers.h"
#include "disagg/instance/cluster.h"
#include "disagg/messages.h"

namespace xpyd::disagg {

// Holds the last report of a worker.
class ProcessCluster::Probe final : public InstanceProbe {
 public:
  Probe(const InstanceInfo& info, double now) {
    stats_.heartbeat_s = now;
    stats_.name = info.name;
    stats_.kv.capacity = stats_.kv.free = info.capacity_blocks;
    stats_.kv.block_tokens = info.block_tokens;
  }
  void heard(InstanceStats stats) {
    std::lock_guard lock(mutex_);
    stats_ = std::move(stats);
    ++version_;
  }
  InstanceStats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  // The worker's cache is in another process, so the conductor relies on CacheReports.
  std::optional<int> matched_tokens(std::span<const int32_t>, uint64_t) const override { return {}; }
  const std::atomic<uint64_t>* version() const override { return &version_; }

 private:
  mutable std::mutex mutex_;
  InstanceStats stats_;
  std::atomic<uint64_t> version_{1};
};

ProcessCluster::ProcessCluster(ProcessClusterOptions options, Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      id_("conductor." + hex(random_secret())),
      takes_workers_(!options_.stands_by),
      conductor_(options_.conductor, clock, *this) {}

Result<std::unique_ptr<ProcessCluster>> ProcessCluster::create(ProcessClusterOptions options, Clock& clock) {
  auto cluster = std::unique_ptr<ProcessCluster>(new ProcessCluster(std::move(options), clock));
  ProcessCluster& c = *cluster;
  c.loop_ = std::make_unique<ControlLoop>(clock, ChannelLimits{}, [](const std::string& text) {
    log_line(LogLevel::warning, "xpyd: a peer was refused: %s", text.c_str());
  });
  const NodeIdentity self{c.id_, c.options_.fingerprint};
  Result<std::string> address = c.loop_->listen({c.options_.listen, c.options_.key, self},
                                                [&c](ChannelPtr ch) { return c.on_open(ch); });
  if (!address) return address.error();
  c.address_ = address.value();
  c.keeper_ = std::thread([&c] { c.keep(); });
  return cluster;
}

ProcessCluster::~ProcessCluster() { stop(); }

void ProcessCluster::stop() {
  drain();
  conductor_.end_all("the server was stopped");
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    stop_ = true;
    changed_.notify_all();
  }
  if (keeper_.joinable()) keeper_.join();  // it does not run if listening has failed
  loop_.reset();                           // closes every channel, so workers lose their conductor
}

// A new channel is a new instance, whatever its process was before.
ChannelEvents ProcessCluster::on_open(ChannelPtr channel) {
  const NodeIdentity& peer = channel->peer();
  if (peer.fingerprint != options_.fingerprint) {
    log_line(LogLevel::warning,
             "xpyd: a worker was refused, because its version, model, dtype or layout differs from the conductor's");
    channel->close("the version, model, dtype or layout differs from the conductor's");
    return {};
  }
  if (!takes_workers_) {
    channel->close("this conductor stands by; another conductor serves");
    return {};
  }
  const InstanceId id = conductor_.new_id();
  {
    std::lock_guard lock(mutex_);
    workers_[id].channel = channel;
  }
  return {[this, id, channel](uint16_t type, std::string_view payload) {
            if (const InstanceId to = receiver_of(payload); to != kConductor) {
              if (const ChannelPtr other = channel_of(to)) other->send(type, with_sender(payload, id));
              return;
            }
            Result<Envelope> got = decode(type, payload, clock_.now());
            if (got) return on_message(id, std::move(got.value().message));
            log_line(LogLevel::warning, "xpyd: instance %d is refused, because of its message: %s", id,
                     got.error().message.c_str());
            channel->close("message refused: " + got.error().message);  // first: the end of a channel has one reason
            conductor_.left(id, "the instance was refused");
          },
          [this, id](const std::string& why) { on_closed(id, why); }};
}

void ProcessCluster::on_message(InstanceId id, Message message) {
  if (auto* request = std::get_if<JoinRequest>(&message)) {
    Welcome welcome{.id = id,
                    .role = request->role,
                    .lease_s = options_.conductor.lease_s,
                    .report_cache = true,
                    .local = options_.conductor.disagg->stays != nullptr,
                    .order = options_.conductor.remote_order()};
    {
      std::lock_guard lock(mutex_);
      Worker& worker = workers_.at(id);
      if (!worker.name.empty()) return;
      worker.role = request->role;
      worker.name = welcome.name = free_name(request->role);
    }
    return send(kConductor, id, std::move(welcome));
  }
  if (auto* joined = std::get_if<Joined>(&message)) {
    InstanceInfo info = std::move(joined->info);
    if (info.block_tokens < 1 || info.capacity_blocks < 1 || info.max_batch < 1) {
      std::unique_lock lock(mutex_);
      const ChannelPtr channel = workers_.at(id).channel;
      lock.unlock();
      return channel->close("the KV pool of the instance has no room for a sequence");
    }
    auto probe = std::make_shared<Probe>(info, clock_.now());
    {
      std::lock_guard lock(mutex_);
      Worker& worker = workers_.at(id);
      if (worker.name.empty() || worker.joined) return;
      worker.joined = true;
      info.id = id;  // the worker's own claim is ignored
      info.name = worker.name;
      info.role = worker.role;
      worker.probe = probe;
    }
    conductor_.joined(std::move(info), std::move(probe));
    std::lock_guard lock(mutex_);
    changed_.notify_all();
    return;
  }
  if (std::holds_alternative<LeaveRequest>(message)) {
    conductor_.drain(id, true);
    std::lock_guard lock(mutex_);
    workers_.at(id).retiring = true;
    return;
  }
  if (auto* report = std::get_if<Report>(&message)) {
    std::lock_guard lock(mutex_);
    Worker& worker = workers_.at(id);
    InstanceStats stats = *report->stats;
    stats.name = worker.name;  // the worker's own claim is ignored
    if (worker.probe) worker.probe->heard(std::move(stats));
  }
  conductor_.receive(id, std::move(message));
}

void ProcessCluster::on_closed(InstanceId id, const std::string& why) {
  bool joined;
  {
    std::lock_guard lock(mutex_);
    auto found = workers_.find(id);
    joined = found->second.joined;
    if (joined && !found->second.retiring && !stop_)
      log_line(LogLevel::warning, "xpyd: %s (instance %d) is gone: %s", found->second.name.c_str(), id, why.c_str());
    workers_.erase(found);
    changed_.notify_all();
  }
  if (joined) conductor_.left(id, why);
}

ChannelPtr ProcessCluster::channel_of(InstanceId id) const {
  std::lock_guard lock(mutex_);
  const auto found = workers_.find(id);
  return found == workers_.end() ? nullptr : found->second.channel;
}

std::string ProcessCluster::process_of(const std::string& name) const {
  std::lock_guard lock(mutex_);
  for (const auto& [id, worker] : workers_)
    if (worker.name == name) return worker.channel->peer().id;
  return "";
}

void ProcessCluster::send(InstanceId from, InstanceId to, Message message) {
  if (const ChannelPtr channel = channel_of(to))
    channel->send(frame_type(message), encode(from, to, message, clock_.now()));
}

// Returns the lowest free number. A restarted worker thus gets its predecessor's name, and metrics keep their series.
std::string ProcessCluster::free_name(Role role) const {
  for (int i = 0;; ++i) {
    const std::string name = instance_name(role, i);
    if (std::none_of(workers_.begin(), workers_.end(), [&](const auto& entry) { return entry.second.name == name; }))
      return name;
  }
}

// The channel or the conductor's lease detects a silent instance, whichever is first. The other then follows.
void ProcessCluster::keep() {
  const double lease = options_.conductor.lease_s;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, std::chrono::duration<double>(lease > 0 ? lease / 8 : 0.1));
    const std::map<InstanceId, Worker> workers = workers_;
    lock.unlock();
    conductor_.tick();
    const std::vector<InstanceInfo> members = conductor_.members();
    for (const auto& [id, worker] : workers) {
      if (worker.retiring && conductor_.idle(id)) {
        const Message retire = Retire{worker.next_role.has_value(), worker.next_role.value_or(Role::colocated)};
        worker.channel->send(frame_type(retire), encode(kConductor, 0, retire, clock_.now()));
      }
      if (worker.joined && std::ranges::find(members, id, &InstanceInfo::id) == members.end())
        worker.channel->close("the worker stopped responding");
    }
    lock.lock();
  }
}

Status ProcessCluster::retire(const std::string& name, std::optional<Role> role) {
  InstanceId id = -1;
  {
    std::lock_guard lock(mutex_);
    for (auto& [i, worker] : workers_)
      if (worker.name == name && worker.joined) id = i;
    if (id < 0) return Error{ErrorCode::not_found, "there is no instance with the name " + name};
    workers_.at(id).retiring = true;
    workers_.at(id).next_role = role;
  }
  conductor_.drain(id, true);
  return ok();
}

void ProcessCluster::clear_prefix_caches() {
  for (const InstanceInfo& info : conductor_.members()) send(kConductor, info.id, ClearPrefixCache{});
}

bool ProcessCluster::wait_members(int n, double seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return std::count_if(workers_.begin(), workers_.end(), [](const auto& w) { return w.second.joined; }) >= n;
  });
}

}  // namespace xpyd::disagg
