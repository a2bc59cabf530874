// map_overlap: do requests see the time that a GPU's driver takes to map memory, with vAttention's
// ways to hide it and without?
//
// The real engine, scheduler, vattention memory and mapper thread. The model is null_model, which then waits for the
// time of a step, as for a card, and each map takes `call_us` longer than this system's own (page_call_us). Token,
// plane and group are a sixteenth of the published bytes, so that a row of groups is as many tokens; there are as many
// planes, 2 x 32 layers, the calls that a row takes.
//
// decode (Fig. 12: Llama-3-8B TP-2, groups of 2 MiB, rows of 2,048 tokens, batch 64, prompts of
// 1,600 to 2,000, outputs of 500 to 1,000): tokens are a sixteenth, too. 128 requests, rows of 128
// tokens, steps of 20 ms, 40 us a call; a row of the table is an iteration that only decodes.
// Arithmetic: whoever crosses 128 tokens needs 64 calls, 2.6 ms and 0.3 of this system's own. 64
// cross within 25 steps, 2 or 3 in one on average, up to 6: without overlap 3 to 18 ms more
// (published: 5 to 15). The mapper is asked 8 tokens before, 160 ms, for up to 20 rows of 2.9 ms:
// with overlap, nothing. Later sequences find rows in their slots, either way.
//
// prefill (Fig. 13, Llama-3-8B TP-2 again): one prompt of 2,048 tokens after the other, in steps of 64 tokens, 50 us a
// token. `sync` maps when a step needs it and unmaps when the sequence ends; `deferred` keeps rows with their slot, and
// maps ahead what is missing. Groups stand for 64 KiB (rows of 64 tokens, 64 calls of 8 us are 0.51 ms of a step of
// 3.2: 1.16; published: 1.15), 128 KiB (8.5 us: 1.08), 256 KiB (9 us: 1.045) and 2 MiB (40 us: 1.025). This system's
// own 4 to 8 us a call come on top, at 64 KiB 0.08 to 0.16. `runs` is sync with the whole prompt in one step: its rows
// are neighbours, one call maps all of a plane, and 64 calls are 1 % of 102 ms whatever the group. vAttention has one
// call for each group.
#include <chrono>
#include <thread>

#include "base/page_groups.h"
#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/timed_model.h"

namespace xpyd::experiments::map_overlap_experiment {
namespace {

constexpr int kTokenBytes = 64;                       // of one plane; Llama-3-8B TP-2: 1,024
constexpr double kDecodeUs = 20000, kPrefillUs = 50;  // of a step, of a token

ModelConfig shape_of(bool tiny) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = tiny ? 2 : 32;
  c.n_heads = c.n_kv_heads = 1;
  c.head_dim = kTokenBytes / 2;  // bf16
  c.hidden = c.intermediate = 8;
  c.vocab = 64;
  c.max_position = 4096;
  return c;
}

// Takes the time of a step: that of its prompt tokens, or of one that decodes.
TimedModel timed(const ModelConfig& config, double decode_us, double prefill_us) {
  auto start = std::make_shared<double>();
  auto step_s = [=](const StepInput& step) {
    *start = RealClock().now();
    const bool decodes = step.token_ids.size() == step.views.size();
    return 1e-6 * (decodes ? decode_us : prefill_us * double(step.token_ids.size()));
  };
  auto sleep = [=](double seconds) {
    auto left_us = [&] { return 1e6 * (seconds - (RealClock().now() - *start)); };
    constexpr double kWakeUs = 300;  // a sleeper may be woken so late
    if (left_us() > kWakeUs)
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(left_us() - kWakeUs));
    occupy(left_us());
  };
  return TimedModel(config, step_s, sleep);
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* mode : {"sync", "ahead"})
    all.push_back({{"part", "decode"}, {"mode", mode}, {"group_kib", 2048}, {"call_us", 40.}});
  const std::pair<int, double> groups[] = {{64, 8.}, {128, 8.5}, {256, 9.}, {2048, 40.}};
  for (auto [group, us] : groups)
    for (const char* mode : {"sync", "deferred", "runs"})
      if (!setting.tiny || group == 64)
        all.push_back({{"part", "prefill"}, {"mode", mode}, {"group_kib", group}, {"call_us", us}});
  return all;
}

KvOptions memory_of(const Values& point, const ModelConfig& config, int scale) {
  const bool deferred = point["mode"] == "deferred" || point["mode"] == "ahead";
  return {.shape = kv_shape(config, Dtype::bf16),
          .prefix_cache = false,
          .keep_idle = deferred || point["part"] == "decode",
          .vattention = {.page_group_bytes = size_t(int(point["group_kib"])) * 1024 / size_t(16 * scale),
                         .map_ahead = deferred,
                         .page_call_us = point["call_us"]}};
}

std::vector<int32_t> prompt_of(int n, Random& random) {
  std::vector<int32_t> prompt(static_cast<size_t>(n));
  for (int32_t& t : prompt) t = int32_t(random.below(64));
  return prompt;
}

Values row_of(int n, double ms, double ideal_ms, const KvStats& before, const KvStats& after) {
  return {{"n", n},
          {"ms", ms},
          {"model_ms", ideal_ms},
          {"map_calls", after.vattention.map_calls - before.vattention.map_calls},
          {"waited_ms", 1e3 * (after.vattention.map_wait_seconds - before.vattention.map_wait_seconds)}};
}

Result<Finding> decode(const Values& point, const Setting& setting) {
  const int batch = setting.tiny ? 4 : 64, n_requests = 2 * batch;
  const ModelConfig config = shape_of(setting.tiny);
  TimedModel model = timed(config, setting.tiny ? 100 : kDecodeUs, 1);
  KvOptions kv = memory_of(point, config, 16);
  kv.max_sequence_tokens = 256;
  kv.vattention.max_sequences = 2 * batch;
  kv.pool_bytes = size_t(3 * batch) * 2 * size_t(config.n_layers) * kv.vattention.page_group_bytes;
  auto made = Contestant::create(
      "vattention", model, kv, {.policy = find_batch_policy("prefill_first"), .max_batch = batch, .step_tokens = 4096});
  if (!made) return made.error();
  Contestant& c = *made.value();
  Random random(setting.seed);
  for (int i = 0; i < n_requests; ++i) {
    const int n = 100 + int(random.below(26));
    c.submit(prompt_of(n, random), 31 + int(random.below(32)));
  }
  Finding found;
  while (!c.engine().idle()) {
    const int64_t prompt_tokens = c.engine().stats().prompt_tokens;
    const KvStats before = c.memory().stats();
    const double ms = 1e3 * c.step();
    if (c.engine().stats().prompt_tokens == prompt_tokens && model.last_s > 0)
      found.rows.push_back(row_of(int(found.rows.size()), ms, 1e3 * model.last_s, before, c.memory().stats()));
    model.last_s = 0;
  }
  c.memory().check_invariants();
  found.wrong = c.wrong();
  if (c.ended() != n_requests) found.wrong = "not every request ended";
  return found;
}

Result<Finding> prefill(const Values& point, const Setting& setting) {
  const int n_tokens = setting.tiny ? 256 : 2048, n_prompts = setting.tiny ? 2 : 4;
  const ModelConfig config = shape_of(setting.tiny);
  const double token_us = setting.tiny ? 1 : kPrefillUs;
  TimedModel model = timed(config, 1, token_us);
  KvOptions kv = memory_of(point, config, 1);
  kv.max_sequence_tokens = 4096;
  kv.vattention.max_sequences = 4;
  const int row_tokens = int(kv.vattention.page_group_bytes) / kTokenBytes;
  kv.pool_bytes = size_t(3 * (n_tokens / row_tokens + 2)) * 2 * size_t(config.n_layers) *
                  kv.vattention.page_group_bytes;
  auto made = Contestant::create(
      "vattention", model, kv,
      {.policy = find_batch_policy("chunked"), .max_batch = 1, .step_tokens = point["mode"] == "runs" ? n_tokens : 64});
  if (!made) return made.error();
  Contestant& c = *made.value();
  Random random(setting.seed);
  Finding found;
  for (int i = 0; i < n_prompts; ++i) {
    c.submit(prompt_of(n_tokens, random),
             2);  // the second token's step ends it: not of the prefill
    const KvStats before = c.memory().stats();
    double seconds = 0;
    while (c.engine().stats().generated_tokens == 2 * i) seconds += c.step();
    found.rows.push_back(row_of(i, 1e3 * seconds, 1e-3 * token_us * n_tokens, before, c.memory().stats()));
    while (!c.engine().idle()) c.step();
  }
  c.memory().check_invariants();
  found.wrong = c.wrong();
  if (c.ended() != n_prompts) found.wrong = "not every prompt ended";
  return found;
}

Measure open(const Setting& setting) {
  return [setting](const Values& point) {
    return point["part"] == "decode" ? decode(point, setting) : prefill(point, setting);
  };
}

REGISTER_EXPERIMENT("map_overlap", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::map_overlap_experiment
