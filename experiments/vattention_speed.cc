// vattention_speed: what the allocator alone is worth to a whole model: prompts, decoding, and both.
//
// Real steps of llama-mini in f32, the same engine and kernels over slots, blocks of 16 (the free
// ones in random order) and vattention (groups of 16 KiB: rows of 32 tokens), which take turns,
// step by step. `contiguous_groups` is contiguous memory in the pages that vattention has
// (--kv-backing groups): a memfd's, 4 KiB, where anonymous memory has huge pages.
//   prefill   (Fig. 7, Table 6) one prompt of `size` tokens, in chunks of 512: time, and the share
//             of attention
//   decode    (Fig. 8, Table 7; Fig. 4) `size` sequences of 1,024 tokens get 40 more each: time of
//             a step (of 40: fewer have no median), and the memory that they take meanwhile
//   offline   (Fig. 9) `size` requests at once, of the long summaries' lengths divided by 128
//
// Arithmetic. 1.0 everywhere: the three differ in a table look-up and a division per row and head,
// beside 128 multiply-adds (experiment paged_attention: 0 to 5 % of the kernel), and attention is
// less than half of a prompt (of 3,584 tokens: 8 layers * 4 * 512 * 1,792 = 29 MFLOP a token beside
// 50 of matrices). The published gains are over the paged kernels of other libraries: prefill 1.24
// to 1.36, offline 1.13 to 1.23; decoding was equal to FlashAttention's paged kernel (1.99 over
// vLLM's own). A token of KV is 8 KiB, and every sequence takes one row of 16 groups in 32 tokens:
// memory grows by 8 KiB * tokens/s, 2 MB/s alone and 10 at a batch of 32 (published: up to 750, at
// 64 to 240 KB a token). A map of 16 KiB takes 5 to 7 us: 2.5 GB/s and more could be had.
#include <algorithm>
#include <cstdio>
#include <thread>

#include "attention/attention.h"
#include "base/memory.h"
#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "model/model.h"

namespace xpyd::experiments::vattention_speed_experiment {
namespace {

constexpr int kChunk = 512, kMaxBatch = 32;

struct Sizes {
  std::string model;
  int context, decoded, shrink;
  std::vector<int> prefill, decode;
  int offline;
};
Sizes sizes_of(bool tiny) {
  if (tiny) return {"llama-tiny", 64, 8, 2048, {96}, {2}, 2};
  return {"llama-mini", 1024, 40, 128, {512, 1024, 2048, 3584}, {1, 2, 4, 8, 16, 32}, 10};
}

std::vector<Values> points(const Setting& setting) {
  const Sizes sizes = sizes_of(setting.tiny);
  std::vector<Values> all;
  for (int n : sizes.prefill) all.push_back({{"phase", "prefill"}, {"size", n}});
  for (int n : sizes.decode) all.push_back({{"phase", "decode"}, {"size", n}});
  all.push_back({{"phase", "offline"}, {"size", sizes.offline}});
  return all;
}

// Seconds that the kernel has taken for whoever is stepping: an AttentionFn carries nothing.
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
  std::vector<double> steps;         // seconds of each
  int64_t map_calls = 0, grown = 0;  // grown: bytes that sequences hold more than before
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
    // What sequences have in memory when they start to decode.
    layout_ = {kv_shape(config.value(), Dtype::f32), KvOrder::layer_major, sizes_.context, 1};
    source_ = Buffer(layout_.pool_bytes());
    known_ = tokens(sizes_.context, 1);
    const KvView view{source_.data(), &layout_, nullptr, 0};
    std::vector<float> logits(size_t(config.value().vocab));
    for (int done = 0; done < sizes_.context;) {
      const int n = std::min(kChunk, sizes_.context - done), end = done + n;
      const int32_t offsets[] = {0, n}, last = n - 1;
      model_->forward({.token_ids = std::span(known_).subspan(size_t(done), size_t(n)),
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
      // vattention: a row and 8 tokens more for each, two of an idle slot, a twentieth kept free.
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

  // One step of each that is not idle.
  static bool turn(Contestants& all, std::vector<Taken>& taken) {
    bool some = false;
    const size_t first = taken[0].steps.size();  // nobody is always the first
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

  // They agree on something small.
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
        // They cross into their next rows at different times.
        std::vector<int32_t> prompt(known_.begin(), known_.end() - (i * 7) % 32);
        prompt.back() = int32_t(i) % model_->config().vocab;
        if (!c->adopt(std::move(prompt), sizes_.decoded + 2, source)) return Finding{{}, c->name + " has no room"};
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
  Buffer source_;  // one sequence's KV
  std::vector<int32_t> known_;
};

Measure open(const Setting& setting) {
  auto hall = std::make_shared<Hall>(setting);
  return [hall](const Values& point) { return hall->run(point); };
}

REGISTER_EXPERIMENT("vattention_speed", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::vattention_speed_experiment
