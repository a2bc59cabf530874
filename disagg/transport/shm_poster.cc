#include "disagg/transport/shm_poster.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "disagg/transport/shared_memory.h"

namespace xpyd::shm {
namespace {

// 90 us at 12 GB/s: as long may close() of the window say "not yet". In smaller pieces the head of
// every other block is not fetched ahead (base/copy.h).
constexpr size_t kPiece = 1 << 20;

Error unreachable(const std::string& address, const std::string& why) {
  return {ErrorCode::unavailable, "shm: " + address + ": " + why};
}

}  // namespace

bool Remote::covered(const KvTransfer& what, const Copy& copy) {
  const std::byte* at = what.op == KvOp::write ? copy.destination : copy.source;
  for (size_t i = 0; i < regions.size(); ++i) {
    const std::byte* base = regions[i].data();
    if (at >= base && at < base + regions[i].size())
      return windows.covers(what, shared_place(i, size_t(at - base)), copy.bytes);
  }
  return false;
}

void Remote::count_arrived(const KvTransfer& what) {
  std::lock_guard lock(mutex_);
  if (counted_.count(what)) windows.count_arrived(what);
}

bool run(Transfer& t, const std::span<const Copy> all, int thread) {
  std::span<const Copy> copies = all;
  std::vector<Copy> piece;
  size_t offset = 0;  // in the first of `copies`
  bool covered = false;
  do {
    piece.clear();
    for (size_t bytes = 0; !copies.empty() && bytes < kPiece;) {
      const Copy& copy = copies.front();
      const size_t n = std::min(copy.bytes - offset, kPiece - bytes);
      if (n > 0) piece.push_back({copy.source + offset, copy.destination + offset, n});
      bytes += n, offset += n;
      if (offset == copy.bytes) copies = copies.subspan(1), offset = 0;
    }
    if (t.cancelled.load(std::memory_order_relaxed) || t.peer->gone.load(std::memory_order_relaxed)) return false;
    SharedWindows& windows = t.peer->windows;
    if (!windows.enter(t.what, thread)) return false;
    // Once for all pieces: a window has the same ranges as long as it can be entered.
    if (!std::exchange(covered, true) && !std::all_of(all.begin(), all.end(), [&](const Copy& copy) {
          return copy.bytes == 0 || t.peer->covered(t.what, copy);
        })) {
      windows.leave(thread);
      return windows.refuse();
    }
    if (t.bytes > kInline) {
      copy_streaming(piece);
    } else {
      for (const Copy& c : piece) std::memcpy(c.destination, c.source, c.bytes);
    }
    if (copies.empty()) t.peer->count_arrived(t.what);
    windows.leave(thread);
  } while (!copies.empty());
  return true;
}

void Copier::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    running_ = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    auto expected = Transfer::queued;
    if (running_->state.compare_exchange_strong(expected, Transfer::running)) {
      // A jump costs the walk of a page table on both sides; in the order of their sources blocks
      // lose 5 % to one large copy, in a random order 12 %.
      std::ranges::sort(running_->copies, {}, &Copy::source);
      const bool whole = run(*running_, running_->copies, 1);
      running_->state.store(whole ? Transfer::done : Transfer::failed, std::memory_order_release);
    }
    lock.lock();
    running_.reset();
  }
}

Result<std::shared_ptr<Remote>> Call::go_on(double now_s) {
  if (!said_) {
    const Result<bool> said = say_hello();
    if (!said) return said.error();
    said_ = said.value();
  }
  if (said_) {
    auto remote = hear_welcome();
    if (!remote || remote.value()) return remote;
  }
  if (now_s >= until_s_) return unreachable(address_, "it does not answer");
  return std::shared_ptr<Remote>();
}

// False: there is no room for us at its door yet.
Result<bool> Call::say_hello() {
  sockaddr_un name;
  const std::string prefix = "shm:@";
  if (!address_.starts_with(prefix) || address_.size() == prefix.size() ||
      address_.size() - prefix.size() >= sizeof name.sun_path)
    return unreachable(address_, "not an address of an shm transport (shm:@NAME)");
  const socklen_t length = abstract_address(address_.substr(prefix.size()), name);
  if (socket_.get() < 0) socket_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = socket_.get();
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&name), length) != 0) {
    if (fd >= 0 && (errno == EAGAIN || errno == EINTR)) return false;
    return unreachable(address_, os_text());
  }
  if (!same_user(fd)) return unreachable(address_, "it belongs to another user");
  const Hello hello;
  if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != ssize_t(sizeof hello))
    return unreachable(address_, os_text());  // the first packet: a socket has room for it
  return true;
}

// Null: it has said nothing yet.
Result<std::shared_ptr<Remote>> Call::hear_welcome() {
  const std::string& address = address_;
  Welcome welcome;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (kMaxRegions + 1))];
  iovec bytes{&welcome, sizeof welcome};
  msghdr message{};
  message.msg_iov = &bytes, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return std::shared_ptr<Remote>();
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
      welcome.n_regions > int(kMaxRegions) || fds.size() != size_t(welcome.n_regions) + 1 || welcome.line < 0 ||
      welcome.line >= kSharedLines)
    return unreachable(address, "it did not answer as this version of the wire does");
  auto remote = std::make_shared<Remote>();
  remote->address = address;
  remote->socket = std::move(socket_);
  if (welcome.n_ranges > kMaxRanges) return unreachable(address, "its table is too large");
  auto table = map_shared_file(fds[0].get(), SharedTable::bytes(welcome.n_ranges));
  if (!table.ok()) return unreachable(address, table.error().message);
  remote->table = table.value();
  auto* windows = reinterpret_cast<SharedTable*>(remote->table.get());
  if (windows->magic != SharedTable::kMagic) return unreachable(address, "its windows are of another version");
  remote->windows = SharedWindows(windows, welcome.line, self_);
  for (int i = 0; i < welcome.n_regions; ++i) {
    const auto& region = welcome.regions[i];
    auto mapped = map_shared_file(fds[size_t(i) + 1].get(), region.offset + region.bytes);
    if (!mapped.ok()) return unreachable(address, mapped.error().message);
    remote->mappings.push_back(mapped.value());
    remote->regions.push_back({mapped.value().get() + region.offset, region.bytes});
  }
  return remote;
}

}  // namespace xpyd::shm
