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

// How rows are cut into register tiles: as few as there can be, of nearly equal size, because a tile of few rows has
// too few chains to hide the latency of an FMA.
struct TilePlan {
  TilePlan(int m, int most) : n_tiles((m + most - 1) / most), least(m / n_tiles), larger(m % n_tiles) {}
  int first_row(int tile) const { return tile * least + std::min(tile, larger); }
  int rows(int tile) const { return least + (tile < larger); }
  int n_tiles, least, larger;
};

// Block sizes depend on M only. They move work in time and change no bit of the result.
struct Blocking {
  int panels;     // of one register tile; few rows need several for enough chains
  int block_k;    // longest block of K
  bool prefetch;  // prefetch the next block's weights while this one is in use
};

Blocking choose_blocking(int m, Dtype dtype, const TileShapes& shapes, bool dots) {
  const int panels = m <= shapes.rows ? shapes.panels[m] : 1;
  // A block of quantised weights is one piece, at most 2 KiB. For dot tiles it has up to 128 k, above 32 rows 512 k (4
  // or 8 KiB). Several panels take all of K at once, because the hardware follows their streams.
  if (is_quantised(dtype) && dots) return {panels, panels > 1 ? 1 << 30 : m <= 32 ? kMaxPiece : 512, panels == 1};
  if (is_quantised(dtype)) return {panels, 0, m > 2};
  // The hardware's prefetchers follow three or more streams by themselves. With one or two panels, software prefetch
  // gives +29 % at M = 4 on one thread.
  if (m <= shapes.rows) return {panels, panels > 2 ? 1 << 30 : 512, panels <= 2};
  // 12 KiB of bf16 or 16 KiB of f32 weights, and 9 or 6 KiB of x, in 32 KiB of L1.
  return {1, dtype == Dtype::f32 ? 256 : 384, true};
}

// What a tile takes at once: a part of a dense piece, or quantised pieces of equal size in one K-group.
struct Block {
  Range pieces;      // of PackedMatrix::pieces
  Range of;          // stored places of each of them
  size_t offset;     // bytes from the start of a panel
  size_t bytes;      // of a panel
  size_t x;          // floats that a row of packed x has before this block
  int width;         // floats that a row of packed x has for each piece
  bool first, last;  // block of its group
  int k() const { return of.end - of.begin; }
  int n_pieces() const { return pieces.end - pieces.begin; }
};

// Floats that a row of packed x has for k stored places; at most k, for which a scratch has room.
int packed_width(Dtype dtype, const DotTiles* dots, int k) {
  return !dots ? k : is_quantised(dtype) ? dot_floats(dots->bits, k) : (k + 1) / 2;
}

// Cuts the K of these groups into blocks of at most block_k places, or of one piece if that is longer.
std::vector<Block> cut(const PackedMatrix& w, Range groups, int block_k, const DotTiles* dots) {
  std::vector<Block> blocks;
  const auto& pieces = w.pieces;
  const auto length = [&](int i) { return pieces[size_t(i)].stored.end - pieces[size_t(i)].stored.begin; };
  const auto offset = [&](int i) { return i < int(pieces.size()) ? pieces[size_t(i)].offset : w.panel_bytes; };
  const auto group = [&](int i) { return i < int(pieces.size()) ? pieces[size_t(i)].group : -1; };
  const bool codes = is_quantised(w.dtype);
  const int parts = codes ? 1 : ((w.k + w.k_groups - 1) / w.k_groups - 1) / block_k + 1;
  size_t x = 0;
  for (int i = 0, end; i < int(pieces.size()); i = end) {
    end = i + 1;
    if (group(i) < groups.begin || group(i) >= groups.end) continue;
    while (codes && group(end) == group(i) && length(end) == length(i) && (end - i + 1) * length(i) <= block_k) ++end;
    for (int part = 0; part < parts; ++part) {
      const Range of = parts == 1 ? Range{0, length(i)} : share(length(i), part, parts, 8);
      const size_t before = codes ? 0 : size_t(of.begin) * kPanel * dtype_bytes(w.dtype);
      const size_t bytes = codes ? offset(end) - offset(i) : size_t(of.end - of.begin) * kPanel * dtype_bytes(w.dtype);
      const int width = packed_width(w.dtype, dots, of.end - of.begin);
      blocks.push_back({.pieces = {i, end},
                        .of = of,
                        .offset = offset(i) + before,
                        .bytes = bytes,
                        .x = x,
                        .width = width,
                        .first = part == 0 && (blocks.empty() || group(i - 1) != group(i)),
                        .last = part + 1 == parts && group(end) != group(i)});
      x += size_t(width) * size_t(end - i);
    }
  }
  return blocks;
}

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

// Packs these K of kRows rows to [stored, kRows], with zeros behind them.
template <int kRows>
void pack_rows(const Inputs& in, Range of, int stored, Dtype, float* out) {
  if (in.order) {
    for (int k = of.begin; k < of.end; ++k)
      for (int r = 0; r < kRows; ++r) *out++ = in.at(r, k);
  } else {
    const float* x = in.x + (of.begin - in.first);
    for (int k = of.begin; k < of.end; ++k, ++x, out += kRows)
      for (int r = 0; r < kRows; ++r) out[r] = x[size_t(r) * in.stride];
  }
  std::fill_n(out, size_t(stored - (of.end - of.begin)) * kRows, 0.0f);
}

// The same, rounded to 16 or 8 bits (DotRows). A row with a value that is not finite becomes NaN.
template <int kRows, class Integer, int kWeightBits>
void round_run(const Inputs& in, Range of, int stored, float* out) {
  constexpr int kBits = 8 * sizeof(Integer), kMost = (1 << (kBits - 1)) - 1, kSlots = 32 / kBits;
  constexpr int kLongest = run_length(kBits, kMaxPiece), kLanes = 8;  // lanes let the compiler use vectors
  auto* rows = reinterpret_cast<DotRows<kRows>*>(out);
  const int n = of.end - of.begin;
  alignas(32) float x[kLongest] = {};
  for (int r = 0; r < kRows; ++r) {
    const float* from = in.x + size_t(r) * in.stride + (of.begin - in.first);
    if (in.order)
      for (int i = 0; i < n; ++i) x[i] = in.at(r, of.begin + i);
    else if (n == kLongest)
      std::copy_n(from, kLongest, x);
    else
      std::copy_n(from, n, x);
    int32_t top[kLanes] = {};  // numbers without their sign compare like integers, and those that are not finite win
    for (int i = 0; i < kLongest; i += kLanes)
      for (int j = 0; j < kLanes; ++j) {
        const int32_t size = std::bit_cast<int32_t>(x[i + j]) & 0x7fffffff;
        top[j] = top[j] < size ? size : top[j];
      }
    for (int j = 1; j < kLanes; ++j) top[0] = std::max(top[0], top[j]);
    const float largest = std::bit_cast<float>(top[0]);
    const bool finite = top[0] < 0x7f800000;
    // If kMost / largest would be infinite, every value is too small to count.
    const float inverse = finite && largest >= 0x1p-110f ? kMost / largest : 0;
    alignas(32) Integer values[kLongest], placed[kLongest];
    int sum = 0;
    for (int i = 0; i < kLongest; ++i)  // rounds to nearest, ties to even; the lower bits are the integer
      values[i] = Integer(std::bit_cast<int32_t>(x[i] * inverse + 0x1.8p23f));
    for (int i = 0; i < kLongest; ++i) sum += values[i], placed[dot_place(kBits, kWeightBits, i)] = values[i];
    for (int i = 0; i < stored; i += kSlots) std::memcpy(&rows->cells[i / kSlots][r], placed + i, 4);
    rows->scale[r] = finite ? largest / kMost : std::numeric_limits<float>::quiet_NaN();
    rows->less[r] = -sum;
  }
}

template <int kRows, class Integer>
void round_rows(const Inputs& in, Range of, int stored, Dtype dtype, float* out) {
  constexpr int kBits = 8 * sizeof(Integer);
  for (int run = run_length(kBits, stored); stored > 0; stored -= run) {
    run = std::min(run, stored);
    const Range k{std::min(of.begin, of.end), std::min(of.begin + run, of.end)};
    dtype == Dtype::int8 ? round_run<kRows, Integer, 8>(in, k, run, out)
                         : round_run<kRows, Integer, 4>(in, k, run, out);
    of.begin += run, out += kRows * dot_floats(kBits, run);
  }
}

// The same, rounded to bf16, in pairs: [k / 2, kRows, 2].
template <int kRows>
void bf16_rows(const Inputs& in, Range of, int, Dtype, float* out) {
  auto* pairs = reinterpret_cast<bf16*>(out);
  const int n = of.end - of.begin;
  for (int i = 0; i < n + n % 2; ++i)
    for (int r = 0; r < kRows; ++r)
      pairs[(i / 2 * kRows + r) * 2 + i % 2] = i < n ? to_bf16(in.at(r, of.begin + i)) : bf16{0};
}

using PackFn = void (*)(const Inputs& in, Range of, int stored, Dtype dtype, float* out);
template <int... kRows>
PackFn pack_fn(int rows, const DotTiles* dots, Dtype dtype, std::integer_sequence<int, kRows...>) {
  static constexpr PackFn kPack[] = {pack_rows<kRows + 1>...}, kBf16[] = {bf16_rows<kRows + 1>...},
                          kWords[] = {round_rows<kRows + 1, int16_t>...}, kBytes[] = {round_rows<kRows + 1, int8_t>...};
  return (!dots ? kPack : dtype == Dtype::bf16 ? kBf16 : dots->bits == 16 ? kWords : kBytes)[rows - 1];
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
        dots_(dot_tiles(args.w->dtype, dots)),
        table_(dots_ ? dots_->tiles : exact_table(args.w->dtype, kernels)),
        blocking_(choose_blocking(args.m, args.w->dtype, table_.shapes, dots_ != nullptr)),
        tiles_(args.m, table_.shapes.rows),
        groups_(args.groups.end > 0 ? args.groups : Range{0, w_.k_groups}),
        blocks_(cut(w_, groups_, blocking_.block_k, dots_)),
        columns_(args.columns.end > 0 ? args.columns : Range{0, w_.n}),
        first_panel_(columns_.begin / kPanel),
        n_panels_((columns_.end + kPanel - 1) / kPanel - first_panel_) {
    const Range k = args.k_range();
    inputs_ = {args.x, size_t(args.x_stride), w_.order.empty() ? nullptr : w_.order.data(), k.begin};
    // A single row that needs no padding or reordering is read in place.
    as_it_stands_ = args.m == 1 && !dots_ && !inputs_.order && w_.stored(groups_) == k.end - k.begin;
  }
  bool packs() const { return !as_it_stands_; }

  // Packs x to [block][tile][k][rows], which the tiles then read as one sequential stream.
  void pack(int rank, int size) const {
    if (as_it_stands_) return;
    float* packed = scratch_.buffer.as<float>();
    Range units = share(int(blocks_.size()) * tiles_.n_tiles, rank, size);
    for (int u = units.begin; u < units.end; ++u) {
      const int tile = u % tiles_.n_tiles, row = tiles_.first_row(tile), rows = tiles_.rows(tile);
      const Block& block = blocks_[size_t(u / tiles_.n_tiles)];
      const PackFn fn = pack_fn(rows, dots_, w_.dtype, std::make_integer_sequence<int, kMaxTileRows>());
      Inputs in = inputs_;
      in.x += size_t(row) * in.stride;
      float* out = packed + packed_offset(block, row);
      for (int i = block.pieces.begin; i < block.pieces.end; ++i, out += rows * block.width) {
        const Range k = w_.pieces[size_t(i)].k;
        fn(in, {std::min(k.begin + block.of.begin, k.end), std::min(k.begin + block.of.end, k.end)}, block.k(),
           w_.dtype, out);
      }
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
  size_t packed_offset(const Block& b, int row) const {
    return b.x * size_t(a_.m) + size_t(row) * size_t(b.width) * size_t(b.n_pieces());
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
    for (const Block& block : blocks_) {
      const int g = w_.pieces[size_t(block.pieces.begin)].group - groups_.begin, k = block.k();
      float* leaf = sums + level * size_t(TreeStack::slot(g));
      const std::byte* weights = first + block.offset;
      const std::byte* next = &block != &blocks_.back() ? weights + block.bytes
                                                        : first + size_t(n_panels) * w_.panel_bytes;
      // With few tiles, each tile prefetches its share of the next block, at most two lines per 4 k; a prefetch of only
      // half of the lines is slower than none. With many tiles each line would be requested many times, so the driver
      // prefetches between tiles, into L2.
      const bool many = n_tiles > kManyTiles || is_quantised(w_.dtype);
      int step = blocking_.prefetch && !many ? kPanel * dtype_bits(w_.dtype) / 2 / n_tiles : 0;
      if (step > 128) step = 0;
      size_t asked = many && blocking_.prefetch ? 0 : block.bytes;
      for (int t = tiles.begin; t < tiles.end; ++t) {
        int row = tiles_.first_row(t);
        GemmTile tile{.x = packed + packed_offset(block, row),
                      .w = weights,
                      .panel_bytes = w_.panel_bytes,
                      .k = k,
                      .pieces = block.n_pieces(),
                      .sums = leaf + size_t(row - row0) * size_t(n_panels) * kPanel,
                      .resume = !block.first,
                      .prefetch = next + size_t(t - tiles.begin) * size_t(k / 4 * step),
                      .prefetch_step = step};
        for (size_t until = block.bytes * size_t(t - tiles.begin + 1) / size_t(n_tiles); asked < until; asked += 64)
          __builtin_prefetch(next + asked, 0, 2);
        table_.at[tiles_.rows(t)][n_panels](tile);
      }
      if (block.last) {
        int top = TreeStack::slot(g), merges = TreeStack::merges(g, groups_.begin + g + 1 == groups_.end);
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
  static const DotTiles* dot_tiles(Dtype dtype, const DotKernels* dots) {
    if (!dots) return nullptr;
    const DotTiles* tiles = dtype == Dtype::int8   ? &dots->int8
                            : dtype == Dtype::int4 ? &dots->int4
                            : dtype == Dtype::bf16 ? &dots->bf16
                                                   : nullptr;
    return tiles && tiles->bits > 0 ? tiles : nullptr;
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
      if (!a_.bias && end - begin == kPanel)
        std::memcpy(y, from, kPanel * sizeof(float));
      else if (!a_.bias)
        std::memcpy(y, from, size_t(end - begin) * sizeof(float));
      else
        for (int c = 0; c < end - begin; ++c) y[c] = from[c] + a_.bias[column + c];
    }
  }

  const GemmArgs& a_;
  const PackedMatrix& w_;
  const GemmKernels& kernels_;
  GemmScratch& scratch_;
  const DotTiles* dots_;  // null: x stays f32
  const GemmTiles& table_;
  Blocking blocking_;
  TilePlan tiles_;
  Range groups_;
  std::vector<Block> blocks_;
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

constexpr const char* kWords = "quantised weights times activations rounded to 16 bits; same bits as avx2_dot";
constexpr const char* kBytes = "quantised weights times activations rounded to 8 bits, in integers";
constexpr const char* kBytesOfInt4 = "int4 weights times activations rounded to 8 bits; int8 weights times 16 bits";

const GemmVariant kVariants[] = {
#if defined(__x86_64__)
    {"avx512_bf16", run_with<kAvx512Kernels, &kAvx512Bf16Dot>, Isa::avx512_bf16, 8, 8,
     "weights in bf16 times activations rounded to bf16 (VDPBF16PS); quantised weights as avx512_vnni8"},
    {"avx512_vnni8", run_with<kAvx512Kernels, &kAvx512VnniDot8>, Isa::avx512_vnni, 8, 8, kBytes},
    {"avx512_vnni", run_with<kAvx512Kernels, &kAvx512VnniDot>, Isa::avx512_vnni, 16, 16, kWords},
    {"avx512_dot8", run_with<kAvx512Kernels, &kAvx512Dot8>, Isa::avx512, 16, 8, kBytesOfInt4},
    {"avx512_dot", run_with<kAvx512Kernels, &kAvx512Dot>, Isa::avx512, 16, 16, kWords},
    {"avx512", run_with<kAvx512Kernels, nullptr>, Isa::avx512, 32, 32, "register tiles of 12 x 16; same bits as avx2"},
    {"avx2_dot8", run_with<kAvx2Kernels, &kAvx2Dot8>, Isa::avx2, 16, 8, kBytesOfInt4},
    {"avx2_dot", run_with<kAvx2Kernels, &kAvx2Dot>, Isa::avx2, 16, 16,
     "quantised weights times activations rounded to 16 bits, in integers (VPMADDWD)"},
    {"avx2", run_with<kAvx2Kernels, nullptr>, Isa::avx2, 32, 32,
     "register tiles of 6 x 16 over packed panels, f32 FMA"},
#endif
    {"portable_dot8", run_with<kPortableKernels, &kPortableDot8>, Isa::portable, 8, 8, kBytes},
    {"portable_dot", run_with<kPortableKernels, &kPortableDot>, Isa::portable, 16, 16, kWords},
    {"portable", run_with<kPortableKernels, nullptr>, Isa::portable, 32, 32,
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
    if (row.available() && (row.exact() || !exact) && (!best || row.needs > best->needs)) best = &row;
  XPYD_CHECK(best);
  return *best;
}

}  // namespace xpyd::model
