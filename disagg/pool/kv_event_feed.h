// KvEventFeed: what one instance tells as KV events (kv_events.h), as a conductor hears it of instances that report to
// it themselves. What was missed is asked for again; where it is not kept any more, all that was known of the instance
// is taken back, and what it tells from then on is believed.
//
// Thread safety: `heard` is called by a thread of the feed's own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <vector>

#include "disagg/messages.h"
#include "disagg/net/zmq.h"

namespace xpyd::disagg {

// Of a payload, in its order. Nothing: it is no list of events.
struct HeardEvent {
  bool cleared = false;  // nothing is held any more
  int block_tokens = 0;  // of what was stored
  CacheReport report;
};
std::optional<std::vector<HeardEvent>> read_kv_events(std::string_view payload);

class KvEventFeed {
 public:
  using Heard = std::function<void(CacheReport)>;
  // `replay`: empty: nothing is asked for. `block_tokens`: of the blocks that are wanted.
  static Result<std::unique_ptr<KvEventFeed>> open(const std::string& endpoint, const std::string& replay,
                                                   int block_tokens, Heard heard);
  ~KvEventFeed();

 private:
  KvEventFeed(ZmqSocket events, std::unique_ptr<ZmqSocket> replay, int block_tokens, Heard heard);
  void run();
  bool wait(ZmqSocket& socket);
  void catch_up();
  void take(std::string_view sequence, const std::string& payload);
  void forget();

  const int block_tokens_;
  const Heard heard_;
  ZmqSocket events_;
  std::unique_ptr<ZmqSocket> replay_;  // null: none
  uint64_t next_ = 0;                  // sequence number
  std::unordered_set<uint64_t> known_[allocator::kTiers];
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace xpyd::disagg
