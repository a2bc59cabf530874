// Every CUDA row operation and the product against plain loops in double, every element with a
// bound. u = 2^-24 is f32's unit roundoff, 2^-8 is bf16's.
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/kv_row.h"
#include "base/random.h"
#include "model/gemm_cuda.h"
#include "model/ops_cuda.h"
#include "model/sampler.h"
#include "model/sampler_cuda.h"
#include "tests/model/cuda_fixture.h"
#ifdef XPYD_SIMT
#include "device_memory.h"
#endif

namespace xpyd::testing {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kEps = 1e-5;
constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16};

double roundoff(Dtype dtype) { return dtype == Dtype::bf16 ? 0x1p-8 : kU; }

std::vector<float> random_floats(size_t n, Random& random, Dtype dtype = Dtype::f32, double scale = 1) {
  std::vector<float> x(n);
  for (float& v : x) {
    v = float((random.uniform() * 2 - 1) * scale);
    if (dtype == Dtype::bf16) v = to_f32(to_bf16(v));
  }
  return x;
}

bool near(double got, double want, double bound) { return std::fabs(got - want) <= bound; }

// A row of width n adds n / (its threads) <= 32 squares one after the other, then 5 + 32 partial sums: a sum of
// positive terms is off by at most 69 u of itself, its root by half of that; the rest is rounded a few times.
constexpr double kNormError = 40 * kU;

std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& weight) {
  double squares = 0;
  for (double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / double(x.size()) + kEps);
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * double(weight[i]);
  return out;
}

TEST_CASE("cuda ops: embedding rows and their norm", "[cuda][model]") {
  cuda::Stream stream;
  Random random(1);
  for (Dtype dtype : kDtypes)
    for (int width : {3, 36, 64, 515}) {
      CAPTURE(dtype_name(dtype), width);
      const int n = 5, vocab = 11, stride = (width + 7) / 8 * 8;
      std::vector<float> table = random_floats(size_t(vocab * stride), random, dtype);
      std::vector<float> norm = random_floats(size_t(width), random);
      const std::vector<int32_t> ids = {10, 0, 3, 3, 7};
      cuda::Memory on_table = floats_to_card(table, dtype, stream), on_norm = to_card(norm, stream),
                   on_ids = to_card(ids, stream), x = to_card(std::vector<float>(size_t(n * width)), stream),
                   out = floats_to_card(std::vector<float>(size_t(n * stride), -7), dtype, stream);
      cuda_embed({.token_ids = on_ids.as<int32_t>(),
                  .table = {on_table.data(), vocab, width, stride},
                  .norm = on_norm.as<float>(),
                  .x = x.as<float>(),
                  .normed = out.data(),
                  .dtype = dtype,
                  .eps = float(kEps),
                  .n = n,
                  .stride = stride},
                 stream);
      const auto got_x = from_card<float>(x.data(), size_t(n * width), stream);
      const auto got = floats_from_card(out.data(), size_t(n * stride), dtype, stream);
      for (int i = 0; i < n; ++i) {
        const float* row = table.data() + ids[size_t(i)] * stride;
        const auto want = normed({row, row + width}, norm);
        for (int j = 0; j < stride; ++j) {
          CAPTURE(i, j);
          if (j < width) CHECK(got_x[size_t(i * width + j)] == row[j]);
          const double wanted = j < width ? want[size_t(j)] : -7;
          CHECK(near(got[size_t(i * stride + j)], wanted, (kNormError + roundoff(dtype)) * std::fabs(wanted)));
        }
      }
    }
}

TEST_CASE("cuda ops: residual, bias and norm", "[cuda][model]") {
  cuda::Stream stream;
  Random random(2);
  for (Dtype dtype : kDtypes)
    for (int width : {36, 131, 1028})
      for (bool with_bias : {false, true})
        for (bool with_norm : {false, true}) {
          CAPTURE(dtype_name(dtype), width, with_bias, with_norm);
          const int n = 3, stride = width + 4;
          const auto x0 = random_floats(size_t(n * width), random);
          const auto delta = random_floats(size_t(n * stride), random, dtype);
          const auto bias = random_floats(size_t(width), random), norm = random_floats(size_t(width), random);
          cuda::Memory x = to_card(x0, stream), on_delta = floats_to_card(delta, dtype, stream),
                       on_bias = to_card(bias, stream), on_norm = to_card(norm, stream);
          cuda_add_norm({.x = x.as<float>(),
                         .delta = on_delta.data(),
                         .bias = with_bias ? on_bias.as<float>() : nullptr,
                         .norm = with_norm ? on_norm.as<float>() : nullptr,
                         .normed = on_delta.data(),  // in place
                         .dtype = dtype,
                         .eps = float(kEps),
                         .n = n,
                         .width = width,
                         .stride = stride},
                        stream);
          const auto got_x = from_card<float>(x.data(), size_t(n * width), stream);
          const auto got = floats_from_card(on_delta.data(), size_t(n * stride), dtype, stream);
          for (int i = 0; i < n; ++i) {
            std::vector<double> sum(static_cast<size_t>(width));
            for (int j = 0; j < width; ++j) {
              const double d = double(delta[size_t(i * stride + j)]) + (with_bias ? double(bias[size_t(j)]) : 0);
              const double want = double(x0[size_t(i * width + j)]) + d;
              CHECK(near(got_x[size_t(i * width + j)], want, kU * (std::fabs(want) + std::fabs(d))));
              sum[size_t(j)] = got_x[size_t(i * width + j)];
            }
            const auto want = normed(sum, norm);
            for (int j = 0; j < stride; ++j) {
              const bool written = with_norm && j < width;
              const double wanted = written ? want[size_t(j)] : double(delta[size_t(i * stride + j)]);
              const double bound = written ? (kNormError + roundoff(dtype)) * std::fabs(wanted) : 0;
              CHECK(near(got[size_t(i * stride + j)], wanted, bound));
            }
          }
        }
}

TEST_CASE("cuda ops: norm of chosen rows; rows gathered", "[cuda][model]") {
  cuda::Stream stream;
  Random random(3);
  const int width = 100, n_x = 6;
  const std::vector<int32_t> rows = {5, 1, 2};
  const auto x0 = random_floats(size_t(n_x * width), random), norm = random_floats(size_t(width), random);
  cuda::Memory x = to_card(x0, stream), on_norm = to_card(norm, stream), on_rows = to_card(rows, stream),
               out = to_card(std::vector<float>(rows.size() * width), stream);
  cuda_add_norm({.x = x.as<float>(),
                 .norm = on_norm.as<float>(),
                 .rows = on_rows.as<int32_t>(),
                 .normed = out.data(),
                 .dtype = Dtype::f32,
                 .eps = float(kEps),
                 .n = int(rows.size()),
                 .width = width,
                 .stride = width},
                stream);
  const auto got = from_card<float>(out.data(), rows.size() * width, stream);
  for (size_t i = 0; i < rows.size(); ++i) {
    const float* row = x0.data() + rows[i] * width;
    const auto want = normed({row, row + width}, norm);
    for (size_t j = 0; j < size_t(width); ++j)
      CHECK(near(got[i * width + j], want[j], (kNormError + kU) * std::fabs(want[j])));
  }
  CHECK(from_card<float>(x.data(), x0.size(), stream) == x0);
  for (size_t bytes : {size_t(2 * 9), size_t(16 * 9), size_t(16 * 300)}) {
    CAPTURE(bytes);
    std::vector<uint16_t> from(bytes / 2 * n_x);
    for (uint16_t& v : from) v = uint16_t(random.next());
    cuda::Memory on_from = to_card(from, stream), to = to_card(std::vector<uint16_t>(bytes / 2 * 3), stream);
    cuda_gather_rows(on_from.data(), on_rows.as<int32_t>(), 3, bytes, to.data(), stream);
    const auto moved = from_card<uint16_t>(to.data(), bytes / 2 * 3, stream);
    for (size_t i = 0; i < moved.size(); ++i)
      REQUIRE(moved[i] == from[size_t(rows[i / (bytes / 2)]) * (bytes / 2) + i % (bytes / 2)]);
  }
}

// Two sequences and padding: tokens 0..2 of a sequence at positions 4..6, one token of another at position 0.
struct TurnCase {
  Dtype dtype, kv_dtype;
  KvOrder order;
  bool contiguous, bias, norm;
  int head_dim, n_heads, n_kv_heads;
};

void check_turn(const TurnCase& c) {
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
  std::vector<Turn> turns(size_t(max_position * half));
  for (Turn& t : turns) {
    const double angle = random.uniform() * 100;
    t = {float(std::cos(angle)), float(std::sin(angle))};
  }
  const size_t q_size = size_t(padded * c.n_heads * d);
  cuda::Memory on_qkv = floats_to_card(qkv, c.dtype, stream), on_bias = to_card(bias, stream),
               on_q_norm = to_card(q_norm, stream), on_k_norm = to_card(k_norm, stream),
               on_turns = to_card(turns, stream), on_offsets = to_card(q_offsets, stream),
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
  cuda_turn_append({.qkv = on_qkv.data(),
                    .stride = stride,
                    .bias = c.bias ? on_bias.as<float>() : nullptr,
                    .q_norm = c.norm ? on_q_norm.as<float>() : nullptr,
                    .k_norm = c.norm ? on_k_norm.as<float>() : nullptr,
                    .eps = float(kEps),
                    .turns = on_turns.as<Turn>(),
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
        const Turn t = turns[size_t(positions[size_t(i)] * half + j)];
        const double a = x[size_t(j)], b = x[size_t(j + half)];
        if (!is_v) want[size_t(j)] = a * double(t.cos) - b * double(t.sin);
        if (!is_v) want[size_t(j + half)] = b * double(t.cos) + a * double(t.sin);
        size[size_t(j)] = size[size_t(j + half)] = std::fabs(a) + std::fabs(b);
      }
      const Dtype out = is_q ? c.dtype : c.kv_dtype;
      std::vector<float> row(static_cast<size_t>(d));
      double step_size = 0;  // half of one, of quantised rows
      if (is_q) {
        std::copy_n(got_q.begin() + (i * c.n_heads + h) * d, d, row.begin());
      } else if (i < n) {
        const int32_t* table = tables.data() + begins[size_t(token_seqs[size_t(i)])];
        const KvView view{got_pool.data(), &layout, c.contiguous ? nullptr : table, table[0]};
        std::byte* at = view.row(layer, is_v, positions[size_t(i)], (h - c.n_heads) % c.n_kv_heads);
        read_kv_row(c.kv_dtype, d, at, 0, d, row.data());
        if (layout.shape.quantised()) {
          step_size = 0.501 * double(kv_scale(at + layout.shape.element_bytes()).scale);
          if (is_v && !c.bias) {  // nothing was rounded before: the host's bytes
            std::vector<std::byte> host(layout.shape.row_bytes());
            write_kv_row(c.kv_dtype, d, &qkv[size_t(i * stride + h * d)], host.data());
            CHECK(std::memcmp(host.data(), at, host.size()) == 0);
          }
        }
        std::memset(at, 0x5a, layout.shape.row_bytes());
      } else {
        continue;
      }
      for (int j = 0; j < d; ++j) {
        CAPTURE(i, h, j);
        if (i >= n)
          CHECK(row[size_t(j)] == -7);
        else  // the bias, a norm, two products and a sum, and the last rounding
          CHECK(near(row[size_t(j)], want[size_t(j)],
                     (kNormError + 4 * kU) * size[size_t(j)] + roundoff(out) * std::fabs(want[size_t(j)]) + step_size));
      }
    }
  for (std::byte b : got_pool) REQUIRE(b == std::byte{0x5a});  // every row was where it belongs, and nothing else
}

TEST_CASE("cuda ops: bias, head norm, RoPE and append", "[cuda][model]") {
  for (Dtype dtype : kDtypes)
    for (Dtype kv : {Dtype::f32, Dtype::bf16, Dtype::int8, Dtype::int4})
      for (bool contiguous : {true, false}) {
        check_turn({dtype, kv, KvOrder::layer_major, contiguous, false, false, 8, 4, 2});
        check_turn({dtype, kv, KvOrder::token_major, contiguous, true, true, kv == Dtype::int4 ? 12 : 6, 3, 1});
        if (kv == Dtype::int8 || kv == Dtype::int4)
          check_turn({dtype, kv, KvOrder::layer_major, contiguous, false, false, 128, 2, 1});
      }
  check_turn({Dtype::f32, Dtype::f32, KvOrder::layer_major, false, true, true, 256, 2, 1});
  check_turn({Dtype::bf16, Dtype::bf16, KvOrder::token_major, true, false, true, 70, 5, 5});
}

TEST_CASE("cuda ops: SwiGLU", "[cuda][model]") {
  cuda::Stream stream;
  Random random(5);
  for (Dtype dtype : kDtypes)
    for (int width : {300, 301}) {
      const bool with_bias = width == 301 || dtype == Dtype::f32;
      CAPTURE(dtype_name(dtype), width, with_bias);
      const int n = 3, stride = 2 * width + 8;
      auto x = random_floats(size_t(n * stride), random, dtype, 20);
      x[0] = 100;
      x[1] = -100;
      const auto bias = random_floats(size_t(2 * width), random);
      cuda::Memory on_x = floats_to_card(x, dtype, stream), on_bias = to_card(bias, stream);
      cuda_swiglu({.gate_up = on_x.data(),
                   .bias = with_bias ? on_bias.as<float>() : nullptr,
                   .dtype = dtype,
                   .n = n,
                   .width = width,
                   .stride = stride},
                  stream);
      const auto got = floats_from_card(on_x.data(), x.size(), dtype, stream);
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < stride; ++j) {
          const float before = x[size_t(i * stride + j)];
          if (j >= width) {
            CHECK(got[size_t(i * stride + j)] == before);
            continue;
          }
          const double gate = double(before) + (with_bias ? double(bias[size_t(j)]) : 0);
          const double up = double(x[size_t(i * stride + width + j)]) +
                            (with_bias ? double(bias[size_t(width + j)]) : 0);
          const double want = gate / (1 + std::exp(-gate)) * up;
          // A gate rounded by u |gate| moves e^-gate by as much of itself; expf, the sums and the
          // products round a few times. Below 1e-30, e^-gate passes f32's range: 0.
          const double relative = (8 + std::fabs(gate)) * kU + roundoff(dtype);
          // The bias may leave little of gate or up.
          const double lost = with_bias ? kU * (std::fabs(gate) + std::fabs(up)) : 0;
          CAPTURE(i, j, gate, up);
          CHECK(near(got[size_t(i * stride + j)], want, relative * std::fabs(want) + lost + 1e-30));
        }
    }
}

cuda::Memory sample_workspace(int n, cuda::Stream& stream) {
  cuda::Memory workspace = cuda::Memory::device(cuda_sample_workspace(n)).value();
  cuda::fill(workspace.data(), 0, workspace.size(), stream);
  return workspace;
}

TEST_CASE("cuda sampler: the greedy token is the host sampler's", "[cuda][model]") {
  cuda::Stream stream;
  Random random(6);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (int vocab : {1, 33, 1000, 5000}) {
    const int n = 9;
    auto logits = random_floats(size_t(n * vocab), random);
    auto row = [&](int i) { return logits.data() + i * vocab; };
    auto at = [&](double share) { return int(share * (vocab - 1)); };
    row(1)[at(0.9)] = row(1)[at(0.4)] = 5;             // a tie: the lower id
    row(2)[at(0.2)] = nan;                             // NaN never wins
    row(3)[at(0.7)] = inf, row(3)[at(0.8)] = FLT_MAX;  // both are the largest float
    row(4)[at(0.9)] = inf, row(4)[at(0.3)] = FLT_MAX;
    std::fill_n(row(5), vocab, nan);
    std::fill_n(row(6), vocab, -inf);
    std::fill_n(row(7), vocab, -inf), row(7)[at(1)] = -FLT_MAX;
    std::fill_n(row(8), vocab, 0.0f), row(8)[0] = -0.0f;
    cuda::Memory on_logits = to_card(logits, stream), out = to_card(std::vector<int32_t>(size_t(2 * n), -1), stream);
    // Alone in its block, and in slices of which some are empty or all NaN.
    const int n_slices = vocab == 1000 ? 16 : vocab == 33 ? 7 : 0;
    cuda::Memory workspace = sample_workspace(n, stream);
    cuda_sample({.logits = on_logits.as<float>(),
                 .n_slices = n_slices,
                 .workspace = workspace.data(),
                 .tokens = out.as<int32_t>(),
                 .nans = out.as<int32_t>() + n,
                 .n = n,
                 .vocab = vocab},
                stream);
    const auto got = from_card<int32_t>(out.data(), size_t(2 * n), stream);
    for (int i = 0; i < n; ++i) {
      CAPTURE(vocab, i);
      SamplerState state;
      SamplerScratch scratch;
      const Sampled want = sample({row(i), size_t(vocab)}, {.temperature = 0}, state, scratch);
      CHECK(got[size_t(i)] == want.chosen.token);
      CHECK(got[size_t(n + i)] == want.nan_logits);
    }
  }
}

// Where in [0, 1) the kept tokens lie, by ascending id, in double. Empty where a token is not kept.
struct Interval {
  double begin = 0, end = 0;
};
std::vector<Interval> intervals(const std::vector<float>& x, const Draw& how) {
  const int n = int(x.size());
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[size_t(a)] > x[size_t(b)]; });
  auto weight = [&](int i) {
    return std::exp((double(x[size_t(i)]) - double(x[size_t(order[0])])) / double(how.temperature));
  };
  if (how.top_k > 0 && how.top_k < n) order.resize(size_t(how.top_k));
  double total = 0, sum = 0;
  for (int i : order) total += weight(i);
  size_t kept = 0;
  while (kept < order.size() && (kept == 0 || sum < double(how.top_p) * total)) sum += weight(order[kept++]);
  if (how.top_p < 1) order.resize(kept);
  std::erase_if(order, [&](int i) { return weight(i) < double(how.min_p); });
  std::sort(order.begin(), order.end());
  total = sum = 0;
  for (int i : order) total += weight(i);
  std::vector<Interval> all(x.size());
  for (int i : order) {
    all[size_t(i)].begin = sum / total;
    sum += weight(i);
    all[size_t(i)].end = sum / total;
  }
  return all;
}

TEST_CASE("cuda sampler: draws fall where double precision puts them", "[cuda][model]") {
  cuda::Stream stream;
  Random random(8);
  for (int vocab : {7, 300, 5000})
    for (const Draw& how : std::vector<Draw>{{.temperature = 1},
                                             {.temperature = 0.3f},
                                             {.temperature = 2, .top_k = 5},
                                             {.temperature = 1, .top_p = 0.7f},
                                             {.temperature = 1.5f, .min_p = 0.3f},
                                             {.temperature = 1, .top_k = 50, .top_p = 0.9f},
                                             {.temperature = 1, .top_k = 50, .top_p = 0.9999f},
                                             {.temperature = 1, .top_k = 3, .top_p = 0.5f, .min_p = 0.1f},
                                             {.temperature = 1, .top_k = 1},
                                             {.temperature = 1, .top_p = 1e-6f}}) {
      CAPTURE(vocab, how.temperature, how.top_k, how.top_p, how.min_p);
      auto x = random_floats(size_t(vocab), random, Dtype::f32, 4);
      // Ties, also at the cut; with three values, both filters may cut among the same equals.
      for (int i = 0; i < vocab; i += how.top_k == 50 ? 1 : 3)
        x[size_t(i)] = how.top_k == 50 ? float(i % 3) : std::round(x[size_t(i)]);
      const int n = 12;
      std::vector<float> logits;
      std::vector<Draw> rows;
      for (int i = 0; i < n; ++i) {
        logits.insert(logits.end(), x.begin(), x.end());
        rows.push_back(how);
        rows.back().uniform = i == 0 ? 0 : i == 1 ? 0x1.fffffep-1f : float(random.uniform());
      }
      cuda::Memory on_logits = to_card(logits, stream), on_rows = to_card(rows, stream),
                   out = to_card(std::vector<int32_t>(size_t(2 * n), -1), stream);
      cuda::Memory workspace = sample_workspace(n, stream);
      cuda_sample({.logits = on_logits.as<float>(),
                   .rows = on_rows.as<Draw>(),
                   .workspace = workspace.data(),
                   .tokens = out.as<int32_t>(),
                   .nans = out.as<int32_t>() + n,
                   .n = n,
                   .vocab = vocab},
                  stream);
      const auto got = from_card<int32_t>(out.data(), size_t(2 * n), stream);
      const auto want = intervals(x, how);
      for (size_t i = 0; i < size_t(n); ++i) {
        REQUIRE(got[i] >= 0);
        REQUIRE(got[i] < vocab);
        const Interval place = want[size_t(got[i])];
        CAPTURE(got[i], place.begin, place.end, rows[i].uniform);
        CHECK(place.end > place.begin);  // it was kept
        // f32 exponentials are off by some 1e-7 of themselves, and so is every sum of them.
        CHECK(double(rows[i].uniform) >= place.begin - 1e-6);
        CHECK(double(rows[i].uniform) <= place.end + 1e-6);
        CHECK(got[size_t(n) + i] == 0);
      }
    }
}

TEST_CASE("cuda sampler: a row's token does not depend on the blocks that it is cut into", "[cuda][model]") {
  cuda::Stream stream;
  Random random(9);
  constexpr float kLast = 0x1.fffffep-1f;
  const Draw just_p{.temperature = 1, .top_p = 0.7f, .uniform = kLast};
  // Llama 3's vocabulary, which takes the most blocks, and one for every number of them.
  for (auto [vocab, slicings] : {std::pair(128256, std::vector{1, 0}), std::pair(9001, std::vector{1, 2, 3, 7, 16})}) {
    // Eight values: the cut falls among thousands of equals, and these among all slices.
    std::vector<float> x(static_cast<size_t>(vocab));
    for (float& value : x) value = float(int(random.uniform() * 8)) / 4;
    std::vector<Draw> rows{just_p,
                           {.temperature = 1, .top_k = vocab / 6, .uniform = kLast},
                           {.temperature = 1, .top_k = vocab / 6, .top_p = 0.9f, .uniform = kLast},
                           {.temperature = 0.5f, .top_p = 0.5f, .min_p = 0.2f, .uniform = 0.77f},
                           {.temperature = 1, .uniform = 0.4f},
                           {}};
    const int n = int(rows.size());
    std::vector<float> logits;
    for (int i = 0; i < n; ++i) logits.insert(logits.end(), x.begin(), x.end());
    cuda::Memory on_logits = to_card(logits, stream), on_rows = to_card(rows, stream),
                 workspace = sample_workspace(n, stream);
    std::vector<int32_t> first;
    for (int n_slices : slicings) {
      CAPTURE(vocab, n_slices);
      cuda::Memory out = to_card(std::vector<int32_t>(size_t(2 * n), -1), stream);
      cuda_sample({.logits = on_logits.as<float>(),
                   .rows = on_rows.as<Draw>(),
                   .n_slices = n_slices,
                   .workspace = workspace.data(),  // as the call before left it
                   .tokens = out.as<int32_t>(),
                   .nans = out.as<int32_t>() + n,
                   .n = n,
                   .vocab = vocab},
                  stream);
      const auto got = from_card<int32_t>(out.data(), size_t(2 * n), stream);
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
      const Interval place = want[size_t(first[size_t(i)])];
      CHECK(place.end > place.begin);
      CHECK(double(rows[size_t(i)].uniform) >= place.begin - 1e-6);
      CHECK(double(rows[size_t(i)].uniform) <= place.end + 1e-6);
      // The last that top-k keeps: a count, so exact.
      if (i == 1)
        CHECK(std::none_of(want.begin() + first[1] + 1, want.end(), [](const Interval& w) { return w.end > w.begin; }));
    }
  }
}

TEST_CASE("cuda gemm: every element against double, and a row's bits for every M", "[cuda][model][gemm]") {
  cuda::Stream stream;
  Random random(7);
  CudaGemm gemm(stream);
  for (auto [dtype, y_dtype] :
       {std::pair(Dtype::f32, Dtype::f32), std::pair(Dtype::bf16, Dtype::bf16), std::pair(Dtype::bf16, Dtype::f32)})
    for (auto [n, k] : {std::pair(64, 128), std::pair(37, 50)}) {
      CAPTURE(dtype_name(dtype), dtype_name(y_dtype), n, k);
      const int max_m = 21, k_stride = (k + 7) / 8 * 8, y_stride = (n + 15) / 8 * 8;
      const auto w = random_floats(size_t(n * k_stride), random, dtype),
                 x = random_floats(size_t(max_m * k_stride), random, dtype);
      cuda::Memory on_w = floats_to_card(w, dtype, stream), on_x = floats_to_card(x, dtype, stream);
      CudaGemmArgs args{.x = on_x.data(),
                        .w = {on_w.data(), n, k, k_stride},
                        .x_dtype = dtype,
                        .y_dtype = y_dtype,
                        .x_stride = k_stride,
                        .y_stride = y_stride};
      REQUIRE(gemm.prepare(args, max_m).ok());
      std::vector<float> whole;
      for (int m : {max_m, 0, 1, 2, 3, 8, 17}) {
        CAPTURE(m);
        cuda::Memory y = floats_to_card(std::vector<float>(size_t(max_m * y_stride), -7), y_dtype, stream);
        args.y = y.data();
        args.m = m;
        gemm.run(args);
        const auto got = floats_from_card(y.data(), size_t(max_m * y_stride), y_dtype, stream);
        if (m == max_m) whole = got;
        for (int i = 0; i < max_m; ++i)
          for (int j = 0; j < y_stride; ++j) {
            const float value = got[size_t(i * y_stride + j)];
            if (i >= m || j >= n) {
              REQUIRE(value == -7);
              continue;
            }
            REQUIRE(std::memcmp(&value, &whole[size_t(i * y_stride + j)], 4) == 0);
            if (m != max_m) continue;
            double want = 0, size = 0;
            for (int t = 0; t < k; ++t) {
              const double term = double(x[size_t(i * k_stride + t)]) * double(w[size_t(j * k_stride + t)]);
              want += term;
              size += std::fabs(term);
            }
            REQUIRE(near(value, want, k * kU * size + roundoff(y_dtype) * std::fabs(want)));
          }
      }
    }
  CHECK(gemm.describe().find("37 x 50") != std::string::npos);
}

TEST_CASE("cuda gemv: every element against double, and a row's bits for every M", "[cuda][model][gemm]") {
  cuda::Stream stream;
  Random random(10);
  // Outputs beyond a block of 16, K beyond a stage of 256 and beyond the ring of five of them.
  for (Dtype y_dtype : {Dtype::f32, Dtype::bf16})
    for (auto [n, k] : {std::pair(48, 128), std::pair(37, 1800), std::pair(5, 8)}) {
      CAPTURE(dtype_name(y_dtype), n, k);
      const int k_stride = k + 8, y_stride = n + 3;
      const auto w = random_floats(size_t(n * k_stride), random, Dtype::bf16),
                 x = random_floats(size_t(kGemvRows * k_stride), random, Dtype::bf16);
      cuda::Memory on_w = floats_to_card(w, Dtype::bf16, stream), on_x = floats_to_card(x, Dtype::bf16, stream);
      CudaGemmArgs args{.x = on_x.data(),
                        .w = {on_w.data(), n, k, k_stride},
                        .x_dtype = Dtype::bf16,
                        .y_dtype = y_dtype,
                        .m = kGemvRows,
                        .x_stride = k_stride,
                        .y_stride = y_stride};
      REQUIRE(cuda_gemv_takes(args));
      std::vector<float> whole;
      for (int m : {kGemvRows, 0, 1, 2, 7, 8, 9, 16, 17}) {
        CAPTURE(m);
        const size_t size = size_t(kGemvRows * y_stride);
        cuda::Memory y = floats_to_card(std::vector<float>(size, -7), y_dtype, stream);
        args.y = y.data();
        args.m = m;
        cuda_gemv(args, stream);
        const auto got = floats_from_card(y.data(), size, y_dtype, stream);
        if (m == kGemvRows) whole = got;
        for (int i = 0; i < kGemvRows; ++i)
          for (int j = 0; j < y_stride; ++j) {
            const float value = got[size_t(i * y_stride + j)];
            if (i >= m || j >= n) {
              REQUIRE(value == -7);
              continue;
            }
            REQUIRE(std::memcmp(&value, &whole[size_t(i * y_stride + j)], 4) == 0);
            if (m != kGemvRows) continue;
            double want = 0, terms = 0;
            for (int t = 0; t < k; ++t) {
              const double term = double(x[size_t(i * k_stride + t)]) * double(w[size_t(j * k_stride + t)]);
              want += term;
              terms += std::fabs(term);
            }
            // Hardware truncates every group of 16 at 2^-24 of its largest.
            REQUIRE(near(value, want, k * 2 * kU * terms + roundoff(y_dtype) * std::fabs(want)));
          }
      }
    }
  CudaGemmArgs more{.w = {nullptr, 8, 64, 64}, .x_dtype = Dtype::bf16, .m = kGemvRows + 1, .x_stride = 64};
  CHECK_FALSE(cuda_gemv_takes(more));
  more.m = kGemvRows;
  CHECK(cuda_gemv_takes(more));
  more.w.k = 60;
  CHECK_FALSE(cuda_gemv_takes(more));
}

// Each takes what the one before it gives. On the interpreter it comes to its wait before that one has begun.
TEST_CASE("cuda gemv: a row of them that start early gives what those give that do not", "[cuda][model][gemm]") {
#ifdef XPYD_SIMT
  cuda::simt::Late late(true);
#endif
  cuda::Stream stream;
  Random random(11);
  constexpr int kWide = 136;
  const auto w = random_floats(kWide * kWide, random, Dtype::bf16), x = random_floats(kWide, random, Dtype::bf16);
  cuda::Memory on_w = floats_to_card(w, Dtype::bf16, stream);
  auto run = [&](bool early) {
    cuda::Memory here = floats_to_card(x, Dtype::bf16, stream), there = floats_to_card(x, Dtype::bf16, stream);
    for (int i = 0; i < 10; ++i) {
      cuda_gemv({.x = here.data(),
                 .y = there.data(),
                 .w = {on_w.data(), kWide, kWide, kWide},
                 .x_dtype = Dtype::bf16,
                 .y_dtype = Dtype::bf16,
                 .m = 1,
                 .x_stride = kWide,
                 .y_stride = kWide},
                {stream, early});
      std::swap(here, there);
    }
    return floats_from_card(here.data(), kWide, Dtype::bf16, stream);
  };
  CHECK(run(true) == run(false));
}

}  // namespace
}  // namespace xpyd::testing
