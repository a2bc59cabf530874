#include "disagg/transport/shm_owner.h"

#include <fcntl.h>

#include <algorithm>
#include <new>

#include "disagg/transport/shared_memory.h"

namespace xpyd::disagg::shm {
namespace {

// Ranges of all open windows together: one for so many bytes of the pool, 0.8 % of it.
constexpr size_t kRangeBytes = 2048, kMinRanges = 128 << 10;
}  // namespace

std::optional<uint32_t> RangeRoom::take(uint32_t n) {
  if (n == 0) return 0;
  const auto at = std::find_if(spare_.begin(), spare_.end(), [n](const auto& room) { return room.second >= n; });
  if (at == spare_.end()) return std::nullopt;
  const auto [first, room] = *at;
  spare_.erase(at);
  if (room > n) spare_[first + n] = room - n;
  return first;
}

void RangeRoom::give(uint32_t first, uint32_t n) {
  if (n == 0) return;
  auto after = spare_.lower_bound(first);
  if (after != spare_.end() && first + n == after->first) {
    n += after->second;
    after = spare_.erase(after);
  }
  if (after != spare_.begin() && std::prev(after)->first + std::prev(after)->second == first)
    std::prev(after)->second += n;
  else
    spare_[first] = n;
}

Owner::Owner(PeerId self)
    : meeting_("shm", self, schema_of<Welcome>(), wire_limits(64 + 16 * kMaxRegions, kMaxRegions + 1)) {}

Result<std::unique_ptr<Owner>> Owner::make(const TransportOptions& options) try {
  auto owner = std::unique_ptr<Owner>(new Owner(options.self));
  if (options.regions.size() > kMaxRegions)
    return invalid("shm: " + std::to_string(options.regions.size()) + " regions, at most " +
                   std::to_string(kMaxRegions));
  for (size_t i = 0; i < options.regions.size(); ++i) {
    const SharedFile file = need(shared_file(options.regions[i]), "shm: ");
    owner->welcome_.regions.push_back({file.offset, options.regions[i].size()});
    owner->fds_.emplace_back(fcntl(file.fd, F_DUPFD_CLOEXEC, 0));
    if (owner->fds_.back().get() < 0) return Error{ErrorCode::unavailable, "shm: a file of KV memory: " + os_text()};
  }
  size_t pool_bytes = 0;
  for (const MemoryRange& region : options.regions) pool_bytes += region.size();
  const uint64_t n_ranges = std::clamp<uint64_t>(pool_bytes / kRangeBytes, kMinRanges, kMaxRanges);
  Fd table;
  owner->memory_ = need(make_shared_file("xpyd-windows", SharedTable::bytes(n_ranges), table), "shm: ");
  owner->fds_.insert(owner->fds_.begin(), std::move(table));
  owner->table_ = new (owner->memory_.get()) SharedTable;
  owner->table_->n_ranges = owner->welcome_.n_ranges = n_ranges;
  owner->room_ = RangeRoom(uint32_t(n_ranges));
  owner->memories_ = options.regions;
  owner->regions_ = RangeSet(options.regions);
  const auto let_in = [o = owner.get()](const ChannelPtr& channel, PeerId) { return o->let_in(channel); };
  need(owner->meeting_.listen_here(let_in));
  return owner;
} catch (const Error& error) {
  return error;
}

Owner::~Owner() {
  meeting_.end();
  if (!table_) return;
  for (SharedSlot& slot : std::span(table_->slots, own_.size()))
    slot.state.fetch_and(~uint64_t(1), std::memory_order_seq_cst);
}

void Owner::disconnect(PeerId peer) {
  std::erase(peers_, peer);
  for (uint32_t i = 0; i < own_.size(); ++i) {
    SharedSlot& slot = table_->slots[i];
    if (own_[i].open && slot.peer.load(std::memory_order_relaxed) == peer)
      slot.state.store(uint64_t(own_[i].generation) << 1, std::memory_order_seq_cst);
  }
}

Result<WindowKey> Owner::open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
  for (const MemoryRange& range : ranges)
    if (!regions_.contains(range.data(), range.size()))
      return invalid("window for instance " + std::to_string(peer) + ": a range is outside this instance's KV memory");
  if (std::find(peers_.begin(), peers_.end(), peer) == peers_.end())
    return Error{ErrorCode::unavailable, "window for instance " + std::to_string(peer) + ": it is not connected"};
  const std::vector<AddressRange> places = places_of(ranges);
  const auto room = room_.take(uint32_t(places.size()));
  if (!room)
    return Error{ErrorCode::unavailable,
                 "shm: the open windows have more than " + std::to_string(table_->n_ranges) + " ranges"};
  if (free_.empty()) {
    if (own_.size() == size_t(kSharedSlots)) {
      room_.give(*room, uint32_t(places.size()));
      return Error{ErrorCode::unavailable, "shm: all " + std::to_string(kSharedSlots) + " windows are open"};
    }
    free_.push_back(uint32_t(own_.size()));
    own_.push_back({});
  }
  const uint32_t index = free_.front();
  free_.pop_front();
  SharedSlot& slot = table_->slots[index];
  own_[index] = {own_[index].generation + 1, true, *room, uint32_t(places.size())};
  std::copy(places.begin(), places.end(), table_->ranges() + *room);
  slot.first_range.store(*room, std::memory_order_relaxed);
  slot.n_ranges.store(uint32_t(places.size()), std::memory_order_relaxed);
  slot.peer.store(peer, std::memory_order_relaxed);
  slot.op.store(uint32_t(op), std::memory_order_relaxed);
  slot.arrived.store(0, std::memory_order_relaxed);
  slot.state.store(uint64_t(own_[index].generation) << 1 | 1, std::memory_order_seq_cst);
  return WindowKey{index, own_[index].generation, 0};
}

bool Owner::close(const WindowKey& window) {
  if (!live(window)) return true;
  table_->slots[window.index].state.store(uint64_t(window.generation) << 1, std::memory_order_seq_cst);
  const uint64_t announced = uint64_t(window.index) << 32 | window.generation;
  const int lines = n_lines_.load(std::memory_order_acquire);
  for (int i = 0; i < lines; ++i)
    for (const auto& inside : table_->lines[i].inside)
      if (inside.load(std::memory_order_seq_cst) == announced) return false;
  own_[window.index].open = false;
  room_.give(own_[window.index].first_range, own_[window.index].n_ranges);
  if (window.generation != UINT32_MAX) free_.push_back(window.index);
  return true;
}

int Owner::arrived(const WindowKey& window) const {
  return live(window) ? int(table_->slots[window.index].arrived.load(std::memory_order_acquire)) : 0;
}

std::vector<AddressRange> Owner::places_of(std::span<const MemoryRange> ranges) const {
  std::vector<AddressRange> places;
  for (const MemoryRange& range : ranges) {
    for (size_t i = 0; i < memories_.size(); ++i) {
      const std::byte* base = memories_[i].data();
      const std::byte* begin = std::max<const std::byte*>(range.data(), base);
      const std::byte* end = std::min<const std::byte*>(range.data() + range.size(), base + memories_[i].size());
      if (begin < end) places.push_back({shared_place(i, size_t(begin - base)), size_t(end - begin)});
    }
  }
  return joined(std::move(places));
}

ChannelEvents Owner::let_in(const ChannelPtr& channel) {
  const auto spare = std::find(used_.begin(), used_.end(), false);
  if (spare == used_.end()) {
    table_->refused.fetch_add(1, std::memory_order_relaxed);
    channel->close("as many peers are here as there are lines");
    return {};
  }
  *spare = true;
  const int number = int(spare - used_.begin());
  // Its line must be seen by close() before it can be used.
  if (number >= n_lines_) n_lines_.store(number + 1, std::memory_order_seq_cst);
  Welcome welcome = welcome_;
  welcome.line = number;
  std::vector<int> files;
  for (const Fd& fd : fds_) files.push_back(fd.get());
  channel->send_files(kFirstFrameType, to_bytes(welcome), files);
  return {.on_closed = [this, number](const std::string&) {
    // Its last thread has ended: what it was inside of is left.
    for (auto& inside : table_->lines[number].inside) inside.store(0, std::memory_order_release);
    used_[size_t(number)] = false;
  }};
}

}  // namespace xpyd::disagg::shm
