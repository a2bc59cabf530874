// eviction: what one prefix cache of a given size finds of Mooncake's traces, by which block goes first: the rows of
// --host-eviction (allocator/eviction.h), and Belady's, which knows what will be asked for.
//
// No clock and no server: requests in their order; the blocks from the prompt's start on that are there are hits, and
// all of its blocks are touched or taken in, the deepest first; then whoever is ranked lowest goes until the rest fits.
// Mooncake's tables count blocks, its Fig. 9 tokens of capacity.
//
// Arithmetic: the same procedure in another program: at 5,859 blocks, 3 M tokens, LRU .136 and .309
// (conversation, synthetic), LFU .132 and .243, length-aware .083 and .091, Belady .353 and .550; of the tokens that an
// endless cache finds LRU finds 37 and 48 %, and with 50 M tokens 99 and 100 %.
#include "allocator/eviction.h"

#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "disagg/simulate/traces.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::eviction_experiment {
namespace {

using namespace disagg;
using allocator::BlockUse;
using allocator::EvictionRank;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* trace : {"conversation", "synthetic"})
    for (const char* policy : {"lru", "lfu", "length_aware", "belady"})
      for (int blocks : setting.tiny ? std::vector{100}
                                     : std::vector{195, 1000, 1953, 5859, 10000, 19531, 30000, 50000, 97656, 200000})
        all.push_back({{"trace", trace}, {"policy", policy}, {"blocks", blocks}});
  return all;
}

class Cache {
 public:
  // `policy` null: Belady's.
  Cache(const allocator::EvictionPolicy* policy, size_t capacity) : policy_(policy), capacity_(capacity) {}
  bool holds(uint64_t id) const { return held_.contains(id); }
  // `next`: when it is asked for again, a request's number.
  void touch(uint64_t id, int position, int64_t next) {
    BlockUse& use = uses_[id];
    use = {++now_, use.uses + 1, position};
    const EvictionRank rank = policy_ ? policy_->rank(use) : EvictionRank{-next, -position};
    auto [at, fresh] = held_.try_emplace(id, rank);
    if (!fresh) order_.erase({at->second, id});
    at->second = rank;
    order_.emplace(rank, id);
  }
  void shrink() {
    while (held_.size() > capacity_) {
      const uint64_t id = order_.begin()->second;
      order_.erase(order_.begin());
      held_.erase(id);
      uses_.erase(id);
    }
  }

 private:
  const allocator::EvictionPolicy* policy_;
  const size_t capacity_;
  int64_t now_ = 0;
  std::unordered_map<uint64_t, BlockUse> uses_;
  std::unordered_map<uint64_t, EvictionRank> held_;
  std::set<std::pair<EvictionRank, uint64_t>> order_;
};

Finding run(const Values& point, const Trace& trace) {
  const std::string name = point["policy"];
  const allocator::EvictionPolicy* policy = nullptr;
  for (const allocator::EvictionPolicy& row : allocator::kEvictionPolicies)
    if (row.name == name) policy = &row;
  // When each block of each request is asked for again.
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

REGISTER_EXPERIMENT("eviction", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::eviction_experiment
