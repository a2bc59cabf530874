#include "disagg/transport/rdma/rdma_serving.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace xpyd::disagg::rdma {

Serving::Serving(std::vector<Rail>& rails, std::vector<MemoryRange> regions)
    : rails_(rails), regions_(std::move(regions)), spare_(rails.size()), used_(rails.size()) {}

Serving::~Serving() {
  windows_.clear();  // keys go before the queue pairs that they are bound to
  guests_.clear();
}

void Serving::connect(PeerId peer) {
  std::lock_guard lock(mutex_);
  connected_.insert(peer);
}

void Serving::disconnect(PeerId peer) {
  std::lock_guard lock(mutex_);
  connected_.erase(peer);
  auto it = guests_.find(peer);
  if (it == guests_.end()) return;
  drop_queues(peer, it->second);
  it->second.channel->close("it was disconnected");
  guests_.erase(it);
}

Serving::Window* Serving::find(const WindowKey& key) {
  auto it = windows_.find(key.generation);
  return it != windows_.end() && it->second.key == key ? &it->second : nullptr;
}

Result<WindowKey> Serving::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  auto covered = cover(ranges, regions_);
  if (!covered) return covered.error();
  std::lock_guard lock(mutex_);
  if (!connected_.count(peer))
    return Error{ErrorCode::unavailable, "window for instance " + std::to_string(peer) + ": it is not connected"};
  if (last_generation_ == UINT32_MAX) return Error{ErrorCode::unavailable, "every generation of windows was used"};
  const uint32_t generation = ++last_generation_;
  if (free_indices_.empty()) free_indices_.push_back(n_indices_++);
  Window& window = windows_[generation];
  window.key = {free_indices_.front(), generation, 0};
  window.peer = peer;
  window.op = op;
  window.ranges = std::move(covered.value());
  auto guest = guests_.find(peer);
  if (guest != guests_.end()) {
    if (auto granted = grant(window, guest->second); !granted) {
      windows_.erase(generation);
      return granted.error();
    }
  }
  free_indices_.pop_front();
  return window.key;
}

bool Serving::close(const WindowKey& key) {
  std::lock_guard lock(mutex_);
  Window* window = find(key);
  if (!window) return true;
  poll();
  if (!revoke(*window)) return false;
  free_indices_.push_back(key.index);
  windows_.erase(key.generation);
  return true;
}

int Serving::arrived(const WindowKey& key) {
  std::lock_guard lock(mutex_);
  poll();
  const Window* window = find(key);
  return window ? window->arrived : 0;
}

int64_t Serving::refused() {
  std::lock_guard lock(mutex_);
  poll();
  return refused_;
}

Status Serving::make_queues_for(Guest& guest, const std::vector<RailEnd>& theirs) {
  auto made = make_queues(rails_, std::min(rails_.size(), theirs.size()), Role::serve);
  if (!made) return made.error();
  if (auto connected = connect_queues(rails_, made.value(), theirs); !connected) return connected.error();
  guest.queues = std::move(made.value());
  guest.in_flight.assign(guest.queues.size(), 0);
  return ok();
}

size_t Serving::join(PeerId peer, const ChannelPtr& channel, const Offer& offer) {
  std::lock_guard lock(mutex_);
  Offer answer;
  Guest& guest = guests_[peer];
  if (guest.channel) {
    drop_queues(peer, guest);
    guest.channel->close("it has called again");
  }
  guest.channel = channel;
  std::vector<RailEnd> theirs = offer.rails;
  if (theirs.size() > rails_.size()) theirs.resize(rails_.size());
  if (auto made = make_queues_for(guest, theirs); made)
    answer.rails = ends_of(guest.queues);
  else
    answer.refusal = made.error().message;
  // Under the lock: the peer expects this answer before the keys of any window.
  say(channel, answer);
  if (!answer.rails.empty()) grant_all(peer, guest);
  return answer.rails.size();
}

bool Serving::take(PeerId peer, const Message& message) {
  std::lock_guard lock(mutex_);
  auto it = guests_.find(peer);
  if (it == guests_.end()) return false;
  Guest& guest = it->second;
  switch (message.kind) {
    case Message::refused: ++refused_; [[fallthrough]];
    case Message::sync: say(guest.channel, Message{Message::synced, {}, message.number, {}}); return true;
    case Message::renew: {
      if (message.number == 1) ++refused_;
      drop_queues(peer, guest);
      Message answer{Message::renewed, {}, 0, {}};
      if (make_queues_for(guest, message.rails)) answer.rails = ends_of(guest.queues);
      say(guest.channel, answer);
      grant_all(peer, guest);
      return true;
    }
    default: return false;
  }
}

void Serving::left(PeerId peer, const Channel* channel) {
  std::lock_guard lock(mutex_);
  auto it = guests_.find(peer);
  if (it == guests_.end() || it->second.channel.get() != channel) return;
  drop_queues(peer, it->second);
  guests_.erase(it);
}

// ---- how keys are made and revoked

namespace {

// The low byte of a memory window's key changes with each use, and comes round after 255. Spare
// windows are used in turn, and not before there are this many: an old key could fit again only
// after 64 * 255 further ranges were opened for the same peer, all unheard by it.
constexpr size_t kSpare = 64;
// On hardware a few microseconds; with devices made of software others may have the processor.
constexpr double kBindSeconds = 2, kRevokeSeconds = 0.02;

uint64_t batch_id(const WindowKey& key, bool last) { return uint64_t(key.generation) << 1 | last; }

int access_of(KvOp op) { return op == KvOp::write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ; }

}  // namespace

Result<MemoryWindow> Serving::spare(size_t rail) {
  std::deque<MemoryWindow>& spare = spare_[rail];
  if (spare.size() >= kSpare) {
    MemoryWindow oldest = std::move(spare.front());
    spare.pop_front();
    return oldest;
  }
  MemoryWindow made(ibv_alloc_mw(rails_[rail].protection.get(), IBV_MW_TYPE_2));
  if (made) return made;
  return Error{ErrorCode::unavailable, rails_[rail].name + " has no more memory windows: " + std::strerror(errno)};
}

bool Serving::post(Guest& guest, size_t rail, std::vector<ibv_send_wr>& requests, Window& window) {
  for (size_t i = 0; i + 1 < requests.size(); ++i) requests[i].next = &requests[i + 1];
  requests.back().send_flags |= IBV_SEND_SIGNALED;
  requests.back().wr_id = batch_id(window.key, true);
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(guest.queues[rail].pair.get(), requests.data(), &bad) != 0) return false;
  guest.in_flight[rail] += int(requests.size());
  ++window.pending;
  return true;
}

Status Serving::grant_on(Window& window, Guest& guest, size_t rail) {
  const size_t n = window.ranges.size();
  std::vector<Grant>& grants = window.grants[rail];
  std::vector<ibv_send_wr> requests(n);
  for (size_t i = 0; i < n; ++i) {
    const AddressRange& range = window.ranges[i];
    Grant grant;
    if (!rails_[rail].memory_windows) {
      grant.registration.reset(ibv_reg_mr(rails_[rail].protection.get(), reinterpret_cast<void*>(range.begin),
                                          range.bytes, IBV_ACCESS_LOCAL_WRITE | access_of(window.op)));
      if (!grant.registration)
        return Error{ErrorCode::unavailable,
                     rails_[rail].name + " does not register a window: " + std::strerror(errno)};
    } else {
      auto made = spare(rail);
      if (!made) return made.error();
      grant.window = std::move(made.value());
      ibv_send_wr& bind = requests[i];
      bind.wr_id = batch_id(window.key, false);
      bind.opcode = IBV_WR_BIND_MW;
      bind.bind_mw.mw = grant.window.get();
      bind.bind_mw.rkey = ibv_inc_rkey(grant.window->rkey);
      const size_t region = region_of(regions_, reinterpret_cast<std::byte*>(range.begin), range.bytes);
      bind.bind_mw.bind_info = {rails_[rail].regions[region].get(), range.begin, range.bytes,
                                unsigned(access_of(window.op))};
    }
    grants.push_back(std::move(grant));
  }
  if (n == 0 || !rails_[rail].memory_windows) return ok();
  if (guest.in_flight[rail] + int(n) > rails_[rail].queue_depth) settle(window, kBindSeconds);
  if (guest.in_flight[rail] + int(n) > rails_[rail].queue_depth || !post(guest, rail, requests, window))
    window.failed = true;
  for (size_t i = 0; i < n; ++i) grants[i].window->rkey = requests[i].bind_mw.rkey;
  return ok();
}

// Afterwards the window has keys, or the link is broken and waits to be renewed. Error: keys have run out.
Status Serving::grant(Window& window, Guest& guest) {
  if (guest.queues.empty()) return ok();
  window.failed = false;
  window.pending = 0;
  window.grants.resize(guest.queues.size());
  Status granted = ok();
  for (size_t rail = 0; rail < guest.queues.size() && granted; ++rail) granted = grant_on(window, guest, rail);
  const bool settled = settle(window, kBindSeconds);
  if (!granted || !settled) window.grants.clear();
  if (!granted) return granted;
  if (!settled) {
    drop_queues(window.peer, guest);
    return ok();
  }
  Message message{Message::opened, {window.key.index, window.key.generation, window.op, window.ranges, {}}, 0, {}};
  for (size_t i = 0; i < window.ranges.size(); ++i)
    for (const auto& grants : window.grants)
      message.window.keys.push_back(grants[i].window ? grants[i].window->rkey : grants[i].registration->rkey);
  say(guest.channel, message);
  return ok();
}

void Serving::grant_all(PeerId peer, Guest& guest) {
  if (!connected_.count(peer)) return;
  for (auto& [generation, window] : windows_)
    if (window.peer == peer && !window.closing) (void)grant(window, guest).ok();
}

bool Serving::revoke(Window& window) {
  auto it = guests_.find(window.peer);
  if (window.grants.empty() || it == guests_.end()) return true;
  Guest& guest = it->second;
  if (!window.closing) {
    int n = int(window.ranges.size()), under_way = 0;
    for (size_t rail = 0; rail < window.grants.size(); ++rail) under_way = std::max(under_way, guest.in_flight[rail]);
    if (under_way + n > rails_[0].queue_depth) return false;
    say(guest.channel, Message{Message::closed, {window.key.index, window.key.generation, window.op, {}, {}}, 0, {}});
    window.closing = true;
    for (size_t rail = 0; rail < window.grants.size() && n > 0; ++rail) {
      if (!rails_[rail].memory_windows) continue;
      std::vector<ibv_send_wr> requests(window.ranges.size());
      for (size_t i = 0; i < requests.size(); ++i) {
        requests[i].wr_id = batch_id(window.key, false);
        requests[i].opcode = IBV_WR_LOCAL_INV;
        requests[i].invalidate_rkey = window.grants[rail][i].window->rkey;
      }
      if (!post(guest, rail, requests, window)) window.failed = true;
    }
  }
  if (!settle(window, kRevokeSeconds) && !window.failed) return false;
  if (window.failed) {  // as on a link that broke: its keys are removed altogether
    drop_queues(window.peer, guest);
    return true;
  }
  for (size_t rail = 0; rail < window.grants.size(); ++rail)
    for (Grant& grant : window.grants[rail])
      if (grant.window) spare_[rail].push_back(std::move(grant.window));
  window.grants.clear();
  return true;
}

// Until the window's requests are through; false: they are not, or one failed.
bool Serving::settle(Window& window, double seconds) {
  RealClock clock;
  const double until = clock.now() + seconds;
  poll();
  while (window.pending > 0 && !window.failed && clock.now() < until) poll();
  return window.pending == 0 && !window.failed;
}

// Keys first: a queue pair with memory windows on it is not given up by every driver.
void Serving::drop_queues(PeerId peer, Guest& guest) {
  poll();  // what has arrived through them has arrived
  for (auto& [generation, window] : windows_) {
    if (window.peer != peer) continue;
    window.grants.clear();
    window.pending = 0;
  }
  guest.queues.clear();
  guest.in_flight.clear();
}

void Serving::poll() {
  constexpr int kMost = 16;
  ibv_wc found[kMost];
  for (size_t rail = 0; rail < rails_.size(); ++rail) {
    int n;
    do {
      n = ibv_poll_cq(rails_[rail].serving.get(), kMost, found);
      for (int i = 0; i < n; ++i)  // receives carry no id
        found[i].wr_id == 0 ? arrived(rail, found[i]) : completed(rail, found[i]);
    } while (n == kMost);
  }
}

// The end of a post that somebody made to a window of ours.
void Serving::arrived(size_t rail, const ibv_wc& wc) {
  if (++used_[rail] == rails_[rail].receive_batch) {
    XPYD_CHECK(post_receives(rails_[rail], used_[rail]) == 0);
    used_[rail] = 0;
  }
  if (wc.status != IBV_WC_SUCCESS) return;
  auto it = windows_.find(ntohl(wc.imm_data));
  if (it != windows_.end() && !it->second.closing) {
    auto guest = guests_.find(it->second.peer);
    if (guest != guests_.end() && rail < guest->second.queues.size() &&
        guest->second.queues[rail].pair->qp_num == wc.qp_num) {
      ++it->second.arrived;
      return;
    }
  }
  ++refused_;
}

void Serving::completed(size_t rail, const ibv_wc& wc) {
  auto it = windows_.find(uint32_t(wc.wr_id >> 1));
  if (it == windows_.end()) return;  // its keys went with a link
  Window& window = it->second;
  if (wc.status != IBV_WC_SUCCESS) window.failed = true;
  if ((wc.wr_id & 1) == 0 || window.pending == 0) return;
  --window.pending;
  auto guest = guests_.find(window.peer);
  if (guest != guests_.end() && rail < guest->second.queues.size() &&
      guest->second.queues[rail].pair->qp_num == wc.qp_num)
    guest->second.in_flight[rail] -= int(window.ranges.size());
}

}  // namespace xpyd::disagg::rdma
