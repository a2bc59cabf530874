// multi_turn: what it is worth to keep a conversation's KV until its next turn, in N slots
// (TurboMind's first generation), in blocks, or not at all.
//
// Real steps of llama-mini (f32, random weights) on every core, one instance, a pool of 4 slots of 2,048 tokens.
// Conversations take turns, one request at a time; each begins with `history` tokens and goes through four turns of 32
// new tokens and a reply of 16. With 3 conversations every one finds its slot again; with 8 the least recently used
// slot is taken over by another, each time, and the conversation comes back by recompute, which its client cannot see
// but in the time to the first token. `paged` has the same bytes: 8 conversations of up to 1,100 tokens take 8,800 of
// its 8,192 tokens at 1,024, and fit below. `contiguous` keeps nothing.
//
// Arithmetic. A prompt token costs 2 * 25M FLOP = 0.33 ms at 150 GFLOP/s, a step at least the 5 ms
// of reading 108 MB. A hit computes 33 tokens (the reply's last token has no KV yet): 11 to 16 ms,
// whatever the history. Without one, later turns of 1,024 + 32 + 48 k tokens compute about 1,150:
// 380 ms and some attention: 25 to 35 times. In blocks of 16 a hit ends at a full block: up to 15
// tokens more, 5 ms.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/random.h"
#include "base/stats.h"
#include "experiments/load.h"

namespace xpyd::experiments::multi_turn_experiment {
namespace {

constexpr int kTurns = 4, kReply = 16;

struct Sizes {
  int few, many, fresh;  // conversations; tokens that a turn brings
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
          {128, 256, 512, 1024},
          {"experiments/models/llama-mini", "--kv-bytes", "64MiB", "--max-model-len", "2048", "--max-batch", "4",
           "--chunk-tokens", "512"}};
}

// One answer, waited for.
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
  static std::atomic<uint64_t> next_id{1u << 30};  // apart from run_load()'s
  Result<std::string> wrong = bed.open({"--topology", "1C", "--allocator", point["allocator"]});
  if (!wrong) return wrong.error();
  if (!wrong.value().empty()) return Finding{{}, wrong.value()};
  Stack& stack = bed.stack();
  const uint64_t hash_before = stack.cluster->logits_hash();
  Random random(setting.seed);
  const int n = point["conversations"], history = point["history"];
  std::vector<std::vector<int32_t>> said(static_cast<size_t>(n));
  std::vector<double> ttft_ms;
  double cached = 0, prompts = 0;
  for (int turn = 0; turn < kTurns; ++turn)
    for (size_t c = 0; c < said.size(); ++c) {
      for (int i = turn == 0 ? history : sizes.fresh; i > 0; --i)
        said[c].push_back(int32_t(random.below(uint64_t(stack.config.vocab))));
      auto request = std::make_shared<Request>();
      request->id = next_id.fetch_add(1);
      request->prompt = said[c];
      request->cache_salt = 1 + c + 1000 * setting.seed;  // as the front end salts a session
      request->sampling.temperature = 0;
      request->max_tokens = kReply;
      request->ignore_eos = true;
      request->arrival_s = stack.clock.now();
      auto answer = std::make_shared<Answer>();
      if (Status status = stack.cluster->submit(request, answer); !status) return status.error();
      if (!answer->wait()) return Finding{{}, "a turn did not get its tokens"};
      said[c].insert(said[c].end(), answer->tokens.begin(), answer->tokens.end());
      if (turn == 0) continue;
      ttft_ms.push_back(1e3 * (answer->first_s - request->arrival_s));
      cached += answer->cached;
      prompts += double(request->prompt.size());
    }
  stack.cluster->wait_idle(60);
  stack.cluster->instances()[0]->memory().clear_prefix_cache();
  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(stack.cluster->logits_hash() - hash_before));
  return Finding{{{{"ttft_ms", summarize(ttft_ms).mean},
                   {"ttft_ms_longest", summarize(ttft_ms).max},
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

REGISTER_EXPERIMENT("multi_turn", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::multi_turn_experiment
