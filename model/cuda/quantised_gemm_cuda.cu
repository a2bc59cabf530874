// Each lane asks for its own codes (quantised_tiles_cuda.cu); a ring in shared memory keeps them streaming. Only x and
// scales are shared between lanes. The kernel multiplies code less zero, which fits bf16, and applies the scale to a
// piece's sum. That takes one instruction per sum instead of several per weight, and rounds no weight.
#include <string>
#include <type_traits>

#include "base/cuda/cuda_kernel.h"
#include "model/cuda/quantised_gemm_cuda.h"

namespace xpyd::model {
namespace {

using cuda::Carver;
using cuda::Shared;

constexpr int kStep = CodeTiles::kStep, kQuarter = CodeTiles::kQuarter, kUnitBytes = CodeTiles::kUnitBytes;
constexpr int kParts = 4;  // of K; with few rows, each part has a warp

// Types, for readable names in lists of kernels.
struct Int4 {
  static constexpr Dtype kDtype = Dtype::int4;
};
struct Int8 {
  static constexpr Dtype kDtype = Dtype::int8;
};
struct Fp8 {
  static constexpr Dtype kDtype = Dtype::fp8;
};

// Turns the codes of two positions in a word (low and high half alike), less their zero, into two bf16. In bf16, 0x4300
// + c is 128 + c. The constants must not be compile-time constants: an instruction takes only one immediate, so the
// others must be in registers. blockIdx.z is always 0 here.
template <class Form>
struct Numbers {
  uint32_t add = 0x43004300u + blockIdx.z, off = 0xc380c380u + blockIdx.z;
  // words: of 16 positions; j: pair among A's four; zeros, int4 only: -(128 + zero) twice.
  __device__ uint32_t operator()(const uint32_t* words, int j, uint32_t zeros) const {
    constexpr uint32_t kOnes = 0x3f803f80u;
    if constexpr (std::is_same_v<Form, Int4>)
      return cuda::fma_bf16x2((words[0] >> (4 * j) & 0x000f000fu) | add, kOnes, zeros);
    const uint32_t word = words[j / 2];
    if constexpr (std::is_same_v<Form, Int8>) {  // bf16 has no place for the highest bit: it selects 128 or 256
      const uint32_t pair = word >> (j % 2 * 8);
      return cuda::fma_bf16x2((pair & 0x007f007fu) | add, kOnes, (pair & 0x00800080u) ^ off);
    }
    // Moves sign, exponent and mantissa to bf16's places. bf16's exponent bias is 127, not 7: the product with 2^120
    // fixes it.
    const uint32_t pair = j % 2 ? word : word << 8;
    return cuda::fma_bf16x2((pair & 0x80008000u) | (pair >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
  }
};
template <class Form>
__device__ inline float scale_of(uint32_t word) {
  return std::is_same_v<Form, Int4> ? cuda::unpack_f16(word).x : __uint_as_float(word);
}

// Place of 16 bytes of x's tile. For bf16, the swizzle spreads the eight rows of an ldmatrix over all banks.
template <class T>
__device__ inline int x_place(int row, int piece) {
  return row * kStep + (sizeof(T) == 2 ? (piece ^ (row & 7)) * 8 : piece * 4);
}

// A lane's sums over kTiles tiles and kTokens rows of x. bf16: fragments of an mma, four per 16 outputs and 8 rows.
// f32: a quarter of the positions, four per two outputs and two rows.
template <class T, int kTiles, int kTokens>
struct Sums {
  static constexpr bool kMma = std::is_same_v<T, bf16>;
  static constexpr int kFours = kMma ? kTokens / 8 : kTokens / 2;
  float piece[kTiles][kFours][4] = {}, of[kTiles][kFours][4] = {};

  // a: pairs of two times 16 positions.
  __device__ void add(const uint32_t (&a)[kTiles][2][4], const Shared<T>& x, int row, int quarter, int lane) {
    if constexpr (kMma) {
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        uint32_t b[4];
        cuda::ldmatrix_x4(b, x, x_place<T>(row + 8 * n + lane % 8, 4 * quarter + lane / 8));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile)
            cuda::mma_m16n8k16(piece[tile][n], a[tile][i], b[2 * i], b[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int token = 0; token < kTokens; ++token)
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // k: of two times 16 positions, of their halves, of a pair
          const int times = i / 4, half = i / 2 % 2;
          const float value =
              x[(row + token) * kStep + kQuarter * quarter + 16 * times + 8 * half + 2 * (lane % 4) + i % 2];
#pragma unroll
          for (int j = 0; j < kTiles * 2; ++j) {
            const uint32_t pair = a[j / 2][times][2 * half + j % 2];
            float& sum = piece[j / 2][token / 2][j % 2 * 2 + token % 2];
            sum = __fmaf_rn(__uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16), value, sum);
          }
        }
    }
  }
  // Ends a piece. scale: of the lane's two outputs in each tile.
  __device__ void scaled(const float (&scale)[kTiles][2]) {
#pragma unroll
    for (int i = 0; i < kTiles * kFours * 4; ++i) {
      float &from = piece[i / 4 / kFours][i / 4 % kFours][i % 4], &to = of[i / 4 / kFours][i / 4 % kFours][i % 4];
      to = __fmaf_rn(from, scale[i / 4 / kFours][i / 2 % 2], to);
      from = 0;
    }
  }
  // Calls use(i, sum) for all sums.
  template <class Use>
  __device__ void each(Use use) {
#pragma unroll
    for (int i = 0; i < kTiles * kFours * 4; ++i) use(i, of[i / 4 / kFours][i / 4 % kFours][i % 4]);
  }
  // Output and row of sum i.
  __device__ static int output(int i, int lane) {
    return i / 4 / kFours * kQuantisedOutputs + lane / 4 + i / 2 % 2 * 8;
  }
  __device__ static int token(int i, int lane) {
    return kMma ? i / 4 % kFours * 8 + 2 * (lane % 4) + i % 2 : i / 4 % kFours * 2 + i % 2;
  }
};

// A block takes kTokens rows of x. With many rows, each warp has its own tiles and all parts of K, and the warps share
// x. With few rows, all warps have the same tiles and each has a part of K: more of W is in flight, and chains of sums
// stay short.
template <class Form, class T, int kTokens>
struct QuantisedRows {
  static constexpr bool kFew = kTokens <= 32;
  static constexpr int kTiles = sizeof(T) == 4 ? 1 : 2, kWarps = kParts, kThreads = 32 * kWarps,
                       kBlockTiles = kFew ? kTiles : kTiles * kWarps;
  static constexpr int kBits = dtype_bits(Form::kDtype),
                       kUnits = kStep * kBits * 2 / kUnitBytes;  // of a tile in a stage
  // As many stages as let two blocks share an SM (one block with 32 rows). With few rows, 6 to 12 KB of codes are in
  // flight for each warp.
  static constexpr int stages() {
    if (sizeof(T) == 4) return 3;
    if (kTokens == 8) return kBits == 4 ? 6 : 4;
    return (kTokens == 16 ? 3 : 2) + (kBits == 4 ? 1 : 0);
  }
  static constexpr int kStages = stages();
  static constexpr int kScales = kStep / kQuarter * kQuantisedOutputs;  // of a tile in a stage
  static constexpr int kRings = kFew ? kWarps : 1;                      // rings of x
  static constexpr int kWordsKept = kStages * kWarps * kTiles * kUnits * kUnitBytes / 4,
                       kScalesKept = kStages * kWarps * kTiles * kScales, kXKept = kStages * kRings * kTokens * kStep,
                       kSumsKept = kTiles * Sums<T, kTiles, kTokens>::kFours * 4 * kThreads;
  static constexpr size_t shared() {
    return cuda::shared_bytes<uint32_t>(kWordsKept) + cuda::shared_bytes<uint32_t>(kScalesKept) +
           cuda::shared_bytes<T>(kXKept) + cuda::shared_bytes<float>(kSumsKept);
  }
};

// This kernel stays whole because its steps share registers and shared memory.
template <class Form, class T, int kTokens>
__global__ void __launch_bounds__(QuantisedRows<Form, T, kTokens>::kThreads, 2) quantised_kernel(CudaGemmArgs a) {
  using C = QuantisedRows<Form, T, kTokens>;
  Carver carver;
  const auto words = carver.take<uint32_t>(C::kWordsKept), scales = carver.take<uint32_t>(C::kScalesKept);
  const auto x = carver.take<T>(C::kXKept);
  const auto kept = carver.take<float>(C::kSumsKept);  // few rows: sums of each warp; many: of the parts before
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  // Blocks that run together share W and x: the grid goes band by band of outputs, and through a band row by row.
  constexpr int kBand = 16, kOutputs = C::kBlockTiles * kQuantisedOutputs;
  const int across = (a.w.n + kOutputs - 1) / kOutputs, down = (a.m + kTokens - 1) / kTokens;
  const int band = int(blockIdx.x) / (kBand * down), wide = min(kBand, across - band * kBand),
            in_band = int(blockIdx.x) - band * kBand * down;
  const int block = band * kBand + in_band % wide, first_token = in_band / wide * kTokens;

  const CudaQuantisedRows& codes = a.w.codes;
  const int first_tile = block * C::kBlockTiles + (C::kFew ? 0 : warp * C::kTiles);
  const int n_tiles = (a.w.n + kQuantisedOutputs - 1) / kQuantisedOutputs, n_steps = codes.places / kStep;
  const auto* tiles = static_cast<const std::byte*>(a.w.data);
  const unsigned in_group = unsigned(codes.group / kQuarter), inverse = 0xffffffffu / in_group + 1;
  auto load_w = [&](int step, int stage) {
    const int at = (stage * C::kWarps + warp) * C::kTiles;
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
      const bool there = first_tile + tile < n_tiles;
      const std::byte* from = tiles + (there ? size_t(first_tile + tile) * size_t(a.w.stride) : 0);
#pragma unroll
      for (int unit = 0; unit < C::kUnits; ++unit)
        cuda::cp_async_16(words, ((at + tile) * C::kUnits + unit) * (kUnitBytes / 4) + lane * 4,
                          from + size_t(step * C::kUnits + unit) * kUnitBytes + lane * 16, there);
      if (lane < C::kScales / 4) {
        const unsigned quarter = unsigned(step * (kStep / kQuarter) + lane / 4);  // below 2^16, as is in_group
        const int group = int(in_group == 1 ? quarter : __umulhi(quarter, inverse));
        const bool has = there && group < codes.groups;
        cuda::cp_async_16(scales, (at + tile) * C::kScales + lane * 4,
                          from + size_t(n_steps * C::kUnits) * kUnitBytes +
                              (has ? group : 0) * (4 * kQuantisedOutputs) + lane % 4 * 16,
                          has);
      }
    }
  };
  // x is copied in pieces of 16 bytes, unless its inputs are reordered or its rows are unaligned.
  constexpr int kPiece = 16 / int(sizeof(T)), kPieces = kStep / kPiece;
  constexpr int kLoaders = C::kThreads / C::kRings;
  const int loader = int(threadIdx.x % kLoaders);
  const bool whole = !codes.inputs && a.w.k % kPiece == 0 && a.x_stride % kPiece == 0;
  auto x_row = [&](int stage) { return (stage * C::kRings + (C::kFew ? warp : 0)) * kTokens; };
  auto load_x = [&](int step, int stage) {
    if (!whole) {  // one element at a time
#pragma unroll 1
      for (int i = loader; i < kTokens * kStep; i += kLoaders) {
        const int row = i / kStep, k = i % kStep, place = step * kStep + k;
        const int input = codes.inputs ? codes.inputs[place] : place;
        const bool has = first_token + row < a.m && input >= 0 && input < a.w.k;
        const size_t from = has ? size_t(first_token + row) * size_t(a.x_stride) + size_t(input) : 0;
        x[x_place<T>(x_row(stage) + row, k / kPiece) + k % kPiece] = has ? static_cast<const T*>(a.x)[from] : T{};
      }
      return;
    }
    static_assert(kLoaders % kPieces == 0);  // a thread's pieces have the same positions in all its rows
    const int piece = loader % kPieces, place = step * kStep + piece * kPiece;
    const T* from = static_cast<const T*>(a.x) + place;
#pragma unroll
    for (int i = 0; i < kTokens * kPieces / kLoaders; ++i) {
      const int row = i * (kLoaders / kPieces) + loader / kPieces;
      const bool has = first_token + row < a.m && place < a.w.k;
      cuda::cp_async_16(x, x_place<T>(x_row(stage) + row, piece),
                        from + (has ? size_t(first_token + row) * size_t(a.x_stride) : 0), has);
    }
  };
  auto step_of = [&](int part) { return part * n_steps / kParts; };
  constexpr int kOwnParts = C::kFew ? 1 : kParts;
  const int first_part = C::kFew ? warp : 0, first = step_of(first_part), last = step_of(first_part + kOwnParts);
  cuda::let_next_start();
  // W depends on no earlier kernel, so its stream begins before x is ready.
  for (int i = 0; i < C::kStages - 1 && first + i < last; ++i) load_w(first + i, i);
  cuda::wait_for_previous();
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (first + i < last) load_x(first + i, i);
    cuda::cp_async_commit();
  }
  const Numbers<Form> numbers;
  const bool long_pieces = codes.group % kStep == 0;  // a piece is a whole step, or a quarter of one
  using Of = Sums<T, C::kTiles, kTokens>;
  Of sums;
  int stage = 0;
#pragma unroll 1
  for (int part = 0; part < kOwnParts; ++part) {
#pragma unroll 1
    for (int step = step_of(first_part + part), end = step_of(first_part + part + 1); step < end; ++step) {
      cuda::cp_async_wait<C::kStages - 2>();
      // Also, all threads have read the stage that is loaded next.
      if constexpr (C::kFew)
        __syncwarp();
      else
        __syncthreads();
      const int next = stage == 0 ? C::kStages - 1 : stage - 1;
      if (step + C::kStages - 1 < last) load_w(step + C::kStages - 1, next), load_x(step + C::kStages - 1, next);
      cuda::cp_async_commit();
      const int at = (stage * C::kWarps + warp) * C::kTiles;
      uint4 four[C::kTiles];
      float scale[C::kTiles][2];
      uint32_t zeros[C::kTiles][2];
#pragma unroll
      for (int quarter = 0; quarter < kStep / kQuarter; ++quarter) {
        constexpr int kQuarters = kStep / kQuarter / C::kUnits;  // per unit
        uint32_t pairs[C::kTiles][2][4];
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          if (quarter % kQuarters == 0)
            four[tile] = cuda::load_16(words,
                                       ((at + tile) * C::kUnits + quarter / kQuarters) * (kUnitBytes / 4) + lane * 4);
          if (quarter == 0 || !long_pieces)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint32_t word =
                  scales[(at + tile) * C::kScales + quarter * kQuantisedOutputs + lane / 4 + 8 * half];
              scale[tile][half] = scale_of<Form>(word);
              zeros[tile][half] = cuda::byte_perm(word, 0, 0x3232);
            }
          const uint32_t all[4] = {four[tile].x, four[tile].y, four[tile].z, four[tile].w};
#pragma unroll
          for (int i = 0; i < 8; ++i)
            pairs[tile][i / 4][i % 4] = numbers(all + (quarter % kQuarters * 2 + i / 4) * (C::kBits / 4), i % 4,
                                                zeros[tile][i % 2]);
        }
        sums.add(pairs, x, x_row(stage), quarter, lane);
        if (quarter + 1 == kStep / kQuarter || !long_pieces) sums.scaled(scale);
      }
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    // The parts are added in their order.
    if (!C::kFew && part > 0)
      sums.each([&](int i, float& sum) { sum = kept[i * C::kThreads + int(threadIdx.x)] + sum; });
    if (C::kFew || part + 1 < kParts)
      sums.each([&](int i, float& sum) { kept[i * C::kThreads + int(threadIdx.x)] = sum, sum = 0; });
  }
  if constexpr (C::kFew) {
    __syncthreads();
    if (warp > 0) return;
    sums.each([&](int i, float& sum) {
      sum = kept[i * C::kThreads + lane];
      for (int part = 1; part < kParts; ++part) sum += kept[i * C::kThreads + part * 32 + lane];
    });
  }
  sums.each([&](int i, float& sum) {
    if constexpr (!Of::kMma) {
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 > 0) return;
    }
    const int column = first_tile * kQuantisedOutputs + Of::output(i, lane), row = first_token + Of::token(i, lane);
    if (column >= a.w.n || row >= a.m) return;
    const size_t place = size_t(row) * size_t(a.y_stride) + size_t(column);
    if (a.y_dtype == Dtype::f32)
      static_cast<float*>(a.y)[place] = sum;
    else
      static_cast<bf16*>(a.y)[place] = to_bf16(sum);
  });
}

// ---- Choice of a kernel

constexpr int kIdle = -1;  // applies if the kernel for many rows would leave half of the SMs idle

struct Row {
  Dtype codes, x;
  int most;             // most rows of x; 0: any number
  int tokens, outputs;  // per block
  cuda::Shape shape;    // without the grid
  void (*kernel)(CudaGemmArgs);
};
template <class Form, class T, int kTokens>
Row row(int most) {
  using C = QuantisedRows<Form, T, kTokens>;
  return {Form::kDtype,
          sizeof(T) == 2 ? Dtype::bf16 : Dtype::f32,
          most,
          kTokens,
          C::kBlockTiles * kQuantisedOutputs,
          {dim3(1), dim3(unsigned(C::kThreads)), C::shared()},
          quantised_kernel<Form, T, kTokens>};
}
const Row kRows[] = {row<Int4, bf16, 8>(8),     row<Int4, bf16, 16>(16),    row<Int4, bf16, 32>(kIdle),
                     row<Int4, bf16, 64>(0),    row<Int4, float, 8>(0),     row<Int8, bf16, 8>(8),
                     row<Int8, bf16, 16>(16),   row<Int8, bf16, 32>(kIdle), row<Int8, bf16, 64>(0),
                     row<Int8, float, 8>(0),    row<Fp8, bf16, 8>(8),       row<Fp8, bf16, 16>(16),
                     row<Fp8, bf16, 32>(kIdle), row<Fp8, bf16, 64>(0),      row<Fp8, float, 8>(0)};

bool leaves_idle(const CudaGemmArgs& a) {
  static const int n_sms = cuda::open().value().n_sms;
  using Many = QuantisedRows<Int8, bf16, 64>;
  const int outputs = Many::kBlockTiles * kQuantisedOutputs;
  return 2 * ((a.w.n + outputs - 1) / outputs) * ((a.m + 63) / 64) < n_sms;
}

}  // namespace

void cuda_quantised_gemm(const CudaGemmArgs& a, const cuda::On& on) {
  if (a.m == 0) return;
  for (const Row& row : kRows) {
    if (row.codes != a.w.codes.dtype || row.x != a.x_dtype || (row.most > 0 && a.m > row.most)) continue;
    if (row.most == kIdle && !leaves_idle(a)) continue;
    cuda::Shape shape = row.shape;
    shape.grid = dim3(unsigned((a.w.n + row.outputs - 1) / row.outputs * ((a.m + row.tokens - 1) / row.tokens)));
    return cuda::launch(row.kernel, "codes", shape, on, a);
  }
  XPYD_CHECK(false, std::string(dtype_name(a.w.codes.dtype)) + " and " + dtype_name(a.x_dtype));
}

}  // namespace xpyd::model
