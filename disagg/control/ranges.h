// The numbers that messages hold: one row for each kind, and codec_fields.h says beside each field which kind it is.
// Both sides know the limits before they talk, as the handshake compares model and context (NodeIdentity::fingerprint):
// so a number beyond them is no misunderstanding, and who says it is not listened to any more.
#pragma once

#include <climits>
#include <cstdint>
#include <iterator>

#include "allocator/block_ledger.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg {

// Of the model and its context. As they stand: of any model.
struct Limits {
  int vocab = INT_MAX;
  int max_model_len = INT_MAX;  // tokens: prompt and output together
  int n_layers = 1 << 12, n_kv_heads = 1 << 12, head_dim = 1 << 12;
};

inline constexpr int kMaxChoices = 8;  // of a request

enum class Number : uint8_t {
  token,             // an id
  token_or_none,     // -1: none
  tokens,            // of one sequence: a length
  tokens_some,       // … of one at least
  choice,            // of a request, counted from 0
  choices,           // how many
  top_logprobs,      // -1: none are wanted
  instance,          // an InstanceId
  instance_or_none,  // -1: none, or the conductor
  block,             // of whose pool, only its owner's layout can say (check_place())
  post,              // a count of those of one window
  layers,
  heads,
  head_dim,
  ranks,    // of an instance, in each direction
  stage,    // of a pipeline; -1: none
  member,   // of a pool that processes share
  count,    // so that two of them can be added
  total,    // of bytes or events: so that some of them can be added
  natural,  // any that is not negative
  n_kinds
};

struct Bounds {
  int64_t least, most;  // both included
};

constexpr Bounds bounds(Number range, const Limits& limits) {
  constexpr int kMost = INT_MAX / 2, kRanks = 1024;
  constexpr int64_t kTotal = int64_t{1} << 61;
  const Bounds table[] = {
      {0, limits.vocab - 1},           // token
      {-1, limits.vocab - 1},          // token_or_none
      {0, limits.max_model_len},       // tokens
      {1, limits.max_model_len},       // tokens_some
      {0, kMaxChoices - 1},            // choice
      {1, kMaxChoices},                // choices
      {-1, 64},                        // top_logprobs
      {0, INT_MAX},                    // instance
      {-1, INT_MAX},                   // instance_or_none
      {0, INT_MAX},                    // block
      {0, int64_t{kMaxPostNumber}},    // post
      {0, limits.n_layers},            // layers
      {0, limits.n_kv_heads},          // heads
      {0, limits.head_dim},            // head_dim
      {1, kRanks},                     // ranks
      {-1, kRanks},                    // stage
      {0, BlockLedger::kMembers - 1},  // member
      {0, kMost},                      // count
      {-kTotal, kTotal},               // total
      {0, INT_MAX},                    // natural
  };
  static_assert(std::size(table) == size_t(Number::n_kinds));
  return table[size_t(range)];
}

}  // namespace xpyd::disagg
