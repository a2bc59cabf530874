// append_kv moves exactly the step's rows, to exactly their places.
#include "tests/attention/attention_case.h"
#include "tests/catch.h"

namespace xpyd::testing::append_test {

TEST_CASE("append: every row lands in its place and nothing else changes", "[attention]") {
  std::vector<Part> parts = {{0, 1, 30}, {1, 17, 17}, {2, 0, 12}, {3, 40, 75}};
  for (const CaseMemory& memory : kMemories)
    for (Dtype dtype : kKvDtypes)
      for (int threads : {1, 2, 3})
        for (int dim : {4, 5, 64}) {
          if (dtype == Dtype::int4 && dim % 2 != 0) continue;
          KvShape shape = {2, 3, dim, dtype};
          Cache got(shape, memory, {30, 17, 12, 75}), want(shape, memory, {30, 17, 12, 75});
          // K and V as a fused projection leaves them: V behind K, rows longer than needed.
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
          CHECK((got.pool == want.pool));  // in brackets: not a megabyte of text when it fails
        }
}

TEST_CASE("append: bf16 rounds to nearest, ties to even, and keeps NaN and infinity", "[attention]") {
  // 1 + 2^-8 lies half way between bf16 1 and 1 + 2^-7; 1 + 3 2^-8 between 1 + 2^-7 and 1 + 2^-6.
  float in[16] = {1.0f, 1.00390625f, 1.01171875f, 1.0039063692f, -1.00390625f, 3.4e38f, INFINITY, -INFINITY,
                  NAN,  0.0f,        -0.0f,       1e-40f,        65504.0f,     0.1f,    1e-45f,   -3.0f};
  uint16_t out[16] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x7f80, 0x7f80, 0xff80,
                      0x7fc0, 0x0000, 0x8000, 0x0001, 0x4780, 0x3dcd, 0x0000, 0xc040};
  KvShape shape = {1, 1, 16, Dtype::bf16};
  Cache cache(shape, kMemories[0], {1});
  std::vector<int32_t> q_offsets = {0, 1}, kv_lengths = {1};
  ThreadTeam team(1);
  append_kv({.k = in,
             .v = in,
             .stride = 16,
             .q_offsets = q_offsets,
             .kv_lengths = kv_lengths,
             .views = cache.views,
             .layer = 0},
            team);
  for (int kv = 0; kv < 2; ++kv) {
    uint16_t got[16];
    std::memcpy(got, cache.views[0].row(0, kv, 0, 0), sizeof got);
    for (int d = 0; d < 16; ++d) {
      INFO("element " << d);
      CHECK(got[d] == out[d]);
    }
  }
}

}  // namespace xpyd::testing::append_test
