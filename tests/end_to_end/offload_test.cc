// KV that comes back from an offload tier gives the logits that computing it gives, and other sequences run while it
// loads.
#include <map>
#include <set>

#include "tests/catch.h"
#include "tests/late_copies.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::tiers_test {

constexpr size_t kTokenBytes = 256;  // of the tiny model's KV

// Conversations in rounds: each prompt is the one before it, its answer, and something new.
struct Run {
  std::map<uint64_t, Recorder::Choice> choices;
  OffloadStats tiers;
  int64_t preemptions = 0;
};

Run converse(const TinySetup& setup, int conversations = 6, int rounds = 3) {
  TinyCluster tiny(setup);
  Run run;
  std::vector<std::vector<int32_t>> texts;
  for (int c = 0; c < conversations; ++c) {
    std::vector<int32_t> text;
    for (int i = 0; i < 40 + 11 * c; ++i) text.push_back((i * 5 + (i < 24 ? c % 2 : c) * 7) % 96);
    texts.push_back(text);
  }
  for (int round = 0; round < rounds; ++round) {
    for (int c = 0; c < conversations; ++c)
      REQUIRE(tiny.submit(tiny_request(uint64_t(round * 100 + c), texts[size_t(c)], 9)).ok());
    tiny.run();
    for (int c = 0; c < conversations; ++c) {
      const Recorder::Choice choice = tiny.recorder->choice(uint64_t(round * 100 + c));
      REQUIRE(choice.ends == 1);
      run.choices[uint64_t(round * 100 + c)] = choice;
      auto& text = texts[size_t(c)];
      text.insert(text.end(), choice.tokens.begin(), choice.tokens.end());
      for (int i = 0; i < 7; ++i) text.push_back((round * 31 + c * 7 + i) % 96);
    }
  }
  for (const auto& instance : tiny.cluster->instances()) {
    instance->memory().check_invariants(!tiny.cluster->stats().shared_pool);
    const KvStats kv = instance->memory().stats();
    CHECK(kv.free + kv.cached == kv.capacity);
    run.tiers.host_hit_tokens += kv.tiers.host_hit_tokens;
    run.tiers.disk_hit_tokens += kv.tiers.disk_hit_tokens;
    run.tiers.bytes_out += kv.tiers.bytes_out;
    run.tiers.bytes_in += kv.tiers.bytes_in;
    run.preemptions += instance->stats().preemptions;
  }
  return run;
}

// Runs on one thread, because slow copies advance only when the engine looks.
TinySetup slow_setup(ThreadTeam& team, LateCopies& copies, Dtype dtype) {
  TinySetup setup{.layers = 4};
  setup.kv_dtype = dtype;
  setup.stream_kv = StreamKv::request;
  setup.step_tokens = 48;
  setup.max_batch = 6;
  setup.device = &copies;
  setup.make_model = [&team](const TinySetup& s, DeviceQueue&) {
    return Result<std::unique_ptr<Model>>(make_llama(tiny_weights(s.layers), team, s.step_tokens, s.max_batch));
  };
  setup.tiers.block_tokens = 8;
  copies.slow = true;
  return setup;
}

// Quantised rows carry their scales wherever they go: to an offload tier and back, into another slot, and
// behind a second mapping.
TEST_CASE("tiers: logits equal those without tiers, for every scheme, sharing, topology, tier and KV dtype",
          "[tiers][kv_dtype][parity]") {
  struct Memory {
    const char* scheme;
    KvShare share = KvShare::off;
    bool tiers = true;
  };
  TempDir dir;
  ThreadTeam team(1);
  int turn = 0;
  int64_t preemptions = 0, shared = 0;
  std::set<uint64_t> hashes;
  for (const Dtype dtype : kKvDtypes) {
    const KvShape shape = kv_shape(tiny_config(4), dtype);
    LateCopies copies;
    TinySetup plain_setup = slow_setup(team, copies, dtype);
    plain_setup.pool_bytes = 8 * 512 * shape.token_bytes();
    plain_setup.prefix_cache = false;
    const Run plain = converse(plain_setup, 4);
    hashes.insert(plain.choices.at(0).logits_hash);
    for (const Memory& m : {Memory{"paged"},
                            {"contiguous"},
                            {"vattention"},
                            {"slots"},
                            {"slots", KvShare::off, false},
                            {"vattention", KvShare::alias, false},
                            {"vattention", KvShare::takeover, false},
                            {"vattention", KvShare::copy}})
      for (const auto& [topology, transport] :
           {std::pair("1C", "local"), {"1C", "local"}, {"1P1D", "local"}, {"2P1D", "handoff"}}) {
        const bool disk = turn % 2, one_slot_each = m.scheme[0] == 'c' || m.scheme[0] == 's';
        const bool tables = m.scheme[0] == 'p';  // handoff needs them
        TinySetup setup = slow_setup(team, copies, dtype);
        setup.scheme = m.scheme, setup.share = m.share, setup.topology = topology,
        setup.transport = tables ? transport : "local";
        setup.order = turn % 3 ? KvOrder::layer_major : KvOrder::token_major;
        setup.stream_kv = turn % 5 ? StreamKv::request : StreamKv::layer;
        setup.reserve_blocks = topology == std::string("2P1D");
        ++turn;
        // The pool is too small for all, so blocks are evicted and sequences preempted.
        setup.pool_bytes = (one_slot_each ? 5 * 512 : 18 * 16) * shape.token_bytes();
        if (m.scheme[0] == 'v') setup.pool_bytes = 30 * 4096 * size_t(2 * shape.n_layers);
        if (m.tiers) setup.tiers.host_bytes = (disk ? 30 : 200) * 8 * shape.token_bytes();
        if (m.tiers && disk) setup.tiers.disk_dir = dir.path, setup.tiers.disk_bytes = 1 << 20;
        INFO(setup.describe());
        const Run run = converse(setup, 4);
        for (const auto& [id, choice] : plain.choices) {
          INFO("request " << id);
          CHECK(run.choices.at(id).tokens == choice.tokens);
          CHECK(run.choices.at(id).logits_hash == choice.logits_hash);
          shared += run.choices.at(id).cached_tokens;
        }
        preemptions += run.preemptions;
        if (!m.tiers) continue;
        CHECK(run.tiers.bytes_out > 0);
        const int64_t hits = run.tiers.host_hit_tokens + run.tiers.disk_hit_tokens;
        if (m.scheme[0] == 'c') CHECK(hits > 200);
        if (m.scheme[0] == 'c' && disk) CHECK(run.choices.at(200).cached_tokens >= 32);  // reported as cached
      }
  }
  CHECK(hashes.size() == std::size(kKvDtypes));
  CHECK(shared > 20'000);
  CHECK(preemptions > 0);
}

TEST_CASE("tiers: other sequences run while a sequence's KV is loading", "[tiers][engine]") {
  for (const char* scheme : {"paged", "contiguous", "vattention"}) {
    INFO(scheme);
    LateCopies copies;
    TinySetup setup{.scheme = scheme, .prefix_cache = false, .pool_bytes = 4 * 512 * kTokenBytes};
    setup.tiers.host_bytes = 1 << 20;
    setup.tiers.block_tokens = 8;
    setup.device = &copies;
    setup.step_tokens = 64;
    TinyCluster tiny(setup);
    const auto ask = [&](uint64_t id, int step) {
      std::vector<int32_t> prompt;
      for (int i = 0; i < 64; ++i) prompt.push_back(i * step % 96);
      REQUIRE(tiny.submit(tiny_request(id, prompt, 8)).ok());
    };
    ask(1, 11);
    tiny.run();
    const Recorder::Choice first = tiny.recorder->choice(1);
    CHECK(first.cached_tokens == 0);
    copies.late = true;
    ask(2, 11);  // the host tier alone has its KV
    ask(3, 7);
    for (int turn = 0; turn < 2000 && tiny.recorder->choice(3).ends == 0; ++turn) tiny.cluster->turn();
    CHECK(tiny.recorder->choice(3).ends == 1);  // it came later and did not wait
    CHECK(tiny.recorder->choice(2).ends == 0);
    CHECK(tiny.recorder->choice(2).tokens.empty());
    copies.late = false;
    tiny.run();
    const Recorder::Choice second = tiny.recorder->choice(2);
    CHECK(second.tokens == first.tokens);
    CHECK(second.logits_hash == first.logits_hash);
    CHECK(second.cached_tokens == 56);  // never the last token
  }
}

}  // namespace xpyd::testing::tiers_test
