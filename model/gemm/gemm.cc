// Blocking, threads and the group tree of y = x W^T; the innermost tiles are behind GemmKernels. README.md draws the
// panels and derives the block sizes.
#include "model/gemm/gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model/gemm/gemm_kernels.h"
#include "model/gemm/sum_tree.h"

namespace xpyd::model {
namespace {

// Products with fewer multiply-adds run on one thread: waking the team costs more than it saves.
constexpr long kSerialMacs = 64 * 1024;

constexpr int kMaxPassRows = 264;  // rows that share a block of weights while it is in L1
constexpr int kManyTiles = 8;      // more tiles than this: the driver prefetches the next block between tiles
constexpr int kMaxSumRows = 384;   // rows x panels whose sums a thread keeps at a time
static_assert(kMaxSumRows >= kMaxPassRows && kMaxSumRows >= kMaxTileRows * kMaxTilePanels);

// How rows are cut into register tiles: full tiles first, then at most two smaller ones of nearly equal size. A tile of
// few rows has too few chains to hide the latency of an FMA.
struct TilePlan {
  TilePlan(int m, int most_) : most(most_) {
    int rest = m % most;
    n_full = m / most;
    tail[0] = rest;
    if (rest > 0 && rest <= most / 2 && n_full > 0) {
      --n_full;
      tail[0] = (rest + most + 1) / 2;
      tail[1] = rest + most - tail[0];
    }
    n_tiles = n_full + (tail[0] > 0) + (tail[1] > 0);
  }
  int first_row(int tile) const {
    int past = std::min(tile, n_full) * most;
    if (tile > n_full) past += tail[0];
    if (tile > n_full + 1) past += tail[1];
    return past;
  }
  int rows(int tile) const { return tile < n_full ? most : tail[tile - n_full]; }
  int most, n_full, n_tiles, tail[2] = {0, 0};
};

// Block sizes depend on M only. They move work in time and change no bit of the result.
struct Blocking {
  int panels;     // of one register tile; few rows need several for enough chains
  int block_k;    // longest block of K
  bool prefetch;  // prefetch the next block's weights while this one is in use
};

Blocking choose_blocking(int m, Dtype dtype, const TileShapes& shapes) {
  const int panels = m <= shapes.rows ? shapes.panels[m] : 1;
  // A block of quantised weights is one piece, 1 to 2 KiB.
  if (is_quantised(dtype)) return {panels, 0, m > 2};
  // The hardware's prefetchers follow three or more streams by themselves. With one or two panels, software prefetch
  // gives +29 % at M = 4 on one thread.
  if (m <= shapes.rows) return {panels, panels > 2 ? 1 << 30 : 512, panels <= 2};
  // 12 KiB of bf16 or 16 KiB of f32 weights, and 9 or 6 KiB of x, in 32 KiB of L1.
  return {1, dtype == Dtype::f32 ? 256 : 384, true};
}

// The K of some or all groups, as blocks that a tile takes. Quantised pieces stay whole; other pieces are cut into
// equal parts of at most block_k.
struct Block {
  Range stored;   // counted from the first of these groups
  Range k;        // positions in `order`
  size_t offset;  // in a panel
  int group;
  bool first, last;  // block of its group
};
struct Blocks {
  Blocks(const PackedMatrix& w_, Range groups_, int block_k) : w(w_), groups(groups_) {
    const auto in = [](const PackedMatrix::Piece& p, int group) { return p.group < group; };
    first = int(std::lower_bound(w.pieces.begin(), w.pieces.end(), groups.begin, in) - w.pieces.begin());
    last = int(std::lower_bound(w.pieces.begin(), w.pieces.end(), groups.end, in) - w.pieces.begin());
    if (is_quantised(w.dtype)) return;
    const int longest = (w.k + w.k_groups - 1) / w.k_groups;
    parts = (longest - 1) / block_k + 1;
  }
  int n_groups() const { return groups.end - groups.begin; }
  int count() const { return (last - first) * parts; }
  Block operator[](int i) const {
    const int at = parts == 1 ? first + i : first + i / parts, part = i - (at - first) * parts;
    const PackedMatrix::Piece& p = w.pieces[size_t(at)];
    const int length = p.stored.end - p.stored.begin, base = p.stored.begin - w.pieces[size_t(first)].stored.begin;
    const Range of = parts == 1 ? Range{0, length} : share(length, part, parts, 8);
    const auto place = [&](int stored) { return std::min(p.k.begin + stored, p.k.end); };
    const bool codes = is_quantised(w.dtype);
    return {{base + of.begin, base + of.end},
            {place(of.begin), place(of.end)},
            p.offset + (codes ? 0 : size_t(of.begin) * kPanel * dtype_bytes(w.dtype)),
            p.group,
            codes ? at == first || w.pieces[size_t(at) - 1].group != p.group : part == 0,
            codes ? at + 1 == last || w.pieces[size_t(at) + 1].group != p.group : part + 1 == parts};
  }
  const PackedMatrix& w;
  Range groups;
  int first, last, parts = 1;
};

// Reads x of a block, with k in the order of storage.
struct Inputs {
  const float* x;  // first row, at the first K of the groups
  size_t stride;
  const int32_t* order;  // or null
  int first;             // first K of the groups
  float at(int row, int place) const {
    return x[size_t(row) * stride + size_t((order ? order[place] : place) - first)];
  }
};

// Packs kRows rows of a block to [k, kRows] and pads the block with zeros.
template <int kRows>
void pack_rows(const Inputs& in, const Block& b, Dtype, float* out) {
  if (in.order) {
    for (int k = b.k.begin; k < b.k.end; ++k)
      for (int r = 0; r < kRows; ++r) *out++ = in.at(r, k);
  } else {
    const float* x = in.x + (b.k.begin - in.first);
    for (int k = b.k.begin; k < b.k.end; ++k, ++x, out += kRows)
      for (int r = 0; r < kRows; ++r) out[r] = x[size_t(r) * in.stride];
  }
  std::fill_n(out, size_t(b.stored.end - b.stored.begin - (b.k.end - b.k.begin)) * kRows, 0.0f);
}

// The same, rounded to 16 bits (DotRows). A row with a value that is not finite becomes NaN.
template <int kRows>
void round_rows(const Inputs& in, const Block& b, Dtype dtype, float* out) {
  auto* rows = reinterpret_cast<DotRows<kRows>*>(out);
  const int n = b.k.end - b.k.begin, stored = b.stored.end - b.stored.begin, half = dtype == Dtype::int8 ? 2 : 4;
  constexpr int kLanes = 8;  // lets the compiler use vectors
  alignas(32) float x[kMaxPiece] = {};
  for (int r = 0; r < kRows; ++r) {
    const float* from = in.x + size_t(r) * in.stride + (b.k.begin - in.first);
    if (in.order)
      for (int i = 0; i < n; ++i) x[i] = in.at(r, b.k.begin + i);
    else
      std::copy_n(from, n, x);
    float largest[kLanes] = {}, poison[kLanes] = {};
    for (int i = 0; i < kMaxPiece; i += kLanes)
      for (int j = 0; j < kLanes; ++j) {
        const float size = std::fabs(x[i + j]);
        largest[j] = largest[j] < size ? size : largest[j];
        poison[j] += 0 * size;
      }
    for (int j = 1; j < kLanes; ++j) largest[0] = std::max(largest[0], largest[j]), poison[0] += poison[j];
    const bool finite = poison[0] == 0;
    // If 32767 / largest would be infinite, every value is too small to count.
    const float inverse = finite && largest[0] >= 0x1p-110f ? 32767 / largest[0] : 0;
    int values[kMaxPiece], sum = 0;
    for (int i = 0; i < kMaxPiece; ++i)  // rounds to nearest, ties to even
      values[i] = std::bit_cast<int>((inverse > 0 ? x[i] * inverse : 0.0f) + 0x1.8p23f) - 0x4b400000;
    for (int i = 0; i < stored; ++i) sum += values[i];
    for (int i = 0; i < stored; i += 2 * half)
      for (int j = 0; j < half; ++j) {
        int16_t* pair = rows->pairs[i / 2 + j][r];
        pair[0] = int16_t(values[i + j]), pair[1] = int16_t(values[i + half + j]);
      }
    rows->scale[r] = finite ? largest[0] / 32767 : std::numeric_limits<float>::quiet_NaN();
    rows->sum[r] = sum;
  }
}

// The same, rounded to bf16, in pairs: [k / 2, kRows, 2].
template <int kRows>
void bf16_rows(const Inputs& in, const Block& b, Dtype, float* out) {
  auto* pairs = reinterpret_cast<bf16*>(out);
  const int n = b.k.end - b.k.begin;
  for (int i = 0; i < n + n % 2; ++i)
    for (int r = 0; r < kRows; ++r)
      pairs[(i / 2 * kRows + r) * 2 + i % 2] = i < n ? to_bf16(in.at(r, b.k.begin + i)) : bf16{0};
}

using PackFn = void (*)(const Inputs& in, const Block& b, Dtype dtype, float* out);
template <int... kRows>
PackFn pack_fn(int rows, bool dot, Dtype dtype, std::integer_sequence<int, kRows...>) {
  static constexpr PackFn kPack[] = {pack_rows<kRows + 1>...}, kRound[] = {round_rows<kRows + 1>...},
                          kBf16[] = {bf16_rows<kRows + 1>...};
  return (!dot ? kPack : dtype == Dtype::bf16 ? kBf16 : kRound)[rows - 1];
}

size_t sums_floats() { return size_t(kMaxSumRows) * kPanel; }
size_t thread_floats() { return sums_floats() * size_t(tree_depth(kMaxGroups)); }
size_t packed_floats(int max_m, int max_k) { return (size_t(max_m) * size_t(max_k) + 1023) / 1024 * 1024; }

class Gemm {
 public:
  Gemm(const GemmArgs& args, GemmScratch& scratch, const GemmKernels& kernels, const DotKernels* dots)
      : a_(args),
        w_(*args.w),
        kernels_(kernels),
        scratch_(scratch),
        dot_table_(dot_table(args.w->dtype, dots)),
        table_(dot_table_ ? *dot_table_ : exact_table(args.w->dtype, kernels)),
        blocking_(choose_blocking(args.m, args.w->dtype, table_.shapes)),
        tiles_(args.m, table_.shapes.rows),
        blocks_(w_, args.groups.end > 0 ? args.groups : Range{0, w_.k_groups}, blocking_.block_k),
        columns_(args.columns.end > 0 ? args.columns : Range{0, w_.n}),
        first_panel_(columns_.begin / kPanel),
        n_panels_((columns_.end + kPanel - 1) / kPanel - first_panel_) {
    const Range k = args.k_range();
    inputs_ = {args.x, size_t(args.x_stride), w_.order.empty() ? nullptr : w_.order.data(), k.begin};
    // A single row that needs no padding or reordering is read in place.
    as_it_stands_ = args.m == 1 && !dot_table_ && !inputs_.order && w_.stored(blocks_.groups) == k.end - k.begin;
  }
  bool packs() const { return !as_it_stands_; }

  // Packs x to [block][tile][k][rows], which the tiles then read as one sequential stream.
  void pack(int rank, int size) const {
    if (as_it_stands_) return;
    float* packed = scratch_.buffer.as<float>();
    Range units = share(blocks_.count() * tiles_.n_tiles, rank, size);
    for (int u = units.begin; u < units.end; ++u) {
      const int tile = u % tiles_.n_tiles, row = tiles_.first_row(tile);
      const Block block = blocks_[u / tiles_.n_tiles];
      Inputs in = inputs_;
      in.x += size_t(row) * in.stride;
      pack_fn(tiles_.rows(tile), dot_table_, w_.dtype, std::make_integer_sequence<int, kMaxTileRows>())(
          in, block, w_.dtype, packed + packed_offset(block, row));
    }
  }

  // Computes this rank's share of y: panels from a common counter, or row tiles if there are too few panels.
  void compute(int rank, int size, int scratch_rank) {
    float* sums = scratch_.buffer.as<float>() + packed_floats(scratch_.max_m, scratch_.max_k) +
                  size_t(scratch_rank) * thread_floats();
    auto largest_share = [size](int n) { return double((n + size - 1) / size) / n; };
    if (largest_share(tiles_.n_tiles) < 0.9 * largest_share(n_panels_)) {
      run_rows(share(tiles_.n_tiles, rank, size), {0, n_panels_}, sums);
      return;
    }
    for (Range panels = take(size); panels.begin < panels.end; panels = take(size))
      run_rows({0, tiles_.n_tiles}, panels, sums);
  }

 private:
  // Rounded rows fit: they take 2 bytes for each k and 8 more, of 4 bytes for each of at least 4 k.
  size_t packed_offset(const Block& b, int row) const {
    return size_t(b.stored.begin) * size_t(a_.m) + size_t(row) * size_t(b.stored.end - b.stored.begin);
  }

  // Takes the next free panels. The first pieces are large, so that weights are read in long runs. The last ones are
  // small, so that a thread that lost its core for a while does not delay the others.
  Range take(int size) {
    const int unit = blocking_.panels;
    int begin = next_panel_.load(std::memory_order_relaxed);
    for (;;) {
      int left = n_panels_ - begin;
      if (left <= 0) return {0, 0};
      int n = std::min(left, std::max(unit, size == 1 ? left : left / (3 * size) / unit * unit));
      if (next_panel_.compare_exchange_weak(begin, begin + n, std::memory_order_relaxed)) return {begin, begin + n};
    }
  }

  void run_rows(Range tiles, Range panels, float* sums) const {
    const int pass_tiles = kMaxPassRows / table_.shapes.rows;
    int n_tiles = tiles.end - tiles.begin, n_passes = (n_tiles + pass_tiles - 1) / pass_tiles;
    for (int pass = 0; pass < n_passes; ++pass) {
      Range piece = share(n_tiles, pass, n_passes);
      piece = {tiles.begin + piece.begin, tiles.begin + piece.end};
      for (int p = panels.begin; p < panels.end; p += blocking_.panels)
        run(piece, {p, std::min(p + blocking_.panels, panels.end)}, sums);
    }
  }

  // Computes all of K for these panels and row tiles.
  void run(Range tiles, Range panels, float* sums) const {
    const float* packed = as_it_stands_ ? a_.x : scratch_.buffer.as<float>();
    const int row0 = tiles_.first_row(tiles.begin), rows = tiles_.first_row(tiles.end) - row0;
    const int n_panels = panels.end - panels.begin, n_tiles = tiles.end - tiles.begin;
    const size_t level = size_t(n_panels) * size_t(rows) * kPanel;  // floats of one tree buffer
    const std::byte* first = w_.panels.data() + size_t(first_panel_ + panels.begin) * w_.panel_bytes;
    const int n_blocks = blocks_.count();
    for (int i = 0; i < n_blocks; ++i) {
      const Block block = blocks_[i];
      const int g = block.group - blocks_.groups.begin, k = block.stored.end - block.stored.begin;
      float* leaf = sums + level * size_t(TreeStack::slot(g));
      const std::byte* weights = first + block.offset;
      const size_t block_bytes = size_t(k) * kPanel * size_t(dtype_bits(w_.dtype)) / 8;
      const std::byte* next = i + 1 < n_blocks ? weights + block_bytes : first + size_t(n_panels) * w_.panel_bytes;
      // With few tiles, each tile prefetches its share of the next block, at most two lines per 4 k; a prefetch of only
      // half of the lines is slower than none. With many tiles each line would be requested many times, so the driver
      // prefetches between tiles, into L2.
      const bool many = n_tiles > kManyTiles || is_quantised(w_.dtype);
      int step = blocking_.prefetch && !many ? kPanel * dtype_bits(w_.dtype) / 2 / n_tiles : 0;
      if (step > 128) step = 0;
      size_t asked = many && blocking_.prefetch ? 0 : block_bytes;
      for (int t = tiles.begin; t < tiles.end; ++t) {
        int row = tiles_.first_row(t);
        GemmTile tile{.x = packed + packed_offset(block, row),
                      .w = weights,
                      .panel_bytes = w_.panel_bytes,
                      .k = k,
                      .sums = leaf + size_t(row - row0) * size_t(n_panels) * kPanel,
                      .resume = !block.first,
                      .prefetch = next + size_t(t - tiles.begin) * size_t(k / 4 * step),
                      .prefetch_step = step};
        for (size_t until = block_bytes * size_t(t - tiles.begin + 1) / size_t(n_tiles); asked < until; asked += 64)
          __builtin_prefetch(next + asked, 0, 2);
        table_.at[tiles_.rows(t)][n_panels](tile);
      }
      if (block.last) {
        int top = TreeStack::slot(g), merges = TreeStack::merges(g, g + 1 == blocks_.n_groups());
        for (; merges > 0; --merges, --top)
          kernels_.add(sums + level * size_t(top - 1), sums + level * size_t(top), int(level));
      }
    }
    // Sums lie as the tiles wrote them: [tile][panel][row of the tile][16].
    for (int t = tiles.begin; t < tiles.end; ++t)
      for (int p = panels.begin; p < panels.end; ++p, sums += tiles_.rows(t) * kPanel)
        store(p, tiles_.first_row(t), tiles_.rows(t), sums);
  }

  // Null: the exact table is used.
  static const GemmTiles* dot_table(Dtype dtype, const DotKernels* dots) {
    if (!dots) return nullptr;
    if (dtype == Dtype::int8) return &dots->int8;
    if (dtype == Dtype::int4) return &dots->int4;
    return dtype == Dtype::bf16 && dots->bf16.shapes.rows > 0 ? &dots->bf16 : nullptr;
  }
  static const GemmTiles& exact_table(Dtype dtype, const GemmKernels& kernels) {
    switch (dtype) {
      case Dtype::bf16: return kernels.bf16;
      case Dtype::f16: return kernels.f16;
      case Dtype::int8: return kernels.int8;
      case Dtype::int4: return kernels.int4;
      case Dtype::fp8: return kernels.fp8;
      default: return kernels.f32;  // (dtypes that only KV uses never reach here)
    }
  }

  void store(int panel, int row0, int rows, const float* sums) const {
    // Wanted columns of the panel.
    const int column0 = (first_panel_ + panel) * kPanel;
    const int begin = std::max(columns_.begin - column0, 0);
    const int end = std::min(columns_.end - column0, kPanel), column = column0 + begin;
    for (int r = 0; r < rows; ++r, sums += kPanel) {
      float* y = a_.y + size_t(row0 + r) * size_t(a_.y_stride) + (column - columns_.begin);
      const float* from = sums + begin;
      if (!a_.bias)
        std::memcpy(y, from, size_t(end - begin) * sizeof(float));
      else
        for (int c = 0; c < end - begin; ++c) y[c] = from[c] + a_.bias[column + c];
    }
  }

  const GemmArgs& a_;
  const PackedMatrix& w_;
  const GemmKernels& kernels_;
  GemmScratch& scratch_;
  const GemmTiles* dot_table_;
  const GemmTiles& table_;
  Blocking blocking_;
  TilePlan tiles_;
  Blocks blocks_;
  Range columns_;
  int first_panel_, n_panels_;
  Inputs inputs_;
  bool as_it_stands_;
  std::atomic<int> next_panel_{0};
};

}  // namespace

void run_gemm(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team, const GemmKernels& kernels,
              const DotKernels* dots) {
  XPYD_CHECK(args.w && args.x && args.y);
  const PackedMatrix& w = *args.w;
  if (args.m == 0) return;
  XPYD_CHECK(0 <= args.columns.begin && args.columns.end <= w.n && args.n() > 0 && 0 <= args.groups.begin &&
             args.groups.begin <= args.groups.end && args.groups.end <= w.k_groups);
  const int k = args.k_range().end - args.k_range().begin;
  const int stored = w.stored(args.groups.end > 0 ? args.groups : Range{0, w.k_groups});
  XPYD_CHECK(args.m > 0 && args.m <= scratch.max_m && stored <= scratch.max_k && team.size() <= scratch.n_threads,
             "m = " + std::to_string(args.m) + " of " + std::to_string(scratch.max_m) +
                 ", k = " + std::to_string(stored) + " of " + std::to_string(scratch.max_k) +
                 ", threads = " + std::to_string(team.size()) + " of " + std::to_string(scratch.n_threads));
  XPYD_CHECK(args.m == 1 || (args.x_stride >= k && args.y_stride >= args.n()));
  Gemm gemm(args, scratch, kernels, dots);
  if (team.size() == 1 || long(args.m) * args.n() * k < kSerialMacs) {
    gemm.pack(0, 1);
    gemm.compute(0, 1, 0);
    return;
  }
  team.run([&](int rank) {
    gemm.pack(rank, team.size());
    if (gemm.packs()) team.barrier();
    gemm.compute(rank, team.size(), rank);
  });
}

namespace {

template <const GemmKernels& kKernels, const DotKernels* kDots>
void run_with(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
  run_gemm(args, scratch, team, kKernels, kDots);
}

const GemmVariant kVariants[] = {
#if defined(__x86_64__)
    {"avx512_bf16", run_with<kAvx512Kernels, &kAvx512Bf16Dot>, Isa::avx512_bf16, false,
     "weights in bf16 times activations rounded to bf16 (VDPBF16PS); quantised weights as avx512_vnni"},
    {"avx512_vnni", run_with<kAvx512Kernels, &kAvx512VnniDot>, Isa::avx512_vnni, false,
     "quantised weights times activations rounded to 16 bits (VPDPWSSD); same bits as avx2_dot"},
    {"avx512_dot", run_with<kAvx512Kernels, &kAvx512Dot>, Isa::avx512, false,
     "quantised weights times activations rounded to 16 bits (VPMADDWD); same bits as avx2_dot"},
    {"avx512", run_with<kAvx512Kernels, nullptr>, Isa::avx512, true, "register tiles of 12 x 16; same bits as avx2"},
    {"avx2_dot", run_with<kAvx2Kernels, &kAvx2Dot>, Isa::avx2, false,
     "quantised weights times activations rounded to 16 bits, in integers (VPMADDWD)"},
    {"avx2", run_with<kAvx2Kernels, nullptr>, Isa::avx2, true, "register tiles of 6 x 16 over packed panels, f32 FMA"},
#endif
    {"portable_dot", run_with<kPortableKernels, &kPortableDot>, Isa::portable, false,
     "quantised weights times activations rounded to 16 bits; same bits as avx2_dot"},
    {"portable", run_with<kPortableKernels, nullptr>, Isa::portable, true,
     "plain C++ with the same blocking; separate multiply and add"},
};

}  // namespace

Work work(const GemmArgs& args) {
  const double m = args.m, n = args.n(), k = args.k_range().end - args.k_range().begin;
  const double panel = double(args.w->panel_bytes) / kPanel;  // bytes per output, scales included
  const double bits = is_quantised(args.w->dtype) ? 8 * panel / args.w->k : dtype_bits(args.w->dtype);
  return {n * k * bits / 8 + 4 * (m * k + m * n + (args.bias ? n : 0)), 2 * m * n * k};
}

GemmScratch::GemmScratch(int max_m_, int max_k_, int n_threads_)
    : buffer((packed_floats(max_m_, max_k_) + size_t(n_threads_) * thread_floats()) * sizeof(float)),
      max_m(max_m_),
      max_k(max_k_),
      n_threads(n_threads_) {}

std::span<const GemmVariant> gemm_variants() { return kVariants; }

const GemmVariant& default_gemm(bool exact) {
  const GemmVariant* best = nullptr;
  for (const GemmVariant& row : kVariants)
    if (row.available() && row.exact >= exact && (!best || row.needs > best->needs)) best = &row;
  XPYD_CHECK(best);
  return *best;
}

}  // namespace xpyd::model
