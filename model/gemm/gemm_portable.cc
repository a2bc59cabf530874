// Tiles in plain C++, for any processor, and the oracle.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "model/gemm/gemm.h"
#include "model/gemm/gemm_kernels.h"

namespace xpyd::model {
namespace {

// Column c at k, in panels as README.md draws them; `behind` points at the scales and zeros that follow a piece.
struct F32 {
  static constexpr int kBits = 32;
  static float load(const std::byte* w, int k, int c, const std::byte*) {
    return reinterpret_cast<const float*>(w)[k * kPanel + c];
  }
};
struct Bf16 {
  static constexpr int kBits = 16;
  static float load(const std::byte* w, int k, int c, const std::byte*) {
    return to_f32(reinterpret_cast<const bf16*>(w)[k / 2 * 2 * kPanel + 2 * c + k % 2]);
  }
};
struct F16 {
  static constexpr int kBits = 16;
  static float load(const std::byte* w, int k, int c, const std::byte*) {
    return f16_to_f32(reinterpret_cast<const uint16_t*>(w)[k * kPanel + c]);
  }
};
struct Fp8 {
  static constexpr int kBits = 8;
  static float load(const std::byte* w, int k, int c, const std::byte* behind) {
    const float number = e4m3_to_f32(uint8_t(w[k / 2 * 2 * kPanel + 2 * c + k % 2]));
    return reinterpret_cast<const float*>(behind)[c] * (number / 256);
  }
};
template <class QuantisedRows>
struct Scaled {
  static float scale(const std::byte* behind, int c) {
    uint16_t bits;
    std::memcpy(&bits, behind + 2 * c, 2);
    return f16_to_f32(bits);
  }
  static int zero(const std::byte* behind, int c) { return int(behind[2 * kPanel + c]); }
  static float load(const std::byte* w, int k, int c, const std::byte* behind) {
    return scale(behind, c) * float(QuantisedRows::code(w, k, c) - zero(behind, c));
  }
};
struct Int8 : Scaled<Int8> {
  static constexpr int kBits = 8;
  static int code(const std::byte* w, int k, int c) { return int(w[k / 4 * 4 * kPanel + 4 * c + k % 4]); }
};
struct Int4 : Scaled<Int4> {
  static constexpr int kBits = 4;
  static int code(const std::byte* w, int k, int c) {
    return int(w[k / 8 * 4 * kPanel + 4 * c + k % 4]) >> (k % 8 / 4 * 4) & 15;
  }
};

template <class Weight>
const std::byte* behind_piece(const std::byte* w, int k) {
  return w + k * kPanel * Weight::kBits / 8;
}

// Multiplies, then adds: slower than AVX2 and with other bits, but also one chain per element.
template <int kRows, int kPanels, class Weight>
void tile(const GemmTile& t) {
  float sums[kPanels][kRows][kPanel] = {};
  if (t.resume)
    for (int i = 0; i < kPanels * kRows * kPanel; ++i) (&sums[0][0][0])[i] = t.sums[i];
  for (int p = 0; p < kPanels; ++p) {
    const std::byte* w = t.w + size_t(p) * t.panel_bytes;
    for (int k = 0; k < t.k; ++k) {
      float row[kPanel];
      for (int c = 0; c < kPanel; ++c) row[c] = Weight::load(w, k, c, behind_piece<Weight>(w, t.k));
      for (int r = 0; r < kRows; ++r) {
        float x = t.x[size_t(k) * kRows + r];
        for (int c = 0; c < kPanel; ++c) sums[p][r][c] += x * row[c];
      }
    }
  }
  for (int i = 0; i < kPanels * kRows * kPanel; ++i) t.sums[i] = (&sums[0][0][0])[i];
}

// Integer: int16_t or int8_t.
template <int kRows, int kPanels, class QuantisedRows, class Integer>
void dot_tile(const GemmTile& t) {
  constexpr int kXBits = 8 * sizeof(Integer), kSlots = 4 / sizeof(Integer);
  float* sums = t.sums;
  if (!t.resume) std::fill_n(sums, kPanels * kRows * kPanel, 0.0f);
  const std::byte* w = t.w;
  const float* from = t.x;
  for (int piece = 0; piece < t.pieces; ++piece) {
    for (int begin = 0, end; begin < t.k; begin = end) {
      end = std::min(t.k, begin + run_length(kXBits, t.k));
      const auto* x = reinterpret_cast<const DotRows<kRows>*>(from);
      for (int p = 0; p < kPanels; ++p) {
        const std::byte *codes = w + size_t(p) * t.panel_bytes, *behind = behind_piece<QuantisedRows>(codes, t.k);
        for (int r = 0; r < kRows; ++r)
          for (int c = 0; c < kPanel; ++c) {
            int sum = QuantisedRows::zero(behind, c) * x->less[r];
            for (int k = begin; k < end; ++k) {
              const int place = dot_place(kXBits, QuantisedRows::kBits, k - begin);
              const auto* cell = reinterpret_cast<const Integer*>(&x->cells[place / kSlots][r]);
              sum += cell[place % kSlots] * QuantisedRows::code(codes, k, c);
            }
            float& to = sums[(p * kRows + r) * kPanel + c];
            to = std::fma(float(sum), x->scale[r] * QuantisedRows::scale(behind, c), to);
          }
      }
      from += kRows * dot_floats(kXBits, end - begin);
    }
    w = behind_piece<QuantisedRows>(w, t.k) + 3 * kPanel;
  }
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; ++i) into[i] += from[i];
}

template <class Weight>
struct PlainTiles {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = tile<kRows, kPanels, Weight>;
  };
};
template <class QuantisedRows, class Integer>
struct PlainDots {
  template <int kRows, int kPanels>
  struct At {
    static constexpr GemmTileFn run = dot_tile<kRows, kPanels, QuantisedRows, Integer>;
  };
};
constexpr TileShapes kPlain = {6, {0, 6, 3, 2, 1, 1, 1}}, kPlainDot = {4, {0, 4, 2, 1, 1}};

}  // namespace

const GemmKernels kPortableKernels = {tiles_of<PlainTiles<F32>::At, kPlain>(),
                                      tiles_of<PlainTiles<Bf16>::At, kPlain>(),
                                      tiles_of<PlainTiles<F16>::At, kPlain>(),
                                      tiles_of<PlainTiles<Int8>::At, kPlain>(),
                                      tiles_of<PlainTiles<Int4>::At, kPlain>(),
                                      tiles_of<PlainTiles<Fp8>::At, kPlain>(),
                                      add};
template <class QuantisedRows, class Integer>
constexpr DotTiles kDots = {8 * sizeof(Integer), tiles_of<PlainDots<QuantisedRows, Integer>::template At, kPlainDot>()};
const DotKernels kPortableDot = {kDots<Int8, int16_t>, kDots<Int4, int16_t>, {}};
const DotKernels kPortableDot8 = {kDots<Int8, int8_t>, kDots<Int4, int8_t>, {}};

// The oracle of every variant: double precision, one loop per index, the same groups and tree. It takes whole products
// only; tests compare a slice with a part of the whole.
void gemm_reference(const GemmArgs& args, const float* w_rows) {
  const PackedMatrix& w = *args.w;
  const int groups = w.k_groups;
  for (int m = 0; m < args.m; ++m) {
    for (int n = 0; n < w.n; ++n) {
      std::vector<double> sums(size_t(groups), 0.0);
      for (int g = 0; g < groups; ++g)
        for (long k = long(g) * w.k / groups; k < long(g + 1) * w.k / groups; ++k)
          sums[size_t(g)] += double(args.x[size_t(m) * size_t(args.x_stride) + size_t(k)]) *
                             double(w_rows[size_t(n) * size_t(w.k) + size_t(k)]);
      for (int step = 1; step < groups; step *= 2)
        for (int left = 0; left + step < groups; left += 2 * step) sums[size_t(left)] += sums[size_t(left + step)];
      args.y[size_t(m) * size_t(args.y_stride) + size_t(n)] = float(sums[0] + (args.bias ? double(args.bias[n]) : 0.0));
    }
  }
}

}  // namespace xpyd::model
