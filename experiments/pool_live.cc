// pool_live: the pool on this machine: real instances, a real wire, a small model. Shapes to hold beside figures of
// other sizes, no values: what is published is of cards that compute a thousand times as fast.
//
// llama-micro in f32, instances of one thread each, shm between them. Prompts of 320 tokens, one at a time, to the two
// instances in turn, so that what one has computed is asked for at the other. What a prompt gives must not depend on
// where its KV came from: equal logits, or nothing counts.
//
// `rate` (FAST'25, Fig. 13: TTFT against the network's rate, and the line of computing): a prompt is computed by one
// instance (`computed`), then asked at the other (`fetched`), over a wire that is held back to the rate at which its KV
// takes 1 / `x` of the time that this one took: a post is over when a link of that rate would have carried it. Each
// ratio is of one pair, one after the other; each rate's first pair is not counted, so that `cost` has seen the wire,
// and both have computed three prompts before. Arithmetic. always: 1 / x and a step of one token (1 ms of 40 to 80),
// some questions between threads: 4 at x = 0.25 (3.8 to 4.6), 0.5 at 2 (0.4 to 0.7), 0.12 to 0.35 at 8. cost: from 2 on
// as always; at 0.6 its first fetch takes 1.7 times what it saves and tells what the wire is: 1 from then on (0.75 to
// 1.35, as two prompts computed one after the other waver). At 0.25 the first fetch is given up
// when it has taken twice what it saves, and tells of the wire by what has come of it: 1 from then on as well.
//
// `shares` (wde's experiment 4, eleven shares of a prompt that are known): TTFT where the other instance has it
// (`pool`), where its own does (`device`), where nobody does (`none`), over a wire of x = 5, as their 3B's link.
// Arithmetic. device / none = 1 - share and a step; pool / none = 1 - share + share / 5: 0.45 to 0.9 at a half, 0.15 to
// 0.4 at all of it.
//
// `caches` (FAST'25, Fig. 10: one cache for all against one for each): six conversations of four turns of 64 tokens
// more each, at random times, three instances on two cores: placed at random, by Algorithm 1 without transfers
// (`local`), with them (`global`). Arithmetic. A turn finds 0, 1/2, 2/3 and 3/4 of its prompt somewhere, .6 of all
// tokens; at random a third of that or, of a turn before the last one, a little more: .2 to .4. local loses it where
// the holder is busy: .4 to .62, global .5 to .62, so one is 0.8 to 2 of the other, by when the turns come.
//
// `swap_out` (wde's experiment 3: eight chunk sizes, prefix cache on and off): prompts of 128 tokens, by two clusters
// in turn, of which one copies all KV out to a host tier from which others may fetch it and tells of it (`with`),
// chunks of 128 to 8. Arithmetic. 768 KiB beside 20 to 40 ms: 0.1 to 0.2 ms of a copying thread, which has the core of
// the other instance: 0.85 to 1.15, for the machine's own wavering (published 0.94 to 1.02).
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>

#include "base/random.h"
#include "base/stats.h"
#include "disagg/transport/forwarding.h"
#include "experiments/offload.h"

namespace xpyd::experiments::pool_live_experiment {
namespace {

using namespace disagg;

// ---- a wire that is held back

std::atomic<double> wire_bytes_per_s{0};  // 0: it is not

class HeldBack final : public ForwardingTransport {
 public:
  HeldBack(std::unique_ptr<KvTransport> inner, Clock& clock) : ForwardingTransport(std::move(inner)), clock_(clock) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = inner().post(transfer, plan);
    const double rate = wire_bytes_per_s;
    free_s_ = std::max(free_s_, clock_.now()) + (rate > 0 ? double(plan.bytes) / rate : 0);
    due_s_[id] = free_s_;
    return id;
  }
  TransferState poll(TransferId id) override {
    if (clock_.now() < due_s_.at(id)) return TransferState::in_flight;
    const TransferState state = inner().poll(id);
    if (state != TransferState::in_flight) due_s_.erase(id);
    return state;
  }
  void cancel(TransferId id) override {
    due_s_.at(id) = 0;
    inner().cancel(id);
  }

 private:
  Clock& clock_;
  double free_s_ = 0;
  std::map<TransferId, double> due_s_;
};

Result<std::unique_ptr<KvTransport>> make_held_back(const TransportOptions& options) {
  Result<std::unique_ptr<KvTransport>> inner = find_transport("shm")->make(options);
  if (!inner) return inner;
  return {std::make_unique<HeldBack>(std::move(inner).value(), *options.clock)};
}

const TransportRow& held_back() {
  static const TransportRow row = [] {
    TransportRow held = *find_transport("shm");
    held.name = "held back", held.make = make_held_back;
    return held;
  }();
  return row;
}

const char* pool_model(const Setting& setting) {
  return setting.tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-micro";
}

Result<std::unique_ptr<Stack>> open_pool(const Setting& setting, const std::vector<std::string>& more) {
  std::vector<std::string> words = {pool_model(setting), "--load-format", "dummy", "--transport", "shm"};
  words.insert(words.end(), {"--kv-bytes", setting.tiny ? "4MiB" : "16MiB", "--max-batch", "8", "--threads", "1"});
  if (!setting.tiny) words.insert(words.end(), {"--max-model-len", "512"});
  words.insert(words.end(), more.begin(), more.end());
  Result<Options> parsed = Options::parse(option_table(), "serve", words, 1);
  if (!parsed) return parsed.error();
  if (Status status = check_options(parsed.value(), "serve"); !status) return status.error();
  Result<std::unique_ptr<Stack>> made = prepare_stack(parsed.value());
  if (!made) return made;
  Stack& stack = *made.value();
  stack.options.transport = &held_back();
  if (Status status = open_backend(stack); !status) return status.error();
  Result<std::unique_ptr<Cluster>> cluster = Cluster::create(stack.options, stack.clock);
  if (!cluster) return cluster.error();
  stack.cluster = cluster.value().get();
  stack.runtime = std::move(cluster).value();
  if (Status status = stack.cluster->start(); !status) return status.error();
  return made;
}

// ---- one request after the other

struct One {
  double ms = 0, hit_share = 0;
  uint64_t logits_hash = 0;
};

class Pool {
 public:
  Pool(const Setting& setting, const std::vector<std::string>& options) : made_(open_pool(setting, options)) {}
  Stack& stack() { return *made_.value(); }
  Status opened() const { return made_ ? ok() : Status(made_.error()); }
  One ask(const BenchRequest& request) {
    Run run = run_load(stack(), {request}, {});
    if (!run.wrong.empty() && wrong.empty()) wrong = run.wrong;
    return run.ttft_ms.empty() ? One{} : One{run.ttft_ms[0], run.hit_share, run.logits_hash};
  }
  int64_t sum(int64_t FetchStats::*of) {
    int64_t sum = 0;
    for (const auto& instance : stack().cluster->instances()) sum += instance->stats().fetch.*of;
    return sum;
  }
  std::string wrong;

 private:
  Result<std::unique_ptr<Stack>> made_;
};

Values row(const char* arm, double x, int sample, double ms, double hit_share, int64_t given_up = 0) {
  return {{"arm", arm}, {"x", x}, {"sample", sample}, {"ms", ms}, {"hit_share", hit_share}, {"given_up", given_up}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all = {{{"part", "rate"}, {"option", "always"}},
                             {{"part", "rate"}, {"option", "cost"}},
                             {{"part", "shares"}, {"option", "always"}},
                             {{"part", "caches"}, {"option", "always"}}};
  for (const char* cache : {"on", "off"}) all.push_back({{"part", "swap_out"}, {"option", cache}});
  return setting.tiny ? std::vector<Values>{all[0], all[2], all[3], all[4]} : all;
}

constexpr int kSamples = 6;

struct Sizes {
  int tokens, pairs;
};
Sizes sizes(const Setting& setting) { return setting.tiny ? Sizes{48, 1} : Sizes{320, kSamples}; }

// The wire at which KV takes 1 / x of `computed_ms`.
void hold_back(const Setting& setting, double x, double computed_ms) {
  const double token_bytes = double(kv_shape(load_model_config(pool_model(setting)).value(), Dtype::f32).token_bytes());
  wire_bytes_per_s = x > 0 ? x * sizes(setting).tokens * token_bytes / (1e-3 * computed_ms) : 0;
}

std::vector<std::string> pair_options(const std::string& fetch) {
  return {"--topology", "2C", "--placement", "round_robin", "--kv-fetch", fetch};
}

Result<Finding> rate(const std::string& policy, const Setting& setting) {
  Finding found;
  int number = 0;
  int64_t fetched_tokens = 0, n_given_up = 0;  // (a tiny one may be too slow on a busy machine)
  for (double x : setting.tiny ? std::vector<double>{2} : std::vector<double>{.25, .6, 2, 8}) {
    Pool pool(setting, pair_options(policy));  // what it knows of its wire is of this rate alone
    if (Status status = pool.opened(); !status) return status.error();
    const auto prompt = [&] { return document(setting.seed, number++, sizes(setting).tokens + 1, 1); };
    for (int i = 0; i < 6; ++i) pool.ask(prompt());  // what is slow because it is the first is forgotten
    for (int pair = -1; pair < sizes(setting).pairs; ++pair) {
      const BenchRequest request = prompt();
      const One computed = pool.ask(request);
      hold_back(setting, x, computed.ms);
      const int64_t before = pool.sum(&FetchStats::failed);
      const One fetched = pool.ask(request);
      const int64_t given_up = pool.sum(&FetchStats::failed) - before;
      if (!pool.wrong.empty()) return Finding{{}, pool.wrong};
      if (computed.logits_hash != fetched.logits_hash) return Finding{{}, "KV that was fetched gives other logits"};
      if (pair < 0) continue;
      found.rows.push_back(row("computed", x, pair, computed.ms, computed.hit_share));
      found.rows.push_back(row("fetched", x, pair, fetched.ms, fetched.hit_share, given_up));
    }
    fetched_tokens += pool.sum(&FetchStats::tokens), n_given_up += pool.sum(&FetchStats::failed);
  }
  if (fetched_tokens == 0 && !(setting.tiny && n_given_up > 0)) found.wrong = "nothing was fetched";
  return found;
}

Result<Finding> shares(const Setting& setting) {
  Pool pool(setting, pair_options("always"));
  if (Status status = pool.opened(); !status) return status.error();
  const int tokens = sizes(setting).tokens;
  Finding found;
  int number = 1000;
  hold_back(setting, 0, 1);
  std::vector<double> computed_ms;
  for (int i = 0; i < 6; ++i) {
    const One one = pool.ask(document(setting.seed, number++, tokens + 1, 1));
    if (i >= 2) computed_ms.push_back(one.ms);  // when memory is touched
  }
  hold_back(setting, 5, summarize(computed_ms).mean);
  for (int sample = 0; sample < sizes(setting).pairs; ++sample)
    for (int tenth = 0; tenth <= 10; tenth += setting.tiny ? 5 : 1) {
      const int known = tokens * tenth / 10 / 16 * 16;
      const auto prompt = [&](int of, int tail) {
        return document(setting.seed, of, known, 1, tokens + 1 - known, tail);
      };
      const int of = number++;
      pool.ask(document(setting.seed, of, std::max(known, 16) + 1, 1));  // the first instance
      const One there = pool.ask(prompt(of, 100)), here = pool.ask(prompt(of, 200)),
                none = pool.ask(prompt(number++, 1));
      if (!pool.wrong.empty()) return Finding{{}, pool.wrong};
      for (const auto& [arm, one] : {std::pair{"pool", there}, {"device", here}, {"none", none}})
        found.rows.push_back(row(arm, tenth / 10., sample, one.ms, one.hit_share));
    }
  if (pool.sum(&FetchStats::tokens) == 0 && !(setting.tiny && pool.sum(&FetchStats::failed) > 0))
    found.wrong = "nothing was fetched";
  return found;
}

Result<Finding> caches(const Setting& setting) {
  const int conversations = setting.tiny ? 2 : 6, turns = 4, step = setting.tiny ? 16 : 64;
  const double rate = 32;  // requests a second
  hold_back(setting, 0, 1);
  const std::pair<const char*, const char*> arms[] = {
      {"random", "random"}, {"local", "prefix_aware"}, {"global", "mooncake"}};
  std::vector<std::unique_ptr<Pool>> pools;
  for (const auto& [arm, placement] : arms) {
    pools.push_back(
        std::make_unique<Pool>(setting, std::vector<std::string>{"--topology", "3C", "--placement", placement}));
    if (Status status = pools.back()->opened(); !status) return status.error();
  }
  Finding found;
  for (int sample = 0; sample < sizes(setting).pairs; ++sample) {
    Random random(setting.seed * 100 + uint64_t(sample));
    std::vector<int> order, turn(size_t(conversations), 0);
    for (int i = 0; i < conversations * turns; ++i) order.push_back(i / turns);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::vector<BenchRequest> requests;
    std::vector<double> due;
    double now = 0;
    for (int of : order) {
      requests.push_back(
          document(setting.seed, 2000 + 100 * sample + of, ++turn[size_t(of)] * step + 1, setting.tiny ? 1 : 4));
      due.push_back(now += setting.tiny ? 0 : random.exponential() / rate);
    }
    uint64_t hash = 0;
    for (size_t arm = 0; arm < pools.size(); ++arm) {
      const size_t at = (arm + size_t(sample)) % pools.size();
      Run run = run_load(pools[at]->stack(), requests, due);
      if (!run.wrong.empty()) return Finding{{}, run.wrong};
      if (std::exchange(hash, run.logits_hash) != run.logits_hash && arm > 0)
        return Finding{{}, "other logits by where prompts went"};
      found.rows.push_back(row(arms[at].first, 0, sample, run.result.ttft_ms.mean, run.hit_share));
    }
  }
  return found;
}

Result<Finding> swap_out(const std::string& cache, const Setting& setting) {
  const int tokens = setting.tiny ? 32 : 128;
  hold_back(setting, 0, 1);
  Finding found;
  int number = 5000;
  for (int chunk : setting.tiny ? std::vector{32, 8} : std::vector{128, 96, 64, 48, 32, 24, 16, 8}) {
    std::vector<std::string> options = {"--topology",     "2C", "--chunk-tokens", std::to_string(chunk),
                                        "--prefix-cache", cache};
    Pool without(setting, options);
    options.insert(options.end(), {"--kv-fetch", "cost", "--host-kv-bytes", setting.tiny ? "4MiB" : "16MiB"});
    Pool with(setting, options);
    for (const Pool* pool : {&without, &with})
      if (Status status = pool->opened(); !status) return status.error();
    for (int turn = -1; turn < sizes(setting).pairs; ++turn) {
      const BenchRequest request = document(setting.seed, number++, tokens, 1);
      One one[2];
      for (int i = 0; i < 2; ++i) {
        const bool second = (turn + 1 + i) % 2;
        one[second] = (second ? with : without).ask(request);
      }
      for (const Pool* pool : {&without, &with})
        if (!pool->wrong.empty()) return Finding{{}, pool->wrong};
      if (one[0].logits_hash != one[1].logits_hash) return Finding{{}, "other logits with tiers than without"};
      if (turn < 0) continue;
      found.rows.push_back(row("without", chunk, turn, one[0].ms, one[0].hit_share));
      found.rows.push_back(row("with", chunk, turn, one[1].ms, one[1].hit_share));
    }
  }
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) -> Result<Finding> {
    const std::string part = point["part"], option = point["option"];
    return part == "rate"     ? rate(option, setting)
           : part == "shares" ? shares(setting)
           : part == "caches" ? caches(setting)
                              : swap_out(option, setting);
  };
}

REGISTER_EXPERIMENT("pool_live", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pool_live_experiment
