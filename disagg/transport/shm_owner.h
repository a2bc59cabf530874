// The owner's half of the shm wire: its windows, which the peers look at by themselves
// (shm_table.h), and the thread that lets peers in and notices when they end.
//
// Thread safety: the instance's thread.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "disagg/transport/shared_memory.h"
#include "disagg/transport/shm_table.h"
#include "disagg/transport/window_table.h"

namespace xpyd::shm {

// A peer that is called; the thread sees when it ends.
struct Watched {
  Fd socket;
  std::atomic<bool> gone{false};
};

// Room for the ranges of windows, behind the table: first fit.
class RangeRoom {
 public:
  explicit RangeRoom(uint32_t n = 0) : spare_{{0, n}} {}
  std::optional<uint32_t> take(uint32_t n);  // the first of n; null: no such room
  void give(uint32_t first, uint32_t n);

 private:
  std::map<uint32_t, uint32_t> spare_;  // first, how many
};

class Owner {
 public:
  static Result<std::unique_ptr<Owner>> make(const TransportOptions& options);
  ~Owner();

  const std::string& address() const { return address_; }
  int64_t refused() const { return table_->refused.load(std::memory_order_relaxed); }
  void connect(PeerId peer) { peers_.push_back(peer); }
  // Until nobody else holds it.
  void watch(const std::shared_ptr<Watched>& remote);
  void disconnect(PeerId peer);
  // As KvTransport says it.
  Result<WindowKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const WindowKey& window);
  int arrived(const WindowKey& window) const;

 private:
  struct Own {
    uint32_t generation = 0;
    bool open = false;  // until close() has said true
    uint32_t first_range = 0, n_ranges = 0;
  };
  struct Line {
    Fd socket;
    int number = -1;  // -1: has not said who it is
  };
  Owner() = default;

  bool live(const WindowKey& w) const {
    return w.generation != 0 && w.index < own_.size() && own_[w.index].open && own_[w.index].generation == w.generation;
  }
  // Sorted, neighbours joined.
  std::vector<SharedRange> places_of(std::span<const MemoryRange> ranges) const;
  void serve();
  bool greet(std::vector<Line>& lines);  // false: there are no descriptors left
  bool hear(Line& line);                 // false: it ended, or is none of ours
  bool welcome(int socket, int number);

  std::string address_;
  std::vector<Fd> fds_;  // the table, then the regions
  std::shared_ptr<std::byte> memory_;
  SharedTable* table_ = nullptr;
  Welcome welcome_;
  RangeSet regions_;
  std::vector<MemoryRange> memories_;
  RangeRoom room_;

  std::vector<Own> own_;
  std::deque<uint32_t> free_;
  std::vector<PeerId> peers_;

  Fd wake_, listener_;
  std::atomic<int> n_lines_{0};                               // that have ever been used
  std::vector<bool> used_ = std::vector<bool>(kSharedLines);  // the thread's
  std::mutex mutex_;
  std::vector<std::shared_ptr<Watched>> watched_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace xpyd::shm
