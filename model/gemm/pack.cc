// Packs weights into panels and unpacks them: the place of every element of every dtype. README.md draws it.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "base/status.h"
#include "model/gemm/gemm.h"
#include "model/gemm/gemm_kernels.h"
#include "model/gemm/sum_tree.h"

namespace xpyd::model {
namespace {

// K that a tile takes at once; pieces are padded to whole steps.
int k_step(Dtype dtype) {
  return dtype == Dtype::bf16 || dtype == Dtype::fp8 ? 2 : dtype == Dtype::int8 ? 4 : dtype == Dtype::int4 ? 8 : 1;
}
// Bytes after a piece: 16 scales, and for int8 and int4 16 zeros of one byte.
size_t behind_bytes(Dtype dtype) { return !is_quantised(dtype) ? 0 : dtype == Dtype::fp8 ? 64 : 48; }
size_t codes_bytes(Dtype dtype, int stored) { return size_t(stored) * kPanel * size_t(dtype_bits(dtype)) / 8; }

void add_piece(PackedMatrix& w, Range k, int group, int scale) {
  const int step = k_step(w.dtype), length = k.end - k.begin;
  const int least = is_quantised(w.dtype) ? step : 0;  // an empty K-group also has a place in scratch
  const int stored = std::max((length + step - 1) / step * step, least);
  const int begin = w.pieces.empty() ? 0 : w.pieces.back().stored.end;
  w.pieces.push_back({k, {begin, begin + stored}, w.panel_bytes, group, scale});
  w.panel_bytes += codes_bytes(w.dtype, stored) + behind_bytes(w.dtype);
}

// Place of (k of a piece, column) in a dense panel, in elements from the start of the piece.
size_t place_in_piece(int k, int column, Dtype dtype) {
  if (dtype != Dtype::bf16) return size_t(k) * kPanel + size_t(column);
  return size_t(k / 2 * 2) * kPanel + size_t(2 * column + k % 2);
}

// Copies units of `filled` rows, row_bytes apart, to [units, 16]. A unit is an element or a pair of bf16.
template <class Unit>
void interleave(const std::byte* rows, size_t row_bytes, int filled, int units, std::byte* out) {
  constexpr int kBlock = 128;  // this block of all rows stays in L1
  auto* to = reinterpret_cast<Unit*>(out);
  for (int begin = 0; begin < units; begin += kBlock)
    for (int u = begin, end = std::min(begin + kBlock, units); u < end; ++u)
      for (int c = 0; c < filled; ++c)
        std::memcpy(to + size_t(u) * kPanel + size_t(c), rows + size_t(c) * row_bytes + size_t(u) * sizeof(Unit),
                    sizeof(Unit));
}

// Writes one quantised value into a piece that is zero before.
void put_code(Dtype dtype, uint8_t code, std::byte* piece, int k, int column) {
  if (dtype == Dtype::fp8) piece[k / 2 * 2 * kPanel + 2 * column + k % 2] = std::byte(code);
  if (dtype == Dtype::int8) piece[k / 4 * 4 * kPanel + 4 * column + k % 4] = std::byte(code);
  // Four bytes of a column hold eight k: the first four in their lower halves.
  if (dtype == Dtype::int4) piece[k / 8 * 4 * kPanel + 4 * column + k % 4] |= std::byte(code << (k % 8 / 4 * 4));
}

int input_at(const PackedMatrix& w, int place) { return w.order.empty() ? place : w.order[size_t(place)]; }

// Calls fill(panel number, panel) for all panels of w; the team shares the work.
template <class Fill>
void for_panels(PackedMatrix& w, ThreadTeam& team, Fill fill) {
  w.panels = Buffer(size_t((w.n + kPanel - 1) / kPanel) * w.panel_bytes);
  team.run([&](int rank) {
    const Range panels = share((w.n + kPanel - 1) / kPanel, rank, team.size());
    for (int p = panels.begin; p < panels.end; ++p) fill(p, w.panels.data() + size_t(p) * w.panel_bytes);
  });
}

}  // namespace

PackedMatrix lay_out(int n, int k, int k_groups, Dtype dtype, const QuantGroups* groups) {
  XPYD_CHECK(n > 0 && k > 0, "n = " + std::to_string(n) + ", k = " + std::to_string(k));
  XPYD_CHECK(k_groups >= 1 && k_groups <= kMaxGroups, "k_groups = " + std::to_string(k_groups));
  PackedMatrix w{.n = n, .k = k, .k_groups = k_groups, .dtype = dtype, .pieces = {}, .order = {}, .panels = {}};
  w.order.resize(size_t(k));
  std::iota(w.order.begin(), w.order.end(), 0);
  for (int g = 0; g < k_groups; ++g) {
    const Range range = w.k_range({g, g + 1});
    const auto scale_of = [&](int place) { return groups->of[size_t(w.order[size_t(place)])]; };
    if (groups)
      std::stable_sort(w.order.begin() + range.begin, w.order.begin() + range.end,
                       [&](int a, int b) { return groups->of[size_t(a)] < groups->of[size_t(b)]; });
    int begin = range.begin;
    do {
      int end = begin;
      if (!groups) end = range.end;
      while (end < range.end && end - begin < kMaxPiece && scale_of(end) == scale_of(begin)) ++end;
      add_piece(w, {begin, end}, g, groups && begin < end ? scale_of(begin) : 0);
      begin = end;
    } while (begin < range.end);
  }
  if (std::is_sorted(w.order.begin(), w.order.end())) w.order.clear();
  w.panel_bytes = (w.panel_bytes + 63) / 64 * 64;
  return w;
}

int PackedMatrix::stored(Range of) const {
  int total = 0;
  for (const Piece& p : pieces)
    if (of.begin <= p.group && p.group < of.end) total += p.stored.end - p.stored.begin;
  return total;
}

PackedMatrix pack_elements(int n, int k, int k_groups, Dtype dtype, const ElementReader& read_row, ThreadTeam& team) {
  XPYD_CHECK(dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16, dtype_name(dtype));
  PackedMatrix w = lay_out(n, k, k_groups, dtype, nullptr);
  const size_t element = dtype_bytes(dtype), row_bytes = (size_t(k) * element + 127) / 64 * 64;
  for_panels(w, team, [&](int p, std::byte* panel) {
    std::vector<std::byte> rows(kPanel * row_bytes);
    const int filled = std::min(kPanel, n - p * kPanel);
    for (int r = 0; r < filled; ++r) read_row(p * kPanel + r, rows.data() + size_t(r) * row_bytes);
    for (const PackedMatrix::Piece& piece : w.pieces) {
      const std::byte* from = rows.data() + size_t(piece.k.begin) * element;
      std::byte* to = panel + piece.offset;
      const int length = piece.k.end - piece.k.begin;
      if (dtype == Dtype::f16) {
        interleave<uint16_t>(from, row_bytes, filled, length, to);
        continue;
      }
      const int units = dtype == Dtype::f32 ? length : (length + 1) / 2;
      interleave<uint32_t>(from, row_bytes, filled, units, to);
      for (int c = 0; dtype == Dtype::bf16 && length % 2 != 0 && c < kPanel; ++c)  // clears the next piece's element
        reinterpret_cast<uint32_t*>(to)[(units - 1) * kPanel + c] &= 0xffffu;
    }
  });
  return w;
}

PackedMatrix pack_matrix(int n, int k, int k_groups, Dtype dtype, const RowReader& read_row, ThreadTeam& team) {
  const auto read = [&](int row, std::byte* out) {
    if (dtype == Dtype::f32) return read_row(row, reinterpret_cast<float*>(out));
    std::vector<float> values(static_cast<size_t>(k));
    read_row(row, values.data());
    if (dtype == Dtype::bf16)
      std::transform(values.begin(), values.end(), reinterpret_cast<bf16*>(out), to_bf16);
    else
      std::transform(values.begin(), values.end(), reinterpret_cast<uint16_t*>(out), nearest_f16);
  };
  return pack_elements(n, k, k_groups, dtype, read, team);
}

PackedMatrix pack_codes(int n, int k, int k_groups, Dtype dtype, const QuantGroups& groups, const QuantReader& read_row,
                        ThreadTeam& team) {
  XPYD_CHECK(is_quantised(dtype), dtype_name(dtype));
  PackedMatrix w = lay_out(n, k, k_groups, dtype, &groups);
  for_panels(w, team, [&](int p, std::byte* panel) {
    QuantRow row(dtype, k, groups.count);
    for (int c = 0; c < kPanel && p * kPanel + c < n; ++c) {
      read_row(p * kPanel + c, row);
      for (const PackedMatrix::Piece& piece : w.pieces) {
        const auto input = [&](int place) { return input_at(w, place); };
        std::byte* codes = panel + piece.offset;
        for (int i = piece.k.begin; i < piece.k.end; ++i)
          put_code(dtype, row.codes[size_t(input(i))], codes, i - piece.k.begin, c);
        std::byte* behind = codes + codes_bytes(dtype, piece.stored.end - piece.stored.begin);
        const auto g = size_t(piece.scale);
        if (dtype == Dtype::fp8) {
          const float scale = row.scale[g] * 256;  // a tile makes 2^-8 of the number
          std::memcpy(behind + c * 4, &scale, 4);
          continue;
        }
        const uint16_t scale = nearest_f16(row.scale[g]);
        std::memcpy(behind + c * 2, &scale, 2);
        behind[2 * kPanel + c] = std::byte(row.zero[g]);  // padding after a piece meets x = 0
      }
    }
  });
  return w;
}

void unpack_rows(const PackedMatrix& w, int begin, int end, std::byte* out, size_t row_bytes) {
  XPYD_CHECK(0 <= begin && begin <= end && end <= w.n && !is_quantised(w.dtype), std::to_string(end));
  const size_t element = dtype_bytes(w.dtype);
  XPYD_CHECK(row_bytes >= size_t(w.k) * element, std::to_string(row_bytes));
  constexpr int kBlock = 512;  // of K: this part of a panel stays in L1 for all 16 rows
  auto unpack = [&]<class T>(T) {
    for (int row0 = begin; row0 < end; row0 = (row0 / kPanel + 1) * kPanel) {
      const std::byte* panel = w.panels.data() + size_t(row0 / kPanel) * w.panel_bytes;
      const int row1 = std::min(end, (row0 / kPanel + 1) * kPanel);
      for (const PackedMatrix::Piece& piece : w.pieces)
        for (int k0 = piece.k.begin; k0 < piece.k.end; k0 += kBlock)
          for (int row = row0; row < row1; ++row) {
            auto* from = reinterpret_cast<const T*>(panel + piece.offset);
            T* to = reinterpret_cast<T*>(out + size_t(row - begin) * row_bytes);
            for (int i = k0, k1 = std::min(k0 + kBlock, piece.k.end); i < k1; ++i)
              to[i] = from[place_in_piece(i - piece.k.begin, row % kPanel, w.dtype)];
          }
    }
  };
  w.dtype == Dtype::f32 ? unpack(float{}) : unpack(uint16_t{});
}

}  // namespace xpyd::model
