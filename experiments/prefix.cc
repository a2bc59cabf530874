// prefix: What does a shared prefix save: how many tokens are found in the cache, and how does TTFT change?
// Paper: Mooncake (FAST'25) Table 2; vLLM's automatic prefix caching.
// Set-up: prompts of 1,024 tokens, of which `share` is one of two prefixes, one at a time. Real steps of llama-mini
//   with the cache on and off.
// Command: make exp-prefix (a minute; measured, counted).
// Expected: 22 of 24 prompts find the prefix, so hits are 22/24 of the share. The first token takes 1 - share, plus
//   attention to the prefix: below .35 at .75. Mooncake (Fig. 14): .14 at .95 of 128K tokens.
// Found: TTFT falls to .077 with 94 % shared. An endless cache finds 37 and 65 % of the traces' tokens (40 and 66).
#include <algorithm>
#include <map>
#include <memory>

#include "allocator/pool/block_pool.h"
#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/load.h"
#include "experiments/load/prefix_stats.h"
#include "experiments/simulate/traces.h"
#include "experiments/stats.h"

namespace xpyd::experiments::prefix_experiment {
namespace {

namespace shared {

constexpr double kShares[] = {0, 0.5, 0.75, 0.9375};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* cache : {"on", "off"})
    for (double share : kShares)
      if (cache == std::string("on") ? !setting.tiny || share == 0.5 : share == 0.75)
        all.push_back({{"cache", cache}, {"share", share}});
  return all;
}

Measure open(const Setting& setting) {
  auto bed = std::make_shared<Bed>(
      setting, setting.tiny ? std::vector<std::string>{"experiments/models/llama-tiny", "--kv-bytes", "4MiB"}
                            : std::vector<std::string>{"experiments/models/llama-mini", "--kv-bytes", "256MiB",
                                                       "--max-model-len", "2048", "--max-batch", "16"});
  return [=](const Values& point) -> Result<Finding> {
    Result<std::string> wrong = bed->open(
        {"--topology", "1C", "--chunk-tokens", "512", "--prefix-cache", point["cache"]});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    // Without a cache every prompt takes the same time, so fewer are asked.
    const int prompt = setting.tiny ? 128 : 1024, n = setting.tiny ? 4 : point["cache"] == "off" ? 8 : 24;
    const int shared = int(double(point["share"]) * prompt);
    const std::vector<BenchRequest> load = shared_prefix_load(n, 2, shared, prompt - shared, 2, setting.seed).requests;
    Run run = run_load(bed->build(), load, {});
    if (!run.wrong.empty()) return Finding{{}, run.wrong};
    char hash[20];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(run.logits_hash));
    const Summary hits = summarize(std::vector<double>(run.ttft_ms.begin() + 2, run.ttft_ms.end()));
    return Finding{{{{"hit_share", run.hit_share},
                     {"ttft_ms", hits.mean},  // of prompts that could find their prefix
                     {"ttft_ms_longest", hits.max},
                     {"first_ttft_ms", run.ttft_ms.front()},
                     {"logits_hash", hash}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("prefix", "cpu", points, open);

}  // namespace shared

// prefix/repetition: how much the prompts of Mooncake's traces repeat, by the radix-tree metric of the xPyD notes
// (`xpyd prefix-stats`) and by the hits of an unlimited cache.
//
// Expected, from another program, N = 2, L = 0: conversation R_leaf .194, R_conv .417, tokens .374; synthetic tokens
// .651.
namespace repetition {

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* trace : {"conversation", "synthetic"})
    for (int n : {2, 10, 100})
      for (int length : {0, 2048}) all.push_back({{"trace", trace}, {"min_count", n}, {"min_length", length}});
  return all;
}

Measure open(const Setting& setting) {
  auto inputs = std::make_shared<std::map<std::string, PrefixInput>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string trace = point["trace"];
    if (!inputs->count(trace)) {
      Result<PrefixInput> input = read_prefix_input(setting.traces + "/mooncake_" + trace + ".jsonl");
      if (!input) return input.error();
      (*inputs)[trace] = std::move(input).value();
    }
    const PrefixStats s = prefix_stats((*inputs)[trace], point["min_count"], point["min_length"]);
    return Finding{{{{"r_leaf", s.r_leaf},
                     {"r_conv", s.r_conv},
                     {"leaves", s.leaves},
                     {"prompts", s.prompts},
                     {"block_reuse", s.unit_reuse},
                     {"token_reuse", s.length_reuse}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("prefix/repetition", "cpu", points, open);

}  // namespace repetition

// prefix/radix: the tokens that a prefix cache by token finds beyond one by blocks, on the server's own memory. Chats
// in random turns with 16 system prompts of ragged lengths; and the beginning of Mooncake's trace, which names blocks
// of 512 tokens.
//
// Expected: a prefix that ends anywhere loses (b - 1) / 2 tokens with whole blocks: 7.5 of 16, 63.5 of 128, and none
// with a tree. All b that divide 512 find the same in the trace. SGLang with pages of b rounds its tree down, so no
// request may differ.
namespace radix {

using namespace allocator;

struct Request {
  std::vector<int32_t> tokens;  // prompt and answer
  int prompt;
};

std::vector<int32_t> text(Random& random, int tokens) {
  std::vector<int32_t> all(static_cast<size_t>(tokens));
  for (int32_t& t : all) t = int32_t(random.below(128'000));
  return all;
}
int between(Random& random, int low, int high) { return low + int(random.below(uint64_t(high - low + 1))); }

void say(Request& request, Random& random, int question, int answer) {
  const std::vector<int32_t> asked = text(random, question), answered = text(random, answer);
  request.tokens.insert(request.tokens.end(), asked.begin(), asked.end());
  request.prompt = int(request.tokens.size());
  request.tokens.insert(request.tokens.end(), answered.begin(), answered.end());
}

std::vector<Request> chats(bool tiny, uint64_t seed) {
  Random random(seed);
  const int n_sessions = tiny ? 5 : 200, turns = 12;
  std::vector<std::vector<int32_t>> systems;
  for (int i = 0; i < 16; ++i) systems.push_back(text(random, between(random, 1000, 3000)));
  std::vector<Request> sessions, all;
  for (int s = 0; s < n_sessions; ++s) sessions.push_back({systems[random.below(16)], 0});
  std::vector<int> order;
  for (int i = 0; i < n_sessions * turns; ++i) order.push_back(i % n_sessions);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  for (int s : order) {
    say(sessions[size_t(s)], random, between(random, 20, 300), between(random, 20, 300));
    all.push_back(sessions[size_t(s)]);
  }
  return all;
}

Result<std::vector<Request>> mooncake(const std::string& folder, bool tiny) {
  const disagg::TraceFormat& format = *disagg::find_trace_format("mooncake");
  Result<disagg::Trace> trace = format.load(folder + "/mooncake_conversation.jsonl", {.limit = tiny ? 10 : 300});
  if (!trace) return trace.error();
  std::vector<Request> all;
  for (const disagg::TraceRequest& r : trace.value().requests) {
    Request request;
    for (uint64_t id : r.blocks) {
      Random random(id);
      const std::vector<int32_t> block = text(random, format.block_tokens);
      request.tokens.insert(request.tokens.end(), block.begin(), block.end());
    }
    request.tokens.resize(size_t(request.prompt = r.prompt_tokens));
    Random random(all.size() + 77);
    const std::vector<int32_t> answer = text(random, std::min(r.output_tokens, 400));
    request.tokens.insert(request.tokens.end(), answer.begin(), answer.end());
    all.push_back(std::move(request));
  }
  return all;
}

struct Cache {
  Cache(int block_tokens, bool radix, int64_t room) {
    KvOptions o{.shape = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 1, .dtype = Dtype::bf16},
                .block_tokens = block_tokens,
                .radix = radix};
    o.pool_bytes = size_t(room / block_tokens) * size_t(block_tokens) * o.shape.token_bytes();
    kv = find_kv_scheme("paged")->make(make_block_pool("paged", o).value(), o);
  }
  // Uses the memory as an engine does. Returns the cached tokens.
  int run(std::span<const int32_t> tokens, int prompt) {
    const KvReservation r = kv->reserve(tokens.first(size_t(prompt)), 0).value();
    const std::span<const int32_t> rest = tokens.subspan(size_t(r.cached_tokens));
    XPYD_CHECK(kv->append(r.handle, int(rest.size())));
    kv->commit(r.handle, rest);
    kv->free(r.handle);
    return r.cached_tokens;
  }
  std::unique_ptr<KvMemory> kv;
};

struct Load {
  std::vector<Request> requests;
  std::vector<int> longest;  // longest common prefix with an earlier request, without the prompt's last token, by
                             // comparing all pairs
  int64_t tokens = 0;        // number of distinct tokens
};

Load look(std::vector<Request> requests) {
  Load load{.requests = std::move(requests), .longest = {}};
  std::vector<const Request*> before;
  for (const Request& r : load.requests) {
    int best = 0;
    for (const Request* b : before) {
      const size_t n = std::min(b->tokens.size(), size_t(r.prompt));
      // A request that differs at or before the best length so far cannot be longer.
      if (n <= size_t(best) || b->tokens[size_t(best)] != r.tokens[size_t(best)]) continue;
      best = std::max(best,
                      int(std::mismatch(b->tokens.begin(), b->tokens.begin() + ptrdiff_t(n), r.tokens.begin()).first -
                          b->tokens.begin()));
    }
    load.longest.push_back(std::min(best, r.prompt - 1));
    load.tokens += int64_t(r.tokens.size()) - best;
    before.push_back(&r);
  }
  return load;
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* load : {"chats", "mooncake"})
    for (int block : {1, 16, 128})
      for (const char* cache : {"blocks", "radix"})
        if (*load == 'c' || !setting.traces.empty())
          all.push_back({{"load", load}, {"block", block}, {"cache", cache}});
  return all;
}

Measure open(const Setting& setting) {
  auto loads = std::make_shared<std::map<std::string, Load>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string name = point["load"];
    if (!loads->count(name)) {
      Result<std::vector<Request>> requests = name == "mooncake" ? mooncake(setting.traces, setting.tiny)
                                                                 : chats(setting.tiny, setting.seed);
      if (!requests) return requests.error();
      (*loads)[name] = look(std::move(requests).value());
    }
    const Load& load = loads->at(name);
    const int block = point["block"];
    const bool radix = point["cache"] == std::string("radix");
    int64_t longest = 0, hits = 0, hit_tokens = 0, lost = 0, differ = 0;
    for (const Request& r : load.requests) longest = std::max(longest, int64_t(r.tokens.size()));
    // Every sequence may end in a block of its own, and may leave another sequence's path within a block.
    Cache cache(block, radix, load.tokens + int64_t(load.requests.size()) * 2 * block + longest);
    for (size_t i = 0; i < load.requests.size(); ++i) {
      const Request& r = load.requests[i];
      const int hit = cache.run(r.tokens, r.prompt);
      // The hits of SGLang with page_size 1, or with pages of this block size.
      const int rule = radix ? load.longest[i] : load.longest[i] / block * block;
      hit_tokens += hit, differ += hit != rule;
      hits += load.longest[i] > 0, lost += load.longest[i] - hit;
    }
    cache.kv->check_invariants();
    return Finding{{{{"requests", load.requests.size()},
                     {"hits", hits},
                     {"hit_tokens", hit_tokens},
                     {"lost_per_hit", double(lost) / double(std::max<int64_t>(1, hits))},
                     {"differ", differ}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("prefix/radix", "cpu", points, open);

}  // namespace radix

}  // namespace
}  // namespace xpyd::experiments::prefix_experiment
