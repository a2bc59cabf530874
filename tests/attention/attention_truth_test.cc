// Compares every element of every variant with double precision, with a bound derived from the arithmetic.
#include <array>
#include <set>

#include "attention/attention_reference.h"
#include "tests/attention/attention_case.h"
#include "tests/catch.h"

namespace xpyd::testing::attention_truth_test {

KvScale scale_of(const AttentionArgs& args, int s, int kv, int t, int h) {
  const KvView& view = args.views[size_t(s)];
  return kv_scale(view.row(args.layer, kv, t, h) + view.layout->shape.element_bytes());
}
bool is_int8(const AttentionArgs& args) { return args.views[0].layout->shape.dtype == Dtype::int8; }

// The unit of which q's quantised elements are multiples, times scale.
double q_unit(const AttentionArgs& args, size_t row) {
  const int dim = args.views[0].layout->shape.head_dim;
  double largest = 0, sum = 0, both[2] = {};  // sums of 32 elements of q: 4 by 4 in turn within each 64
  for (int d = 0; d < dim; ++d) {
    if (d % 64 == 0) both[0] = both[1] = 0;
    const double q = std::abs(double(args.q[row + size_t(d)]));
    largest = std::max(largest, q), sum = std::max(sum, both[d / 4 % 2] += q);
  }
  const double unit = is_int8(args) ? largest / std::min(32767.0, std::floor(2147483647.0 / (255 * dim)))
                                    : std::max(largest / 127, sum / 2160);
  return unit * double(args.scale);
}

// Returns the largest error that rounding can make in each element. u = 2^-24, and n is the number of tokens.
// Score: a chain of head_dim products after two roundings of the scaled q, so |e| <= (head_dim + 3) u sum |q k| scale.
// Weight: its relative error is that (the largest over t), plus 2e-7 of exp2 and the roundings of its argument. Each
// rescaling (at most one per tile or split) adds 2e-7.
// Sums over tokens: (n + 8) u. The numerator and the denominator both have this error.
//
// For codes multiplied as integers (attention/cpu/quantised_rows.h), `codes` adds the rounding of q and of the weights,
// and that of the products with codes and with zero before they are added.
std::vector<double> bounds(const AttentionArgs& args, bool codes) {
  std::vector<float> weighted(size_t(args.q_offsets.back()) * size_t(args.n_heads) *
                              size_t(args.views[0].layout->shape.head_dim));
  AttentionArgs absolute = args;
  absolute.out = weighted.data();  // sum_t weight |V|
  attention_reference_over(absolute, [&](int s, int kv, int t, int h, int d) {
    double x = cached(args, s, kv, t, h, d);
    return kv ? std::abs(x) : x;
  });
  const double u = 0x1p-24;
  std::vector<double> bound(weighted.size());
  const int dim = args.views[0].layout->shape.head_dim;
  each_query(args, [&](int s, int head, int begin, int end, size_t row) {
    double magnitude = 0, k_size = 0, k_parts = 0;  // the largest over all tokens
    std::vector<double> score;
    for (int t = begin; t < end; ++t) {
      double sum = 0, dot = 0, size = 0, parts = 0;
      for (int d = 0; d < dim; ++d) {
        const double q = double(args.q[row + size_t(d)]), k = cached(args, s, 0, t, head, d);
        sum += std::abs(q * k), dot += q * k, size += std::abs(k);
        if (codes) {
          const double zero = scale_of(args, s, 0, t, head).zero;
          parts += std::abs(q) * (std::abs(k - zero) + std::abs(zero));
        }
      }
      magnitude = std::max(magnitude, sum * double(args.scale));
      k_size = std::max(k_size, size), k_parts = std::max(k_parts, parts * double(args.scale));
      score.push_back(dot * double(args.scale));
    }
    const int n = end - begin;
    double weight = (dim + 3) * u * magnitude + 2e-7 + 2 * u + (n / 64 + 2) * 2e-7;
    if (codes) weight += 0.51 * q_unit(args, row) * k_size + 4 * u * k_parts;
    for (size_t at = row; at < row + size_t(dim); ++at)
      bound[at] = (2 * weight + 2 * (n + 8) * u) * double(weighted[at]) + 1e-30;
    if (!codes) return;
    const double most = *std::max_element(score.begin(), score.end());
    double total = 0;
    for (double& x : score) total += x = std::exp(x - most);
    for (int first = begin / 32 * 32; first < end; first += 32) {
      double largest = 0, sum = 0;
      const int from = std::max(first, begin), to = std::min(first + 32, end);
      for (int t = from; t < to; ++t) {
        const double w = score[size_t(t - begin)] / total * scale_of(args, s, 1, t, head).scale;
        largest = std::max(largest, w), sum += w;
      }
      const double unit = is_int8(args) ? largest / 32767 : std::max(largest / 127, sum / 2160);
      for (int d = 0; d < dim; ++d)
        for (int t = from; t < to; ++t) {
          const KvScale scale = scale_of(args, s, 1, t, head);
          const double v = cached(args, s, 1, t, head, d), zero = scale.zero;
          const double code = scale.scale > 0 ? (v - zero) / double(scale.scale) : 0;
          bound[row + size_t(d)] += (1 + 2 * weight) * 0.51 * unit * code;
          bound[row + size_t(d)] += 2 * (weight + (n + 8) * u) * score[size_t(t - begin)] / total *
                                    (std::abs(v - zero) + std::abs(zero) - std::abs(v));
        }
    }
  });
  return bound;
}

// Returns "" or the first element beyond its bound.
std::string compare(const Step& got, const Step& want, const std::vector<double>& bound) {
  for (size_t i = 0; i < got.out.size(); ++i) {
    double error = std::abs(double(got.out[i]) - double(want.out[i]));
    if (!(error <= bound[i]))
      return "element " + std::to_string(i) + " of " + std::to_string(got.out.size()) + ": " +
             std::to_string(got.out[i]) + " for " + std::to_string(want.out[i]) + ", bound " + std::to_string(bound[i]);
  }
  return "";
}

void check_all_variants(const KvShape& shape, int n_heads, const CaseMemory& memory, const std::vector<Part>& parts,
                        int window, int n_threads) {
  if (!kv_rows_supported(shape)) return;  // int4 with odd head_dim
  Cache cache(shape, memory, lengths_of(parts));
  for (size_t s = 0; s < parts.size(); ++s) cache.fill(int(s), 0, parts[s].kv_length);
  ThreadTeam team(n_threads);
  const int layer = shape.n_layers - 1;
  Step want(cache, parts, n_heads, layer, window);
  attention_reference(want.args);
  const std::vector<double> plain = bounds(want.args, false);
  const std::vector<double> of_codes = shape.quantised() ? bounds(want.args, true) : plain;
  for (const AttentionVariant& variant : attention_variants()) {
    if (!variant.available()) continue;
    const std::vector<double>& bound = std::string(variant.name) == "portable" ? plain : of_codes;
    Step got(cache, parts, n_heads, layer, window);
    variant.run(got.args, team);
    std::string off = compare(got, want, bound);
    INFO(variant.name << ", " << memory.name << ", " << dtype_name(shape.dtype) << ", heads " << n_heads << "/"
                      << shape.n_kv_heads << ", dim " << shape.head_dim << ", layer " << layer << ", window " << window
                      << ", kv " << parts[0].kv_length);
    CHECK(off == "");
  }
}

TEST_CASE("attention: the reference gives results that can be computed by hand", "[attention]") {
  KvShape shape = {1, 1, 2, Dtype::f32};
  Cache cache(shape, kMemories[0], {3});
  // Two keys orthogonal to q share the weight with one that is ln 2 / scale ahead: 1/4, 1/4, 1/2.
  float k[3][2] = {{0, 1}, {0, -3}, {1, 7}}, v[3][2] = {{4, 0}, {8, 0}, {2, 6}};
  for (int t = 0; t < 3; ++t)
    for (int d = 0; d < 2; ++d) cache.put(0, 0, 0, t, 0, d, k[t][d]), cache.put(0, 0, 1, t, 0, d, v[t][d]);
  Step step(cache, {{0, 1, 3}}, 1, 0, 0);
  step.q = {float(std::log(2.0) * std::sqrt(2.0)), 0};
  attention_reference(step.args);
  CHECK(step.out[0] == Approx(4.0));
  CHECK(step.out[1] == Approx(3.0));
  step.args.sliding_window = 1;
  attention_reference(step.args);
  CHECK(step.out == std::vector<float>{2, 6});
}

TEST_CASE("attention: every length at an edge agrees with double precision", "[attention]") {
  // The lengths are block, panel, tile and split boundaries, plus and minus one, in decode and with a few tokens of
  // prefill.
  size_t turn = 0;
  for (int length : {1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 129, 511, 512, 513, 575, 577, 1023, 1025}) {
    for (Dtype dtype : kKvDtypes) {
      const int n_q = std::min(length, std::array{1, 3, 20}[turn++ % 3]);
      check_all_variants({1, 2, 16, dtype}, 4, kMemories[2], {{0, n_q, length}}, 0, 2);
    }
    ++turn;
  }
}

TEST_CASE("attention: every head shape agrees with double precision", "[attention]") {
  const Heads all[] = {{1, 1, 1},  {2, 1, 3},   {4, 4, 4},   {4, 1, 8},    {6, 2, 12},  {7, 1, 20}, {8, 1, 24},
                       {8, 2, 64}, {16, 2, 64}, {8, 8, 128}, {16, 4, 128}, {16, 1, 80}, {5, 1, 33}, {12, 2, 256}};
  size_t turn = 0;
  for (const Heads& heads : all) {
    for (Dtype dtype : kKvDtypes) {
      const int n_q = std::array{1, 2, 20}[turn++ % 3];
      check_all_variants({1, heads.n_kv_heads, heads.head_dim, dtype}, heads.n_heads, kMemories[3],
                         {{0, n_q, 20}, {1, n_q, 70}}, 0, 1);
    }
    ++turn;
  }
}

TEST_CASE("attention: ragged batches in every memory layout agree with double precision", "[attention]") {
  std::vector<Part> mixed = {{0, 1, 1}, {1, 77, 77}, {2, 1, 600}, {3, 0, 9}, {4, 9, 161}, {5, 2, 530}};
  int turn = 0;
  for (const CaseMemory& memory : kMemories) {
    for (Dtype dtype : kKvDtypes)
      check_all_variants({2, 2, 16, dtype}, 8, memory, mixed, turn++ % 2 ? 0 : memory.block_tokens == 16 ? 1 : 20, 2);
    ++turn;
  }
}

TEST_CASE("attention: sliding windows of every length agree with double precision", "[attention]") {
  for (int window : {1, 2, 5, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 700, 4000})
    for (int n_q : {1, 7, 90}) check_all_variants({1, 1, 16, Dtype::f32}, 2, kMemories[2], {{0, n_q, 640}}, window, 2);
}

TEST_CASE("attention: huge scores give a one-hot weight, not NaN", "[attention]") {
  KvShape shape = {1, 1, 16, Dtype::f32};
  Cache cache(shape, kMemories[2], {700});
  cache.fill(0, 0, 700);
  for (int d = 0; d < 16; ++d) cache.put(0, 0, 0, 333, 0, d, 1000.0f), cache.put(0, 0, 0, 5, 0, d, -1000.0f);
  for (const AttentionVariant& variant : attention_variants()) {
    if (!variant.available()) continue;
    ThreadTeam team(1);
    Step step(cache, {{0, 1, 700}}, 1, 0, 0);
    for (float& q : step.q) q = 1000.0f;
    variant.run(step.args, team);
    for (int d = 0; d < 16; ++d) CHECK(step.out[size_t(d)] == v_number(0, 0, 333, 0, d));
  }
}

TEST_CASE("attention: work() counts what the reference touches", "[attention]") {
  for (int window : {0, 5, 40})
    for (Dtype dtype : kKvDtypes) {
      KvShape shape = {2, 2, 6, dtype};
      std::vector<Part> parts = {{0, 1, 30}, {1, 17, 17}, {2, 0, 12}, {3, 9, 60}};
      Cache cache(shape, kMemories[2], {30, 17, 12, 60});
      for (int s = 0; s < 4; ++s) cache.fill(s, 0, parts[size_t(s)].kv_length);
      Step step(cache, parts, 4, 1, window);
      std::set<std::vector<int>> elements;
      double reads = 0;
      attention_reference_over(step.args, [&](int s, int kv, int t, int h, int d) {
        elements.insert({s, kv, t, h, d});
        ++reads;
        return cached(step.args, s, kv, t, h, d);
      });
      Work claimed = work(step.args);
      double q_and_out = 2.0 * 4 * double(step.q.size());
      CHECK(claimed.bytes == q_and_out + double(elements.size() / 6 * shape.row_bytes()));
      CHECK(claimed.flops == 2 * reads);  // each element read is multiplied once and added once
    }
}

}  // namespace xpyd::testing::attention_truth_test
