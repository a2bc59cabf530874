#include "disagg/transport/shm/shm_owner.h"

#include <algorithm>
#include <new>

#include "disagg/transport/shared_memory.h"

namespace xpyd::disagg::shm {
Owner::Owner(PeerId self)
    : bootstrap_("shm", self, transport_limits(64 * (kMaxRegions + 2))) {}

Result<std::unique_ptr<Owner>> Owner::make(const TransportOptions& options) try {
  auto owner = std::unique_ptr<Owner>(new Owner(options.self));
  if (options.regions.size() > kMaxRegions)
    return invalid("shm: " + std::to_string(options.regions.size()) + " regions; expected at most " +
                   std::to_string(kMaxRegions));
  for (size_t i = 0; i < options.regions.size(); ++i) {
    const SharedFile file = need(shared_file(options.regions[i]), "shm: ");
    owner->welcome_.files.push_back(file.name);
    owner->welcome_.regions.push_back({file.offset, options.regions[i].size()});
  }
  owner->memory_ = need(make_shared_file("xpyd-windows", sizeof(SharedTable), owner->table_file_), "shm: ");
  owner->welcome_.table = name_for_others(owner->table_file_.get());
  owner->table_ = new (owner->memory_.get()) SharedTable;
  owner->regions_ = RangeSet(options.regions);
  TransportOptions here = options;
  here.host = "127.0.0.1";
  need(owner->bootstrap_.listen(here, [o = owner.get()](const ChannelPtr& channel, PeerId) {
    return o->let_in(channel);
  }));
  return owner;
} catch (const Error& error) {
  return error;
}

Owner::~Owner() {
  bootstrap_.end();
  if (!table_) return;
  for (SharedSlot& slot : std::span(table_->slots, own_.size()))
    slot.state.fetch_and(~uint64_t(1), std::memory_order_seq_cst);
}

void Owner::disconnect(PeerId peer) {
  for (uint32_t i = 0; i < own_.size(); ++i) {
    SharedSlot& slot = table_->slots[i];
    if (own_[i].open && slot.peer.load(std::memory_order_relaxed) == peer)
      slot.state.store(uint64_t(own_[i].generation) << 1, std::memory_order_seq_cst);
  }
}

Result<RemoteKey> Owner::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges)
    if (!regions_.contains(range.data(), range.size()))
      return invalid("registration for instance " + std::to_string(peer) +
                     ": a range is outside this instance's KV memory");
  if (free_.empty()) {
    if (own_.size() == size_t(kSharedSlots))
      return Error{ErrorCode::unavailable, "shm: all " + std::to_string(kSharedSlots) + " registrations are in use"};
    free_.push_back(uint32_t(own_.size()));
    own_.push_back({});
  }
  const uint32_t index = free_.front();
  free_.pop_front();
  SharedSlot& slot = table_->slots[index];
  own_[index] = {own_[index].generation + 1, true};
  slot.peer.store(peer, std::memory_order_relaxed);
  slot.op.store(uint32_t(op), std::memory_order_relaxed);
  slot.arrived.store(0, std::memory_order_relaxed);
  slot.state.store(uint64_t(own_[index].generation) << 1 | 1, std::memory_order_seq_cst);
  return RemoteKey{index, own_[index].generation, 0};
}

bool Owner::close(const RemoteKey& registration) {
  if (!live(registration)) return true;
  table_->slots[registration.index].state.store(uint64_t(registration.generation) << 1, std::memory_order_seq_cst);
  const uint64_t announced = uint64_t(registration.index) << 32 | registration.generation;
  const int lines = n_lines_.load(std::memory_order_acquire);
  for (int i = 0; i < lines; ++i)
    for (const auto& inside : table_->lines[i].inside)
      if (inside.load(std::memory_order_seq_cst) == announced) return false;
  own_[registration.index].open = false;
  if (registration.generation != UINT32_MAX) free_.push_back(registration.index);
  return true;
}

int Owner::arrived(const RemoteKey& registration) const {
  return live(registration) ? int(table_->slots[registration.index].arrived.load(std::memory_order_acquire)) : 0;
}

ChannelEvents Owner::let_in(const ChannelPtr& channel) {
  const auto spare = std::find(used_.begin(), used_.end(), false);
  if (spare == used_.end()) {
    channel->close("there is no room for more peers");
    return {};
  }
  *spare = true;
  const int number = int(spare - used_.begin());
  // close() must see the hazard record before the peer can use it.
  if (number >= n_lines_) n_lines_.store(number + 1, std::memory_order_seq_cst);
  Welcome welcome = welcome_;
  welcome.line = number;
  say(channel, welcome);
  return {.on_closed = [this, number](const std::string&) {
    // The peer's last thread has ended, so it is inside nothing any more.
    for (auto& inside : table_->lines[number].inside) inside.store(0, std::memory_order_release);
    used_[size_t(number)] = false;
  }};
}

}  // namespace xpyd::disagg::shm
