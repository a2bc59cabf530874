// --disagg append_cost: when D computes a conversation's next turn itself, which D is asked, and that a client sees no
// difference.
#include <map>

#include "disagg/conductor/order.h"
#include "disagg/conductor/placement.h"
#include "tests/disagg/logged.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::append_test {
namespace {

using Tokens = std::vector<int32_t>;

const DisaggPolicy& append_cost() { return *find_disagg_policy("append_cost"); }

// A turn of 1,000 tokens after 9,000 that both sides have cached. Either side computes it in 100 ms. KV from P crosses
// in 100 ms, and D's step takes 10 ms.
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

// Each row changes the view that the row before has left.
TEST_CASE("append_cost: a turn is appended if it saves a greater share of TTFT than it costs of TBT",
          "[order][append]") {
  constexpr auto kLocal = DisaggOrder::local, kPush = DisaggOrder::push;
  DisaggView view = next_turn();
  const auto decide = [&](const DisaggOptions& o = {}) { return append_cost().decide(view, o); };
  constexpr struct {
    void (*change)(DisaggView&);
    DisaggOrder order;
  } kRows[] = {
      {[](DisaggView&) {}, kLocal},                   // without overlap: 210 ms by P, 110 ms by D
      {[](DisaggView& v) { v.overlap = 1; }, kPush},  // a transfer that is hidden entirely leaves nothing to save
      {[](DisaggView& v) { v.prefill_queued_tokens = 1; }, kLocal},  // one queued token does
      // 1,000 tokens queue at P, so D saves .1 of .21 s: .476. Each of 20 decodes of 5 s loses .1 s: .4.
      {[](DisaggView& v) { v.prefill_queued_tokens = 1000, v.decode_sequences = 20; }, kLocal},
      {[](DisaggView& v) { v.decode_sequences = 24; }, kPush},
      {[](DisaggView& v) { v.decode_life_s = 10; }, kLocal},
      {[](DisaggView& v) { v.decode_queued_tokens = 900; }, kPush},  // D's own queue counts, too
      // Without cached KV at D, or before a decode has ended there, nothing is appended, however long P's queue is.
      {[](DisaggView& v) { v = next_turn(), v.prefill_queued_tokens = 1 << 20; }, kLocal},
      {[](DisaggView& v) { v.decode_life_s = 0; }, kPush},
      {[](DisaggView& v) { v.decode_life_s = 5, v.cached_decode = 0; }, kPush},
  };
  for (const auto& row : kRows) {
    INFO("row " << &row - kRows);
    row.change(view);
    CHECK(decide() == row.order);
    CHECK(decide({.pull = true}) == (row.order == kPush ? DisaggOrder::pull : kLocal));
  }
  CHECK(find_disagg_policy("conditional_cost")->decide(view, {}) == kLocal);
  view = next_turn(), view.overlap = 1, view.prefill_queued_tokens = 1000, view.decode_sequences = 24;
  CHECK(decide({.append_tbt_weight = 0.9}) == kLocal);
}

TEST_CASE("append_cost: the D with the most cached tokens and enough room is asked first", "[order][append]") {
  std::vector<InstanceView> all(5);
  const auto asked = [&] { return append_cost().appends_at({.instances = all, .prompt_tokens = 1000}); };
  for (InstanceView& d : all) d = {.role = Role::decode, .sequences = 2, .available_tokens = 5000};
  all[0].role = Role::prefill, all[0].cached_tokens = 990;
  all[4].role = Role::colocated, all[4].cached_tokens = 990;
  CHECK(asked() == -1);  // no D has any
  all[3].cached_tokens = 64;
  CHECK(asked() == 3);
  all[1].cached_tokens = 640;
  CHECK(asked() == 1);
  all[2].host_tokens = 656;  // its host tier counts
  CHECK(asked() == 2);
  all[2].available_tokens = 999;  // no room
  CHECK(asked() == 1);
  all[3].cached_tokens = 640;
  CHECK(asked() == 1);  // the first of equals
  all[3].sequences = 1;
  CHECK(asked() == 3);  // … except one that decodes fewer sequences
  for (const DisaggPolicy& row : disagg_policies())
    CHECK((row.appends_at != nullptr) == (std::string(row.name) == "append_cost"));
}

// ---- The whole cluster, in virtual time.

// Sessions run side by side. Their later turns come while P has many prompts that need no D.
TEST_CASE("append_cost: the D that has a conversation's KV appends its next turns, and tokens do not change",
          "[order][append]") {
  constexpr int kSessions = 5, kTurns = 4, kAnswer = 9, kBlock = 16;
  for (const char* topology : {"1P1D", "1P3D"}) {
    INFO(topology);
    Logged logged;
    SimOptions options = in("append_cost");
    options.kv.pool_bytes = 2000 * kv_shape(checksum_config(), Dtype::f32).token_bytes();
    options.conductor.disagg_options.append_tbt_weight = 0;
    options.conductor.placement = find_placement_policy("prefix_aware");
    options.conductor.log = std::exchange(logged.log, nullptr);
    {
      Scene scene(topology, std::move(options));
      std::vector<Tokens> said(kSessions);
      uint64_t id = 0;
      for (int turn = 0; turn < kTurns; ++turn) {
        for (int i = 0; i < 6; ++i) scene.ask(1000 + uint64_t(turn * 10 + i), 150, 1, 7 + turn * 10 + i);
        const uint64_t first = id + 1;
        for (size_t s = 0; s < said.size(); ++s) {
          for (int i = 0; i < 20; ++i) said[s].push_back(int32_t(s * 31 + size_t(i) * 7 + size_t(turn)) % 96);
          scene.ask(++id, said[s], kAnswer);
        }
        scene.settle();
        for (size_t s = 0; s < said.size(); ++s) {
          const Tokens answer = scene.recorder->choice(first + s).tokens;
          said[s].insert(said[s].end(), answer.begin(), answer.end());
          // The D has all that was said, except the answer's last token and a last block that is not full.
          CHECK(scene.cached(first + s) == std::max(0, turn * (20 + kAnswer) - 1) / kBlock * kBlock);
        }
      }
      scene.close();
      scene.forget_log();
    }
    CHECK(logged.replayed().at("append").decisions == kSessions * kTurns);
    int appended = 0;
    const auto orders = logged.events()["order"];
    for (const auto& line : orders) appended += line.value("answer", 0) == int(DisaggOrder::local);
    CHECK(appended == kSessions * (kTurns - 1));
  }
}

}  // namespace
}  // namespace xpyd::testing::append_test
