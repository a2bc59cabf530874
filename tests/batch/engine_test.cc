// An engine that plans steps while the model computes others (a model that chooses tokens itself, or a pipeline's
// waves) gives the same tokens, ends and hashes as one that waits. It frees nothing that is in use.
#include "batch/engine/engine.h"

#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "base/random.h"
#include "tests/catch.h"
#include "tests/late_model.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::engine_test {

// Requests of every kind: they end by their length or by a stop token, are aborted, or need logits on the CPU.
struct Load {
  std::vector<std::shared_ptr<Request>> requests;
  std::map<int, uint64_t> aborts;  // turn -> the request that is aborted before it
  std::map<int, int> arrivals;     // turn -> the number of requests that have arrived before it
};

Load make_load(uint64_t seed) {
  Random random(seed);
  auto below = [&](int n) { return int(random.next() % uint64_t(n)); };
  Load load;
  const int n = 8 + below(12);
  for (int id = 0; id < n; ++id) {
    std::vector<int32_t> prompt(size_t(1 + below(60)));
    const int family = below(4);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = int32_t((i * 7 + size_t(i < 20 ? family : id) * 13) % 96);
    auto request = tiny_request(uint64_t(id), prompt, 1 + below(12));
    for (int stops = below(6); stops > 0; --stops) request->stop_token_ids.push_back(below(96));
    if (below(6) == 0) request->n = 2 + below(2);
    if (below(8) == 0) request->sampling.frequency_penalty = 1;
    if (below(8) == 0) request->sampling.top_logprobs = 2;
    if (below(3) == 0) request->priority = below(3);
    if (below(5) == 0) load.aborts[below(40)] = uint64_t(id);
    load.requests.push_back(request);
  }
  for (int arrived = 0, turn = 0; arrived < n; turn += 1 + below(3))
    load.arrivals[turn] = arrived = std::min(n, arrived + 1 + below(4));
  return load;
}

using Results = std::map<std::pair<uint64_t, int>, Recorder::Choice>;

Results run(const Load& load, const TinySetup& setup) {
  TinyCluster tiny(setup);
  int submitted = 0;
  // An end in one turn may reach the other instance in the next.
  for (int turn = 0, still = 0; still < 3 || turn <= load.arrivals.rbegin()->first; ++turn) {
    if (auto due = load.arrivals.find(turn); due != load.arrivals.end())
      for (; submitted < due->second; ++submitted) REQUIRE(tiny.submit(load.requests[size_t(submitted)]).ok());
    if (auto due = load.aborts.find(turn); due != load.aborts.end()) tiny.cluster->abort(due->second);
    still = tiny.cluster->turn() ? 0 : still + 1;
    for (const auto& instance : tiny.cluster->instances())
      instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
  }
  CHECK(tiny.cluster->wait_idle(0));
  for (const auto& instance : tiny.cluster->instances()) {
    const KvStats kv = instance->memory().stats();
    CHECK(kv.free + kv.cached == kv.capacity);
  }
  Results results;
  for (const auto& request : load.requests)
    for (int c = 0; c < request->n; ++c) results[{request->id, c}] = tiny.recorder->choice(request->id, c);
  return results;
}

struct Counts {
  int compared = 0, aborted = 0, stopped = 0;
};

void compare(const Results& all, const Results& others, Counts& counts) {
  for (const auto& [key, theirs] : all) {
    const Recorder::Choice& mine = others.at(key);
    INFO("request " << key.first << " choice " << key.second);
    CHECK(mine.ends == 1);
    CHECK(theirs.ends == 1);
    if (mine.finish == FinishReason::abort || theirs.finish == FinishReason::abort) {
      // An abort meets a request at different tokens, so they are compared as far as both go.
      ++counts.aborted;
      for (size_t i = 0; i < std::min(mine.tokens.size(), theirs.tokens.size()); ++i)
        CHECK(mine.tokens[i] == theirs.tokens[i]);
      continue;
    }
    ++counts.compared;
    counts.stopped += mine.finish == FinishReason::stop;
    CHECK(mine.tokens == theirs.tokens);
    CHECK(mine.finish == theirs.finish);
    CHECK(mine.logits_hash == theirs.logits_hash);
  }
}

TEST_CASE("prompts run first, and sequences decode where an admitted prompt finds no memory", "[engine]") {
  for (const char* batching : {"prefill_first", "static", "chunked"}) {
    INFO(batching);
    TinySetup setup{.topology = "1C", .batching = batching, .block_tokens = 64};
    setup.pool_bytes = 4 * 64 * 256;
    TinyCluster tiny(setup);
    std::vector<int32_t> longest(202);
    for (size_t i = 0; i < longest.size(); ++i) longest[i] = int32_t(i % 96);
    const auto ask = [&](uint64_t id, const std::vector<int32_t>& prompt, int max_tokens, int turns) {
      auto request = tiny_request(id, prompt, max_tokens);
      request->ignore_eos = true;
      REQUIRE(tiny.submit(request).ok());
      for (int i = 0; i < turns; ++i) tiny.cluster->turn();
      return id;
    };
    ask(1, longest, 1, 20);  // leaves three cached blocks
    ask(2, {5, 6, 7}, 100, 3);
    ask(3, longest, 24, 1000);
    CHECK(tiny.cluster->wait_idle(0));
    for (uint64_t id : {1, 2, 3}) CHECK(tiny.recorder->choice(id).ends == 1);
  }
}

// On a model that computes as late as it may, against one that is waited for.
TEST_CASE("planning ahead of the model, waves and chunk policies change no token, end or hash",
          "[engine][waves][chunks]") {
  struct Late {
    int waves;  // of a pipeline; 0: a model that chooses, with two steps under way; -1: by the seed
    const char* policy;
    long begun = 0, overlapped = 0;
  };
  std::vector<Late> all = {{0, "fixed"}, {2, "fixed"}, {3, "fixed"}, {8, "fixed"}};
  for (const ChunkPolicy& policy : chunk_policies()) all.push_back({-1, policy.name});
  ThreadTeam team(1);
  Counts counts;
  constexpr int kSeeds = 56;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const Load load = make_load(uint64_t(seed));
    for (const char* topology : {"1C", "1P1D"}) {
      TinySetup setup{.topology = topology,
                      .batching = std::array{"chunked", "persistent", "prefill_first", "static"}[size_t(seed) % 4],
                      .transport = seed % 2 ? "handoff" : "local",
                      .stream_kv = std::array{StreamKv::chunk, StreamKv::layer, StreamKv::request}[size_t(seed) % 3]};
      setup.step_tokens = 16 + seed % 5 * 16;
      setup.block_tokens = seed % 3 ? 16 : 4;
      setup.max_batch = 3 + seed % 7;
      setup.pool_bytes = (seed / 3 % 2 ? 12 : 128) * 16 * 256;  // 12 blocks cause preemptions
      const auto plain = [&](const TinySetup& s, DeviceQueue&) {
        return Result<std::unique_ptr<Model>>(
            make_llama(tiny_weights(), team, std::max(s.step_tokens, s.max_batch), s.max_batch));
      };
      setup.make_model = plain;
      const Results expected = run(load, setup);
      for (Late& late : all) {
        const int waves = late.waves >= 0 ? late.waves : seed % 3 == 0 ? 0 : 2 + seed % 7;
        setup.chunk_policy = late.policy;
        setup.make_model = [&](const TinySetup& s, DeviceQueue& queue) {
          return Result<std::unique_ptr<Model>>(std::make_unique<LateModel>(plain(s, queue).value(), waves));
        };
        INFO("seed " << seed << " waves " << waves << " " << setup.describe());
        const long begun = LateModel::begun, overlapped = LateModel::overlapped;
        compare(expected, run(load, setup), counts);
        late.begun += LateModel::begun - begun, late.overlapped += LateModel::overlapped - overlapped;
      }
    }
  }
  for (const Late& late : all) CHECK(late.overlapped > late.begun / 2);
  CHECK(counts.compared > 16 * kSeeds * int(all.size()));
  CHECK(counts.aborted > kSeeds * int(all.size()) / 3);
  CHECK(counts.stopped > kSeeds * int(all.size()));
}

// One sequence once ran while others waited with all the other blocks, which they shared, so that each needed one more.
// prefill_first let them start, no block was free, and none of them gave any up.
TEST_CASE("a sequence that waits with KV gives it up where nothing can move otherwise", "[engine]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    TinySetup setup{.topology = "1P1D", .batching = "prefill_first", .stream_kv = StreamKv::request};
    setup.step_tokens = 16;
    setup.max_batch = 6;
    setup.pool_bytes = 12 * 16 * 256;
    INFO("seed " << seed);
    run(make_load(seed), setup);  // it ends
  }
}

// One logit of each row, or of each but the last of a step, is `odd`, and all others are `rest`.
struct OddModel final : SynchronousModel {
  OddModel(float o, float r, bool not_last = false) : odd(o), rest(r), spared(not_last ? 1 : 0) {}
  const ModelConfig& config() const override { return tiny_config(); }
  Work work(const StepInput&) const override { return {}; }
  void forward(const StepInput& step, float* logits) override {
    for (size_t row = 0; row < step.logit_rows.size(); ++row, logits += config().vocab) {
      std::fill_n(logits, config().vocab, rest);
      if (row + spared < step.logit_rows.size()) logits[50] = odd;
    }
  }
  const float odd, rest;
  const size_t spared;
};

// An engine by itself, with `n_blocks` blocks of 16 tokens.
struct Alone {
  explicit Alone(int n_blocks)
      : kv{.shape = kv_shape(tiny_config(), Dtype::f32),
           .pool_bytes = size_t(n_blocks * 16) * kv_shape(tiny_config(), Dtype::f32).token_bytes(),
           .max_sequence_tokens = 160},
        memory(find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv)),
        engine(*model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 4, .step_tokens = 64}, clock,
               nullptr) {}
  // A sequence whose first `held` tokens have KV.
  SequencePtr holding(uint64_t id, int tokens, int held, const ChoiceState& state) {
    const auto request = tiny_request(id, std::vector<int32_t>(size_t(tokens), int32_t(id)), 3);
    auto sequence = make_sequence(request, state, recorder, nullptr, nullptr);
    sequence->kv = memory->reserve(request->prompt, 0).value().handle;
    REQUIRE(memory->append(sequence->kv, held));
    memory->commit(sequence->kv, std::span(request->prompt).first(size_t(held)));
    sequence->computed = held;
    return sequence;
  }
  void run() {
    for (int step = 0; step < 100 && !engine.idle(); ++step) {
      engine.step();
      engine.check_invariants();
    }
    memory->check_invariants();
  }
  RealClock clock;
  KvOptions kv;
  std::unique_ptr<KvMemory> memory;
  std::unique_ptr<Model> model = std::make_unique<OddModel>(1, 0);  // it reads no KV, as the test writes none
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  Engine engine;
};

TEST_CASE("engine: a sequence whose logits are not finite ends with an error that says so", "[engine]") {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  struct {
    float odd, rest;
    FinishReason finish;
  } const cases[] = {{NAN, 0, FinishReason::error},
                     {kInfinite, 0, FinishReason::error},
                     {-kInfinite, -kInfinite, FinishReason::error},
                     {-kInfinite, 0, FinishReason::length},
                     {1, 0, FinishReason::length}};
  for (const auto& one : cases)
    for (const char* topology : {"1C", "1P1D"})
      for (const auto& [n, in_prompt] : {std::pair{1, false}, {2, false}, {1, true}, {2, true}}) {
        CAPTURE(one.odd, one.rest, topology, n, in_prompt);
        TinySetup setup{.topology = topology};
        setup.make_model = [&one, of_prompt = in_prompt](const TinySetup&, DeviceQueue&) {
          return Result<std::unique_ptr<Model>>(std::make_unique<OddModel>(one.odd, one.rest, of_prompt));
        };
        TinyCluster tiny(setup);
        auto request = tiny_request(1, {1, 2, 3}, 4);
        request->n = n;
        request->prompt_logprobs = in_prompt ? 0 : -1;
        REQUIRE(tiny.submit(request).ok());
        tiny.run();
        for (int c = 0; c < n; ++c) {
          const Recorder::Choice choice = tiny.recorder->choice(1, c);
          CHECK(choice.finish == one.finish);
          CHECK(choice.error.starts_with("the model's logits are not finite") == (one.finish == FinishReason::error));
        }
        for (const auto& instance : tiny.cluster->instances()) CHECK(instance->memory().stats().active == 0);
      }
}

// A sequence that held memory early stood before an adopted one. It gave that memory up and did not fit any more, and
// the adopted one behind it was never asked for its own. Both waited for ever.
TEST_CASE("engine: a sequence that is adopted behind one that holds memory early runs before it", "[engine]") {
  Alone alone(10);
  auto early = alone.holding(1, 130, 16, {});  // wants 9 blocks of 10, and has one
  early->early = early->probed = true;
  alone.engine.submit(std::move(early));
  alone.engine.adopt(alone.holding(2, 40, 40, {.output = {5}}));
  alone.run();
  for (uint64_t id : {1, 2}) CHECK(alone.recorder->choice(id).finish == FinishReason::length);
}

}  // namespace xpyd::testing::engine_test
