#include <algorithm>
#include <cstdio>

#include "experiments/gpu/rounds.h"

namespace xpyd::experiments::gpu {
namespace {

double at(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, size_t(share * double(values.size())))];
}

}  // namespace

Rounds::Rounds(Bench& bench, const Sizes& sizes) : bench_(bench), sizes_(sizes) {
  auto made = CudaPeakProbe::make(stream_, sizes.peak);
  XPYD_CHECK(made.ok(), made.ok() ? "" : made.error().message);
  probe_ = std::move(made).value();
}

void Rounds::found_wrong(const std::string& name, const std::string& what) {
  std::printf("%-60s WRONG: %s\n", name.c_str(), what.c_str());
  all_right_ = false;
}

std::vector<double> Rounds::measure(const std::vector<Case>& cases) {
  struct Timed {
    const Case* test;
    int repetitions = 1;
    std::vector<double> seconds, shares;
  };
  std::vector<Timed> timed;
  for (const Case& c : cases) {
    c.run();  // the first use of memory and code
    std::string wrong = c.check ? c.check() : "";
    stream_.wait();
    if (!wrong.empty()) {
      found_wrong(c.name, wrong);
      continue;
    }
    const double once = probe_->seconds(c.run, 1);
    timed.push_back({&c, std::clamp(int(sizes_.sample_seconds / std::max(once, 1e-7)), 1, 1000), {}, {}});
  }
  for (int round = 0; round < sizes_.rounds; ++round) {
    const double copy = 1e9 * probe_->copy_gbps(), gemm = 1e12 * probe_->gemm_tflops();
    for (size_t i = 0; i < timed.size(); ++i) {
      Timed& t = timed[(i + size_t(round)) % timed.size()];
      const double seconds = probe_->seconds(t.test->run, t.repetitions);
      const double by_copy = t.test->work.bytes / copy, by_gemm = t.test->work.flops / gemm;
      t.seconds.push_back(seconds);
      const double floor = t.test->limit == Limit::copy   ? by_copy
                           : t.test->limit == Limit::gemm ? by_gemm
                                                          : std::max(by_copy, by_gemm);
      t.shares.push_back(t.test->limit == Limit::none ? 0 : floor / seconds);
    }
  }
  std::vector<double> seconds(cases.size(), 0.0);
  for (const Timed& t : timed) {
    const Case& c = *t.test;
    seconds[size_t(&c - cases.data())] = at(t.seconds, 0.5);
    auto shared = [&](BenchRow row, const std::vector<double>& shares) {
      row.share = at(shares, 0.5);
      row.share_p10 = at(shares, 0.1);
      row.share_p90 = at(shares, 0.9);
      bench_.report(std::move(row));
    };
    BenchRow row{.name = c.name, .rounds = sizes_.rounds, .seconds = at(t.seconds, 0.5)};
    row.gflops = 1e-9 * c.work.flops / row.seconds;
    row.gbps = 1e-9 * c.work.bytes / row.seconds;
    row.measure = c.limit == Limit::copy       ? "of copy bandwidth"
                  : c.limit == Limit::gemm     ? "of the GEMM peak"
                  : c.limit == Limit::roofline ? "of the roofline"
                                               : "";
    row.target = c.target;
    if (c.reported) shared(std::move(row), t.shares);
    for (const Timed& other : timed) {
      if (other.test->name != c.versus) continue;
      std::vector<double> ratios;
      for (size_t i = 0; i < t.seconds.size(); ++i) ratios.push_back(other.seconds[i] / t.seconds[i]);
      shared({.name = c.name, .rounds = sizes_.rounds, .measure = "x " + c.versus}, ratios);
    }
  }
  bench_.write_files();  // keeps these rows if a later part fails
  return seconds;
}

}  // namespace xpyd::experiments::gpu
