// block_work: why a paged kernel is slower on a card and not here: how often it asks the block table.
//
// One prefill kernel in f32, a head of 128, queries in tiles of 8, keys from first to last with a running softmax, over
// memory in one piece and over blocks (that stand in order, so that all read the same bytes from the same places). It
// differs in one thing: who looks up the table. `block`: the
// loop over blocks, as this project's kernels do. `row`: the loop over rows, each time with a division by the block
// size. `vector`: every load of 32 bytes, which is what a thread of a card does that copies its 16 bytes of a tile
// (FlashAttention's and FlashInfer's paged kernels; vAttention, section 3.4, counts 7 to 13 % more instructions and
// spilled registers, and 1.24 to 1.42 times the time). All give the same bits. The block size is known when it runs, as
// theirs is.
//
// Arithmetic. Of a row the kernel loads 16 vectors of K and of V and multiplies each by 8 queries, and what V adds to is
// read and written: 2 * 16 * 8 * 2.5 = 640 instructions beside a few tens for the softmax, 300 cycles. A look-up with its
// division is 10 instructions and 10 to 20 cycles. `block`: 20 cycles of 16 rows' 5,000: 1.00. `row`: twice (K, V) 15 of
// 300: 1.05 to 1.1, much of it hidden. `vector`: 32 times 10 to 20, a good half of it hidden behind the products: 1.3 to
// 1.8. So the published gains
// need a look-up for every 16 to 64 bytes, and a kernel that asks once for a block has nothing to gain. (A card hides
// more, and its tile has 64 to 128 queries for each load: hence 1.24 there.)
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/random.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::block_work_experiment {
namespace {

constexpr int kDim = 128, kTile = 8, kKeys = 16;  // keys whose scores are kept at a time

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kVectors = kDim / 8;

struct Memory {
  const float* rows;       // [blocks, K and V, block_tokens, kDim]
  const int32_t* table;
  const int* block_tokens;
};

enum class Way { plain, block, row, vector };

inline __attribute__((always_inline)) const float* row_at(const Memory& m, int tokens_of_block, int which, int token) {
  const int block = token / tokens_of_block, at = token - block * tokens_of_block;
  return m.rows + ((int64_t{m.table[block]} * 2 + which) * tokens_of_block + at) * kDim;
}

// The row of a token, vector by vector.
template <Way way>
struct Row {
  const Memory& m;
  const int* block_tokens;
  const float* piece;  // plain, block: of the first token of these keys; row: of the token
  int which, token, in_piece;

  inline __attribute__((always_inline)) Lanes operator[](int i) const {
    if constexpr (way == Way::vector) {
      int size = *block_tokens;
      asm volatile("" : "+r"(size));  // this thread knows nothing of what another one has found
      return *reinterpret_cast<const Lanes*>(row_at(m, size, which, token) + 8 * i);
    }
    return *reinterpret_cast<const Lanes*>(piece + (way == Way::row ? 0 : in_piece * kDim) + 8 * i);
  }
};

template <Way way>
__attribute__((noinline)) void attend(const Memory& m, const float* q, int n_keys, float* out) {
  const int size = *m.block_tokens;
  float scores[kTile][kKeys], most[kTile], sum[kTile];
  std::fill_n(most, kTile, -INFINITY);
  std::fill_n(sum, kTile, 0.f);
  std::memset(out, 0, sizeof(float) * kTile * kDim);
  for (int first = 0; first < n_keys; first += kKeys) {
    const float* pieces[2];  // of these keys' K and V: plain, block
    for (int which = 0; which < 2; ++which)
      pieces[which] = way == Way::plain
                          ? m.rows + (int64_t{first / size} * 2 + which) * size * kDim + first % size * kDim
                          : row_at(m, size, which, first);
    const auto row = [&](int which, int key) __attribute__((always_inline)) {
      const float* piece = pieces[which];
      if constexpr (way == Way::row) {
        int now = size;
        asm volatile("" : "+r"(now));
        piece = row_at(m, now, which, first + key);
      }
      return Row<way>{m, m.block_tokens, piece, which, first + key, key};
    };
    for (int key = 0; key < kKeys; ++key) {
      const auto k = row(0, key);
      Lanes dots[kTile] = {};
      for (int i = 0; i < kVectors; ++i) {
        const Lanes x = k[i];
#pragma GCC unroll 8
        for (int t = 0; t < kTile; ++t) dots[t] += x * *reinterpret_cast<const Lanes*>(q + t * kDim + 8 * i);
      }
      for (int t = 0; t < kTile; ++t)
        scores[t][key] = ((dots[t][0] + dots[t][4]) + (dots[t][1] + dots[t][5])) +
                         ((dots[t][2] + dots[t][6]) + (dots[t][3] + dots[t][7]));
    }
    for (int t = 0; t < kTile; ++t) {
      const float now = std::max(most[t], *std::max_element(scores[t], scores[t] + kKeys));
      const float keep = std::exp(most[t] - now);
      most[t] = now, sum[t] *= keep;
      for (float& score : scores[t]) score = std::exp(score - now), sum[t] += score;
      for (int d = 0; d < kDim; ++d) out[t * kDim + d] *= keep;
    }
    for (int key = 0; key < kKeys; ++key) {
      const auto v = row(1, key);
      for (int i = 0; i < kVectors; ++i) {
        const Lanes x = v[i];
#pragma GCC unroll 8
        for (int t = 0; t < kTile; ++t) *reinterpret_cast<Lanes*>(out + t * kDim + 8 * i) += scores[t][key] * x;
      }
    }
  }
  for (int t = 0; t < kTile; ++t)
    for (int d = 0; d < kDim; ++d) out[t * kDim + d] /= sum[t];
}

#if defined(__x86_64__)
#pragma GCC pop_options
#endif

struct Kernel {
  const char* name;
  void (*run)(const Memory&, const float*, int, float*);
};
constexpr Kernel kKernels[] = {{"plain", attend<Way::plain>},
                               {"block", attend<Way::block>},
                               {"row", attend<Way::row>},
                               {"vector", attend<Way::vector>}};

struct alignas(64) CacheLine {
  float at[16];
  bool operator==(const CacheLine&) const = default;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int block : setting.tiny ? std::vector{16} : std::vector{16, 256}) all.push_back({{"block_tokens", block}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
#if defined(__x86_64__)
  if (!cpu_has(Isa::avx2)) return Error{ErrorCode::unavailable, "block_work: expected a CPU with AVX2"};
#endif
  const int block_tokens = point["block_tokens"];
  const int n_keys = setting.tiny ? 256 : 4096, tiles = setting.tiny ? 1 : 4, rounds = setting.tiny ? 41 : 81;
  Random random(setting.seed + 1);
  const auto draw = [&](size_t n) {
    std::vector<CacheLine> x(n / 16);
    for (size_t i = 0; i < n; ++i) x[i / 16].at[i % 16] = float(random.uniform() - .5);
    return x;
  };
  const std::vector<CacheLine> q = draw(size_t(tiles) * kTile * kDim), rows = draw(size_t(n_keys) * 2 * kDim);
  std::vector<int32_t> table(size_t(n_keys / block_tokens));
  std::iota(table.begin(), table.end(), 0);
  const Memory memory{rows[0].at, table.data(), &block_tokens};

  RealClock clock;
  std::vector<double> ms[std::size(kKernels)];
  std::vector<CacheLine> outs[std::size(kKernels)];
  for (auto& out : outs) out.resize(q.size());
  for (int round = 0; round < rounds; ++round)
    for (size_t turn = 0; turn < std::size(kKernels); ++turn) {
      const size_t k = (turn + size_t(round)) % std::size(kKernels);
      const double start = clock.now();
      for (int t = 0; t < tiles; ++t)
        kKernels[k].run(memory, q[size_t(t * kTile * kDim / 16)].at, n_keys, outs[k][size_t(t * kTile * kDim / 16)].at);
      ms[k].push_back(1e3 * (clock.now() - start));
    }
  Finding found;
  double plain = 0;
  for (size_t k = 0; k < std::size(kKernels); ++k) {
    if (outs[k] != outs[0]) return Finding{{}, std::string(kKernels[k].name) + ": other bits than plain"};
    std::ranges::sort(ms[k]);
    const double quickest = ms[k].front();  // others use the machine, too
    if (k == 0) plain = quickest;
    found.rows.push_back({{"asks", kKernels[k].name}, {"ms", quickest}, {"times_plain", quickest / plain}});
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("block_work", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::block_work_experiment
