// What kernels stand on, checked the same way on a card and on the interpreter: the layout of
// tensor-core fragments, shuffles, asynchronous copies, barriers, graphs, events.
#include <cstring>
#include <numeric>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

const testing::DeviceOfTests kCard("cuda", [] {
  const Result<cuda::Card> card = cuda::open();
  if (!card) return testing::DeviceFound{card.error().message};
  return testing::DeviceFound{"", card.value().name != "SIMT interpreter"};
});

// Input and output of a kernel: pinned and device memory of the same values.
template <class T>
struct Buffer {
  explicit Buffer(size_t n_values)
      : n(n_values),
        host(cuda::Memory::pinned(n * sizeof(T))),
        device(std::move(cuda::Memory::device(n * sizeof(T)).value())) {
    std::memset(host.data(), 0, n * sizeof(T));
  }
  T& operator[](size_t i) { return host.as<T>()[i]; }
  T* upload(cuda::Stream& stream) {
    cuda::copy(device.data(), host.data(), n * sizeof(T), stream);
    return device.as<T>();
  }
  void download(cuda::Stream& stream) {
    cuda::copy(host.data(), device.data(), n * sizeof(T), stream);
    stream.wait();
  }
  size_t n;
  cuda::Memory host, device;
};

bf16 small_integer(Random& random) { return to_bf16(float(int(random.below(17)) - 8)); }

// --- Tensor cores.

// One warp: c[16, 8] = a[16, 16] b[16, 8], all row-major. `how`: 0 fills fragments from PTX's formulas, 1 loads them
// with ldmatrix, b as stored (transposing), 2 the same with b given as its transpose [8, 16].
__global__ void multiply_tile(const bf16* a, const bf16* b, float* c, int how) {
  cuda::Carver carver;
  auto a_tile = carver.take<bf16>(16 * 16);
  auto b_tile = carver.take<bf16>(16 * 16);  // ldmatrix x4 reads 16 columns (or rows): the rest is zero
  int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) {
    a_tile[i] = a[i];
    int row = i / 16, column = i % 16;
    if (how == 2)
      b_tile[i] = row < 8 ? b[column * 8 + row] : bf16{0};
    else
      b_tile[i] = column < 8 ? b[row * 8 + column] : bf16{0};
  }
  __syncthreads();
  uint32_t fa[4], fb[4];
  int i = lane / 4, k = lane % 4 * 2;
  if (how == 0) {
    auto pair = [](bf16 low, bf16 high) { return uint32_t(low.bits) | uint32_t(high.bits) << 16; };
    fa[0] = pair(a_tile[i * 16 + k], a_tile[i * 16 + k + 1]);
    fa[1] = pair(a_tile[(i + 8) * 16 + k], a_tile[(i + 8) * 16 + k + 1]);
    fa[2] = pair(a_tile[i * 16 + k + 8], a_tile[i * 16 + k + 9]);
    fa[3] = pair(a_tile[(i + 8) * 16 + k + 8], a_tile[(i + 8) * 16 + k + 9]);
    fb[0] = pair(b_tile[k * 16 + i], b_tile[(k + 1) * 16 + i]);
    fb[1] = pair(b_tile[(k + 8) * 16 + i], b_tile[(k + 9) * 16 + i]);
  } else {
    cuda::ldmatrix_x4(fa, a_tile, lane % 16 * 16 + lane / 16 * 8);
    if (how == 1)
      cuda::ldmatrix_x4_trans(fb, b_tile, lane % 16 * 16 + lane / 16 * 8);
    else
      cuda::ldmatrix_x4(fb, b_tile, (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
  }
  float d[4] = {c[i * 8 + k], c[i * 8 + k + 1], c[(i + 8) * 8 + k], c[(i + 8) * 8 + k + 1]};
  cuda::mma_m16n8k16(d, fa, fb[0], fb[1]);
  c[i * 8 + k] = d[0];
  c[i * 8 + k + 1] = d[1];
  c[(i + 8) * 8 + k] = d[2];
  c[(i + 8) * 8 + k + 1] = d[3];
}

TEST_CASE("mma and ldmatrix give the matrix product, every element", "[cuda]") {
  cuda::Stream stream;
  Buffer<bf16> a(256), b(128);
  Buffer<float> c(128);
  Random random(7);
  for (int how : {0, 1, 2}) {
    CAPTURE(how);
    for (int round = 0; round < 4; ++round) {
      // Small integers: the product is exact in any order of addition.
      for (size_t i = 0; i < 256; ++i) a[i] = small_integer(random);
      for (size_t i = 0; i < 128; ++i) b[i] = small_integer(random);
      for (size_t i = 0; i < 128; ++i) c[i] = float(int(random.below(100)));
      std::vector<float> want(128);
      for (size_t i = 0; i < 16; ++i)
        for (size_t j = 0; j < 8; ++j) {
          want[i * 8 + j] = c[i * 8 + j];
          for (size_t k = 0; k < 16; ++k) want[i * 8 + j] += to_f32(a[i * 16 + k]) * to_f32(b[k * 8 + j]);
        }
      cuda::launch(multiply_tile, "multiply_tile",
                   {.grid = 1, .block = 32, .shared_bytes = 2 * cuda::shared_bytes<bf16>(256)}, stream,
                   a.upload(stream), b.upload(stream), c.upload(stream), how);
      c.download(stream);
      for (size_t i = 0; i < 128; ++i) {
        CAPTURE(i);
        REQUIRE(c[i] == want[i]);
      }
    }
  }
}

// --- Warps.

__global__ void shuffle_all(int* out, int argument, int width) {
  int lane = threadIdx.x % 32, value = 100 + int(threadIdx.x);
  int* mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(0xffffffffu, value, argument, width);
  mine[1] = __shfl_up_sync(0xffffffffu, value, unsigned(argument), width);
  mine[2] = __shfl_down_sync(0xffffffffu, value, unsigned(argument), width);
  mine[3] = __shfl_xor_sync(0xffffffffu, value, argument, width);
  mine[4] = int(__ballot_sync(0xffffffffu, lane % 3 == 0));
  mine[5] = __any_sync(0xffffffffu, lane == argument) + 2 * __all_sync(0xffffffffu, lane < argument);
  mine[6] = __reduce_add_sync(0xffffffffu, lane - 5);
  mine[7] = int(cuda::warp_sum(float(lane))) + int(cuda::warp_max(float(lane)));
}

TEST_CASE("shuffles and votes of a warp", "[cuda]") {
  cuda::Stream stream;
  Buffer<int> out(64 * 8);
  for (int width : {32, 16, 4})
    for (int argument : {0, 1, 3, 8}) {
      CAPTURE(width, argument);
      cuda::launch(shuffle_all, "shuffle_all", {.grid = 1, .block = 64}, stream, out.upload(stream), argument, width);
      out.download(stream);
      for (int t = 0; t < 64; ++t) {
        int lane = t % 32, warp = t - lane, first = lane / width * width;
        auto value = [&](int l) { return 100 + warp + l; };
        int up = lane - argument, down = lane + argument, other = lane ^ argument;
        auto* mine = &out[size_t(t) * 8];
        CHECK(mine[0] == value(first + argument % width));
        CHECK(mine[1] == value(up < first ? lane : up));
        CHECK(mine[2] == value(down >= first + width ? lane : down));
        CHECK(mine[3] == value(other >= first + width ? lane : other));
        CHECK(mine[4] == int(0b01001001001001001001001001001001u));
        CHECK(mine[5] == 1 + 2 * (argument >= 32));
        CHECK(mine[6] == 31 * 16 - 5 * 32);
        CHECK(mine[7] == 31 * 16 + 31);
      }
    }
}

// --- Blocks.

// One sum per block, halving between barriers.
__global__ void sum_blocks(const int* in, int* out, int n) {
  cuda::Carver carver;
  auto sums = carver.take<int>(int(blockDim.x));
  int t = threadIdx.x, i = int(blockIdx.x * blockDim.x) + t;
  sums[t] = i < n ? in[i] : 0;
  __syncthreads();
  for (int half = int(blockDim.x) / 2; half > 0; half /= 2) {
    if (t < half) sums[t] += sums[t + half];
    __syncthreads();
  }
  int odd = __syncthreads_count(i < n && in[i] % 2 != 0);
  bool all = __syncthreads_and(i < n) != 0, any = __syncthreads_or(i == n - 1) != 0;
  if (t == 0) {
    out[blockIdx.x * 4] = sums[0];
    out[blockIdx.x * 4 + 1] = odd;
    out[blockIdx.x * 4 + 2] = all;
    out[blockIdx.x * 4 + 3] = any;
  }
}

TEST_CASE("barriers: sums and votes of blocks", "[cuda]") {
  cuda::Stream stream;
  Random random(3);
  for (unsigned block : {1u, 2u, 32u, 64u, 256u, 1024u})
    for (int n : {1, 1000, 5000}) {
      CAPTURE(block, n);
      unsigned n_blocks = (unsigned(n) + block - 1) / block;
      Buffer<int> in{size_t(n)}, out(n_blocks * 4);
      for (size_t i = 0; i < in.n; ++i) in[i] = int(random.below(1000));
      cuda::launch(sum_blocks, "sum_blocks",
                   {.grid = n_blocks, .block = block, .shared_bytes = cuda::shared_bytes<int>(block)}, stream,
                   in.upload(stream), out.upload(stream), n);
      out.download(stream);
      for (size_t b = 0; b < n_blocks; ++b) {
        size_t begin = b * block, end = std::min(in.n, begin + block);
        int sum = 0, odd = 0;
        for (size_t i = begin; i < end; ++i) sum += in[i], odd += in[i] % 2;
        REQUIRE(out[b * 4] == sum);
        REQUIRE(out[b * 4 + 1] == odd);
        REQUIRE(out[b * 4 + 2] == (end - begin == block));
        REQUIRE(out[b * 4 + 3] == (end == in.n));
      }
    }
}

struct Places {
  dim3 grid, block;
};
__global__ void name_places(unsigned* out, Places shape) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  if (gridDim.z == shape.grid.z && blockDim.y == shape.block.y) atomicAdd(&out[block * threads + thread], 1u + thread);
}

TEST_CASE("every thread of a three-dimensional launch runs once", "[cuda]") {
  cuda::Stream stream;
  Places shape{dim3(3, 2, 4), dim3(5, 7, 3)};
  Buffer<unsigned> out(24 * 105);
  cuda::launch(name_places, "name_places", {.grid = shape.grid, .block = shape.block}, stream, out.upload(stream),
               shape);
  out.download(stream);
  for (size_t i = 0; i < out.n; ++i) REQUIRE(out[i] == 1 + i % 105);
}

__global__ void histogram(const int* in, unsigned* out, int n) {
  cuda::Carver carver;
  auto counts = carver.take<unsigned>(16);
  if (threadIdx.x < 16) counts[threadIdx.x] = 0;
  __syncthreads();
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += int(gridDim.x * blockDim.x))
    atomicAdd(&counts[in[i]], 1u);
  __syncthreads();
  if (threadIdx.x < 16) {
    atomicAdd(&out[threadIdx.x], unsigned(counts[threadIdx.x]));
    atomicMax(&out[16], unsigned(counts[threadIdx.x]));
  }
}

TEST_CASE("atomics on shared and on global memory", "[cuda]") {
  cuda::Stream stream;
  Random random(11);
  Buffer<int> in(3000);
  Buffer<unsigned> out(17);
  std::vector<unsigned> want(16);
  for (size_t i = 0; i < in.n; ++i) ++want[size_t(in[i] = int(random.below(16)))];
  cuda::launch(histogram, "histogram", {.grid = 3, .block = 128, .shared_bytes = 64}, stream, in.upload(stream),
               out.upload(stream), int(in.n));
  out.download(stream);
  for (size_t i = 0; i < 16; ++i) CHECK(out[i] == want[i]);
  CHECK(out[16] >= *std::max_element(want.begin(), want.end()) / 3);
}

// --- Asynchronous copies: a pipeline of two stages over tiles of 128 floats.

__global__ void sum_tiles(const float* in, float* out, int n) {
  constexpr int tile = 128;
  cuda::Carver carver;
  auto stages = carver.take<float>(2 * tile);
  int t = threadIdx.x;  // of 32
  int n_tiles = (n + tile - 1) / tile;
  auto fetch = [&](int j) {
    int i = j * tile + 4 * t;
    if (j < n_tiles) cuda::cp_async_16(stages, j % 2 * tile + 4 * t, in + (i < n ? i : 0), i < n);
    cuda::cp_async_commit();
  };
  float sum = 0;
  fetch(0);
  for (int j = 0; j < n_tiles; ++j) {
    fetch(j + 1);
    cuda::cp_async_wait<1>();
    __syncthreads();
    for (int i = t; i < tile; i += 32) sum += stages[j % 2 * tile + (i ^ 1)];
    __syncthreads();
  }
  sum = cuda::warp_sum(sum);
  if (t == 0) *out = sum;
}

TEST_CASE("cp.async in a pipeline of two stages", "[cuda]") {
  cuda::Stream stream;
  for (int n : {4, 128, 132, 640, 1000}) {
    CAPTURE(n);
    Buffer<float> in{size_t(n)}, out(1);
    float want = 0;
    for (size_t i = 0; i < in.n; ++i) want += in[i] = float(i % 13);
    cuda::launch(sum_tiles, "sum_tiles", {.grid = 1, .block = 32, .shared_bytes = cuda::shared_bytes<float>(256)},
                 stream, in.upload(stream), out.upload(stream), n);
    out.download(stream);
    REQUIRE(out[0] == want);
  }
}

// --- Streams, events, graphs, memory.

__global__ void add(int* values, int n, int what) {
  int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] += what;
}

TEST_CASE("a graph runs what was captured, each time it is launched", "[cuda]") {
  cuda::Stream stream;
  Buffer<int> values(100), result(100);
  int* device = values.upload(stream);
  stream.wait();
  int what = 5;
  cuda::Graph graph = cuda::Graph::capture(stream, [&] {
    cuda::launch(add, "add", {.grid = 4, .block = 32}, stream, device, 100, what);
    cuda::fill(result.device.data(), 0, 40, stream);
    cuda::copy(result.device.data() + 40, device + 10, 360, stream);
  });
  what = 1000;  // arguments are as captured
  REQUIRE(bool(graph));
  values.download(stream);
  CHECK(values[0] == 0);  // capturing runs nothing
  for (int round = 0; round < 3; ++round) graph.launch(stream);
  result.download(stream);
  values.download(stream);
  for (size_t i = 0; i < 100; ++i) {
    CHECK(values[i] == 15);
    CHECK(result[i] == (i < 10 ? 0 : 15));
  }
}

TEST_CASE("events order streams and time them", "[cuda]") {
  cuda::Stream first, second(true);
  Buffer<int> values(5000);
  int* device = values.upload(first);
  cuda::Event begin(true), end(true), never;
  CHECK(never.done());
  begin.record(first);
  for (int i = 0; i < 20; ++i) cuda::launch(add, "add", {.grid = 20, .block = 256}, first, device, 5000, 1);
  end.record(first);
  end.hold(second);
  cuda::copy(values.host.data(), device, 5000 * sizeof(int), second);
  second.wait();
  for (size_t i = 0; i < values.n; ++i) REQUIRE(values[i] == 20);
  end.wait();
  CHECK(end.done());
  CHECK(first.done());
  CHECK(cuda::Event::seconds(begin, end) >= 0);
}

TEST_CASE("device memory that is not there is an error", "[cuda]") {
  auto memory = cuda::Memory::device(size_t{1} << 50);
  REQUIRE(!memory.ok());
  CHECK(memory.error().code == ErrorCode::unavailable);
  CHECK(cuda::Memory::device(1 << 20).ok());  // and the failure leaves nothing behind
}

}  // namespace
}  // namespace xpyd::testing
