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
  // `hung` is told once, on a thread of the watch, when no rank has moved for `limit_s`.
  HangWatch(const Cluster& cluster, double limit_s, std::function<void(const std::string&)> hung) : cluster_(cluster) {
    for (size_t i = 0; i < cluster.instances().size(); ++i) {
      const KvMemory& memory = cluster.instances()[i]->memory();
      for (int rank = 0; rank < memory.n_ranks(); ++rank) {
        Rank& at = ranks_[memory.base(rank)];
        at.instance = int(i), at.rank = rank;
        at.stage = rank / memory.places().shards.value_or(KvShards{}).tp;
      }
    }
    now_ = this;
    thread_ = std::thread([this, limit_s, hung] { watch(limit_s, hung); });
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
    if (at.instance == held_instance && at.rank == held_rank && args.layer == 1)
      while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (random.below(4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(400)));
    default_attention().run(args, team);
    if (random.below(4) == 0) std::this_thread::yield();
    at.inside = false;
    ++at.ended, ++watch.moves_;
  }
  int64_t moves() const { return moves_; }

  static inline std::atomic<uint64_t> seed{0};
  static inline std::atomic<bool> held{false};
  static inline std::atomic<int> held_instance{-1}, held_rank{-1};

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

  void watch(double limit_s, const std::function<void(const std::string&)>& hung) {
    int64_t seen = -1;
    RealClock clock;
    for (double since = clock.now(); !done_; std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      if (std::exchange(seen, moves_.load()) != moves_) since = clock.now();
      if (clock.now() - since < limit_s) continue;
      hung(who_waits());
      return;
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

void abort_with(const std::string& who) {
  std::fprintf(stderr, "nobody moves:\n%s", who.c_str());
  std::abort();  // its threads cannot be joined
}

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

// Everything at once; waits until all have ended.
uint64_t serve(TinyCluster& tiny, int& ended) {
  uint64_t id = 0;
  for (const auto& prompt : ragged_prompts()) REQUIRE(tiny.submit(tiny_request(id++, prompt, 6)).ok());
  REQUIRE(tiny.cluster->start().ok());
  while (tiny.recorder->ended() < int(id)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ended += int(id);
  const uint64_t hash = tiny.cluster->logits_hash();
  tiny.cluster->stop();
  return hash;
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
      HangWatch watch(*tiny.cluster, 20, abort_with);
      CHECK(serve(tiny, ended) == expected);
      CHECK(watch.moves() > 200);
    }
  CHECK(ended == 40 * 9);
}

TEST_CASE("hang: the watch says who waits for whom", "[disagg][hang]") {
  TinyCluster tiny(setup_of("2C", 2, 1, "local"));
  HangWatch::held_instance = 1, HangWatch::held_rank = 1, HangWatch::held = true;
  std::string said;
  int ended = 0;
  {
    HangWatch watch(*tiny.cluster, 0.5, [&](const std::string& who) {
      said = who;
      HangWatch::held = false;
    });
    serve(tiny, ended);
  }
  HangWatch::held_instance = -1;
  INFO(said);
  CHECK(said.find("C0 has 0 sequences in steps\n  rank 0 is behind attention of layer 1\n") != std::string::npos);
  CHECK(said.find("  rank 0 is behind attention of layer 1 and waits for rank 1\n"
                  "  rank 1 is in attention of layer 1\n") != std::string::npos);
}

}  // namespace
}  // namespace xpyd::testing::hang_test
