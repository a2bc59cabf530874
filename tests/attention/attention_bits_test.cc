// There is one order of additions: the bits of an output depend on its q, K and V, and on nothing else.
#include <array>

#include "tests/attention/attention_case.h"
#include "tests/catch.h"

#if defined(__x86_64__)
namespace xpyd::attention {
void attention_avx512_emulated(const AttentionArgs& args, ThreadTeam& team);
void attention_avx512_vnni_emulated(const AttentionArgs& args, ThreadTeam& team);
}  // namespace xpyd::attention
#endif

namespace xpyd::testing::attention_bits_test {

// Returns the outputs of tokens [0, length) of sequence `seq`, computed in steps of `chunk` tokens. With `mates`, other
// sequences of the same cache decode in the same steps.
std::vector<float> in_chunks(const AttentionVariant& variant, const Cache& cache, int seq, int length, int chunk,
                             int n_heads, int window, ThreadTeam& team, bool mates) {
  std::vector<float> all;
  for (int done = 0; done < length;) {
    int n = std::min(chunk, length - done);
    std::vector<Part> parts;
    if (mates) parts.push_back({1, 1, 65});
    parts.push_back({seq, n, done + n});
    if (mates) parts.push_back({2, 9, 40});
    Step step(cache, parts, n_heads, cache.layout.shape.n_layers - 1, window);
    variant.run(step.args, team);
    size_t row = size_t(n_heads) * size_t(cache.layout.shape.head_dim);
    const float* mine = step.out.data() + (mates ? row : 0);
    all.insert(all.end(), mine, mine + size_t(n) * row);
    done += n;
  }
  return all;
}

constexpr int kTile = 64;

struct BitCase {
  int n_heads, n_kv_heads, head_dim, length, window;
};

TEST_CASE("attention: bits do not depend on chunking, batch, memory layout or threads", "[attention]") {
  const BitCase cases[] = {{4, 1, 16, 530, 0},  {8, 2, 64, 200, 0}, {2, 2, 12, 1040, 0},  {4, 1, 128, 140, 0},
                           {4, 2, 16, 600, 70}, {8, 1, 8, 300, 7},  {16, 1, 16, 150, 0},  {2, 2, 32, 90, 1},
                           {6, 2, 80, 100, 0},  {4, 4, 48, 70, 0},  {3, 1, 96, 1030, 90}, {5, 1, 64, 70, 0}};
  for (const AttentionVariant& variant : attention_variants()) {
    if (!variant.available()) continue;
    for (const BitCase& c : cases)
      for (Dtype dtype : kKvDtypes) {
        KvShape shape = {2, c.n_kv_heads, c.head_dim, dtype};
        // Each of these dtypes runs every other case.
        if (dtype_bits(dtype) <= 8 && (&c - cases) % 2 != (dtype == Dtype::int8 || dtype == Dtype::fp8_e4m3)) continue;
        size_t row = size_t(c.n_heads) * size_t(c.head_dim);
        std::vector<float> want;
        int n_compared = 0;
        bool slow = std::string(variant.name) == "portable";  // then one layout per block size
        for (const CaseMemory& memory : kMemories) {
          if (slow && (&memory - kMemories) % 2 == (memory.block_tokens > 1)) continue;
          Cache cache(shape, memory, {c.length, 65, 40}, uint64_t(n_compared));
          cache.fill(0, 0, c.length), cache.fill(1, 0, 65), cache.fill(2, 0, 40);
          ThreadTeam team(1 + n_compared % 3);
          const int chunks[] = {c.length, 7, 64, 97};  // two in each memory, and each in several memories
          for (int turn : {n_compared / 2, n_compared / 2 + 1}) {
            const int chunk = chunks[turn % 4];
            bool mates = n_compared % 2 == 1;
            std::vector<float> got = in_chunks(variant, cache, 0, c.length, chunk, c.n_heads, c.window, team, mates);
            if (want.empty()) want = got;
            INFO(variant.name << " " << memory.name << " threads " << team.size() << " chunk " << chunk << " dim "
                              << c.head_dim << " length " << c.length << " window " << c.window << " "
                              << dtype_name(dtype));
            REQUIRE(got.size() == want.size());
            CHECK(same_bits(got.data(), want.data(), want.size()));
            ++n_compared;
          }
          for (int t = 0; t < c.length; ++t) {                      // decode
            if ((n_compared / 2 + n_compared / 8) % 2 != 0) break;  // in every other memory
            bool edge = t % kTile <= 1 || t % kTile == kTile - 1 || t + 3 > c.length;
            if (!edge && (t + n_compared) % 16 != 0) continue;
            Step step(cache, {{0, 1, t + 1}}, c.n_heads, 1, c.window);
            variant.run(step.args, team);
            INFO(variant.name << " " << memory.name << " decode at " << t << " dim " << c.head_dim);
            CHECK(same_bits(step.out.data(), want.data() + size_t(t) * row, row));
          }
        }
        CHECK(n_compared == (slow ? 8 : 16));
      }
  }
}

TEST_CASE("attention: rows that a query may not see are never read", "[attention]") {
  // Everything outside is NaN: unwritten tokens, other blocks, and tokens before the window. Inside a prefill step, the
  // V of later tokens is infinite, and only queries that may see them may notice.
  size_t turn = 0;
  for (const AttentionVariant& variant : attention_variants()) {
    if (!variant.available()) continue;
    for (const CaseMemory& memory : kMemories)
      for (Dtype dtype : kKvDtypes) {
        ++turn;
        for (int window : {0, 3, 70}) {
          const int n_q = std::array{1, 2, 60}[turn++ % 3];
          const int length = 600;
          KvShape shape = {1, 2, 16, dtype};
          ThreadTeam team(2);
          Cache clean(shape, memory, {length + 40}), poisoned(shape, memory, {length + 40});
          clean.fill(0, 0, length + 40);
          int first = window ? std::max(0, length - n_q - window + 1) : 0;
          poisoned.fill(0, first, length);
          Step want(clean, {{0, n_q, length}}, 4, 0, window), got(poisoned, {{0, n_q, length}}, 4, 0, window);
          variant.run(want.args, team);
          variant.run(got.args, team);
          INFO(variant.name << " " << memory.name << " window " << window << " n_q " << n_q);
          CHECK(same_bits(got.out.data(), want.out.data(), want.out.size()));

          // The last token's V is infinite, so only the last query may notice.
          const std::vector<float> infinite(16, INFINITY);
          for (int h = 0; h < 2; ++h) poisoned.put_row(0, 0, 1, length - 1, h, infinite.data());
          variant.run(got.args, team);
          size_t before = want.out.size() - 4 * 16;
          CHECK(same_bits(got.out.data(), want.out.data(), before));
          CHECK(!std::isfinite(got.out[before]));
        }
      }
  }
}

#if defined(__x86_64__)
TEST_CASE("attention: AVX-512 has the bits of AVX2", "[attention]") {
  if (!cpu_has(Isa::avx2)) SKIP_TEST("no AVX2 here");
  std::vector<AttentionVariant> rows = {{"avx512, emulated", attention_avx512_emulated, Isa::avx2, ""},
                                        {"avx512_vnni, emulated", attention_avx512_vnni_emulated, Isa::avx2, ""}};
  for (const AttentionVariant& row : attention_variants())
    if (row.needs >= Isa::avx2 && row.available()) rows.push_back(row);
  // The cases have 1 to 13 query rows per KV head in both shapes of work unit, and one new token, few, or a block's
  // edge.
  const BitCase cases[] = {{4, 1, 16, 530, 0},  {8, 2, 64, 200, 0}, {2, 2, 12, 100, 0},  {13, 1, 128, 140, 0},
                           {4, 2, 16, 600, 70}, {8, 1, 8, 300, 7},  {3, 3, 33, 90, 1},   {6, 2, 80, 100, 0},
                           {4, 4, 48, 70, 0},   {7, 1, 256, 60, 0}, {3, 1, 96, 530, 90}, {5, 1, 64, 70, 0},
                           {10, 2, 20, 150, 60}};
  ThreadTeam team(2);
  for (const BitCase& c : cases)
    for (Dtype dtype : kKvDtypes) {
      KvShape shape = {1, c.n_kv_heads, c.head_dim, dtype};
      if (!kv_rows_supported(shape)) continue;
      Cache cache(shape, kMemories[2], {c.length, 33});
      cache.fill(0, 0, c.length), cache.fill(1, 0, 33);
      for (int n_q : {1, 2, 5, 60}) {
        std::vector<std::vector<float>> outs;
        for (const AttentionVariant& row : rows) {
          Step step(cache, {{0, n_q, c.length}, {1, 1, 33}}, c.n_heads, 0, c.window);
          row.run(step.args, team);
          outs.push_back(step.out);
          INFO(row.name << " " << dtype_name(dtype) << " heads " << c.n_heads << "/" << c.n_kv_heads << " dim "
                        << c.head_dim << " n_q " << n_q << " window " << c.window);
          CHECK(same_bits(outs.back().data(), outs[0].data(), outs[0].size()));
        }
      }
    }
}
#endif

TEST_CASE("attention: a forced variant is the one that runs", "[attention]") {
  KvShape shape = {1, 2, 64, Dtype::f32};
  Cache cache(shape, kMemories[2], {200});
  cache.fill(0, 0, 200);
  ThreadTeam team(1);
  std::vector<std::vector<float>> outs;
  for (const AttentionVariant& variant : attention_variants()) {
    if (!variant.available()) continue;
    Step step(cache, {{0, 5, 200}}, 4, 0, 0);
    variant.run(step.args, team);
    outs.push_back(step.out);
  }
  // Fused multiply-adds round once where portable code rounds twice, so the bits tell which variant ran.
  for (size_t i = 1; i < outs.size(); ++i) CHECK((outs[i] != outs[0]));
  CHECK(std::string(attention_variants()[0].name) == "portable");
  CHECK(attention_variants()[0].available());
  CHECK((default_attention().needs == Isa::portable) == !cpu_has(Isa::avx2));
  if (outs.size() < 2) SKIP_TEST("no AVX2 here: only the portable variant was compared");
}

}  // namespace xpyd::testing::attention_bits_test
