// A stage's KV on its way to other instances, where the head is on another host: what the head's Sender posts
// (far_kv.h), posted from here, from a thread that waits for no wave.
//
// Thread safety: take() by the channel's thread; the rest by a thread of its own.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disagg/chunked_pp/messages.h"
#include "disagg/net/channel.h"

namespace xpyd::disagg::ranks {

// Whether these bytes are in the stage's KV: they come from another process.
bool inside(const KvBytes& piece, std::span<const MemoryRange> kv);

class KvPoster {
 public:
  KvPoster(std::unique_ptr<KvTransport> wire, std::vector<MemoryRange> kv, ChannelPtr head, Clock& clock);
  ~KvPoster();
  void take(uint16_t type, std::string_view bytes);  // Meet, Leave, Post, Cancel

 private:
  void work();
  void handle(uint16_t type, const std::string& bytes);
  bool go_on();

  const std::unique_ptr<KvTransport> wire_;
  const std::vector<MemoryRange> kv_;  // [tp]
  const ChannelPtr head_;
  Clock& clock_;
  std::map<PeerId, std::string> meeting_;  // their addresses
  std::map<uint64_t, TransferId> posts_;   // by the head's id
  TransferPlan plan_;                      // of the post that is told in several messages

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::vector<std::pair<uint16_t, std::string>> inbox_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd::disagg::ranks
