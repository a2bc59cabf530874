// The control messages: what the conductor and the instances tell each other. Plain values: within a process they move
// through mailboxes as they are, between processes disagg/processes/codec.h writes the same structs as bytes.
//
// An attempt is one try at serving one or all choices of a request, at one placement. Its number is
// never used again: what belongs to an attempt that was given up names a number that nobody knows
// any more, and is dropped. Messages from one sender to one receiver arrive in order, or the
// connection ends; messages from two senders may overtake each other.
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

using InstanceId = PeerId;  // never reused, so it names an incarnation
inline constexpr InstanceId kConductor = -1;
using AttemptId = uint64_t;

// How P and D share one attempt. All of a cluster are of one order, or local (handover/kv_room.h).
enum class DisaggOrder : uint8_t {
  local,         // one instance does both
  push,          // P first; D reserves when P starts, P writes while it computes
  pull,          // P first; D reserves when P is done, and reads
  decode_first,  // D reserves, any P takes the prompt from the global queue and writes into D's blocks
};

// When the KV of a prompt crosses: as each layer of each chunk is done, after each chunk, or at the end.
enum class StreamKv : uint8_t { layer, chunk, request };

// Where one sequence's KV is, on the instance that sends this, for a peer that may write or read
// there: in the same blocks of every rank's memory.
struct KvPlace {
  RemoteKey registration;
  std::vector<int32_t> blocks;  // empty: contiguous, in `slot`
  int32_t slot = 0;
  int cached_tokens = 0;            // there already: not sent again
  std::vector<uint64_t> checksums;  // pull: kv_checksums() of it all; empty: not computed
};

// What the others must know of an instance.
struct InstanceInfo {
  InstanceId id = -1;
  std::string name;  // "P0"
  Role role = Role::colocated;
  KvLayout layout;  // of its memory; on several ranks each has its part of the shape
  KvShards shards;  // its ranks
  int stages = 1;   // that compute different waves at the same time: what a step takes, each of them takes
  int capacity_blocks = 0, block_tokens = 0;
  int tier_blocks = 0;  // that its host and disk tiers have room for
  int max_batch = 0;
  std::string address;  // of its transport
  std::string control;  // where it takes channels of its peers; empty: a thread of the conductor's process
};

// ---- Conductor -> instance.

// Which part of a prompt's prefix is got from others before it is computed (pool/fetcher.h).
struct FetchOrder {
  std::vector<InstanceId> holders;  // of all that is wanted, each; empty: nothing is fetched
  int tokens = 0;                   // the prefix that they have
  double worth_s = 0;               // what computing it would take
  double limit_s = 0;               // what fetching it may take
  bool keep = true;                 // for others, too (pool/replication.h)
};
struct StartRequest {
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
  bool remote = false;     // its KV changes hands
  InstanceId decode = -1;  // push, pull: the peer
  FetchOrder fetch;
};
struct AbortAttempt {  // ends with `abort`, wherever it is
  AttemptId attempt = 0;
};
struct PeerJoined {
  InstanceInfo info;
};
struct PeerGone {
  InstanceId id = -1;
};
struct PeerBroken {  // from whoever keeps the connections: one to a peer broke, and words were lost
  InstanceId id = -1;
};
struct ClearPrefixCache {};
// To a process that wants to be an instance, as the answer to its JoinRequest: it sends Joined when it can serve.
struct Welcome {
  InstanceId id = -1;
  std::string name;
  Role role = Role::colocated;
  double lease_s = 0;
  std::string pool;           // where the one pool of all instances is (transport/handoff/handoff_pool.h); empty: none
  bool report_cache = false;  // CacheReports are wanted
  bool local = true;          // a decode instance may be given prompts (DisaggPolicy)
  DisaggOrder remote = DisaggOrder::push;
};
// Nothing is placed there any more: it ends, or joins anew in another role.
struct Retire {
  bool rejoin = false;
  Role role = Role::colocated;
};

// ---- Instance -> conductor.

struct TokenOf {
  AttemptId attempt = 0;
  int index = 0;  // of this token among the choice's output; of an end without a token: how many it has
  TokenEvent event;
};
struct AttemptProgress {
  enum Stage : uint8_t { started, prompt_done, joined, granted };  // D's: its KV is there; there is room for it
  AttemptId attempt = 0;
  Stage stage = started;
};
struct AttemptFailed {  // this instance has given it up
  AttemptId attempt = 0;
  AttemptFailure reason = AttemptFailure::given_up;
  std::string why;
};
struct Report {  // every so often
  InstanceStats stats;
};
// Full blocks by their chained hashes (allocator/prefix_log.h): what became findable in its prefix
// cache, or a tier below, and what went, since the last report.
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
struct LeaveRequest {};  // it would like to Retire

// ---- Decode -> conductor's global prefill queue -> prefill (decode_first).

struct PrefillJob {
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
  InstanceId decode = -1;
};

// ---- Prefill <-> decode.

struct ReserveKv {  // P -> D (push): the prompt's first step begins; with reservations: P has what it needs
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  ChoiceState state;
};
struct KvReserved {  // D -> P
  AttemptId attempt = 0;
  KvPlace destination;  // empty for a zero-copy transport
};
struct KvDelivered {  // P -> D (push, decode_first): all is posted, and may still be on its way
  AttemptId attempt = 0;
  std::vector<ChoiceState> choices;    // at least one; decode_first: none, D has the sequence
  bool kv_arrived = false;             // false: the transfer failed, D computes the prompt itself
  int posts = 0;                       // that must arrive in the window
  std::vector<uint64_t> checksums;     // kv_checksums() of what was sent; empty: not computed
  std::optional<KvHandover> handover;  // zero-copy
};
// P -> D, or D -> P: nothing (more) will come of this attempt here. Behind KvDelivered: a post failed.
struct ReservationCancelled {
  AttemptId attempt = 0;
};
struct KvOffered {  // P -> D (pull)
  AttemptId attempt = 0;
  std::shared_ptr<const Request> request;
  std::vector<ChoiceState> choices;
  KvPlace source;
};
struct KvTaken {  // D -> P (pull, and blocks between processes): P may free it
  AttemptId attempt = 0;
};
struct KvRenewed {  // either way: these attempts still stand here
  std::vector<AttemptId> attempts;
};

// ---- Prefill -> holder of a prefix, and back (pool/).

struct FetchKv {  // it wants to read the KV of tokens from `begin` on, of all but the last of these
  AttemptId attempt = 0;
  uint64_t salt = 0;
  int begin = 0;
  std::vector<int32_t> tokens;
};
struct KvLent {
  AttemptId attempt = 0;
  int tokens = 0;  // of these, from the first one on, that are there; begin or less: nothing is lent
  KvPlace source;  // in whose window those from `begin` on can be read
};
struct FetchOver {  // nobody reads, or will
  AttemptId attempt = 0;
};

using Message = std::variant<StartRequest, AbortAttempt, PeerJoined, PeerGone, TokenOf, AttemptProgress, AttemptFailed,
                             Report, PrefillJob, ReserveKv, KvReserved, KvDelivered, ReservationCancelled, KvOffered,
                             KvTaken, KvRenewed, PeerBroken, ClearPrefixCache, Welcome, Retire, JoinRequest, Joined,
                             LeaveRequest, CacheReport, FetchKv, KvLent, FetchOver>;

struct Envelope {
  InstanceId from = kConductor, to = kConductor;
  Message message;
};

// How messages leave: mailboxes, channels between processes, or a simulated network.
//
// Thread safety: any thread.
class MessageBus {
 public:
  virtual ~MessageBus() = default;
  virtual void send(InstanceId from, InstanceId to, Message message) = 0;
};

}  // namespace xpyd::disagg
