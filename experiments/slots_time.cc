// slots_time: TurboMind's slots as rows over time: whose KV each of them holds and how much of it, and how many of them
// have memory, by --slot-prealloc.
//
// Nothing is computed: 12 conversations of turns in 6 slots of 1,024 tokens, at most 4 turns at once. A turn brings 40
// to 200 tokens and a reply of 20 to 120, eight tokens a tick; whose turn it is is drawn. A row grows while its
// sequence is served, stays when the turn ends (idle), goes on where the conversation comes back to it (a hit), and is
// another's from 0 on when no slot is free and it is the one that ended first. A conversation of more than 600 tokens
// ends and begins anew, so its slot shrinks to what begins there.
//
// A row of the result is a tick; a cell says whose slot it is, its tokens, and + while it is served: `c 412 +`. Of the
// first draw all ticks are kept, of the others the last.
//
// Arithmetic. 3 or 4 of the 6 slots are in use, so 2 or 3 are idle, with the KV of as many of the 8 or 9 conversations
// of which one is drawn: a third of the turns that have a history find theirs, and of some 40 turns that is known to 15
// %: 20 to 60 %. (35 to 65 % was written down before the first run: it forgot that slots in use are nobody's to find.)
//
// The slots are the same whatever --slot-prealloc says; what is behind them is not. All have memory from the first tick
// (all), one does (none), two do (2); after as many conversations as there are slots, all do in each, for what a slot
// has it keeps: TurboMind's growth is one way.
#include <algorithm>
#include <map>

#include "allocator/kv_plan.h"
#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"

namespace xpyd::experiments::slots_time_experiment {
namespace {

constexpr int kSlots = 6, kSlotTokens = 1024, kConversations = 12, kAtOnce = 4, kLongest = 600, kTokensATick = 8;

struct Conversation {
  std::vector<int32_t> said;  // with KV in some slot, or once
  KvHandle kv = kNoKv;        // while a turn is served
  int left = 0;               // tokens of its reply
};

struct Prealloc {
  const char* name;
  int chunk;
};
constexpr Prealloc kPreallocs[] = {{"all", 0}, {"none", 1}, {"2", 2}};

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (int draw = 0; draw < kDraws; ++draw)
    for (const Prealloc& p : kPreallocs) all.push_back({{"prealloc", p.name}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string name = point["prealloc"];
  KvOptions kv{.shape = {.n_layers = 4, .n_kv_heads = 4, .head_dim = 64, .dtype = Dtype::bf16},
               .max_sequence_tokens = kSlotTokens};
  kv.pool_bytes = size_t(kSlots) * kSlotTokens * kv.shape.token_bytes();
  for (const Prealloc& p : kPreallocs)
    if (name == p.name) kv.slot_chunk = p.chunk;
  Result<std::shared_ptr<KvPool>> pool = make_block_pool("slots", kv);
  if (!pool) return pool.error();
  const std::unique_ptr<KvMemory> memory = find_kv_scheme("slots")->make(pool.value(), kv);
  Random random(seed_of(setting, point["sample"]));
  std::vector<Conversation> conversations(kConversations);
  struct Row {
    int owner = -1, tokens = 0;
  };
  std::vector<Row> rows(kSlots);
  Finding finding;
  int turns = 0, returned = 0, hits = 0;
  double at_first = 0;  // slots with memory
  const auto write = [&](size_t c, int n) {
    Conversation& who = conversations[c];
    const auto fresh = std::span<const int32_t>(who.said).last(size_t(n));
    if (!memory->append(who.kv, n)) return false;
    memory->written(who.kv, fresh);
    rows[size_t(memory->view(who.kv).slot)] = {int(c), int(who.said.size())};
    return true;
  };
  const auto say = [&](Conversation& who, int n) {
    for (int i = 0; i < n; ++i) who.said.push_back(int32_t(random.below(32000)));
  };
  const int n_ticks = setting.tiny ? 40 : 160;
  for (int tick = 0; tick < n_ticks; ++tick) {
    int at_once = 0;
    for (const Conversation& who : conversations) at_once += who.kv != kNoKv;
    if (const size_t c = random.below(kConversations); at_once < kAtOnce && conversations[c].kv == kNoKv) {
      Conversation& who = conversations[c];
      if (who.said.size() > kLongest) who.said.clear();
      ++turns, returned += !who.said.empty();
      say(who, 40 + int(random.below(161)));
      const Result<KvReservation> place = memory->reserve(who.said, 1 + c);
      if (!place) return place.error();
      hits += place.value().cached_tokens > 0;
      who.kv = place.value().handle, who.left = 20 + int(random.below(101));
      if (!write(c, int(who.said.size()) - place.value().cached_tokens)) return Finding{{}, "a slot has no room"};
    }
    for (size_t c = 0; c < conversations.size(); ++c) {
      Conversation& who = conversations[c];
      if (who.kv == kNoKv) continue;
      const int n = std::min(who.left, kTokensATick);
      say(who, n), who.left -= n;
      if (!write(c, n)) return Finding{{}, "a slot has no room"};
      if (who.left == 0) memory->free(std::exchange(who.kv, kNoKv));
    }
    memory->check_invariants();
    const std::vector<KvState> states = memory->states();
    const double backed = double(memory->stats().mapped_bytes) / double(kv.pool_bytes) * kSlots;
    if (tick == 0) at_first = backed;
    Values line = {{"tick", tick},
                   {"slots_with_memory", backed},
                   {"slots_at_first", at_first},
                   {"turns", turns},
                   {"returned", returned},
                   {"hits", hits},
                   {"evictions", memory->stats().evictions}};
    for (size_t slot = 0; slot < rows.size(); ++slot) {
      const Row& row = rows[slot];
      const bool active = row.owner >= 0 && conversations[size_t(row.owner)].kv != kNoKv &&
                          memory->view(conversations[size_t(row.owner)].kv).slot == int(slot);
      const KvState expected = row.owner < 0 ? KvState::free : active ? KvState::active : KvState::cached;
      if (states[slot] != expected) return Finding{{}, "a slot is in another state"};
      line["slot_" + std::to_string(slot)] = row.owner < 0 ? "-"
                                                           : std::string(1, char('a' + row.owner)) + " " +
                                                                 std::to_string(row.tokens) + (active ? " +" : "");
    }
    if (point["sample"] == 0 || tick + 1 == n_ticks) finding.rows.push_back(line);
  }
  for (Conversation& who : conversations)
    if (who.kv != kNoKv) memory->free(who.kv);
  return finding;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) { return run(point, setting); };
}

REGISTER_EXPERIMENT("slots_time", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::slots_time_experiment
