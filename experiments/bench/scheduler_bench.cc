// The cost of decisions: the scheduler per step, and the conductor per request.
//
// Target: at most 15 us per step with 64 sequences, conductor included. A step of a 1B model takes 75,000 us.
#include <algorithm>

#include "allocator/kv_memory.h"
#include "base/clock.h"
#include "batch/engine/engine.h"
#include "disagg/instance/cluster.h"
#include "experiments/bench/harness.h"
#include "experiments/null_model.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

constexpr int kSequences = 64, kPromptTokens = 512, kSteps = 400;
constexpr double kBudget = 15e-6;      // seconds per step for decisions
constexpr double kCpuBudget = 100e-6;  // seconds per step for all CPU work beside a model on another device

class Discard final : public EventSink {
 public:
  void on_event(TokenEvent) override {}
};

ModelConfig small_config() {
  ModelConfig config;
  config.family = "llama";
  config.n_layers = 16;
  config.hidden = 64;
  config.intermediate = 64;
  config.n_heads = config.n_kv_heads = 2;
  config.head_dim = 8;
  config.vocab = 64;
  config.max_position = 4096;
  return config;
}

std::shared_ptr<Request> request(uint64_t id) {
  auto r = std::make_shared<Request>();
  r->id = id;
  for (int i = 0; i < kPromptTokens; ++i) r->prompt.push_back(int32_t((uint64_t(i) * 7 + id) % 64));
  r->sampling.temperature = 0;
  r->max_tokens = 2 * kSteps;
  r->ignore_eos = true;
  return r;
}

BenchRow budget_row(std::string name, std::vector<double> seconds, double budget) {
  std::sort(seconds.begin(), seconds.end());
  BenchRow row{.name = std::move(name), .n_threads = 1, .rounds = int(seconds.size())};
  row.seconds = percentile(seconds, 50);
  row.measure = "of a budget of " + std::to_string(int(budget * 1e6)) + " us (budget / time)";
  row.share = budget / row.seconds;
  row.share_p10 = budget / percentile(seconds, 90);
  row.share_p90 = budget / percentile(seconds, 10);
  row.target = 1;
  return row;
}

// The arrays of a decode step of 64 rows. The floor is one token, one length and one view per row.
void bench_step_arrays(Bench& bench) {
  constexpr int kRepeats = 200, kSamples = 20;  // short samples, because some are interrupted
  KvOptions kv{.shape = kv_shape(small_config(), Dtype::bf16)};
  kv.pool_bytes = size_t(kSequences) * 1024 * kv.shape.token_bytes();
  auto memory = find_kv_scheme("paged")->make(make_block_pool("paged", kv).value(), kv);
  std::vector<SequencePtr> sequences;
  std::vector<StepEntry> entries;
  for (uint64_t id = 0; id < kSequences; ++id) {
    sequences.push_back(make_sequence(request(id), {}, nullptr, nullptr, nullptr));
    Sequence& s = *sequences.back();
    s.kv = memory->reserve(s.tokens, 0).value().handle;
    if (!memory->append(s.kv, kPromptTokens)) return;
    entries.push_back({&s, kPromptTokens - 1, 1, true});
  }
  RealClock clock;
  int64_t sum = 0;
  auto time = [&](auto&& step) {
    const double start = clock.now();
    for (int i = 0; i < kRepeats; ++i) sum += step();
    return (clock.now() - start) / kRepeats;
  };
  std::vector<double> floor, seconds;
  struct {
    int32_t token[kSequences], length[kSequences];
    KvView view[kSequences];
  } least;
  for (int round = 0; round < kSamples * bench.options().rounds; ++round) {
    StepArrays arrays;
    floor.push_back(time([&] {
      for (size_t r = 0; r < kSequences; ++r) {
        const StepEntry& e = entries[r];
        least.token[r] = e.sequence->tokens[size_t(e.first)];
        least.length[r] = e.end();
        least.view[r] = memory->view(e.sequence->kv);
      }
      return least.length[round % kSequences];
    }));
    seconds.push_back(time([&] { return arrays.gather(entries, *memory, nullptr).kv_lengths[0]; }));
  }
  std::sort(floor.begin(), floor.end());
  std::sort(seconds.begin(), seconds.end());
  BenchRow row{.name = "step arrays, 64 rows", .n_threads = 1, .rounds = int(seconds.size())};
  row.seconds = percentile(seconds, 50);
  row.measure = "of the floor: a token, a length and a view each (floor / time)";
  row.share = percentile(floor, 50) / row.seconds;
  row.share_p10 = percentile(floor, 50) / percentile(seconds, 90);
  row.share_p90 = percentile(floor, 50) / percentile(seconds, 10);
  bench.report(row);
  XPYD_CHECK(sum > 0);  // keeps the compiler from dropping the work
}

void bench_scheduler(Bench& bench) {
  RealClock clock;
  ModelConfig config = small_config();
  std::vector<double> step_seconds, cpu_seconds, submit_seconds;
  for (int round = 0; round < bench.options().rounds; ++round) {
    ClusterOptions options;
    options.topology = parse_topology("1P1D").value();
    options.kv_scheme = find_kv_scheme("paged");
    options.kv.pool_bytes = size_t(1) << 30;
    options.batching = find_batch_policy("chunked");
    options.placement = find_placement_policy("prefix_aware");
    options.transport = find_transport("handoff");
    options.max_batch = kSequences;
    options.step_tokens = 4096;
    options.max_model_len = config.max_position;
    options.make_model = [&](int, DeviceQueue&) { return make_null_model(config); };
    options.kv.shape = kv_shape(config, Dtype::bf16);
    auto cluster = Cluster::create(std::move(options), clock).value();
    double start = clock.now();
    for (uint64_t id = 0; id < kSequences; ++id)
      if (!cluster->submit(request(id), std::make_shared<Discard>())) return;
    double per_request = (clock.now() - start) / kSequences;
    const Instance& decode = *cluster->instances()[1];
    while (decode.stats().running < kSequences) cluster->turn();
    // A round's result is a median, because a shared machine interrupts some steps.
    std::vector<double> steps, all;
    for (InstanceStats before = decode.stats(); int(steps.size()) < kSteps;) {
      cluster->turn();
      const InstanceStats after = decode.stats();
      steps.push_back(after.schedule_seconds - before.schedule_seconds);
      all.push_back(steps.back() + after.step_seconds - before.step_seconds -
                    (after.wait_seconds - before.wait_seconds));
      before = after;
    }
    std::sort(steps.begin(), steps.end());
    std::sort(all.begin(), all.end());
    step_seconds.push_back(percentile(steps, 50));
    cpu_seconds.push_back(percentile(all, 50));
    submit_seconds.push_back(per_request);
    cluster->stop();
  }
  // A request is one decision of the conductor and many steps. Here it counts as if each step brought a request.
  std::vector<double> both = step_seconds;
  for (size_t i = 0; i < both.size(); ++i) both[i] += submit_seconds[i];
  bench.report(budget_row("scheduler, per step, 64 sequences", step_seconds, kBudget));
  bench.report(budget_row("conductor, per request of 512 tokens, 1P1D", submit_seconds, kBudget));
  bench.report(budget_row("both, one request per step", both, kBudget));
  bench.report(budget_row("engine, CPU per step, 64 sequences: plan, choose, emit", cpu_seconds, kCpuBudget));
}

// A decision of each chunk policy while 16 prompts wait: the first has 32,768 tokens left, the others 4,096. equal_time
// searches at its first decision for a prompt, and not at later ones.
void bench_chunks(Bench& bench) {
  constexpr double kSearchBudget = 1e-3;
  std::vector<ChunkPrompt> prompts;
  for (uint64_t i = 0; i < 16; ++i) prompts.push_back({i + 1, i == 0 ? 32768 : 0, i == 0 ? 32768 : 4096});
  RealClock clock;
  int64_t sum = 0;
  for (const ChunkPolicy& policy : chunk_policies()) {
    if (!policy.decide) continue;  // the batching policy's work
    ChunkView view{.prompts = prompts, .decodes = 10, .decode_context = 1e4, .budget = 2048};
    view.block_tokens = 16;
    view.minimum = chunk_minimum(view.budget, view.block_tokens);
    view.stages = 4;
    view.cost = {2e-3, 3e-5, 1e-9, 1.5e-10, 2e-5, 3e-8};
    ChunkChoice choice;
    choose_chunks(policy, view, {}, choice);
    for (const auto& [what, state, budget] :
         {std::tuple{"first for a prompt", ChunkState{}, kSearchBudget}, {"later", choice.state, kBudget}}) {
      std::vector<double> seconds;
      for (int round = 0; round < bench.options().rounds; ++round) {
        const double start = clock.now();
        int n = 0;
        for (; n < 100 && (n < 2 || clock.now() < start + 0.02); ++n) {
          choose_chunks(policy, view, state, choice);
          sum += choice.step_tokens;
        }
        seconds.push_back((clock.now() - start) / n);
      }
      bench.report(budget_row("chunk policy " + std::string(policy.name) + ", " + what, seconds, budget));
    }
  }
  XPYD_CHECK(sum > 0);  // keeps the compiler from dropping the work
}

REGISTER_BENCH("scheduler", bench_scheduler);
REGISTER_BENCH("chunks", bench_chunks);
REGISTER_BENCH("step_arrays", bench_step_arrays);

}  // namespace
}  // namespace xpyd::experiments
