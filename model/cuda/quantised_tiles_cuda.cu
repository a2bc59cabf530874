// A tile is 16 outputs, the rows of an mma. Its codes lie in the order in which a warp's lanes use them. Each lane has
// 16 bytes: its elements of A for 64 (int4) or 32 (int8, fp8) positions of K. The next lane's bytes follow, then the
// next positions. After all codes, one word per group and output holds the scale in f32. For int4 the word holds the
// scale in f16 and, above it, -(128 + zero) in bf16.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "model/cuda/quantised_gemm_cuda.h"

namespace xpyd::model {
namespace {

int rounded_up(int n, int to) { return (n + to - 1) / to * to; }

uint32_t scale_word(Dtype dtype, float scale, int zero) {
  if (dtype != Dtype::int4) return std::bit_cast<uint32_t>(scale);
  return uint32_t(nearest_f16(scale)) | uint32_t(to_bf16(-float(128 + zero)).bits) << 16;
}

}  // namespace

CodeTiles lay_out_tiles(const PackedMatrix& w) {
  XPYD_CHECK(is_quantised(w.dtype), dtype_name(w.dtype));
  const QuantGroups groups = unpack_groups(w);
  std::vector<std::vector<int32_t>> of(size_t(groups.count));
  for (int k = 0; k < w.k; ++k) of[size_t(groups.of[size_t(k)])].push_back(k);
  size_t longest = 0;
  for (const auto& inputs : of) longest = std::max(longest, inputs.size());
  CodeTiles tiles;
  CudaQuantisedRows& codes = tiles.codes;
  codes.dtype = w.dtype;
  codes.groups = groups.count;
  codes.group = rounded_up(int(longest), CodeTiles::kQuarter);
  codes.places = rounded_up((groups.count - 1) * codes.group + int(of.back().size()), CodeTiles::kStep);
  tiles.inputs.assign(size_t(codes.places), -1);
  for (size_t g = 0; g < of.size(); ++g)
    std::copy(of[g].begin(), of[g].end(), tiles.inputs.begin() + long(g) * codes.group);
  for (int k = 0; k < w.k; ++k) tiles.in_order = tiles.in_order && tiles.inputs[size_t(k)] == k;
  tiles.n_tiles = (w.n + kQuantisedOutputs - 1) / kQuantisedOutputs;
  XPYD_CHECK(codes.places < CodeTiles::kQuarter << 16, std::to_string(codes.places));
  tiles.bytes = codes.places * dtype_bits(w.dtype) / 8 * kQuantisedOutputs + codes.groups * 4 * kQuantisedOutputs;
  return tiles;
}

void write_tile(const PackedMatrix& w, const CodeTiles& tiles, int tile, std::byte* out) {
  const CudaQuantisedRows& codes = tiles.codes;
  const int bits = dtype_bits(codes.dtype), in_unit = 16 / bits;  // groups of 16 positions in a unit
  std::fill_n(out, tiles.bytes, std::byte{0});
  QuantRow row(codes.dtype, w.k, codes.groups);
  for (int o = 0; o < kQuantisedOutputs && tile * kQuantisedOutputs + o < w.n; ++o) {
    unpack_codes(w, tile * kQuantisedOutputs + o, row);
    // PTX ISA, "Matrix fragments for mma.m16n8k16": the lane, the pair among its four, and the half of the pair, in the
    // order that Numbers reads.
    int byte_of[16], shift_of[16];
    for (int k = 0; k < 16; ++k) {
      const int lane = o % 8 * 4 + k % 8 / 2, pair = k / 8 * 2 + o / 8;
      const int at = bits == 4 ? pair * 4 + k % 2 * 16 : pair / 2 * 32 + pair % 2 * 8 + k % 2 * 16;  // in bits
      byte_of[k] = lane * 16 + at / 8, shift_of[k] = at % 8;
    }
    for (int times = 0; times < codes.places / 16; ++times) {
      std::byte* unit = out + times / in_unit * CodeTiles::kUnitBytes + times % in_unit * bits;
      for (int k = 0; k < 16; ++k)
        if (const int input = tiles.inputs[size_t(times * 16 + k)]; input >= 0)  // padding meets x = 0
          unit[byte_of[k]] |= std::byte(row.codes[size_t(input)] << shift_of[k]);
    }
    std::byte* scales = out + codes.places * bits / 8 * kQuantisedOutputs;
    for (int g = 0; g < codes.groups; ++g) {
      // int8 always has 128, int4 at most 16: 128 + zero is a bf16.
      const int zero = codes.dtype == Dtype::fp8 ? 0 : row.zero[size_t(g)];
      XPYD_CHECK(codes.dtype != Dtype::int8 || zero == 128, std::to_string(zero));
      const uint32_t word = scale_word(codes.dtype, row.scale[size_t(g)], zero);
      std::memcpy(scales + (g * kQuantisedOutputs + o) * 4, &word, 4);
    }
  }
}

}  // namespace xpyd::model
