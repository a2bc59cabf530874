// The features that kernels build on, checked in the same way on a card and on the interpreter: the layout of
// tensor-core fragments, shuffles, asynchronous copies, barriers, graphs, events.
#include <cstring>
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

// Input or output of a kernel: pinned and device memory of the same values.
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

// One warp computes c[16, 8] = a[16, 16] b[16, 8], all row-major. `how` is 0 to fill fragments by PTX's formulas, 1 to
// load them with ldmatrix, b as stored (transposing), 2 for the same with b given as its transpose [8, 16].
__global__ void multiply_tile(const bf16* a, const bf16* b, float* c, int how) {
  cuda::Carver carver;
  auto a_tile = carver.take<bf16>(16 * 16);
  auto b_tile = carver.take<bf16>(16 * 16);  // ldmatrix x4 reads 16 columns (or rows), so the rest is zero
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

TEST_CASE("mma and ldmatrix give the matrix product in every element", "[cuda]") {
  cuda::Stream stream;
  Buffer<bf16> a(256), b(128);
  Buffer<float> c(128);
  Random random(7);
  for (int how : {0, 1, 2}) {
    CAPTURE(how);
    for (int round = 0; round < 4; ++round) {
      // Products of small integers are exact in any order of addition.
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

TEST_CASE("cp.async brings every value in a pipeline of two stages", "[cuda]") {
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

TEST_CASE("a graph runs what was captured each time it is launched", "[cuda]") {
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
  what = 1000;  // arguments are those of the capture
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
  CHECK(cuda::Event::seconds(begin, end) >= 0);
}

TEST_CASE("asking for more device memory than there is is an error", "[cuda]") {
  auto memory = cuda::Memory::device(size_t{1} << 50);
  REQUIRE(!memory.ok());
  CHECK(memory.error().code == ErrorCode::unavailable);
  CHECK(cuda::Memory::device(1 << 20).ok());  // the failure leaves nothing behind
}

}  // namespace
}  // namespace xpyd::testing
