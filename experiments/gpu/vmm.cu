// The cost of each virtual memory call on this card, beside published figures: vAttention's Table 3 (ASPLOS'25; its
// column for 2 MiB) and kvcached's benchmarks/bench_vmm (A100, 2 MiB, one thread).
//
// Expected: in layer_major, a sequence of an 8B model grows by a page-group row of 64 groups every 1024 tokens. Each
// group takes a map and a set_access: 64 * 40 us = 2.6 ms. In token_major it grows by one group every 16 tokens: 40 us.
// KV is written at 128 KiB a token, so 2 MiB in 40 us are 52 GB/s; serving was seen to need 0.75 GB/s (Fig. 4).
// Requests wait for these calls only if nothing is mapped ahead.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "base/clock.h"
#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "base/random.h"
#include "experiments/gpu/rounds.h"
#include "experiments/stats.h"

namespace xpyd::experiments::gpu {
namespace {

namespace vmm = cuda::vmm;

struct Published {
  const char* call;
  double table_3_us, kvcached_us;  // at 2 MiB; 0: not given
};
constexpr Published kPublished[] = {
    {"cuMemAddressReserve", 2, 19}, {"cuMemCreate", 29, 193}, {"cuMemMap", 2, 1.45},      {"cuMemSetAccess", 38, 36},
    {"cuMemUnmap", 34, 25.6},       {"cuMemRelease", 23, 0},  {"cuMemAddressFree", 1, 0},
};

class Calls {
 public:
  Calls(Rounds& rounds, size_t bytes, int n) : rounds_(rounds), bytes_(bytes), order_(size_t(n)) {
    std::iota(order_.begin(), order_.end(), 0);
    Random random(3);
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.below(i)]);
  }

  // Makes every call n times, with groups in random order. Then repeats the calls of a running server while the card
  // works.
  void run(bool tiny) {
    const int n = int(order_.size());
    const size_t all = bytes_ * size_t(n);
    std::vector<vmm::Address> ranges(size_t(n), 0);
    std::vector<vmm::Handle> handles(size_t(n), 0);
    each("cuMemAddressReserve", [&](int i) { return vmm::address_reserve(&ranges[size_t(i)], all); });
    each("cuMemCreate", [&](int i) { return vmm::create(&handles[size_t(i)], bytes_); });
    const vmm::Address base = ranges[0];
    auto at = [&](int i) { return base + size_t(order_[size_t(i)]) * bytes_; };
    auto map = [&](int i) { return vmm::map(at(i), bytes_, handles[size_t(i)]); };
    auto set_access = [&](int i) { return vmm::set_access(at(i), bytes_); };
    auto unmap = [&](int i) { return vmm::unmap(at(i), bytes_); };
    each("cuMemMap", map);
    each("cuMemSetAccess", set_access);
    check(base, all);
    each("cuMemUnmap", unmap);
    // The work under way does not touch these addresses.
    cuda::Memory other = cuda::Memory::device(tiny ? 1 << 12 : 256 << 20).value();
    auto busy = [&](const char* call, auto f) {
      for (int i = 0; i < (tiny ? 2 : 1000); ++i) cuda::fill(other.data(), i, other.size(), rounds_.stream());
      each(call, f, ", the card busy");
      rounds_.stream().wait();
    };
    busy("cuMemMap", map);
    busy("cuMemSetAccess", set_access);
    busy("cuMemUnmap", unmap);
    // One set_access for a run of neighbours.
    for (int i = 0; i < n; ++i) must(map(i), "cuMemMap");
    const int run = std::min(8, n);
    each_of(n / run, "cuMemSetAccess", ", " + std::to_string(run) + " mappings at once",
            [&](int i) { return vmm::set_access(base + size_t(i * run) * bytes_, size_t(run) * bytes_); });
    must(vmm::unmap(base, all), "cuMemUnmap");
    each("cuMemRelease", [&](int i) { return vmm::release(handles[size_t(i)]); });
    each("cuMemAddressFree", [&](int i) { return vmm::address_free(ranges[size_t(i)], all); });
  }

 private:
  static void must(int code, const char* call) {
    XPYD_CHECK(code == 0, std::string(call) + ": " + vmm::code_name(code));
  }
  template <class F>
  void each(const char* call, F f, const std::string& how = "") {
    each_of(int(order_.size()), call, how, f);
  }
  template <class F>
  void each_of(int n, const char* call, const std::string& how, F f) {
    RealClock clock;
    std::vector<double> us;
    int code = 0, not_ready = 0;
    for (int i = 0; i < n && code == 0; ++i) {
      const double start = clock.now();
      while ((code = f(i)) == vmm::kNotReady) ++not_ready;  // the card is busy, but not for ever
      us.push_back(1e6 * (clock.now() - start));
    }
    must(code, call);
    if (not_ready > 0) std::printf("%s%s: the driver answered \"not ready\" %d times\n", call, how.c_str(), not_ready);
    report(call, how, summarize(std::move(us)));
  }

  void report(const char* call, const std::string& how, const Summary& s) {
    const Published& known = *std::find_if(std::begin(kPublished), std::end(kPublished),
                                           [&](const Published& p) { return std::string(p.call) == call; });
    const std::string name = std::string(call) + " " + std::to_string(bytes_ >> 10) + " KiB" + how;
    auto published = [](double us) {
      char text[32] = "      -";
      if (us > 0) std::snprintf(text, sizeof text, "%7.2f", us);
      return std::string(text);
    };
    std::printf("%-58s p50 %8.2f  mean %8.2f  p90 %8.2f us of %3d | published: %s %s\n", name.c_str(), s.median, s.mean,
                s.p90, int(s.count), published(known.table_3_us).c_str(), published(known.kvcached_us).c_str());
    rounds_.bench().report(
        {.name = name + ", mean of " + std::to_string(s.count), .rounds = int(s.count), .seconds = 1e-6 * s.mean});
    BenchRow row{.name = name, .rounds = int(s.count), .seconds = 1e-6 * s.median};
    if (known.table_3_us > 0) {
      row.measure = "x vAttention's Table 3 at 2 MiB (" + published(known.table_3_us) + " us)";
      row.share = s.median / known.table_3_us;
      row.share_p10 = s.min / known.table_3_us, row.share_p90 = s.p90 / known.table_3_us;
    }
    rounds_.bench().report(row);
    if (known.kvcached_us > 0)
      rounds_.bench().report({.name = name,
                              .rounds = int(s.count),
                              .measure = "x kvcached's on an A100 at 2 MiB (" + published(known.kvcached_us) + " us)",
                              .share = s.median / known.kvcached_us,
                              .share_p10 = s.min / known.kvcached_us,
                              .share_p90 = s.p90 / known.kvcached_us});
  }

  // Checks that mapped and accessible memory stores values and returns them.
  void check(vmm::Address base, size_t bytes) {
    cuda::Memory host = cuda::Memory::pinned(8);
    cuda::fill(reinterpret_cast<void*>(base), 0x5a, bytes, rounds_.stream());
    for (size_t at : {size_t{0}, bytes / 2, bytes - 8}) {
      cuda::copy(host.data(), reinterpret_cast<void*>(base + at), 8, rounds_.stream());
      rounds_.stream().wait();
      if (*host.as<uint64_t>() != 0x5a5a5a5a5a5a5a5a)
        rounds_.found_wrong("page groups", "byte " + std::to_string(at) + " differs from what was written");
    }
  }

  Rounds& rounds_;
  const size_t bytes_;
  std::vector<int> order_;
};

// The time that a growing sequence waits if nothing is mapped ahead (base/device/page_groups_cuda.cu).
void rows(Rounds& rounds, size_t group, int n) {
  for (auto [planes, what] : {std::pair{64, "64 groups: layer_major, 32 layers"}, {1, "1 group: token_major"}}) {
    auto groups = make_cuda_page_groups({.group_bytes = group, .n_groups = planes}).value();
    auto range = groups->reserve(2 * size_t(planes) * group).value();
    RealClock clock;
    std::vector<double> maps, unmaps;
    for (int i = 0; i < n; ++i) {
      const double start = clock.now();
      for (int plane = 0; plane < planes; ++plane) XPYD_CHECK(range->map(2 * size_t(plane) * group, plane, 1).ok());
      const double mapped = clock.now();
      for (int plane = 0; plane < planes; ++plane) range->unmap(2 * size_t(plane) * group, 1);
      maps.push_back(mapped - start), unmaps.push_back(clock.now() - mapped);
    }
    auto report = [&, n_planes = planes](const std::string& name, std::vector<double> seconds) {
      const Summary s = summarize(std::move(seconds));
      rounds.bench().report(
          {.name = name, .rounds = n, .seconds = s.median, .gbps = 1e-9 * double(n_planes) * double(group) / s.median});
    };
    report(std::string("a row mapped, ") + what, std::move(maps));
    report(std::string("a row unmapped, ") + what, std::move(unmaps));
  }
}

}  // namespace

void virtual_memory(Rounds& rounds, const cuda::Card&, bool tiny) {
  if (Status status = vmm::available(); !status) {
    std::printf("not run: %s\n", status.error().message.c_str());
    return;
  }
  const size_t least = vmm::granularity();
  std::printf(
      "page groups of %zu KiB and multiples. Published times in us are for 2 MiB: vAttention's Table 3, then "
      "kvcached on an A100\n",
      least >> 10);
  for (size_t times : tiny ? std::vector<size_t>{1, 2} : std::vector<size_t>{1, 2, 4, 16})
    Calls(rounds, times * least, tiny ? 16 : times > 4 ? 100 : 400).run(tiny);
  rows(rounds, least, tiny ? 4 : 100);
  rounds.bench().write_files();
}

}  // namespace xpyd::experiments::gpu
