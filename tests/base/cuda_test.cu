// The device that all CUDA tests run on, a card or the interpreter, and the order of its streams.
#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

const testing::DeviceOfTests kCard("cuda", [] {
  const Result<cuda::Card> card = cuda::open();
  if (!card) return testing::DeviceFound{card.error().message};
  return testing::DeviceFound{"", card.value().name != "SIMT interpreter"};
});

__global__ void add(int* values, int n, int what) {
  int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] += what;
}

TEST_CASE("events order streams and time them", "[cuda]") {
  constexpr int kN = 5000;
  cuda::Stream first, second(true);
  const cuda::Memory device = cuda::Memory::device(kN * sizeof(int)).value();
  const cuda::Memory host = cuda::Memory::pinned(kN * sizeof(int));
  cuda::fill(device.data(), 0, device.size(), first);
  cuda::Event begin(true), end(true), never;
  CHECK(never.done());
  begin.record(first);
  for (int i = 0; i < 20; ++i) cuda::launch(add, "add", {.grid = 20, .block = 256}, first, device.as<int>(), kN, 1);
  end.record(first);
  end.hold(second);
  cuda::copy(host.data(), device.data(), host.size(), second);
  second.wait();
  for (int i = 0; i < kN; ++i) REQUIRE(host.as<int>()[i] == 20);
  end.wait();
  CHECK(end.done());
  CHECK(cuda::Event::seconds(begin, end) >= 0);
}

}  // namespace
}  // namespace xpyd::testing
