// Rows of few bits: what is stored, how far it is from what was given, and what attention over it makes of that.
#include "attention/kv_row.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/attention_reference.h"
#include "tests/attention/attention_case.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_row_test {
namespace {

struct Row {
  Dtype dtype;
  int head_dim;
  std::vector<std::byte> bytes;

  Row(Dtype given, const std::vector<float>& x)
      : dtype(given), head_dim(int(x.size())), bytes(KvShape{1, 1, head_dim, dtype}.row_bytes() + 1, std::byte{0xab}) {
    write_kv_row(dtype, head_dim, x.data(), bytes.data());
    CHECK(bytes.back() == std::byte{0xab});
  }
  KvScale scale() const { return kv_scale(bytes.data() + bytes.size() - 5); }
  std::vector<float> values() const {
    std::vector<float> all(static_cast<size_t>(head_dim));
    read_kv_row(dtype, head_dim, bytes.data(), 0, head_dim, all.data());
    return all;
  }
};

int levels(Dtype dtype) { return dtype == Dtype::int8 ? 255 : 15; }

// The bound of kv_row.h, of every element; and of the scale, which makes it one of min and max.
void check_bound(Dtype dtype, const std::vector<float>& x, const char* what) {
  const Row row(dtype, x);
  const std::vector<float> got = row.values();
  const double u = 0x1p-24, n = levels(dtype), scale = row.scale().scale;
  double min = INFINITY, max = -INFINITY;
  for (size_t d = 0; d < x.size(); ++d) {
    const double want = std::clamp(double(x[d]), -65504.0, 65504.0);
    min = std::min(min, want), max = std::max(max, want);
    INFO(what << " " << dtype_name(dtype) << " element " << d << " of " << x.size() << ": " << x[d] << " became "
              << got[d] << ", scale " << scale);
    CHECK(std::abs(double(got[d]) - want) <= scale * (0.5 + 4 * n * u) + u * std::abs(got[d]));
    // One rounding, whoever multiplies and adds.
    const uint32_t code = kv_code(dtype, row.bytes.data(), int(d));
    CHECK(got[d] == float(double(code) * scale + double(row.scale().zero)));
    CHECK(got[d] == std::fma(float(code), row.scale().scale, row.scale().zero));
    CHECK(kv_element(dtype, row.head_dim, row.bytes.data(), int(d)) == got[d]);
  }
  INFO(what << " " << dtype_name(dtype) << " scale " << scale << " of " << min << " to " << max);
  CHECK(scale <= (1 + 0x1p-10) * (max - min + 0x1p-10 * std::abs(min) + u) / n + u);
}

constexpr Dtype kQuantised[] = {Dtype::int8, Dtype::int4}, kFp8[] = {Dtype::fp8_e4m3, Dtype::fp8_e5m2};

// Any part is read as element by element.
void check_parts(const Row& row) {
  for (const int begin : {0, 1, row.head_dim / 2, row.head_dim - 1}) {
    std::vector<float> got(static_cast<size_t>(row.head_dim - begin));
    read_kv_row(row.dtype, row.head_dim, row.bytes.data(), begin, row.head_dim, got.data());
    for (int d = begin; d < row.head_dim; ++d) {
      const float want = kv_element(row.dtype, row.head_dim, row.bytes.data(), d);
      REQUIRE((got[size_t(d - begin)] == want || (std::isnan(want) && std::isnan(got[size_t(d - begin)]))));
    }
  }
}

}  // namespace

TEST_CASE("kv row: f16 on either side", "[attention]") {
  for (uint32_t h = 0; h <= 0x7bff; ++h)
    for (uint32_t sign : {0u, 0x8000u}) {
      const uint16_t half = uint16_t(sign | h);
      const float x = f16_to_f32(half);
      REQUIRE(to_f16(x, true) == half);
      REQUIRE(to_f16(x, false) == half);
      if (h == 0x7bff) continue;
      const uint16_t outer = uint16_t(half + 1);  // the next further from 0
      for (float between :
           {std::nextafter(x, f16_to_f32(outer)), (x + f16_to_f32(outer)) / 2, std::nextafter(f16_to_f32(outer), x)}) {
        REQUIRE(to_f16(between, true) == (sign ? half : outer));
        REQUIRE(to_f16(between, false) == (sign ? outer : half));
      }
    }
}

TEST_CASE("kv row: bytes that can be worked out by hand", "[attention]") {
  // -1 to 14: zero -1, scale 1 in int4; codes 0, 15, 1, 4 with the even d in the low half.
  const Row four(Dtype::int4, {-1.0f, 14.0f, 0.0f, 3.4f});
  const uint8_t want4[] = {0xf0, 0x41, 0x00, 0x3c, 0x00, 0xbc};
  for (int i = 0; i < 6; ++i) CHECK(int(four.bytes[size_t(i)]) == want4[i]);
  CHECK(four.values() == std::vector<float>{-1, 14, 0, 3});
  // 0 to 510: scale 2; 3 and 7 lie half way and go to the even code.
  const Row eight(Dtype::int8, {510.0f, 0.0f, 3.0f, 7.0f, 100.5f});
  const uint8_t want8[] = {255, 0, 2, 4, 50, 0x00, 0x40, 0x00, 0x00};
  for (int i = 0; i < 9; ++i) CHECK(int(eight.bytes[size_t(i)]) == want8[i]);
  CHECK(eight.values() == std::vector<float>{510, 0, 4, 8, 100});
  // Zeros of either sign are one row of bytes.
  for (Dtype dtype : kQuantised) CHECK((Row(dtype, {0.0f, -0.0f}).bytes == Row(dtype, {-0.0f, 0.0f}).bytes));
  // 128 dims: 1.94 and 3.76 times as many tokens as f16.
  const double f16 = double(KvShape{1, 1, 128, Dtype::f16}.row_bytes());
  CHECK(f16 / double(KvShape{1, 1, 128, Dtype::int8}.row_bytes()) == Approx(1.939).margin(5e-4));
  CHECK(f16 / double(KvShape{1, 1, 128, Dtype::int4}.row_bytes()) == Approx(3.765).margin(5e-4));
}

TEST_CASE("kv row: fp8 has the numbers of its two forms, the nearest is found, and what is large saturates",
          "[attention]") {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> x = {448,          -448,    464,   1e30f, 57344, -1e5f, 0x1p-9f, 0x1p-10f,
                                3 * 0x1p-17f, 1.0625f, -0.0f, 0.3f,  inf,   -inf,  NAN,     1};
  const Row narrow(Dtype::fp8_e4m3, x), wide(Dtype::fp8_e5m2, x);
  const uint8_t e4m3[] = {0x7e, 0xfe, 0x7e, 0x7e, 0x7e, 0xfe, 0x01, 0x00, 0, 0x38, 0x80, 0x2a, 0x7f, 0xff, 0x7f, 0x38};
  const uint8_t e5m2[] = {0x5f, 0xdf, 0x5f, 0x7b, 0x7b, 0xfb, 0x18, 0x14, 2, 0x3c, 0x80, 0x35, 0x7c, 0xfc, 0x7e, 0x3c};
  for (size_t i = 0; i < x.size(); ++i) {
    INFO(x[i]);
    CHECK(int(narrow.bytes[i]) == e4m3[i]);
    CHECK(int(wide.bytes[i]) == e5m2[i]);
  }
  CHECK(narrow.bytes.size() == x.size() + 1);  // nothing behind the elements
  for (Dtype dtype : kFp8) {
    const Fp8Form& form = dtype == Dtype::fp8_e4m3 ? kE4m3 : kE5m2;
    for (int code = 0; code < form.largest; ++code) {
      const float low = kv_fp8(dtype, std::byte(code)), high = kv_fp8(dtype, std::byte(code + 1)),
                  half = (low + high) / 2;
      REQUIRE(low < high);
      REQUIRE(nearest_fp8(form, low) == code);
      REQUIRE(nearest_fp8(form, -high) == (0x80 | (code + 1)));
      REQUIRE(nearest_fp8(form, std::nextafter(half, low)) == code);
      REQUIRE(nearest_fp8(form, std::nextafter(half, high)) == code + 1);
      REQUIRE(nearest_fp8(form, half) == code + code % 2);  // ties to the even code
    }
  }
  // Twice as many tokens as f16.
  CHECK(2 * KvShape{1, 1, 128, Dtype::fp8_e4m3}.row_bytes() == KvShape{1, 1, 128, Dtype::f16}.row_bytes());
}

TEST_CASE("kv row: vectors leave the bits of the quantiser's own loops, whatever is in a row", "[attention]") {
  Random random(17);
  for (int dim : {2, 8, 16, 30, 32, 48, 64, 78, 96, 128, 256})
    for (int round = 0; round < 60; ++round) {
      std::vector<float> x(static_cast<size_t>(dim));
      const float size = std::pow(10.0f, float(random.uniform() * 12 - 6));
      for (float& e : x) e = size * float(random.uniform() - 0.3);
      const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e6f, -1e6f, 1e-41f};
      if (round % 2) x[random.below(x.size())] = odd[random.below(std::size(odd))];
      for (Dtype dtype : kFp8) {
        const Row row(dtype, x);
        for (int d = 0; d < dim; ++d)
          REQUIRE(uint8_t(row.bytes[size_t(d)]) == nearest_fp8(dtype == Dtype::fp8_e4m3 ? kE4m3 : kE5m2, x[size_t(d)]));
        check_parts(row);
      }
      const Row half(Dtype::bf16, x);
      for (int d = 0; d < dim; ++d) {
        uint16_t bits;
        std::memcpy(&bits, &half.bytes[2 * size_t(d)], 2);
        REQUIRE(bits == to_bf16(x[size_t(d)]).bits);
      }
      float min = INFINITY, max = -INFINITY, poison = 0;
      for (float e : x) min = e < min ? e : min, max = e > max ? e : max, poison += 0.0f * e;
      for (Dtype dtype : kQuantised) {
        const KvQuantiser q = kv_quantiser(dtype, min, max, poison);
        const Row row(dtype, x);
        uint16_t stored[2];
        std::memcpy(stored, &row.bytes[row.bytes.size() - 5], 4);
        REQUIRE((stored[0] == q.scale && stored[1] == q.zero));
        for (int d = 0; d < dim; ++d) REQUIRE(kv_code(dtype, row.bytes.data(), d) == q.code(x[size_t(d)]));
        check_parts(row);
      }
    }
}

TEST_CASE("kv row: no element is further off than half a scale and f32's rounding", "[attention]") {
  Random random(5);
  auto uniform = [&](double from, double to) { return float(from + (to - from) * random.uniform()); };
  for (Dtype dtype : kQuantised)
    for (int dim : {1, 2, 7, 8, 12, 16, 64, 80, 128, 256}) {
      if (dtype == Dtype::int4 && dim % 2 != 0) continue;
      auto row = [&](auto&& at) {
        std::vector<float> x;
        for (int d = 0; d < dim; ++d) x.push_back(at(d));
        return x;
      };
      for (int i = 0; i < 200; ++i) {
        const double size = std::pow(10.0, random.uniform() * 14 - 9);  // 1e-9 to 1e5
        check_bound(dtype, row([&](int) { return uniform(-size, size); }), "random");
        const double offset = uniform(-6e4, 6e4);
        check_bound(dtype, row([&](int) { return uniform(offset, offset + size); }), "far from 0");
      }
      for (float c :
           {0.0f, -0.0f, 1.0f, -1.0f, 0.1f, -0.1f, 3.14159f, -65504.0f, 1e-7f, -1e-7f, 1e-40f, 65503.9f, 1234.567f})
        check_bound(dtype, row([&](int) { return c; }), "constant");
      for (float outlier : {100.0f, -100.0f, 6e4f, -6e4f, 1e-3f})
        check_bound(dtype, row([&](int d) { return d == dim / 2 ? outlier : uniform(-1, 1); }), "one outlier");
      check_bound(dtype, row([&](int d) { return d % 2 ? 1e-40f : -3e-42f; }), "denormal");
      check_bound(dtype, row([&](int d) { return float(d - dim / 2) * 1e-8f; }), "denormal f16");
      check_bound(dtype, row([&](int d) { return d % 2 ? 65504.0f : -65504.0f; }), "large");
      check_bound(dtype, row([&](int d) { return d % 2 ? 3e38f : -1e30f; }), "saturated");
      check_bound(dtype, row([&](int d) { return d % 3 ? 1e5f : 2e5f; }), "all saturated");
    }
}

TEST_CASE("kv row: one element that is not finite makes all of them NaN", "[attention]") {
  const float inf = std::numeric_limits<float>::infinity();
  for (Dtype dtype : kQuantised)
    for (float bad : {inf, -inf, float(NAN)})
      for (int dim : {2, 16, 18})
        for (int at = 0; at < dim; ++at) {
          std::vector<float> x(static_cast<size_t>(dim), 0.5f);
          x[size_t(at)] = bad;
          for (float y : Row(dtype, x).values()) CHECK(std::isnan(y));
          std::fill(x.begin(), x.end(), bad);
          for (float y : Row(dtype, x).values()) CHECK(std::isnan(y));
        }
}

TEST_CASE("attention: over int8 and int4 KV it is as far from f32 as the rows' scales allow", "[attention]") {
  // With |K' - K| <= e_K and |V' - V| <= e_V per row, scores move by at most D = max_t scale
  // sum_d |q_d| e_K(t), each weight by a factor within exp(+-2 D), so an output by at most
  // exp(2 D) sum_t w_t e_V(t) + (exp(2 D) - 1) sum_t w_t |V_t|; 1e-5 more is the arithmetic in f32.
  const int n_heads = 4, n_kv_heads = 2, dim = 64, length = 300;
  ThreadTeam team(2);
  Cache plain({1, n_kv_heads, dim, Dtype::f32}, kMemories[2], {length});
  plain.fill(0, 0, length);
  for (Dtype dtype : kQuantised)
    for (int n_q : {1, 40}) {
      Cache rows({1, n_kv_heads, dim, dtype}, kMemories[3], {length});
      rows.fill(0, 0, length);
      Step exact(plain, {{0, n_q, length}}, n_heads, 0, 0);
      attention_reference(exact.args);
      auto half_scale = [&](int kv, int t, int h) {
        const std::byte* row = rows.views[0].row(0, kv, t, h);
        const double u = 0x1p-24;
        return kv_scale(row + rows.layout.shape.element_bytes()).scale * (0.5 + 4 * levels(dtype) * u) + u;
      };
      // The weighted sums that the bound needs: e_V, and |V|, in the place of V.
      Step error(plain, {{0, n_q, length}}, n_heads, 0, 0);
      Step size(plain, {{0, n_q, length}}, n_heads, 0, 0);
      attention_reference_over(error.args, [&](int, int kv, int t, int h, int d) {
        return kv ? half_scale(1, t, h) : double(k_number(0, 0, t, h, d));
      });
      attention_reference_over(size.args, [&](int, int kv, int t, int h, int d) {
        return kv ? std::abs(double(v_number(0, 0, t, h, d))) : double(k_number(0, 0, t, h, d));
      });
      std::vector<double> bound(exact.out.size());
      for (size_t row = 0; row < bound.size() / dim; ++row) {
        double q = 0, most = 0;
        for (int d = 0; d < dim; ++d) q += std::abs(double(exact.q[row * dim + size_t(d)]));
        const int head = int(row) % n_heads / (n_heads / n_kv_heads);
        for (int t = 0; t < length; ++t) most = std::max(most, half_scale(0, t, head));
        const double factor = std::exp(2 * q * most * double(exact.args.scale));
        for (size_t i = row * dim; i < (row + 1) * dim; ++i)
          bound[i] = factor * double(error.out[i]) + (factor - 1) * double(size.out[i]) + 1e-5;
      }
      for (const AttentionVariant& variant : attention_variants()) {
        if (!variant.available()) continue;
        Step got(rows, {{0, n_q, length}}, n_heads, 0, 0);
        variant.run(got.args, team);
        double worst = 0, largest = 0, total = 0;
        for (size_t i = 0; i < bound.size(); ++i) {
          const double off = std::abs(double(got.out[i]) - double(exact.out[i]));
          worst = std::max(worst, off / bound[i]), largest = std::max(largest, off);
          total += std::abs(double(exact.out[i]));
        }
        INFO(variant.name << " " << dtype_name(dtype) << " n_q " << n_q << ": largest " << largest
                          << " of a mean |out| of " << total / double(bound.size()));
        CHECK(worst <= 1);
        CHECK(largest > 0);  // it is quantised
        CHECK(largest < (dtype == Dtype::int8 ? 0.01 : 0.2));
      }
    }
}

}  // namespace xpyd::testing::kv_row_test
