// Shared by the tests of attention. The contents of a cache are a function of (sequence, layer, K or V, token, head,
// dim), so that every layout, chunking and batch can hold the same numbers. Steps run over such a cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/kv_dtype/kv_row.h"
#include "base/random.h"

namespace xpyd::testing {

// Uniform in [-1, 1), and the same for the same indices.
inline float number(int what, int seq, int layer, int token, int head, int d) {
  uint64_t key = uint64_t(what);
  for (int i : {seq, layer, token, head, d}) key = key * 1000003u + uint64_t(i);
  return float(2 * Random(key * 0x9e3779b97f4a7c15u).uniform() - 1);
}
inline float v_number(int seq, int layer, int token, int head, int d) { return number(2, seq, layer, token, head, d); }

struct CaseMemory {
  const char* name;
  KvOrder order;
  int block_tokens;  // 0: contiguous slots
};
inline constexpr CaseMemory kMemories[] = {
    {"contiguous layer_major", KvOrder::layer_major, 0}, {"contiguous token_major", KvOrder::token_major, 0},
    {"paged 16 layer_major", KvOrder::layer_major, 16},  {"paged 16 token_major", KvOrder::token_major, 16},
    {"paged 1 layer_major", KvOrder::layer_major, 1},    {"paged 1 token_major", KvOrder::token_major, 1},
    {"paged 64 layer_major", KvOrder::layer_major, 64},  {"paged 64 token_major", KvOrder::token_major, 64},
};

// KV of `lengths.size()` sequences. Every byte is 0xff until it is written: NaN in f32, bf16 and fp8, and a NaN scale
// and zero.
struct Cache {
  KvLayout layout;
  std::vector<std::byte> pool;
  std::vector<std::vector<int32_t>> tables;
  std::vector<KvView> views;

  Cache(const KvShape& shape, const CaseMemory& memory, const std::vector<int>& lengths, uint64_t seed = 1) {
    int longest = 1, n_blocks = 0;
    for (int n : lengths) longest = std::max(longest, n);
    int block = memory.block_tokens ? memory.block_tokens : longest;
    for (int n : lengths) n_blocks += memory.block_tokens ? (n + block - 1) / block : 1;
    layout = {shape, memory.order, block, n_blocks + 2};  // two blocks belong to no sequence
    pool.assign(layout.pool_bytes(), std::byte{0xff});
    std::vector<int32_t> free;
    for (int b = 0; b < layout.n_blocks; ++b) free.push_back(b);
    Random random(seed);
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[random.below(i)]);
    for (int n : lengths) {
      std::vector<int32_t> table;
      for (int t = 0; t < std::max(n, 1); t += block) table.push_back(free.back()), free.pop_back();
      tables.push_back(table);
    }
    for (size_t s = 0; s < lengths.size(); ++s)
      views.push_back(memory.block_tokens ? KvView{pool.data(), &layout, tables[s].data(), 0}
                                          : KvView{pool.data(), &layout, nullptr, tables[s][0]});
  }
  Cache(const Cache&) = delete;

  // Writes tokens [begin, end) of a sequence in all layers row by row, independently of append_kv.
  void fill(int s, int begin, int end) {
    std::vector<float> row(size_t(layout.shape.head_dim));
    for (int layer = 0; layer < layout.shape.n_layers; ++layer)
      for (int kv = 0; kv < 2; ++kv)
        for (int t = begin; t < end; ++t)
          for (int h = 0; h < layout.shape.n_kv_heads; ++h) {
            for (int d = 0; d < layout.shape.head_dim; ++d) row[size_t(d)] = number(kv + 1, s, layer, t, h, d);
            put_row(s, layer, kv, t, h, row.data());
          }
  }
  void put_row(int s, int layer, int kv, int t, int h, const float* x) {
    const KvShape& shape = layout.shape;
    write_kv_row(shape.dtype, shape.head_dim, x, views[size_t(s)].row(layer, kv, t, h));
  }
  // Writes one element of f32 or bf16.
  void put(int s, int layer, int kv, int t, int h, int d, float x) {
    std::byte* row = views[size_t(s)].row(layer, kv, t, h);
    if (layout.shape.dtype == Dtype::f32) {
      std::memcpy(row + 4 * d, &x, 4);
    } else {
      bf16 y = to_bf16(x);
      std::memcpy(row + 2 * d, &y, 2);
    }
  }
};

// Part of a step: `n_q` new tokens of sequence `seq`, which then has `kv_length` tokens.
struct Part {
  int seq, n_q, kv_length;
};

// The arguments of one call. A token's q depends only on its sequence and position.
struct Step {
  std::vector<int32_t> q_offsets = {0}, kv_lengths;
  std::vector<KvView> views;
  std::vector<float> q, out;
  AttentionArgs args;

  Step(const Cache& cache, const std::vector<Part>& parts, int n_heads, int layer, int window, float sharpness = 4.0f) {
    const KvShape& shape = cache.layout.shape;
    for (const Part& part : parts) {
      q_offsets.push_back(q_offsets.back() + part.n_q);
      kv_lengths.push_back(part.kv_length);
      views.push_back(cache.views[size_t(part.seq)]);
      for (int p = part.kv_length - part.n_q; p < part.kv_length; ++p)
        for (int h = 0; h < n_heads; ++h)
          for (int d = 0; d < shape.head_dim; ++d) q.push_back(sharpness * number(3, part.seq, layer, p, h, d));
    }
    out.assign(q.size(), std::nanf(""));
    args = {.q = q.data(),
            .out = out.data(),
            .q_offsets = q_offsets,
            .kv_lengths = kv_lengths,
            .views = views,
            .layer = layer,
            .n_heads = n_heads,
            .sliding_window = window,
            .scale = 1.0f / std::sqrt(float(shape.head_dim))};
  }
  Step(const Step&) = delete;
};

struct Heads {
  int n_heads, n_kv_heads, head_dim;
};

inline std::vector<int> lengths_of(const std::vector<Part>& parts) {
  std::vector<int> lengths;
  for (const Part& part : parts) lengths.push_back(part.kv_length);
  return lengths;
}

// Returns the element that the cache holds there.
inline double cached(const AttentionArgs& args, int s, int kv, int t, int h, int d) {
  const KvView& view = args.views[size_t(s)];
  const KvShape& shape = view.layout->shape;
  return double(kv_element(shape.dtype, shape.head_dim, view.row(args.layer, kv, t, h), d));
}

// Calls f(sequence, KV head, begin, end, row) for each query and head. The query sees tokens [begin, end), and `row` is
// where its row of q and out begins.
template <class F>
void each_query(const AttentionArgs& args, F&& f) {
  for (int s = 0; s < int(args.views.size()); ++s) {
    const KvShape& shape = args.views[size_t(s)].layout->shape;
    for (int i = args.q_offsets[size_t(s)]; i < args.q_offsets[size_t(s) + 1]; ++i) {
      const int end = args.kv_lengths[size_t(s)] - args.q_offsets[size_t(s) + 1] + i + 1;
      const int begin = args.sliding_window ? std::max(0, end - args.sliding_window) : 0;
      for (int h = 0; h < args.n_heads; ++h)
        f(s, h / (args.n_heads / shape.n_kv_heads), begin, end, size_t((i * args.n_heads + h) * shape.head_dim));
    }
  }
}

inline bool same_bits(const float* a, const float* b, size_t n) { return std::memcmp(a, b, n * sizeof(float)) == 0; }

}  // namespace xpyd::testing
