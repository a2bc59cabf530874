// Tests the interpreter's checks: each planted fault is caught, and its corrected twin (planted = 0) runs clean.
#include <algorithm>
#include <functional>

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "base/device/device_cuda.h"
#include "device_memory.h"
#include "tests/catch.h"

namespace xpyd::testing::simt_test {

using cuda::simt::FaultCatcher;

std::string faults_of(const std::function<void()>& run) {
  FaultCatcher catcher;
  run();
  std::string all;
  for (const std::string& fault : catcher.faults()) all += fault + "\n";
  return all;
}

struct Planted {
  const char* name;
  void (*kernel)(int planted, float* out);  // out: [256], device
  int planted;
  const char* message;  // part of the fault's text
  unsigned block = 64;
  size_t shared_bytes = 1024;
  unsigned grid = 1;
};

// --- Bounds.

__global__ void index_past_end(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(64);
  auto b = carver.take<float>(64);
  int t = threadIdx.x;
  a[t] = b[t] = 0;
  out[t] = a[planted == 1 ? t + 1 : t];
  if (planted == 2 && t == 0) cuda::store_16(a, 2, uint4{});
}

__global__ void carve(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(planted ? 257 : 256);
  for (int i = threadIdx.x; i < a.n; i += int(blockDim.x)) a[i] = 1;
  out[threadIdx.x] = a[threadIdx.x];
}

// --- Races.

__global__ void share(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(64);
  int t = threadIdx.x;
  a[t] = 0;
  __syncthreads();
  a[t] = float(t);
  if (planted != 1) __syncthreads();
  float other = a[63 - t];  // 1: reads without a barrier after the write
  if (planted != 2) __syncthreads();
  a[t] = other;                        // 2: writes without a barrier after the read
  if (planted == 3) a[63] = 0;         // 3: all threads write
  if (planted == 4) a[t / 2 * 2] = 0;  // 4: two threads of a warp write
  out[t] = a[t];
}

// All threads read one place, then one writes it. Values pass between lanes, so all have read before.
__global__ void read_then_write(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(1);
  int t = threadIdx.x;
  if (t == 0) a[0] = 1;
  __syncthreads();
  float sum = 0;
  if (planted != 1 || t < 32) sum = cuda::warp_sum(a[0]);  // 1: only the warp that also writes
  if (planted == 0) __syncthreads();
  if (planted == 2 ? t == 63 : t == 0) a[0] = sum;  // 2: the writer is the last thread instead of the first
  out[t] = sum;
}

__global__ void share_in_warp(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(64);
  int t = threadIdx.x;
  a[t] = 0;
  __syncthreads();
  for (int round = 0; round < 3; ++round) {
    a[t] = float(t);
    if (planted == 1)
      __shfl_sync(0xffffffffu, 0, 0);  // exchanges values and orders no memory
    else
      __syncwarp();
    out[t] = a[planted == 2 ? 63 - t : t ^ 1];  // 2: a value of the other warp
    if (planted != 3) __syncwarp();
  }
}

__global__ void share_halves(int planted, float* out) {  // two elements of one word are two places
  cuda::Carver carver;
  auto a = carver.take<bf16>(64);
  int t = threadIdx.x;
  a[planted ? t / 2 : t] = to_bf16(1);
  __syncthreads();
  out[t] = to_f32(a[planted ? 0 : t]);
}

// --- Initialisation.

__global__ void partly_written(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(64);
  int t = threadIdx.x;
  if (planted == 1 ? t != 5 : planted == 2 ? blockIdx.x == 0 : true) a[t] = 1;  // 2: another block wrote it
  __syncthreads();
  out[t] = a[t ^ 1];
}

// --- Barriers and warps.

__global__ void barriers(int planted, float* out) {
  int t = threadIdx.x;
  if (planted == 1 && t == 40) return;
  if (planted == 2 && t < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (planted == 3 && t < 60) __syncthreads();
  if (planted == 4 && t == 7) {
    __syncthreads();
  } else if (planted == 4) {
    __syncwarp();
    return;
  }
  __syncthreads();
  out[t] = 1;
}

__global__ void warps(int planted, float* out) {
  int t = threadIdx.x, lane = t % 32;
  unsigned mask = planted == 1 ? 0xffffu : 0xffffffffu;  // 1: names a part of the warp
  if (planted == 2 && lane == 3) return;                 // 2: names a lane that has finished
  if (planted == 3 && lane == 3) {                       // 3: one lane is elsewhere
    __syncwarp();
  } else if (planted == 4 && lane < 16) {  // 4: two places
    out[t] = __shfl_xor_sync(mask, float(t), 1);
  } else if (planted == 5 && lane == 9) {  // 5: two instructions
    out[t] = __ballot_sync(mask, 1);
  } else {
    out[t] = __shfl_xor_sync(mask, float(t), 1);
  }
}

// --- Asynchronous copies.

__global__ void fetch(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<float>(256 + 4);
  int t = threadIdx.x, from = planted == 1 ? t * 4 + 1 : t * 4;
  if (planted == 8 && t == 3) from = 1 << 20;
  cuda::cp_async_16(a, planted == 2 ? t * 4 + 2 : t * 4, out + from);
  if (planted != 3) cuda::cp_async_commit();  // 3: waits for groups, and this is none
  if (planted == 4) a[t * 4] = 0;
  if (planted != 5) cuda::cp_async_wait<0>();
  if (planted != 6) __syncthreads();
  float got = a[255 - t];
  if (planted == 5) cuda::cp_async_wait<0>();
  if (planted == 7) {
    cuda::cp_async_commit();
    __syncthreads();
    cuda::cp_async_16(a, t * 4, out);  // ends while under way
  }
  if (planted == 0) out[t] = got;
}

// --- Tensor cores.

__global__ void tensor(int planted, float* out) {
  cuda::Carver carver;
  auto a = carver.take<bf16>(8 * 32 + 8);
  int t = threadIdx.x;
  for (int i = t; i < a.n; i += int(blockDim.x)) a[i] = to_bf16(1);
  __syncthreads();
  if (planted == 2 && t > 20) return;
  uint32_t r[4];
  cuda::ldmatrix_x4(r, a, t % 32 * 8 + (planted == 1 ? 4 : 0));
  float d[4] = {};
  if (planted != 3 || t != 3) cuda::mma_m16n8k16(d, r, 0x3f803f80u, 0x3f803f80u);
  out[t] = d[0];
}

const Planted plants[] = {
    {"index past the end", index_past_end, 1, "index out of range: elements [64, 65) of a shared array of 64"},
    {"16 bytes misaligned", index_past_end, 2, "store_16: byte 8 is not a multiple of 16"},
    {"more than was launched with", carve, 1, "shared memory out of range: 4 bytes at byte 1024 of the block's 1024"},
    {"missing barrier after write", share, 1, "race: "},
    {"missing barrier after read", share, 2, "race: "},
    {"two warps write one place", share, 3, "race: writes"},
    {"two lanes write one place", share, 4, "race: writes what lane"},
    {"a warp reads, its first lane writes", read_then_write, 1, "race: writes what lanes of warp 0 read,"},
    {"all read, the last thread writes", read_then_write, 2, "race: writes what threads of several warps read,"},
    {"missing __syncwarp after write", share_in_warp, 1, "race: "},
    {"__syncwarp for two warps", share_in_warp, 2, "race: "},
    {"missing __syncwarp after read", share_in_warp, 3, "race: "},
    {"two lanes write one half word", share_halves, 1, "race: writes"},
    {"uninitialised read", partly_written, 1, "read of shared memory that nothing has written yet"},
    {"what another block left", partly_written, 2, "read of shared memory that nothing has written yet", 64, 1024, 2},
    {"a thread leaves before the barrier", barriers, 1,
     "barrier divergence: 1 finished (first thread (40,0,0)); 63 wait at __syncthreads"},
    {"two barriers at once", barriers, 2, "barrier divergence: others wait at the barrier of"},
    {"a barrier in a branch", barriers, 3, "barrier divergence"},
    {"barrier against warp barrier", barriers, 4, "deadlock:"},
    {"mask of a part of the warp", warps, 1, "only the mask of all lanes is interpreted"},
    {"mask names a finished lane", warps, 2, ""},
    {"a lane at another collective", warps, 3, "warp divergence"},
    {"one collective at two places", warps, 4, "warp divergence"},
    {"two collectives at once", warps, 5, "warp divergence"},
    {"a warp of 16 lanes", warps, 0, "the mask names lanes that the block does not have", 48},
    {"cp.async from a misaligned place", fetch, 1, "the global address is not a multiple of 16", 64, 1040},
    {"cp.async to a misaligned place", fetch, 2, "is not a multiple of 16", 64, 1040},
    {"cp.async without commit", fetch, 3, "read of what cp.async has not delivered", 64, 1040},
    {"write under cp.async", fetch, 4, "race: writes where cp.async is under way", 64, 1040},
    {"cp.async without wait", fetch, 5, "read of what cp.async has not delivered", 64, 1040},
    {"cp.async without barrier", fetch, 6, "", 64, 1040},
    {"cp.async under way at the end", fetch, 7, "ends with a cp.async under way", 64, 1040},
    {"cp.async from nowhere", fetch, 8, "cp.async: reads outside of device memory", 64, 1040},
    {"ldmatrix misaligned", tensor, 1, "ldmatrix: byte 8 is not a multiple of 16", 32},
    {"ldmatrix without all lanes", tensor, 2, "", 32},
    {"mma without one lane", tensor, 3, "mma", 32},
};

std::string run(const Planted& plant, int planted, unsigned block) {
  cuda::Stream stream;
  auto out = std::move(cuda::Memory::device(256 * sizeof(float)).value());
  return faults_of([&] {
    cuda::fill(out.data(), 0, out.size(), stream);
    // Four launches cover both orders of blocks and of threads.
    for (int i = 0; i < 4; ++i)
      cuda::launch(plant.kernel, plant.name, {.grid = plant.grid, .block = block, .shared_bytes = plant.shared_bytes},
                   stream, planted, out.as<float>());
  });
}

TEST_CASE("the interpreter catches planted faults, and only those", "[simt]") {
  for (const Planted& plant : plants) {
    INFO(plant.name);
    std::string faults = run(plant, plant.planted, plant.block);
    INFO(faults);
    CHECK(std::count(faults.begin(), faults.end(), '\n') == 4);  // one per launch, in any order
    CHECK(faults.find(plant.message) != std::string::npos);
    CHECK(faults.find("kernel " + std::string(plant.name) + ", block (") != std::string::npos);
    std::string twin = run(plant, 0, plant.planted ? plant.block : 64);
    CHECK(twin == "");
  }
}

__global__ void one(float* out) { out[threadIdx.x] = 1; }

TEST_CASE("late streams expose a missing wait", "[simt]") {
  cuda::simt::Late late(true);
  cuda::Stream first, second;
  auto device = std::move(cuda::Memory::device(32 * sizeof(float)).value());
  auto pinned = cuda::Memory::pinned(device.size());
  for (cuda::Stream* stream : {&first, &second}) {
    cuda::fill(device.data(), 0, device.size(), first);
    first.wait();
    pinned.as<float>()[31] = -1;
    cuda::launch(one, "one", {.grid = 1, .block = 32}, first, device.as<float>());
    cuda::copy(pinned.data(), device.data(), device.size(), *stream);
    CHECK(pinned.as<float>()[31] == -1);  // read too early
    stream->wait();
    CHECK(pinned.as<float>()[31] == (stream == &first));  // the second stream has no order behind the first
  }
}

TEST_CASE("device memory is NaN until it is written", "[simt]") {
  const cuda::Memory memory = cuda::Memory::device(600).value();
  CHECK(std::isnan(memory.as<float>()[149]));
}

}  // namespace xpyd::testing::simt_test
