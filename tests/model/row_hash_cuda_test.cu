#include <cmath>

#include "base/random.h"
#include "base/row_hash.h"
#include "model/sampler_cuda.h"
#include "tests/model/cuda_fixture.h"

namespace xpyd::testing {
namespace {

TEST_CASE("cuda row hash: the CPU's value for every row", "[cuda][model]") {
  cuda::Stream stream;
  Random random(2);
  // One block of the kernel takes 4096 floats.
  for (int vocab : {1, 2, 33, 512, 4095, 4096, 4097, 9001})
    for (int n : {1, 3}) {
      std::vector<float> logits(size_t(n * vocab));
      for (float& x : logits) x = float(random.uniform() * 4 - 2);
      logits[0] = -0.0f, logits.back() = std::nanf("7");
      cuda::Memory rows = to_card(logits, stream), out = to_card(std::vector<uint64_t>(size_t(n), 99), stream);
      auto hash = [&] { hash_rows(rows.as<float>(), n, vocab, out.as<uint64_t>(), stream); };
      hash();
      cuda::Graph graph = cuda::Graph::capture(stream, hash);
      graph.launch(stream);  // again: out is not added to
      const auto got = from_card<uint64_t>(out.data(), size_t(n), stream);
      for (int i = 0; i < n; ++i) {
        CAPTURE(vocab, n, i);
        CHECK(got[size_t(i)] == row_hash(logits.data() + i * vocab, size_t(vocab)));
      }
    }
}

}  // namespace
}  // namespace xpyd::testing
