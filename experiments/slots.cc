// slots: What does it save to keep a conversation's KV until its next turn: in slots, in blocks, or by recomputing it?
// Paper: TurboMind's LlamaCacheManager; no figure is published.
// Set-up: the gain of keeping a conversation's KV until its next turn: in N slots (TurboMind's first generation), in
//   blocks, or not at all. llama-mini, a pool of 4 slots of 2,048 tokens. Conversations take turns; each has `history`
//   tokens and three turns of 32 tokens with a reply of 8. 3 conversations find their slots again, 8 do not.
//   `contiguous` keeps nothing.
// Command: make exp-slots (a minute; measured).
// Expected: a hit computes 33 tokens, 11 to 16 ms. Without a hit 1,150 tokens take 380 ms: 25 to 35 times.
// Found: a kept slot answers in .038 of the time; an evicted one costs nothing.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "experiments/load.h"
#include "experiments/stats.h"

namespace xpyd::experiments::slots_experiment {
namespace {

namespace turns {

constexpr int kTurns = 3, kReply = 8;

struct Sizes {
  int few, many, fresh;  // few, many: conversations; fresh: new tokens per turn
  std::vector<int> histories;
  std::vector<std::string> common;
};

Sizes sizes_of(const Setting& setting) {
  if (setting.tiny)  // 4 slots of 256 tokens: 2 layers, K and V, one head of 64 floats
    return {3,
            6,
            8,
            {40},
            {"experiments/models/llama-tiny", "--kv-bytes", "1MiB", "--max-model-len", "256", "--max-batch", "4"}};
  return {3,
          8,
          32,
          {1024},
          {"experiments/models/llama-mini", "--kv-bytes", "64MiB", "--max-model-len", "2048", "--max-batch", "4",
           "--chunk-tokens", "512"}};
}

// Collects one answer and waits for it.
class Answer final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    std::lock_guard lock(mutex_);
    if (event.token >= 0) {
      if (tokens.empty()) first_s = event.time_s;
      tokens.push_back(event.token);
      cached = event.cached_tokens;
    }
    if (event.finish == FinishReason::none) return;
    good = event.finish == FinishReason::length;
    ended_ = true;
    changed_.notify_all();
  }
  bool wait() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(600), [&] { return ended_; }) && good;
  }
  std::vector<int32_t> tokens;
  double first_s = 0;
  int cached = 0;
  bool good = false;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
};

std::vector<Values> points(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  std::vector<Values> all;
  for (int history : sizes.histories)
    for (const char* allocator : {"slots", "paged", "contiguous"})
      for (int conversations : {sizes.few, sizes.many})
        all.push_back({{"allocator", allocator}, {"conversations", conversations}, {"history", history}});
  return all;
}

Result<Finding> converse(Bed& bed, const Sizes& sizes, const Values& point, const Setting& setting) {
  static std::atomic<uint64_t> next_id{1u << 30};  // distinct from run_load()'s
  Result<std::string> wrong = bed.open({"--topology", "1C", "--allocator", point["allocator"]});
  if (!wrong) return wrong.error();
  if (!wrong.value().empty()) return Finding{{}, wrong.value()};
  Build& build = bed.build();
  const uint64_t hash_before = build.cluster->stats().conductor.logits_hash;
  Random random(setting.seed);
  const int n = point["conversations"], history = point["history"];
  std::vector<std::vector<int32_t>> said(static_cast<size_t>(n));
  std::vector<double> ttft_ms;
  double cached = 0, prompts = 0;
  for (int turn = 0; turn < kTurns; ++turn)
    for (size_t c = 0; c < said.size(); ++c) {
      for (int i = turn == 0 ? history : sizes.fresh; i > 0; --i)
        said[c].push_back(int32_t(random.below(uint64_t(build.config.vocab))));
      auto request = std::make_shared<Request>();
      request->id = next_id.fetch_add(1);
      request->prompt = said[c];
      request->cache_salt = 1 + c + 1000 * setting.seed;  // as the front end salts a session
      request->sampling.temperature = 0;
      request->max_tokens = kReply;
      request->ignore_eos = true;
      request->arrival_s = build.clock.now();
      auto answer = std::make_shared<Answer>();
      if (Status status = build.cluster->submit(request, answer); !status) return status.error();
      if (!answer->wait()) return Finding{{}, "a turn did not get its tokens"};
      said[c].insert(said[c].end(), answer->tokens.begin(), answer->tokens.end());
      if (turn == 0) continue;
      ttft_ms.push_back(1e3 * (answer->first_s - request->arrival_s));
      cached += answer->cached;
      prompts += double(request->prompt.size());
    }
  build.cluster->wait_idle(60);
  build.cluster->instances()[0]->memory().clear_prefix_cache();
  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(build.cluster->stats().conductor.logits_hash - hash_before));
  return Finding{{{{"ttft_ms", summarize(ttft_ms).mean},
                   {"cached_share", cached / prompts},
                   {"turns", ttft_ms.size()},
                   {"logits_hash", hash}}},
                 ""};
}

Measure open(const Setting& setting) {
  const Sizes sizes = sizes_of(setting);
  auto bed = std::make_shared<Bed>(setting, sizes.common);
  return [=](const Values& point) { return converse(*bed, sizes, point, setting); };
}

REGISTER_EXPERIMENT("slots", "cpu", points, open);

}  // namespace turns

// slots/time: the owner of each slot's KV over time, and how many slots have memory, by --slot-prealloc. 12
// conversations in 6 slots of 1,024 tokens, at most 4 turns at once, eight tokens a tick. A row of the result is a
// tick; `c 412 +` is conversation c's slot with 412 tokens, in service.
//
// Expected: 2 or 3 idle slots hold the KV of as many of 8 or 9 conversations: 20 to 60 % of turns find theirs. At the
// first tick all slots have memory (all), one (none) or two (2); at the end all slots have it in each.
namespace time {

constexpr int kSlots = 6, kSlotTokens = 1024, kConversations = 12, kAtOnce = 4, kLongest = 600, kTokensATick = 8;

struct Conversation {
  std::vector<int32_t> said;  // its KV is or was in some slot
  KvHandle kv = kNoKv;        // set while a turn is served
  int left = 0;               // tokens of its reply that are still to come
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
  double at_first = 0;  // slots with memory at the first tick
  const auto write = [&](size_t c, int n) {
    Conversation& who = conversations[c];
    const auto fresh = std::span<const int32_t>(who.said).last(size_t(n));
    if (!memory->append(who.kv, n)) return false;
    memory->commit(who.kv, fresh);
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
      if (!write(c, int(who.said.size()) - place.value().cached_tokens))
        return Finding{{}, "a slot has no free memory for new tokens"};
    }
    for (size_t c = 0; c < conversations.size(); ++c) {
      Conversation& who = conversations[c];
      if (who.kv == kNoKv) continue;
      const int n = std::min(who.left, kTokensATick);
      say(who, n), who.left -= n;
      if (!write(c, n)) return Finding{{}, "a slot has no free memory for new tokens"};
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
      if (states[slot] != expected) return Finding{{}, "a slot is not in the expected state"};
      line["slot_" + std::to_string(slot)] = row.owner < 0 ? "-"
                                                           : std::string(1, char('a' + row.owner)) + " " +
                                                                 std::to_string(row.tokens) + (active ? " +" : "");
    }
    if (int(point["sample"]) == 0 || tick + 1 == n_ticks) finding.rows.push_back(line);
  }
  for (Conversation& who : conversations)
    if (who.kv != kNoKv) memory->free(who.kv);
  return finding;
}

REGISTER_EXPERIMENT("slots/time", "cpu", points, each<run>);

}  // namespace time

}  // namespace
}  // namespace xpyd::experiments::slots_experiment
