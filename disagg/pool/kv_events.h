// KV events: publishes which blocks an instance's prefix cache and offload tiers store and remove, in vLLM's format
// (vllm/distributed/kv_events.py). Routers that use the caches of vLLM instances can use these.
//
//   PUB: every 10 ms, if something changed, a message of three frames:
//     "" | sequence number, 8 bytes, big-endian, from 0 | MessagePack of
//     [ts, [event, …], data_parallel_rank]      ts: seconds since 1970
//     ["BlockStored", [hash, …], parent's hash or nil, [token, …], tokens of a block, nil, medium, nil]
//     ["BlockRemoved", [hash, …], medium]       medium: "GPU", "CPU" or "DISK", even with --device cpu
//     ["AllBlocksCleared"]
//   ROUTER: ["", number] asks for all kept messages from that number on. The answers are ["", number, payload],
//   then ["", -1, ""]. The last 10,000 messages are kept, at most 64 MiB.
//
// The first event is AllBlocksCleared, because an instance begins empty, even in the place of another. It comes again
// if changes arrive faster than the thread packs them and some are dropped. A subscriber then knows less than there is,
// never more.
//
// Thread safety: any thread may report changes, and never waits for a subscriber. One thread packs and sends.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "allocator/prefix_log.h"
#include "base/status.h"
#include "disagg/net/zmq.h"

namespace xpyd::disagg {

struct KvEventsOptions {
  std::string endpoint;  // tcp://HOST:PORT for subscribers; empty: no events
  std::string replay;    // tcp://HOST:PORT for replays; empty: none
  int rank = 0;          // data_parallel_rank; added to both ports unless they are 0
};

// The error names the option.
Status check_kv_events(const KvEventsOptions& options);

// A block that was stored or removed.
struct CacheChange {
  uint64_t hash = 0;
  uint64_t parent = 0;  // of a stored block; 0 for a first block
  int n_tokens = 0;     // of a stored block; 0: removed
  allocator::Tier tier = allocator::Tier::device;
  bool first = false;  // stored, without a parent
};
// Returns the payload of a message. `tokens` are those of all stored blocks, in order. Consecutive blocks share one
// event.
std::string pack_kv_events(double ts, bool cleared, std::span<const CacheChange> changes,
                           std::span<const int32_t> tokens, int rank);

// Returns the frame of a sequence number. Its bytes sort like the numbers. kLastSequence ends a replay.
std::string sequence_text(uint64_t number);
inline constexpr uint64_t kLastSequence = ~uint64_t{0};

class KvEvents final : public allocator::CacheListener {
 public:
  // The error names the option that cannot be met.
  static Result<std::shared_ptr<KvEvents>> open(const KvEventsOptions& options);
  ~KvEvents() override;  // subscribers get no last message

  void stored(allocator::Tier tier, uint64_t hash, std::optional<uint64_t> parent,
              std::span<const int32_t> tokens) override;
  void removed(allocator::Tier tier, uint64_t hash) override;

  const std::string& endpoint() const { return endpoint_; }
  const std::string& replay() const { return replay_endpoint_; }  // empty: none

  static constexpr size_t kMostTold = 100'000;  // changes that wait for the thread

 private:
  struct Told {
    bool cleared = false;  // precedes the changes
    std::vector<CacheChange> changes;
    std::vector<int32_t> tokens;
  };
  struct Sent {
    std::string sequence, payload;
  };
  KvEvents(const KvEventsOptions& options, ZmqSocket publisher, std::unique_ptr<ZmqSocket> replay);
  void tell(const CacheChange& change, std::span<const int32_t> tokens);
  void run();
  void send();
  void answer();

  const KvEventsOptions options_;
  std::string endpoint_, replay_endpoint_;
  std::mutex mutex_;
  Told told_;          // guarded by mutex_
  bool stop_ = false;  // guarded by mutex_

  // For the thread only:
  ZmqSocket publisher_;
  std::unique_ptr<ZmqSocket> replay_;  // null: none
  Told sending_;
  uint64_t next_ = 0;      // next sequence number
  std::deque<Sent> kept_;  // the last messages
  size_t kept_bytes_ = 0;
  std::thread thread_;
};

}  // namespace xpyd::disagg
