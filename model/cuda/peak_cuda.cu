#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/cuda/cuda_kernel.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::model {
namespace {

__global__ void fill_random_kernel(bf16* out, size_t n, uint64_t array, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    out[i] = to_bf16(scale * to_f32(random_element(array, i)));
}

// Reads every 16 bytes once, with eight loads in flight per thread; the sum is not used.
constexpr int kReads = 8;
__global__ void read_kernel(const uint4* __restrict__ from, size_t n, uint32_t* out) {
  uint32_t sum = 0;
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += kReads * stride) {
    uint4 words[kReads];
#pragma unroll
    for (int j = 0; j < kReads; ++j)
      words[j] = i + size_t(j) * stride < n ? from[i + size_t(j) * stride] : uint4{0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < kReads; ++j) sum ^= words[j].x ^ words[j].y ^ words[j].z ^ words[j].w;
  }
  if (sum == 0x9e3779b9u) *out = sum;  // keeps the reads from being optimised away
}

}  // namespace

void fill_random(void* bf16s, size_t n, uint64_t array, float scale, cuda::Stream& stream) {
  const size_t blocks = std::clamp<size_t>(n / 4096, 1, 4096);
  cuda::launch(fill_random_kernel, "fill_random", cuda::Shape{dim3(unsigned(blocks)), dim3(256)}, stream,
               static_cast<bf16*>(bf16s), n, array, scale);
}

CudaPeakProbe::CudaPeakProbe(cuda::Stream& stream, const CudaPeakSizes& sizes)
    : stream_(stream), sizes_(sizes), gemm_(stream) {}

Result<std::unique_ptr<CudaPeakProbe>> CudaPeakProbe::make(cuda::Stream& stream, const CudaPeakSizes& sizes) {
  std::unique_ptr<CudaPeakProbe> probe(new CudaPeakProbe(stream, sizes));
  const size_t n = size_t(sizes.gemm_n), matrix = n * n * sizeof(bf16);
  for (auto [memory, bytes] : {std::pair(&probe->from_, std::max(sizes.copy_bytes, sizes.link_bytes)),
                               {&probe->to_, sizes.copy_bytes},
                               {&probe->a_, matrix},
                               {&probe->b_, matrix},
                               {&probe->c_, matrix}}) {
    Result<cuda::Memory> made = cuda::Memory::device(bytes);
    if (!made) return made.error();
    *memory = std::move(made).value();
  }
  probe->host_ = cuda::Memory::pinned(sizes.link_bytes);
  std::memset(probe->host_.data(), 1, sizes.link_bytes);
  cuda::fill(probe->from_.data(), 1, probe->from_.size(), stream);
  fill_random(probe->a_.data(), n * n, 1, 1, stream);
  fill_random(probe->b_.data(), n * n, 2, 1, stream);
  stream.wait();
  probe->product_ = {.x = probe->a_.data(),
                     .y = probe->c_.data(),
                     .w = {probe->b_.data(), int(n), int(n), int(n)},
                     .x_dtype = Dtype::bf16,
                     .y_dtype = Dtype::bf16,
                     .m = int(n),
                     .x_stride = int(n),
                     .y_stride = int(n)};
  if (Status prepared = probe->gemm_.prepare(probe->product_, int(n)); !prepared) return prepared.error();
  return Result<std::unique_ptr<CudaPeakProbe>>(std::move(probe));
}

double CudaPeakProbe::seconds(const std::function<void()>& run, int repetitions) {
  begin_.record(stream_);
  for (int i = 0; i < repetitions; ++i) run();
  end_.record(stream_);
  end_.wait();
  return cuda::Event::seconds(begin_, end_) / repetitions;
}

double CudaPeakProbe::copy_gbps() {
  const double bytes = 2 * double(sizes_.copy_bytes);
  return 1e-9 * bytes / seconds([&] { cuda::copy(to_.data(), from_.data(), sizes_.copy_bytes, stream_); }, 4);
}

double CudaPeakProbe::read_gbps() {
  const size_t n = sizes_.copy_bytes / sizeof(uint4), blocks = n / (256 * kReads);
  auto read = [&] {
    cuda::launch(read_kernel, "read", cuda::Shape{dim3(unsigned(std::clamp<size_t>(blocks, 1, 4096))), dim3(256)},
                 stream_, from_.as<const uint4>(), n, to_.as<uint32_t>());
  };
  return 1e-9 * double(sizes_.copy_bytes) / seconds(read, 4);
}

double CudaPeakProbe::gemm_tflops() {
  const double n = sizes_.gemm_n;
  return 2e-12 * n * n * n / seconds([&] { gemm_.run(product_); }, 4);
}

double CudaPeakProbe::link_gbps(void* to, const void* from) {
  return 1e-9 * double(sizes_.link_bytes) / seconds([&] { cuda::copy(to, from, sizes_.link_bytes, stream_); }, 4);
}
double CudaPeakProbe::to_card_gbps() { return link_gbps(from_.data(), host_.data()); }
double CudaPeakProbe::from_card_gbps() { return link_gbps(host_.data(), from_.data()); }

CudaPeak measure_cuda_peak(CudaPeakProbe& probe, const std::string& card, int rounds) {
  constexpr std::pair<double CudaPeak::*, double (CudaPeakProbe::*)()> kMeasures[] = {
      {&CudaPeak::copy_gbps, &CudaPeakProbe::copy_gbps},
      {&CudaPeak::read_gbps, &CudaPeakProbe::read_gbps},
      {&CudaPeak::gemm_tflops, &CudaPeakProbe::gemm_tflops},
      {&CudaPeak::to_card_gbps, &CudaPeakProbe::to_card_gbps},
      {&CudaPeak::from_card_gbps, &CudaPeakProbe::from_card_gbps}};
  CudaPeak peak{.card = card};
  std::vector<double> values[std::size(kMeasures)];
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < std::size(kMeasures); ++i) {
      const auto measure = kMeasures[i].second;  // g++ 12's -fsanitize=bounds misreads an index inside .*
      values[i].push_back((probe.*measure)());
    }
  for (size_t i = 0; i < std::size(kMeasures); ++i) {
    std::sort(values[i].begin(), values[i].end());
    const auto result = kMeasures[i].first;
    peak.*result = values[i][values[i].size() / 2];
  }
  return peak;
}

}  // namespace xpyd::model
