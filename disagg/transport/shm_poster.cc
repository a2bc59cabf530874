#include "disagg/transport/shm_poster.h"

#include <algorithm>
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
    if (t.cancelled.load(std::memory_order_relaxed) || t.peer->gone()) return false;
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

Status call(Meeting& meeting, const std::string& address, const std::shared_ptr<Answer<Met>>& answer) {
  return meeting.call(address, 0, answer, [](const ChannelPtr& channel, const auto& wanted) {
    wanted->channel = HeldChannel(channel);
    auto ended = std::make_shared<std::atomic<bool>>(false);
    return hear(
        channel,
        [channel, ended, weak = std::weak_ptr(wanted)](std::string_view bytes) {
          auto welcome = from_bytes<Welcome>(bytes);
          auto files = channel->take_files();
          auto waits = weak.lock();
          if (!waits || !welcome || files.size() != welcome.value().regions.size() + 1) return false;
          waits->set(Met{std::move(waits->channel), ended, std::move(welcome).value(), std::move(files)});
          return true;
        },
        [ended] { *ended = true; });
  });
}

Result<std::shared_ptr<Remote>> map_remote(Met met, const std::string& address, PeerId self) {
  auto remote = std::make_shared<Remote>();
  remote->address = address;
  remote->channel = std::move(met.channel);
  remote->ended = met.ended;
  auto table = map_shared_file(met.files[0].get(), SharedTable::bytes(met.welcome.n_ranges));
  if (!table.ok()) return unreachable(address, table.error().message);
  remote->table = table.value();
  auto* windows = reinterpret_cast<SharedTable*>(remote->table.get());
  if (windows->magic != SharedTable::kMagic) return unreachable(address, "its windows are of another version");
  remote->windows = SharedWindows(windows, met.welcome.line, self);
  for (size_t i = 0; i < met.welcome.regions.size(); ++i) {
    const auto& [begin, bytes] = met.welcome.regions[i];
    auto mapped = map_shared_file(met.files[i + 1].get(), begin + bytes);
    if (!mapped.ok()) return unreachable(address, mapped.error().message);
    remote->mappings.push_back(mapped.value());
    remote->regions.push_back({mapped.value().get() + begin, bytes});
  }
  return remote;
}

}  // namespace xpyd::shm
