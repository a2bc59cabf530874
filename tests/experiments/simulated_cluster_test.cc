#include <array>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/random.h"
#include "disagg/conductor/event_log.h"
#include "experiments/event_log/calibrate.h"
#include "experiments/event_log/replay.h"
#include "experiments/pipeline_time.h"
#include "experiments/simulate/cluster.h"
#include "experiments/simulate/routers.h"
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::simulated_cluster_test {

// Prompts of some conversations that continue, and answers of many lengths.
Trace some_load(uint64_t seed, int n, double rate) {
  Random random(seed);
  Trace trace{.block_tokens = 64};
  double at_s = 0;
  for (int i = 0; i < n; ++i) {
    at_s += random.exponential() / rate;
    TraceRequest request{.arrival_s = at_s,
                         .prompt_tokens = 1 + int(random.below(3000)),
                         .output_tokens = 1 + int(random.below(random.below(5) == 0 ? 600 : 60))};
    const uint64_t conversation = random.below(8);
    for (int b = 0; b * 64 < request.prompt_tokens; ++b)
      request.blocks.push_back(b < 12 ? conversation * 1000 + uint64_t(b) : 1000000 + uint64_t(i) * 1000 + uint64_t(b));
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

SimulationOptions options(const std::string& topology) {
  SimulationOptions o{.hardware = find_hardware("a800x8").value(),
                      .model = find_simulated_model("llama-3-70b").value()};
  o.topology = topology;
  o.block_tokens = 64;
  o.kv_tokens = 200000;
  o.engine = {.policy = find_batch_policy("chunked"), .max_batch = 32, .step_tokens = 512};
  o.conductor.placement = find_placement_policy("prefix_aware");
  o.conductor.disagg = find_disagg_policy("prefill_first");
  o.conductor.max_model_len = 8192;
  o.conductor.step_tokens = 512;
  return o;
}

nlohmann::json numbers(const SimulationOptions& o, const Trace& trace) {
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  return nlohmann::json::parse(result_json(run.value(), kNoObjectives, 0));
}

TEST_CASE("simulation: every request is served, whatever the topology, stages, window and routers",
          "[simulate][waves]") {
  const Trace trace = some_load(7, 300, 8);
  for (const char* topology : {"1C", "3C", "1P1D", "2P3D", "1C1P1D"})
    for (const auto& [prefill, decode, window] : {std::tuple(1, 1, 0), {4, 2, 0}, {4, 2, 1}, {4, 2, 3}}) {
      SimulationOptions o = options(topology);
      o.prefill_pp = prefill, o.decode_pp = decode, o.pipeline_window = window;
      o.routers.routers = 1 + window;
      INFO(topology << " " << prefill << " " << window);
      const Result<Simulation> run = simulate(o, trace);
      REQUIRE(run.ok());
      const auto got = nlohmann::json::parse(result_json(run.value(), kNoObjectives, 0));
      CHECK(got["completed"] == 300);
      CHECK(got["failed"] == 0);
      CHECK(got["hit_tokens"] > 0);
      double last_s = 0;  // goodput is over the time until the last request's end
      for (const SimulatedRecord& record : run.value().records) last_s = std::max(last_s, record.last_s);
      CHECK(got["goodput"].get<double>() == Approx(300 / last_s));
    }
}

TEST_CASE("simulation: the same seed gives the same times and the same log", "[simulate]") {
  const Trace trace = some_load(3, 200, 10);
  SimulationOptions o = options("2P2D");
  o.conductor.placement = find_placement_policy("random");
  const std::string hash = numbers(o, trace)["log_hash"];
  CHECK(numbers(o, trace)["log_hash"] == hash);
  const TempDir dir;
  std::string logs[2];
  for (std::string& log : logs) {
    o.conductor.log = EventLog::create(dir.path + "/log", "{}").value();
    CHECK(numbers(o, trace)["log_hash"] == hash);
    o.conductor.log.reset();
    log = read_small_file(dir.path + "/log", 1 << 30).value();
  }
  CHECK(logs[0].size() > 100000);
  CHECK((logs[0] == logs[1]));
  o.conductor.seed = 9;
  CHECK(numbers(o, trace)["log_hash"] != hash);
}

// Prompts without a common prefix, all there at time 0, whose chunks fill steps of 512 tokens. So each wave is one
// chunk.
Trace whole_chunks(const std::vector<int>& chunks) {
  Trace trace{.block_tokens = 64};
  for (size_t i = 0; i < chunks.size(); ++i) {
    trace.requests.push_back({.prompt_tokens = 512 * chunks[i], .output_tokens = 1});
    for (int b = 0; b < 8 * chunks[i]; ++b) trace.requests.back().blocks.push_back(i * 1000 + uint64_t(b));
  }
  return trace;
}

TEST_CASE("simulation: waves end as the pipeline's recurrence predicts, and a prompt alone as the closed form does",
          "[simulate][waves]") {
  for (const std::vector<int>& prompts : std::vector<std::vector<int>>{{1}, {7}, {5, 1, 9}, {3, 3, 3, 3, 3, 3}})
    for (int stages : {2, 4, 8})
      for (int window : {1, 2, stages, 2 * stages, 1000}) {
        SimulationOptions o = options("1C");
        o.prefill_pp = stages;
        o.pipeline_window = window;
        const StepCost cost = step_cost(o.model, o.hardware, stages);
        std::vector<experiments::PipelineChunk> chunks;
        std::vector<double> seconds;
        std::vector<size_t> lasts;  // the last chunk of each prompt
        for (int n : prompts) {
          for (int c = 0; c < n; ++c) {
            StepShape shape;
            shape.add_prompt(512, 512 * c);
            seconds.push_back(cost.seconds(shape));
            chunks.push_back(
                {.stage_s = std::vector<double>(size_t(stages), seconds.back()),
                 .boundary_s = o.hardware.link_s + 512 * o.model.boundary_bytes() / o.hardware.link_bytes_per_s,
                 .arrival_s = o.message_s});
          }
          lasts.push_back(chunks.size() - 1);
        }
        const experiments::PipelineTimes times = experiments::pipeline_times(chunks, window);
        const Result<Simulation> run = simulate(o, whole_chunks(prompts));
        REQUIRE(run.ok());
        for (size_t i = 0; i < prompts.size(); ++i) {
          CAPTURE(stages, window, prompts.size(), i);
          const double first_s = run.value().records[i].times.first_s;
          CHECK(first_s == Approx(times.left(int(lasts[i]), stages - 1) + o.message_s).epsilon(1e-12));
        }
        if (prompts.size() == 1 && window >= 2 * stages) {  // placement predicted it, except for the boundaries
          const double closed = experiments::pipeline_seconds(seconds, stages) + (stages - 1) * chunks[0].boundary_s;
          CHECK(run.value().records[0].times.first_s == Approx(closed + 2 * o.message_s).epsilon(1e-12));
          CHECK(run.value().conductor.ttft_error.mape() < 0.06);
        }
      }
}

TEST_CASE("simulation: KV leaves a pipeline stage by stage", "[simulate][waves]") {
  // One prompt of 16 chunks. Its KV takes as long on the link as the whole pipeline computes it, so KV that waits for
  // the last stage is sent late.
  double gaps[3] = {};
  for (StreamKv stream : {StreamKv::layer, StreamKv::chunk, StreamKv::request}) {
    SimulationOptions o = options("1P1D");
    o.prefill_pp = 4;
    o.conductor.stream_kv = stream;
    o.hardware.link_bytes_per_s = 25e9;
    o.conductor.max_model_len = 16384;
    Trace trace = whole_chunks({16});
    trace.requests[0].output_tokens = 2;
    const Result<Simulation> run = simulate(o, trace);
    REQUIRE(run.ok());
    CHECK(run.value().kv_gb == Approx(16 * 512 * o.model.kv_token_bytes() * 1e-9));
    gaps[int(stream)] = run.value().records[0].times.gaps.at(0);
  }
  CHECK(gaps[int(StreamKv::layer)] < gaps[int(StreamKv::chunk)]);
  CHECK(4 * (gaps[int(StreamKv::chunk)] - gaps[int(StreamKv::layer)]) <
        gaps[int(StreamKv::request)] - gaps[int(StreamKv::layer)]);
}

TEST_CASE("simulation: one request alone takes the sum of its steps", "[simulate]") {
  Trace trace{.block_tokens = 64};
  trace.requests.push_back({.prompt_tokens = 1000, .output_tokens = 3});
  for (int b = 0; b < 16; ++b) trace.requests[0].blocks.push_back(uint64_t(b));
  SimulationOptions o = options("1C");
  const StepCost cost = step_cost(o.model, o.hardware);
  StepShape first, second, decode, last;
  first.add_prompt(512, 0), second.add_prompt(488, 512), decode.add_decodes(1, 1001), last.add_decodes(1, 1002);
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  const TokenTimes& times = run.value().records[0].times;
  // One message there, and one back.
  CHECK(times.first_s == Approx(cost.seconds(first) + cost.seconds(second) + 2 * o.message_s));
  REQUIRE(times.gaps.size() == 2);
  CHECK(times.gaps[0] == Approx(cost.seconds(decode)).epsilon(1e-5));
  CHECK(times.gaps[1] == Approx(cost.seconds(last)).epsilon(1e-5));
  // Placement predicted this, except for the messages.
  const ConductorStats& said = run.value().conductor;
  CHECK((said.ttft_error.n == 1 && said.tbt_error.n == 1));
  CHECK(said.ttft_error.signed_sum == Approx(-2 * o.message_s / times.first_s).epsilon(0.01));
  CHECK(said.tbt_error.mape() < 1e-3);
  CHECK(run.value().records[0].prompt_done_s == Approx(times.first_s - o.message_s));
  // 8 blocks are held in the first step, and 16 from the second to the last. Then the token is on its way.
  const double block_s = 8 * cost.seconds(first) + 16 * (cost.seconds(second) + cost.seconds(decode));
  CHECK(run.value().prefill_gb_s == Approx(block_s * 64 * o.model.kv_token_bytes() * 1e-9));
  // By phase, up to the end of each step.
  const double block_gb = 64 * o.model.kv_token_bytes() * 1e-9;
  CHECK(run.value().prompt_phase_gb_s == Approx(block_gb * (8 * cost.seconds(first) + 16 * cost.seconds(second))));
  CHECK(run.value().decode_phase_gb_s == Approx(block_gb * 16 * (cost.seconds(decode) + cost.seconds(last))));
  CHECK(run.value().transfer_phase_gb_s == 0);
}

// D decodes one sequence when prompts of some lengths come, one after another.
TEST_CASE("simulation: with conditional_tbt a prompt joins D's batch if one step holds it within the TBT objective",
          "[simulate][order]") {
  const int lengths[] = {128, 256, 384, 600};
  SimulationOptions o = options("1P1D");
  o.conductor.disagg = find_disagg_policy("conditional_tbt");
  Trace trace{.block_tokens = 64};
  const auto add = [&](double at_s, int prompt, int output) {
    const uint64_t first = 100 * trace.requests.size();
    trace.requests.push_back({.arrival_s = at_s, .prompt_tokens = prompt, .output_tokens = output});
    for (int b = 0; b * 64 < prompt; ++b) trace.requests.back().blocks.push_back(first + uint64_t(b));
  };
  add(0, 64, 400);
  for (int length : lengths) add(0.5 * double(trace.requests.size()), length, 2);
  StepShape among;
  among.add_prompt(256, 0), among.add_decodes(1, 1000);  // D has less context
  const double objective = step_cost(o.model, o.hardware).seconds(among);
  // The prompt of 600 tokens never fits in a step of 512. Without an objective nothing joins.
  for (const auto& [tbt_s, longest] : {std::pair(objective, 256), {10.0, 384}, {0.0, 0}}) {
    INFO(tbt_s);
    o.conductor.objectives.tbt_s = tbt_s;
    const Result<Simulation> run = simulate(o, trace);
    REQUIRE(run.ok());
    REQUIRE(run.value().records[0].times.gaps.size() == 399);
    for (const SimulatedRecord& r : run.value().records) {
      INFO(r.prompt);
      CHECK((r.order == DisaggOrder::local) == (r.prompt <= longest));
      for (float gap : r.times.gaps)
        if (tbt_s == objective) CHECK(gap <= objective);
    }
  }
}

// P0 has computed a prompt, and is busy with another one when most of the first comes again. P1 is idle, and fetches
// it.
TEST_CASE("simulation: a prefix is fetched from the instance that has it", "[simulate]") {
  Trace trace{.block_tokens = 64};
  for (double at_s : {0.0, 10.0, 10.001}) {
    const auto own = uint64_t(at_s * 1000);
    trace.requests.push_back({.arrival_s = at_s, .prompt_tokens = 6400, .output_tokens = 2});
    for (uint64_t b = 0; b < 100; ++b)
      trace.requests.back().blocks.push_back(own == 10000 || b >= 90 ? own * 100 + b : b);
  }
  SimulationOptions o = options("2P1D");
  o.conductor.placement = find_placement_policy("mooncake");
  for (const bool fetch : {false, true}) {
    o.fetch = fetch;
    const Result<Simulation> run = simulate(o, trace);
    REQUIRE(run.ok());
    CHECK(run.value().fetched_tokens == (fetch ? 90 * 64 : 0));
    const TokenTimes& last = run.value().records[2].times;
    const StepCost cost = step_cost(o.model, o.hardware);
    StepShape rest;
    rest.add_prompt(512, 90 * 64), rest.add_prompt(128, 90 * 64 + 512), rest.steps = 2;
    const double moved = 90 * 64 * o.model.kv_token_bytes() / o.hardware.link_bytes_per_s;
    if (!fetch) continue;
    CHECK(run.value().records[2].cached == 90 * 64);
    // P0's link also carries the KV of the other prompt.
    const double alone = moved + o.hardware.link_s + cost.seconds(rest) + 2 * o.message_s;
    CHECK(last.first_s - 10.001 > alone);
    CHECK(last.first_s - 10.001 < alone + moved);
  }
}

// The fetch times that the policy was given when it chose to fetch.
std::vector<double> said_fetches;
Placement told(const ClusterView& view, const PlacementOptions& options) {
  const Placement placed = find_placement_policy("mooncake")->place(view, options);
  if (placed.source >= 0) said_fetches.push_back(view.instances[size_t(placed.prefill)].fetch_s);
  return placed;
}

// Half of P0's prompt comes again three times. P0 computes the first, and sends to P1 and P2 at once.
TEST_CASE("simulation: the predicted time of a fetch includes the load of the links", "[simulate]") {
  Trace trace{.block_tokens = 64};
  for (int i = 0; i < 4; ++i) {
    trace.requests.push_back({.arrival_s = i == 0 ? 0 : 10 + 0.001 * i, .prompt_tokens = 6400, .output_tokens = 2});
    for (uint64_t b = 0; b < 100; ++b) trace.requests.back().blocks.push_back(b < 50 ? b : uint64_t(i) * 1000 + b);
  }
  SimulationOptions o = options("3P1D");
  PlacementPolicy policy = *find_placement_policy("mooncake");
  policy.place = told;
  o.conductor.placement = &policy;
  const double alone = 50 * 64 * o.model.kv_token_bytes() / o.hardware.link_bytes_per_s;
  said_fetches.clear();
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  REQUIRE(said_fetches.size() == 2);
  REQUIRE(run.value().fetches_s.size() == 2);
  CHECK(said_fetches[0] == Approx(alone));
  CHECK(said_fetches[1] == Approx(2 * alone));
  CHECK(said_fetches[1] == Approx(run.value().fetches_s[1]).epsilon(0.1));
}

// The pool holds three prompts, and four come in turn. Without an offload tier, the first has been evicted when it
// comes again.
TEST_CASE("simulation: a host tier brings back what the pool has evicted", "[simulate]") {
  Trace trace{.block_tokens = 64};
  for (int i = 0; i < 8; ++i) {
    trace.requests.push_back({.arrival_s = 20.0 * i, .prompt_tokens = 6400, .output_tokens = 2});
    for (int b = 0; b < 100; ++b) trace.requests.back().blocks.push_back(uint64_t(i % 4) * 1000 + uint64_t(b));
  }
  SimulationOptions o = options("1C");
  o.kv_tokens = 3 * 6400 + 640;
  CHECK(numbers(o, trace)["hit_tokens"] < 8 * 64 * 20);  // only a piece of each that was not needed yet
  o.host_tokens = 10 * 6400;
  const Result<Simulation> run = simulate(o, trace);
  REQUIRE(run.ok());
  const SimulatedRecord& last = run.value().records[7];
  CHECK(last.cached == 99 * 64);
  const double loaded = 99 * 64 * o.model.kv_token_bytes() / o.hardware.host_bytes_per_s;
  CHECK(last.times.first_s - last.arrival_s > loaded);
  CHECK(last.times.first_s - last.arrival_s < loaded + 0.1);
}

// A simulated cluster's log is read like a live one's. The calibration must describe the same cluster.
TEST_CASE("simulation: a calibration from a log predicts its steps", "[simulate][log]") {
  const TempDir dir;
  const std::string log = dir.path + "/log", file = dir.path + "/measured.json";
  const Trace trace = some_load(5, 200, 6);
  SimulationOptions o = options("2P2D");
  o.conductor.placement = find_placement_policy("round_robin");  // small differences change no decision
  o.conductor.log = EventLog::create(log, "{}").value();
  const nlohmann::json known = numbers(o, trace);
  o.conductor.log.reset();
  const Result<Calibration> found = calibrate(std::vector{log});
  REQUIRE(found.ok());
  CHECK(found.value().step_error.n > 1000);
  CHECK(found.value().step_error.mape() < 0.01);
  CHECK(found.value().link_error.n == 2);  // both prefill instances
  CHECK(found.value().link_bytes_per_s < 1.01 * o.hardware.link_bytes_per_s);
  CHECK(found.value().link_bytes_per_s > 0.2 * o.hardware.link_bytes_per_s);  // transfers share it
  std::ofstream(file) << hardware_json(found.value());
  o.hardware = find_hardware(file).value();
  CHECK(o.hardware.step_terms == found.value().step_terms);
  const nlohmann::json again = numbers(o, trace);
  for (const char* column : {"ttft_mean_s", "ttft_p50_s", "tbt_p50_s"})
    CHECK(again[column].get<double>() == Approx(known[column].get<double>()).epsilon(0.02));

  std::ofstream(log) << "{\"xpyd_event_log\":1,\"options\":{}}\n";
  CHECK_FALSE(calibrate(std::vector{log}).ok());  // the log has no step
}

TEST_CASE("simulation: refused requests are counted, and keep the others within their objectives", "[simulate]") {
  const Trace trace = some_load(4, 400, 40);
  SimulationOptions o = options("1P1D");
  o.conductor.objectives = {5, 0.5};
  const nlohmann::json all = numbers(o, trace);
  CHECK(all["ttft_p90_s"] > 5);
  for (const char* policy : {"late", "early", "early_in_flight", "predicted", "reserve"}) {
    INFO(policy);
    o.conductor.admission = find_admission_policy(policy);
    const nlohmann::json some = numbers(o, trace);
    CHECK(some["rejected_early"] > 0);
    CHECK(some["completed"].get<int>() + some["rejected_early"].get<int>() + some["rejected_late"].get<int>() == 400);
    CHECK(some["ttft_p90_s"] < 6);
  }
}

// Records where each request starts and decodes, and the number of its attempt.
struct Said final : MessageBus {
  void send(InstanceId, InstanceId to, Message message) override {
    if (auto* start = std::get_if<StartRequest>(&message))
      starts.push_back({uint64_t(to), start->attempt, uint64_t(start->decode)});
  }
  std::vector<std::array<uint64_t, 3>> starts;
};

struct SilentProbe final : InstanceProbe {
  InstanceStats stats() const override { return {}; }
  std::optional<int> matched_tokens(std::span<const int32_t>, uint64_t) const override { return {}; }
};

// Requests with eight different prefixes come, and every second one ends. Its KV enters the cache of the instance that
// computed it.
template <class C>
void play(C& conductor, Timeline& timeline, Said& said) {
  for (int i = 0; i < 6; ++i)
    conductor.joined({.id = conductor.new_id(),
                      .name = "C" + std::to_string(i),
                      .role = i < 4 ? Role::prefill : Role::decode,
                      .capacity_blocks = 1000,
                      .block_tokens = 16,
                      .max_batch = 64},
                     std::make_shared<SilentProbe>());
  Random random(3);
  for (size_t i = 0; i < 400; ++i) {
    timeline.clock.seconds += random.uniform();
    const auto request = tiny_request(i, std::vector(160 + random.below(100), int32_t(random.below(8))), 2);
    REQUIRE(conductor.submit(request, std::make_shared<Recorder>()).ok());
    REQUIRE(said.starts.size() == i + 1);
    if (random.below(2) == 0) continue;  // it stays and counts as load
    const auto [to, attempt, decode] = said.starts.back();
    conductor.receive(InstanceId(to), AttemptProgress{attempt, AttemptProgress::started});
    conductor.receive(InstanceId(to), AttemptProgress{attempt, AttemptProgress::prompt_done});
    const std::vector<uint64_t> hashes = prefix_hashes(std::span<const int32_t>(request->prompt), 16, 0);
    conductor.receive(InstanceId(to), CacheReport{.stored = hashes, .removed = {}});
    TokenEvent end;
    end.request_id = i;
    end.finish = FinishReason::stop;
    conductor.receive(InstanceId(decode), TokenOf{attempt, 0, end});
  }
}

TEST_CASE("simulation: one router that hears everything at once decides like the conductor alone", "[simulate]") {
  for (const char* placement : {"random", "prefix_aware", "lmetric"}) {
    INFO(placement);
    ConductorOptions o = options("").conductor;
    o.placement = find_placement_policy(placement);
    Timeline timeline, same, late;
    Said alone, one, other;
    Conductor conductor(o, timeline.clock, alone);
    play(conductor, timeline, alone);
    Routers routers({}, o, same, one);
    play(routers, same, one);
    CHECK((alone.starts == one.starts));
    CHECK(same.run() == 0);  // nothing was delayed
    Routers deaf({.event_loss = 1}, o, late, other);
    play(deaf, late, other);
    CHECK((alone.starts == other.starts) == (std::string_view(placement) == "random"));
  }
}

// Two prompts with a common prefix come 10 s apart. At the first, the first instance is busy. At the second, none is
// busy, and the first instance is chosen if nothing is known.
TEST_CASE("simulation: a router does not see caches that it has not heard of", "[simulate]") {
  Trace trace{.block_tokens = 64};
  for (int i = 0; i < 40; ++i)
    for (int j = 0; j < 3; ++j) {
      trace.requests.push_back(
          {.arrival_s = i * 20. + (j < 2 ? j * 0.01 : 10), .prompt_tokens = j > 0 ? 1280 : 3840, .output_tokens = 2});
      for (int b = 0; b < (j > 0 ? 20 : 60); ++b)
        trace.requests.back().blocks.push_back(uint64_t(i * 1000 + (j > 0 ? b : 100 + b)));
    }
  SimulationOptions o = options("4P1D");
  const auto hits = [&](RouterOptions routers) {
    o.routers = routers;
    return numbers(o, trace)["hit_tokens"].get<double>();
  };
  const double all = hits({});
  CHECK(all == 40 * 19 * 64);  // the block with the last token never hits
  CHECK(hits({.event_delay_s = 9}) == all);
  CHECK(hits({.event_delay_s = 11}) == 0);
  CHECK(hits({.event_loss = 1}) == 0);
  // If the first block was heard of, all blocks there are used.
  const double some = hits({.event_loss = 0.3});
  CHECK(std::abs(some / all - 0.7) < 0.22);  // three standard errors, sqrt(.3 x .7 / 40)
  CHECK(std::fmod(some, 19 * 64) == 0);
}

}  // namespace xpyd::testing::simulated_cluster_test
