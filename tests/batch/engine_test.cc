// The engine that plans steps while the model computes others (one that chooses tokens itself, or a pipeline's waves)
// gives what the engine that waits gives: tokens, ends, hashes; and nothing is given away while it is in use.
#include "batch/engine.h"

#include <array>
#include <map>

#include "base/random.h"
#include "tests/catch.h"
#include "tests/late_model.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::engine_test {
namespace {

// Requests of every kind: some end by their length, some by a stop token, some are aborted, some
// need logits on the CPU.
struct Load {
  std::vector<std::shared_ptr<Request>> requests;
  std::map<int, uint64_t> aborts;  // before that turn, that request
  std::map<int, int> arrivals;     // before that turn, so many requests have arrived
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
  // What ends in one turn may be noticed by the other instance in the next.
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
      // Aborts meet a request at different tokens: as far as both go they agree.
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

// `waves`: of a pipeline; 0: a model that chooses, of which two steps are under way.
void compare_with_plain(int waves, uint64_t seeds) {
  ThreadTeam team(1);
  const long begun = LateModel::begun, overlapped = LateModel::overlapped;
  Counts counts;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Load load = make_load(seed);
    for (const char* topology : {"1C", "1P1D"}) {
      TinySetup setup{.topology = topology,
                      .batching = std::array{"chunked", "prefill_first", "static"}[seed % 3],
                      .transport = seed % 2 ? "handoff" : "local",
                      .stream_kv = seed % 4 < 2 ? StreamKv::chunk : StreamKv::request};
      if (waves > 0 && seed % 4 == 1) setup.stream_kv = StreamKv::layer;
      setup.step_tokens = 16 + int(seed % 5) * 16;
      setup.max_batch = 3 + int(seed % 7);
      setup.pool_bytes = (seed / 3 % 2 ? 12 : 128) * 16 * 256;  // 12 blocks: preemptions
      INFO("seed " << seed << " waves " << waves << " " << setup.describe());
      Results results[2];
      setup.make_model = [&](const TinySetup& s, DeviceQueue&) {
        return Result<std::unique_ptr<Model>>(
            make_llama(tiny_weights(), team, std::max(s.step_tokens, s.max_batch), s.max_batch));
      };
      results[0] = run(load, setup);
      setup.make_model = [&, plain = setup.make_model](const TinySetup& s, DeviceQueue& queue) {
        return Result<std::unique_ptr<Model>>(std::make_unique<LateModel>(plain(s, queue).value(), waves));
      };
      results[1] = run(load, setup);
      compare(results[0], results[1], counts);
    }
  }
  CHECK(counts.compared > int(16 * seeds));
  CHECK(counts.aborted > int(seeds / 3));
  CHECK(counts.stopped > int(seeds));
  CHECK(LateModel::overlapped - overlapped > (LateModel::begun - begun) / 2);
}

TEST_CASE("planning ahead of the model changes no token, end or hash", "[engine]") { compare_with_plain(0, 60); }
TEST_CASE("waves change no token, end or hash", "[engine][waves]") {
  for (int waves : {2, 3, 8}) compare_with_plain(waves, 60);
}

// Once: one ran, others waited with all the other blocks, which they shared, so that each needed one more;
// prefill_first let them start, there was none, and nobody who waited gave any up.
TEST_CASE("who waits with KV gives it up where nothing can move otherwise", "[engine]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    TinySetup setup{.topology = "1P1D", .batching = "prefill_first", .stream_kv = StreamKv::request};
    setup.step_tokens = 16;
    setup.max_batch = 6;
    setup.pool_bytes = 12 * 16 * 256;
    INFO("seed " << seed);
    run(make_load(seed), setup);  // ends
  }
}

TEST_CASE("a chunk policy changes no token, end or hash, also ahead of the model", "[engine][chunks]") {
  ThreadTeam team(1);
  Counts counts;
  uint64_t seed = 1000;
  for (const ChunkPolicy& policy : chunk_policies())
    for (int turn = 0; turn < 56; ++turn) {
      const Load load = make_load(++seed);
      TinySetup setup{.topology = turn % 2 ? "1C" : "1P1D",
                      .batching = std::array{"chunked", "persistent", "prefill_first", "static"}[size_t(turn) / 14],
                      .stream_kv = turn % 4 < 2 ? StreamKv::chunk : StreamKv::request};
      setup.step_tokens = 16 + turn % 5 * 16;
      setup.block_tokens = turn % 3 ? 16 : 4;
      setup.max_batch = 3 + turn % 7;
      setup.pool_bytes = (turn / 3 % 2 ? 12 : 128) * 16 * 256;
      setup.make_model = [&](const TinySetup& s, DeviceQueue&) {
        return Result<std::unique_ptr<Model>>(
            make_llama(tiny_weights(), team, std::max(s.step_tokens, s.max_batch), s.max_batch));
      };
      const Results fixed = run(load, setup);
      setup.chunk_policy = policy.name;
      setup.chunks.request_tokens = turn % 3 == 1 ? 12 : 0;
      setup.make_model = [&, plain = setup.make_model](const TinySetup& s, DeviceQueue& queue) {
        return Result<std::unique_ptr<Model>>(
            std::make_unique<LateModel>(plain(s, queue).value(), turn % 3 == 0 ? 0 : 2 + turn % 7));
      };
      INFO("seed " << seed << " " << setup.describe());
      compare(fixed, run(load, setup), counts);
    }
  CHECK(counts.compared > 1000);
  CHECK(counts.stopped > 100);
}

// Once: it was done anew in each turn.
TEST_CASE("what a chunk policy has searched for a prompt is kept while it waits for memory", "[engine][chunks]") {
  ThreadTeam team(1);
  RealClock clock;
  const KvOptions kv{
      .shape = kv_shape(tiny_config(), Dtype::f32), .pool_bytes = 12 * 16 * 256, .max_sequence_tokens = 256};
  const auto memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  const auto model = make_llama(tiny_weights(), team, 64, 4);
  Engine engine(*model, *memory,
                {.policy = find_batch_policy("chunked"),
                 .max_batch = 4,
                 .step_tokens = 64,
                 .chunks = {.policy = find_chunk_policy("equal_time")}},
                clock, nullptr);
  std::vector<ChunkState> before;
  engine.watch_chunks([&](const ChunkView&, const ChunkState& b, const ChunkChoice&) { before.push_back(b); });
  const std::vector<int32_t> others(100, 5);
  const KvHandle held = memory->reserve(others, 0).value().handle;
  REQUIRE(memory->append(held, 100));
  engine.submit(make_sequence(tiny_request(1, std::vector<int32_t>(90, 7), 3), {}, std::make_shared<Recorder>(),
                              nullptr, nullptr));
  for (int turn = 0; turn < 3; ++turn) CHECK_FALSE(engine.step());
  CHECK(before.empty());
  memory->free(held);
  while (engine.step()) continue;
  REQUIRE(before.size() > 0);
  CHECK(before[0].head == 1);
  CHECK(before[0].wave_s > 0);
}

}  // namespace
}  // namespace xpyd::testing::engine_test
