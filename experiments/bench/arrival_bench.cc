// A prefix that arrives while the prompt is computed: from the host tier, and from another instance.
//
// Expected: 4,096 tokens of a 1B Llama (16 layers, 8 heads of 64, bf16) are 134 MB. They take 268, 134 and 67 ms at .5,
// 1 and 2 GB/s, and a layer takes a sixteenth of that. The rest of the prompt takes 16 layers of 8.4 ms, 134 ms in all;
// the model sleeps that long, so only waiting is measured.
// Whole prefix: load + compute, 402, 268 and 201 ms. By layer: the prompt begins with the first layer, and each layer
// waits for its own KV. That takes the longer of the two, plus one layer of the other: 277, 143 and 139 ms.
// The first layer waits for its own transfer, 16.8, 8.4 and 4.2 ms, and for the engine to notice, which looks every 50
// us. Before the prompt begins, the engine also plans the 131,072 pieces of 1 KiB of all layers, which takes some ms.
// So the first layer misses its target. A fetch by shm takes 20 ms (bench pool_fetch): 1.3 ms for the first layer,
// after a question and an answer.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "disagg/instance/cluster.h"
#include "experiments/bench/harness.h"
#include "experiments/paced_layers.h"
#include "experiments/stats.h"
#include "experiments/tally.h"

namespace xpyd::experiments {
namespace {

struct ArrivalFrom {
  const char* name;
  double gbps;            // rate of the host tier; 0: the prefix comes from another instance
  const char* transport;  // transport of the fetch
};

constexpr int kArriving = 4096;  // tokens of the prefix

// One instance, or two, with that model. Each prompt finds the prefix of the last one.
class ArrivalStand {
 public:
  ArrivalStand(const ArrivalFrom& from, double layer_s, bool by_layer) : from_(from) {
    const ModelConfig config = load_model_config("experiments/models/llama-1b").value();
    ClusterOptions options;
    options.topology = parse_topology(from.gbps > 0 ? "1C" : "2C").value();
    options.kv_scheme = find_kv_scheme("paged");
    options.kv.shape = kv_shape(config, Dtype::bf16);
    options.kv.prefix_cache = from.gbps == 0;
    options.kv.pool_bytes = 3 * bytes(options.kv.shape);
    if (from.gbps > 0) options.kv.tiers = {.host_bytes = 3 * bytes(options.kv.shape), .copy_gbps = from.gbps};
    options.kv_by_layer = by_layer;
    options.batching = find_batch_policy("chunked");
    options.placement = find_placement_policy("round_robin");
    options.fetch = find_fetch_policy("always");
    options.transport = find_transport(from.transport);
    options.step_tokens = kArriving + 1;
    options.max_model_len = kArriving + 32;
    options.make_model = [this, config, layer_s](int, DeviceQueue&) {
      auto model = std::make_unique<PacedLayers>(config, layer_s, clock_);
      models_.push_back(model.get());
      return Result<std::unique_ptr<Model>>(std::move(model));
    };
    vocab_ = config.vocab;
    cluster_ = Cluster::create(std::move(options), clock_).value();
    XPYD_CHECK(cluster_->start().ok());
  }
  ~ArrivalStand() { cluster_->stop(); }

  // Seconds from the request to the begin of its step, and to the end.
  std::pair<double, double> hit() {
    if (from_.gbps == 0) {
      ++round_;  // a new prompt
      ask();
    } else if (id_ == 0) {
      ask();
      clock_.sleep(.2 + 134e-3 / from_.gbps);  // until the prefix is in the host tier
    }
    const double began = clock_.now();
    XPYD_CHECK(ask() == kArriving);
    const auto* last = *std::ranges::max_element(models_, {}, [](const PacedLayers* m) { return m->began_s.load(); });
    return {last->began_s - began, last->ended_s - began};
  }

  static size_t bytes(const KvShape& shape) { return size_t(kArriving) * shape.token_bytes(); }

 private:
  int64_t ask() {  // returns the tokens that were cached
    auto request = std::make_shared<Request>();
    request->id = ++id_;
    for (int t = 0; t <= kArriving; ++t) request->prompt.push_back((t * 7 + round_) % vocab_);
    request->sampling.temperature = 0;
    request->max_tokens = 1;
    const int64_t cached = tally_->cached_tokens;
    XPYD_CHECK(cluster_->submit(request, tally_).ok() && cluster_->wait_idle(60));
    return tally_->cached_tokens - cached;
  }

  const ArrivalFrom from_;
  RealClock clock_;
  std::vector<PacedLayers*> models_;
  std::unique_ptr<Cluster> cluster_;
  const std::shared_ptr<Tally> tally_ = std::make_shared<Tally>();
  int vocab_ = 0, round_ = 0;
  uint64_t id_ = 0;
};

void bench_arrival(Bench& bench) {
  constexpr int kLayers = 16;
  constexpr double kLayerS = 134e-3 / kLayers;
  for (const ArrivalFrom& from : {ArrivalFrom{"host, .5 GB/s", .5, "local"}, ArrivalFrom{"host, 1 GB/s", 1, "local"},
                                  ArrivalFrom{"host, 2 GB/s", 2, "local"}, ArrivalFrom{"another by shm", 0, "shm"},
                                  ArrivalFrom{"another by tcp", 0, "tcp"}}) {
    ArrivalStand whole(from, kLayerS, false), layers(from, kLayerS, true);
    std::vector<double> first, first_share, ttft, ttft_share, without;
    for (int round = 0; round <= bench.options().rounds; ++round) {
      const auto [load_s, whole_s] = whole.hit();
      const auto [first_s, layers_s] = layers.hit();
      if (round == 0) continue;  // the warm-up touches memory and opens connections
      const double compute_s = whole_s - load_s, own_s = load_s / kLayers;
      const double least_s = std::max(load_s + compute_s / kLayers, own_s + compute_s);
      first.push_back(first_s), first_share.push_back((own_s + 1e-3) / first_s);
      ttft.push_back(layers_s), ttft_share.push_back(least_s / layers_s);
      without.push_back(whole_s);
    }
    for (auto* values : {&first, &first_share, &ttft, &ttft_share, &without}) std::ranges::sort(*values);
    std::printf("first token with KV from %s: loaded whole %.1f ms, layer by layer %.1f ms\n", from.name,
                1e3 * percentile(without, 50), 1e3 * percentile(ttft, 50));
    const auto report = [&](const std::string& what, const std::vector<double>& seconds,
                            const std::vector<double>& shares, const char* measure, double target) {
      bench.report({.name = what + ", from " + from.name,
                    .n_threads = 1,
                    .rounds = int(shares.size()),
                    .seconds = percentile(seconds, 50),
                    .measure = measure,
                    .share = percentile(shares, 50),
                    .share_p10 = percentile(shares, 10),
                    .share_p90 = percentile(shares, 90),
                    .target = target});
    };
    report("first token", ttft, ttft_share, "x the longer of load and compute, and a layer", .95);
    report("first layer", first, first_share, "x its own transfer + 1 ms", 1);
  }
}

REGISTER_BENCH("kv_arrival", bench_arrival);

}  // namespace
}  // namespace xpyd::experiments
