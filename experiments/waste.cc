// waste: How much of a full KV pool holds KV, with slots of the maximum length and with blocks of 1 to 256 tokens, and
//   how many sequences fit?
// Paper: PagedAttention (SOSP'23) Fig. 2, sections 6.2 and 6.3; vAttention (ASPLOS'25) Fig. 15, Table 8.
// Set-up: the real engine, policy and KV memory over a model that computes nothing. At every step at which requests
//   wait, each token of the pool is in one of four states: it holds KV (useful), will hold it before its sequence ends
//   (reserved), belongs to a sequence that never fills it (internal), or belongs to no sequence although none can be
//   admitted (free).
// Command: make exp-waste (2 minutes; virtual, counted, computed).
// Expected: ShareGPT on OPT-13B, 12 GiB of KV at 819,200 bytes a token: 15,728 tokens are 7 slots of 2,048. A sequence
//   holds 450 tokens in the mean of its life, so slots use 20 %, and blocks hold 4.5 times the sequences. Blocks of b
//   tokens waste b / 2 a sequence. A page group of 64 KiB holds 6.4 tokens in each of 80 tensors, one of 2 MiB 205;
//   half of such a row is .7 % and 18 %.
// Found: slots use 20.2 % and blocks 97.0 % (20.4 and 96.3), with 4.8 times the sequences (4.3: our pool is always
//   full).
#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/schemes.h"
#include "base/clock.h"
#include "base/random.h"
#include "batch/engine/engine.h"
#include "experiments/experiment.h"
#include "experiments/lengths.h"
#include "experiments/null_model.h"
#include "experiments/tally.h"

namespace xpyd::experiments::waste_experiment {
namespace {

namespace pools {

constexpr int kVocab = 64;  // a request's number is its prompt's first three tokens, base 64

struct Scene {
  int max_len, pool_tokens;
  const char* model;
};
Scene scene_of(const std::string& dataset) {
  if (dataset == "sharegpt") return {2048, 15728, "OPT-13B, 12 GiB of KV"};
  return {131072, 1310720, "Llama-3-70B, 400 GiB of KV"};
}

// `row_tokens` is the number of tokens in a page group of 4 KiB of each of two tensors.
ModelConfig shape_of_nothing(int max_len, int row_tokens) {
  ModelConfig c;
  c.family = "llama";
  c.n_layers = c.n_heads = c.n_kv_heads = 1;
  c.head_dim = 4096 / row_tokens / 2;
  c.hidden = c.intermediate = 8;
  c.vocab = kVocab;
  c.max_position = max_len;
  return c;
}

// Records at every step which sequences hold KV, and how much.
class Watcher final : public SynchronousModel {
 public:
  Watcher(const ModelConfig& config, const KvMemory& memory, const std::vector<Lengths>& requests)
      : null_(make_null_model(config)), memory_(memory), requests_(requests) {}
  const Engine* engine = nullptr;

  const ModelConfig& config() const override { return null_->config(); }
  void forward(const StepInput& step, float* logits) override {
    compute_step(*null_, step, logits);
    const KvStats kv = memory_.stats();
    double useful = 0, later = 0;
    for (size_t s = 0; s < step.views.size(); ++s) {
      // A sequence is identified by its first block, which it keeps until it ends or is preempted. After that it comes
      // back with its whole prompt.
      const KvView& view = step.views[s];
      const int32_t first = view.contiguous() ? view.slot : view.block_table[0];
      const int32_t* ids = step.token_ids.data() + step.q_offsets[s];
      if (step.q_offsets[s + 1] - step.q_offsets[s] > 1)
        final_tokens_[first] = tokens_of(requests_[size_t(ids[0] + kVocab * (ids[1] + kVocab * ids[2]))]);
      const int now = step.kv_lengths[s], end = final_tokens_.at(first);
      const int held = (now + kv.block_tokens - 1) / kv.block_tokens * kv.block_tokens;
      useful += now;
      later += std::max(0, std::min(held, end) - now);
    }
    batch_peak = std::max(batch_peak, int(step.views.size()));
    if (engine->waiting() == 0) return;
    const double held = double(kv.active) * kv.block_tokens;
    if (useful + later > held) wrong = "sequences hold more tokens than their blocks";
    ++steps;
    batch += double(step.views.size());
    useful_tokens += useful;
    reserved_tokens += later;
    internal_tokens += held - useful - later;
  }
  Work work(const StepInput&) const override { return {}; }

  // Sums over the steps at which requests wait.
  double steps = 0, batch = 0, useful_tokens = 0, reserved_tokens = 0, internal_tokens = 0;
  int batch_peak = 0;
  std::string wrong;

 private:
  // The KV of the last token is never written.
  static int tokens_of(const Lengths& r) { return r.prompt + r.output - 1; }

  std::unique_ptr<Model> null_;
  const KvMemory& memory_;
  const std::vector<Lengths>& requests_;
  std::map<int32_t, int> final_tokens_;  // by first block
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "mooncake"}) {
    std::vector<std::pair<const char*, int>> pools = {{"contiguous", 0}};
    for (int row : dataset == std::string("sharegpt") ? std::vector{6, 204} : std::vector{32, 1024})
      pools.push_back({"vattention", row});
    for (int block : setting.tiny ? std::vector{1, 16} : std::vector{1, 4, 16, 64, 256})
      pools.push_back({"paged", block});
    for (int draw = 0; draw < kDraws; ++draw)
      for (auto [allocator, block] : pools)
        all.push_back({{"dataset", dataset}, {"allocator", allocator}, {"block", block}, {"sample", draw}});
  }
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const std::string dataset = point["dataset"];
  const int n = setting.tiny ? 400 : dataset == "mooncake" ? 1000 : 2000;  // seven and more times what fits
  Result<LengthSet> lengths = request_lengths(dataset, n, setting, point["sample"]);
  if (!lengths) return lengths.error();
  const std::vector<Lengths>& requests = lengths.value().requests;
  const Scene scene = scene_of(dataset);
  const std::string allocator = point["allocator"];
  const bool groups = allocator == "vattention";
  ModelConfig config = shape_of_nothing(scene.max_len, groups ? int(point["block"]) : 2048);
  KvOptions kv{.shape = kv_shape(config, Dtype::bf16),
               .block_tokens = std::max(1, int(point["block"])),
               .max_sequence_tokens = scene.max_len,
               .prefix_cache = false,  // only memory is compared, not reuse
               .vattention = {.page_group_bytes = 4096, .max_sequences = 256, .map_ahead = false}};
  kv.pool_bytes = size_t(scene.pool_tokens) * kv.shape.token_bytes();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool(allocator, kv);
  if (!pool) return pool.error();
  std::unique_ptr<KvMemory> memory = find_kv_scheme(allocator)->make(pool.value(), kv);
  Watcher model(config, *memory, requests);
  VirtualClock clock;
  Engine engine(model, *memory, {.policy = find_batch_policy("chunked"), .max_batch = 4096, .step_tokens = 1 << 24},
                clock, nullptr);
  model.engine = &engine;
  auto sink = std::make_shared<Tally>();
  Random random(seed_of(setting, point["sample"]));
  int64_t expected = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    auto request = std::make_shared<Request>();
    request->id = i + 1;
    request->prompt.resize(size_t(requests[i].prompt));
    for (int32_t& t : request->prompt) t = int32_t(random.below(kVocab));
    for (size_t digit = 0, rest = i; digit < 3; ++digit, rest /= kVocab)
      request->prompt[digit] = int32_t(rest % kVocab);
    request->sampling.temperature = 0;
    request->max_tokens = requests[i].output;
    request->ignore_eos = true;
    expected += requests[i].output;
    engine.submit(
        make_sequence(request, {.stands_for = request->n}, sink, std::make_shared<std::atomic<bool>>(false), nullptr));
  }
  while (!engine.idle())
    if (!engine.step()) return Finding{{}, "the engine makes no progress"};
  memory->check_invariants();
  if (!model.wrong.empty()) return Finding{{}, model.wrong};
  if (sink->tokens != expected || sink->ended_by(FinishReason::length) != int(requests.size()))
    return Finding{{}, "some requests did not get all their tokens"};
  if (model.steps == 0) return invalid("the pool was never full, so no request waited");

  const double pool_tokens = model.steps * scene.pool_tokens;
  auto share = [&](double tokens) { return tokens / pool_tokens; };
  const double free = pool_tokens - model.useful_tokens - model.reserved_tokens - model.internal_tokens;
  return Finding{{{{"useful_share", share(model.useful_tokens)},
                   {"reserved_share", share(model.reserved_tokens)},
                   {"internal_share", share(model.internal_tokens)},
                   {"free_share", share(free)},
                   {"batch_mean", model.batch / model.steps},
                   {"batch_peak", model.batch_peak},
                   {"requests", requests.size()},
                   {"lengths", lengths.value().source},
                   {"scene", scene.model}}},
                 ""};
}

REGISTER_EXPERIMENT("waste", "cpu", points, each<run>);

}  // namespace pools

// waste/orca_slots: contiguous memory of a buddy allocator in which each sequence reserves the most (max), a power of
// two (pow2), or its need (oracle), beside blocks of 16. Nothing is computed; a step is one token of every sequence.
//
// Expected: a piece of a power of two is .72 full, and up to a tenth of the pool stays free: oracle .59 * .72 * .92 =
// .39. pow2: pieces are .65 full: .27. max: 7 slots of 2,048: .20. Batches: 7, 9.5, 13.7, and 34 in blocks.
namespace orca {

constexpr int kPoolTokens = 15728, kMaxLen = 2048, kBlock = 16, kRequests = 2000;

// A buddy allocator: pieces of 2^k tokens, aligned to their size. Two halves of one piece are joined when both are
// free.
class Buddies {
 public:
  explicit Buddies(int tokens) {
    for (int at = 0; at < tokens;) {
      const int piece = int(std::bit_floor(unsigned(tokens - at)));
      free_[std::countr_zero(unsigned(piece))].insert(at);
      tops_.push_back({at, piece});
      at += piece;
    }
  }

  // Returns the start of a piece of at least `tokens` tokens, cut from the smallest free piece; -1 if there is none.
  int take(int tokens) {
    const int order = order_of(tokens);
    int from = order;
    while (from < kOrders && free_[from].empty()) ++from;
    if (from == kOrders) return -1;
    const int at = *free_[from].begin();
    free_[from].erase(free_[from].begin());
    for (; from > order; --from) free_[from - 1].insert(at + (1 << (from - 1)));
    return at;
  }

  void give_back(int at, int tokens) {
    const Top& top = *std::find_if(tops_.begin(), tops_.end(), [&](const Top& t) { return at < t.at + t.tokens; });
    for (int order = order_of(tokens);; ++order) {
      const int buddy = top.at + ((at - top.at) ^ (1 << order));
      if (1 << order == top.tokens || free_[order].erase(buddy) == 0) {
        free_[order].insert(at);
        return;
      }
      at = std::min(at, buddy);
    }
  }

  int free_tokens() const {
    int sum = 0;
    for (int order = 0; order < kOrders; ++order) sum += int(free_[order].size()) << order;
    return sum;
  }

 private:
  static constexpr int kOrders = 15;
  struct Top {
    int at, tokens;
  };
  static int order_of(int tokens) { return std::countr_zero(std::bit_ceil(unsigned(tokens))); }

  std::set<int> free_[kOrders];  // starts of the free pieces
  std::vector<Top> tops_;
};

struct Held {
  size_t request;
  int at, asked, now;  // start; tokens reserved; tokens of KV
};

int asked_for(const std::string& reserves, const Lengths& one) {
  if (reserves == "max") return kMaxLen;
  const int power = one.prompt + int(std::bit_ceil(unsigned(one.output)));
  if (reserves == "pow2") return std::min(kMaxLen, power);
  return one.prompt + one.output;
}

struct Sums {
  double steps = 0, batch = 0, useful = 0, reserved = 0, internal = 0;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"sharegpt", "alpaca"})
    for (const char* reserves : {"max", "pow2", "oracle", "blocks"})
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"dataset", dataset}, {"reserves", reserves}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int n = setting.tiny ? 400 : kRequests;
  const Result<LengthSet> lengths = request_lengths(point["dataset"], n, setting, int(point["sample"]));
  if (!lengths) return lengths.error();
  std::vector<Lengths> requests = lengths.value().requests;
  const std::string reserves = point["reserves"];
  const bool blocks = reserves == "blocks";
  Buddies pool(kPoolTokens);
  int free_blocks = kPoolTokens / kBlock;
  const auto blocks_of = [](int tokens) { return (tokens + kBlock - 1) / kBlock; };
  std::deque<size_t> waiting;
  for (size_t i = 0; i < requests.size(); ++i) waiting.push_back(i);
  std::vector<Held> running;  // in the order of admission
  Sums sums;
  size_t ended = 0;
  while (ended < requests.size()) {
    while (!waiting.empty()) {
      const Lengths& next = requests[waiting.front()];
      const int asked = asked_for(reserves, next);
      int at = 0;
      if (blocks) {
        if (blocks_of(next.prompt + 1) > free_blocks) break;
        free_blocks -= blocks_of(next.prompt);
      } else if ((at = pool.take(asked)) < 0) {
        break;
      }
      running.push_back({waiting.front(), at, asked, next.prompt - 1});
      waiting.pop_front();
    }
    if (running.empty()) return Finding{{}, "no request fits into the empty pool"};
    // One token of each sequence. With blocks, the last admitted sequences are preempted if there is no free block.
    for (size_t i = 0; i < running.size(); ++i) {
      Held& one = running[i];
      const int first = requests[one.request].prompt;
      while (blocks && one.now >= first && one.now % kBlock == 0 && free_blocks == 0) {
        const Held last = running.back();
        Lengths& again = requests[last.request];  // its tokens are recomputed as a part of its prompt
        free_blocks += blocks_of(std::max(last.now, again.prompt));
        again = {last.now + 1, again.prompt + again.output - last.now - 1};
        waiting.push_front(last.request);
        running.pop_back();
        if (running.size() == i) break;
      }
      if (i == running.size()) break;
      if (blocks && one.now >= first && one.now % kBlock == 0) --free_blocks;
      ++one.now;
    }
    if (!waiting.empty()) {
      ++sums.steps;
      sums.batch += double(running.size());
      for (const Held& one : running) {
        const Lengths& whole = requests[one.request];
        const int end = whole.prompt + whole.output - 1;  // the KV of the last token is never written
        const int held = blocks ? blocks_of(one.now) * kBlock : one.asked;
        sums.useful += one.now;
        sums.reserved += std::min(held, end) - one.now;
        sums.internal += std::max(0, held - end);
      }
    }
    std::erase_if(running, [&](const Held& one) {
      const Lengths& whole = requests[one.request];
      if (one.now < whole.prompt + whole.output - 1) return false;
      if (blocks)
        free_blocks += blocks_of(one.now);
      else
        pool.give_back(one.at, one.asked);
      ++ended;
      return true;
    });
  }
  if (blocks ? free_blocks != kPoolTokens / kBlock : pool.free_tokens() != kPoolTokens || pool.take(8192) != 0)
    return Finding{{}, "the pool is not empty and in one piece after the last request"};
  if (sums.steps == 0) return invalid("the pool was never full, so no request waited");
  const auto share = [&](double tokens) { return tokens / sums.steps / kPoolTokens; };
  return Finding{{{{"useful_share", share(sums.useful)},
                   {"reserved_share", share(sums.reserved)},
                   {"internal_share", share(sums.internal)},
                   {"external_share", 1 - share(sums.useful + sums.reserved + sums.internal)},
                   {"batch_mean", sums.batch / sums.steps},
                   {"lengths", lengths.value().source}}},
                 ""};
}

REGISTER_EXPERIMENT("waste/orca_slots", "cpu", points, each<run>);

}  // namespace orca

// waste/max_batch: how many sequences fit by the size of a page group (vAttention Fig. 15, Table 8) on one worker of
// Yi-6B, Llama-3-8B and Yi-34B. The real memory, scaled down to the same number of rows with as many tokens each, must
// admit what the arithmetic does. Lengths are uniform in [2,048, 5,120), which follows from the published pairs. The
// memory is 80 % of an A100 less the weights, which fits Yi-6B at 64 KiB alone.
//
// Expected: a row has 64 tokens at 64 KiB and 2,048 at 2 MiB, and a sequence wastes half a row: (3,584 + 1,024) /
// (3,584 + 32) = 1.27 times as many sequences.
namespace largest_batch {

constexpr int kPlaneTokenBytes = 1024;            // 4 KV heads of 128 in bf16, for each of the three workers
constexpr int kShortest = 2048, kLongest = 5120;  // half-open
constexpr double kMemory = 0.8 * 80 * (1 << 30);

struct Worker {
  const char* model;
  int n_layers;
  double weight_bytes;
};
constexpr Worker kWorkers[] = {
    {"Yi-6B", 32, 12.1e9}, {"Llama-3-8B TP-2", 32, 16.1e9 / 2}, {"Yi-34B TP-2", 60, 68.8e9 / 2}};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const Worker& worker : kWorkers)
    for (int draw = 0; draw < kDraws; ++draw) {
      auto add = [&](const char* memory, int kib) {
        all.push_back({{"model", worker.model}, {"memory", memory}, {"group_kib", kib}, {"sample", draw}});
      };
      add("paged", 0);
      for (int kib : {64, 128, 256, 2048})
        if (!setting.tiny || kib == 2048) add("layer_major", kib);
      add("token_major", 2048);
    }
  return all;
}

// Rows of the published shape. The scaled shape has the same number of rows and tokens per row.
struct Rows {
  int tokens;
  int64_t bytes, n;
};
Rows rows_of(const Worker& worker, const std::string& memory, int64_t group) {
  const int64_t token = 2 * worker.n_layers * int64_t{kPlaneTokenBytes};
  Rows rows{};
  if (memory == "paged")
    rows = {16, 16 * token, 0};
  else if (memory == "layer_major")
    rows = {int(group / kPlaneTokenBytes), 2 * worker.n_layers * group, 0};
  else
    rows = {int(group / token), group, 0};
  rows.n = int64_t((kMemory - worker.weight_bytes) / double(rows.bytes));
  return rows;
}

KvOptions scaled(const Worker& worker, const std::string& memory, int64_t group, const Rows& rows, int most) {
  KvOptions kv{.prefix_cache = false};
  const bool sliced = memory == "token_major";
  const int scale = sliced ? 256 : 16;
  kv.shape = {sliced ? worker.n_layers : 2, 1, kPlaneTokenBytes / scale / 2, Dtype::bf16};
  kv.order = sliced ? KvOrder::token_major : KvOrder::layer_major;
  kv.max_sequence_tokens = kLongest;
  kv.vattention.max_sequences = most;
  kv.vattention.map_ahead = false;  // no rows for later tokens
  if (memory == "paged") {
    kv.block_tokens = rows.tokens;
    kv.pool_bytes = size_t(rows.n) * size_t(rows.tokens) * kv.shape.token_bytes();
  } else {
    kv.vattention.page_group_bytes = size_t(group / scale);
    kv.pool_bytes = size_t(rows.n) * kv.vattention.page_group_bytes * size_t(sliced ? 1 : 4);
  }
  return kv;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const auto* worker = std::find_if(std::begin(kWorkers), std::end(kWorkers),
                                    [&](const Worker& w) { return point["model"] == w.model; });
  const std::string memory = point["memory"];
  const int64_t group = int64_t{point["group_kib"]} * 1024;
  Rows rows = rows_of(*worker, memory, group);
  if (setting.tiny) rows.n /= 16;
  Random random(seed_of(setting, point["sample"]));
  std::vector<int> lengths(size_t(rows.n * rows.tokens / kShortest + 1));
  for (int& length : lengths) length = kShortest + int(random.below(uint64_t(kLongest - kShortest)));

  int arithmetic = 0;
  int64_t left = rows.n, tokens = 0;
  for (int length : lengths) {
    const int64_t need = (length + rows.tokens - 1) / rows.tokens;
    if (need > left) break;
    left -= need;
    tokens += length;
    ++arithmetic;
  }

  const std::string scheme = memory == "paged" ? "paged" : "vattention";
  const KvOptions kv = scaled(*worker, memory, group, rows, arithmetic + 8);
  if (Result<KvLayout> layout = plan_pool(scheme, kv); !layout) return layout.error();
  Result<std::shared_ptr<KvPool>> pool = make_block_pool(scheme, kv);
  if (!pool) return pool.error();
  if (pool.value()->layout().n_blocks != rows.n || pool.value()->layout().block_tokens != rows.tokens)
    return Finding{{}, "the rows of the scaled pool have another number or size"};
  std::unique_ptr<KvMemory> real = find_kv_scheme(scheme)->make(pool.value(), kv);
  const std::vector<int32_t> prompt(size_t{kLongest});
  int batch = 0;
  int64_t held = 0;
  for (int length : lengths) {
    const std::span<const int32_t> ids(prompt.data(), size_t(length));
    Result<KvReservation> reserved = real->reserve(ids, 0);
    if (!reserved || !real->append(reserved.value().handle, length)) break;
    real->commit(reserved.value().handle, ids);
    held += int64_t(real->blocks(reserved.value().handle).size());
    ++batch;
  }
  real->check_invariants();
  if (batch != arithmetic)
    return Finding{{},
                   "the memory admits " + std::to_string(batch) + " sequences, but the arithmetic predicts " +
                       std::to_string(arithmetic)};
  const double wasted = double(held * rows.bytes) - double(tokens) * 2 * worker->n_layers * double{kPlaneTokenBytes};
  return Finding{{{{"row_tokens", rows.tokens},
                   {"rows", rows.n},
                   {"arithmetic", arithmetic},
                   {"batch", batch},
                   {"tokens", tokens},
                   {"wasted_share", wasted / double(held * rows.bytes)},
                   {"wasted_mib_worst", double(rows.bytes) / (1 << 20)}}},
                 ""};
}

REGISTER_EXPERIMENT("waste/max_batch", "cpu", points, each<run>);

}  // namespace largest_batch

// waste/parallel_sampling: the saving if n choices of one prompt share its blocks of 16 (PagedAttention Fig. 15a). A
// prompt is reserved and forked into n, and each choice grows to its output.
//
// Expected: floor(p / 16) blocks of p tokens stay shared to the end: Alpaca .9 of 5.4 blocks, 8 % for 2 choices and 14
// % for 6; ShareGPT 9.6 of 31.7, 15 and 25 %.
namespace sampling {

constexpr int kBlock = 16, kLongest = 2048;

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (const char* dataset : {"alpaca", "sharegpt"})
    for (int n : {2, 4, 6})
      for (int draw = 0; draw < (setting.tiny ? 1 : kDraws); ++draw)
        all.push_back({{"dataset", dataset}, {"n", n}, {"sample", draw}});
  return all;
}

Result<Finding> run(const Values& point, const Setting& setting) {
  const int n = point["n"];
  const Result<LengthSet> lengths = request_lengths(point["dataset"], setting.tiny ? 2 : 100, setting,
                                                    int(point["sample"]));
  if (!lengths) return lengths.error();
  KvOptions kv{.shape = {1, 1, 8, Dtype::bf16}, .block_tokens = kBlock, .prefix_cache = false};
  const KvScheme& scheme = *find_kv_scheme("paged");
  kv.pool_bytes = size_t(n) * (2 * kLongest / kBlock) * scheme.block_bytes(kv);
  auto pool = make_block_pool(scheme.name, kv);
  if (!pool) return pool.error();
  const std::unique_ptr<KvMemory> memory = scheme.make(std::move(pool).value(), kv);
  double held_at_end = 0, alone_at_end = 0;
  for (const Lengths& one : lengths.value().requests) {
    std::vector<KvHandle> choices;
    const std::vector<int32_t> prompt(size_t(one.prompt), 1), next(1, 2);
    const auto first = memory->reserve(prompt, 0);
    if (!first) return first.error();
    choices.push_back(first.value().handle);
    if (!memory->append(choices[0], one.prompt)) return Finding{{}, "a prompt does not fit"};
    memory->commit(choices[0], prompt);
    while (int(choices.size()) < n) {
      const auto fork = memory->fork(choices[0]);
      if (!fork) return fork.error();
      choices.push_back(fork.value());
    }
    for (int i = 1; i <= one.output; ++i) {
      for (KvHandle choice : choices) {
        if (!memory->append(choice, 1)) return Finding{{}, "a token does not fit"};
        memory->commit(choice, next);
      }
    }
    held_at_end += memory->stats().active, alone_at_end += n * ((one.prompt + one.output + kBlock - 1) / kBlock);
    for (KvHandle choice : choices) memory->free(choice);
    memory->check_invariants();
  }
  return Finding{{{{"saved_at_end", 1 - held_at_end / alone_at_end}}}, ""};
}

REGISTER_EXPERIMENT("waste/parallel_sampling", "cpu", points, each<run>);

}  // namespace sampling

}  // namespace
}  // namespace xpyd::experiments::waste_experiment
