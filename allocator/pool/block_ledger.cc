#include "allocator/pool/block_ledger.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

namespace xpyd::allocator {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

struct BlockLedger::Header {
  uint64_t changes;
  alignas(64) uint32_t used[kMembers];  // 1: the slot's bits may be set somewhere
  int64_t pids[kMembers];               // the process of the slot's present or last member
  int64_t started[kMembers];            // when that process started, because process ids are reused
};

namespace {

constexpr size_t kWords = 1024;  // bytes of the header, before the words
constexpr uint32_t kHolders = 0xffffffff;
constexpr int kEndingMs = 1000;  // how long a newcomer waits for an ending process
constexpr int64_t kGone = -1, kUnknown = -2;

// Returns the start of a process in clock ticks since boot; kGone: no such process.
int64_t start_of(int64_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return errno == ENOENT ? kGone : kUnknown;
  char text[1024];
  const ssize_t n = ::read(file.get(), text, sizeof text - 1);
  if (n <= 0) return n < 0 && errno == ESRCH ? kGone : kUnknown;
  text[n] = 0;
  const char* at = std::strrchr(text, ')');  // after the name, which may be anything: field 3
  for (int field = 2; at && field < 22; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::atoll(at + 1) : kUnknown;
}

// True if the last thread of the process has ended and all its files are closed.
bool has_ended(int64_t pid, int64_t started, int wait_ms) {
  const int64_t now = start_of(pid);
  if (now != started) return now != kUnknown;
  const Fd process(int(::syscall(SYS_pidfd_open, pid_t(pid), 0)));
  // The process has just gone, or Linux is older than 5.3 and lacks the call. In the latter case the lock decides.
  if (process.get() < 0) return errno != EMFILE && errno != ENFILE && errno != ENOMEM;
  struct pollfd end = {process.get(), POLLIN, 0};
  return ::poll(&end, 1, wait_ms) == 1;
}

}  // namespace

size_t BlockLedger::bytes(int n_blocks) {
  static_assert(sizeof(Header) <= kWords);
  return kWords + size_t(n_blocks) * sizeof(uint64_t);
}

BlockLedger::Header& BlockLedger::header() const { return *reinterpret_cast<Header*>(memory_.get()); }

uint64_t* BlockLedger::words() const { return reinterpret_cast<uint64_t*>(memory_.get() + kWords); }

std::atomic_ref<uint64_t> BlockLedger::word(int32_t block) const {
  XPYD_CHECK(block >= 0 && block < n_blocks_, "block " + std::to_string(block));
  return std::atomic_ref(words()[block]);
}

BlockLedger::BlockLedger(std::shared_ptr<std::byte> memory, int n_blocks, Fd lock_file)
    : memory_(std::move(memory)), n_blocks_(n_blocks), lock_file_(std::move(lock_file)) {}

Result<std::unique_ptr<BlockLedger>> BlockLedger::join(std::shared_ptr<std::byte> memory, int n_blocks, int file,
                                                       As as) {
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  Fd own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (own.get() < 0) return Error{ErrorCode::io, path + ": " + os_text()};
  auto ledger = std::unique_ptr<BlockLedger>(new BlockLedger(std::move(memory), n_blocks, std::move(own)));
  if (as == As::observer) return ledger;
  for (int slot = 0; slot < kMembers && ledger->slot_ < 0; ++slot) {
    if (!ledger->lock(slot)) continue;
    if (!ledger->ended(slot, kEndingMs)) {
      ledger->unlock(slot);
      continue;
    }
    ledger->clear(slot);  // what a dead member in this slot held
    Header& header = ledger->header();
    std::atomic_ref(header.pids[slot]).store(::getpid(), std::memory_order_relaxed);
    std::atomic_ref(header.started[slot]).store(start_of(::getpid()), std::memory_order_relaxed);
    std::atomic_ref(header.used[slot]).store(1, std::memory_order_release);
    ledger->slot_ = slot;
    ledger->next_ = int32_t(int64_t(n_blocks) * slot / kMembers);  // away from the other members' cache lines
  }
  if (ledger->slot_ < 0)
    return Error{ErrorCode::unavailable,
                 "a pool that processes share has room for " + std::to_string(kMembers) + " of them"};
  return ledger;
}

BlockLedger::~BlockLedger() {
  if (slot_ >= 0) clear(slot_);
}

bool BlockLedger::lock(int slot) {
  struct flock range = {};
  range.l_type = F_WRLCK, range.l_whence = SEEK_SET, range.l_start = slot, range.l_len = 1;
  return ::fcntl(lock_file_.get(), F_OFD_SETLK, &range) == 0;
}

void BlockLedger::unlock(int slot) {
  struct flock range = {};
  range.l_type = F_UNLCK, range.l_whence = SEEK_SET, range.l_start = slot, range.l_len = 1;
  XPYD_CHECK(::fcntl(lock_file_.get(), F_OFD_SETLK, &range) == 0, std::strerror(errno));
}

// Requires: this process has locked the slot. True if the slot's member can write nothing any more.
bool BlockLedger::ended(int slot, int wait_ms) {
  Header& h = header();
  return std::atomic_ref(h.used[slot]).load(std::memory_order_acquire) == 0 ||
         has_ended(std::atomic_ref(h.pids[slot]).load(std::memory_order_relaxed),
                   std::atomic_ref(h.started[slot]).load(std::memory_order_relaxed), wait_ms);
}

// Requires: this process has locked the slot. `used` is cleared last.
void BlockLedger::clear(int slot) {
  const std::atomic_ref used(header().used[slot]);
  if (used.load(std::memory_order_acquire) == 0) return;
  for (int32_t block = 0; block < n_blocks_; ++block)
    if (load(block) & bit(slot)) word(block).fetch_and(~bit(slot), std::memory_order_acq_rel);
  used.store(0, std::memory_order_release);
  changed();
}

void BlockLedger::changed() { std::atomic_ref(header().changes).fetch_add(1, std::memory_order_release); }

uint64_t BlockLedger::changes() const { return std::atomic_ref(header().changes).load(std::memory_order_acquire); }

int BlockLedger::count_free() const {
  std::lock_guard lock(counting_);
  const uint64_t now = changes();
  if (now == std::exchange(counted_at_, now)) return free_;
  uint64_t* const all = words();
  free_ = 0;
  for (int32_t block = 0; block < n_blocks_; ++block)
    free_ += (std::atomic_ref(all[block]).load(std::memory_order_relaxed) & kHolders) == 0;
  return free_;
}

void BlockLedger::check_invariants(std::span<const char> held) const {
  for (size_t block = 0; block < held.size(); ++block)
    XPYD_CHECK(holds(int32_t(block)) == bool(held[block]), "block " + std::to_string(block));
}

int BlockLedger::claim(int n, std::vector<int32_t>& out) {
  int got = claim_free(n, out);
  if (got < n && reap() > 0) got += claim_free(n - got, out);
  return got;
}

int BlockLedger::claim_free(int n, std::vector<int32_t>& out) {
  uint64_t* const all = words();
  int got = 0;
  int32_t block = next_.load(std::memory_order_relaxed);
  for (int32_t seen = 0; got < n && seen < n_blocks_; ++seen) {
    const std::atomic_ref one(all[block]);
    uint64_t old = one.load(std::memory_order_acquire);
    while ((old & kHolders) == 0) {
      if (!one.compare_exchange_weak(old, ((old >> 32) + 1) << 32 | bit(slot_), std::memory_order_acq_rel,
                                     std::memory_order_acquire))
        continue;
      out.push_back(block);
      ++got;
      break;
    }
    if (++block == n_blocks_) block = 0;
  }
  next_.store(block, std::memory_order_relaxed);
  if (got > 0) changed();
  return got;
}

bool BlockLedger::share(int32_t block, uint32_t generation, int giver) {
  uint64_t old = load(block);
  if (giver >= kMembers) return false;
  do {
    if (old >> 32 != generation || (old & bit(giver)) == 0) return false;
    if (old & bit(slot_)) return true;
  } while (
      !word(block).compare_exchange_weak(old, old | bit(slot_), std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

bool BlockLedger::recycle(int32_t block) {
  uint64_t old = load(block);
  XPYD_CHECK(old & bit(slot_), "block " + std::to_string(block) + " is not held here");
  while ((old & kHolders) == bit(slot_))
    if (word(block).compare_exchange_weak(old, ((old >> 32) + 1) << 32 | bit(slot_), std::memory_order_acq_rel,
                                          std::memory_order_acquire))
      return true;
  release(block);
  return false;
}

void BlockLedger::release(int32_t block) {
  const uint64_t old = word(block).fetch_and(~bit(slot_), std::memory_order_acq_rel);
  XPYD_CHECK(old & bit(slot_), "block " + std::to_string(block) + " is not held here");
  changed();
}

int BlockLedger::reap() {
  std::lock_guard one(reaping_);
  int reaped = 0;
  for (int slot = 0; slot < kMembers; ++slot) {
    if (slot == slot_ || std::atomic_ref(header().used[slot]).load(std::memory_order_acquire) == 0 || !lock(slot))
      continue;
    // Another process may have reaped it, or joined and left, since we looked.
    if (std::atomic_ref(header().used[slot]).load(std::memory_order_acquire) != 0 && ended(slot, 0)) {
      clear(slot);
      ++reaped;
    }
    unlock(slot);
  }
  return reaped;
}

}  // namespace xpyd::allocator
