// Speculative decoding: whatever is drafted, the output equals that of decoding without drafts.
#include <algorithm>
#include <map>

#include "base/random.h"
#include "batch/speculation/ngram.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::speculation_test {

// Finds the longest of the last n-grams that has occurred before, at its last place, by looking everywhere.
std::vector<int32_t> propose_slowly(const std::vector<int32_t>& tokens, int most) {
  const int size = int(tokens.size());
  for (int n = std::min(NgramIndex::kMax, size - 1); n >= NgramIndex::kMin; --n)
    for (int behind = size - 1; behind >= n; --behind) {
      if (!std::equal(tokens.end() - n, tokens.end(), tokens.begin() + behind - n)) continue;
      std::vector<int32_t> all = tokens;
      for (int i = 0; i < most; ++i) all.push_back(all[size_t(behind + i)]);
      return {all.end() - most, all.end()};
    }
  return {};
}

TEST_CASE("speculate: an index of n-grams finds what a full search finds", "[speculate]") {
  Random random(3);
  for (int round = 0; round < 60; ++round) {
    const int alphabet = 2 + int(random.below(6));
    NgramIndex index;
    std::vector<int32_t> tokens;
    int found = 0;
    while (tokens.size() < 300) {
      for (uint64_t n = 1 + random.below(5); n > 0; --n) tokens.push_back(int32_t(random.below(uint64_t(alphabet))));
      const int most = 1 + int(random.below(6));
      std::vector<int32_t> got;
      index.propose(tokens, most, got);
      REQUIRE(got == propose_slowly(tokens, most));
      found += !got.empty();
    }
    CHECK(found > 10);
  }
}

// The token that follows each text. Drafts are made of it, and some are wrong on purpose.
std::map<std::vector<int32_t>, int32_t>& known() {
  static std::map<std::vector<int32_t>, int32_t> next;
  return next;
}

class ToldDrafter final : public Drafter {
 public:
  void draft(std::span<DraftWish> wishes) override {
    for (DraftWish& wish : wishes) {
      std::vector<int32_t> tokens(wish.tokens.begin(), wish.tokens.end());
      while (int(wish.drafts.size()) < wish.most) {
        const auto next = known().find(tokens);
        const bool wrong = next == known().end() || ++turn_ % 4 == 0;
        tokens.push_back(wrong ? int32_t(turn_ % 90) : next->second);
        wish.drafts.push_back(tokens.back());
      }
    }
  }

 private:
  int turn_ = 0;
};

constexpr DrafterRow kTold = {
    "told", [](const DrafterParts&) -> std::unique_ptr<Drafter> { return std::make_unique<ToldDrafter>(); }, ""};

SpeculationOptions told(int tokens) { return {.drafter = &kTold, .tokens = tokens}; }

RaggedRun plain_run(const TinySetup& setup) {
  RaggedRun run = run_ragged(setup);
  const auto prompts = ragged_prompts();
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<int32_t> tokens = prompts[i];
    for (int32_t token : run.tokens[i]) {
      known()[tokens] = token;
      tokens.push_back(token);
    }
  }
  return run;
}

TEST_CASE("speculate: the hash is the same, whatever is drafted", "[speculate][parity][shards]") {
  struct Way {
    const char *topology, *transport, *disagg;
  };
  const Way ways[] = {{"1C", "local", "prefill_first"},
                      {"1P1D", "local", "prefill_first"},
                      {"1P1D", "handoff", "prefill_first"},
                      {"2P1D", "local", "decode_first"}};
  int ran = 0, seen = 0;  // every third combination runs
  for (Dtype kv_dtype : kKvDtypes) {
    known().clear();
    const RaggedRun plain = plain_run({.topology = "1C", .kv_dtype = kv_dtype, .prefix_cache = false});
    int64_t drafted[3] = {}, accepted[3] = {};
    for (const char* scheme : {"paged", "contiguous", "slots", "vattention"})
      for (const auto& [batching, step] :
           {std::pair{"chunked", 64}, {"chunked", 7}, {"persistent", 64}, {"static", 512}, {"prefill_first", 512}})
        for (const Way& way : ways) {
          if (++seen % 3 != 0) continue;
          const int kind = ran % 5 < 3 ? 0 : ran % 5 - 2;  // told drafts, n-grams, a multi-token head
          const bool slots = scheme == std::string("contiguous") || scheme == std::string("slots");
          const bool tables = scheme == std::string("paged");  // handoff needs them
          TinySetup setup{.topology = way.topology, .scheme = scheme, .batching = batching};
          setup.transport = tables ? way.transport : "local";
          setup.disagg = way.disagg;
          setup.kv_dtype = kv_dtype;
          if (ran % 3 == 0) setup.stream_kv = StreamKv::request;
          setup.step_tokens = step;
          setup.block_tokens = scheme == std::string("vattention") ? 64 : ran % 3 ? 16 : 3;
          setup.threads = 1 + ran % 2;
          setup.max_batch = 16 + ran % 5;
          setup.pool_bytes = (slots ? 3 << 20 : 1 << 19) * (kind == 2 ? 2 : 1);
          const SpeculationOptions drafters[] = {
              told(1 + ran % 5), {find_drafter("ngram"), 3}, {find_drafter("mtp"), ran % 4}};
          setup.speculation = drafters[kind];
          if (ran % 4 == 0 && kind == 2 && setup.transport == "local") setup.prefill_tp = setup.decode_tp = 2;
          INFO(setup.describe());
          const RaggedRun run = run_ragged(setup);
          REQUIRE(run.tokens == plain.tokens);
          REQUIRE(run.hash == plain.hash);
          drafted[kind] += run.draft_tokens, accepted[kind] += run.accepted_tokens;
          ++ran;
        }
    CAPTURE(dtype_name(kv_dtype), drafted[0], accepted[0], drafted[1], drafted[2]);
    CHECK(accepted[0] > drafted[0] / 8);
    CHECK(drafted[0] - accepted[0] > drafted[0] / 8);
    CHECK((drafted[0] > 80 && drafted[1] > 0 && drafted[2] > 80));  // few n-grams repeat in these answers
  }
}

TEST_CASE("speculate: a step has as many drafts as pay", "[speculate]") {
  // A step takes 10 ms for one token and 1 ms for each more. A draft pays while it is right more often than 1 time in
  // 10.
  const auto drafts = [](const DraftRecord& record, double token_s) {
    DraftRate rate{.tokens = 1, .seconds = 10e-3, .token_seconds = token_s};
    return rate.take(record, 16);
  };
  DraftRecord right, wrong;
  for (int i = 0; i < 200; ++i) right.saw(4, 4), wrong.saw(4, 0);
  CHECK(drafts(right, 1e-3) == 16);
  CHECK(drafts(wrong, 1e-3) == 0);
  CHECK(drafts({}, 1e-3) == 2);  // 1/2 and 1/4 pay: 1.75 tokens in 12 ms; a third draft is right 1 time in 8
  CHECK(drafts({}, 6e-3) == 1);  // half of them would have to be right, which one draft tells
  CHECK(drafts({}, 11e-3) == 0);
  DraftRecord once;
  once.saw(1, 0);
  CHECK(drafts(once, 6e-3) == 0);
  CHECK(drafts(right, 10e-3) == 0);  // a draft costs as much as a step
  int steps = 0;                     // until a drafter that was wrong is tried again
  for (; drafts(wrong, 1e-3) == 0; ++steps) wrong.saw(0, 0);
  CHECK(steps > 10);
  CHECK(steps < 100);

  // If no draft is ever right, one step in four or fewer tries one. Text that repeats itself later is noticed.
  DraftRecord record;
  int tried = 0;
  const auto play = [&](int tokens, bool guessed) {
    int played = 0;
    for (; tokens > 0; ++played) {
      const int n = drafts(record, 1e-3);
      tried += n;
      tokens -= guessed ? n + 1 : 1;
      record.saw(n, guessed ? n : 0);
    }
    return played;
  };
  play(5000, false);
  CHECK(tried < 5000 / 3);
  CHECK(play(200, true) < 80);
}

// Sampling with penalties, several choices, stops and logprobs. Prompts come twice, and the second ones find the
// prefixes of the first.
struct Answers {
  std::vector<Recorder::Choice> choices;
  int64_t hits = 0, accepted = 0, drafted = 0, preemptions = 0;
  KvStats kv;
};
Answers answers(const TinySetup& setup) {
  TinyCluster tiny(setup);
  uint64_t id = 0;
  for (int round = 0; round < 2; ++round) {
    for (const auto& prompt : ragged_prompts()) {
      auto request = tiny_request(id, prompt, 40);
      request->sampling = {.temperature = id % 3 ? .7f : 0, .seed = id / 2};
      if (id % 4 == 1) request->sampling.frequency_penalty = .3f;
      if (id % 4 == 2) request->n = 3;
      if (id % 5 == 3) request->sampling.top_logprobs = 2;
      if (id % 2 == 1) request->stop_token_ids = {int32_t(id * 11 % 96), int32_t(id * 17 % 96)};
      ++id;
      REQUIRE(tiny.submit(request).ok());
    }
    tiny.run();
  }
  Answers all;
  for (uint64_t i = 0; i < id; ++i)
    for (int c = 0; c < (i % 4 == 2 ? 3 : 1); ++c) all.choices.push_back(tiny.recorder->choice(i, c));
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants();
    all.hits += instance->memory().stats().prefix_hit_tokens;
    all.preemptions += instance->stats().preemptions;
    all.drafted += instance->stats().draft_tokens, all.accepted += instance->stats().accepted_tokens;
    all.kv = instance->memory().stats();
  }
  return all;
}

void check_equal(const Answers& got, const Answers& want) {
  REQUIRE(got.choices.size() == want.choices.size());
  for (size_t i = 0; i < got.choices.size(); ++i) {
    CAPTURE(i);
    CHECK(got.choices[i].tokens == want.choices[i].tokens);
    CHECK(got.choices[i].logits_hash == want.choices[i].logits_hash);
    CHECK(got.choices[i].finish == want.choices[i].finish);
    CHECK(got.choices[i].ends == 1);
  }
}

TEST_CASE(
    "speculate: drafts change nothing under sampling, penalties, choices, stops, a prefix cache and little memory",
    "[speculate]") {
  const SpeculationOptions head{find_drafter("mtp"), 4}, ngrams{find_drafter("ngram"), 4};
  struct {
    const char *topology, *scheme;
    const SpeculationOptions& drafts;
    int block_tokens = 16, n_blocks = 0;  // 0: enough for all
  } const cases[] = {
      {"1C", "paged", head},
      {"1P1D", "paged", head},
      {"1C", "paged", head, 4, 150},
      {"1P1D", "paged", head, 4, 150},
      {"1C", "paged", ngrams},
      {"1P1D", "paged", ngrams},
      {"1C", "vattention", ngrams, 64},
      {"1P1D", "vattention", ngrams, 64},
      {"1C", "paged", ngrams, 4, 110},
  };
  for (const auto& c : cases) {
    TinySetup setup{.topology = c.topology, .scheme = c.scheme, .block_tokens = c.block_tokens};
    setup.max_batch = 64;
    setup.share = setup.scheme == "vattention" ? KvShare::copy : KvShare::off;
    setup.pool_bytes = c.n_blocks == 0
                           ? 2 << 20
                           : size_t(c.n_blocks * c.block_tokens) * kv_shape(tiny_config(), Dtype::f32).token_bytes();
    const Answers plain = answers(setup);
    setup.speculation = c.drafts;
    INFO(setup.describe());
    const Answers drafted = answers(setup);
    check_equal(drafted, plain);
    CHECK(plain.drafted == 0);
    CHECK(drafted.drafted > 80);
    CHECK(drafted.kv.free + drafted.kv.cached == drafted.kv.capacity);
    if (&c.drafts == &ngrams) CHECK(drafted.accepted > 10);
    if (c.n_blocks == 0) CHECK(drafted.hits >= plain.hits);  // a prefix hit loses nothing
    if (c.n_blocks == 110) CHECK(drafted.preemptions > 0);
  }
}

TEST_CASE("speculate: the room of rejected drafts is free after their step", "[speculate]") {
  known().clear();  // so that drafts are right by chance alone
  TinySetup setup{.topology = "1C"};
  setup.block_tokens = 1;
  setup.speculation = told(8);
  TinyCluster tiny(setup);
  const auto& instance = tiny.cluster->instances()[0];
  REQUIRE(tiny.submit(tiny_request(1, {5, 6, 7}, 9)).ok());
  while (tiny.cluster->turn()) CHECK(instance->memory().stats().internal_bytes == 0);
  CHECK(instance->stats().draft_tokens > instance->stats().accepted_tokens);
}

}  // namespace xpyd::testing::speculation_test
