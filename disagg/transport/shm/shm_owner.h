// Owner is the owner's half of the shm transport. It has the registrations, which peers check by themselves
// (shm_table.h), and a hazard record for each peer. A peer's channel stays open. The kernel closes it when the last
// thread of the peer has ended, which proves that the peer writes no more.
//
// Thread safety: the instance's thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "disagg/transport/bootstrap.h"
#include "disagg/transport/registration_table.h"
#include "disagg/transport/shm/shm_table.h"

namespace xpyd::disagg::shm {

constexpr size_t kMaxRegions = 64;

// The owner's first message to a peer, with the names of files (shared_memory.h).
struct Welcome {
  int32_t line = 0;
  std::string table;
  std::vector<std::string> files;     // of the regions
  std::vector<AddressRange> regions;  // in their files
};
template <class A>
void fields(A& a, typename A::template Ref<Welcome> s) {
  auto& [line, table, files, regions] = s;
  a.number("line", line, 0, kSharedLines - 1);
  XPYD_EACH(a, table);
  a.list("files", files, kMaxRegions);
  a.list("regions", regions, kMaxRegions);
}

class Owner {
 public:
  static Result<std::unique_ptr<Owner>> make(const TransportOptions& options);
  ~Owner();

  const std::string& address() const { return bootstrap_.address(); }
  Bootstrap& bootstrap() { return bootstrap_; }
  void disconnect(PeerId peer);
  // As in KvTransport.
  Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges);
  bool close(const RemoteKey& registration);
  int arrived(const RemoteKey& registration) const;

 private:
  struct Own {
    uint32_t generation = 0;
    bool open = false;  // until close() has returned true
  };
  explicit Owner(PeerId self);

  bool live(const RemoteKey& w) const {
    return w.generation != 0 && w.index < own_.size() && own_[w.index].open && own_[w.index].generation == w.generation;
  }
  ChannelEvents let_in(const ChannelPtr& channel);

  Fd table_file_;
  std::shared_ptr<std::byte> memory_;
  SharedTable* table_ = nullptr;
  Welcome welcome_;
  RangeSet regions_;

  std::vector<Own> own_;
  std::deque<uint32_t> free_;

  std::atomic<int> n_lines_{0};                               // hazard records that have ever been used
  std::vector<bool> used_ = std::vector<bool>(kSharedLines);  // used on the bootstrap's thread only
  Bootstrap bootstrap_;
};

}  // namespace xpyd::disagg::shm
