// vattention_speed: How much does the allocator alone change a whole model's prefill, decoding and throughput, and how
//   fast does KV grow?
// Paper: vAttention (ASPLOS'25) section 4, Figs. 7 to 10.
// Set-up: real steps of llama-mini in f32. The same engine and kernels run over slots, blocks of 16 in random order and
//   vAttention (page-group rows of 32 tokens), which take turns step by step. `contiguous_groups` is contiguous memory
//   in vAttention's pages of 4 KiB. prefill: one prompt in chunks of 512 (Fig. 7). decode: sequences of 1,024 tokens
//   generate 40 more each (Figs. 4, 8). offline: the long summaries' lengths divided by 128 (Fig. 9).
// Command: make exp-vattention_speed (a minute; measured, computed, virtual).
// Expected: 1.0 everywhere, because the memories differ by a look-up and a division beside 128 multiply-adds. The
//   published gains are over the paged kernels of other libraries. KV grows by 8 KiB a token: 2 MB/s alone, 10 at a
//   batch of 32.
// Found: blocks cost 8 % in decode and nothing in prefill here. The costs of the paper's cards give its offline gains
//   of 1.13 to 1.18.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "attention/attention.h"
#include "base/memory.h"
#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "experiments/simulated.h"
#include "model/cost/step_cost.h"
#include "model/model.h"

namespace xpyd::experiments::vattention_speed_experiment {
namespace {

namespace live {

constexpr int kChunk = 512, kMaxBatch = 32;

struct Sizes {
  std::string model;
  int context, decoded, shrink;
  std::vector<int> prefill, decode;
  int offline;
};
Sizes sizes_of(bool tiny) {
  if (tiny) return {"llama-tiny", 64, 8, 2048, {96}, {2}, 2};
  return {"llama-mini", 1024, 40, 128, {1024, 3584}, {1, 8, 32}, 10};
}

std::vector<Values> points(const Setting& setting) {
  const Sizes sizes = sizes_of(setting.tiny);
  std::vector<Values> all;
  for (int n : sizes.prefill) all.push_back({{"phase", "prefill"}, {"size", n}});
  for (int n : sizes.decode) all.push_back({{"phase", "decode"}, {"size", n}});
  all.push_back({{"phase", "offline"}, {"size", sizes.offline}});
  return all;
}

// Seconds in the attention kernel on this thread. A global, because an AttentionFn carries no state.
thread_local double attention_seconds = 0;
void timed_attention(const AttentionArgs& args, ThreadTeam& team) {
  RealClock clock;
  const double start = clock.now();
  default_attention().run(args, team);
  attention_seconds += clock.now() - start;
}
const AttentionVariant kTimedAttention = {"timed", timed_attention, Isa::portable, ""};

using Contestants = std::vector<std::unique_ptr<Contestant>>;

struct Taken {
  double seconds = 0, attention = 0, map_wait = 0;
  std::vector<double> steps;         // seconds of each step
  int64_t map_calls = 0, grown = 0;  // grown: bytes by which the sequences' memory has grown
};

class Hall {
 public:
  explicit Hall(const Setting& setting)
      : setting_(setting),
        sizes_(sizes_of(setting.tiny)),
        team_(std::max(1, int(std::thread::hardware_concurrency()))) {}

  Result<Finding> run(const Values& point) {
    if (!model_)
      if (Status status = load(); !status) return status.error();
    const std::string phase = point["phase"];
    const int size = point["size"];
    return phase == "decode" ? decode(size) : phase == "prefill" ? prefill(size) : offline(size);
  }

 private:
  Status load() {
    const std::string dir = "experiments/models/" + sizes_.model;
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team_);
    if (!weights) return weights.error();
    model_ = make_llama(weights.value(), team_, kChunk, kMaxBatch, {.attention = &kTimedAttention});
    // The KV that sequences have when they start to decode.
    layout_ = {kv_shape(config.value(), Dtype::f32), KvOrder::layer_major, sizes_.context, 1};
    source_ = Buffer(layout_.pool_bytes());
    known_ = tokens(sizes_.context, 1);
    const KvView view{source_.data(), &layout_, nullptr, 0};
    std::vector<float> logits(size_t(config.value().vocab));
    for (int done = 0; done < sizes_.context;) {
      const int n = std::min(kChunk, sizes_.context - done), end = done + n;
      const int32_t offsets[] = {0, n}, last = n - 1;
      compute_step(*model_,
                   {.token_ids = std::span(known_).subspan(size_t(done), size_t(n)),
                    .q_offsets = offsets,
                    .kv_lengths = {&end, 1},
                    .views = {&view, 1},
                    .logit_rows = {&last, 1}},
                   logits.data());
      done = end;
    }
    return ok();
  }

  std::vector<int32_t> tokens(int n, uint64_t number) const {
    Random random(setting_.seed * 1000 + number);
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int32_t& id : ids) id = int32_t(random.below(uint64_t(model_->config().vocab)));
    return ids;
  }

  // Memories with room for `batch` sequences of `longest` tokens.
  Result<Contestants> contestants(int batch, int longest) {
    Contestants all;
    struct {
      const char *name, *scheme;
      bool in_groups;
    } rows[] = {{"contiguous", "contiguous", false},
                {"contiguous_groups", "contiguous", true},
                {"paged", "paged", false},
                {"vattention", "vattention", false}};
    for (const auto& [name, scheme, in_groups] : rows) {
      KvOptions kv{.shape = kv_shape(model_->config(), Dtype::f32),
                   .max_sequence_tokens = (longest + 31) / 32 * 32,
                   .prefix_cache = false,
                   .vattention = {.page_group_bytes = 16384, .max_sequences = 2 * batch},
                   .pool_in_groups = in_groups};
      // vAttention needs a page-group row and 8 tokens more for each sequence, two rows for an idle slot, and a
      // twentieth that stays free.
      const size_t held = size_t(batch) * size_t(longest / 32 + 3) + 2;
      kv.pool_bytes = (held + held / 10 + 1) * 32 * kv.shape.token_bytes();
      auto made = Contestant::create(
          scheme, *model_, kv, {.policy = find_batch_policy("chunked"), .max_batch = batch, .step_tokens = kChunk});
      if (!made) return made.error();
      made.value()->name = name;
      if (scheme == std::string("paged")) made.value()->scramble(setting_.seed);
      all.push_back(std::move(made).value());
    }
    return all;
  }

  // One step of each contestant that is not idle.
  static bool turn(Contestants& all, std::vector<Taken>& taken) {
    bool some = false;
    const size_t first = taken[0].steps.size();  // rotates who is first
    for (size_t n = 0; n < all.size(); ++n) {
      const size_t i = (first + n) % all.size();
      if (all[i]->engine().idle()) continue;
      const KvStats before = all[i]->memory().stats();
      attention_seconds = 0;
      taken[i].steps.push_back(all[i]->step());
      taken[i].seconds += taken[i].steps.back();
      taken[i].attention += attention_seconds;
      const KvStats after = all[i]->memory().stats();
      taken[i].map_wait += after.vattention.map_wait_seconds - before.vattention.map_wait_seconds;
      taken[i].map_calls += after.vattention.map_calls - before.vattention.map_calls;
      taken[i].grown += (after.active - before.active) * int64_t(all[i]->block_bytes());
      some = true;
    }
    return some;
  }

  // Checks that all agree on a small load.
  std::string warm_up(Contestants& all) {
    for (auto& c : all)
      for (int i = 0; i < 2; ++i) c->submit(tokens(33 + 20 * i, 90 + uint64_t(i)), 3);
    std::vector<Taken> taken(all.size());
    while (turn(all, taken)) {
    }
    return compare(all);
  }

  Finding finding(Contestants& all, std::vector<Taken>& taken, double tokens, double requests) {
    Finding found;
    if (found.wrong = compare(all); !found.wrong.empty()) return found;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i]->memory().check_invariants();
      char hash[20];
      std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(all[i]->logits_hash()));
      Taken& t = taken[i];
      std::sort(t.steps.begin(), t.steps.end());
      const Value step_s = percentile_seen(t.steps, 50);
      found.rows.push_back({{"allocator", all[i]->name},
                            {"seconds", t.seconds},
                            {"step_ms", step_s.is_number() ? Value(1e3 * double(step_s)) : step_s},
                            {"attention_share", t.attention / t.seconds},
                            {"tokens_per_s", tokens / t.seconds},
                            {"requests_per_min", 60 * requests / t.seconds},
                            {"written_mbps", 1e-6 * tokens * double(layout_.shape.token_bytes()) / t.seconds},
                            {"grown_mbps", 1e-6 * double(t.grown) / t.seconds},
                            {"map_calls", t.map_calls},
                            {"map_wait_share", t.map_wait / t.seconds},
                            {"logits_hash", hash}});
    }
    return found;
  }

  Result<Finding> prefill(int size) {
    auto made = contestants(2, size + 8);
    if (!made) return made.error();
    Contestants all = std::move(made).value();
    if (std::string wrong = warm_up(all); !wrong.empty()) return Finding{{}, wrong};
    const int n = size <= 1024 ? 2 : 1;
    std::vector<Taken> taken(all.size());
    for (int i = 0; i < n; ++i) {
      for (auto& c : all) c->submit(tokens(size, uint64_t(i)), 1);
      while (turn(all, taken)) {
      }
    }
    return finding(all, taken, double(n) * size, n);
  }

  Result<Finding> decode(int size) {
    auto made = contestants(std::max(2, size), sizes_.context + sizes_.decoded + 8);
    if (!made) return made.error();
    Contestants all = std::move(made).value();
    if (std::string wrong = warm_up(all); !wrong.empty()) return Finding{{}, wrong};
    const KvView source{source_.data(), &layout_, nullptr, 0};
    for (auto& c : all)
      for (int i = 0; i < size; ++i) {
        // So that sequences reach their next page-group rows at different times.
        std::vector<int32_t> prompt(known_.begin(), known_.end() - (i * 7) % 32);
        prompt.back() = int32_t(i) % model_->config().vocab;
        if (!c->adopt(std::move(prompt), sizes_.decoded + 2, source))
          return Finding{{}, c->name + " has no free memory for a prompt"};
      }
    std::vector<Taken> taken(all.size()), untimed(all.size());
    turn(all, untimed);  // admits them
    for (int i = 0; i < sizes_.decoded; ++i) turn(all, taken);
    while (turn(all, untimed)) {
    }
    return finding(all, taken, double(size) * sizes_.decoded, 0);
  }

  Result<Finding> offline(int n) {
    Result<LengthSet> set = request_lengths("arxiv", n, setting_);
    if (!set) return set.error();
    int longest = 0;
    double sum = 0;
    std::vector<Lengths> lengths = set.value().requests;
    for (Lengths& l : lengths) {
      l = {std::max(1, l.prompt / sizes_.shrink), std::max(1, l.output / sizes_.shrink)};
      longest = std::max(longest, l.prompt + l.output);
      sum += l.prompt + l.output;
    }
    auto made = contestants(std::min(4, n), longest + 8);
    if (!made) return made.error();
    Contestants all = std::move(made).value();
    if (std::string wrong = warm_up(all); !wrong.empty()) return Finding{{}, wrong};
    for (auto& c : all)
      for (int i = 0; i < n; ++i) c->submit(tokens(lengths[size_t(i)].prompt, uint64_t(i)), lengths[size_t(i)].output);
    std::vector<Taken> taken(all.size());
    while (turn(all, taken)) {
    }
    return finding(all, taken, sum, n);
  }

  const Setting setting_;
  const Sizes sizes_;
  ThreadTeam team_;
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer source_;  // KV of one sequence
  std::vector<int32_t> known_;
};

Measure open(const Setting& setting) {
  auto hall = std::make_shared<Hall>(setting);
  return [hall](const Values& point) { return hall->run(point); };
}

REGISTER_EXPERIMENT("vattention_speed", "cpu", points, open);

}  // namespace live

// vattention_speed/costs and /virtual: vAttention's cards and lengths in virtual time. costs: decode at a context of
// 900, by batch (Fig. 4). virtual: 427 long summaries at once (Fig. 9) and 400 arrivals (Fig. 10), with the plain
// kernel and with one that makes a prompt of 192K gain what Fig. 7 says. That factor is the only fitted number.
//
// Expected, Yi-6B: tokens/s tend to 1 / 129 us, so 320 sequences give 1.05 times as many as 256. KV grows by 508 MB/s
// (Llama-3-8B 656, Yi-34B 375), below 750. Offline, 16 of the 26 s of a request are attention: 1.18. Online at a load
// of 1 half of the latency is the queue's.
namespace cards {

using namespace disagg;
using model::StepCost;
using model::StepShape;

constexpr int kChunk = 16384, kContext = 900, kLongest = 192 << 10, kOffline = 427, kOnline = 400, kOutput = 428;

struct Served {
  const char* model;
  int cards;
  double gain;  // of a prompt of kLongest, over FlashAttention's paged kernel (Fig. 7)
};
constexpr Served kServed[] = {{"yi-6b", 1, 1.24}, {"llama-3-8b", 2, 1.26}, {"yi-34b", 2, 1.24}};

std::vector<Values> cost_points(const Setting&) {
  std::vector<Values> all;
  for (const Served& served : kServed) all.push_back({{"model", served.model}});
  return all;
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Served& served : kServed)
    for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
      for (double load : {0., .6, .8, 1.0})  // 0: all at once
        if (load == 0 || &served == kServed) all.push_back({{"model", served.model}, {"load", load}, {"sample", draw}});
  return all;
}

const Served& served_by(const Values& point) {
  return *std::ranges::find(kServed, std::string(point["model"]), [](const Served& s) { return std::string(s.model); });
}

struct Bed {
  SimulationOptions options;
  StepCost plain = StepCost(), slow = StepCost();
  double factor = 1;
};

double prompt_s(const StepCost& cost, int tokens) { return cost.seconds(model::prompt_steps(tokens, 0, kChunk)); }

StepCost slower(const StepCost& cost, double factor) {
  StepCost::Terms terms = cost.terms();
  terms[3] *= factor;  // the tokens that a prompt attends to
  return StepCost(terms);
}

Result<Bed> bed_of(const Served& served, const Trace& trace) {
  auto options = simulated("a800x" + std::to_string(served.cards), served.model, "1C", trace);
  if (!options) return options.error();
  Bed bed{.options = std::move(options).value()};
  set_step_tokens(bed.options, kChunk);
  bed.options.conductor.placement = find_placement_policy("least_loaded");
  bed.plain = step_cost(bed.options.model, bed.options.hardware);
  // Seconds are linear in the factor.
  const double at_1 = prompt_s(bed.plain, kLongest), more = prompt_s(slower(bed.plain, 2), kLongest) - at_1;
  bed.factor = 1 + (served.gain - 1) * at_1 / more;
  bed.slow = slower(bed.plain, bed.factor);
  return bed;
}

Result<Simulation> serve(const Bed& bed, const StepCost& cost, const Trace& trace) {
  SimulationOptions options = bed.options;
  options.hardware.step_terms = cost.terms();
  return simulate(options, trace);
}

Value median_latency_s(const Simulation& run) {
  std::vector<double> all;
  for (const SimulatedRecord& r : run.records) all.push_back(r.last_s - r.arrival_s);
  std::ranges::sort(all);
  return percentile_seen(all, 50);
}

Result<Finding> costs(const Values& point) {
  const Served& served = served_by(point);
  const Result<Bed> made = bed_of(served, {});
  if (!made) return made.error();
  const Bed& bed = made.value();
  Finding found;
  for (int n : {1, 16, 64, 128, 192, 256, 320}) {
    StepShape step;
    step.add_decodes(n, double(n) * kContext);
    const double s = bed.plain.seconds(step);
    found.rows.push_back({{"figure", "batch"},
                          {"size", n},
                          {"tokens_per_s", n / s},
                          {"seconds", s},
                          {"kv_mbps", 1e-6 * n / s * bed.options.model.kv_token_bytes() / served.cards},
                          {"gain", 1.0},
                          {"factor", 1.0}});
  }
  for (int k : {2, 16, 32, 64, 128, 192}) {
    const double plain = prompt_s(bed.plain, k << 10), paged = prompt_s(bed.slow, k << 10);
    found.rows.push_back({{"figure", "prefill"},
                          {"size", k << 10},
                          {"tokens_per_s", (k << 10) / plain},
                          {"seconds", plain},
                          {"kv_mbps", 1e-6 * (k << 10) / plain * bed.options.model.kv_token_bytes() / served.cards},
                          {"gain", paged / plain},
                          {"factor", bed.factor}});
  }
  return found;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const double load = point["load"];
  const int draw = point["sample"];
  Trace trace;
  trace.block_tokens = 256;  // as in FlashAttention's paged kernel
  Random random(seed_of(setting, draw));
  if (load == 0) {
    Result<LengthSet> lengths = request_lengths("arxiv", setting.tiny ? 8 : kOffline, setting, draw);
    if (!lengths) return lengths.error();
    for (const Lengths& one : lengths.value().requests) add_request(trace, 0, one.prompt, one.output);
  } else {
    for (int i = 0; i < (setting.tiny ? 10 : kOnline); ++i)
      add_request(trace, 0, 22900 + int(random.below(45800 - 22900)), kOutput);
  }
  const Result<Bed> made = bed_of(served_by(point), trace);
  if (!made) return made.error();
  const Bed& bed = made.value();
  if (load > 0) {
    double all_s = 0, now = 0;
    for (const TraceRequest& r : trace.requests) all_s += prompt_s(bed.slow, r.prompt_tokens);
    const double every_s = all_s / double(trace.requests.size()) / load;
    for (TraceRequest& r : trace.requests) r.arrival_s = now, now += every_s * random.exponential();
  }
  const Result<Simulation> paged = serve(bed, bed.slow, trace), plain = serve(bed, bed.plain, trace);
  if (!paged) return paged.error();
  if (!plain) return plain.error();
  Finding found;
  for (const Simulation* each : {&paged.value(), &plain.value()})
    if (found.wrong = unserved(*each, trace); !found.wrong.empty()) return found;
  const Value slow_s = median_latency_s(paged.value()), quick_s = median_latency_s(plain.value());
  const bool seen = slow_s.is_number() && quick_s.is_number();
  found.rows.push_back({{"paged_end_s", paged.value().end_s},
                        {"plain_end_s", plain.value().end_s},
                        {"gain", paged.value().end_s / plain.value().end_s},
                        {"paged_median_s", slow_s},
                        {"plain_median_s", quick_s},
                        {"less_latency", seen ? Value(1 - double(quick_s) / double(slow_s)) : Value("")}});
  return found;
}

Measure open_costs(const Setting&) { return costs; }
REGISTER_EXPERIMENT("vattention_speed/costs", "cpu", cost_points, open_costs);
REGISTER_EXPERIMENT("vattention_speed/virtual", "cpu", points, each<run>);

}  // namespace cards

}  // namespace
}  // namespace xpyd::experiments::vattention_speed_experiment
