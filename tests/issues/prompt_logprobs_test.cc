// echo with logprobs and prompt_logprobs were once refused, so the standard evaluation tools (lm-eval's loglikelihood
// tasks) could not measure what int4 KV costs.
#include <cmath>
#include <map>
#include <mutex>

#include "tests/catch.h"
#include "tests/json.h"
#include "tests/late_model.h"
#include "tests/model/model_fixture.h"
#include "tests/server/api_fixture.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::prompt_logprobs_test {

constexpr int kTop = 3;

struct Direct {
  double logprob = 0;
  int rank = 0;
  std::vector<int32_t> top;
};

// Logprobs by one forward pass over the whole prompt, in double, without the sampler.
std::vector<Direct> direct(const std::vector<int32_t>& prompt) {
  ThreadTeam team(1);
  auto model = make_llama(tiny_weights(), team, 128, 128);
  const std::vector<float> logits = run_prompt(*model, prompt, 128);
  const size_t vocab = size_t(tiny_config().vocab);
  std::vector<Direct> all(prompt.size());
  for (size_t i = 1; i < prompt.size(); ++i) {
    const float* row = logits.data() + (i - 1) * vocab;
    double sum = 0;
    std::vector<int32_t> order;
    for (size_t v = 0; v < vocab; ++v) {
      sum += std::exp(double(row[v]));
      order.push_back(int32_t(v));
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
    all[i].logprob = double(row[size_t(prompt[i])]) - std::log(sum);
    all[i].rank = 1 + int(std::count_if(row, row + vocab, [&](float x) { return x > row[size_t(prompt[i])]; }));
    all[i].top.assign(order.begin(), order.begin() + kTop);
  }
  return all;
}

class Keeper final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    std::lock_guard lock(mutex);
    if (!event.prompt_logprobs.empty()) {
      ++deliveries[event.request_id];
      prompts[event.request_id] = std::move(event.prompt_logprobs);
    }
    cached = std::max(cached, event.cached_tokens);
    ends += event.finish == FinishReason::length;
    if (event.finish != FinishReason::none) hashes[{event.request_id, event.choice}] = event.logits_hash;
  }
  std::mutex mutex;
  std::map<uint64_t, std::vector<Sampled>> prompts;
  std::map<uint64_t, int> deliveries;
  std::map<std::pair<uint64_t, int>, uint64_t> hashes;
  int ends = 0, cached = 0;
};

void check_prompt(const std::vector<int32_t>& prompt, const std::vector<Sampled>& got) {
  REQUIRE(got.size() == prompt.size());
  CHECK(std::isnan(got[0].chosen.logprob));
  const std::vector<Direct> expected = direct(prompt);
  for (size_t i = 1; i < prompt.size(); ++i) {
    INFO("token " << i);
    CHECK(got[i].chosen.token == prompt[i]);
    CHECK(double(got[i].chosen.logprob) == Approx(expected[i].logprob).margin(2e-5));
    CHECK(got[i].rank == expected[i].rank);
    REQUIRE(got[i].top.size() == size_t(kTop));
    for (int k = 0; k < kTop; ++k) CHECK(got[i].top[size_t(k)].token == expected[i].top[size_t(k)]);
  }
}

// The same prompts come twice, so that a prefix cache has all of them the second time. Others run beside them, and
// their logits must not change.
void check_setup(const TinySetup& setup) {
  INFO(setup.describe());
  std::map<std::pair<uint64_t, int>, uint64_t> plain;
  for (bool judged : {false, true}) {
    TinyCluster tiny(setup);
    auto sink = std::make_shared<Keeper>();
    std::map<uint64_t, std::vector<int32_t>> asked;
    uint64_t id = 0;
    int choices = 0;
    for (int round = 0; round < 2; ++round) {
      for (const auto& prompt : ragged_prompts()) {
        auto request = tiny_request(++id, prompt, 4);
        if (id % 4 != 0) {
          request->n = id % 3 == 0 ? 2 : 1;
          if (judged) request->prompt_logprobs = kTop, asked[id] = prompt;
        }
        choices += request->n;
        REQUIRE(tiny.cluster->submit(request, sink).ok());
      }
      tiny.run();
    }
    CHECK(sink->ends == choices);
    for (const auto& instance : tiny.cluster->instances())
      instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
    CHECK(sink->prompts.size() == asked.size());
    for (const auto& [number, prompt] : asked) {
      INFO("request " << number << " of " << prompt.size() << " tokens");
      CHECK(sink->deliveries[number] == 1);
      check_prompt(prompt, sink->prompts[number]);
    }
    if (!judged) plain = sink->hashes;
    CHECK(sink->hashes == plain);
  }
}

TEST_CASE(
    "prompt logprobs equal those of a direct computation, whatever schedules, preempts, splits and moves the prompt",
    "[engine][prompt_logprobs]") {
  for (const char* scheme : {"paged", "contiguous", "slots", "vattention"})
    for (int step_tokens : {16, 512})
      check_setup({.scheme = scheme,
                   .share = std::string(scheme) == "slots" ? KvShare::takeover : KvShare::alias,
                   .step_tokens = step_tokens,
                   .max_batch = 5});
  for (const BatchPolicy& policy : batch_policies())
    check_setup({.batching = policy.name, .max_batch = 3, .pool_bytes = 12 * 16 * 256});
  check_setup({.prefill_tp = 2, .prefill_pp = 2, .max_batch = 7});
  check_setup({.step_tokens = 8, .max_batch = 2});
  for (const char* transport : {"local", "handoff"})
    for (const char* disagg : {"prefill_first", "decode_first", "conditional_threshold"})
      for (bool pull : {false, true}) {
        if (pull && std::string(transport) == "handoff") continue;
        TinySetup setup{
            .topology = "1P1D", .transport = transport, .disagg = disagg, .step_tokens = 32, .max_batch = 6};
        setup.disagg_options.pull = pull;
        setup.disagg_options.max_local_prefill_tokens = 20;
        check_setup(setup);
      }
}

TEST_CASE("prompt logprobs are right where the model chooses the tokens itself", "[engine][prompt_logprobs]") {
  ThreadTeam team(1);
  const long begun = LateModel::begun;
  TinySetup setup;
  setup.max_batch = 4;
  setup.make_model = [&](const TinySetup& s, DeviceQueue&) {
    return Result<std::unique_ptr<Model>>(std::make_unique<LateModel>(
        make_llama(tiny_weights(), team, std::max(s.step_tokens, s.max_batch), s.max_batch)));
  };
  check_setup(setup);
  CHECK(LateModel::begun > begun);  // steps of the others still run ahead
}

// ---- The API.

// Events of a service with one logprob for each token of prompt and output: -(its id) / 10.
std::vector<TokenEvent> judged_hello(const Request& request, int choice) {
  auto events = FakeService::hello(request, choice);
  auto say = [](int32_t id) {
    Sampled s;
    s.chosen = {id, -float(id) / 10};
    s.top = {{'!', -0.5f}};
    s.rank = 7;
    return s;
  };
  if (request.prompt_logprobs >= 0 && choice == 0) {
    for (int32_t id : request.prompt) events[0].prompt_logprobs.push_back(say(id));
    events[0].prompt_logprobs[0].chosen.logprob = NAN;
  }
  for (TokenEvent& event : events) {
    event.has_logprobs = request.sampling.top_logprobs >= 0;
    event.sampled = say(event.token);
    event.sampled.top.push_back({'!', -2});  // another token with the same text
  }
  return events;
}

TEST_CASE("echo with logprobs, echo of nothing more, and vLLM's prompt_logprobs are answered",
          "[server][prompt_logprobs]") {
  TestServer server;
  server.service.script = judged_hello;
  check_answers(server, "/v1/completions",
                // The prompt's tokens come first, and the very first has no logprob.
                {{R"({"prompt":["éb","c"],"echo":true,"logprobs":1,"max_tokens":2,"n":2})",
                  {{"/choices/1/text", R"("ébhe")"},
                   {"/choices/1/logprobs/tokens", R"(["bytes:\\xc3","bytes:\\xa9","b","h","e"])"},
                   {"/choices/1/logprobs/token_logprobs/0", "null"},
                   {"/choices/1/logprobs/top_logprobs/0", "null"},
                   {"/choices/1/logprobs/token_logprobs/2", "-9.8"},
                   {"/choices/1/logprobs/top_logprobs/2", R"({"b":-9.8,"!":-0.5})"},
                   {"/choices/1/logprobs/token_logprobs/4", "-10.1"},
                   {"/choices/1/logprobs/top_logprobs/4", R"({"!":-0.5,"e":-10.1})"},
                   {"/choices/1/logprobs/text_offset", "[0,0,1,2,3]"}}},
                 // As lm-eval asks: ids, and one token more, which it drops.
                 {R"({"prompt":[[97,98,99]],"echo":true,"logprobs":1,"max_tokens":1})",
                  {{"/choices/0/text", R"("abch")"}, {"/choices/0/logprobs/tokens", R"(["a","b","c","h"])"}}},
                 {R"({"prompt":"ab","echo":true,"logprobs":0,"max_tokens":0,"return_token_ids":true})",
                  {{"/choices/0/text", R"("ab")"},
                   {"/choices/0/logprobs/tokens", R"(["a","b"])"},
                   {"/choices/0/logprobs/text_offset", "[0,1]"},
                   {"/choices/0/token_ids", "[]"},
                   {"/usage/completion_tokens", "0"}}},
                 // A stream has them in its first event.
                 {R"({"prompt":"ab","echo":true,"logprobs":1,"max_tokens":2,"stream":true})",
                  {{"/0/choices/0/text", R"("abh")"},
                   {"/0/choices/0/logprobs/tokens", R"(["a","b","h"])"},
                   {"/0/choices/0/logprobs/text_offset", "[0,1,2]"},
                   {"/1/choices/0/logprobs/text_offset", "[3]"}}},
                 // By token id, with ranks.
                 {R"({"prompt":"ab","prompt_logprobs":1,"max_tokens":1})",
                  {{"/choices/0/text", R"("h")"},
                   {"/choices/0/logprobs", "null"},
                   {"/choices/0/prompt_logprobs",
                    R"([null,{"98":{"logprob":-9.8,"rank":7,"decoded_token":"b"},
                    "33":{"logprob":-0.5,"rank":1,"decoded_token":"!"}}])"}}}});
  CHECK(server.service.seen()[0].prompt_logprobs == 1);
  const Reply chat = server.post("/v1/chat/completions",
                                 R"({"messages":[{"role":"user","content":"a"}],"prompt_logprobs":0})");
  REQUIRE(chat.status == 200);
  CHECK(parsed(chat.body)["prompt_logprobs"].size() == server.service.seen().back().prompt.size());
}

}  // namespace xpyd::testing::prompt_logprobs_test
