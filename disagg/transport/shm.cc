// shm: the peers are processes of one machine and one user. A pool is a memfd that the peer maps;
// posting is copying, with non-temporal stores, straight into the other's pool (or out of it).
//
// Who copies: a post of up to kInline bytes the poster itself, in post(), because waking a thread
// costs more; larger ones a thread of the wire, while the poster computes the next layer. A piece
// of a large one is kPiece bytes; before each the window is asked again (shm_table.h).
//
// The pool's descriptor crosses over a Unix socket of an abstract, random name, between processes
// of one user (SO_PEERCRED). The socket stays open: the kernel closes it when the last thread of
// the peer has ended, and that is the proof that it writes no more. Until then what a stopped peer
// is inside of stays in quarantine, disconnect() or not.

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>

#include "disagg/transport/shared_memory.h"
#include "disagg/transport/shm_table.h"
#include "disagg/transport/window_table.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

constexpr size_t kInline = 64 << 10;
constexpr size_t kPiece = 128 << 10;
constexpr size_t kMaxRegions = 64;
constexpr int kMaxStrangers = 64;  // connected, and have not said who they are
constexpr int kConnectSeconds = 5;
constexpr uint64_t kHelloMagic = 0x3130'6f6c'6c65'6878;  // "xhello01"

struct Hello {
  uint64_t magic = kHelloMagic;
  PeerId self = -1;
};
// With the descriptors of the table and of the regions.
struct Welcome {
  uint64_t magic = kHelloMagic;
  int32_t line = 0, n_regions = 0;
  struct {
    uint64_t offset, bytes;
  } regions[kMaxRegions] = {};
};

std::string os_text() { return std::strerror(errno); }

// A file descriptor with one owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

bool same_user(int socket) {
  ucred user{};
  socklen_t length = sizeof user;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &length) == 0 && user.uid == geteuid();
}

bool gone(int socket) {
  char byte;
  const ssize_t n = recv(socket, &byte, 1, MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// The memory of a peer, as this process has it mapped. Lives as long as a transfer uses it.
struct Remote {
  PeerId id = -1;
  std::string address;
  Fd socket;
  std::shared_ptr<std::byte> table;
  std::vector<std::shared_ptr<std::byte>> mappings;
  std::vector<MemoryRange> regions;
  RangeSet inside;
  SharedWindows windows;
  std::atomic<bool> gone{false};
};

struct Transfer {
  std::shared_ptr<Remote> peer;
  KvTransfer what;
  std::vector<Copy> copies;
  size_t bytes = 0;
  int64_t descriptors = 0;
  std::atomic<bool> cancelled{false};
  enum State { queued, running, done, failed };
  std::atomic<State> state{queued};
};

// Copies piece by piece, inside the window each time. True: all of it, and counted as arrived.
bool run(Transfer& t, std::span<const Copy> copies, int thread) {
  std::vector<Copy> piece;
  size_t offset = 0;  // in the first of `copies`
  do {
    piece.clear();
    for (size_t bytes = 0; !copies.empty() && bytes < kPiece;) {
      const Copy& copy = copies.front();
      const size_t n = std::min(copy.bytes - offset, kPiece - bytes);
      if (n > 0) piece.push_back({copy.source + offset, copy.destination + offset, n});
      bytes += n, offset += n;
      if (offset == copy.bytes) copies = copies.subspan(1), offset = 0;
    }
    if (t.cancelled.load(std::memory_order_relaxed) || t.peer->gone.load(std::memory_order_relaxed))
      return false;
    SharedWindows& windows = t.peer->windows;
    if (!windows.enter(t.what, thread)) return false;
    if (t.bytes > kInline) {
      copy_streaming(piece);
    } else {
      for (const Copy& c : piece) std::memcpy(c.destination, c.source, c.bytes);
    }
    if (copies.empty()) windows.count_arrived(t.what);
    windows.leave(thread);
  } while (!copies.empty());
  return true;
}

// The thread that copies what is large.
class Copier {
 public:
  Copier() : thread_([this] { work(); }) {}
  ~Copier() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      for (auto& transfer : queue_) transfer->cancelled = true;
      if (running_) running_->cancelled = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  void add(std::shared_ptr<Transfer> transfer) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(transfer));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      running_ = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      auto expected = Transfer::queued;
      if (running_->state.compare_exchange_strong(expected, Transfer::running)) {
        const bool whole = run(*running_, running_->copies, 1);
        running_->state.store(whole ? Transfer::done : Transfer::failed, std::memory_order_release);
      }
      lock.lock();
      running_.reset();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  std::shared_ptr<Transfer> running_;
  bool stop_ = false;
  std::thread thread_;
};

// The owner's windows, and the thread that lets peers in and notices when they end.
class Owner {
 public:
  static Result<std::unique_ptr<Owner>> make(const TransportOptions& options) {
    auto owner = std::unique_ptr<Owner>(new Owner);
    if (options.regions.size() > kMaxRegions)
      return invalid("shm: " + std::to_string(options.regions.size()) + " regions, at most " +
                     std::to_string(kMaxRegions));
    owner->welcome_.n_regions = int32_t(options.regions.size());
    for (size_t i = 0; i < options.regions.size(); ++i) {
      auto file = shared_file(options.regions[i]);
      if (!file.ok()) return Error{file.error().code, "shm: " + file.error().message};
      owner->welcome_.regions[i] = {file.value().offset, options.regions[i].size()};
      owner->fds_.emplace_back(dup(file.value().fd));
    }
    int table_fd = -1;
    auto memory = make_shared_file("xpyd-windows", sizeof(SharedTable), table_fd);
    if (!memory.ok()) return Error{memory.error().code, "shm: " + memory.error().message};
    owner->fds_.emplace(owner->fds_.begin(), table_fd);
    owner->memory_ = memory.value();
    owner->table_ = new (owner->memory_.get()) SharedTable;
    owner->regions_ = RangeSet(options.regions);
    owner->wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    owner->listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    char name[64];
    std::snprintf(name, sizeof name, "xpyd-%d-%016llx", int(getpid()),
                  static_cast<unsigned long long>(random_secret()));
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
  ~Owner() {
    if (!thread_.joinable()) return;
    stop_ = true;
    eventfd_write(wake_.get(), 1);
    thread_.join();
    for (SharedSlot& slot : std::span(table_->slots, own_.size()))
      slot.state.fetch_and(~uint64_t(1), std::memory_order_seq_cst);
  }

  const std::string& address() const { return address_; }
  int64_t refused() const { return table_->refused.load(std::memory_order_relaxed); }
  void connect(PeerId peer) { peers_.push_back(peer); }
  // The service thread looks whether it still lives.
  void watch(const std::shared_ptr<Remote>& remote) {
    {
      std::lock_guard lock(mutex_);
      watched_.push_back(remote);
    }
    eventfd_write(wake_.get(), 1);
  }

  void disconnect(PeerId peer) {
    std::erase(peers_, peer);
    for (uint32_t i = 0; i < own_.size(); ++i) {
      SharedSlot& slot = table_->slots[i];
      if (own_[i].open && slot.peer.load(std::memory_order_relaxed) == peer)
        slot.state.store(uint64_t(own_[i].generation) << 1, std::memory_order_seq_cst);
    }
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) {
    for (const MemoryRange& range : ranges)
      if (!regions_.contains(range.data(), range.size()))
        return invalid("window for instance " + std::to_string(peer) +
                       ": a range is outside this instance's KV memory");
    if (std::find(peers_.begin(), peers_.end(), peer) == peers_.end())
      return Error{ErrorCode::unavailable,
                   "window for instance " + std::to_string(peer) + ": it is not connected"};
    if (free_.empty()) {
      if (own_.size() == size_t(kSharedSlots))
        return Error{ErrorCode::unavailable,
                     "shm: all " + std::to_string(kSharedSlots) + " windows are open"};
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
    return WindowKey{index, own_[index].generation, 0};
  }

  bool close(const WindowKey& window) {
    if (!live(window)) return true;
    table_->slots[window.index].state.store(uint64_t(window.generation) << 1,
                                            std::memory_order_seq_cst);
    const uint64_t announced = uint64_t(window.index) << 32 | window.generation;
    const int lines = n_lines_.load(std::memory_order_acquire);
    for (int i = 0; i < lines; ++i)
      for (const auto& inside : table_->lines[i].inside)
        if (inside.load(std::memory_order_seq_cst) == announced) return false;
    own_[window.index].open = false;
    if (window.generation != UINT32_MAX) free_.push_back(window.index);
    return true;
  }

  int arrived(const WindowKey& window) const {
    return live(window) ? int(table_->slots[window.index].arrived.load(std::memory_order_acquire))
                        : 0;
  }

 private:
  struct Own {
    uint32_t generation = 0;
    bool open = false;  // until close() has said true
  };
  struct Line {
    Fd socket;
    int number = -1;  // -1: has not said who it is
  };
  Owner() = default;

  bool live(const WindowKey& w) const {
    return w.generation != 0 && w.index < own_.size() && own_[w.index].open &&
           own_[w.index].generation == w.generation;
  }

  void serve() {
    std::vector<pollfd> polled;
    std::vector<Line> lines;
    while (!stop_) {
      polled = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Line& line : lines) polled.push_back({line.socket.get(), POLLIN, 0});
      std::vector<std::shared_ptr<Remote>> watched;
      {
        std::lock_guard lock(mutex_);
        std::erase_if(watched_, [](const auto& r) { return r->gone || r.use_count() == 1; });
        watched = watched_;
      }
      for (const auto& remote : watched) polled.push_back({remote->socket.get(), POLLIN, 0});
      if (poll(polled.data(), polled.size(), 1000) < 0) continue;
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
      for (size_t i = 0; i < watched.size(); ++i)
        if (polled[2 + lines.size() + i].revents && gone(watched[i]->socket.get()))
          watched[i]->gone = true;
      for (size_t i = lines.size(); i-- > 0;)
        if (polled[2 + i].revents && !hear(lines[i])) lines.erase(lines.begin() + ptrdiff_t(i));
      if (polled[1].revents) greet(lines);
    }
  }

  void greet(std::vector<Line>& lines) {
    while (true) {
      Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.get() < 0) return;
      const auto strangers = std::count_if(lines.begin(), lines.end(),
                                           [](const Line& line) { return line.number < 0; });
      if (same_user(socket.get()) && strangers < kMaxStrangers)
        lines.push_back({std::move(socket), -1});
      else
        table_->refused.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // False: it ended, or is none of ours.
  bool hear(Line& line) {
    if (line.number >= 0) {
      if (!gone(line.socket.get())) return true;
      // Its last thread has ended: what it was inside of is left.
      for (auto& inside : table_->lines[line.number].inside)
        inside.store(0, std::memory_order_release);
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
    if (number >= n_lines_) n_lines_.store(number + 1, std::memory_order_release);
    return true;
  }

  bool welcome(int socket, int number) {
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

  std::string address_;
  std::vector<Fd> fds_;  // the table, then the regions
  std::shared_ptr<std::byte> memory_;
  SharedTable* table_ = nullptr;
  Welcome welcome_;
  RangeSet regions_;

  std::vector<Own> own_;
  std::deque<uint32_t> free_;
  std::vector<PeerId> peers_;

  Fd wake_, listener_;
  std::atomic<int> n_lines_{0};                               // that have ever been used
  std::vector<bool> used_ = std::vector<bool>(kSharedLines);  // the thread's
  std::mutex mutex_;
  std::vector<std::shared_ptr<Remote>> watched_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

Error unreachable(const std::string& address, const std::string& why) {
  return {ErrorCode::unavailable, "shm: " + address + ": " + why};
}

Result<std::shared_ptr<Remote>> reach(PeerId self, const std::string& address) {
  sockaddr_un name;
  const std::string prefix = "shm:@";
  if (!address.starts_with(prefix) || address.size() == prefix.size() ||
      address.size() - prefix.size() >= sizeof name.sun_path)
    return unreachable(address, "not an address of an shm transport (shm:@NAME)");
  const socklen_t length = abstract_address(address.substr(prefix.size()), name);
  auto remote = std::make_shared<Remote>();
  remote->address = address;
  remote->socket = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const int fd = remote->socket.get();
  const timeval patience{kConnectSeconds, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&name), length) != 0)
    return unreachable(address, os_text());
  if (!same_user(fd)) return unreachable(address, "it belongs to another user");
  Hello hello;
  hello.self = self;
  Welcome welcome;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (kMaxRegions + 1))];
  iovec bytes{&welcome, sizeof welcome};
  msghdr message{};
  message.msg_iov = &bytes, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != ssize_t(sizeof hello))
    return unreachable(address, os_text());
  const ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  std::vector<Fd> fds;
  if (n > 0)
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len; ++i) {
        int passed;
        std::memcpy(&passed, CMSG_DATA(c) + i * sizeof(int), sizeof passed);
        fds.emplace_back(passed);
      }
    }
  if (n < 0) return unreachable(address, os_text());
  if (n != ssize_t(sizeof welcome) || welcome.magic != kHelloMagic || welcome.n_regions < 0 ||
      welcome.n_regions > int(kMaxRegions) || fds.size() != size_t(welcome.n_regions) + 1 ||
      welcome.line < 0 || welcome.line >= kSharedLines)
    return unreachable(address, "it did not answer as this version of the wire does");
  auto table = map_shared_file(fds[0].get(), sizeof(SharedTable));
  if (!table.ok()) return unreachable(address, table.error().message);
  remote->table = table.value();
  auto* windows = reinterpret_cast<SharedTable*>(remote->table.get());
  if (windows->magic != SharedTable::kMagic)
    return unreachable(address, "its windows are of another version");
  remote->windows = SharedWindows(windows, welcome.line, self);
  for (int i = 0; i < welcome.n_regions; ++i) {
    const auto& region = welcome.regions[i];
    auto mapped = map_shared_file(fds[size_t(i) + 1].get(), region.offset + region.bytes);
    if (!mapped.ok()) return unreachable(address, mapped.error().message);
    remote->mappings.push_back(mapped.value());
    remote->regions.push_back({mapped.value().get() + region.offset, region.bytes});
  }
  remote->inside = RangeSet(remote->regions);
  return remote;
}

class ShmTransport final : public KvTransport {
 public:
  ShmTransport(const TransportOptions& options, std::unique_ptr<Owner> owner)
      : options_(options), owner_(std::move(owner)) {}

  std::string address() const override { return owner_->address(); }
  Status connect(PeerId peer, const std::string& address) override {
    if (auto known = peers_.find(peer); known != peers_.end() && !known->second->gone) {
      if (known->second->address == address) return ok();
      return invalid("shm: instance " + std::to_string(peer) + " has another address already");
    }
    auto remote = reach(options_.self, address);
    if (!remote.ok()) return remote.error();
    remote.value()->id = peer;
    peers_[peer] = remote.value();
    owner_->connect(peer);
    owner_->watch(remote.value());
    return ok();
  }
  void disconnect(PeerId peer) override {
    if (auto at = peers_.find(peer); at != peers_.end()) {
      at->second->gone = true;
      peers_.erase(at);
    }
    owner_->disconnect(peer);
  }
  std::byte* remote(PeerId peer, int region) const override {
    auto found = peers_.find(peer);
    if (found == peers_.end() || size_t(region) >= found->second->regions.size()) return nullptr;
    return found->second->regions[size_t(region)].data();
  }

  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) override {
    return owner_->open(peer, op, ranges);
  }
  bool close(const WindowKey& window) override { return owner_->close(window); }
  int arrived(const WindowKey& window) const override { return owner_->arrived(window); }

  TransferId post(const KvTransfer& what, const TransferPlan& plan) override {
    const TransferId id = ++last_id_;
    ++stats_.posts;
    auto t = std::make_shared<Transfer>();
    transfers_[id] = t;
    t->what = what;
    t->state = Transfer::failed;
    auto peer = peers_.find(what.peer);
    if (peer == peers_.end() || late(*t)) return id;
    t->peer = peer->second;
    t->bytes = plan.bytes;
    t->descriptors = int64_t(plan.copies.size());
    for (const Copy& copy : plan.copies) {
      const bool write = what.op == KvOp::write;
      if (t->peer->inside.contains(write ? copy.destination : copy.source, copy.bytes)) continue;
      t->peer->windows.refuse();
      return id;
    }
    if (plan.bytes <= kInline) {
      t->state = run(*t, plan.copies, 0) ? Transfer::done : Transfer::failed;
      return id;
    }
    t->copies = plan.copies;
    t->state = Transfer::queued;
    copier_.add(t);
    return id;
  }

  TransferState poll(TransferId id) override {
    auto at = transfers_.find(id);
    XPYD_CHECK(at != transfers_.end(), "poll of a transfer that is not known");
    Transfer& t = *at->second;
    Transfer::State state = t.state.load(std::memory_order_acquire);
    if (state == Transfer::queued || state == Transfer::running) {
      if (late(t) || t.peer->gone) t.cancelled = true;
      // Not begun: it ends here. Begun: the copier sees it before the next piece.
      auto expected = Transfer::queued;
      if (!t.cancelled || !t.state.compare_exchange_strong(expected, Transfer::failed))
        return TransferState::in_flight;
      state = Transfer::failed;
    }
    const bool done = state == Transfer::done;
    if (done) stats_.bytes += int64_t(t.bytes), stats_.descriptors += t.descriptors;
    stats_.failed += !done;
    transfers_.erase(at);
    return done ? TransferState::done : TransferState::failed;
  }

  void cancel(TransferId id) override {
    if (auto at = transfers_.find(id); at != transfers_.end()) at->second->cancelled = true;
  }
  TransportStats stats() const override {
    TransportStats stats = stats_;
    stats.refused = owner_->refused();
    return stats;
  }

 private:
  bool late(const Transfer& t) const {
    return t.what.deadline_s > 0 && options_.clock->now() >= t.what.deadline_s;
  }
  const TransportOptions options_;
  std::unordered_map<PeerId, std::shared_ptr<Remote>> peers_;
  std::unordered_map<TransferId, std::shared_ptr<Transfer>> transfers_;
  TransferId last_id_ = 0;
  TransportStats stats_;
  std::unique_ptr<Owner> owner_;
  Copier copier_;  // last: its thread ends first
};

}  // namespace

MadeTransport make_shm_transport(const TransportOptions& options) {
  auto owner = Owner::make(options);
  if (!owner.ok()) return owner.error();
  return std::unique_ptr<KvTransport>(
      std::make_unique<ShmTransport>(options, std::move(owner).value()));
}

}  // namespace xpyd
