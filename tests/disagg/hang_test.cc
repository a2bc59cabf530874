// Several instances with tensor ranks in one process, each waiting for its own: what a NCCL of several communicators
// answers with a hang when threads enqueue their collectives in different orders (TurboMind's notes). Ranks here meet
// at a barrier that belongs to their stage alone, so there is no order to agree upon; here every rank is held up at
// random in each layer, and a watch says who waits for whom when nobody moves any more.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "attention/attention.h"
#include "base/random.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::hang_test {
namespace {

// Of a run at a time: who is where, by the KV that a rank's attention reads.
class HangWatch {
 public:
  // It ends the program, whose threads cannot be joined, when no rank has moved for a minute.
  explicit HangWatch(const Cluster& cluster) : cluster_(cluster) {
    for (size_t i = 0; i < cluster.instances().size(); ++i) {
      const KvMemory& memory = cluster.instances()[i]->memory();
      for (int rank = 0; rank < memory.n_ranks(); ++rank) {
        Rank& at = ranks_[memory.base(rank)];
        at.instance = int(i), at.rank = rank;
        at.stage = rank / memory.places().shards.value_or(KvShards{}).tp;
      }
    }
    now_ = this;
    thread_ = std::thread([this] { watch(); });
  }
  ~HangWatch() {
    done_ = true;
    thread_.join();
    now_ = nullptr;
  }

  static void attention(const AttentionArgs& args, ThreadTeam& team) {
    HangWatch& watch = *now_;
    Rank& at = watch.ranks_.at(args.views[0].pool);
    at.layer = args.layer, at.inside = true;
    ++watch.moves_;
    thread_local Random random(uint64_t(uintptr_t(args.views[0].pool)) ^ seed);
    if (random.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(400)));
    default_attention().run(args, team);
    if (random.below(4) == 0) std::this_thread::yield();
    at.inside = false;
    ++at.ended, ++watch.moves_;
  }
  int64_t moves() const { return moves_; }

  static inline std::atomic<uint64_t> seed{0};

 private:
  struct Rank {
    int instance = 0, rank = 0, stage = 0;
    std::atomic<int> layer{-1};
    std::atomic<int64_t> ended{0};  // layers' attention
    std::atomic<bool> inside{false};
  };

  // A rank that has left a layer's attention is at its stage's barrier as long as another one there has left fewer.
  std::string who_waits() const {
    std::map<std::pair<int, int>, std::string> lines;
    for (const auto& [base, r] : ranks_) {
      std::string& line = lines[{r.instance, r.rank}];
      line = "  rank " + std::to_string(r.rank);
      if (r.inside) {
        line += " is in attention of layer " + std::to_string(r.layer);
        continue;
      }
      std::string mates;
      for (const auto& [other, o] : ranks_)
        if (o.instance == r.instance && o.stage == r.stage && o.ended < r.ended)
          mates += (mates.empty() ? "" : ", ") + std::to_string(o.rank);
      line += r.layer < 0 ? " has not begun" : " is behind attention of layer " + std::to_string(r.layer);
      if (!mates.empty()) line += " and waits for rank " + mates;
    }
    std::string text;
    for (const auto& [key, line] : lines) {
      const InstanceStats stats = cluster_.instances()[size_t(key.first)]->stats();
      if (key.second == 0) text += stats.name + " has " + std::to_string(stats.running) + " sequences in steps\n";
      text += line + "\n";
    }
    return text;
  }

  void watch() {
    int64_t seen = -1;
    RealClock clock;
    for (double since = clock.now(); !done_; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      if (std::exchange(seen, moves_.load()) != moves_) since = clock.now();
      if (clock.now() - since < 60) continue;
      std::fprintf(stderr, "nobody moves:\n%s", who_waits().c_str());
      std::abort();
    }
  }

  static inline std::atomic<HangWatch*> now_{nullptr};
  const Cluster& cluster_;
  std::map<const std::byte*, Rank> ranks_;
  std::atomic<int64_t> moves_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

constexpr AttentionVariant kWatched = {"watched", HangWatch::attention, Isa::portable, ""};

// All instances are alike: tp x pp ranks each.
TinySetup setup_of(const char* topology, int tp, int pp, const char* transport) {
  TinySetup setup{.topology = topology, .transport = transport};
  setup.prefill_tp = setup.decode_tp = tp;
  setup.prefill_pp = setup.decode_pp = pp;
  setup.step_tokens = 24;
  setup.max_batch = 3;
  setup.pool_bytes = 2 << 20;
  setup.make_model = [tp, pp](const TinySetup& s, DeviceQueue&) -> Result<std::unique_ptr<Model>> {
    const ModelConfig& c = tiny_config(s.layers);
    return make_sharded_llama(tiny_weights(s.layers),
                              {.shards = {.n_layers = c.n_layers, .n_kv_heads = c.n_kv_heads, .tp = tp, .pp = pp}},
                              s.step_tokens, s.max_batch, {.attention = &kWatched});
  };
  return setup;
}

TEST_CASE("hang: instances with tensor ranks in one process, each rank held up at random, never wait for ever",
          "[disagg][hang]") {
  const uint64_t expected = run_ragged({.topology = "1C"}).hash;
  int ended = 0;
  for (auto [topology, tp, pp, transport] :
       {std::tuple("3P3D", 2, 1, "local"), {"2P1D1C", 4, 1, "local"}, {"2P2D", 2, 2, "tcp"}, {"4C", 2, 1, "local"}})
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      INFO(topology << " tp " << tp << " pp " << pp << " seed " << seed);
      HangWatch::seed = seed;
      TinyCluster tiny(setup_of(topology, tp, pp, transport));
      HangWatch watch(*tiny.cluster);
      uint64_t id = 0;
      for (const auto& prompt : ragged_prompts()) REQUIRE(tiny.submit(tiny_request(id++, prompt, 6)).ok());
      REQUIRE(tiny.cluster->start().ok());
      REQUIRE(tiny.cluster->wait_idle(600));
      ended += tiny.recorder->ended();
      CHECK(tiny.cluster->logits_hash() == expected);
      tiny.cluster->stop();
      CHECK(watch.moves() > 200);
    }
  CHECK(ended == 40 * 9);
}

}  // namespace
}  // namespace xpyd::testing::hang_test
