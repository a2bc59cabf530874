// sm_curves: how much of a card each phase needs, what the other takes from it although
// the SMs are divided, and what dividing costs.
//
// A part of `sms` SMs runs products as prefill does (gemm) or moves memory as decode does (copy),
// alone or while the other part runs `beside` without pause.
//
// Arithmetic, H200 (132 SMs, 4.3 TB/s copy, 700 TFLOP/s): products grow with the SMs, so 64 do
// 64/132 = 0.48 of the peak, less for tiles that do not divide evenly. One SM keeps about 64 KB
// under way and memory answers in 600 ns: 100 GB/s, so copying saturates at 40 to 64 SMs; 32 have
// 0.5 to 0.85 of it. Beside a copy on the other part, memory is shared: a copy keeps about half; a
// product whose operands come from L2 keeps 0.85 or more.
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "base/cuda.h"
#include "base/stats.h"
#include "experiments/experiment.h"
#include "model/peak_cuda.h"

namespace xpyd::experiments {
namespace {

// Copies of 16 bytes, enough blocks for any number of SMs.
__global__ void copy_kernel(uint4* to, const uint4* from, size_t n) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    to[i] = from[i];
}

// One phase's work on one stream.
class Worker {
 public:
  Worker(const std::string& what, cuda::Stream& stream, bool tiny)
      : stream_(stream), gemm_(stream, false), copies_(what == "copy"), n_(tiny ? 32 : 4096) {
    const size_t bytes = copies_ ? (tiny ? size_t(1) << 14 : size_t(1) << 29) : n_ * n_ * sizeof(bf16);
    for (cuda::Memory* m : {&a_, &b_, &c_})
      if (m != &c_ || !copies_) *m = cuda::Memory::device(bytes).value();
    fill_random(a_.data(), bytes / sizeof(bf16), 1, 1, stream);
    if (copies_) {
      amount_ = 2 * double(bytes);
      return;
    }
    fill_random(b_.data(), bytes / sizeof(bf16), 2, 1, stream);
    amount_ = 2.0 * double(n_) * double(n_) * double(n_);
    const int n = int(n_);
    product_ = {.x = a_.data(),
                .y = c_.data(),
                .w = {b_.data(), n, n, n},
                .x_dtype = Dtype::bf16,
                .y_dtype = Dtype::bf16,
                .m = n,
                .x_stride = n,
                .y_stride = n};
    Status prepared = gemm_.prepare(product_, n);
    XPYD_CHECK(prepared.ok(), prepared.ok() ? "" : prepared.error().message);
  }
  double amount() const { return amount_; }  // bytes moved or FLOPs, of one run()
  void run() {
    if (!copies_) return gemm_.run(product_);
    cuda::launch(copy_kernel, "copy", cuda::Shape{dim3(1024), dim3(256)}, stream_, b_.as<uint4>(), a_.as<const uint4>(),
                 a_.size() / sizeof(uint4));
  }
  // The copy is the source; the product has its first element.
  std::string check() {
    run();
    const size_t k = copies_ ? a_.size() / sizeof(bf16) : n_;
    cuda::Memory x = cuda::Memory::pinned(k * sizeof(bf16)), y = cuda::Memory::pinned(k * sizeof(bf16)),
                 got = cuda::Memory::pinned(sizeof(bf16));
    cuda::copy(x.data(), a_.data(), x.size(), stream_);
    cuda::copy(y.data(), b_.data(), y.size(), stream_);
    if (!copies_) cuda::copy(got.data(), c_.data(), got.size(), stream_);
    stream_.wait();
    if (copies_) return std::equal(x.data(), x.data() + x.size(), y.data()) ? "" : "the copy differs";
    double sum = 0, magnitude = 0;
    for (size_t i = 0; i < k; ++i) {
      const double product = double(to_f32(x.as<bf16>()[i])) * double(to_f32(y.as<bf16>()[i]));
      sum += product, magnitude += std::abs(product);
    }
    const double off = std::abs(double(to_f32(*got.as<bf16>())) - sum);
    return off <= 0.01 * std::abs(sum) + 1e-4 * magnitude ? "" : "the product differs";
  }

 private:
  cuda::Stream& stream_;
  CudaGemm gemm_;
  bool copies_;
  size_t n_;
  double amount_ = 0;
  cuda::Memory a_, b_, c_;
  CudaGemmArgs product_;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* what : {"gemm", "copy"})
    for (const char* beside : {"nothing", "gemm", "copy"})
      for (int sms : setting.tiny ? std::vector{2} : std::vector{16, 32, 64, 96, 124})
        if (sms < 124 || beside != std::string("gemm"))  // no algorithm of cuBLASLt starts on the four that are left
          all.push_back({{"what", what}, {"beside", beside}, {"sms", sms}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  Result<cuda::Card> card = cuda::open();
  if (!card) return card.error();
  using Clock = std::chrono::steady_clock;
  const auto before = Clock::now();
  auto split = cuda::Split::cut(card.value(), point["sms"]);
  if (!split) return split.error();
  cuda::Stream mine(split.value()->make_stream(0, false)), other(split.value()->make_stream(1, false));
  const double cut_us = 1e6 * std::chrono::duration<double>(Clock::now() - before).count();
  Worker worker(point["what"], mine, setting.tiny);
  if (std::string wrong = worker.check(); !wrong.empty()) return Finding{{}, wrong};
  const std::string beside = point["beside"];
  std::unique_ptr<Worker> neighbour;
  if (beside != "nothing") neighbour = std::make_unique<Worker>(beside, other, setting.tiny);
  cuda::Event begin(true), end(true), other_begin(true), other_end(true);
  auto once = [&](cuda::Stream& stream, cuda::Event& from, cuda::Event& to, Worker& w, int n) {
    from.record(stream);
    for (int i = 0; i < n; ++i) w.run();
    to.record(stream);
  };
  auto alone = [&](cuda::Stream& stream, Worker& w) {
    once(stream, begin, end, w, 1);
    end.wait();
    return cuda::Event::seconds(begin, end);
  };
  const int repetitions = setting.tiny ? 1 : std::clamp(int(0.05 / alone(mine, worker)), 1, 1000);
  const double other_once = neighbour ? alone(other, *neighbour) : 0;
  std::vector<double> rates, other_rates;
  for (int round = 0; round < (setting.tiny ? 1 : 5); ++round) {
    int n_other = 0;
    if (neighbour) {
      // Three times as long as ours alone takes, so that it is there from before to after.
      n_other = setting.tiny ? 2 : std::clamp(int(0.2 / other_once), 2, 4000);
      once(other, other_begin, other_end, *neighbour, n_other);
    }
    once(mine, begin, end, worker, repetitions);
    end.wait();
    if (neighbour && !setting.tiny && other.done())
      return Finding{{}, "the neighbour ended first: it was not beside it all the time"};
    rates.push_back(worker.amount() * repetitions / cuda::Event::seconds(begin, end));
    if (!neighbour) continue;
    other_end.wait();
    other_rates.push_back(neighbour->amount() * n_other / cuda::Event::seconds(other_begin, other_end));
  }
  return Finding{{{{"sms_given", split.value()->n_sms(0)},
                   {"rate", 1e-9 * summarize(rates).mean},  // GB/s or GFLOP/s
                   {"beside_rate", 1e-9 * summarize(other_rates).mean},
                   {"cut_us", cut_us}}},
                 ""};
}

Measure open(const Setting& setting) {
  return [=](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("sm_curves", "cuda", points, open);

}  // namespace
}  // namespace xpyd::experiments
