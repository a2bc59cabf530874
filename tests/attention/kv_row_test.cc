// Tests rows of KV: their bytes, and the distance of stored from given values. Also tests append_kv, which moves
// exactly the step's rows to exactly their places.
#include "attention/kv_dtype/kv_row.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/attention/attention_case.h"
#include "tests/catch.h"

namespace xpyd::testing::kv_row_test {

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

// Checks the bound of kv_row.h for every element, and that of the scale, which makes it a bound in terms of min and
// max.
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
    // The result has one rounding, however it is multiplied and added.
    const uint32_t code = kv_code(dtype, row.bytes.data(), int(d));
    CHECK(got[d] == float(double(code) * scale + double(row.scale().zero)));
    CHECK(got[d] == std::fma(float(code), row.scale().scale, row.scale().zero));
    CHECK(kv_element(dtype, row.head_dim, row.bytes.data(), int(d)) == got[d]);
  }
  INFO(what << " " << dtype_name(dtype) << " scale " << scale << " of " << min << " to " << max);
  CHECK(scale <= (1 + 0x1p-10) * (max - min + 0x1p-10 * std::abs(min) + u) / n + u);
}

constexpr Dtype kQuantised[] = {Dtype::int8, Dtype::int4}, kFp8[] = {Dtype::fp8_e4m3, Dtype::fp8_e5m2};

// Reading any part gives the same as reading element by element.
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

TEST_CASE("kv row: the stored bytes equal results computed by hand", "[attention]") {
  // -1 to 14 give zero -1 and scale 1 in int4. The codes are 0, 15, 1, 4, with the even d in the low half.
  const Row four(Dtype::int4, {-1.0f, 14.0f, 0.0f, 3.4f});
  const uint8_t want4[] = {0xf0, 0x41, 0x00, 0x3c, 0x00, 0xbc};
  for (int i = 0; i < 6; ++i) CHECK(int(four.bytes[size_t(i)]) == want4[i]);
  CHECK(four.values() == std::vector<float>{-1, 14, 0, 3});
  // 0 to 510 give scale 2. 3 and 7 lie half way and go to the even code.
  const Row eight(Dtype::int8, {510.0f, 0.0f, 3.0f, 7.0f, 100.5f});
  const uint8_t want8[] = {255, 0, 2, 4, 50, 0x00, 0x40, 0x00, 0x00};
  for (int i = 0; i < 9; ++i) CHECK(int(eight.bytes[size_t(i)]) == want8[i]);
  CHECK(eight.values() == std::vector<float>{510, 0, 4, 8, 100});
  // Zeros of either sign give the same bytes.
  for (Dtype dtype : kQuantised) CHECK((Row(dtype, {0.0f, -0.0f}).bytes == Row(dtype, {-0.0f, 0.0f}).bytes));
}

TEST_CASE("kv row: fp8 has the values of its two forms, rounds to the nearest, and saturates", "[attention]") {
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
}

TEST_CASE("kv row: vector code has the bits of the quantiser's plain loops, whatever is in a row", "[attention]") {
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

TEST_CASE("kv row: one element that is not finite makes all elements NaN", "[attention]") {
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

TEST_CASE("append: every row lands in its place and nothing else changes", "[attention]") {
  std::vector<Part> parts = {{0, 1, 30}, {1, 17, 17}, {2, 0, 12}, {3, 40, 75}};
  for (const CaseMemory& memory : kMemories)
    for (Dtype dtype : kKvDtypes)
      for (int threads : {1, 2, 3})
        for (int dim : {4, 5, 64}) {
          if (dtype == Dtype::int4 && dim % 2 != 0) continue;
          KvShape shape = {2, 3, dim, dtype};
          Cache got(shape, memory, {30, 17, 12, 75}), want(shape, memory, {30, 17, 12, 75});
          // K and V lie as a fused projection leaves them: V behind K, in rows longer than needed.
          int width = 3 * dim, stride = 2 * width + 7;
          std::vector<float> fused(size_t(58 * stride), std::nanf(""));
          std::vector<int32_t> q_offsets = {0}, kv_lengths;
          std::vector<KvView> views;
          for (const Part& part : parts) {
            for (int i = 0; i < part.n_q; ++i) {
              int position = part.kv_length - part.n_q + i;
              float* row = fused.data() + size_t((q_offsets.back() + i) * stride);
              for (int h = 0; h < 3; ++h)
                for (int kv = 0; kv < 2; ++kv) {
                  float* x = row + kv * width + h * dim;
                  for (int d = 0; d < dim; ++d) x[d] = number(kv + 1, part.seq, 1, position, h, d);
                  want.put_row(part.seq, 1, kv, position, h, x);
                }
            }
            q_offsets.push_back(q_offsets.back() + part.n_q);
            kv_lengths.push_back(part.kv_length);
            views.push_back(got.views[size_t(part.seq)]);
          }
          ThreadTeam team(threads);
          append_kv({.k = fused.data(),
                     .v = fused.data() + width,
                     .stride = stride,
                     .q_offsets = q_offsets,
                     .kv_lengths = kv_lengths,
                     .views = views,
                     .layer = 1},
                    team);
          INFO(memory.name << " " << dtype_name(dtype) << " threads " << threads << " dim " << dim);
          CHECK((got.pool == want.pool));  // in brackets, so that a failure does not print a megabyte
        }
}

TEST_CASE("kv row: bf16 rounds to nearest, ties to even, and keeps NaN and infinity", "[attention]") {
  // 1 + 2^-8 lies half way between bf16 1 and 1 + 2^-7. 1 + 3 2^-8 lies between 1 + 2^-7 and 1 + 2^-6.
  const std::vector<float> in = {1.0f, 1.00390625f, 1.01171875f, 1.0039063692f, -1.00390625f, 3.4e38f, INFINITY,
                                 NAN,  -INFINITY,   -0.0f,       1e-40f,        65504.0f,     0.1f,    1e-45f};
  const uint16_t want[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x7f80, 0x7f80,
                           0x7fc0, 0xff80, 0x8000, 0x0001, 0x4780, 0x3dcd, 0x0000};
  const Row row(Dtype::bf16, in);
  for (size_t d = 0; d < in.size(); ++d) {
    INFO(in[d]);
    uint16_t bits;
    std::memcpy(&bits, &row.bytes[2 * d], 2);
    CHECK(bits == want[d]);
  }
}

}  // namespace xpyd::testing::kv_row_test
