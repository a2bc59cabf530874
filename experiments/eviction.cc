// eviction: what one prefix cache of a given size finds of Mooncake's traces, by which block goes first: the rows of
// --host-eviction (allocator/eviction.h), and Belady's, which knows what will be asked for.
//
// No clock and no server: requests in their order; the blocks from the prompt's start on that are there are hits, and
// all of its blocks are touched or taken in, the deepest first; then whoever is ranked lowest goes until the rest fits.
// Mooncake's tables count blocks, its Fig. 9 tokens of capacity. `in_flight`: the blocks of so many last requests do
// not go, whoever is ranked lowest, as those of a reader do not in a tier; what then finds no room is not taken in.
//
// Arithmetic: the same procedure in another program: at 5,859 blocks, 3 M tokens, LRU .136 and .309
// (conversation, synthetic), LFU .132 and .243, length-aware .083 and .091, Belady .353 and .550; of the tokens that an
// endless cache finds LRU finds 37 and 48 %, and with 50 M tokens 99 and 100 %; FIFO .125 and .301. The conversation's
// requests come every 0.3 s. One that takes 20 s has 64 beside it, of 24 blocks each: 1,500 of 5,859 are spoken for,
// and Belady's .353 becomes what it has with the rest, .335. LRU would not have let them go anyway.
#include "allocator/eviction.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

#include "experiments/experiment.h"
#include "experiments/simulate/traces.h"

namespace xpyd::experiments::eviction_experiment {
namespace {

using namespace disagg;
using allocator::BlockUse;
using allocator::EvictionRank;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  if (setting.traces.empty()) return all;
  std::vector<std::string> policies;
  for (const allocator::EvictionPolicy& row : allocator::kEvictionPolicies) policies.push_back(row.name);
  policies.push_back("belady");
  for (const char* trace : {"conversation", "synthetic"})
    for (const std::string& policy : policies)
      for (int in_flight : {0, 64})
        for (int blocks : setting.tiny ? std::vector{100}
                                       : std::vector{195, 1000, 1953, 5859, 10000, 19531, 30000, 50000, 97656, 200000})
          if (in_flight == 0 || blocks == 5859 || setting.tiny)
            all.push_back({{"trace", trace}, {"policy", policy}, {"blocks", blocks}, {"in_flight", in_flight}});
  return all;
}

class Cache {
 public:
  // `policy` null: Belady's.
  Cache(const allocator::EvictionPolicy* policy, size_t capacity) : policy_(policy), capacity_(capacity) {}
  bool holds(uint64_t id) const { return held_.contains(id); }
  // `next`: when it is asked for again, a request's number. It stays until a release().
  void touch(uint64_t id, int position, int64_t next) {
    auto [at, fresh] = held_.try_emplace(id);
    Block& block = at->second;
    leave_order(id, block);
    ++block.pins;
    block.use.last_use = ++now_;
    ++block.use.uses;
    block.use.position = position;
    block.next = next;
    if (fresh) block.use.entered = now_;
  }
  void release(uint64_t id) {
    const auto at = held_.find(id);
    if (at != held_.end() && --at->second.pins == 0) enter_order(id, at->second);
  }
  void shrink() {
    while (held_.size() > capacity_ && !order_.empty()) {
      const uint64_t id = order_.begin()->second;
      leave_order(id, held_.at(id));
      held_.erase(id);
    }
  }
  // Of the last request's: it found no room beside the others.
  bool overfull() const { return held_.size() > capacity_; }
  void drop(uint64_t id) {
    const auto at = held_.find(id);
    if (--at->second.pins == 0) held_.erase(at);
  }

 private:
  struct Block {
    BlockUse use;
    int64_t next = 0;
    int pins = 0;
    EvictionRank rank;
    bool in_order = false;
  };
  void enter_order(uint64_t id, Block& block) {
    block.rank = policy_ ? policy_->rank(block.use) : EvictionRank{-block.next, -block.use.position};
    order_.emplace(block.rank, id);
    block.in_order = true;
  }
  void leave_order(uint64_t id, Block& block) {
    if (std::exchange(block.in_order, false)) order_.erase({block.rank, id});
  }

  const allocator::EvictionPolicy* policy_;
  const size_t capacity_;
  int64_t now_ = 0;
  std::unordered_map<uint64_t, Block> held_;
  std::set<std::pair<EvictionRank, uint64_t>> order_;  // of those that may go
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
  std::deque<std::vector<uint64_t>> in_flight;  // what each of them has in the cache
  const auto let_go = [&] {
    for (size_t b = in_flight.front().size(); b-- > 0;) cache.release(in_flight.front()[b]);
    in_flight.pop_front();
  };
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
    in_flight.push_back(request.blocks);
    while (in_flight.size() > size_t(int(point["in_flight"]))) let_go();
    cache.shrink();
    while (cache.overfull() && !in_flight.empty() && !in_flight.back().empty()) {
      cache.drop(in_flight.back().back());
      in_flight.back().pop_back();
    }
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
