#include "disagg/transport/rdma/rdma_serving.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace xpyd::disagg::rdma {

Serving::Serving(std::vector<NicPort>& nic_ports, std::vector<MemoryRange> regions)
    : nic_ports_(nic_ports), regions_(std::move(regions)), used_(nic_ports.size()) {}

Serving::~Serving() {
  registrations_.clear();  // keys are destroyed before the queue pairs that they are bound to
  clients_.clear();
}

void Serving::connect(PeerId peer) {
  std::lock_guard lock(mutex_);
  connected_.insert(peer);
}

void Serving::disconnect(PeerId peer) {
  std::lock_guard lock(mutex_);
  connected_.erase(peer);
  auto it = clients_.find(peer);
  if (it == clients_.end()) return;
  drop_queues(peer, it->second);
  it->second.channel->close("it was disconnected");
  clients_.erase(it);
}

Serving::Registration* Serving::find(const RemoteKey& key) {
  auto it = registrations_.find(key.generation);
  return it != registrations_.end() && it->second.key == key ? &it->second : nullptr;
}

Result<RemoteKey> Serving::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  auto covered = cover(ranges, regions_);
  if (!covered) return covered.error();
  std::lock_guard lock(mutex_);
  if (!connected_.count(peer))
    return Error{ErrorCode::unavailable,
                 "registration for instance " + std::to_string(peer) + ": this instance is not connected"};
  if (last_generation_ == UINT32_MAX)
    return Error{ErrorCode::unavailable, "all generations of registrations are used up"};
  const uint32_t generation = ++last_generation_;
  if (free_indices_.empty()) free_indices_.push_back(n_indices_++);
  Registration& registration = registrations_[generation];
  registration.key = {free_indices_.front(), generation, 0};
  registration.peer = peer;
  registration.op = op;
  registration.ranges = std::move(covered.value());
  auto client = clients_.find(peer);
  if (client != clients_.end()) {
    if (auto granted = grant(registration, client->second); !granted) {
      registrations_.erase(generation);
      return granted.error();
    }
  }
  free_indices_.pop_front();
  return registration.key;
}

bool Serving::close(const RemoteKey& key) {
  std::lock_guard lock(mutex_);
  Registration* registration = find(key);
  if (!registration) return true;
  poll();
  if (!revoke(*registration)) return false;
  free_indices_.push_back(key.index);
  registrations_.erase(key.generation);
  return true;
}

int Serving::arrived(const RemoteKey& key) {
  std::lock_guard lock(mutex_);
  poll();
  const Registration* registration = find(key);
  return registration ? registration->arrived : 0;
}

Status Serving::make_queues_for(Client& client, const std::vector<NicPortEnd>& theirs) {
  auto made = make_queues(nic_ports_, std::min(nic_ports_.size(), theirs.size()), Role::serve);
  if (!made) return made.error();
  if (auto connected = connect_queues(nic_ports_, made.value(), theirs); !connected) return connected.error();
  client.queues = std::move(made.value());
  client.in_flight.assign(client.queues.size(), 0);
  client.spare = std::vector<std::deque<MemoryWindow>>(client.queues.size());
  return ok();
}

size_t Serving::join(PeerId peer, const ChannelPtr& channel, const Offer& offer) {
  std::lock_guard lock(mutex_);
  Offer answer;
  Client& client = clients_[peer];
  if (client.channel) {
    drop_queues(peer, client);
    client.channel->close("the peer has connected again");
  }
  client.channel = channel;
  std::vector<NicPortEnd> theirs = offer.nic_ports;
  if (theirs.size() > nic_ports_.size()) theirs.resize(nic_ports_.size());
  if (auto made = make_queues_for(client, theirs); made)
    answer.nic_ports = ends_of(client.queues);
  else
    answer.refusal = made.error().message;
  // Sent under the lock, because the peer expects this answer before any keys.
  say(channel, answer);
  if (!answer.nic_ports.empty()) grant_all(peer, client);
  return answer.nic_ports.size();
}

bool Serving::take(PeerId peer, const Message& message) {
  std::lock_guard lock(mutex_);
  auto it = clients_.find(peer);
  if (it == clients_.end()) return false;
  Client& client = it->second;
  switch (message.kind) {
    case Message::refused:
    case Message::sync: say(client.channel, Message{Message::synced, {}, message.number, {}}); return true;
    case Message::renew: {
      drop_queues(peer, client);
      Message answer{Message::renewed, {}, 0, {}};
      if (make_queues_for(client, message.nic_ports)) answer.nic_ports = ends_of(client.queues);
      say(client.channel, answer);
      grant_all(peer, client);
      return true;
    }
    default: return false;
  }
}

void Serving::left(PeerId peer, const Channel* channel) {
  std::lock_guard lock(mutex_);
  auto it = clients_.find(peer);
  if (it == clients_.end() || it->second.channel.get() != channel) return;
  drop_queues(peer, it->second);
  clients_.erase(it);
}

// ---- keys are made and revoked

namespace {

// The low byte of a memory window's key changes with each use, and repeats after 255 uses. Spare memory windows are
// used oldest first, and only from this number on. An old key could therefore fit again only after 64 * 255 further
// ranges were opened for the same peer, without the peer hearing of any.
constexpr size_t kSpare = 64;
// A NIC needs a few microseconds. Software devices may wait for the processor.
constexpr double kBindSeconds = 2;       // for a batch of requests to complete
constexpr double kRevokeSeconds = 0.02;  // that the first call of close() waits

uint64_t batch_id(const RemoteKey& key, bool last) { return uint64_t(key.generation) << 1 | last; }

int access_of(KvOp op) { return op == KvOp::write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ; }

}  // namespace

Result<MemoryWindow> Serving::spare(Client& client, size_t nic_port) {
  std::deque<MemoryWindow>& spare = client.spare[nic_port];
  if (spare.size() >= kSpare) {
    MemoryWindow oldest = std::move(spare.front());
    spare.pop_front();
    return oldest;
  }
  MemoryWindow made(ibv_alloc_mw(nic_ports_[nic_port].protection.get(), IBV_MW_TYPE_2));
  if (made) return made;
  return Error{ErrorCode::unavailable,
               nic_ports_[nic_port].name + " cannot bind more memory windows: " + std::strerror(errno)};
}

bool Serving::post(Client& client, size_t nic_port, std::vector<ibv_send_wr>& requests, Registration& registration) {
  for (size_t i = 0; i + 1 < requests.size(); ++i) requests[i].next = &requests[i + 1];
  requests.back().send_flags |= IBV_SEND_SIGNALED;
  requests.back().wr_id = batch_id(registration.key, true);
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(client.queues[nic_port].pair.get(), requests.data(), &bad) != 0) return false;
  client.in_flight[nic_port] += int(requests.size());
  ++registration.pending;
  return true;
}

Status Serving::grant_on(Registration& registration, Client& client, size_t nic_port) {
  const size_t n = registration.ranges.size();
  std::vector<MemoryWindow>& windows = registration.windows[nic_port];
  std::vector<ibv_send_wr> requests(n);
  for (size_t i = 0; i < n; ++i) {
    const AddressRange& range = registration.ranges[i];
    auto made = spare(client, nic_port);
    if (!made) return made.error();
    windows.push_back(std::move(made.value()));
    ibv_send_wr& bind = requests[i];
    bind.wr_id = batch_id(registration.key, false);
    bind.opcode = IBV_WR_BIND_MW;
    bind.bind_mw.mw = windows.back().get();
    bind.bind_mw.rkey = ibv_inc_rkey(windows.back()->rkey);
    const size_t region = region_of(regions_, reinterpret_cast<std::byte*>(range.begin), range.bytes);
    bind.bind_mw.bind_info = {nic_ports_[nic_port].regions[region].get(), range.begin, range.bytes,
                              unsigned(access_of(registration.op))};
  }
  if (n == 0) return ok();
  if (client.in_flight[nic_port] + int(n) > nic_ports_[nic_port].queue_depth) settle(registration, kBindSeconds);
  if (client.in_flight[nic_port] + int(n) > nic_ports_[nic_port].queue_depth ||
      !post(client, nic_port, requests, registration))
    registration.failed = true;
  for (size_t i = 0; i < n; ++i) windows[i]->rkey = requests[i].bind_mw.rkey;
  return ok();
}

// Afterwards the registration has keys, or the link is broken. Error: keys cannot be made.
Status Serving::grant(Registration& registration, Client& client) {
  if (client.queues.empty()) return ok();
  registration.failed = false;
  registration.pending = 0;
  registration.windows.resize(client.queues.size());
  Status granted = ok();
  for (size_t nic_port = 0; nic_port < client.queues.size() && granted; ++nic_port)
    granted = grant_on(registration, client, nic_port);
  const bool settled = settle(registration, kBindSeconds);
  if (!granted || !settled) registration.windows.clear();
  if (!granted) return granted;
  if (!settled) {
    break_link(registration.peer, client);
    return ok();
  }
  Message message{Message::opened,
                  {registration.key.index, registration.key.generation, registration.op, registration.ranges, {}},
                  0,
                  {}};
  for (size_t i = 0; i < registration.ranges.size(); ++i)
    for (const auto& windows : registration.windows) message.registration.keys.push_back(windows[i]->rkey);
  say(client.channel, message);
  return ok();
}

void Serving::grant_all(PeerId peer, Client& client) {
  if (!connected_.count(peer)) return;
  for (auto& [generation, registration] : registrations_)
    if (registration.peer == peer && !registration.closing) (void)grant(registration, client).ok();
}

bool Serving::revoke(Registration& registration) {
  auto it = clients_.find(registration.peer);
  if (registration.windows.empty() || it == clients_.end()) return true;
  Client& client = it->second;
  const double now = RealClock().now();
  if (registration.until_s == 0) registration.until_s = now + kBindSeconds;
  if (!registration.closing) {
    const int n = int(registration.ranges.size());
    for (size_t nic_port = 0; nic_port < registration.windows.size(); ++nic_port) {
      if (client.in_flight[nic_port] + n <= nic_ports_[nic_port].queue_depth) continue;
      if (now < registration.until_s) return false;
      break_link(registration.peer, client);
      return true;
    }
    say(client.channel,
        Message{
            Message::closed, {registration.key.index, registration.key.generation, registration.op, {}, {}}, 0, {}});
    registration.closing = true;
    for (size_t nic_port = 0; nic_port < registration.windows.size() && n > 0; ++nic_port) {
      std::vector<ibv_send_wr> requests(registration.ranges.size());
      for (size_t i = 0; i < requests.size(); ++i) {
        requests[i].wr_id = batch_id(registration.key, false);
        requests[i].opcode = IBV_WR_LOCAL_INV;
        requests[i].invalidate_rkey = registration.windows[nic_port][i]->rkey;
      }
      if (!post(client, nic_port, requests, registration)) registration.failed = true;
    }
    settle(registration, kRevokeSeconds);
  }
  if (registration.failed || (registration.pending > 0 && now >= registration.until_s)) {
    break_link(registration.peer, client);  // destroying the queue pairs removes the keys
    return true;
  }
  if (registration.pending > 0) return false;
  for (size_t nic_port = 0; nic_port < registration.windows.size(); ++nic_port)
    for (MemoryWindow& window : registration.windows[nic_port]) client.spare[nic_port].push_back(std::move(window));
  registration.windows.clear();
  return true;
}

// Polls until the registration's batches have completed. Returns false after `seconds`, or if a request failed.
bool Serving::settle(Registration& registration, double seconds) {
  RealClock clock;
  const double until = clock.now() + seconds;
  poll();
  while (registration.pending > 0 && !registration.failed && clock.now() < until) poll();
  return registration.pending == 0 && !registration.failed;
}

// Destroys the memory windows first, because some drivers do not destroy a queue pair that windows are bound to.
void Serving::drop_queues(PeerId peer, Client& client) {
  poll();  // counts the arrivals so far
  for (auto& [generation, registration] : registrations_) {
    if (registration.peer != peer) continue;
    registration.windows.clear();
    registration.pending = 0;
  }
  client.spare.clear();
  client.queues.clear();
  client.in_flight.clear();
}

void Serving::break_link(PeerId peer, Client& client) {
  drop_queues(peer, client);
  client.channel->close("the card does not answer");
}

void Serving::poll() {
  constexpr int kMost = 16;
  ibv_wc found[kMost];
  for (size_t nic_port = 0; nic_port < nic_ports_.size(); ++nic_port) {
    int n;
    do {
      n = ibv_poll_cq(nic_ports_[nic_port].serving.get(), kMost, found);
      for (int i = 0; i < n; ++i)  // receives carry no id
        found[i].wr_id == 0 ? arrived(nic_port, found[i]) : completed(nic_port, found[i]);
    } while (n == kMost);
  }
}

// Counts the end of a peer's transfer into or out of a registration.
void Serving::arrived(size_t nic_port, const ibv_wc& wc) {
  if (++used_[nic_port] == nic_ports_[nic_port].receive_batch) {
    XPYD_CHECK(post_receives(nic_ports_[nic_port], used_[nic_port]) == 0);
    used_[nic_port] = 0;
  }
  if (wc.status != IBV_WC_SUCCESS) return;
  auto it = registrations_.find(ntohl(wc.imm_data));
  if (it != registrations_.end() && !it->second.closing) {
    auto client = clients_.find(it->second.peer);
    if (client != clients_.end() && nic_port < client->second.queues.size() &&
        client->second.queues[nic_port].pair->qp_num == wc.qp_num) {
      ++it->second.arrived;
      return;
    }
  }
}

void Serving::completed(size_t nic_port, const ibv_wc& wc) {
  auto it = registrations_.find(uint32_t(wc.wr_id >> 1));
  if (it == registrations_.end()) return;  // it closed when its link broke
  Registration& registration = it->second;
  if (wc.status != IBV_WC_SUCCESS) registration.failed = true;
  if ((wc.wr_id & 1) == 0 || registration.pending == 0) return;
  --registration.pending;
  auto client = clients_.find(registration.peer);
  if (client != clients_.end() && nic_port < client->second.queues.size() &&
      client->second.queues[nic_port].pair->qp_num == wc.qp_num)
    client->second.in_flight[nic_port] -= int(registration.ranges.size());
}

}  // namespace xpyd::disagg::rdma
