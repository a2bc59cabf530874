// One instance: an engine, its KV memory, and its half of the P/D state machine (disagg/README.md draws it).
//
// Thread safety: send(), stats() and the load counters from any thread; everything else from the instance's
// own thread (or, under a virtual clock, from the one thread that turns all instances).
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/mailbox.h"
#include "batch/engine.h"
#include "disagg/placement.h"
#include "disagg/service.h"
#include "disagg/transport/transport.h"

namespace xpyd {

// When the KV of a prompt crosses: as each layer of each chunk is done, after each chunk, or at the end.
enum class StreamKv : uint8_t { layer, chunk, request };

// Where a decode instance wants the KV of one prompt.
struct KvDestination {
  std::byte* pool = nullptr;
  const KvLayout* layout = nullptr;
  std::vector<int32_t> blocks;  // empty: contiguous, in `slot`
  int32_t slot = 0;
  int cached_tokens = 0;  // there already, from its own prefix cache: not sent again
  KvView view() const {
    return {pool, layout, blocks.empty() ? nullptr : blocks.data(), slot};
  }
};

// Control messages. For every ReserveKv a decode instance gets exactly one KvDelivered or
// ReservationCancelled, and until then its reservation stands.
struct StartRequest {  // conductor -> prefill or colocated
  SequencePtr sequence;
};
struct ReserveKv {  // prefill -> decode, when the prompt's first step begins
  std::shared_ptr<const Request> request;
  int prefill_instance;
};
struct KvReserved {  // decode -> prefill
  uint64_t request_id;
  KvDestination destination;  // empty for a zero-copy transport
};
struct KvDelivered {  // prefill -> decode
  uint64_t request_id;
  std::vector<SequencePtr> choices;  // at least one; kv is not set
  bool kv_arrived;                   // false: the transfer failed, the prompt must be computed again
  std::optional<KvHandover> handover;  // zero-copy
};
struct ReservationCancelled {  // prefill -> decode
  uint64_t request_id;
};
using Message = std::variant<StartRequest, ReserveKv, KvReserved, KvDelivered, ReservationCancelled>;

struct InstanceOptions {
  std::string name;
  Role role = Role::colocated;
  StreamKv stream_kv = StreamKv::layer;
  EngineOptions engine;
};

class Instance final : private EngineHooks {
 public:
  Instance(InstanceOptions options, std::unique_ptr<Model> model, std::unique_ptr<KvMemory> memory,
           std::unique_ptr<KvTransport> transport, Clock& clock);

  // Before the first turn: peers[i] is the instance that messages and placements call i.
  void connect(std::vector<Instance*> peers, int self);

  void send(Message message) { mailbox_.send(std::move(message)); }
  void poke() { mailbox_.poke(); }

  // One turn of the loop: messages, reservations, transfers, one engine step. False: nothing moved.
  bool turn();
  // Turns until `stop` is set; sleeps when there is nothing to do.
  void run(const std::atomic<bool>& stop);
  // After the last turn of every instance: whatever is still inside ends with `reason`.
  void shut_down(FinishReason reason, const std::string& error);

  const InstanceOptions& options() const { return options_; }
  const KvMemory& memory() const { return *memory_; }
  KvMemory& memory() { return *memory_; }
  InstanceStats stats() const;

  // Load as the conductor counts it, ahead of what the instance has noticed.
  std::atomic<int> queued_requests{0};      // placed here, not started
  std::atomic<int64_t> queued_tokens{0};    // uncached prompt tokens placed here, prompt not done
  std::atomic<int> decoding_sequences{0};   // placed here to decode, not ended

 private:
  // A prompt on its way out: from its first step until its KvDelivered or ReservationCancelled is sent.
  struct Outgoing {
    int decode_instance = -1;
    std::optional<KvDestination> destination;
    std::vector<int> sent;  // [n_layers]: tokens already posted
    struct Flight {
      TransferId id;
      KvLease lease;  // the source blocks stay while they are read
    };
    std::vector<Flight> in_flight;
    bool failed = false;
    bool cancelled = false;
    KvHandle kv = kNoKv;                // set with `choices`
    std::vector<SequencePtr> choices;   // the prompt is done: waiting for its transfers
  };
  // A promise of room to a prefill instance.
  struct Reservation {
    KvHandle kv = kNoKv;  // kNoKv for a zero-copy transport
    KvLease lease = 0;
    int choices = 1;
    int cached_tokens = 0;
  };

  void receive_reservations();
  void handle(StartRequest message);
  void handle(ReserveKv message);
  void handle(KvReserved message);
  void handle(KvDelivered message);
  void handle(ReservationCancelled message);
  bool try_reserve();
  bool reserve_one(const ReserveKv& request);
  void send_kv(Outgoing& out, KvHandle kv, int layer_begin, int layer_end, int token_end);
  bool try_deliver(uint64_t request_id, Outgoing& out);
  bool poll_transfers();
  void publish();

  void prefill_started(const Sequence& sequence) override;
  bool layerwise() const override { return options_.stream_kv == StreamKv::layer; }
  void kv_written(Sequence& sequence, int layer_begin, int layer_end, int token_begin,
                  int token_end) override;
  void prefill_done(std::vector<SequencePtr> choices) override;
  void prefill_cancelled(const Sequence& sequence) override;

  InstanceOptions options_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvMemory> memory_;
  std::unique_ptr<KvTransport> transport_;
  Clock& clock_;
  Engine engine_;
  std::vector<Instance*> peers_;
  int self_ = -1;

  Mailbox<Message> mailbox_;
  std::vector<Message> inbox_;  // taken, not handled
  std::unordered_map<uint64_t, Outgoing> outgoing_;
  std::deque<ReserveKv> remote_prefilling_;  // asked for room, not yet granted
  std::unordered_map<uint64_t, Reservation> reservations_;
  int reserved_choices_ = 0;
  TransferPlan plan_;
  int64_t transfers_ = 0, transfer_bytes_ = 0, transfer_descriptors_ = 0;
  double transfer_seconds_ = 0;

  mutable std::mutex stats_mutex_;
  InstanceStats published_;
};

}  // namespace xpyd
