// mooncake_traces: How long are the prompts and answers of the released traces, and how often is a block requested?
// Paper: Mooncake (FAST'25) Table 2, Fig. 9; arXiv 2407.00079 v4, Figs. 5 and 6.
// Set-up: distributions of prompts, answers and uses of blocks in the two released traces (arXiv, Figs. 5 and 6;
//   FAST'25, Table 2).
// Command: make exp-mooncake_traces (seconds; counted).
// Expected, from another program: 3 M tokens find 37 and 48 % of the tokens of an unlimited cache, 50 M tokens 99 and
//   100 %.
// Found: 3 M tokens find 37 and 48 % of what an endless cache finds (41 and 46); 76 and 58 % of the blocks are used
//   once.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "allocator/eviction.h"
#include "experiments/experiment.h"
#include "experiments/simulate/traces.h"
#include "experiments/simulated.h"

namespace xpyd::experiments::mooncake_traces_experiment {
namespace {

using namespace disagg;

namespace lengths {

std::vector<Values> points(const Setting& setting) {
  if (setting.traces.empty()) return {};
  return {{{"trace", "conversation"}}, {{"trace", "synthetic"}}};
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["trace"];
  const Result<Trace> trace =
      find_trace_format("mooncake")->load(setting.traces + "/mooncake_" + name + ".jsonl", TraceOptions{});
  if (!trace) return trace.error();
  std::vector<double> prompts, outputs, uses;
  std::unordered_map<uint64_t, int> used;
  for (const TraceRequest& r : trace.value().requests) {
    prompts.push_back(r.prompt_tokens), outputs.push_back(r.output_tokens);
    for (uint64_t block : r.blocks) ++used[block];
  }
  for (const auto& [block, n] : used) uses.push_back(n);
  Finding found;
  for (auto [what, of] : {std::pair("prompt", &prompts), {"output", &outputs}, {"uses", &uses}}) {
    std::ranges::sort(*of);
    double sum = 0;
    for (double x : *of) sum += x;
    Values row = {{"what", what}, {"n", of->size()}, {"mean", sum / double(of->size())}, {"max", of->back()}};
    row["ones"] = double(std::ranges::upper_bound(*of, 1) - of->begin()) / double(of->size());
    for (double p : {10., 25., 50., 75., 90., 99.}) row["p" + std::to_string(int(p))] = percentile_seen(*of, p);
    found.rows.push_back(row);
  }
  return found;
}

REGISTER_EXPERIMENT("mooncake_traces", "cpu", points, each<run>);

}  // namespace lengths

// mooncake_traces/eviction: the hits of one prefix cache by its size and eviction policy: the rows of --host-eviction,
// and Belady's, which knows the future. It has no clock and no server, only requests in their order. The cached blocks
// from the prompt's start on are hits.
//
// Expected, from another program, at 5,859 blocks (3 M tokens), conversation and synthetic: LRU .136 and .309, LFU .132
// and .243, length-aware .083 and .091, Belady .353 and .550. LRU finds 37 and 48 % of an unlimited cache's tokens, and
// with 50 M tokens 99 and 100 %.
namespace cache {

using allocator::BlockUse;
using allocator::EvictionRank;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  for (const char* trace : {"conversation", "synthetic"})
    for (const char* policy : {"lru", "lfu", "length_aware", "fifo", "belady"})
      for (int blocks : setting.tiny ? std::vector{100}
                                     : std::vector{195, 1000, 1953, 5859, 10000, 19531, 30000, 50000, 97656, 200000})
        all.push_back({{"trace", trace}, {"policy", policy}, {"blocks", blocks}});
  return all;
}

class Cache {
 public:
  // A null `policy` is Belady's.
  Cache(const allocator::EvictionPolicy* policy, size_t capacity) : policy_(policy), capacity_(capacity) {}
  bool holds(uint64_t id) const { return held_.contains(id); }
  // `next` is the number of the request that asks for the block again.
  void touch(uint64_t id, int position, int64_t next) {
    auto [at, fresh] = held_.try_emplace(id);
    Block& block = at->second;
    if (!fresh) order_.erase({block.rank, id});
    block.use.last_use = ++now_;
    ++block.use.uses;
    block.use.position = position;
    if (fresh) block.use.entered = now_;
    block.rank = policy_ ? policy_->rank(block.use) : EvictionRank{-next, -position};
    order_.emplace(block.rank, id);
  }
  void shrink() {
    for (; held_.size() > capacity_; order_.erase(order_.begin())) held_.erase(order_.begin()->second);
  }

 private:
  struct Block {
    BlockUse use;
    EvictionRank rank;
  };
  const allocator::EvictionPolicy* policy_;
  const size_t capacity_;
  int64_t now_ = 0;
  std::unordered_map<uint64_t, Block> held_;
  std::set<std::pair<EvictionRank, uint64_t>> order_;
};

Finding run(const Values& point, const Trace& trace) {
  const std::string name = point["policy"];
  const allocator::EvictionPolicy* policy = nullptr;
  for (const allocator::EvictionPolicy& row : allocator::kEvictionPolicies)
    if (row.name == name) policy = &row;
  // For each block of each request, the next request that has it.
  const auto n = int64_t(trace.requests.size());
  std::vector<std::vector<int64_t>> next(trace.requests.size());
  std::unordered_map<uint64_t, int64_t> later;
  for (size_t r = trace.requests.size(); r-- > 0;)
    for (uint64_t id : trace.requests[r].blocks) {
      auto [at, fresh] = later.try_emplace(id, n);
      next[r].push_back(at->second);
      at->second = int64_t(r);
    }
  Cache cache(policy, size_t(int(point["blocks"])));
  int64_t hits = 0, blocks = 0, hit_tokens = 0, tokens = 0;
  for (size_t r = 0; r < trace.requests.size(); ++r) {
    const TraceRequest& request = trace.requests[r];
    int64_t found = 0;
    for (uint64_t id : request.blocks) {
      if (!cache.holds(id)) break;
      ++found;
    }
    hits += found, blocks += int64_t(request.blocks.size());
    hit_tokens += std::min(found * trace.block_tokens, int64_t(request.prompt_tokens));
    tokens += request.prompt_tokens;
    for (size_t b = request.blocks.size(); b-- > 0;) cache.touch(request.blocks[b], int(b), next[r][b]);
    cache.shrink();
  }
  return Finding{{{{"capacity_tokens", int64_t(int(point["blocks"])) * trace.block_tokens},
                   {"block_hits", double(hits) / double(blocks)},
                   {"token_hits", double(hit_tokens) / double(tokens)}}},
                 ""};
}

Measure open(const Setting& setting) {
  auto known = std::make_shared<std::map<std::string, Trace>>();
  return [=](const Values& point) -> Result<Finding> {
    const std::string name = point["trace"];
    if (!known->contains(name)) {
      Result<Trace> trace = find_trace_format("mooncake")
                                ->load(setting.traces + "/mooncake_" + name + ".jsonl",
                                       {.limit = setting.tiny ? 200 : 0});
      if (!trace) return trace.error();
      known->emplace(name, std::move(trace).value());
    }
    return run(point, known->at(name));
  };
}

REGISTER_EXPERIMENT("mooncake_traces/eviction", "cpu", points, open);

}  // namespace cache

}  // namespace
}  // namespace xpyd::experiments::mooncake_traces_experiment
