#include "disagg/transport/shm_owner.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "disagg/transport/shared_memory.h"

namespace xpyd::shm {
namespace {

// Ranges of all open windows together: one for so many bytes of the pool, 0.8 % of it.
constexpr size_t kRangeBytes = 2048, kMinRanges = 128 << 10;
constexpr int kMaxStrangers = 64;     // connected, and have not said who they are
constexpr double kDeafSeconds = 0.1;  // when there are no descriptors for callers

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

Result<std::unique_ptr<Owner>> Owner::make(const TransportOptions& options) {
  auto owner = std::unique_ptr<Owner>(new Owner);
  if (options.regions.size() > kMaxRegions)
    return invalid("shm: " + std::to_string(options.regions.size()) + " regions, at most " +
                   std::to_string(kMaxRegions));
  owner->welcome_.n_regions = int32_t(options.regions.size());
  for (size_t i = 0; i < options.regions.size(); ++i) {
    auto file = shared_file(options.regions[i]);
    if (!file.ok()) return Error{file.error().code, "shm: " + file.error().message};
    owner->welcome_.regions[i] = {file.value().offset, options.regions[i].size()};
    owner->fds_.emplace_back(fcntl(file.value().fd, F_DUPFD_CLOEXEC, 0));
    if (owner->fds_.back().get() < 0) return Error{ErrorCode::unavailable, "shm: a file of KV memory: " + os_text()};
  }
  size_t pool_bytes = 0;
  for (const MemoryRange& region : options.regions) pool_bytes += region.size();
  const uint64_t n_ranges = std::clamp<uint64_t>(pool_bytes / kRangeBytes, kMinRanges, kMaxRanges);
  int table_fd = -1;
  auto memory = make_shared_file("xpyd-windows", SharedTable::bytes(n_ranges), table_fd);
  if (!memory.ok()) return Error{memory.error().code, "shm: " + memory.error().message};
  owner->fds_.emplace(owner->fds_.begin(), table_fd);
  owner->memory_ = memory.value();
  owner->table_ = new (owner->memory_.get()) SharedTable;
  owner->table_->n_ranges = owner->welcome_.n_ranges = n_ranges;
  owner->room_ = RangeRoom(uint32_t(n_ranges));
  owner->memories_ = options.regions;
  owner->regions_ = RangeSet(options.regions);
  owner->wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  owner->listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  char name[64];
  std::snprintf(name, sizeof name, "xpyd-%d-%016llx", int(getpid()), static_cast<unsigned long long>(random_secret()));
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (owner->wake_.get() < 0 || owner->listener_.get() < 0 ||
      bind(owner->listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(owner->listener_.get(), 128) != 0)
    return Error{ErrorCode::unavailable, "shm: a Unix socket: " + os_text()};
  owner->address_ = std::string("shm:@") + name;
  owner->thread_ = std::thread([o = owner.get()] { o->serve(); });
  return owner;
}

Owner::~Owner() {
  if (!thread_.joinable()) return;
  stop_ = true;
  eventfd_write(wake_.get(), 1);
  thread_.join();
  for (SharedSlot& slot : std::span(table_->slots, own_.size()))
    slot.state.fetch_and(~uint64_t(1), std::memory_order_seq_cst);
}

void Owner::watch(const std::shared_ptr<Watched>& remote) {
  {
    std::lock_guard lock(mutex_);
    watched_.push_back(remote);
  }
  eventfd_write(wake_.get(), 1);
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
  const std::vector<SharedRange> places = places_of(ranges);
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

std::vector<SharedRange> Owner::places_of(std::span<const MemoryRange> ranges) const {
  std::vector<SharedRange> places;
  for (const MemoryRange& range : ranges) {
    for (size_t i = 0; i < memories_.size(); ++i) {
      const std::byte* base = memories_[i].data();
      const std::byte* begin = std::max<const std::byte*>(range.data(), base);
      const std::byte* end = std::min<const std::byte*>(range.data() + range.size(), base + memories_[i].size());
      if (begin < end) places.push_back({shared_place(i, size_t(begin - base)), shared_place(i, size_t(end - base))});
    }
  }
  const auto before = [](const SharedRange& a, const SharedRange& b) { return a.begin < b.begin; };
  if (!std::is_sorted(places.begin(), places.end(), before)) std::sort(places.begin(), places.end(), before);
  size_t n = 0;
  for (const SharedRange& place : places) {
    if (n > 0 && place.begin <= places[n - 1].end)
      places[n - 1].end = std::max(places[n - 1].end, place.end);
    else
      places[n++] = place;
  }
  places.resize(n);
  return places;
}

void Owner::serve() {
  std::vector<pollfd> polled;
  std::vector<Line> lines;
  double deaf_until = 0;
  while (!stop_) {
    // A caller that cannot be let in stays: poll would return at once, again and again.
    const bool deaf = RealClock().now() < deaf_until;
    polled = {{wake_.get(), POLLIN, 0}, {deaf ? -1 : listener_.get(), POLLIN, 0}};
    for (const Line& line : lines) polled.push_back({line.socket.get(), POLLIN, 0});
    std::vector<std::shared_ptr<Watched>> watched;
    {
      std::lock_guard lock(mutex_);
      std::erase_if(watched_, [](const auto& r) { return r->gone || r.use_count() == 1; });
      watched = watched_;
    }
    for (const auto& remote : watched) polled.push_back({remote->socket.get(), POLLIN, 0});
    if (poll(polled.data(), polled.size(), deaf ? int(kDeafSeconds * 1e3) : 1000) < 0) continue;
    eventfd_t ignored;
    eventfd_read(wake_.get(), &ignored);
    for (size_t i = 0; i < watched.size(); ++i)
      if (polled[2 + lines.size() + i].revents && hung_up(watched[i]->socket.get())) watched[i]->gone = true;
    for (size_t i = lines.size(); i-- > 0;)
      if (polled[2 + i].revents && !hear(lines[i])) lines.erase(lines.begin() + ptrdiff_t(i));
    if (polled[1].revents && !greet(lines)) deaf_until = RealClock().now() + kDeafSeconds;
  }
}

bool Owner::greet(std::vector<Line>& lines) {
  while (true) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0) return errno != EMFILE && errno != ENFILE;
    const bool ours = same_user(socket.get());
    const auto stranger = [](const Line& line) { return line.number < 0; };
    const bool full = std::count_if(lines.begin(), lines.end(), stranger) >= kMaxStrangers;
    if (ours && full) lines.erase(std::find_if(lines.begin(), lines.end(), stranger));  // the oldest
    if (!ours || full) table_->refused.fetch_add(1, std::memory_order_relaxed);
    if (ours) lines.push_back({std::move(socket), -1});
  }
}

bool Owner::hear(Line& line) {
  if (line.number >= 0) {
    if (!hung_up(line.socket.get())) return true;
    // Its last thread has ended: what it was inside of is left.
    for (auto& inside : table_->lines[line.number].inside) inside.store(0, std::memory_order_release);
    used_[size_t(line.number)] = false;
    return false;
  }
  Hello hello;
  const ssize_t n = recv(line.socket.get(), &hello, sizeof hello, MSG_DONTWAIT | MSG_TRUNC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  const auto spare = std::find(used_.begin(), used_.end(), false);
  if (n != ssize_t(sizeof hello) || hello.magic != kHelloMagic || spare == used_.end()) {
    table_->refused.fetch_add(n != 0, std::memory_order_relaxed);
    return false;
  }
  const int number = int(spare - used_.begin());
  if (!welcome(line.socket.get(), number)) return false;
  *spare = true;
  line.number = number;
  return true;
}

bool Owner::welcome(int socket, int number) {
  Welcome welcome = welcome_;
  welcome.line = number;
  std::vector<int> fds;
  for (const Fd& fd : fds_) fds.push_back(fd.get());
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  iovec bytes{&welcome, sizeof welcome};
  msghdr message{};
  message.msg_iov = &bytes, message.msg_iovlen = 1;
  message.msg_control = control.data(), message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  // Its line must be seen by close() before it can be used.
  if (number >= n_lines_) n_lines_.store(number + 1, std::memory_order_seq_cst);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == ssize_t(sizeof welcome);
}

}  // namespace xpyd::shm
