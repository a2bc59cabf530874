// Tests RoPE with its norms, the sampler and the row hash on CUDA against plain loops, every element with a bound.
#include <cfloat>
#include <cmath>
#include <limits>

#include "attention/kv_dtype/kv_row.h"
#include "base/row_hash.h"
#include "model/cuda/ops_cuda.h"
#include "model/cuda/sampler_cuda.h"
#include "model/sampler.h"
#include "tests/model/cuda_fixture.h"

namespace xpyd::testing::ops_cuda_test {

constexpr double kEps = 1e-5;
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16};

// A row of width n adds n / (its threads) <= 32 squares one after the other, then 5 + 32 partial sums. A sum of
// positive terms is off by at most 69 u of itself, and its root by half of that. The rest is rounded a few times.
constexpr double kNormError = 40 * kU;

std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& weight) {
  double squares = 0;
  for (double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / double(x.size()) + kEps);
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * double(weight[i]);
  return out;
}

// Two sequences and padding: tokens 0..2 of a sequence at positions 4..6, and one token of another at position 0.
struct RopeCase {
  Dtype dtype, kv_dtype;
  KvOrder order;
  bool contiguous, bias, norm;
  int head_dim, n_heads, n_kv_heads;
};

void check_turn(const RopeCase& c) {
  CAPTURE(dtype_name(c.dtype), dtype_name(c.kv_dtype), int(c.order), c.contiguous, c.bias, c.norm, c.head_dim);
  cuda::Stream stream;
  Random random(4);
  const int n = 4, padded = 6, d = c.head_dim, half = d / 2, layer = 1, max_position = 8;
  const int width = (c.n_heads + 2 * c.n_kv_heads) * d, stride = width + 3;
  KvLayout layout{{2, c.n_kv_heads, d, c.kv_dtype}, c.order, c.contiguous ? 8 : 2, c.contiguous ? 3 : 9};
  const std::vector<int32_t> q_offsets = {0, 3, 4, 4, 4}, kv_lengths = {7, 1, 0, 0}, token_seqs = {0, 0, 0, 1, 0, 0},
                             positions = {4, 5, 6, 0, 0, 0};
  const std::vector<int32_t> tables = c.contiguous
                                          ? std::vector<int32_t>{2, 0, 0, 0}
                                          : std::vector<int32_t>{8, 1, 5, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  const std::vector<int32_t> begins = c.contiguous ? std::vector<int32_t>{0, 1, 2, 3}
                                                   : std::vector<int32_t>{0, 4, 8, 12};
  const auto qkv = random_floats(size_t(padded * stride), random, c.dtype), bias = random_floats(size_t(width), random),
             q_norm = random_floats(size_t(d), random), k_norm = random_floats(size_t(d), random);
  std::vector<RopeAngle> rope(size_t(max_position * half));
  for (RopeAngle& t : rope) {
    const double angle = random.uniform() * 100;
    t = {float(std::cos(angle)), float(std::sin(angle))};
  }
  const size_t q_size = size_t(padded * c.n_heads * d);
  cuda::Memory on_qkv = floats_to_card(qkv, c.dtype, stream), on_bias = to_card(bias, stream),
               on_q_norm = to_card(q_norm, stream), on_k_norm = to_card(k_norm, stream),
               on_rope = to_card(rope, stream), on_offsets = to_card(q_offsets, stream),
               on_lengths = to_card(kv_lengths, stream), on_seqs = to_card(token_seqs, stream),
               on_positions = to_card(positions, stream), on_tables = to_card(tables, stream),
               on_begins = to_card(begins, stream), q = floats_to_card(std::vector<float>(q_size, -7), c.dtype, stream),
               pool = to_card(std::vector<uint8_t>(layout.pool_bytes(), 0x5a), stream);
  CudaStep step{.q_offsets = on_offsets.as<int32_t>(),
                .kv_lengths = on_lengths.as<int32_t>(),
                .token_seqs = on_seqs.as<int32_t>(),
                .positions = on_positions.as<int32_t>(),
                .block_tables = on_tables.as<int32_t>(),
                .table_begins = on_begins.as<int32_t>(),
                .contiguous = c.contiguous,
                .n_seqs = 4,
                .n_tokens = padded,
                .max_q_tokens = 3,
                .max_kv_length = 7};
  cuda_rope_append({.qkv = on_qkv.data(),
                    .stride = stride,
                    .bias = c.bias ? on_bias.as<float>() : nullptr,
                    .q_norm = c.norm ? on_q_norm.as<float>() : nullptr,
                    .k_norm = c.norm ? on_k_norm.as<float>() : nullptr,
                    .eps = float(kEps),
                    .rope = on_rope.as<RopeAngle>(),
                    .q = q.data(),
                    .dtype = c.dtype,
                    .n_heads = c.n_heads,
                    .pool = pool.data(),
                    .layout = layout,
                    .step = step,
                    .layer = layer},
                   stream);
  const auto got_q = floats_from_card(q.data(), q_size, c.dtype, stream);
  auto got_pool = from_card<std::byte>(pool.data(), layout.pool_bytes(), stream);
  for (int i = 0; i < padded; ++i)
    for (int h = 0; h < c.n_heads + 2 * c.n_kv_heads; ++h) {
      const bool is_q = h < c.n_heads, is_v = h >= c.n_heads + c.n_kv_heads;
      std::vector<double> x(static_cast<size_t>(d)), size(static_cast<size_t>(d));
      for (int j = 0; j < d; ++j)
        x[size_t(j)] = double(qkv[size_t(i * stride + h * d + j)]) + (c.bias ? double(bias[size_t(h * d + j)]) : 0);
      if (c.norm && !is_v) x = normed(x, is_q ? q_norm : k_norm);
      std::vector<double> want = x;
      for (int j = 0; j < half; ++j) {
        const RopeAngle t = rope[size_t(positions[size_t(i)] * half + j)];
        const double a = x[size_t(j)], b = x[size_t(j + half)];
        if (!is_v) want[size_t(j)] = a * double(t.cos) - b * double(t.sin);
        if (!is_v) want[size_t(j + half)] = b * double(t.cos) + a * double(t.sin);
        size[size_t(j)] = size[size_t(j + half)] = std::fabs(a) + std::fabs(b);
      }
      const Dtype out = is_q ? c.dtype : c.kv_dtype;
      std::vector<float> row(static_cast<size_t>(d));
      if (is_q) {
        std::copy_n(got_q.begin() + (i * c.n_heads + h) * d, d, row.begin());
      } else if (i < n) {
        const int32_t* table = tables.data() + begins[size_t(token_seqs[size_t(i)])];
        const KvView view{got_pool.data(), &layout, c.contiguous ? nullptr : table, table[0]};
        std::byte* at = view.row(layer, is_v, positions[size_t(i)], (h - c.n_heads) % c.n_kv_heads);
        read_kv_row(c.kv_dtype, d, at, 0, d, row.data());
        std::memset(at, 0x5a, layout.shape.row_bytes());
      } else {
        continue;
      }
      for (int j = 0; j < d; ++j) {
        CAPTURE(i, h, j);
        if (i >= n)
          CHECK(row[size_t(j)] == -7);
        else  // bias, norm, two products and a sum, and the last rounding
          CHECK(near(row[size_t(j)], want[size_t(j)],
                     (kNormError + 4 * kU) * size[size_t(j)] + roundoff(out) * std::fabs(want[size_t(j)])));
      }
    }
  for (std::byte b : got_pool) REQUIRE(b == std::byte{0x5a});  // nothing outside the rows was written
}

TEST_CASE("cuda ops: bias, head norm, RoPE and append agree with double precision", "[cuda][model]") {
  for (Dtype dtype : kDtypes)
    for (Dtype kv : {Dtype::f32, Dtype::bf16})
      for (bool contiguous : {true, false}) {
        check_turn({dtype, kv, KvOrder::layer_major, contiguous, false, false, 8, 4, 2});
        check_turn({dtype, kv, KvOrder::token_major, contiguous, true, true, 6, 3, 1});
        check_turn({dtype, kv, KvOrder::layer_major, contiguous, false, false, 128, 2, 1});
      }
  check_turn({Dtype::f32, Dtype::f32, KvOrder::layer_major, false, true, true, 256, 2, 1});
  check_turn({Dtype::bf16, Dtype::bf16, KvOrder::token_major, true, false, true, 70, 5, 5});
}

struct Sampling {
  Sampling(const std::vector<float>& x, const std::vector<Draw>& draws, int vocabulary, cuda::Stream& on)
      : n(int(x.size()) / vocabulary),
        vocab(vocabulary),
        stream(on),
        logits(to_card(x, stream)),
        rows(to_card(draws, stream)),
        workspace(cuda::Memory::device(cuda_sample_workspace(n)).value()),
        greedy(draws.empty()) {
    cuda::fill(workspace.data(), 0, workspace.size(), stream);
  }
  // Returns a token for each row, and then how many NaNs it had. The workspace keeps the contents of the call before.
  std::vector<int32_t> run(int n_slices = 0) {
    cuda::Memory out = to_card(std::vector<int32_t>(size_t(2 * n), -1), stream);
    cuda_sample({.logits = logits.as<float>(),
                 .rows = greedy ? nullptr : rows.as<Draw>(),
                 .n_slices = n_slices,
                 .workspace = workspace.data(),
                 .tokens = out.as<int32_t>(),
                 .nans = out.as<int32_t>() + n,
                 .n = n,
                 .vocab = vocab},
                stream);
    return from_card<int32_t>(out.data(), size_t(2 * n), stream);
  }
  int n, vocab;
  cuda::Stream& stream;
  cuda::Memory logits, rows, workspace;
  bool greedy;
};

TEST_CASE("cuda sampler: the greedy token is the host sampler's", "[cuda][model]") {
  cuda::Stream stream;
  Random random(6);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (int vocab : {1, 33, 1000, 5000}) {
    const int n = 9;
    auto logits = random_floats(size_t(n * vocab), random);
    auto row = [&](int i) { return logits.data() + i * vocab; };
    auto at = [&](double share) { return int(share * (vocab - 1)); };
    row(1)[at(0.9)] = row(1)[at(0.4)] = 5;             // in a tie the lower id wins
    row(2)[at(0.2)] = nan;                             // NaN never wins
    row(3)[at(0.7)] = inf, row(3)[at(0.8)] = FLT_MAX;  // inf and FLT_MAX compare as equal
    row(4)[at(0.9)] = inf, row(4)[at(0.3)] = FLT_MAX;
    std::fill_n(row(5), vocab, nan);
    std::fill_n(row(6), vocab, -inf);
    std::fill_n(row(7), vocab, -inf), row(7)[at(1)] = -FLT_MAX;
    std::fill_n(row(8), vocab, 0.0f), row(8)[0] = -0.0f;
    // The kernel runs in one block, and in slices of which some are empty or all NaN.
    const auto got = Sampling(logits, {}, vocab, stream).run(vocab == 1000 ? 16 : vocab == 33 ? 7 : 0);
    for (int i = 0; i < n; ++i) {
      CAPTURE(vocab, i);
      SamplerState state;
      SamplerScratch scratch;
      const Sampled want = sample({row(i), size_t(vocab)}, {.temperature = 0}, state, scratch);
      CHECK(got[size_t(i)] == want.chosen.token);
      CHECK(got[size_t(n + i)] == std::count_if(row(i), row(i) + vocab, [](float x) { return std::isnan(x); }));
    }
  }
}

// The intervals of [0, 1) in which the tokens lie, by ascending id, in double.
struct Interval {
  double begin = 0, end = 0;
};
std::vector<Interval> intervals(const std::vector<float>& x, const Draw& how) {
  const double top = double(*std::max_element(x.begin(), x.end()));
  auto weight = [&](float logit) { return std::exp((double(logit) - top) / double(how.temperature)); };
  double total = 0, sum = 0;
  for (float logit : x) total += weight(logit);
  std::vector<Interval> all;
  for (float logit : x) {
    const double begin = sum / total;
    sum += weight(logit);
    all.push_back({begin, sum / total});
  }
  return all;
}

void check_draw(const std::vector<Interval>& all, int32_t token, float uniform) {
  REQUIRE(size_t(token) < all.size());
  const Interval place = all[size_t(token)];
  CAPTURE(token, place.begin, place.end, uniform);
  CHECK(place.end > place.begin);
  // f32 exponentials are off by some 1e-7 of themselves, and so is every sum of them.
  CHECK(double(uniform) >= place.begin - 1e-6);
  CHECK(double(uniform) <= place.end + 1e-6);
}

TEST_CASE("cuda sampler: a draw falls where double precision puts it, however the row is cut into blocks",
          "[cuda][model]") {
  cuda::Stream stream;
  Random random(9);
  // Llama 3's vocabulary takes the most blocks. Another size tries every number of blocks.
  for (auto [vocab, slicings] : {std::pair(128256, std::vector{1, 0}), std::pair(9001, std::vector{1, 2, 3, 7, 16}),
                                 std::pair(300, std::vector{1, 0}), std::pair(7, std::vector{1, 0})}) {
    std::vector<float> x(static_cast<size_t>(vocab));
    for (float& value : x) value = float(int(random.uniform() * 8)) / 4;
    const std::vector<Draw> rows{{.temperature = 1, .uniform = 0x1.fffffep-1f},
                                 {.temperature = 0.5f, .uniform = 0.77f},
                                 {.temperature = 1, .uniform = 0},
                                 {.temperature = 2, .uniform = 0.4f},
                                 {}};
    const int n = int(rows.size());
    std::vector<float> logits;
    for (int i = 0; i < n; ++i) logits.insert(logits.end(), x.begin(), x.end());
    Sampling sampling(logits, rows, vocab, stream);
    std::vector<int32_t> first;
    for (int n_slices : slicings) {
      CAPTURE(vocab, n_slices);
      const auto got = sampling.run(n_slices);
      if (first.empty()) first = got;
      CHECK(got == first);
    }
    for (int i = 0; i < n; ++i) {
      CAPTURE(vocab, i, first[size_t(i)]);
      if (rows[size_t(i)].temperature == 0) {
        CHECK(first[size_t(i)] == int(std::max_element(x.begin(), x.end()) - x.begin()));
        continue;
      }
      const auto want = intervals(x, rows[size_t(i)]);
      check_draw(want, first[size_t(i)], rows[size_t(i)].uniform);
    }
  }
}

TEST_CASE("cuda row hash: every row has the CPU's value", "[cuda][model]") {
  cuda::Stream stream;
  Random random(2);
  // One block of the kernel takes 4096 floats.
  for (int vocab : {1, 2, 33, 512, 4095, 4096, 4097, 9001})
    for (int n : {1, 3}) {
      std::vector<float> logits(size_t(n * vocab));
      for (float& x : logits) x = float(random.uniform() * 4 - 2);
      logits[0] = -0.0f, logits.back() = std::nanf("7");
      cuda::Memory rows = to_card(logits, stream), out = to_card(std::vector<uint64_t>(size_t(n), 99), stream);
      auto hash = [&] { hash_rows(rows.as<float>(), n, vocab, out.as<uint64_t>(), stream); };
      hash();
      cuda::Graph graph = cuda::Graph::capture(stream, hash);
      graph.launch(stream);  // a second run overwrites out
      const auto got = from_card<uint64_t>(out.data(), size_t(n), stream);
      for (int i = 0; i < n; ++i) {
        CAPTURE(vocab, n, i);
        CHECK(got[size_t(i)] == row_hash(logits.data() + i * vocab, size_t(vocab)));
      }
    }
}

}  // namespace xpyd::testing::ops_cuda_test
