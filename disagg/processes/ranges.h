// The ranges of the numbers in messages: one row for each kind, and the names of the fields of that kind. Both sides
// agree on the limits before they talk, because the handshake compares model and context (NodeIdentity::fingerprint). A
// number beyond them is therefore an attack or a bug, and its sender is disconnected.
#pragma once

#include <climits>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "allocator/pool/block_ledger.h"

namespace xpyd::disagg {

// The limits of the model and its context. The defaults fit any model.
struct Limits {
  int vocab = INT_MAX;
  int max_model_len = INT_MAX;  // prompt and output together
  int n_layers = 1 << 12, n_kv_heads = 1 << 12, head_dim = 1 << 12;
};

inline constexpr int kMaxChoices = 8;  // of a request

enum class Number : uint8_t {
  token,             // a token id
  token_or_none,     // -1: none
  tokens,            // the length of a sequence
  tokens_some,       // … at least 1
  choice,            // of a request, counted from 0
  choices,           // number of choices
  top_logprobs,      // -1: not wanted; also drafts
  instance,          // InstanceId
  instance_or_none,  // -1: none, or the conductor
  block,             // its pool has a tighter bound
  layers,
  heads,
  head_dim,
  ranks,    // tp or pp of an instance
  member,   // process that shares a pool
  count,    // small enough that two can be added
  total,    // bytes or events; several can be added
  natural,  // not negative
  any,
  n_kinds,
  time = n_kinds  // Clock seconds
};

struct Bounds {
  int64_t least, most;  // inclusive
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
      {0, limits.n_layers},            // layers
      {0, limits.n_kv_heads},          // heads
      {0, limits.head_dim},            // head_dim
      {1, kRanks},                     // ranks
      {0, BlockLedger::kMembers - 1},  // member
      {0, kMost},                      // count
      {-kTotal, kTotal},               // total
      {0, INT_MAX},                    // natural
      {INT_MIN, INT_MAX},              // any
  };
  static_assert(std::size(table) == size_t(Number::n_kinds));
  return table[size_t(range)];
}

struct NamedNumbers {
  Number kind;
  std::string_view names;       // of integer fields
  std::string_view lists = {};  // of fields that are lists of integers
};
inline constexpr NamedNumbers kNamedNumbers[] = {
    {Number::token, "", "prompt output tokens stop_token_ids"},
    {Number::token_or_none, "token stop_token"},
    {Number::tokens, "tokens min_tokens cached_tokens index begin kept"},
    {Number::tokens_some, "max_tokens"},
    {Number::choice, "choice"},
    {Number::choices, "n stands_for"},
    {Number::top_logprobs, "top_logprobs prompt_logprobs most_drafts"},
    {Number::instance, "id", "holders"},
    {Number::instance_or_none, "decode"},
    {Number::block, "slot", "blocks"},
    {Number::layers, "n_layers"},
    {Number::heads, "n_kv_heads"},
    {Number::head_dim, "head_dim"},
    {Number::ranks, "tp pp stages"},
    {Number::member, "giver"},  // -1 is used only within a process
    {Number::natural, "rank"},
    {Number::any, "priority"},
    {Number::time, "arrival_s deadline_s queued_s scheduled_s time_s heartbeat_s"},
};

constexpr bool is_among(std::string_view name, std::string_view names) {
  for (size_t end; !names.empty(); names.remove_prefix(end < names.size() ? end + 1 : end)) {
    end = names.find(' ') < names.size() ? names.find(' ') : names.size();
    if (names.substr(0, end) == name) return true;
  }
  return false;
}

// Returns the kind of the field with this name and type: an int32_t or a list of them. An int64_t is always a total.
template <class T>
constexpr Number number_of(std::string_view name) {
  if (std::is_same_v<T, int64_t>) return Number::total;
  for (const NamedNumbers& row : kNamedNumbers)
    if (is_among(name, std::is_class_v<T> ? row.lists : row.names)) return row.kind;
  return Number::count;
}

// Returns the longest list of structs or texts with this name.
constexpr size_t most_of(std::string_view name) {
  return name == "choices" ? size_t{kMaxChoices} : name == "prompt_logprobs" ? size_t{1} << 20 : 64;
}

}  // namespace xpyd::disagg
