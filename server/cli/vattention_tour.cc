#include "server/cli/vattention_tour.h"

#include <cstdio>
#include <memory>
#include <span>
#include <utility>

#include "allocator/kv_memory.h"

namespace xpyd::server {
namespace {

constexpr int kRowTokens = 8, kRows = 6, kSlots = 3;

struct Event {
  char who;
  int tokens;  // tokens that it has from now on; 0: it ends
};
// A ends, and C gets its slot and rows; B's third row is mapped. D waits until C has ended. E waits until D has ended,
// and one of B's rows is unmapped for it.
constexpr Event kStory[] = {{'A', 6},  {'B', 7}, {'A', 9},  {'B', 10}, {'A', 0},  {'C', 12}, {'B', 18},
                            {'D', 20}, {'C', 0}, {'D', 20}, {'B', 0},  {'E', 28}, {'D', 0},  {'E', 28}};

struct Owner {
  KvHandle kv = kNoKv;
  int tokens = 0;
};

int rows_of(int tokens) { return (tokens + kRowTokens - 1) / kRowTokens; }

}  // namespace

std::vector<TourStep> vattention_steps() {
  KvOptions kv{.shape = {2, 1, 128, Dtype::f32}, .max_sequence_tokens = 64, .prefix_cache = false};
  kv.vattention = {.page_group_bytes = 4096, .max_sequences = kSlots, .map_ahead = false};
  const KvScheme& scheme = *find_kv_scheme("vattention");
  const size_t row_bytes = scheme.block_bytes(kv);
  kv.pool_bytes = kRows * row_bytes;
  const std::unique_ptr<KvMemory> memory = scheme.make(make_block_pool("vattention", kv).value(), kv);
  std::vector<TourStep> steps;
  std::vector<Owner> sequences(26);
  std::vector<int> mapped(kSlots, 0);
  for (const Event& event : kStory) {
    Owner& one = sequences[size_t(event.who - 'A')];
    TourStep step{.event = std::string(1, event.who)};
    if (event.tokens == 0) {
      step.slot = memory->view(one.kv).slot;
      memory->free(std::exchange(one, {}).kv);
      step.event += " ends";
    } else {
      const std::vector<int32_t> tokens(size_t(event.tokens), event.who);
      step.event += (one.kv == kNoKv ? " starts with " : " grows to ") + std::to_string(event.tokens) + " tokens";
      if (one.kv == kNoKv)
        if (const auto reserved = memory->reserve(tokens, 0)) one.kv = reserved.value().handle;
      if (one.kv != kNoKv && memory->append(one.kv, event.tokens - one.tokens)) {
        memory->commit(one.kv, std::span(tokens).subspan(size_t(one.tokens)));
        one.tokens = event.tokens;
        step.slot = memory->view(one.kv).slot;
      } else {
        if (one.kv != kNoKv && one.tokens == 0) memory->free(std::exchange(one.kv, kNoKv));
        step.event += ": no room";
      }
    }
    memory->check_invariants();
    const KvStats stats = memory->stats();
    step.rows_mapped = int(stats.mapped_bytes / int64_t(row_bytes));
    step.maps = stats.vattention.map_calls, step.unmaps = stats.vattention.unmap_calls;
    std::vector<char> owner(kSlots, ' ');
    std::vector<int> used(kSlots, 0);
    for (size_t w = 0; w < sequences.size(); ++w)
      if (sequences[w].kv != kNoKv) {
        const auto slot = size_t(memory->view(sequences[w].kv).slot);
        owner[slot] = char('A' + w), used[slot] = rows_of(sequences[w].tokens);
        mapped[slot] = std::max(mapped[slot], used[slot]);
        step.rows_in_use += used[slot];
      }
    int sum = 0;
    for (int rows : mapped) sum += rows;
    for (size_t slot = 0; slot < kSlots; ++slot)  // idle rows went to sequences that needed them
      for (; sum > step.rows_mapped && mapped[slot] > used[slot]; --sum) --mapped[slot];
    for (size_t slot = 0; slot < kSlots; ++slot)
      step.slots.push_back(owner[slot] + (" " + std::string(size_t(used[slot]), '#')) +
                           std::string(size_t(mapped[slot] - used[slot]), 'o'));
    XPYD_CHECK(step.rows_in_use == stats.active, step.event + ": the number of rows in use is wrong");
    steps.push_back(std::move(step));
  }
  return steps;
}

int vattention_tour() {
  std::printf(
      "Two layers make 2 x 2 tensors, with page groups of 4 KiB. A page-group row has one page group in each tensor "
      "and holds %d tokens. The pool has %d rows.\n# is a row in use; o is an idle row that stays "
      "mapped\n\n%-34s%-8s%-8s%-8s%6s%8s\n",
      kRowTokens, kRows, "", "slot 0", "slot 1", "slot 2", "maps", "unmaps");
  for (const TourStep& step : vattention_steps())
    std::printf("%-34s%-8s%-8s%-8s%6ld%8ld\n", step.event.c_str(), step.slots[0].c_str(), step.slots[1].c_str(),
                step.slots[2].c_str(), long(step.maps), long(step.unmaps));
  return 0;
}

}  // namespace xpyd::server
