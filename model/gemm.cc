// The blocking, the packing and the group tree of y = x W^T; the innermost tiles are behind
// GemmKernels. model/gemm.md draws the panels and gives the arithmetic of the block sizes.
#include "model/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/gemm_kernels.h"
#include "model/sum_tree.h"

namespace xpyd::model {
namespace {

// Below this many multiply-adds waking the team costs more than it saves.
constexpr long kSerialMacs = 64 * 1024;

constexpr int kMaxPassRows = 264;  // rows that share a block of weights while it is in L1
constexpr int kManyTiles = 8;      // from which the next block is fetched between tiles
constexpr int kMaxSumRows = 384;   // rows x panels whose sums a thread keeps at a time
static_assert(kMaxSumRows >= kMaxPassRows && kMaxSumRows >= kMaxTileRows * kMaxTilePanels);

// How rows are cut into register tiles: full ones first, then at most two smaller ones, as even as
// can be (a tile of few rows has too few chains to hide the latency of an FMA).
struct TilePlan {
  explicit TilePlan(int m) {
    int rest = m % kMaxTileRows;
    n_full = m / kMaxTileRows;
    tail[0] = rest;
    if (rest > 0 && rest <= kMaxTileRows / 2 && n_full > 0) {
      --n_full;
      tail[0] = (rest + kMaxTileRows + 1) / 2;
      tail[1] = rest + kMaxTileRows - tail[0];
    }
    n_tiles = n_full + (tail[0] > 0) + (tail[1] > 0);
  }
  int first_row(int tile) const {
    int past = std::min(tile, n_full) * kMaxTileRows;
    if (tile > n_full) past += tail[0];
    if (tile > n_full + 1) past += tail[1];
    return past;
  }
  int rows(int tile) const { return tile < n_full ? kMaxTileRows : tail[tile - n_full]; }
  int n_full, n_tiles, tail[2] = {0, 0};
};

// Block sizes, by M alone; they move work around in time and cannot change a bit of the result.
struct Blocking {
  int panels;     // of one register tile: few rows need several to have enough chains
  int block_k;    // longest piece of K
  bool prefetch;  // ask for the next block's weights while this one is in use
};

Blocking choose_blocking(int m, Dtype dtype) {
  constexpr int kPanelsForRows[kMaxTileRows + 1] = {0, 6, 3, 2, 1, 1, 1};
  if (m <= kMaxTileRows) {
    // Three or four panels are as many streams, which the hardware's prefetchers follow by themselves; one or two leave
    // memory idle unless it is asked early: +29 % at M = 4 on one thread.
    int panels = kPanelsForRows[m];
    return {panels, m <= 2 ? 1 << 30 : 512, m > 2};
  }
  // 12 KiB of bf16 or 16 KiB of f32 weights, and 9 or 6 KiB of x, in 32 KiB of L1.
  return {1, dtype == Dtype::bf16 ? 384 : 256, true};
}

// K cut into groups (the contract), and groups into equal pieces of at most block_k. Of some groups
// only, where a slice is computed: k then counts from the first of them.
struct KBlocks {
  KBlocks(const PackedMatrix& w_, Range groups_, int block_k) : w(w_), groups(groups_), first(w.k_range(groups).begin) {
    int longest = (w.k + w.k_groups - 1) / w.k_groups;
    per_group = (longest - 1) / block_k + 1;
  }
  int n_groups() const { return groups.end - groups.begin; }
  int count() const { return n_groups() * per_group; }
  Range operator[](int i) const {
    const int g = groups.begin + i / per_group;
    const Range k = w.k_range({g, g + 1});
    const Range piece = share(k.end - k.begin, i % per_group, per_group, 8);
    return {k.begin - first + piece.begin, k.begin - first + piece.end};
  }
  const PackedMatrix& w;
  Range groups;
  int first, per_group;
};

// kRows rows and k of `ks` of x to [k, kRows].
template <int kRows>
void pack_rows(const float* x, size_t stride, Range ks, float* out) {
  for (int k = ks.begin; k < ks.end; ++k, out += kRows)
    for (int r = 0; r < kRows; ++r) out[r] = x[size_t(r) * stride + size_t(k)];
}

void pack_tile(const float* x, size_t stride, int rows, Range ks, float* out) {
  static constexpr void (*kPack[])(const float*, size_t, Range, float*) = {pack_rows<1>, pack_rows<2>, pack_rows<3>,
                                                                           pack_rows<4>, pack_rows<5>, pack_rows<6>};
  kPack[rows - 1](x, stride, ks, out);
}

size_t sums_floats() { return size_t(kMaxSumRows) * kPanel; }
size_t thread_floats() { return sums_floats() * size_t(tree_depth(kMaxGroups)); }
size_t packed_floats(int max_m, int max_k) { return (size_t(max_m) * size_t(max_k) + 1023) / 1024 * 1024; }

class Gemm {
 public:
  Gemm(const GemmArgs& args, GemmScratch& scratch, const GemmKernels& kernels)
      : a_(args),
        w_(*args.w),
        kernels_(kernels),
        scratch_(scratch),
        blocking_(choose_blocking(args.m, args.w->dtype)),
        tiles_(args.m),
        blocks_(w_, args.groups.end > 0 ? args.groups : Range{0, w_.k_groups}, blocking_.block_k),
        columns_(args.columns.end > 0 ? args.columns : Range{0, w_.n}),
        first_panel_(columns_.begin / kPanel),
        n_panels_((columns_.end + kPanel - 1) / kPanel - first_panel_),
        row_bytes_(kPanel * dtype_bytes(w_.dtype)),
        panel_bytes_(row_bytes_ * size_t(w_.k)) {}

  // x to [block][tile][k][rows]: what the tiles then read is one sequential stream.
  void pack(int rank, int size) const {
    if (a_.m == 1) return;  // a single row is packed as it stands
    float* packed = scratch_.buffer.as<float>();
    Range units = share(blocks_.count() * tiles_.n_tiles, rank, size);
    for (int u = units.begin; u < units.end; ++u) {
      int tile = u % tiles_.n_tiles, row = tiles_.first_row(tile);
      Range ks = blocks_[u / tiles_.n_tiles];
      pack_tile(a_.x + size_t(row) * size_t(a_.x_stride), size_t(a_.x_stride), tiles_.rows(tile), ks,
                packed + packed_offset(ks, row));
    }
  }

  // This rank's share of y: panels as they come, or row tiles where there are too few panels to share.
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
  size_t packed_offset(Range ks, int row) const {
    return size_t(ks.begin) * size_t(a_.m) + size_t(row) * size_t(ks.end - ks.begin);
  }

  // The next panels nobody has: large pieces first, so that weights are read in long runs, small ones last, so that a
  // member whose core was taken away for a while does not keep the others waiting.
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
    constexpr int kPassTiles = kMaxPassRows / kMaxTileRows;
    int n_tiles = tiles.end - tiles.begin, n_passes = (n_tiles + kPassTiles - 1) / kPassTiles;
    for (int pass = 0; pass < n_passes; ++pass) {
      Range piece = share(n_tiles, pass, n_passes);
      piece = {tiles.begin + piece.begin, tiles.begin + piece.end};
      for (int p = panels.begin; p < panels.end; p += blocking_.panels)
        run(piece, {p, std::min(p + blocking_.panels, panels.end)}, sums);
    }
  }

  // All of K for these panels and row tiles.
  void run(Range tiles, Range panels, float* sums) const {
    const float* packed = a_.m == 1 ? a_.x : scratch_.buffer.as<float>();
    const int row0 = tiles_.first_row(tiles.begin), rows = tiles_.first_row(tiles.end) - row0;
    const int n_panels = panels.end - panels.begin, n_tiles = tiles.end - tiles.begin;
    const size_t level = size_t(n_panels) * size_t(rows) * kPanel;  // floats of one tree buffer
    auto& table = w_.dtype == Dtype::bf16 ? kernels_.bf16 : kernels_.f32;
    const std::byte* first = w_.panels.data() + size_t(first_panel_ + panels.begin) * panel_bytes_ +
                             size_t(blocks_.first) * row_bytes_;
    for (int i = 0; i < blocks_.count(); ++i) {
      const int g = i / blocks_.per_group;
      const Range ks = blocks_[i];
      const int k = ks.end - ks.begin;
      float* leaf = sums + level * size_t(TreeStack::slot(g));
      const std::byte* next = i + 1 < blocks_.count() ? first + size_t(ks.end) * row_bytes_
                                                      : first + size_t(n_panels) * panel_bytes_;
      // Few tiles ask for the lines of the next block themselves, each for its share, at most two
      // per 4 k (half of the lines asked for and half left to the hardware is slower than none).
      // Many tiles would ask for each line many times over: then it is done between them, into L2.
      const bool many = n_tiles > kManyTiles;
      int step = blocking_.prefetch && !many ? int(4 * row_bytes_) / n_tiles : 0;
      if (step > 128) step = 0;
      const size_t block_bytes = size_t(k) * row_bytes_;
      size_t asked = many ? 0 : block_bytes;
      for (int t = tiles.begin; t < tiles.end; ++t) {
        int row = tiles_.first_row(t);
        GemmTile tile{.x = packed + packed_offset(ks, row),
                      .w = first + size_t(ks.begin) * row_bytes_,
                      .panel_bytes = panel_bytes_,
                      .k = k,
                      .sums = leaf + size_t(row - row0) * size_t(n_panels) * kPanel,
                      .resume = i % blocks_.per_group != 0,
                      .prefetch = next + size_t(t - tiles.begin) * size_t(k / 4 * step),
                      .prefetch_step = step};
        for (size_t until = block_bytes * size_t(t - tiles.begin + 1) / size_t(n_tiles); asked < until; asked += 64)
          __builtin_prefetch(next + asked, 0, 2);
        table[tiles_.rows(t)][n_panels](tile);
      }
      if ((i + 1) % blocks_.per_group == 0) {
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

  void store(int panel, int row0, int rows, const float* sums) const {
    // Columns of the panel that are wanted.
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
  Blocking blocking_;
  TilePlan tiles_;
  KBlocks blocks_;
  Range columns_;
  int first_panel_, n_panels_;
  size_t row_bytes_, panel_bytes_;
  std::atomic<int> next_panel_{0};
};

void run_gemm(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team, const GemmKernels& kernels) {
  XPYD_CHECK(args.w && args.x && args.y);
  const PackedMatrix& w = *args.w;
  if (args.m == 0) return;
  XPYD_CHECK(0 <= args.columns.begin && args.columns.end <= w.n && args.n() > 0 && 0 <= args.groups.begin &&
             args.groups.begin <= args.groups.end && args.groups.end <= w.k_groups);
  const int k = args.k_range().end - args.k_range().begin;
  XPYD_CHECK(args.m > 0 && args.m <= scratch.max_m && k <= scratch.max_k && team.size() <= scratch.n_threads,
             "m = " + std::to_string(args.m) + " of " + std::to_string(scratch.max_m) + ", k = " + std::to_string(k) +
                 " of " + std::to_string(scratch.max_k) + ", threads = " + std::to_string(team.size()) + " of " +
                 std::to_string(scratch.n_threads));
  XPYD_CHECK(args.m == 1 || (args.x_stride >= k && args.y_stride >= args.n()));
  Gemm gemm(args, scratch, kernels);
  if (team.size() == 1 || long(args.m) * args.n() * k < kSerialMacs) {
    gemm.pack(0, 1);
    gemm.compute(0, 1, 0);
    return;
  }
  team.run([&](int rank) {
    gemm.pack(rank, team.size());
    if (args.m > 1) team.barrier();
    gemm.compute(rank, team.size(), rank);
  });
}

void run_portable(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
  run_gemm(args, scratch, team, kPortableKernels);
}

#if defined(__x86_64__)
void run_avx2(const GemmArgs& args, GemmScratch& scratch, ThreadTeam& team) {
  run_gemm(args, scratch, team, kAvx2Kernels);
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

// Best first.
const GemmVariant kVariants[] = {
#if defined(__x86_64__)
    {"avx2", run_avx2, has_avx2, "6 x 16 register tiles over packed panels, f32 FMA"},
#endif
    {"portable", run_portable, [] { return true; }, "the same blocking, multiply and add in plain C++"},
};

// Inside the 32 bytes of one k a bf16 panel interleaves columns c and c + 8 (gemm.md).
int place_in_panel(int column, Dtype dtype) {
  if (dtype == Dtype::f32) return column;
  return column < kPanel / 2 ? 2 * column : 2 * (column - kPanel / 2) + 1;
}

// Writes rows [n0, n0 + 16) of W, given as [16, k], into one panel.
void fill_panel(const float* rows, int k, Dtype dtype, std::byte* panel) {
  for (int i = 0; i < k; ++i) {
    for (int c = 0; c < kPanel; ++c) {
      float value = rows[size_t(c) * size_t(k) + size_t(i)];
      if (dtype == Dtype::f32) {
        reinterpret_cast<float*>(panel)[size_t(i) * kPanel + size_t(c)] = value;
      } else {
        const size_t place = size_t(place_in_panel(c, dtype));
        reinterpret_cast<bf16*>(panel)[size_t(i) * kPanel + place] = to_bf16(value);
      }
    }
  }
}

}  // namespace

PackedMatrix pack_matrix(int n, int k, int k_groups, Dtype dtype, const RowReader& read_row, ThreadTeam& team) {
  XPYD_CHECK(n > 0 && k > 0, "n = " + std::to_string(n) + ", k = " + std::to_string(k));
  XPYD_CHECK(k_groups >= 1 && k_groups <= kMaxGroups, "k_groups = " + std::to_string(k_groups));
  XPYD_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16, dtype_name(dtype));
  const int n_panels = (n + kPanel - 1) / kPanel;
  const size_t panel_bytes = size_t(k) * kPanel * dtype_bytes(dtype);
  PackedMatrix w{n, k, k_groups, dtype, Buffer(size_t(n_panels) * panel_bytes)};
  team.run([&](int rank) {
    std::vector<float> rows(size_t(kPanel) * size_t(k));
    Range panels = share(n_panels, rank, team.size());
    for (int p = panels.begin; p < panels.end; ++p) {
      int filled = std::min(kPanel, n - p * kPanel);
      for (int r = 0; r < filled; ++r) read_row(p * kPanel + r, rows.data() + size_t(r) * size_t(k));
      std::fill(rows.begin() + long(filled) * k, rows.end(), 0.0f);
      fill_panel(rows.data(), k, dtype, w.panels.data() + size_t(p) * panel_bytes);
    }
  });
  return w;
}

void unpack_rows(const PackedMatrix& w, int begin, int end, std::byte* out, size_t row_bytes) {
  XPYD_CHECK(0 <= begin && begin <= end && end <= w.n, std::to_string(end));
  const size_t element = dtype_bytes(w.dtype), panel_bytes = size_t(w.k) * kPanel * element;
  XPYD_CHECK(row_bytes >= size_t(w.k) * element, std::to_string(row_bytes));
  constexpr int kBlock = 512;  // of K: its part of a panel stays in L1 for all 16 rows
  auto unpack = [&]<class T>(T) {
    for (int row0 = begin; row0 < end; row0 = (row0 / kPanel + 1) * kPanel) {
      auto* panel = reinterpret_cast<const T*>(w.panels.data() + size_t(row0 / kPanel) * panel_bytes);
      const int row1 = std::min(end, (row0 / kPanel + 1) * kPanel);
      for (int k0 = 0; k0 < w.k; k0 += kBlock)
        for (int row = row0; row < row1; ++row) {
          const T* from = panel + place_in_panel(row % kPanel, w.dtype);
          T* to = reinterpret_cast<T*>(out + size_t(row - begin) * row_bytes);
          for (int i = k0, k1 = std::min(k0 + kBlock, w.k); i < k1; ++i) to[i] = from[size_t(i) * kPanel];
        }
    }
  };
  w.dtype == Dtype::f32 ? unpack(float{}) : unpack(bf16{});
}

Work work(const GemmArgs& args) {
  const double m = args.m, n = args.n(), k = args.k_range().end - args.k_range().begin;
  return {n * k * double(dtype_bytes(args.w->dtype)) + 4 * (m * k + m * n + (args.bias ? n : 0)), 2 * m * n * k};
}

GemmScratch::GemmScratch(int max_m_, int max_k_, int n_threads_)
    : buffer((packed_floats(max_m_, max_k_) + size_t(n_threads_) * thread_floats()) * sizeof(float)),
      max_m(max_m_),
      max_k(max_k_),
      n_threads(n_threads_) {}

std::span<const GemmVariant> gemm_variants() { return kVariants; }

const GemmVariant& default_gemm() {
  for (const GemmVariant& variant : kVariants)
    if (variant.available()) return variant;
  XPYD_CHECK(false, "no gemm variant runs on this machine");
}

}  // namespace xpyd::model
