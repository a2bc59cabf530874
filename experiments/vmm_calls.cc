// vmm_calls: What do the system calls of vAttention cost on a CPU, and at what rate do they provide memory?
// Paper: vAttention (ASPLOS'25) section 6.1, Figs. 12 and 13.
// Set-up: microseconds of a call by the size of the page group (vAttention Tables 3 and 9), with groups in random
//   order: reserve (cuMemAddressReserve), create (cuMemCreate, a memfd's pages zeroed), map_populate (cuMemMap and
//   cuMemSetAccess), unmap (cuMemUnmap).
// Command: make exp-vmm_calls (a minute; measured).
// Expected: a map takes about 4 us at any size. Populating takes .3 to .4 us per page of 4 KiB: 64 KiB take 10 us, 6
//   GB/s, and 2 MiB 170 us, 12 GB/s. A CPU's cost is per byte, a driver's per call. Both are many times the .75 GB/s at
//   which KV was seen to grow.
// Found: 64 KiB in 10 us, 2 MiB in 158 to 176 us: 8.7 times what KV needs. Maps ahead of need leave no spike, and
//   deferring costs nothing.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/clock.h"
#include "base/device/device.h"
#include "base/device/page_groups.h"
#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/stats.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::vmm_calls_experiment {
namespace {

namespace calls {

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
    if (ranges.size() < 2) return Error{ErrorCode::unavailable, "the system does not reserve the addresses"};
    VirtualRange& range = *ranges[0];
    if (found_.wrong = misplaced(range, *ranges[1]); !found_.wrong.empty()) return found_;
    auto map = [&](int i) { return range.map(size_t(i) * group_, order_[size_t(i)], 1).ok(); };
    auto unmap = [&](int i) { return range.unmap(size_t(i) * group_, 1), true; };
    each(n, map, "map_populate");
    each(n, unmap, "unmap");
    if (failed_) return Error{ErrorCode::unavailable, "a system call failed"};
    return found_;
  }

 private:
  // Adds one row for the calls f(0), f(1), ..., in us. Without a name it adds none.
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
    const Value median = percentile_seen(us, 50);  // "" if there are few calls
    found_.rows.push_back({{"call", call},
                           {"n", us.size()},
                           {"us", median},
                           {"us_mean", summarize(us).mean},
                           {"us_p90", percentile_seen(us, 90)},
                           {"gbps", median.is_number() ? Value(1e-3 * double(group_) / double(median)) : median}});
  }

  // Checks that each group is where it was mapped, in two ranges at once.
  std::string misplaced(VirtualRange& one, VirtualRange& other) {
    const int n = int(order_.size());
    bool good = bool(other.map(0, 0, n));
    for (int i = 0; i < n && good; ++i) good = bool(one.map(size_t(i) * group_, order_[size_t(i)], 1));
    if (!good) return "the page groups cannot be mapped";
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

}  // namespace calls

// vmm_calls/map_overlap: whether requests see the time that a driver takes to map (Figs. 12 and 13). Real engine,
// vAttention memory and mapper thread. The model waits as long as a card's step takes, and each map takes `call_us`
// longer than the system's own. Token, plane and group are a sixteenth of the published bytes.
//
// Expected, decode: a sequence that crosses a page-group row of 128 tokens needs 64 calls of 40 us, 2.9 ms. 2 or 3 of
// 64 sequences cross in a step, at most 6: 3 to 18 ms more; mapped ahead, nothing. Expected, prefill: page-group rows
// of 64 tokens, 64 calls of 8 us are .51 ms of 3.2: 1.16, plus this system's own calls, .08 to .16; deferred, nothing.
namespace overlap {

constexpr int kTokenBytes = 64;                       // of one plane; 1,024 for Llama-3-8B TP-2
constexpr double kDecodeUs = 20000, kPrefillUs = 50;  // of a step; of a token

ModelConfig shape_of(bool tiny) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = tiny ? 2 : 32;
  c.n_heads = c.n_kv_heads = 1;
  c.head_dim = kTokenBytes / 2;  // bf16
  c.hidden = c.intermediate = 8;
  c.vocab = 64;
  c.max_position = 4096;
  return c;
}

void occupy(double us) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double, std::micro>(us);
  while (std::chrono::steady_clock::now() < end) {
  }
}

// The CPU, with `us` microseconds added to every map and unmap. A driver's call occupies its thread, so the time spins.
class SlowMaps final : public Device {
 public:
  explicit SlowMaps(double us) : us_(us) {}
  const char* name() const override { return "cpu"; }
  Result<std::shared_ptr<std::byte>> allocate(size_t bytes) override { return cpu_device().allocate(bytes); }
  std::unique_ptr<DeviceQueue> make_queue(Phase phase) override { return cpu_device().make_queue(phase); }
  Result<std::shared_ptr<PageGroups>> make_page_groups(const PageGroupOptions& options) override {
    auto made = make_host_page_groups(options);
    if (!made) return made;
    return std::shared_ptr<PageGroups>(std::make_shared<Groups>(std::move(made).value(), us_));
  }

 private:
  struct Range final : VirtualRange {
    Range(std::unique_ptr<VirtualRange> of, double by_us) : range(std::move(of)), us(by_us) {
      data_ = range->data(), bytes_ = range->bytes();
    }
    Status map(size_t offset, int group, int n) override {
      occupy(us);
      return range->map(offset, group, n);
    }
    void unmap(size_t offset, int n) override {
      occupy(us);
      range->unmap(offset, n);
    }
    const std::unique_ptr<VirtualRange> range;
    const double us;
  };
  struct Groups final : PageGroups {
    Groups(std::shared_ptr<PageGroups> of, double by_us)
        : PageGroups(of->options()), groups(std::move(of)), us(by_us) {}
    Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override {
      auto range = groups->reserve(bytes);
      if (!range) return range;
      return std::unique_ptr<VirtualRange>(std::make_unique<Range>(std::move(range).value(), us));
    }
    const std::shared_ptr<PageGroups> groups;
    const double us;
  };
  const double us_;
};

// A model that takes the time of its prompt tokens, or of a decode step.
TimedModel timed(const ModelConfig& config, double decode_us, double prefill_us) {
  auto start = std::make_shared<double>();
  auto step_s = [=](const StepInput& step) {
    *start = RealClock().now();
    const bool decodes = step.token_ids.size() == step.views.size();
    return 1e-6 * (decodes ? decode_us : prefill_us * double(step.token_ids.size()));
  };
  auto sleep = [=](double seconds) {
    auto left_us = [&] { return 1e6 * (seconds - (RealClock().now() - *start)); };
    constexpr double kWakeUs = 300;  // a sleeper may wake this late
    if (left_us() > kWakeUs)
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(left_us() - kWakeUs));
    occupy(left_us());
  };
  return TimedModel(config, step_s, sleep);
}

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (const char* mode : {"sync", "ahead"})
    all.push_back({{"part", "decode"}, {"mode", mode}, {"group_kib", 2048}, {"call_us", 40.}});
  for (const char* mode : {"sync", "deferred"})
    all.push_back({{"part", "prefill"}, {"mode", mode}, {"group_kib", 64}, {"call_us", 8.}});
  return all;
}

KvOptions memory_of(const Values& point, const ModelConfig& config, int scale, Device& device) {
  return {.shape = kv_shape(config, Dtype::bf16),
          .prefix_cache = false,
          .vattention = {.page_group_bytes = size_t(int(point["group_kib"])) * 1024 / size_t(16 * scale),
                         .map_ahead = point["mode"] != "sync"},
          .device = &device};
}

std::vector<int32_t> prompt_of(int n, Random& random) {
  std::vector<int32_t> prompt(static_cast<size_t>(n));
  for (int32_t& t : prompt) t = int32_t(random.below(64));
  return prompt;
}

Values row_of(int n, double ms, double ideal_ms, const KvStats& before, const KvStats& after) {
  return {{"n", n},
          {"ms", ms},
          {"model_ms", ideal_ms},
          {"map_calls", after.vattention.map_calls - before.vattention.map_calls},
          {"waited_ms", 1e3 * (after.vattention.map_wait_seconds - before.vattention.map_wait_seconds)}};
}

Result<Finding> decode(const Values& point, const Setting& setting) {
  const int batch = setting.tiny ? 4 : 64, n_requests = 2 * batch;
  const ModelConfig config = shape_of(setting.tiny);
  TimedModel model = timed(config, setting.tiny ? 100 : kDecodeUs, 1);
  SlowMaps device(point["call_us"]);
  KvOptions kv = memory_of(point, config, 16, device);
  kv.max_sequence_tokens = 256;
  kv.vattention.max_sequences = 2 * batch;
  kv.pool_bytes = size_t(3 * batch) * 2 * size_t(config.n_layers) * kv.vattention.page_group_bytes;
  auto made = Contestant::create(
      "vattention", model, kv, {.policy = find_batch_policy("prefill_first"), .max_batch = batch, .step_tokens = 4096});
  if (!made) return made.error();
  Contestant& c = *made.value();
  Random random(setting.seed);
  for (int i = 0; i < n_requests; ++i) {
    const int n = 100 + int(random.below(26));
    c.submit(prompt_of(n, random), 31 + int(random.below(32)));
  }
  Finding found;
  while (!c.engine().idle()) {
    const int64_t prompt_tokens = c.engine().stats().prompt_tokens;
    const KvStats before = c.memory().stats();
    const double ms = 1e3 * c.step();
    if (c.engine().stats().prompt_tokens == prompt_tokens && model.last_s > 0)
      found.rows.push_back(row_of(int(found.rows.size()), ms, 1e3 * model.last_s, before, c.memory().stats()));
    model.last_s = 0;
  }
  c.memory().check_invariants();
  found.wrong = c.wrong();
  if (c.ended() != n_requests) found.wrong = "some requests did not end";
  return found;
}

Result<Finding> prefill(const Values& point, const Setting& setting) {
  const int n_tokens = setting.tiny ? 256 : 2048, n_prompts = setting.tiny ? 2 : 4;
  const ModelConfig config = shape_of(setting.tiny);
  const double token_us = setting.tiny ? 1 : kPrefillUs;
  TimedModel model = timed(config, 1, token_us);
  SlowMaps device(point["call_us"]);
  KvOptions kv = memory_of(point, config, 1, device);
  kv.max_sequence_tokens = 4096;
  kv.vattention.max_sequences = 4;
  const int row_tokens = int(kv.vattention.page_group_bytes) / kTokenBytes;
  kv.pool_bytes = size_t(3 * (n_tokens / row_tokens + 2)) * 2 * size_t(config.n_layers) *
                  kv.vattention.page_group_bytes;
  Random random(setting.seed);
  Finding found;
  std::unique_ptr<Contestant> c;
  for (int i = 0; i < n_prompts; ++i) {
    if (!c || point["mode"] == "sync") {  // a fresh memory has no rows of an earlier prompt
      c.reset();
      auto made = Contestant::create("vattention", model, kv,
                                     {.policy = find_batch_policy("chunked"), .max_batch = 1, .step_tokens = 64});
      if (!made) return made.error();
      c = std::move(made).value();
    }
    c->submit(prompt_of(n_tokens, random),
              2);  // 2: the second token's step ends it and is not part of the prefill
    const KvStats before = c->memory().stats();
    const int64_t tokens = c->engine().stats().generated_tokens;
    double seconds = 0;
    while (c->engine().stats().generated_tokens == tokens) seconds += c->step();
    found.rows.push_back(row_of(i, 1e3 * seconds, 1e-3 * token_us * n_tokens, before, c->memory().stats()));
    while (!c->engine().idle()) c->step();
    c->memory().check_invariants();
    if (const std::string wrong = c->wrong(); !wrong.empty()) found.wrong = wrong;
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) {
    return point["part"] == "decode" ? decode(point, setting) : prefill(point, setting);
  };
}

REGISTER_EXPERIMENT("vmm_calls/map_overlap", "cpu", points, open);

}  // namespace overlap

}  // namespace
}  // namespace xpyd::experiments::vmm_calls_experiment
