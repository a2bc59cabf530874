// The cost that the cluster adds to a request: the conductor's processor time, and the time of a zero-copy hand-off
// beside the time of the first token.
//
// Expected, router: 2,048 tokens are 128 blocks, hashed once (15 ns each: 2 us) and looked up for each prefill instance
// as far as its cache matches. A decision, an attempt and five messages of the instances, with their accounting, take
// some hundred ns each. Between processes, messages are also encoded: 8 KiB of prompt, once in each direction.
//
// Expected, hand-off: after the first token P hands 256 block ids to D, which continues the sequence. That is two
// wake-ups of 50 us and the planning of two steps. The first token of 4,096 tokens of a 1B model takes 4,096 x 2.5
// GFLOP / 200 GFLOP/s = 50 s on a CPU. Here only 128 tokens are computed. The whole prompt is taken as 32 times that,
// which omits attention to earlier tokens.
#include <time.h>

#include <algorithm>
#include <cstdio>

#include "allocator/prefix/prefix_hash.h"
#include "base/random.h"
#include "disagg/conductor/cluster_state.h"
#include "disagg/instance/cluster.h"
#include "disagg/messages.h"
#include "disagg/processes/codec.h"
#include "experiments/bench/harness.h"
#include "experiments/null_model.h"
#include "experiments/stats.h"
#include "experiments/tally.h"
#include "model/model.h"

namespace xpyd::experiments {
namespace {

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

BenchRow at_most(const char* name, std::vector<double> seconds, double most, const char* measure) {
  std::sort(seconds.begin(), seconds.end());
  return {.name = name,
          .n_threads = 1,
          .rounds = int(seconds.size()),
          .seconds = percentile(seconds, 50),
          .measure = measure,
          .share = most / percentile(seconds, 50),
          .share_p10 = most / percentile(seconds, 90),
          .share_p90 = most / percentile(seconds, 10),
          .target = 1};
}

// An instance that never runs. The benchmark sends its messages.
class Absent final : public InstanceProbe {
 public:
  InstanceStats stats() const override {
    InstanceStats stats;
    stats.kv = {.capacity = 4096, .free = 4096, .block_tokens = 16};
    return stats;
  }
  std::optional<int> matched_tokens(std::span<const int32_t>, uint64_t) const override { return {}; }
  const std::atomic<uint64_t>* version() const override {  // its state never changes
    static const std::atomic<uint64_t> one{1};
    return &one;
  }
};

class Last final : public MessageBus {
 public:
  void send(InstanceId, InstanceId to_whom, Message message) override {
    if (auto* start = std::get_if<StartRequest>(&message)) what = std::move(*start), to = to_whom;
  }
  StartRequest what;
  InstanceId to = -1;
};

constexpr int kTokens = 2048, kPrefixes = 16;

std::vector<int32_t> prompt_of(int i) {  // half of the prompt is one of a few prefixes
  std::vector<int32_t> prompt;
  for (int t = 0; t < kTokens; ++t) prompt.push_back(t < kTokens / 2 ? t * 7 + i % kPrefixes : t * 13 + i);
  return prompt;
}

// A 4P4D cluster; each of the four prefill instances has a quarter of the prefixes. `bytes` encodes and decodes
// messages as between processes. Returns seconds of processor time per request, one value for each 100 requests.
std::vector<double> route(int n_requests, bool bytes) {
  RealClock clock;
  Last bus;
  Conductor conductor({.placement = find_placement_policy("prefix_aware"),
                       .disagg = find_disagg_policy("prefill_first"),
                       .max_model_len = 2 * kTokens},
                      clock, bus);
  const auto hear = [&](InstanceId from, Message message) {
    if (bytes) {  // what the receiving channel would decode
      const uint16_t type = frame_type(message);
      message = decode(type, encode(from, kConductor, message, 0), 0).value().message;
    }
    conductor.receive(from, std::move(message));
  };
  for (int i = 0; i < 8; ++i) {
    InstanceInfo info{.id = conductor.new_id(), .role = i < 4 ? Role::prefill : Role::decode};
    info.layout.block_tokens = info.block_tokens = 16;
    info.capacity_blocks = 4096;
    info.max_batch = 1 << 20;
    conductor.joined(info, std::make_shared<Absent>());
    for (int p = i; p < kPrefixes && i < 4; p += 4)
      conductor.receive(info.id, CacheReport{.stored = prefix_hashes(prompt_of(p), 16, 0), .removed = {}});
  }
  auto ends = std::make_shared<experiments::Tally>();
  std::vector<double> seconds;
  size_t out_bytes = 0;
  for (int i = 0; i < n_requests;) {
    std::vector<std::shared_ptr<Request>> requests;
    for (int b = 0; b < 100; ++b, ++i) {
      requests.push_back(std::make_shared<Request>());
      requests.back()->id = uint64_t(i);
      requests.back()->prompt = prompt_of(i);
      requests.back()->max_tokens = 2;
    }
    const double before = thread_seconds();
    for (const auto& request : requests) {
      XPYD_CHECK(conductor.submit(request, ends).ok());
      if (bytes) out_bytes += encode(kConductor, bus.to, bus.what, 0).size();
      const AttemptId attempt = bus.what.attempt;
      const InstanceId p = bus.to, d = bus.what.decode;
      hear(p, AttemptProgress{attempt, AttemptProgress::started});
      TokenOf token{.attempt = attempt};
      token.event.request_id = request->id;
      token.event.token = 5;
      token.event.text = " five";
      hear(p, token);
      hear(p, AttemptProgress{attempt, AttemptProgress::prompt_done});
      token.index = 1;
      token.event.finish = FinishReason::length;
      hear(d, token);
    }
    seconds.push_back((thread_seconds() - before) / 100);
  }
  XPYD_CHECK(ends->ended == n_requests && conductor.stats().conductor.failed_attempts == 0);
  XPYD_CHECK(conductor.wait_idle(0) && (out_bytes > 0) == bytes);
  return seconds;
}

void bench_router(Bench& bench) {
  constexpr double kMost = 20e-6;
  route(1000, false);
  bench.report(at_most("router: CPU per request of 2,048 tokens, 4P4D", route(10000, false), kMost, "x 20 us"));
  bench.report(at_most("router: with its words encoded and decoded", route(10000, true), kMost, "x 20 us"));
}

// Looks at all instances, half of which prefill, and places a prompt whose hashes are known. The policy is Mooncake's
// Algorithm 1, which reads everything. Some instances hold some of the prefixes; all have work.
std::vector<double> place(int n_instances, int rounds) {
  Scoreboard board(512, StepCost());
  std::map<InstanceId, Member> members;
  Random random(7);
  for (InstanceId id = 0; id < n_instances; ++id) {
    Member& m = members[id];
    m.info = {.id = id, .role = id < n_instances / 2 ? Role::prefill : Role::decode};
    m.info.block_tokens = 16, m.info.capacity_blocks = 4096;
    m.probe = std::make_shared<Absent>();
    board.joined(m);
    if (m.info.role == Role::decode) {
      m.load.sequences = int(random.next() % 64), m.load.context_tokens = m.load.sequences * 2000;
      continue;
    }
    for (int p = 0; p < kPrefixes; ++p)
      if (random.next() % 4 == 0)
        board.heard(m, CacheReport{.stored = prefix_hashes(prompt_of(p), 16, 0), .removed = {}});
    for (int q = int(random.next() % 8); q > 0; --q) board.placed(m, board.prompt(kTokens, 0), 0);
  }
  const PlacementPolicy& policy = *find_placement_policy("mooncake");
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    const std::vector<int32_t> tokens = prompt_of(i);
    PromptHashes prompt(tokens, 0);
    prompt.of(16);
    const double before = thread_seconds();
    constexpr int kTimes = 20;
    for (int t = 0; t < kTimes; ++t) XPYD_CHECK(policy.place(board.look(prompt, 0.1 + i * 1e-3), {}).prefill >= 0);
    seconds.push_back((thread_seconds() - before) / kTimes);
  }
  return seconds;
}

void bench_placement(Bench& bench) {
  bench.report(at_most("placement: a look and a decision, 8 instances", place(8, 2000), 3e-6, "x 3 us"));
  bench.report(at_most("placement: a look and a decision, 1,000 instances", place(1000, 200), 50e-6, "x 50 us"));
}

// Seconds from the first token (on P) to the second token (on D) of a prompt for which nothing is computed.
std::vector<double> hand_offs(const ModelConfig& config, int n_tokens, int rounds) {
  class Times final : public EventSink {
   public:
    explicit Times(Clock& clock) : clock_(clock) {}
    void on_event(TokenEvent event) override {
      if (event.token >= 0) seconds.push_back(clock_.now());
    }
    std::vector<double> seconds;

   private:
    Clock& clock_;
  };
  RealClock clock;
  ClusterOptions options;
  options.topology = parse_topology("1P1D").value();
  options.kv_scheme = find_kv_scheme("paged");
  options.kv.shape = kv_shape(config, Dtype::bf16);
  options.kv.pool_bytes = size_t(2 * n_tokens) * options.kv.shape.token_bytes();
  options.kv.prefix_cache = false;
  options.batching = find_batch_policy("chunked");
  options.placement = find_placement_policy("least_loaded");
  options.transport = find_transport("handoff");
  options.step_tokens = n_tokens;
  options.max_model_len = n_tokens + 16;
  options.make_model = [&](int, DeviceQueue&) { return make_null_model(config); };
  auto cluster = Cluster::create(std::move(options), clock).value();
  XPYD_CHECK(cluster->start().ok());
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    auto request = std::make_shared<Request>();
    request->id = uint64_t(i);
    for (int t = 0; t < n_tokens; ++t) request->prompt.push_back((t * 7 + i) % config.vocab);
    request->sampling.temperature = 0;
    request->max_tokens = 2;
    request->ignore_eos = true;
    auto times = std::make_shared<Times>(clock);
    XPYD_CHECK(cluster->submit(request, times).ok() && cluster->wait_idle(60));
    XPYD_CHECK(times->seconds.size() == 2);
    seconds.push_back(times->seconds[1] - times->seconds[0]);
  }
  cluster->stop();
  return seconds;
}

// Seconds to compute the first `n` tokens of a prompt in one step.
double prefill_seconds(const ModelConfig& config, const std::string& dir, ThreadTeam& team, int n) {
  auto weights = load_weights(dir, config, {.dtype = Dtype::bf16, .dummy = true}, team).value();
  auto model = make_llama(std::move(weights), team, n, 1);
  const KvLayout layout{kv_shape(config, Dtype::bf16), KvOrder::layer_major, n, 1};
  Buffer pool(layout.pool_bytes());
  std::vector<KvView> views = {{pool.data(), &layout, nullptr, 0}};
  std::vector<int32_t> tokens(size_t(n), 17), offsets = {0, n}, lengths = {n}, rows = {n - 1};
  std::vector<float> logits(size_t(config.vocab));
  RealClock clock;
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const double start = clock.now();
    compute_step(*model, {tokens, offsets, lengths, views, rows, nullptr}, logits.data());
    if (round == 0) continue;
    const double took = clock.now() - start;
    best = best == 0 ? took : std::min(best, took);
  }
  return best;
}

void bench_hand_off(Bench& bench) {
  constexpr int kPrompt = 4096, kComputed = 128;
  const std::string dir = "experiments/models/llama-1b";
  Result<ModelConfig> config = load_model_config(dir);
  if (!config) {
    std::printf("not run: the folder %s is missing or not a model\n", dir.c_str());
    return;
  }
  std::vector<double> gaps = hand_offs(config.value(), kPrompt, 40);
  const double first_token_s = prefill_seconds(config.value(), dir, bench.team(bench.max_threads()), kComputed) *
                               double(kPrompt / kComputed);
  std::printf("TTFT of a prompt of %d tokens: at least %.1f s (time of %d tokens, times %d)\n", kPrompt, first_token_s,
              kComputed, kPrompt / kComputed);
  bench.report(
      at_most("hand-off: 4,096 tokens, first token to second", gaps, 0.005 * first_token_s, "x 0.5 % of TTFT"));
}

REGISTER_BENCH("control_router", bench_router);
REGISTER_BENCH("control_placement", bench_placement);
REGISTER_BENCH("control_hand_off", bench_hand_off);

}  // namespace
}  // namespace xpyd::experiments
