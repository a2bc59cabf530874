// vmm_calls: what the system's calls for vAttention cost on this CPU, by size of the page group.
//
// vAttention's Table 3 has CUDA's calls; here are those that stand for them (base/page_groups.cc),
// median (and mean) of some hundreds of groups in random order, and raw ones beside:
//   reserve        64 GiB of addresses                                    cuMemAddressReserve
//   create         fallocate of a memfd, per group: pages zeroed          cuMemCreate
//   map            mmap(MAP_FIXED) alone, page tables left to faults
//   touch          … and those faults, one per 4 KiB
//   map_populate   as base/page_groups maps: no kernel faults             cuMemMap + cuMemSetAccess
//   unmap          mmap of nothing over it                                cuMemUnmap
//   unmap_beside   … while another thread of this process runs: its TLB is told
//   release        fallocate(PUNCH_HOLE)                                  cuMemRelease
//
// Arithmetic (kernel 6, measured elsewhere before): a map is about 4 us at any size; populating is
// 0.3 to 0.4 us per 4 KiB page, so 64 KiB take 10 us, 6 GB/s, and 2 MiB 170 us, 12 GB/s: a CPU pays
// by the byte, where a GPU's driver pays by the call (8 us for 64 KiB, 40 us for 2 MiB: 7.6 GiB/s
// and 70 GB/s, Table 9). Either is many times the 0.75 GB/s at which KV was seen to grow (Fig. 4).
// A fault costs 1.5 us: 16 of them are more than twice the populated map of 64 KiB.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/clock.h"
#include "base/page_groups.h"
#include "base/random.h"
#include "base/stats.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::vmm_calls_experiment {
namespace {

constexpr size_t kPage = 4096;
constexpr int kKeepMappings = 2000;  // scattered groups at once, far below vm.max_map_count

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int kib : setting.tiny ? std::vector{4, 64} : std::vector{4, 16, 64, 128, 256, 1024, 2048})
    all.push_back({{"group_kib", kib}});
  return all;
}

class Calls {
 public:
  Calls(size_t group, int n, const Setting& setting)
      : group_(group), reserved_(size_t{1} << (setting.tiny ? 30 : 36)), order_(size_t(n)) {
    std::iota(order_.begin(), order_.end(), 0);
    Random random(setting.seed);
    for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.below(i)]);
  }

  Result<Finding> run() {
    const int n = int(order_.size());
    double start = clock_.now();
    auto made = make_host_page_groups({.group_bytes = group_, .n_groups = n});
    if (!made) return made.error();
    row("create", {1e6 * (clock_.now() - start) / n});  // all in one call
    const std::shared_ptr<PageGroups> groups = made.value();
    std::vector<std::unique_ptr<VirtualRange>> ranges;
    each(
        16,
        [&](int) {
          auto range = groups->reserve(reserved_);
          if (range) ranges.push_back(std::move(range).value());
          return range.ok();
        },
        "reserve");
    if (ranges.size() < 2) return Error{ErrorCode::unavailable, "addresses are refused"};
    VirtualRange& range = *ranges[0];
    if (found_.wrong = misplaced(range, *ranges[1]); !found_.wrong.empty()) return found_;
    auto map = [&](int i) { return range.map(size_t(i) * group_, order_[size_t(i)], 1).ok(); };
    auto unmap = [&](int i) { return range.unmap(size_t(i) * group_, 1), true; };
    each(n, map, "map_populate");
    each(n, unmap, "unmap");
    each(n, map, "");
    std::atomic<bool> stop{false}, runs{false};
    std::thread beside([&] {
      while (!stop) runs = true;
    });
    while (!runs) std::this_thread::yield();
    each(n, unmap, "unmap_beside");
    stop = true;
    beside.join();
    raw(range.data());
    if (failed_) return Error{ErrorCode::unavailable, "a call of the system failed"};
    return found_;
  }

 private:
  // One row of calls f(0), f(1), ..., in us; no name: none.
  template <class F>
  void each(int n, F&& f, const char* call) {
    std::vector<double> us;
    for (int i = 0; i < n && !failed_; ++i) {
      const double start = clock_.now();
      failed_ = !f(i);
      us.push_back(1e6 * (clock_.now() - start));
    }
    if (*call) row(call, std::move(us));
  }
  void row(const char* call, std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const Value median = percentile_seen(us, 50);  // "": of few calls
    found_.rows.push_back({{"call", call},
                           {"n", us.size()},
                           {"us", median},
                           {"us_mean", summarize(us).mean},
                           {"us_p90", percentile_seen(us, 90)},
                           {"gbps", median.is_number() ? Value(1e-3 * double(group_) / double(median)) : median}});
  }

  // Each group is where it was mapped, in two ranges at once.
  std::string misplaced(VirtualRange& one, VirtualRange& other) {
    const int n = int(order_.size());
    bool good = bool(other.map(0, 0, n));
    for (int i = 0; i < n && good; ++i) good = bool(one.map(size_t(i) * group_, order_[size_t(i)], 1));
    if (!good) return "mapping failed";
    for (int i = 0; i < n; ++i) std::memcpy(one.data() + size_t(i) * group_, &i, sizeof i);
    std::string wrong;
    for (int i = 0; i < n; ++i) {
      int holds;
      std::memcpy(&holds, other.data() + size_t(order_[size_t(i)]) * group_, sizeof holds);
      if (holds != i) wrong = "a page group is not where it was mapped";
    }
    other.unmap(0, n);
    one.unmap(0, n);
    return wrong;
  }

  // What base/page_groups never does: a map that leaves faults to come, and pages given back.
  void raw(std::byte* base) {
    const int n = int(order_.size()), fd = ::memfd_create("xpyd-vmm-calls", MFD_CLOEXEC);
    failed_ |= fd < 0 || ::posix_fallocate(fd, 0, off_t(group_ * size_t(n))) != 0;
    auto file_at = [&](int i) { return off_t(size_t(order_[size_t(i)]) * group_); };
    each(
        n,
        [&](int i) {
          return ::mmap(base + size_t(i) * group_, group_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                        file_at(i)) != MAP_FAILED;
        },
        "map");
    each(
        n,
        [&](int i) {
          for (size_t at = 0; at < group_; at += kPage)
            *reinterpret_cast<volatile char*>(base + size_t(i) * group_ + at) = 1;
          return true;
        },
        "touch");
    each(
        n,
        [&](int i) {
          return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, file_at(i), off_t(group_)) == 0;
        },
        "release");
    if (fd >= 0) ::close(fd);
  }

  Finding found_;
  bool failed_ = false;
  const size_t group_, reserved_;
  std::vector<int> order_;
  RealClock clock_;
};

Measure open(const Setting& setting) {
  return [setting](const Values& point) {
    const size_t group = size_t(int(point["group_kib"])) * 1024;
    const int most = setting.tiny ? 20 : kKeepMappings;
    return Calls(group, std::min(most, int((size_t{256} << 20) / group)), setting).run();
  };
}

REGISTER_EXPERIMENT("vmm_calls", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::vmm_calls_experiment
