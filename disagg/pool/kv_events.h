// What an instance's prefix cache and the tiers below it come to hold and lose, told to whoever listens, in the words
// of vLLM's KV events (vllm/distributed/kv_events.py): routers that place by the caches of vLLM's instances place by
// these.
//
//   PUB, a message every 10 ms in which something changed, of three frames:
//     topic | sequence number, 8 bytes, big-endian, from 0 | MessagePack of
//     [ts, [event, …], data_parallel_rank]      ts: seconds since 1970
//     ["BlockStored", [hash, …], parent's hash or nil, [token, …], tokens of a block, nil, medium, nil]
//     ["BlockRemoved", [hash, …], medium]       medium: "GPU", "CPU" or "DISK", also where --device is cpu
//     ["AllBlocksCleared"]
//   ROUTER: who asks with ["", number] gets ["", number, payload] of every message kept from that number on, then
//     ["", -1, ""]. Kept are the last 10,000 messages, 64 MiB at most.
//
// The first event is AllBlocksCleared: an instance begins with nothing, also one that took the place of another. It
// comes again where events had to be forgotten because they came faster than the thread could pack them: who listens
// then knows of less than there is, never of more.
//
// Thread safety: any thread may tell; nobody waits for a subscriber. One thread packs and sends.
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
  std::string endpoint;  // tcp://HOST:PORT, to which subscribers connect; empty: nothing is told
  std::string replay;    // likewise, for who has missed something; empty: nobody is helped
  std::string topic;
  int rank = 0;  // data_parallel_rank; is added to both ports, unless they are 0
};

// The error names the option.
Status check_kv_events(const KvEventsOptions& options);

// A block that came, or went.
struct CacheChange {
  uint64_t hash = 0;
  uint64_t parent = 0;  // of one that came; of a first block 0
  int n_tokens = 0;     // of one that came; 0: it went
  allocator::Tier tier = allocator::Tier::device;
  bool first = false;  // it came, and has no parent
};
// The payload. `tokens`: of all that came, in that order. Neighbours that follow each other are one event.
std::string pack_kv_events(double ts, bool cleared, std::span<const CacheChange> changes,
                           std::span<const int32_t> tokens, int rank);

// A sequence number's frame; in the order of text, too. The last one ends a replay.
std::string sequence_text(uint64_t number);
inline constexpr uint64_t kLastSequence = ~uint64_t{0};

class KvEvents final : public allocator::CacheListener {
 public:
  // The error names the option that cannot be met.
  static Result<std::shared_ptr<KvEvents>> open(const KvEventsOptions& options);
  ~KvEvents() override;  // subscribers are left behind with what they have

  void stored(allocator::Tier tier, uint64_t hash, std::optional<uint64_t> parent,
              std::span<const int32_t> tokens) override;
  void removed(allocator::Tier tier, uint64_t hash) override;

  const std::string& endpoint() const { return endpoint_; }
  const std::string& replay() const { return replay_endpoint_; }  // empty: none

  static constexpr size_t kMostTold = 100'000;  // changes that wait for the thread

 private:
  struct Told {
    bool cleared = false;  // before all of these
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
  Told told_;          // guarded
  bool stop_ = false;  // guarded

  // The thread's.
  ZmqSocket publisher_;
  std::unique_ptr<ZmqSocket> replay_;  // null: none
  Told sending_;
  uint64_t next_ = 0;      // sequence number
  std::deque<Sent> kept_;  // the last ones
  size_t kept_bytes_ = 0;
  std::thread thread_;
};

}  // namespace xpyd::disagg
