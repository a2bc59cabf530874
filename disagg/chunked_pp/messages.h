// The messages between an instance's head and its stages in other processes (README.md).
//
//   head -> stage   Start       the instance that the stage belongs to: ranks, KV memory, limits
//   stage -> head   Ready       its part of the model is loaded and its KV memory is made; names the files of the KV
//   head -> stage   Peers       addresses of the stages before and behind it
//   stage -> head   Connected   a remote key for each place that takes activations
//   head -> stage   Wave        a step; sent to all stages at once, in order
//   stage -> head   Progress    the stage has written the KV of more layers, or has computed the wave
//
// If the stages are on other hosts, the head cannot map their KV. Then there are also
//
//   head -> stage   Copies          block copies, in order with the waves
//                   ConnectPeer, Leave     an instance that takes KV: connect to it, disconnect from it
//                   Transfer, Cancel    a transfer of a KvTransport
//   stage -> head   Outcome         the end of a ConnectPeer or a Transfer
//
// Thread safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "disagg/net/channel.h"
#include "disagg/net/fields.h"
#include "disagg/service.h"
#include "disagg/transport/transport.h"
#include "model/model.h"

namespace xpyd::disagg::ranks {

inline constexpr int kMaxPlaces = 4096;  // most places of a boundary
inline constexpr int64_t kMaxKvTokens = int64_t(1) << 36;

struct Start {
  int32_t tp = 1, pp = 1, places = 1, step_tokens = 1, max_logits = 0;
  uint8_t dtype = 0;                   // of weights; must equal the stage's own option
  uint8_t kv_dtype = 0, kv_order = 0;  // of the pool
  int32_t block_tokens = 0, n_blocks = 0;
  bool far = false;  // the stage is on another host and does not share its KV with the head
  int32_t instance = 0;
  std::string transport;  // transport of activations, and of KV that leaves the instance
};
template <class A>
void fields(A& a, typename A::template Ref<Start> s) {
  auto& [tp, pp, places, step_tokens, max_logits, dtype, kv_dtype, kv_order, block_tokens, n_blocks, far, instance,
         transport] = s;
  a.number("tp", tp, 1, kMaxRanks);
  a.number("pp", pp, 1, kMaxRanks);
  a.number("places", places, 1, kMaxPlaces);
  a.number("step_tokens", step_tokens, 1, 1 << 20);
  a.number("max_logits", max_logits, 0, 1 << 20);
  XPYD_EACH(a, dtype);
  a.number("kv_dtype", kv_dtype, 0, uint8_t(kLastKvDtype));
  a.number("kv_order", kv_order, 0, uint8_t(KvOrder::token_major));
  a.number("block_tokens", block_tokens, 1, 1 << 30);
  a.number("n_blocks", n_blocks, 1, 1 << 30);
  XPYD_EACH(a, far);
  a.number("instance", instance, 0, INT32_MAX);
  XPYD_EACH(a, transport);
}

struct Ready {
  std::string address;             // of the stage's transport
  std::vector<std::string> files;  // [tp] of the KV (transport/shared_memory.h); on another host: empty
};
XPYD_FIELDS(Ready, address, files)

struct Peers {
  std::string previous, next;  // addresses; the first stage has no previous one
};
XPYD_FIELDS(Peers, previous, next)

struct Connected {
  std::vector<RemoteKey> registrations;  // remote keys, [places]; the first stage has none
};
XPYD_FIELDS(Connected, registrations)

// A StepInput without the parts that differ from rank to rank.
struct Wave {
  uint32_t number = 0;
  bool by_layer = false;    // the stage sends Progress after each layer
  bool contiguous = false;  // the KV views have slots instead of block tables
  RemoteKey result;         // remote key of the place that takes this stage's activations, or the logits
  std::vector<int32_t> token_ids, q_offsets, kv_lengths, logit_rows;
  std::vector<int32_t> blocks;  // block tables of all sequences, one behind the other; if contiguous, a slot for each
};
XPYD_FIELDS(Wave, number, by_layer, contiguous, result, token_ids, q_offsets, kv_lengths, logit_rows, blocks)

struct Progress {
  uint32_t wave = 0, layers = 0;  // layers of the model, from the first, whose KV is written
  bool done = false;              // the stage has computed the wave
  double seconds = 0;             // if done: how long it computed
  ExpertLoad experts;             // if done: the work of its experts so far
};
template <class A>
void fields(A& a, typename A::template Ref<Progress> s) {
  auto& [wave, layers, done, seconds, experts] = s;
  XPYD_EACH(a, wave, layers, done, experts);
  a.number("seconds", seconds, 0, 1e12);
}

// A range of a stage's KV to copy or to transfer.
struct KvBytes {
  uint32_t rank = 0;  // tensor-parallel rank in the stage
  uint64_t at = 0;    // source offset in that rank's memory
  uint64_t to = 0;    // Copies: destination offset there; Transfer: address in the peer's memory
  uint64_t bytes = 0;
};
XPYD_FIELDS(KvBytes, rank, at, to, bytes)
inline constexpr size_t kMaxPieces = 1 << 18;  // most pieces of a message

struct Copies {
  std::vector<KvBytes> pieces;
};
XPYD_FIELDS(Copies, pieces)

struct ConnectPeer {
  uint32_t peer = 0;
  std::string address;
};
XPYD_FIELDS(ConnectPeer, peer, address)

struct Leave {
  uint32_t peer = 0;
};
XPYD_FIELDS(Leave, peer)

struct Transfer {
  uint64_t id = 0;  // the head's number of the transfer
  uint32_t peer = 0;
  RemoteKey registration;
  bool more = false;  // another Transfer of this id follows with the next pieces
  std::vector<KvBytes> pieces;
};
XPYD_FIELDS(Transfer, id, peer, registration, more, pieces)

struct Cancel {
  uint64_t id = 0;
};
XPYD_FIELDS(Cancel, id)

struct Outcome {
  bool of_post = false;
  uint64_t id = 0;    // of the Transfer; of a ConnectPeer, the peer
  std::string error;  // empty: the transfer is done, or the peer is connected
};
XPYD_FIELDS(Outcome, of_post, id, error)

// A message's frame type is its position in this list.
using All =
    std::tuple<Start, Ready, Peers, Connected, Wave, Progress, Copies, ConnectPeer, Leave, Transfer, Cancel, Outcome>;

template <class T, size_t i = 0>
constexpr uint16_t type_of() {
  if constexpr (std::is_same_v<T, std::tuple_element_t<i, All>>)
    return uint16_t(kFirstFrameType + i);
  else
    return type_of<T, i + 1>();
}
template <class T>
inline constexpr uint16_t kType = type_of<T>();

template <class T>
bool say_to(const ChannelPtr& channel, const T& message) {
  return channel->send(kType<T>, to_bytes(message));
}

}  // namespace xpyd::disagg::ranks
