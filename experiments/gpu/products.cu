// bf16 products at the shapes of an 8-billion-parameter Llama.
//
// Expected on an H200 (4.3 TB/s of copies, 700 of 790 TFLOP/s): W of gate and up, 28,672 x 4,096, is 235 MB, 55 us.
// 2,048 rows are 0.48 TFLOP, 0.69 ms.
#include <algorithm>
#include <cmath>

#include "experiments/gpu/rounds.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments::gpu {
namespace {

constexpr uint64_t kInputs = 11, kWeights = 12;  // arrays of random_element()

// Checks some outputs of some rows.
std::string wrong(const cuda::Memory& y, int n, int k, int m, cuda::Stream& stream) {
  cuda::Memory host = cuda::Memory::pinned(y.size());
  cuda::copy(host.data(), y.data(), y.size(), stream);
  stream.wait();
  const auto element = [](uint64_t array, int row, int row_elements, int i) {
    return double(to_f32(random_element(array, size_t(row) * size_t(row_elements) + size_t(i))));
  };
  for (int output : {0, 7, n / 3, n / 2 + 8, n - 1})
    for (int row : {0, m / 2, m - 1}) {
      double sum = 0, terms = 0;
      for (int i = 0; i < k; ++i) {
        const double term = element(kInputs, row, k, i) * element(kWeights, output, k, i);
        sum += term, terms += std::fabs(term);
      }
      const double got = to_f32(host.as<bf16>()[size_t(row) * size_t(n) + size_t(output)]);
      if (!(std::fabs(got - sum) <= (2 * k + 8) * 0x1p-24 * terms + 0x1p-8 * std::fabs(sum)))
        return "output " + std::to_string(output) + " of row " + std::to_string(row) + " is " + std::to_string(got) +
               ", expected " + std::to_string(sum);
    }
  return "";
}

}  // namespace

void products(Rounds& rounds, const cuda::Card&, bool tiny) {
  cuda::Stream& stream = rounds.stream();
  const int most = tiny ? 70 : 2048;
  for (auto [name, n, k] : {std::tuple("o", 4096, 4096), {"gate_up", 28672, 4096}, {"down", 4096, 14336}}) {
    if (tiny) n = 48, k = 256;
    cuda::Memory w = cuda::Memory::device(size_t(n) * size_t(k) * sizeof(bf16)).value(),
                 x = cuda::Memory::device(size_t(most) * size_t(k) * sizeof(bf16)).value();
    fill_random(w.data(), size_t(n) * size_t(k), kWeights, 1, stream);
    fill_random(x.data(), size_t(most) * size_t(k), kInputs, 1, stream);
    CudaGemm gemm(stream);
    CudaGemmArgs args{.x = x.data(),
                      .w = {w.data(), n, k, k},
                      .x_dtype = Dtype::bf16,
                      .y_dtype = Dtype::bf16,
                      .x_stride = k,
                      .y_stride = n};
    const Status prepared = gemm.prepare(args, most);
    XPYD_CHECK(prepared.ok(), prepared.ok() ? "" : prepared.error().message);
    for (int m : {1, 8, 16, 64, most}) {
      const std::string shape = std::string("8B ") + name + ", " + std::to_string(m) + " rows";
      cuda::Memory y = cuda::Memory::device(size_t(m) * size_t(n) * sizeof(bf16)).value();
      args.y = y.data(), args.m = m;
      const double around = double(sizeof(bf16)) * m * (double(n) + k), flops = 2.0 * m * n * k;
      rounds.measure({{.name = shape + ", bf16",
                       .run = [&gemm, args] { gemm.run(args); },
                       .check = [&, columns = n, depth = k] { return wrong(y, columns, depth, m, stream); },
                       .work = {.bytes = double(w.size()) + around, .flops = flops},
                       .limit = Limit::roofline}});
    }
    if (tiny) return;
  }
}

}  // namespace xpyd::experiments::gpu
