// --disagg append_cost: when D computes a conversation's next turn itself, which D is asked, and that a client cannot
// tell who it was.
#include <map>
#include <nlohmann/json.hpp>

#include "disagg/event_log.h"
#include "disagg/order.h"
#include "disagg/placement.h"
#include "experiments/event_log/replay.h"
#include "experiments/simulate/cluster.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::append_test {
namespace {

using Tokens = std::vector<int32_t>;

const DisaggPolicy& append_cost() { return *find_disagg_policy("append_cost"); }

// A turn of 1,000 tokens after 9,000 that both sides have. P: 1,000 x .1 ms and D's first step; D: the same and a step.
DisaggView next_turn() {
  return {.tokens = 10000,
          .cached_decode = 9000,
          .cached_prefill = 9000,
          .decode_life_s = 5,
          .prefill_s_per_token = 1e-4,
          .decode_s_per_token = 1e-4,
          .step_s = 0.01,
          .kv_s_per_token = 1e-4,
          .chunk_tokens = 1000};
}

TEST_CASE("append_cost: the share of the first token's time that is saved, less the share that TBT loses",
          "[order][append]") {
  const auto decide = [](const DisaggView& view, const DisaggOptions& o = {}) { return append_cost().decide(view, o); };
  // What crosses shows: 210 ms by P, 110 ms by D, and nobody decodes there.
  DisaggView view = next_turn();
  CHECK(decide(view) == DisaggOrder::local);
  // A wire that hides all of it leaves nothing to save, to the last digit.
  view.overlap = 1;
  CHECK(decide(view) == DisaggOrder::push);
  view.prefill_queued_tokens = 1;
  CHECK(decide(view) == DisaggOrder::local);
  CHECK(decide(view, {.pull = true}) == DisaggOrder::local);
  // 1,000 tokens queue at P: .1 of .21 s is saved, .476. 20 decodes that last 5 s, each with .1 s of such a turn: .4.
  view.prefill_queued_tokens = 1000;
  view.decode_sequences = 20;
  CHECK(decide(view) == DisaggOrder::local);
  view.decode_sequences = 24;
  CHECK(decide(view) == DisaggOrder::push);
  CHECK(decide(view, {.pull = true}) == DisaggOrder::pull);
  CHECK(decide(view, {.append_tbt_weight = 0.9}) == DisaggOrder::local);
  view.decode_life_s = 10;
  CHECK(decide(view) == DisaggOrder::local);
  // D's own queue is waited for, too.
  view.decode_queued_tokens = 900;
  CHECK(decide(view) == DisaggOrder::push);
}

TEST_CASE("append_cost: nobody's next turn is not appended, however long P's queue", "[order][append]") {
  DisaggView view = next_turn();
  view.prefill_queued_tokens = 1 << 20;
  CHECK(append_cost().decide(view, {}) == DisaggOrder::local);
  view.cached_decode = 0;
  CHECK(append_cost().decide(view, {}) == DisaggOrder::push);
  CHECK(find_disagg_policy("conditional_cost")->decide(view, {}) == DisaggOrder::local);
  view = next_turn();
  view.prefill_queued_tokens = 1 << 20;
  view.decode_life_s = 0;
  CHECK(append_cost().decide(view, {}) == DisaggOrder::push);
}

// Of one queue and one delay conditional_cost asks for seconds in sum, append_cost for shares.
TEST_CASE("append_cost and conditional_cost disagree both ways", "[order][append]") {
  const DisaggPolicy& sum = *find_disagg_policy("conditional_cost");
  DisaggView view = next_turn();  // saved: .1 of .21 s; ten decodes lose .1 s each, 1 s in sum, and .2 of their time
  view.decode_sequences = 10;
  CHECK(append_cost().decide(view, {}) == DisaggOrder::local);
  CHECK(sum.decide(view, {}) == DisaggOrder::push);
  // P's queue is 2 s long; ten decodes that last 1 s lose all of their time, which is 1 s in sum.
  view.prefill_queued_tokens = 20000;
  view.decode_life_s = 1;
  CHECK(append_cost().decide(view, {}) == DisaggOrder::push);
  CHECK(sum.decide(view, {}) == DisaggOrder::local);
}

TEST_CASE("append_cost: who is asked first", "[order][append]") {
  std::vector<InstanceView> all(5);
  const auto asked = [&] { return append_cost().appends_at({.instances = all, .prompt_tokens = 1000}); };
  for (InstanceView& d : all) d = {.role = Role::decode, .sequences = 2, .available_tokens = 5000};
  all[0].role = Role::prefill, all[0].cached_tokens = 990;
  all[4].role = Role::colocated, all[4].cached_tokens = 990;
  CHECK(asked() == -1);  // no D has anything
  all[3].cached_tokens = 64;
  CHECK(asked() == 3);
  all[1].cached_tokens = 640;
  CHECK(asked() == 1);
  all[2].host_tokens = 656;  // its tier counts
  CHECK(asked() == 2);
  all[2].available_tokens = 999;  // no room
  CHECK(asked() == 1);
  all[3].cached_tokens = 640;
  CHECK(asked() == 1);  // the first of equals
  all[3].sequences = 1;
  CHECK(asked() == 3);  // … but for who decodes less
  for (const DisaggPolicy& row : disagg_policies())
    CHECK((row.appends_at != nullptr) == (std::string(row.name) == "append_cost"));
}

// ---- On a cluster.

// What a client sees of one choice.
struct Seen {
  Tokens tokens;
  std::vector<float> logprobs;
  uint64_t logits_hash = 0;
  int cached = 0;
  bool operator==(const Seen& o) const {
    return tokens == o.tokens && logprobs == o.logprobs && logits_hash == o.logits_hash;
  }
};

class Client final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    std::lock_guard lock(mutex_);
    Seen& seen = seen_[event.request_id];
    if (event.token >= 0) {
      seen.tokens.push_back(event.token);
      REQUIRE(event.has_logprobs);
      seen.logprobs.push_back(event.sampled.chosen.logprob);
      seen.cached = event.cached_tokens;
    }
    if (event.finish == FinishReason::none) return;
    CHECK(event.finish == FinishReason::length);
    seen.logits_hash = event.logits_hash;
  }
  Seen of(uint64_t id) {
    std::lock_guard lock(mutex_);
    return seen_.at(id);
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, Seen> seen_;
};

constexpr int kSessions = 5, kTurns = 4, kAnswer = 9, kBlock = 16;

struct Talk {
  std::vector<Seen> seen;  // turn by turn
  int appended = 0, asked = 0;
};

// Sessions side by side, whose later turns come while P has much to do that needs no D.
Talk talk(TinySetup setup) {
  const TempDir dir;
  const std::string path = dir.path + "/log";
  Talk talk;
  {
    setup.log = EventLog::create(path, 64 << 20, "{}").value();
    TinyCluster tiny(setup);
    auto client = std::make_shared<Client>();
    REQUIRE(tiny.cluster->start().ok());
    std::vector<Tokens> said(kSessions);
    uint64_t id = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int i = 0; i < 6; ++i) {
        Tokens other;
        for (int t = 0; t < 300; ++t) other.push_back((t * 3 + i * 7 + turn * 41) % 96);
        auto request = tiny_request(1000 + uint64_t(turn * 10 + i), other, 1);
        request->cache_salt = request->id;
        REQUIRE(tiny.submit(request).ok());
      }
      const uint64_t first = id + 1;
      for (size_t s = 0; s < said.size(); ++s) {
        for (int i = 0; i < 20; ++i) said[s].push_back(int32_t(s * 31 + size_t(i) * 7 + size_t(turn)) % 96);
        auto request = tiny_request(++id, said[s], kAnswer);
        request->cache_salt = s + 1;
        request->ignore_eos = true;
        request->sampling.top_logprobs = 0;
        request->arrival_s = tiny.clock.now();
        REQUIRE(tiny.cluster->submit(request, client).ok());
      }
      REQUIRE(tiny.cluster->wait_idle(60));
      for (size_t s = 0; s < said.size(); ++s) {
        talk.seen.push_back(client->of(first + s));
        const Tokens& answer = talk.seen.back().tokens;
        said[s].insert(said[s].end(), answer.begin(), answer.end());
      }
    }
    tiny.cluster->stop();
    for (const auto& instance : tiny.cluster->instances()) instance->memory().check_invariants();
    setup.log.reset();
  }
  const auto counts = replay(
      {&path, 1}, {}, [](const std::string& line, const std::string& now) { FAIL_CHECK(line << "\nnow " << now); });
  REQUIRE(counts.ok());
  const bool asks = find_disagg_policy(setup.disagg)->appends_at;
  CHECK(counts.value().contains("append") == asks);
  if (asks) CHECK(counts.value().at("append").decisions == kSessions * kTurns);
  REQUIRE(read_event_logs({&path, 1}, [&](auto&, const nlohmann::json& line) {
            if (line["e"] != "order") return;
            ++talk.asked;
            talk.appended += line.value("answer", 0) == int(DisaggOrder::local);
          }).ok());
  return talk;
}

TEST_CASE("append_cost: next turns are appended at the D that has them, and nobody can tell", "[order][append]") {
  for (const char* topology : {"1P1D", "1P3D"}) {
    const Talk plain = talk({.topology = topology});
    CHECK(plain.appended == 0);
    for (const char* transport : {"local", "handoff", "shm", "tcp"})
      for (const double weight : {0., 1.}) {
        INFO(topology << " " << transport << " " << weight);
        TinySetup setup{.topology = topology, .transport = transport, .disagg = "append_cost"};
        setup.disagg_options.append_tbt_weight = weight;
        const Talk with = talk(setup);
        CHECK((with.seen == plain.seen));
        if (weight > 0) continue;  // who is slowed by how much is the clock's to say
        // P's queue is 1,800 tokens: every turn but the first, at a D that has all that was said, but for the answer's
        // last token and what fills no block. (Seconds are predicted from steps that were measured: on a busy machine
        // some turns may go to P.)
        CHECK(with.appended > 0);
        int whole = 0;
        for (size_t i = kSessions; i < with.seen.size(); ++i) {
          const int said = int(i / kSessions) * (20 + kAnswer) - 1;
          whole += with.seen[i].cached == said / kBlock * kBlock;
        }
        CHECK(whole >= with.appended);
      }
  }
}

// ---- In virtual time.

// Three sessions of four turns, and what keeps P busy, each of whose prompts nobody has.
Trace conversations() {
  Trace trace{.block_tokens = 64, .closed_loop = true};
  std::map<int, int> last;
  for (int turn = 0; turn < 4; ++turn)
    for (int s = 0; s < 3; ++s) {
      TraceRequest request{.arrival_s = 0.1 * s,
                           .prompt_tokens = 3000 + 500 * turn,
                           .output_tokens = 100,
                           .session = s,
                           .after = turn > 0 ? last.at(s) : -1,
                           .think_s = 0.5};
      const auto own = uint64_t(s + 1) << 32;
      for (int b = 0; b * 64 < request.prompt_tokens; ++b)  // the last one is partial, and this turn's own
        request.blocks.push_back(own + uint64_t(b) +
                                 ((b + 1) * 64 > request.prompt_tokens ? 1000u * unsigned(turn + 1) : 0));
      last[s] = int(trace.requests.size());
      trace.requests.push_back(std::move(request));
    }
  for (int i = 0; i < 30; ++i) {
    TraceRequest request{.arrival_s = 0.7 * i, .prompt_tokens = 6400, .output_tokens = 1};
    for (int b = 0; b < 100; ++b) request.blocks.push_back((uint64_t(i + 10) << 32) + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

TEST_CASE("append_cost: simulated, a turn finds its D, and what was answered there", "[order][append][simulate]") {
  const Trace trace = conversations();
  SimulationOptions o{.hardware = find_hardware("a800x8").value(),
                      .model = find_simulated_model("llama-3-70b").value()};
  o.topology = "1P3D";
  o.block_tokens = 64;
  o.kv_tokens = 200000;
  o.engine = {.policy = find_batch_policy("chunked"), .max_batch = 32, .step_tokens = 512};
  o.conductor.placement = find_placement_policy("prefix_aware");
  o.conductor.max_model_len = 8192;
  o.conductor.step_tokens = 512;
  const auto ttft_s = [&](const Simulation& run) {
    double sum = 0;
    for (int i = 3; i < 12; ++i) sum += run.records[size_t(i)].times.first_s - run.records[size_t(i)].arrival_s;
    return sum / 9;
  };
  o.answers = true;
  o.conductor.disagg = find_disagg_policy("prefill_first");
  const Simulation plain = simulate(o, trace).value();
  o.conductor.disagg = &append_cost();
  for (const bool answers : {true, false}) {
    INFO(answers);
    o.answers = answers;
    const TempDir dir;
    const std::string path = dir.path + "/log";
    o.conductor.log = EventLog::create(path, 64 << 20, "{}").value();
    const Simulation run = simulate(o, trace).value();
    o.conductor.log.reset();
    for (int i = 0; i < 12; ++i) {
      const SimulatedRecord& r = run.records[size_t(i)];
      CHECK(r.end == SimulatedEnd::completed);
      CHECK(r.order == (i < 3 ? DisaggOrder::push : DisaggOrder::local));
      const int before = trace.requests[size_t(i)].prompt_tokens - 500;  // and its answer, but for the last token
      if (i >= 3) CHECK(r.cached == (answers ? (before + 99) / 64 : before / 64) * 64);
    }
    CHECK(ttft_s(run) < 0.5 * ttft_s(plain));
    CHECK(run.kv_gb == Approx(3 * 3000 * o.model.kv_token_bytes() * 1e-9));  // first turns
    CHECK(plain.kv_gb > 1.3 * run.kv_gb);
    const auto counts = replay(
        {&path, 1}, {}, [](const std::string& line, const std::string& now) { FAIL_CHECK(line << "\nnow " << now); });
    REQUIRE(counts.ok());
    CHECK(counts.value().at("append").decisions == 12);  // of whom one token is wanted needs no D
    CHECK(counts.value().at("order").decisions == 12);
    CHECK(counts.value().at("place").decisions == 42);
  }
}

}  // namespace
}  // namespace xpyd::testing::append_test
