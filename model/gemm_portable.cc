// Tiles in plain C++: multiply, then add. Slower than AVX2 and with other bits, under the same rule
// of one chain per element.
#include "base/dtype.h"
#include "model/gemm_kernels.h"

namespace xpyd {
namespace {

// Inside the 32 bytes of one k a bf16 panel interleaves columns c and c + 8 (see gemm.md).
inline void load_row(const float* w, float* out) {
  for (int c = 0; c < kPanel; ++c) out[c] = w[c];
}
inline void load_row(const bf16* w, float* out) {
  for (int c = 0; c < kPanel / 2; ++c) {
    out[c] = to_f32(w[2 * c]);
    out[c + kPanel / 2] = to_f32(w[2 * c + 1]);
  }
}

template <int kRows, int kPanels, class Weight>
void tile(const GemmTile& t) {
  float sums[kPanels][kRows][kPanel] = {};
  if (t.resume)
    for (int i = 0; i < kPanels * kRows * kPanel; ++i) (&sums[0][0][0])[i] = t.sums[i];
  for (int p = 0; p < kPanels; ++p) {
    auto* w = reinterpret_cast<const Weight*>(t.w + size_t(p) * t.panel_bytes);
    for (int k = 0; k < t.k; ++k) {
      float row[kPanel];
      load_row(w + size_t(k) * kPanel, row);
      for (int r = 0; r < kRows; ++r) {
        float x = t.x[size_t(k) * kRows + r];
        for (int c = 0; c < kPanel; ++c) sums[p][r][c] += x * row[c];
      }
    }
  }
  for (int i = 0; i < kPanels * kRows * kPanel; ++i) t.sums[i] = (&sums[0][0][0])[i];
}

void add(float* into, const float* from, int n) {
  for (int i = 0; i < n; ++i) into[i] += from[i];
}

}  // namespace

const GemmKernels kPortableKernels = {XPYD_TILES(float), XPYD_TILES(bf16), add};

}  // namespace xpyd
