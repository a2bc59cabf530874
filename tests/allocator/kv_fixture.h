// KV bytes that identify their owner. The row of (prefix up to a token, salt, layer, K or V, head) holds a hash of all
// of these, as real KV depends on the whole prefix.
#pragma once

#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/pool/block_pool.h"
#include "allocator/vattention/page_group_rows.h"

namespace xpyd::testing {

inline constexpr KvShape kTinyShape{.n_layers = 2, .n_kv_heads = 2, .head_dim = 2};  // rows of 8 bytes

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 32)) * 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 29);
}

inline uint64_t row_pattern(uint64_t prefix, int layer, int kv, int head) {
  return mix(prefix, uint64_t(layer * 4 + kv * 2 + head));
}

// Returns a hash of tokens [0, i] and the salt for every i.
inline std::vector<uint64_t> prefixes(std::span<const int32_t> tokens, uint64_t salt) {
  std::vector<uint64_t> result;
  uint64_t hash = mix(0, salt);
  for (int32_t token : tokens) result.push_back(hash = mix(hash, uint64_t(uint32_t(token))));
  return result;
}

template <class F>  // f(row address, its pattern)
void each_row(const KvView& view, std::span<const int32_t> tokens, uint64_t salt, int begin, F&& f) {
  std::vector<uint64_t> prefix = prefixes(tokens, salt);
  for (int t = begin; t < int(tokens.size()); ++t)
    for (int layer = 0; layer < kTinyShape.n_layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int head = 0; head < kTinyShape.n_kv_heads; ++head)
          f(view.row(layer, kv, t, head), row_pattern(prefix[size_t(t)], layer, kv, head));
}

// Writes the rows of tokens [begin, tokens.size()).
inline void write_rows(const KvView& view, std::span<const int32_t> tokens, uint64_t salt, int begin) {
  each_row(view, tokens, salt, begin,
           [](std::byte* row, uint64_t pattern) { std::memcpy(row, &pattern, sizeof pattern); });
}

// Counts the rows of tokens [0, tokens.size()) that hold something else.
inline int wrong_rows(const KvView& view, std::span<const int32_t> tokens, uint64_t salt) {
  int wrong = 0;
  each_row(view, tokens, salt, 0,
           [&](std::byte* row, uint64_t pattern) { wrong += std::memcmp(row, &pattern, sizeof pattern) != 0; });
  return wrong;
}

inline KvOptions tiny_options(int block_tokens, int n_blocks, bool prefix_cache = true,
                              KvOrder order = KvOrder::layer_major, int max_tokens = 0) {
  KvOptions options;
  options.shape = kTinyShape;
  options.order = order;
  options.block_tokens = block_tokens;
  options.max_sequence_tokens = max_tokens;
  options.pool_bytes = size_t(n_blocks) * size_t(block_tokens) * kTinyShape.token_bytes();
  options.prefix_cache = prefix_cache;
  return options;
}

// A page group is 256 tokens of one plane, or 64 of all planes.
inline KvOptions vattention_options(int n_rows, int max_sequences, int max_tokens, KvShare share = KvShare::off,
                                    KvOrder order = KvOrder::layer_major) {
  KvOptions o;
  o.shape = kTinyShape;
  o.order = order;
  o.vattention = {.page_group_bytes = 4096, .max_sequences = max_sequences, .map_ahead = false, .share = share};
  o.max_sequence_tokens = max_tokens;
  o.pool_bytes = size_t(n_rows) * vattention_row_bytes(o);
  return o;
}

struct Memory {
  explicit Memory(const KvOptions& o, const char* scheme = "paged")
      : options(o), pool(make_block_pool(scheme, o).value()), kv(find_kv_scheme(scheme)->make(pool, o)) {}
  KvOptions options;
  std::shared_ptr<KvPool> pool;
  std::unique_ptr<KvMemory> kv;
};

// Extends a sequence to these tokens as an engine does: append, compute (write_rows), commit.
inline void extend(KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, uint64_t salt) {
  const int there = kv.written_tokens(handle);
  XPYD_CHECK(kv.append(handle, int(tokens.size()) - there));
  write_rows(kv.view(handle), tokens, salt, there);
  kv.commit(handle, tokens.subspan(size_t(there)));
}
// The same for a new sequence with this prompt.
inline KvReservation fill(KvMemory& kv, std::span<const int32_t> tokens, uint64_t salt) {
  const KvReservation r = kv.reserve(tokens, salt).value();
  extend(kv, r.handle, tokens, salt);
  return r;
}
inline int wrong_rows(const KvMemory& kv, KvHandle handle, std::span<const int32_t> tokens, uint64_t salt) {
  return wrong_rows(kv.view(handle), tokens, salt);
}

inline std::vector<int32_t> counting(int n, int32_t from = 100) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}
inline std::vector<int32_t> joined(std::vector<int32_t> a, std::span<const int32_t> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace xpyd::testing
