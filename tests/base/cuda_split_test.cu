// A card in two parts: streams of both, and events, copies and graphs across them and the rest of the card.
#include "base/cuda/cuda.h"
#include "tests/catch.h"

namespace xpyd::cuda {
namespace {

__global__ void add(int* values, int n, int what) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] += what;
}

TEST_CASE("cuda split: both parts work in the order that events give", "[cuda][base]") {
  constexpr int kValues = 100'000, kThreads = 256;
  const Card card = open().value();
  auto made = Split::cut(card, card.n_sms / 2);
  if (!made) SKIP_TEST(made.error().message);
  Split& split = *made.value();
  CHECK(split.n_sms(0) >= card.n_sms / 2);
  CHECK(split.n_sms(1) > 0);
  CHECK(split.n_sms(0) + split.n_sms(1) <= card.n_sms);

  Stream plain, first(split.make_stream(0, false)), second(split.make_stream(1, true));
  Memory host = Memory::pinned(kValues * sizeof(int));
  Memory device = Memory::device(host.size()).value();
  Event filled, added(true), again(true);
  auto add_on = [&](Stream& stream, int what) {
    launch(add, "add", {.grid = unsigned(kValues / kThreads + 1), .block = unsigned(kThreads)}, stream,
           device.as<int>(), kValues, what);
  };
  const Graph graph = Graph::capture(second, [&] { add_on(second, 100); });
  fill(device.data(), 0, device.size(), plain);
  filled.record(plain);
  filled.hold(first);
  for (int i = 0; i < 10; ++i) add_on(first, 1);
  added.record(first);
  added.hold(second);
  graph.launch(second);
  graph.launch(second);
  again.record(second);
  again.hold(plain);
  copy(host.data(), device.data(), host.size(), plain);
  plain.wait();
  again.wait();
  CHECK(Event::seconds(added, again) >= 0);
  int wrong = 0;
  for (int i = 0; i < kValues; ++i) wrong += host.as<int>()[i] != 210;
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace xpyd::cuda
