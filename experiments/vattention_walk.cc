// vattention_walk: vAttention, step by step (the notes' Fig. 7): two sequences come and grow, page groups appear behind
// their addresses, one ends and its groups stay for who comes next.
//
// The real memory, mapping when it is needed. Two layers, so 2 x 2 = 4 tensors; a token of one is 512 bytes, a page
// group 4 KiB: a row of 4 groups, one in each tensor, is 8 tokens. The pool has 6 rows. A line of the table is what is so
// after the event.
//
// Arithmetic. Every sequence has ceil(tokens / 8) rows: A 6 tokens 1, B 7 tokens 1; three more of each, 9 and 10, 2 each;
// so far 4 rows, 4 maps each. A ends: its rows stay mapped, idle. C has 12 tokens: A's slot, 2 rows, no map. B grows to 18:
// a third row, 4 maps. D has 20 tokens and wants 3 rows: one is free, and is mapped; nothing is idle, so it waits. C ends:
// D has C's slot with 2 rows and the free one. B ends and E wants 4 rows for 28 tokens: B's 3 and none that is free; it
// waits until D ends, has D's slot with its 3 rows, and one of B's is unmapped there and mapped here.
#include <algorithm>
#include <memory>

#include "allocator/kv_memory.h"
#include "experiments/experiment.h"

namespace xpyd::experiments::vattention_walk_experiment {
namespace {

constexpr int kRowTokens = 8, kRows = 6;

struct Event {
  char who;
  int tokens;  // that it has from now on; 0: it ends
};
constexpr Event kStory[] = {{'A', 6},  {'B', 7},  {'A', 9},  {'B', 10}, {'A', 0},  {'C', 12}, {'B', 18},
                            {'D', 20}, {'C', 0},  {'D', 20}, {'B', 0},  {'E', 28}, {'D', 0},  {'E', 28}};

std::vector<Values> points(const Setting&) { return {Values{{"row_tokens", kRowTokens}}}; }

struct Walker {
  KvHandle kv = kNoKv;
  int tokens = 0;
};

Result<Finding> walk() {
  KvOptions kv{.shape = {2, 1, 128, Dtype::f32}, .max_sequence_tokens = 64, .prefix_cache = false};
  kv.vattention = {.page_group_bytes = 4096, .max_sequences = 3, .map_ahead = false};
  const KvScheme& scheme = *find_kv_scheme("vattention");
  kv.pool_bytes = size_t(kRows) * scheme.block_bytes(kv);
  auto pool = make_block_pool("vattention", kv);
  if (!pool) return pool.error();
  const std::unique_ptr<KvMemory> memory = scheme.make(std::move(pool).value(), kv);
  Finding found;
  std::vector<Walker> walkers(26);
  for (const Event& event : kStory) {
    Walker& one = walkers[size_t(event.who - 'A')];
    const std::string who(1, event.who);
    std::string text;
    int slot = -1;
    if (event.tokens == 0) {
      slot = memory->view(one.kv).slot;
      memory->free(one.kv);
      one = {};
      text = who + " ends";
    } else {
      const std::vector<int32_t> tokens(size_t(event.tokens), event.who);
      text = who + (one.kv == kNoKv ? " comes with " : " grows to ") + std::to_string(event.tokens) + " tokens";
      if (one.kv == kNoKv) {
        const auto reserved = memory->reserve(tokens, 0);
        if (reserved) one.kv = reserved.value().handle;
      }
      if (one.kv != kNoKv && memory->append(one.kv, event.tokens - one.tokens)) {
        memory->written(one.kv, std::span(tokens).subspan(size_t(one.tokens)));
        one.tokens = event.tokens;
        slot = memory->view(one.kv).slot;
      } else {
        if (one.kv != kNoKv && one.tokens == 0) memory->free(std::exchange(one.kv, kNoKv));
        text += ": no room";
      }
    }
    memory->check_invariants();
    const KvStats stats = memory->stats();
    int active = 0;
    for (const Walker& w : walkers) active += (w.tokens + kRowTokens - 1) / kRowTokens;
    if (stats.active != active) return Finding{{}, text + ": " + std::to_string(stats.active) + " rows are in use"};
    found.rows.push_back({{"step", int(found.rows.size() + 1)},
                          {"event", text},
                          {"slot", slot},
                          {"rows_in_use", stats.active},
                          {"rows_idle", int(stats.mapped_bytes / int64_t(scheme.block_bytes(kv))) - stats.active},
                          {"rows_unmapped", stats.capacity - int(stats.mapped_bytes / int64_t(scheme.block_bytes(kv)))},
                          {"maps", stats.vattention.map_calls},
                          {"unmaps", stats.vattention.unmap_calls}});
  }
  return found;
}

Measure open(const Setting&) {
  return [](const Values&) { return walk(); };
}

REGISTER_EXPERIMENT("vattention_walk", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::vattention_walk_experiment
