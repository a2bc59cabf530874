// The control messages between the conductor and the instances. They are plain values. An instance of this process gets
// them in its mailbox. Between processes disagg/processes/codec.h writes the same structs as bytes. Times (members that
// end in _s and are no durations) are Clock seconds of the process that holds the message; the codec sends their age.
//
// An attempt is one try to serve one or all choices of a request at one placement. Its number is never used again, so a
// message about an attempt that was given up names an unknown number and is ignored. Messages from one sender to one
// receiver arrive in order and once. If one of them is in another process, they pass through the conductor's, and those
// on their way are lost when the instance's channel to it ends. Messages from two senders may overtake each other.
//
// A new message needs a struct and a place in Message here, its fields in processes/codec_fields.h, and a handle() in a
// part of the instance or an on() in the conductor.
//
// Thread safety: plain values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "allocator/kv/kv_shards.h"
#include "allocator/kv_memory.h"
#include "batch/sequence.h"
#include "disagg/service.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

using InstanceId = PeerId;  // never reused: an instance that joins again gets a new one
inline constexpr InstanceId kConductor = -1;
using AttemptId = uint64_t;

// How P and D share one attempt. All attempts of a cluster have the same order or are local (handover/kv_room.h).
enum class DisaggOrder : uint8_t {
  local,         // one instance does both phases
  push,          // P first; D reserves blocks when P starts, and P writes while it computes
  pull,          // P first; D reserves blocks when P is done, and reads
  decode_first,  // D reserves blocks; any P takes the prompt from the global queue and writes into them
};

// When the KV of a prompt is transferred: after each layer of each chunk, after each chunk, or at the end.
enum class StreamKv : uint8_t { layer, chunk, request };

// Where one sequence's KV lies on the instance that sends this, for a peer that may write or read it. The blocks are
// the same in every rank's memory.
struct KvPlace {
  RemoteKey registration;       // the remote key
  std::vector<int32_t> blocks;  // empty: contiguous, in `slot`
  int32_t slot = 0;
  int cached_tokens = 0;  // tokens that are there already, and are not sent
};

// The description of an instance for the conductor and the other instances.
struct InstanceInfo {
  InstanceId id = -1;
  std::string name;  // "P0"
  Role role = Role::colocated;
  KvLayout layout;  // of the whole model's KV; each rank has its part of the shape
  KvShards shards;  // its ranks
  int stages = 1;   // pipeline stages, which compute different waves at the same time; each takes the time of a step
  int capacity_blocks = 0, block_tokens = 0;
  int tier_blocks = 0;  // capacity of its offload tiers, host and disk
  int max_batch = 0;
  std::string address;  // of its transport
};

// ---- Conductor -> instance.

// The part of a prompt's prefix to fetch from another instance before the rest is computed (pool/fetcher.h).
struct FetchOrder {
  InstanceId holder = -1;  // has the whole prefix; -1: nothing is fetched
  int tokens = 0;          // length of the prefix
  double worth_s = 0;      // seconds that computing it would take
  double limit_s = 0;      // seconds that the fetch may take
};
struct StartRequest {
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
  bool remote = false;     // P and D are two instances
  InstanceId decode = -1;  // push, pull: that instance
  FetchOrder fetch;
};
struct AbortAttempt {  // the attempt ends with `abort`, on the instance that has it
  AttemptId attempt = 0;
};
struct PeerJoined {
  InstanceInfo info;
};
struct PeerGone {
  InstanceId id = -1;
};
struct ClearPrefixCache {};
// The answer to a process's JoinRequest. The process sends Joined when it can serve.
struct Welcome {
  InstanceId id = -1;
  std::string name;
  Role role = Role::colocated;
  double lease_s = 0;
  bool report_cache = false;  // the instance sends CacheReports
  bool local = true;          // decode instances may get prompts to compute (DisaggPolicy)
  DisaggOrder order = DisaggOrder::push;
};
// The instance gets no more requests. It ends, or joins again in another role.
struct Retire {
  bool rejoin = false;
  Role role = Role::colocated;
};

// ---- Instance -> conductor.

struct TokenOf {
  AttemptId attempt = 0;
  int index = 0;  // position of the token in the choice's output; for an end without a token, the output's length
  TokenEvent event;
};
struct AttemptProgress {
  // P's first step has begun; P has computed the prompt; D has the KV; D has reserved blocks for it.
  enum Stage : uint8_t { started, prompt_done, joined, granted };
  AttemptId attempt = 0;
  Stage stage = started;
};
struct AttemptFailed {  // this instance has given the attempt up
  AttemptId attempt = 0;
  std::string why;
};
// With leases only: after a step that begins or ends a choice, when the instance becomes idle, and with each renewal.
struct Report {
  std::shared_ptr<const InstanceStats> stats;  // not in place: every Message is as large as the largest one
};
// The full blocks that the prefix cache, or an offload tier below it, has gained and lost since the last report, by
// their chained hashes (allocator/prefix_log.h).
struct CacheReport {
  Tier tier = Tier::device;
  std::vector<uint64_t> stored, removed;
};
struct JoinRequest {
  Role role = Role::colocated;
};
struct Joined {
  InstanceInfo info;
};
struct LeaveRequest {};  // asks for Retire

// ---- Decode -> conductor's global prefill queue -> prefill (decode_first).

struct PrefillJob {
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
  InstanceId decode = -1;
};

// ---- Prefill <-> decode.

// P -> D (push, decode_first): the prompt's first step begins. With --reservation escrow: P has reserved its blocks.
struct ReserveKv {
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
};
struct KvReserved {  // D -> P
  AttemptId attempt = 0;
  KvPlace destination;  // empty for a zero-copy transport
};
struct KvDelivered {  // P -> D (push, decode_first): all transfers are posted, and may still be in flight
  AttemptId attempt = 0;
  std::vector<ChoiceState> choices;    // at least one; decode_first: none, because D has the sequence
  bool kv_arrived = false;             // false: the transfer failed, and D computes the prompt
  int posts = 0;                       // transfers that must arrive in the registration
  std::optional<KvHandover> handover;  // zero-copy
};
// P -> D, or D -> P: the sender does nothing more for this attempt. After KvDelivered: a transfer failed.
struct ReservationCancelled {
  AttemptId attempt = 0;
};
struct KvOffered {  // P -> D (pull)
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  std::vector<ChoiceState> choices;
  KvPlace source;
};
struct KvTaken {  // D -> P (pull): P may free the blocks
  AttemptId attempt = 0;
};
struct KvRenewed {  // in both directions: the sender still has these attempts
  std::vector<AttemptId> attempts;
};

// ---- Conductor -> a decode instance that gets a copy of a prompt's KV (--decode-copies).

struct CopyKv {  // P has computed the prompt; the receiver reads it from P into its prefix cache
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  InstanceId holder = -1;  // P
  int tokens = 0;          // length of the prefix to read
};

// ---- Prefill -> holder of a prefix, and back (pool/).

struct FetchKv {  // asks to read the KV of `tokens` from `begin` on; the reader computes the last token itself
  AttemptId attempt = 0;
  uint64_t salt = 0;
  int begin = 0;
  std::vector<int32_t> tokens;
};
struct KvLent {
  AttemptId attempt = 0;
  int tokens = 0;  // length of the prefix that the holder has; begin or less: nothing is lent
  KvPlace source;  // where the tokens from `begin` on can be read
};
struct FetchOver {  // the reader does not read any more
  AttemptId attempt = 0;
};

using Message = std::variant<StartRequest, AbortAttempt, PeerJoined, PeerGone, TokenOf, AttemptProgress, AttemptFailed,
                             Report, PrefillJob, ReserveKv, KvReserved, KvDelivered, ReservationCancelled, KvOffered,
                             KvTaken, KvRenewed, ClearPrefixCache, Welcome, Retire, JoinRequest, Joined, LeaveRequest,
                             CacheReport, FetchKv, KvLent, FetchOver, CopyKv>;

struct Envelope {
  InstanceId from = kConductor, to = kConductor;
  Message message;
};

// The message bus: mailboxes, channels between processes, or a simulated network. send() does not wait for the
// receiver. An instance handles its messages between two steps. If the conductor is in this process, it handles its
// messages inside send(), on the sender's thread.
//
// Thread safety: any thread, also while a message is handled.
class MessageBus {
 public:
  virtual ~MessageBus() = default;
  virtual void send(InstanceId from, InstanceId to, Message message) = 0;
};

}  // namespace xpyd::disagg
