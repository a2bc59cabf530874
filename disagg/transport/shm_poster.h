// The poster's half of the shm wire: the memory of a peer as this process has it mapped, and the
// copies into it.
//
// Thread safety: run(): one at a time for each `thread` number. Copier:
// its owner's thread; run() on one of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/copy.h"
#include "disagg/transport/shm_owner.h"
#include "disagg/transport/shm_table.h"
#include "disagg/transport/window_table.h"

namespace xpyd::shm {

// Posts of so many bytes are copied by post() itself.
constexpr size_t kInline = 64 << 10;

// Lives as long as a transfer uses it.
struct Remote {
  HeldChannel channel;
  std::shared_ptr<std::atomic<bool>> ended;  // its channel has
  std::string address;
  std::shared_ptr<std::byte> table;
  std::vector<std::shared_ptr<std::byte>> mappings;
  std::vector<MemoryRange> regions;
  SharedWindows windows;

  bool gone() const { return ended->load(std::memory_order_relaxed); }
  // Inside a window that was entered.
  bool covered(const KvTransfer& what, const Copy& copy);
  void count_arrived(const KvTransfer& what);

 private:
  std::mutex mutex_;
  WindowNumbers counted_;  // guarded by mutex_
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

// A peer that has let us in.
struct Met {
  HeldChannel channel;
  std::shared_ptr<std::atomic<bool>> ended;
  Welcome welcome;
  std::vector<Fd> files;
};
Status call(Meeting& meeting, const std::string& address, const std::shared_ptr<Answer<Met>>& answer);
Result<std::shared_ptr<Remote>> map_remote(Met met, const std::string& address, PeerId self);

// Copies piece by piece, inside the window each time. True: all of it, and counted as arrived.
bool run(Transfer& transfer, std::span<const Copy> copies, int thread);

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
  void work();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Transfer>> queue_;
  std::shared_ptr<Transfer> running_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd::shm
