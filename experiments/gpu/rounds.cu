#include <algorithm>
#include <cstdio>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/gpu/rounds.h"

namespace xpyd::gpu {
namespace {

double at(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, size_t(share * double(values.size())))];
}

}  // namespace

Rounds::Rounds(Bench& bench, const Sizes& sizes) : bench_(bench), sizes_(sizes), gemm_(stream_) {
  from_ = cuda::Memory::device(sizes.copy_bytes).value();
  to_ = cuda::Memory::device(sizes.copy_bytes).value();
  cuda::fill(from_.data(), 1, sizes.copy_bytes, stream_);
  const size_t n = size_t(sizes.gemm_n), bytes = n * n * sizeof(bf16);
  a_ = cuda::Memory::device(bytes).value();
  b_ = cuda::Memory::device(bytes).value();
  c_ = cuda::Memory::device(bytes).value();
  cuda::Memory host = cuda::Memory::pinned(bytes);
  Random random(1);
  for (size_t i = 0; i < n * n; ++i) host.as<bf16>()[i] = to_bf16(float(random.uniform() - 0.5));
  cuda::copy(a_.data(), host.data(), bytes, stream_);
  cuda::copy(b_.data(), host.data(), bytes, stream_);
  stream_.wait();
  product_ = {.x = a_.data(),
              .y = c_.data(),
              .w = {b_.data(), int(n), int(n), int(n)},
              .x_dtype = Dtype::bf16,
              .y_dtype = Dtype::bf16,
              .m = int(n),
              .x_stride = int(n),
              .y_stride = int(n)};
  Status prepared = gemm_.prepare(product_, int(n));
  XPYD_CHECK(prepared.ok(), prepared.ok() ? "" : prepared.error().message);
}

double Rounds::time(const std::function<void()>& run, int repetitions) {
  begin_.record(stream_);
  for (int i = 0; i < repetitions; ++i) run();
  end_.record(stream_);
  end_.wait();
  return cuda::Event::seconds(begin_, end_) / repetitions;
}

double Rounds::copy_gbps() {
  double seconds =
      time([&] { cuda::copy(to_.data(), from_.data(), sizes_.copy_bytes, stream_); }, 4);
  return 2e-9 * double(sizes_.copy_bytes) / seconds;
}

double Rounds::gemm_tflops() {
  const double n = sizes_.gemm_n;
  return 2e-12 * n * n * n / time([&] { gemm_.run(product_); }, 4);
}

void Rounds::found_wrong(const std::string& name, const std::string& what) {
  std::printf("%-60s WRONG: %s\n", name.c_str(), what.c_str());
  all_right_ = false;
}

void Rounds::measure(const std::vector<Case>& cases) {
  struct Timed {
    const Case* test;
    int repetitions = 1;
    std::vector<double> seconds, shares;
  };
  std::vector<Timed> timed;
  for (const Case& c : cases) {
    c.run();  // first use of memory and code
    std::string wrong = c.check ? c.check() : "";
    stream_.wait();
    if (!wrong.empty()) {
      found_wrong(c.name, wrong);
      continue;
    }
    const double once = time(c.run, 1);
    timed.push_back(
        {&c, std::clamp(int(sizes_.sample_seconds / std::max(once, 1e-7)), 1, 1000), {}, {}});
  }
  for (int round = 0; round < sizes_.rounds; ++round) {
    const double copy = 1e9 * copy_gbps(), gemm = 1e12 * gemm_tflops();
    for (size_t i = 0; i < timed.size(); ++i) {
      Timed& t = timed[(i + size_t(round)) % timed.size()];
      const double seconds = time(t.test->run, t.repetitions);
      const double by_copy = t.test->work.bytes / copy, by_gemm = t.test->work.flops / gemm;
      t.seconds.push_back(seconds);
      const double floor = t.test->limit == Limit::copy   ? by_copy
                           : t.test->limit == Limit::gemm ? by_gemm
                                                          : std::max(by_copy, by_gemm);
      t.shares.push_back(t.test->limit == Limit::none ? 0 : floor / seconds);
    }
  }
  for (const Timed& t : timed) {
    std::vector<double> shares = t.shares;
    BenchRow row{.name = t.test->name,
                 .n_threads = 0,
                 .rounds = sizes_.rounds,
                 .seconds = at(t.seconds, 0.5)};
    row.gflops = 1e-9 * t.test->work.flops / row.seconds;
    row.gbps = 1e-9 * t.test->work.bytes / row.seconds;
    row.measure = t.test->limit == Limit::copy   ? "of copy bandwidth"
                  : t.test->limit == Limit::gemm ? "of the GEMM peak"
                                                 : "of the roofline";
    for (const Timed& other : timed)
      if (other.test->name == t.test->versus) {
        row.measure = "x " + t.test->versus;
        for (size_t i = 0; i < shares.size(); ++i) shares[i] = other.seconds[i] / t.seconds[i];
      }
    row.share = at(shares, 0.5);
    row.share_p10 = at(shares, 0.1);
    row.share_p90 = at(shares, 0.9);
    row.target = t.test->target;
    bench_.report(std::move(row));
  }
}

}  // namespace xpyd::gpu
