#include "disagg/transport/rdma_serving.h"

namespace xpyd::rdma {

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
  it->second.channel->end();
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

size_t Serving::join(const std::shared_ptr<SideChannel>& channel, const Hello& hello) {
  std::lock_guard lock(mutex_);
  Hello answer;
  Guest& guest = guests_[hello.from];
  if (guest.channel) {
    drop_queues(hello.from, guest);
    guest.channel->end();
  }
  guest.channel = channel;
  std::vector<RailEnd> theirs = hello.rails;
  if (theirs.size() > rails_.size()) theirs.resize(rails_.size());
  if (auto made = make_queues_for(guest, theirs); made)
    answer.rails = ends_of(guest.queues);
  else
    answer.refusal = made.error().message;
  // Under the lock: the peer expects this answer before the keys of any window.
  channel->send(frame(answer));
  if (!answer.rails.empty()) grant_all(hello.from, guest);
  return answer.rails.size();
}

bool Serving::take(PeerId peer, const Message& message) {
  std::lock_guard lock(mutex_);
  auto it = guests_.find(peer);
  if (it == guests_.end()) return false;
  Guest& guest = it->second;
  switch (message.kind) {
    case Message::refused: ++refused_; [[fallthrough]];
    case Message::sync: guest.channel->send(frame(Message{Message::synced, {}, message.number, {}})); return true;
    case Message::renew: {
      if (message.number == 1) ++refused_;
      drop_queues(peer, guest);
      Message answer{Message::renewed, {}, 0, {}};
      if (make_queues_for(guest, message.rails)) answer.rails = ends_of(guest.queues);
      guest.channel->send(frame(answer));
      grant_all(peer, guest);
      return true;
    }
    default: return false;
  }
}

void Serving::left(PeerId peer, const SideChannel* channel) {
  std::lock_guard lock(mutex_);
  auto it = guests_.find(peer);
  if (it == guests_.end() || it->second.channel.get() != channel) return;
  drop_queues(peer, it->second);
  guests_.erase(it);
}

}  // namespace xpyd::rdma
