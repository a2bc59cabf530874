// The kernels in plain C++ for any CPU: multiply, round, add, round. The innermost loops run over the 16 columns of a
// panel, so that the compiler may use any vectors; no sum is reordered.
#include <algorithm>
#include <bit>
#include <cstring>

#include "attention/cpu/kernels.h"
#include "attention/kv_dtype/kv_row.h"

namespace xpyd::attention {

float exp2_negative(float x) {
  if (x < -126.0f) return 0.0f;
  if (!(x == x)) return x;
  float n = float(int(x - 0.5f));  // nearest integer, because truncation rounds x <= 0 towards zero
  float f = x - n;
  float y = 1.535335905e-4f;  // minimax polynomial of 2^f on [-0.5, 0.5], relative error 2e-9 before rounding
  y = y * f + 1.339887385e-3f;
  y = y * f + 9.618436918e-3f;
  y = y * f + 5.550332367e-2f;
  y = y * f + 2.402264774e-1f;
  y = y * f + 6.931471825e-1f;
  y = y * f + 1.0f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(y) + (uint32_t(int(n)) << 23));
}

namespace {

// Calls take(first d, elements) for each kPanelDims elements of a row; the last call may have fewer.
template <class Take>
void in_pieces(Dtype dtype, const std::byte* row, int head_dim, Take&& take) {
  for (int d = 0; d < head_dim; d += kPanelDims) {
    float x[kPanelDims] = {};
    read_kv_row(dtype, head_dim, row, d, std::min(d + kPanelDims, head_dim), x);
    take(d, x);
  }
}

void take_q(Dtype, const float* q, float scale, int head_dim, float* row) {
  for (int d = 0; d < head_dim; ++d) row[d] = q[d] * scale;
}

void pack_k(Dtype dtype, const std::byte* const* rows, size_t offset, int head_dim, float* panel) {
  for (int t = 0; t < kPanelTokens; ++t) {
    if (!rows[t]) {
      for (int d = 0; d < head_dim; ++d) panel[d * kPanelTokens + t] = 0.0f;
      continue;
    }
    in_pieces(dtype, rows[t] + offset, head_dim, [&](int first, const float* x) {
      for (int d = first; d < std::min(first + kPanelDims, head_dim); ++d) panel[d * kPanelTokens + t] = x[d - first];
    });
  }
}

void scores(Dtype, const float* q, int n_rows, int head_dim, const float* panel, float* s, Prefetch) {
  for (int r = 0; r < n_rows; ++r) {
    float sum[kPanelTokens] = {};
    for (int d = 0; d < head_dim; ++d)
      for (int t = 0; t < kPanelTokens; ++t)
        sum[t] += q[size_t(r) * size_t(padded_dim(head_dim)) + size_t(d)] * panel[d * kPanelTokens + t];
    std::memcpy(s + size_t(r) * kTileTokens, sum, sizeof sum);
  }
}

void scores_in_place(Dtype dtype, const std::byte* const* rows, size_t offset, const float* q, int n_rows, int head_dim,
                     float* panel, float* s, Prefetch prefetch) {
  pack_k(dtype, rows, offset, head_dim, panel);
  scores(dtype, q, n_rows, head_dim, panel, s, prefetch);
}

void softmax_row(float* s, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  float max = state->max;
  for (int t = begin; t < end; ++t) max = s[t] > max || s[t] != s[t] ? s[t] : max;
  if (max != state->max) {
    float alpha = exp2_negative(state->max - max);
    state->max = max;
    state->sum *= alpha;
    for (int d = 0; d < d_pad; ++d) acc[d] *= alpha;
  }
  float sum = 0;
  for (int t = begin; t < end; ++t) sum += s[t] = exp2_negative(s[t] - max);
  state->sum += sum;
}

void softmax(float* s, int n_rows, int begin, int end, SoftmaxState* state, float* acc, int d_pad) {
  for (int r = 0; r < n_rows; ++r)
    softmax_row(s + r * kTileTokens, begin, end, state + r, acc + size_t(r) * size_t(d_pad), d_pad);
}

void pack_v(Dtype dtype, const std::byte* const* rows, int begin, int end, size_t offset, int head_dim, float* panels) {
  for (int t = begin; t < end; ++t)
    in_pieces(dtype, rows[t] + offset, head_dim, [&](int first, const float* x) {
      std::memcpy(panels + (first / kPanelDims * kTileTokens + t) * kPanelDims, x, kPanelDims * sizeof(float));
    });
}

void values(const float* p, int n_rows, int begin, int end, const float* panels, float* acc, int d_pad, Prefetch) {
  for (int panel = 0; panel < d_pad / kPanelDims; ++panel)
    for (int r = 0; r < n_rows; ++r) {
      float* out = acc + size_t(r) * size_t(d_pad) + panel * kPanelDims;
      float sum[kPanelDims];
      std::memcpy(sum, out, sizeof sum);
      for (int t = begin; t < end; ++t)
        for (int d = 0; d < kPanelDims; ++d)
          sum[d] += p[r * kTileTokens + t] * panels[(panel * kTileTokens + t) * kPanelDims + d];
      std::memcpy(out, sum, sizeof sum);
    }
}

void values_in_place(Dtype dtype, const float* p, int n_rows, int begin, int end, const std::byte* const* rows,
                     size_t offset, float* acc, int head_dim, Prefetch) {
  for (int t = begin; t < end; ++t)
    in_pieces(dtype, rows[t] + offset, head_dim, [&](int first, const float* x) {
      for (int r = 0; r < n_rows; ++r) {
        float* sum = acc + size_t(r) * size_t(head_dim) + size_t(first);
        for (int d = 0; d < kPanelDims; ++d) sum[d] += p[r * kTileTokens + t] * x[d];
      }
    });
}

constexpr AttentionKernels kPortable = {take_q,  pack_k, scores, scores_in_place, softmax,
                                        nullptr, pack_v, values, values_in_place};

}  // namespace

void attention_portable(const AttentionArgs& args, ThreadTeam& team) {
  tiled_attention(args, team, kPortable, kPortable, kPortable);
}

}  // namespace xpyd::attention
