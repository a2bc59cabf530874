// Operations of a warp's lanes together. Each lane leaves the address of its arguments, which lie on its fibre's stack.
// The last lane to arrive works for all.
#include <bit>

#include "machine.h"

namespace xpyd::cuda::simt {

namespace {

template <class Arguments>
Arguments& arguments_of(const Warp& warp, int lane) {
  return *static_cast<Arguments*>(warp.lane[lane]->arguments);
}
}  // namespace

void sync_warp(unsigned mask, Where where) {
  collective(
      Collective::syncwarp, mask, nullptr, [](Warp& warp) { ++warp.epoch; }, where);
}

namespace {
struct Shuffle {
  uint64_t bits, result;
  int argument;
};
}  // namespace

uint64_t shuffle(Collective kind, unsigned mask, uint64_t bits, int argument, Where where) {
  Shuffle mine{bits, 0, argument};
  collective(
      kind, mask, &mine,
      [](Warp& warp) {
        for (int l = 0; l < 32; ++l) {
          auto& s = arguments_of<Shuffle>(warp, l);
          int from = l;
          switch (warp.lane[l]->kind) {
            case Collective::shuffle: from = s.argument & 31; break;
            case Collective::shuffle_up: from = l - s.argument; break;
            default: from = l ^ s.argument; break;
          }
          if (from < 0 || from >= 32) from = l;  // a lane without a source keeps its own value
          s.result = arguments_of<Shuffle>(warp, from).bits;
        }
      },
      where);
  return mine.result;
}

namespace {
struct Ballot {
  bool predicate;
  unsigned result;
};
}  // namespace

unsigned ballot(unsigned mask, bool predicate, Where where) {
  Ballot mine{predicate, 0};
  collective(
      Collective::ballot, mask, &mine,
      [](Warp& warp) {
        unsigned votes = 0;
        for (int l = 0; l < 32; ++l) votes |= unsigned(arguments_of<Ballot>(warp, l).predicate) << l;
        for (int l = 0; l < 32; ++l) arguments_of<Ballot>(warp, l).result = votes;
      },
      where);
  return mine.result;
}

namespace {
struct LoadMatrices {
  const void* row;
  bool transposed;
  uint32_t (&r)[4];
};
}  // namespace

// PTX ISA, "ldmatrix": the address of row i of matrix j comes from lane 8 j + i.
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, Where where) {
  check_aligned(row, 16, "ldmatrix", where);
  check_read(row, 16, where);  // checked here, so that the fault names the lane that gave the address
  LoadMatrices mine{row, transposed, r};
  collective(
      Collective::ldmatrix, all_lanes, &mine,
      [](Warp& warp) {
        uint16_t matrix[4][8][8];
        for (int l = 0; l < 32; ++l) std::memcpy(matrix[l / 8][l % 8], arguments_of<LoadMatrices>(warp, l).row, 16);
        for (int l = 0; l < 32; ++l) {
          auto& lane = arguments_of<LoadMatrices>(warp, l);
          int i = l / 4, k = l % 4 * 2;
          for (int j = 0; j < 4; ++j) {
            uint16_t low = lane.transposed ? matrix[j][k][i] : matrix[j][i][k];
            uint16_t high = lane.transposed ? matrix[j][k + 1][i] : matrix[j][i][k + 1];
            lane.r[j] = uint32_t(low) | uint32_t(high) << 16;
          }
        }
      },
      where);
}

namespace {
struct Mma {
  float (&d)[4];
  const uint32_t (&a)[4];
  uint32_t b[2];
};
float low(uint32_t word) { return std::bit_cast<float>(word << 16); }
float high(uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); }
}  // namespace

// PTX ISA, "Matrix fragments for mma.m16n8k16". With i = l / 4 and k = 2 (l % 4), lane l holds: of a, rows i and i + 8
// at columns k, k + 1 and k + 8, k + 9; of b, column i at rows k, k + 1 and k + 8, k + 9; of d, rows i and i + 8 at
// columns k, k + 1. The sum is exact until it is rounded into d. Hardware truncates between groups of products, so do
// not compare bits between the two.
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Where where) {
  Mma mine{d, a, {b0, b1}};
  collective(
      Collective::mma, all_lanes, &mine,
      [](Warp& warp) {
        double a_tile[16][16], b_tile[16][8], d_tile[16][8];
        for (int l = 0; l < 32; ++l) {
          auto& lane = arguments_of<Mma>(warp, l);
          int i = l / 4, k = l % 4 * 2;
          for (int j = 0; j < 4; ++j) {
            a_tile[i + j % 2 * 8][k + j / 2 * 8] = low(lane.a[j]);
            a_tile[i + j % 2 * 8][k + j / 2 * 8 + 1] = high(lane.a[j]);
            d_tile[i + j / 2 * 8][k + j % 2] = lane.d[j];
          }
          for (int j = 0; j < 2; ++j) {
            b_tile[k + j * 8][i] = low(lane.b[j]);
            b_tile[k + j * 8 + 1][i] = high(lane.b[j]);
          }
        }
        for (int i = 0; i < 16; ++i)
          for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 8; ++j) d_tile[i][j] += a_tile[i][k] * b_tile[k][j];
        for (int l = 0; l < 32; ++l)
          for (int j = 0; j < 4; ++j)
            arguments_of<Mma>(warp, l).d[j] = float(d_tile[l / 4 + j / 2 * 8][l % 4 * 2 + j % 2]);
      },
      where);
}

}  // namespace xpyd::cuda::simt
