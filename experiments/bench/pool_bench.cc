// The pool of prefixes: the directory of which instance has which block, and a fetch from one instance to another.
//
// Expected, directory: 1,000 instances with 20,000 blocks each, a quarter of them in two places, are 18 M keys of a
// hash map. An update follows about five pointers to memory that is in no cache, 500 to 1,000 ns: 1 to 2 M updates/s. A
// look-up of 64 blocks follows three for each block, 64 x 300 ns. Together with reading the hits of 1,000 instances, .7
// us, that is 20 us, .05 M/s.
// Expected, fetch: 4,096 tokens of a 1B Llama (16 layers, 8 heads of 64, bf16) are 134 MB in 256 blocks of 16 tokens:
// 8,192 pieces of 16 KiB. Over shm another thread copies the pieces. Two messages between threads (50 us each) and the
// plan of the pieces add 1 ms to 10. Over tcp the bytes pass through the kernel twice, as in iperf3.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/memory.h"
#include "base/random.h"
#include "disagg/instance/cluster.h"
#include "disagg/pool/directory.h"
#include "experiments/bench/harness.h"
#include "experiments/null_model.h"
#include "experiments/stats.h"
#include "experiments/tally.h"

namespace xpyd::experiments {
namespace {

BenchRow row(const std::string& name, std::vector<double> shares, double seconds, const char* measure, double target) {
  std::sort(shares.begin(), shares.end());
  return {.group = {},
          .name = name,
          .n_threads = 1,
          .rounds = int(shares.size()),
          .seconds = seconds,
          .measure = measure,
          .share = percentile(shares, 50),
          .share_p10 = percentile(shares, 10),
          .share_p90 = percentile(shares, 90),
          .target = target};
}

void bench_directory(Bench& bench) {
  constexpr int kInstances = 1000, kBlocks = 20000, kPrompt = 64, kReport = 64;
  CacheDirectory directory;
  Random random(3);
  RealClock clock;
  // Every instance has chains of 64 blocks. Every fourth chain is also its neighbour's.
  const auto chain = [](int instance, int number) {
    const int whose = number % 4 == 0 ? instance / 2 : kInstances + instance;
    std::vector<uint64_t> hashes;
    Random of(uint64_t(whose) << 32 | uint64_t(number));
    for (int i = 0; i < kPrompt; ++i) hashes.push_back(of.next());
    return hashes;
  };
  std::vector<int> first(kInstances, 0), last(kInstances, 0);  // the chains that each instance has
  for (int i = 0; i < kInstances; ++i) {
    XPYD_CHECK(directory.joined(2 * kBlocks) == i);
    for (; last[size_t(i)] < kBlocks / kPrompt; ++last[size_t(i)])
      directory.heard(i, {.stored = chain(i, last[size_t(i)]), .removed = {}});
  }
  size_t entries = 0;
  for (int i = 0; i < kInstances; ++i) entries += directory.blocks(i);
  const int rounds = bench.options().rounds;
  std::vector<double> updates, looks;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::pair<int, CacheReport>> reports;
    for (int n = 0; n < 2000; ++n) {
      const int i = int(random.below(kInstances));
      reports.push_back({i, {.stored = chain(i, last[size_t(i)]++), .removed = chain(i, first[size_t(i)]++)}});
    }
    double began = clock.now();
    for (const auto& [i, report] : reports) directory.heard(i, report);
    updates.push_back(double(reports.size()) * 2 * kReport / (clock.now() - began) * 1e-6);
    std::vector<std::vector<uint64_t>> prompts;
    for (int n = 0; n < 2000; ++n) {
      const auto i = random.below(kInstances);
      prompts.push_back(chain(int(i), first[i] + int(random.below(uint64_t(last[i] - first[i])))));
    }
    int64_t found = 0;
    began = clock.now();
    for (const auto& prompt : prompts)
      for (const CacheDirectory::Hit& hit : directory.find(prompt)) found += hit.all;
    looks.push_back(double(prompts.size()) / (clock.now() - began) * 1e-6 / .05);
    XPYD_CHECK(found >= int64_t(prompts.size()) * kPrompt);
  }
  std::printf("directory: %zu blocks of %d instances\n", entries, kInstances);
  bench.report(row("directory: updates", updates, 1e-6 / percentile(updates, 50), "x 1 M updates/s", 1));
  bench.report(row("directory: look-ups of 64 blocks, all instances read", looks, 1e-6 / .05 / percentile(looks, 50),
                   "x .05 M look-ups/s", 1));
}

// Seconds of fetches of n tokens over each transport, beside a copy of as many bytes in as many pieces.
void bench_fetch(Bench& bench) {
  constexpr int kTokens = 4096, kPiece = 16 << 10;
  const ModelConfig config = load_model_config("experiments/models/llama-1b").value();
  for (const char* transport : {"local", "shm", "tcp"}) {
    const bool tcp = transport == std::string("tcp");
    RealClock clock;
    ClusterOptions options;
    options.topology = parse_topology("2C").value();
    options.kv_scheme = find_kv_scheme("paged");
    options.kv.shape = kv_shape(config, Dtype::bf16);
    const size_t bytes = size_t(kTokens) * options.kv.shape.token_bytes();
    options.kv.pool_bytes = 3 * bytes;
    options.batching = find_batch_policy("chunked");
    options.placement = find_placement_policy("round_robin");
    options.fetch = find_fetch_policy("always");
    options.transport = find_transport(transport);
    options.step_tokens = kTokens;
    options.max_model_len = kTokens + 32;
    options.make_model = [&](int, DeviceQueue&) { return make_null_model(config); };
    auto cluster = Cluster::create(std::move(options), clock).value();
    XPYD_CHECK(cluster->start().ok());
    Buffer from(bytes), to(bytes);
    std::memset(from.data(), 1, bytes), std::memset(to.data(), 2, bytes);
    const auto tally = std::make_shared<Tally>();
    std::vector<double> shares, seconds;
    uint64_t id = 0;
    for (int round = 0; round <= bench.options().rounds; ++round) {
      double began = 0;
      for (int turn = 0; turn < 2; ++turn) {  // the same prompt on the first instance, then on the other
        auto request = std::make_shared<Request>();
        request->id = ++id;
        for (int t = 0; t <= kTokens; ++t) request->prompt.push_back((t * 7 + round) % config.vocab);
        request->sampling.temperature = 0;
        request->max_tokens = 1;
        began = clock.now();
        XPYD_CHECK(cluster->submit(request, tally).ok() && cluster->wait_idle(60));
      }
      const double took = clock.now() - began;  // the fetch, and a step of one token
      began = clock.now();
      for (size_t at = 0; at < bytes; at += kPiece) std::memcpy(to.data() + at, from.data() + at, kPiece);
      if (round == 0) continue;  // the warm-up touches memory and opens connections
      seconds.push_back(took);
      if (!tcp)
        shares.push_back((clock.now() - began) / took);
      else if (const double iperf = iperf3_gbps(); iperf > 0)
        shares.push_back(double(bytes) / took * 1e-9 / iperf);
    }
    int64_t tokens = 0;
    for (const auto& instance : cluster->instances()) tokens += instance->stats().fetch.tokens;
    XPYD_CHECK(tokens == int64_t(kTokens) * (bench.options().rounds + 1));
    cluster->stop();
    std::sort(seconds.begin(), seconds.end());
    if (shares.empty()) shares = {0};
    BenchRow r = row("fetch of 134 MB by " + std::string(transport), shares, percentile(seconds, 50),
                     tcp ? "x iperf3, one connection" : "x memcpy in pieces of 16 KiB", tcp ? .75 : .9);
    r.gbps = double(bytes) / r.seconds * 1e-9;
    bench.report(r);
  }
}

// New prompts on two instances with the pool and on two without, in turn: the processor time of each. The pool costs a
// report for each block that is stored or removed, and a look-up for each prompt.
void bench_idle(Bench& bench) {
  constexpr int kTokens = 512, kOutput = 32, kRequests = 16;
  const std::string dir = "experiments/models/llama-micro";
  const ModelConfig config = load_model_config(dir).value();
  ThreadTeam& team = bench.team(1);
  const auto weights = load_weights(dir, config, {.dummy = true}, team).value();
  RealClock clock;
  std::unique_ptr<Cluster> clusters[2];
  for (int on = 0; on < 2; ++on) {
    ClusterOptions o;
    o.topology = parse_topology("2C").value();
    o.kv_scheme = find_kv_scheme("paged");
    o.kv.shape = kv_shape(config, Dtype::f32);
    o.kv.pool_bytes = size_t(kRequests * (kTokens + kOutput)) * o.kv.shape.token_bytes();
    o.batching = find_batch_policy("chunked");
    o.placement = find_placement_policy("round_robin");
    if (on) o.fetch = find_fetch_policy("cost");
    o.transport = find_transport("shm");
    o.max_batch = kRequests / 2;
    o.step_tokens = 256;
    o.max_model_len = 2 * kTokens;
    o.make_model = [&](int, DeviceQueue&) {
      return Result<std::unique_ptr<Model>>(make_llama(weights, team, 256, kRequests / 2));
    };
    clusters[on] = Cluster::create(std::move(o), clock).value();
  }
  uint64_t id = 0;
  const auto busy = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  };
  const auto run = [&](int on) {
    const auto tally = std::make_shared<Tally>();
    for (int i = 0; i < kRequests; ++i) {
      auto request = std::make_shared<Request>();
      request->id = ++id;
      for (int t = 0; t < kTokens; ++t) request->prompt.push_back(int32_t((id * 7919 + uint64_t(t) * 31) % 1000));
      request->max_tokens = kOutput;
      request->ignore_eos = true;
      XPYD_CHECK(clusters[on]->submit(request, tally).ok());
    }
    const double began = busy();
    while (tally->ended < kRequests) clusters[on]->turn();
    const double took = busy() - began;
    while (clusters[on]->turn()) {
    }
    XPYD_CHECK(tally->cached_tokens == 0);
    return took;
  };
  std::vector<double> ratios, seconds;
  for (int round = -1; round < 2 * bench.options().rounds; ++round) {
    double took[2];
    for (int turn = 0; turn < 2; ++turn) {
      const int on = (turn + round + 1) % 2;
      took[on] = run(on);
    }
    if (round < 0) continue;
    ratios.push_back(took[0] / took[1]);
    seconds.push_back(took[1]);
  }
  bench.report(row("16 new prompts of 512, 32 tokens each, llama-micro: with a pool", ratios, summarize(seconds).median,
                   "x tokens/s without", .99));
}

REGISTER_BENCH("pool_idle", bench_idle);
REGISTER_BENCH("pool_directory", bench_directory);
REGISTER_BENCH("pool_fetch", bench_fetch);

}  // namespace
}  // namespace xpyd::experiments
