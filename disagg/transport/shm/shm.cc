// shm: the peers are processes of one machine and one user. A pool is a memfd that the peer maps. A transfer is a copy
// with non-temporal stores, straight into the peer's pool or out of it.
//
// post() itself copies up to kInline bytes, because waking a thread takes longer. Larger transfers are copied by a
// thread of the transport, while the instance computes the next layer, in pieces of kPiece bytes. Before each piece the
// registration is checked again (shm_table.h).
//
// Blocks that a peer may be inside of stay in quarantine until the peer has ended, even after disconnect()
// (shm_owner.h).

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "base/copy.h"
#include "disagg/transport/posting_transport.h"
#include "disagg/transport/shared_memory.h"
#include "disagg/transport/shm/shm_owner.h"
#include "disagg/transport/transports.h"

namespace xpyd::disagg::shm {
namespace {

// post() itself copies transfers of at most this many bytes.
constexpr size_t kInline = 64 << 10;

// The memory of a peer that this process has mapped. It lives as long as a transfer uses it.
struct Remote {
  ChannelPtr channel;                        // held()
  std::shared_ptr<std::atomic<bool>> ended;  // the channel has ended
  std::string address;
  std::shared_ptr<std::byte> table;
  std::vector<std::shared_ptr<std::byte>> mappings;
  std::vector<MemoryRange> regions;
  SharedRegistrations registrations;

  bool dead() const { return ended->load(std::memory_order_relaxed); }
  // Returns whether all these bytes are in the mapped memory of the peer.
  bool has(const std::byte* at, size_t bytes) const {
    return std::ranges::any_of(regions, [&](const MemoryRange& region) {
      return at >= region.data() && at < region.data() + region.size() &&
             bytes <= size_t(region.data() + region.size() - at);
    });
  }
};

struct Transfer {
  std::shared_ptr<Remote> peer;
  KvTransfer what;
  std::vector<Copy> copies;
  size_t bytes = 0;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> begun{false};  // taken by the copier, or cancelled before that
  std::atomic<TransferState> state{TransferState::in_flight};
};

// A peer that has admitted us.
struct Connected {
  ChannelPtr channel;  // held()
  std::shared_ptr<std::atomic<bool>> ended;
  Welcome welcome;
};

// A piece takes 90 us at 12 GB/s, which is the longest that it delays close(). Smaller pieces would prefetch the heads
// of fewer blocks (base/copy.h).
constexpr size_t kPiece = 1 << 20;

Error unreachable(const std::string& address, const std::string& why) {
  return {ErrorCode::unavailable, "shm: " + address + ": " + why};
}

// Copies piece by piece, and is inside the registration for each. Returns true if all of it is copied and counted as
// arrived. Requires: at most one call at a time for each `thread`.
bool run(Transfer& t, const std::span<const Copy> all, int thread) {
  const bool write = t.what.op == KvOp::write;
  if (!std::ranges::all_of(all, [&](const Copy& copy) {
        return copy.bytes == 0 || t.peer->has(write ? copy.destination : copy.source, copy.bytes);
      }))
    return false;
  std::span<const Copy> copies = all;
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
    if (t.cancelled.load(std::memory_order_relaxed) || t.peer->dead()) return false;
    SharedRegistrations& registrations = t.peer->registrations;
    if (!registrations.enter(t.what, thread)) return false;
    if (t.bytes > kInline) {
      copy_streaming(piece);
    } else {
      for (const Copy& c : piece) std::memcpy(c.destination, c.source, c.bytes);
    }
    if (copies.empty()) registrations.count_arrived(t.what);
    registrations.leave(thread);
  } while (!copies.empty());
  return true;
}

// The thread that copies large transfers.
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
      if (!running_->begun.exchange(true)) {
        // Each jump to another address costs a page-table walk on both sides. In the order of their sources, copies of
        // blocks are 5 % slower than one large copy; in random order 12 %.
        std::ranges::sort(running_->copies, {}, &Copy::source);
        const bool whole = run(*running_, running_->copies, 1);
        running_->state.store(whole ? TransferState::done : TransferState::failed, std::memory_order_release);
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

Status call(Bootstrap& bootstrap, const std::string& address, const std::shared_ptr<Answer<Connected>>& answer) {
  return bootstrap.call(address, 0, answer, [](const ChannelPtr& channel, const auto& wanted) {
    wanted->channel = held(channel);
    auto ended = std::make_shared<std::atomic<bool>>(false);
    return hear(
        channel,
        [ended, weak = std::weak_ptr(wanted)](std::string_view bytes) {
          auto welcome = from_bytes<Welcome>(bytes);
          auto waits = weak.lock();
          if (!waits || !welcome || welcome.value().files.size() != welcome.value().regions.size()) return false;
          waits->set(Connected{std::move(waits->channel), ended, std::move(welcome).value()});
          return true;
        },
        [ended] { *ended = true; });
  });
}

Result<std::shared_ptr<Remote>> map_remote(Connected met, const std::string& address, PeerId self) {
  auto remote = std::make_shared<Remote>();
  remote->address = address;
  remote->channel = std::move(met.channel);
  remote->ended = met.ended;
  auto table = map_shared_file(met.welcome.table, sizeof(SharedTable));
  if (!table.ok()) return unreachable(address, table.error().message);
  remote->table = table.value();
  auto* registrations = reinterpret_cast<SharedTable*>(remote->table.get());
  if (registrations->magic != SharedTable::kMagic)
    return unreachable(address, "its table of registrations has another version");
  remote->registrations = SharedRegistrations(registrations, met.welcome.line, self);
  for (size_t i = 0; i < met.welcome.regions.size(); ++i) {
    const auto& [begin, bytes] = met.welcome.regions[i];
    auto mapped = map_shared_file(met.welcome.files[i], begin + bytes);
    if (!mapped.ok()) return unreachable(address, mapped.error().message);
    remote->mappings.push_back(mapped.value());
    remote->regions.push_back({mapped.value().get() + begin, bytes});
  }
  return remote;
}

class ShmTransport final : public PostingTransport<Remote, Transfer, Owner> {
 public:
  ShmTransport(const TransportOptions& options, std::unique_ptr<Owner> owner)
      : PostingTransport("shm", options), calls_("shm", options_), owner_(std::move(owner)) {}

  std::string address() const override { return owner_->address(); }

 private:
  Result<std::shared_ptr<Remote>> connect_peer(PeerId peer, const std::string& address) override {
    auto met = calls_.ask(peer, address,
                          [&](const auto& answer) { return shm::call(owner_->bootstrap(), address, answer); });
    if (!met) return met.error();
    if (!met.value()) return std::shared_ptr<Remote>();
    return map_remote(std::move(*met.value()), address, options_.self);
  }
  void leave(PeerId peer, const std::shared_ptr<Remote>& remote) override {
    calls_.give_up(peer);
    if (remote) *remote->ended = true;
    owner_->disconnect(peer);
  }
  std::shared_ptr<Transfer> begin(TransferId, const std::shared_ptr<Remote>& remote, const KvTransfer& what,
                                  const TransferPlan& plan) override {
    auto t = std::make_shared<Transfer>();
    t->peer = remote;
    t->what = what;
    t->bytes = plan.bytes;
    if (plan.bytes <= shm::kInline) {
      t->state = shm::run(*t, plan.copies, 0) ? TransferState::done : TransferState::failed;
    } else {
      t->copies = plan.copies;
      copier_.add(t);
    }
    return t;
  }
  TransferState progress(Transfer& t, bool unwanted) override {
    if (t.state != TransferState::in_flight || (!unwanted && !t.peer->dead())) return t.state;
    t.cancelled = true;
    // If the copier has not begun, the transfer ends here. Else the copier stops before the next piece.
    return t.begun.exchange(true) ? t.state.load() : TransferState::failed;
  }
  Owner& registrations() const override { return *owner_; }

  Calls<Connected> calls_;
  std::unique_ptr<Owner> owner_;
  shm::Copier copier_;  // last member: its thread ends first
};

}  // namespace
}  // namespace xpyd::disagg::shm

namespace xpyd::disagg {

MadeTransport make_shm_transport(const TransportOptions& options) {
  auto owner = shm::Owner::make(options);
  if (!owner.ok()) return owner.error();
  return std::unique_ptr<KvTransport>(std::make_unique<shm::ShmTransport>(options, std::move(owner).value()));
}

}  // namespace xpyd::disagg
