// --wire-kv-dtype: which rows come out of it, how many bytes cross, and that whoever dies in between leaves nothing.

#include "disagg/handover/wire_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "allocator/kv_plan.h"
#include "attention/kv_row.h"
#include "base/random.h"
#include "disagg/event_log.h"
#include "disagg/replay.h"
#include "tests/disagg/scene.h"

namespace xpyd::testing::wire_kv_test {
namespace {

using Tokens = std::vector<int32_t>;

// ---- Rows.

// What --wire-kv-dtype makes of one row: wide, narrow and wide again.
std::vector<std::byte> crossed(const KvShape& shape, WireKv form, const std::byte* row) {
  std::vector<float> x(size_t(shape.head_dim));
  std::vector<std::byte> narrow(wire_row_bytes(shape, form)), wide(shape.row_bytes());
  read_kv_row(shape.dtype, shape.head_dim, row, 0, shape.head_dim, x.data());
  write_kv_row(wire_dtype(form), shape.head_dim, x.data(), narrow.data());
  read_kv_row(wire_dtype(form), shape.head_dim, narrow.data(), 0, shape.head_dim, x.data());
  write_kv_row(shape.dtype, shape.head_dim, x.data(), wide.data());
  return wide;
}

// The bound of attention/kv_row.h, and of a row of bf16 one rounding more.
double bound_of(const KvShape& shape, WireKv form, const std::vector<float>& x) {
  const double levels = form == WireKv::int8 ? 255 : 15, u = 0x1p-24;
  double least = INFINITY, largest = -INFINITY, most = 0;
  for (float e : x) least = std::min<double>(least, e), largest = std::max<double>(largest, e);
  for (float e : x) most = std::max<double>(most, std::abs(e));
  const double scale = (1 + 0x1p-10) * (largest - least + 0x1p-10 * std::abs(least) + u) / levels + u;
  return scale * (0.5 + 4 * levels * u) + 2 * u * most + (shape.dtype == Dtype::bf16 ? 0x1p-8 * (most + scale) : 0);
}

// A wire that says where the peer's memory is, and no more.
class Beside final : public WrappedTransport {
 public:
  Beside(const TransportOptions& options, const KvMemory& there) : WrappedTransport("local", options), there_(there) {}
  std::byte* remote(PeerId, int region) const override { return there_.base(region); }

 private:
  const KvMemory& there_;
};

struct Ranks {
  int tp = 1, pp = 1;
};
std::unique_ptr<KvMemory> memory_of(const char* scheme, const KvOptions& options, Ranks ranks) {
  const KvShards shards{
      .n_layers = options.shape.n_layers, .n_kv_heads = options.shape.n_kv_heads, .tp = ranks.tp, .pp = ranks.pp};
  const KvScheme* row = find_kv_scheme(scheme);
  REQUIRE(plan_ranks(scheme, options, shards).ok());
  return row->make(make_ranked_pool(scheme, options, shards).value(), options);
}

TEST_CASE("wire kv: rows come out as the quantiser leaves them, within its bound, whatever the layouts and ranks",
          "[disagg][wire_kv]") {
  Random random(3);
  VirtualClock clock;
  constexpr int kTokens = 53;
  for (int round = 0; round < 60; ++round) {
    const KvShape shape{.n_layers = 3, .n_kv_heads = 4, .head_dim = 24, .dtype = round % 2 ? Dtype::f32 : Dtype::bf16};
    const WireKv form = round % 4 < 2 ? WireKv::int8 : WireKv::int4;
    const auto side = [&](Ranks ranks) {
      KvOptions options{.shape = shape};
      options.order = random.below(2) ? KvOrder::layer_major : KvOrder::token_major;
      options.block_tokens = int(std::vector{1, 4, 16}[random.below(3)]);
      options.max_sequence_tokens = 64;
      options.pool_bytes = 3 * 64 * shape.token_bytes() * size_t(ranks.tp);
      return memory_of(random.below(3) ? "paged" : "contiguous", options, ranks);
    };
    const Ranks shapes[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2}, {2, 3}};
    const auto p = side(shapes[random.below(6)]), d = side(shapes[random.below(6)]);
    const auto queue = cpu_device().make_queue(Device::Phase::both);
    const Beside wire({.regions = {{p->base(), 1}}, .queue = queue.get(), .clock = &clock}, *d);
    Peers peers(*p, wire);
    REQUIRE(peers.add(1, d->layout(), shards_of(*d)).ok());
    const Tokens tokens(kTokens, 1);
    const auto room = [&](KvMemory& memory) {
      const KvHandle kv = memory.reserve(tokens, 0).value().handle;
      REQUIRE(memory.append(kv, kTokens));
      return kv;
    };
    room(*d);  // so that blocks of the two differ
    const KvHandle from = room(*p), to = room(*d);
    const KvShards p_shards = shards_of(*p), d_shards = shards_of(*d);
    // f(row, rank, layer and head of the model, K or V, token)
    const auto each_row = [&](const KvMemory& memory, const KvShards& shards, KvHandle kv, auto&& f) {
      for (int rank = 0; rank < shards.n_ranks(); ++rank) {
        const KvRect rect = shards.rect(rank);
        const KvView view = memory.view(kv, rank);
        for (int layer = rect.layers.begin; layer < rect.layers.end; ++layer)
          for (int head = rect.heads.begin; head < rect.heads.end; ++head)
            for (int which = 0; which < 2; ++which)
              for (int token = 0; token < kTokens; ++token)
                f(view.row(layer - rect.layers.begin, which, token, head - rect.heads.begin), layer, head, which,
                  token);
      }
    };
    // Of its own for each row of the model, the same in every copy.
    const auto value = [&](int layer, int head, int which, int token) {
      Random own(uint64_t(((layer * 4 + head) * 2 + which) * kTokens + token));
      std::vector<float> x(size_t(shape.head_dim));
      const float scale = std::exp(4 * float(own.uniform()) - 2);
      for (float& e : x) e = scale * float(own.uniform() * 2 - 0.7);
      std::vector<std::byte> row(shape.row_bytes());
      write_kv_row(shape.dtype, shape.head_dim, x.data(), row.data());
      return row;
    };
    each_row(*p, p_shards, from, [&](std::byte* row, int layer, int head, int which, int token) {
      std::memcpy(row, value(layer, head, which, token).data(), shape.row_bytes());
    });
    // In posts, as P computes: chunks of tokens, layer by layer.
    const KvPlace place = place_of(*d, to, {}, 0);
    std::vector<uint64_t> sums(checksum_groups(kTokens));
    int64_t bytes = 0;
    for (int begin = 0; begin < kTokens;) {
      const int end = std::min(kTokens, begin + 1 + int(random.below(40)));
      for (int layer = 0; layer < shape.n_layers; ++layer) {
        TransferPlan plan;
        PackedRows packed;
        pack_kv(peers, from, 1, place, {begin, end, layer, layer + 1}, form, plan, packed, &sums);
        bytes += int64_t(plan.bytes);
        size_t planned = 0;
        for (const Copy& copy : plan.copies) {
          std::memcpy(copy.destination, copy.source, copy.bytes);
          planned += copy.bytes;
        }
        REQUIRE(planned == plan.bytes);
      }
      begin = end;
    }
    const int copies = d_shards.replicas();  // where several ranks hold one head each gets it
    CHECK(bytes == int64_t(copies * kTokens * 2 * 3 * 4) * int64_t(wire_row_bytes(shape, form)));
    CHECK(widen_kv(*d, to, kTokens, form, true) == sums);
    double worst = 0;
    each_row(*d, d_shards, to, [&](const std::byte* row, int layer, int head, int which, int token) {
      const std::vector<std::byte> sent = value(layer, head, which, token);
      REQUIRE(std::memcmp(row, crossed(shape, form, sent.data()).data(), shape.row_bytes()) == 0);
      std::vector<float> x(size_t(shape.head_dim)), y = x;
      read_kv_row(shape.dtype, shape.head_dim, sent.data(), 0, shape.head_dim, x.data());
      read_kv_row(shape.dtype, shape.head_dim, row, 0, shape.head_dim, y.data());
      double off = 0;
      for (size_t i = 0; i < x.size(); ++i) off = std::max(off, std::abs(double(x[i]) - double(y[i])));
      worst = std::max(worst, off / bound_of(shape, form, x));
    });
    CHECK(worst <= 1);
    CHECK(worst > 0.5);  // or the bound says nothing
  }
}

TEST_CASE("wire kv: sums see each bit, and rows that have changed places", "[disagg][wire_kv]") {
  const KvShape shape{.n_layers = 2, .n_kv_heads = 2, .head_dim = 16, .dtype = Dtype::f32};
  constexpr int kTokens = 70;
  Random random(8);
  KvOptions options{.shape = shape, .pool_bytes = 80 * shape.token_bytes(), .max_sequence_tokens = 80};
  const auto memory = memory_of("paged", options, {});
  const KvHandle kv = memory->reserve(Tokens(kTokens, 1), 0).value().handle;
  REQUIRE(memory->append(kv, kTokens));
  const size_t pool = memory->layout().pool_bytes();
  std::vector<std::byte> arrived(pool);
  for (std::byte& b : arrived) b = std::byte(random.next());
  const auto sums_of = [&](const std::vector<std::byte>& bytes) {
    std::memcpy(memory->base(), bytes.data(), pool);
    return widen_kv(*memory, kv, kTokens, WireKv::int8, true);
  };
  const std::vector<uint64_t> expected = sums_of(arrived);
  REQUIRE(expected.size() == 2);
  const size_t row_bytes = wire_row_bytes(shape, WireKv::int8);
  CHECK(row_bytes == 20);
  for (int round = 0; round < 100; ++round) {
    const int token = int(random.below(64)), layer = int(random.below(2)), which = int(random.below(2));
    const KvView view = memory->view(kv);
    // The rows of a block stand one behind the other.
    std::byte* piece = view.row(layer, which, token - token % 16, 0);
    const size_t at = size_t(piece - memory->base()) + size_t(token % 16) * 2 * row_bytes;
    std::vector<std::byte> changed = arrived;
    changed[at + random.below(2 * row_bytes)] ^= std::byte(1u << random.below(8));
    CHECK(sums_of(changed)[0] != expected[0]);
    CHECK(sums_of(changed)[1] == expected[1]);
    changed = arrived;  // the token's two heads
    std::swap_ranges(&changed[at], &changed[at] + row_bytes, &changed[at + row_bytes]);
    CHECK(sums_of(changed)[0] != expected[0]);
  }
  memory->free(kv);
}

// ---- Whole requests.

TEST_CASE("wire kv: one hash for each form, whatever wire, grain, memory, batching, ranks and topology",
          "[disagg][wire_kv]") {
  TinySetup plain{.topology = "1P1D"};
  const RaggedRun exact = run_ragged(plain);
  std::vector<uint64_t> hashes{exact.hash};
  for (WireKv form : {WireKv::int8, WireKv::int4}) {
    plain.wire_kv = form;
    const RaggedRun first = run_ragged(plain);
    CHECK(std::ranges::count(hashes, first.hash) == 0);
    hashes.push_back(first.hash);
    for (size_t i = 0; i < exact.tokens.size(); ++i) CHECK(first.tokens[i][0] == exact.tokens[i][0]);  // P's
    std::vector<TinySetup> others;
    const auto add = [&](auto&&... change) {
      TinySetup setup{.topology = "1P1D", .wire_kv = form};
      (change(setup), ...);
      others.push_back(setup);
    };
    for (const char* wire : {"local", "shm", "tcp"})
      for (StreamKv grain : {StreamKv::layer, StreamKv::chunk, StreamKv::request})
        add([&](TinySetup& s) { s.transport = wire, s.stream_kv = grain, s.step_tokens = 24; });
    for (const char* scheme : {"paged", "token", "contiguous", "slots", "vattention"})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
        add([&](TinySetup& s) {
          s.scheme = scheme, s.order = order, s.pool_bytes = 3 << 20, s.share = KvShare::alias;
          if (order == KvOrder::token_major && scheme != std::string("paged")) s.share = KvShare::takeover;
        });
    for (int block : {1, 7, 64}) add([&](TinySetup& s) { s.block_tokens = block, s.kv_checksum = true; });
    for (const char* topology : {"2P1D", "1P2D", "2P2D"})
      add([&](TinySetup& s) { s.topology = topology, s.placement = "prefix_aware"; });
    add([](TinySetup& s) { s.prefix_cache = false; });
    add([](TinySetup& s) { s.escrow = true, s.step_tokens = 16; });
    add([](TinySetup& s) { s.prefill_tp = 2, s.kv_checksum = true; });
    add([](TinySetup& s) { s.decode_tp = 2, s.prefill_pp = 2, s.kv_checksum = true; });
    add([](TinySetup& s) { s.decode_tp = 4, s.prefill_tp = 2, s.order = KvOrder::token_major, s.kv_checksum = true; });
    add([](TinySetup& s) { s.tiers.host_bytes = 1 << 20; });
    add([](TinySetup& s) { s.speculation.drafter = find_drafter("ngram"), s.speculation.tokens = 3; });
    for (const TinySetup& setup : others) {
      INFO(setup.describe());
      const RaggedRun run = run_ragged(setup);
      CHECK(run.hash == first.hash);
      CHECK(run.tokens == first.tokens);
    }
  }
}

TEST_CASE("wire kv: the bytes on the wire are those of the narrow rows, and D keeps none for others",
          "[disagg][wire_kv]") {
  constexpr int kTokens = 100, kRows = 2 * 2 * 2;
  for (Dtype dtype : {Dtype::f32, Dtype::bf16})
    for (WireKv form : {WireKv::off, WireKv::int8, WireKv::int4}) {
      if (dtype == Dtype::bf16 && form == WireKv::int8) {  // 8 elements: 16 bytes, and 12
        CHECK(wire_row_bytes(kv_shape(tiny_config(), dtype), form) == 12);
      }
      TinyCluster tiny({.topology = "1P1D", .kv_dtype = dtype, .wire_kv = form, .kv_checksum = true});
      for (uint64_t id : {1, 2}) {
        auto request = tiny_request(id, Tokens(kTokens, 5), 4);
        request->n = 2;
        REQUIRE(tiny.submit(request).ok());
        tiny.run();
      }
      const auto stats = tiny.cluster->stats().instances;
      const KvShape shape = kv_shape(tiny_config(), dtype);
      const int64_t wide = int64_t(kTokens) * kRows * int64_t(shape.row_bytes());
      const int64_t found = 96 * kRows * int64_t(shape.row_bytes());  // of the second, by D
      const bool narrow = form != WireKv::off;
      CHECK(stats[0].transfer_bytes ==
            (narrow ? 2 * kTokens * kRows * int64_t(wire_row_bytes(shape, form)) : 2 * wide - found));
      for (const InstanceStats& s : {stats[0], stats[1]}) {
        CHECK(s.converted_bytes == (narrow ? 2 * wide : 0));
        CHECK((s.convert_seconds > 0) == narrow);
      }
      CHECK(stats[1].kv_refused == 0);
      CHECK((stats[1].kv.cached == 0) == narrow);
      CHECK(stats[0].kv.cached > 0);
      for (const auto& instance : tiny.cluster->instances()) instance->memory().check_invariants();
    }
}

TEST_CASE("wire kv: an answer does not depend on what D has computed before", "[disagg][wire_kv]") {
  for (const char* scheme : {"paged", "slots", "vattention"}) {
    INFO(scheme);
    TinySetup setup{.topology = "1P1D", .scheme = scheme, .wire_kv = WireKv::int4, .pool_bytes = 3 << 20};
    setup.share = KvShare::takeover;
    TinyCluster both(setup), alone(setup);
    Tokens prompt = ragged_prompts().back();
    prompt.resize(60, 7);
    REQUIRE(both.submit(tiny_request(1, prompt, 40)).ok());
    both.run();
    const Tokens answer = both.recorder->choice(1).tokens;
    prompt.insert(prompt.end(), answer.begin(), answer.end());
    prompt.push_back(11);
    for (TinyCluster* tiny : {&both, &alone}) {
      REQUIRE(tiny->submit(tiny_request(2, prompt, 6)).ok());
      tiny->run();
    }
    CHECK(both.cluster->stats().instances[0].kv.prefix_hit_tokens > 0);  // P's own, which is exact
    CHECK(both.recorder->choice(2).logits_hash == alone.recorder->choice(2).logits_hash);
  }
}

// ---- Who goes away in between.

SimOptions narrow() {
  SimOptions options;
  options.conductor.wire_kv = WireKv::int8;
  return options;
}

TEST_CASE("wire kv: posts on their way keep what they read, whoever goes", "[disagg][wire_kv]") {
  for (const char* what : {"nobody", "client", "post", "P", "P, unnoticed", "D", "connection"}) {
    INFO(what);
    const std::string gone = what;
    Scene scene("2P2D", narrow());
    scene.deliver_and_hold();
    InstanceId p = -1, d = -1;
    for (const auto& [id, node] : scene.nodes) {
      if (node->instance->stats().queue_prefill_sending == 1) p = id;
      if (node->instance->stats().queue_remote_prefilling == 1) d = id;
    }
    REQUIRE(p >= 0);
    REQUIRE(d >= 0);
    CHECK(scene.nodes.at(p)->instance->stats().converted_bytes == 60 * 512);
    if (gone == "client") scene.conductor().abort(1);
    if (gone[0] == 'P') scene.crash(p, gone == "P");
    if (gone == "D") scene.crash(d, true);
    if (gone == "connection") scene.break_connection(p, d);
    scene.ticks(10);
    scene.hand.let_go(gone == "post");
    if (gone == "client") {
      scene.ticks(800);
      CHECK(scene.check_memory(true) == "");
      CHECK(scene.recorder->choice(1).ends == 1);
      continue;
    }
    scene.settle();  // with its tokens: what int8 leaves of such rows is themselves
    if (gone == "nobody") {
      const InstanceStats stats = scene.nodes.at(d)->instance->stats();
      CHECK(stats.kv_refused == 0);
      CHECK(stats.converted_bytes == 60 * 512);
      CHECK(stats.kv.cached == 0);
    }
    if (gone == "post") CHECK(scene.nodes.at(d)->instance->stats().kv_refused == 1);
  }
}

TEST_CASE("wire kv: a changed byte is a recompute", "[disagg][wire_kv]") {
  TinySetup setup{.topology = "1P1D", .wire_kv = WireKv::int8, .kv_checksum = true};
  TinyCluster tiny(setup, [](const TransportOptions& options) {
    return Result(
        make_fault_transport(find_transport("local")->make(options).value(), {.seed = 5, .corrupt = 1}, options));
  });
  REQUIRE(tiny.submit(tiny_request(1, Tokens(80, 9), 6)).ok());
  tiny.run();
  CHECK(tiny.cluster->stats().instances[1].kv_refused == 1);
  TinyCluster plain({.topology = "1P1D"});
  REQUIRE(plain.submit(tiny_request(1, Tokens(80, 9), 6)).ok());
  plain.run();
  CHECK(tiny.recorder->choice(1).logits_hash == plain.recorder->choice(1).logits_hash);
}

TEST_CASE("wire kv: a P that says another form than all do is refused", "[disagg][wire_kv]") {
  for (WireKv form : {WireKv::int8, WireKv::automatic}) {
    SimOptions options;
    if (form == WireKv::automatic) options.conductor.wire_kv = form;
    Scene scene("1P1D", options);
    std::vector<std::string> said;
    scene.due = [&](InstanceId from, InstanceId, const Message& m) {
      if (from == scene.find("D1")->id) said.push_back(message_name(m));
      return scene.clock.seconds;
    };
    auto request = tiny_request(7, Tokens(20, 3), 4);
    scene.send(scene.find("P0")->id, scene.find("D1")->id, ReserveKv{99, request, {}, form});
    scene.ticks(5);
    CHECK(std::ranges::count(said, "ReservationCancelled") == 1);
    CHECK(std::ranges::count(said, "KvReserved") == 0);
    scene.due = nullptr;
    scene.settle();
  }
}

// ---- What is refused, and chosen.

TEST_CASE("wire kv: what cannot work is refused by name", "[disagg][wire_kv]") {
  ClusterOptions good;
  good.topology = parse_topology("1P1D").value();
  good.kv.shape = kv_shape(tiny_config(), Dtype::f32);
  good.transport = find_transport("tcp");
  good.disagg = find_disagg_policy("prefill_first");
  for (WireKv form : {WireKv::off, WireKv::int8, WireKv::int4, WireKv::automatic})
    CHECK(check_wire_kv(good, form).ok());
  const auto refused = [&](WireKv form, const char* why, auto&& change) {
    ClusterOptions bad = good;
    change(bad);
    const Status status = check_wire_kv(bad, form);
    REQUIRE_FALSE(status.ok());
    INFO(status.error().message);
    CHECK(status.error().message.starts_with("--wire-kv-dtype " + std::string(kWireKvNames[int(form)]) + ": "));
    CHECK(status.error().message.find(why) != std::string::npos);
    CHECK(check_wire_kv(bad, WireKv::off).ok());
  };
  for (const char* wire : {"handoff", "rdma", "nccl"})
    refused(WireKv::int8, wire, [&](ClusterOptions& o) { o.transport = find_transport(wire); });
  refused(WireKv::int4, "--device cpu", [](ClusterOptions& o) { o.kv.vattention.on_card = true; });
  refused(WireKv::int8, "--kv-dtype int8", [](ClusterOptions& o) { o.kv.shape.dtype = Dtype::int8; });
  refused(WireKv::int8, "--kv-dtype fp8_e4m3", [](ClusterOptions& o) { o.kv.shape.dtype = Dtype::fp8_e4m3; });
  refused(WireKv::automatic, "--kv-dtype int4", [](ClusterOptions& o) { o.kv.shape.dtype = Dtype::int4; });
  refused(WireKv::int4, "5 elements", [](ClusterOptions& o) { o.kv.shape.head_dim = 5; });
  refused(WireKv::int8, "--kv-transfer push", [](ClusterOptions& o) { o.disagg_options.pull = true; });
  for (const char* disagg : {"decode_first", "conditional_threshold", "conditional_cost"})
    refused(WireKv::int8, "--disagg prefill_first", [&](ClusterOptions& o) { o.disagg = find_disagg_policy(disagg); });
  refused(WireKv::int8, "no C", [](ClusterOptions& o) { o.topology = parse_topology("1C1P1D").value(); });
  refused(WireKv::int8, "--ranks remote", [](ClusterOptions& o) {
    o.ranks.emplace();
    o.ranks->far = true;
  });
}

TEST_CASE("wire kv: auto takes the form with which D goes on first", "[disagg][wire_kv]") {
  const auto chosen = [](double wire_s_per_byte, double compute_s, double overlap, double convert_s) {
    return choose_wire_kv({.bytes = 1e9,
                           .int8_bytes = 5e8,
                           .int4_bytes = 2.5e8,
                           .pack_int8_s = convert_s,
                           .pack_int4_s = 2 * convert_s,
                           .widen_int8_s = convert_s,
                           .widen_int4_s = 2 * convert_s,
                           .wire_s_per_byte = wire_s_per_byte,
                           .compute_s = compute_s,
                           .overlap = overlap});
  };
  CHECK(chosen(0, 0, 0, 0) == WireKv::off);              // nobody knows the wire yet
  CHECK(chosen(1e-9, 0, 0, 0.01) == WireKv::int4);       // off, int8, int4 take 1; 0.52; 0.29 s
  CHECK(chosen(1e-9, 0, 0, 0.12) == WireKv::int4);       // 1; 0.74; 0.73
  CHECK(chosen(1e-9, 0, 0, 0.13) == WireKv::int8);       // 1; 0.76; 0.77
  CHECK(chosen(1e-9, 0, 0, 0.26) == WireKv::off);        // 1; 1.02; 1.29
  CHECK(chosen(1e-9, 10, 0.97, 0.02) == WireKv::off);    // the wire hides: 0.03; 0.055; 0.0875
  CHECK(chosen(1e-9, 0.2, 0.97, 0.02) == WireKv::int4);  // the computation hides a part of it: 0.8; 0.34; 0.13
}

// The local wire, at a microsecond a byte.
class Paced final : public WrappedTransport {
 public:
  static Result<std::unique_ptr<KvTransport>> make(const TransportOptions& options) {
    return std::unique_ptr<KvTransport>(std::make_unique<Paced>(options));
  }
  explicit Paced(const TransportOptions& options) : WrappedTransport("local", options), clock_(*options.clock) {}
  TransferId post(const KvTransfer& transfer, const TransferPlan& plan) override {
    const TransferId id = WrappedTransport::post(transfer, plan);
    free_s_ = std::max(free_s_, clock_.now()) + 1e-6 * double(plan.bytes);
    done_s_[id] = free_s_;
    return id;
  }
  TransferState poll(TransferId id) override {
    if (clock_.now() < done_s_.at(id)) return TransferState::in_flight;
    return WrappedTransport::poll(id);
  }

 private:
  Clock& clock_;
  double free_s_ = 0;
  std::map<TransferId, double> done_s_;
};

TEST_CASE("wire kv: auto measures its wire, and what it decides is in the log", "[disagg][wire_kv]") {
  TempDir dir;
  const std::string path = dir.path + "/log";
  TinySetup setup{.topology = "1P1D", .wire_kv = WireKv::automatic};
  setup.log = EventLog::create(path, 1 << 20, "{}").value();
  {
    TinyCluster tiny(setup, Paced::make);
    const KvShape shape = kv_shape(tiny_config(), Dtype::f32);
    int64_t before = 0;
    for (uint64_t id = 1; id <= 3; ++id) {
      REQUIRE(tiny.submit(tiny_request(id, Tokens(40 + id, int32_t(id)), 4)).ok());
      while (!tiny.cluster->wait_idle(0) || tiny.cluster->stats().instances[0].queue_prefill_sending > 0)
        tiny.cluster->turn();
      const int64_t bytes = tiny.cluster->stats().instances[0].transfer_bytes;
      const size_t row = id == 1 ? shape.row_bytes() : wire_row_bytes(shape, WireKv::int4);  // the first one measures
      CHECK(bytes - std::exchange(before, bytes) == int64_t(40 + id) * 8 * int64_t(row));
    }
  }
  setup.log.reset();
  int differ = 0;
  const std::string paths[] = {path};
  const auto counts = replay(paths, {}, [&](const std::string&, const std::string&) { ++differ; });
  REQUIRE(counts.ok());
  CHECK(counts.value().at("wire_kv").decisions == 3);
  CHECK(differ == 0);
  ReplayOptions instead;
  instead.instead["wire_kv"] = "int8";
  CHECK(replay(paths, instead, [](const std::string&, const std::string&) {}).value().at("wire_kv").differ == 3);
}

}  // namespace
}  // namespace xpyd::testing::wire_kv_test
