// block_speed: requests a second of a whole model by the size of a block, where the pool has room for all.
//
// wde's notes on KV offloading (light-vllm, docs/block_size.md), vLLM's FlashAttention: blocks of 16, 32, 64 and 128
// get 0.911, 0.906, 0.910 and 0.908 requests/s of prompts, and 0.305 each of decoding. Here real steps of llama-mini in
// f32, both cores, blocks in random order, the prefix cache on, and at most half of the pool in use. The four block
// sizes take turns, step by step, over the same requests; each round has new ones, and empty caches.
//   prompts   1 prompt of 512 tokens in chunks of 128, of which nothing is known, and 1 token of output
//   decode    8 sequences of 1,024 tokens, whose KV is there, get 16 tokens each
//   known     1 prompt of 512 tokens that has its first 340 in common with one that was there before
//
// Arithmetic. Of a prompt attention is 8 layers * 4 * 512 * 256 = 4 of 54 MFLOP a token; of a step of decodes it reads
// 64 MiB beside 108 MB of weights, a third. A kernel that asks the table once a block has no more instructions, and
// differs by 0 to 3 % between blocks of 16 and of 128 (block_work); hashing a token takes nanoseconds of 360 us: .97 to
// 1.03 of prompts and of decoding. A block is found whole or not at all: of 340 tokens blocks of 16 find 336 and those
// of 128 find 256, so that 176 and 256 are left to compute: 176 / 256 = .69, of which what any step takes, some ms of
// 70, is the same for both: .67 to .77. (Decoding came higher: two heads of 64 in f32 are 512 bytes of K a token, so
// that a block of 16 is 8 KiB in one piece, as long as paged_attention's blocks of 4, which take 1.33 times as long as
// memory in one piece: behind each the processor's prefetching starts anew. A third of that is 1.1.)
#include <cstring>
#include <thread>

#include "base/memory.h"
#include "base/random.h"
#include "experiments/contestant.h"
#include "experiments/experiment.h"
#include "model/model.h"

namespace xpyd::experiments::block_speed_experiment {
namespace {

constexpr int kChunk = 128, kBlocks[] = {16, 32, 64, 128};

struct Sizes {
  const char* model;
  int tokens, context, known, batch, decoded, rounds;
};
constexpr Sizes sizes_of(bool tiny) {
  return tiny ? Sizes{"llama-tiny", 192, 128, 150, 2, 4, 1} : Sizes{"llama-mini", 512, 1024, 340, 8, 16, 8};
}

using Contestants = std::vector<std::unique_ptr<Contestant>>;

class Room {
 public:
  explicit Room(const Setting& setting)
      : setting_(setting),
        sizes_(sizes_of(setting.tiny)),
        team_(std::max(1, int(std::thread::hardware_concurrency()))) {}

  Result<Finding> run(const Values& point) {
    if (!model_)
      if (Status status = load(); !status) return status.error();
    Result<Contestants> made = contestants();
    if (!made) return made.error();
    Finding found;
    for (int round = 0; round < sizes_.rounds && found.wrong.empty(); ++round)
      if (Status status = run_round(made.value(), point["load"], round, found); !status) return status.error();
    return found;
  }

 private:
  Status load() {
    const std::string dir = std::string("experiments/models/") + sizes_.model;
    Result<ModelConfig> config = load_model_config(dir);
    if (!config) return config.error();
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team_);
    if (!weights) return weights.error();
    model_ = make_llama(weights.value(), team_, kChunk, sizes_.batch, {});
    // KV of a sequence: any numbers, for nothing here depends on them.
    layout_ = {kv_shape(config.value(), Dtype::f32), KvOrder::layer_major, sizes_.context, 1};
    source_ = Buffer(layout_.pool_bytes());
    Random random(setting_.seed + 7);
    float* numbers = reinterpret_cast<float*>(source_.data());
    for (size_t i = 0; i < layout_.pool_bytes() / sizeof(float); ++i) numbers[i] = float(random.uniform() - .5);
    return ok();
  }

  std::vector<int32_t> tokens(int n, uint64_t number) const {
    Random random(setting_.seed * 1000 + number);
    std::vector<int32_t> ids(static_cast<size_t>(n));
    for (int32_t& id : ids) id = int32_t(random.below(uint64_t(model_->config().vocab)));
    return ids;
  }

  Result<Contestants> contestants() {
    Contestants all;
    for (int block : kBlocks) {
      KvOptions kv{.shape = kv_shape(model_->config(), Dtype::f32),
                   .block_tokens = block,
                   .max_sequence_tokens = model_->config().max_position};
      kv.pool_bytes = size_t(2 * sizes_.batch) * size_t(sizes_.context + 2 * 128) * kv.shape.token_bytes();
      auto made = Contestant::create(
          "paged", *model_, kv,
          {.policy = find_batch_policy("chunked"), .max_batch = sizes_.batch, .step_tokens = kChunk});
      if (!made) return made.error();
      made.value()->name = "blocks of " + std::to_string(block);
      touch(made.value()->memory(), block);
      all.push_back(std::move(made).value());
    }
    return all;
  }

  // All of the pool, so that no step waits for the system's pages, of which many small blocks touch more.
  static void touch(KvMemory& memory, int block) {
    const std::vector<int32_t> ids(static_cast<size_t>(block));
    std::vector<KvHandle> handles;
    for (;;) {
      Result<KvReservation> reserved = memory.reserve(ids, 0);
      if (!reserved) break;
      handles.push_back(reserved.value().handle);
      if (!memory.append(handles.back(), block)) break;
      const KvView view = memory.view(handles.back());
      const KvShape& shape = view.layout->shape;
      for (int layer = 0; layer < shape.n_layers; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int t = 0; t < block; ++t)
            for (int h = 0; h < shape.n_kv_heads; ++h) std::memset(view.row(layer, kv, t, h), 0, shape.row_bytes());
    }
    for (KvHandle handle : handles) memory.free(handle);
  }

  // Steps until all are idle, in turn; adds each one's seconds, and keeps the most of its pool that was in use.
  static void finish(Contestants& all, std::vector<double>& seconds, std::vector<double>& used, int round) {
    for (size_t first = size_t(round);; ++first) {  // nobody is always the first
      bool some = false;
      for (size_t n = 0; n < all.size(); ++n) {
        const size_t i = (first + n) % all.size();
        if (all[i]->engine().idle()) continue;
        some = true;
        seconds[i] += all[i]->step();
        const KvStats kv = all[i]->memory().stats();
        used[i] = std::max(used[i], double(kv.active) / kv.capacity);
      }
      if (!some) return;
    }
  }

  Status run_round(Contestants& all, const std::string& load, int round, Finding& found) {
    std::vector<int64_t> before;
    for (auto& c : all) {
      c->memory().clear_prefix_cache();
      c->scramble(setting_.seed + uint64_t(round));
    }
    std::vector<double> seconds(all.size(), 0), used(all.size(), 0), untimed = seconds;
    const uint64_t number = 100 * uint64_t(round + 1);
    const std::vector<int32_t> known = tokens(sizes_.known, number);
    const int requests = load == "decode" ? sizes_.batch : 1;
    for (auto& c : all) c->submit(load == "known" ? known : tokens(40, number + 1), 1);  // or to warm up
    finish(all, untimed, used, round);
    for (auto& c : all) before.push_back(c->memory().stats().prefix_hit_tokens);
    const KvView source{source_.data(), &layout_, nullptr, 0};
    for (auto& c : all)
      for (int i = 0; i < requests; ++i) {
        std::vector<int32_t> prompt = tokens(load == "decode" ? sizes_.context : sizes_.tokens,
                                             number + 10 + uint64_t(i));
        if (load == "known") std::copy(known.begin(), known.end(), prompt.begin());
        if (load != "decode")
          c->submit(std::move(prompt), 1);
        else if (!c->adopt(std::move(prompt), sizes_.decoded, source))
          return invalid(c->name + " has no room");
      }
    finish(all, seconds, used, round);
    if (found.wrong = compare(all); !found.wrong.empty()) return ok();
    for (size_t i = 0; i < all.size(); ++i) {
      all[i]->memory().check_invariants();
      if (used[i] > .5) found.wrong = all[i]->name + ": more than half of the pool is in use";
      found.rows.push_back({{"block", kBlocks[i]},
                            {"sample", round},
                            {"requests_per_s", requests / seconds[i]},
                            {"pool_used", used[i]},
                            {"found_tokens", all[i]->memory().stats().prefix_hit_tokens - before[i]}});
    }
    return ok();
  }

  const Setting setting_;
  const Sizes sizes_;
  ThreadTeam team_;
  std::unique_ptr<Model> model_;
  KvLayout layout_;
  Buffer source_;  // one sequence's KV
};

std::vector<Values> points(const Setting&) {
  return {{{"load", "prompts"}}, {{"load", "decode"}}, {{"load", "known"}}};
}

Measure open(const Setting& setting) {
  auto room = std::make_shared<Room>(setting);
  return [room](const Values& point) { return room->run(point); };
}

REGISTER_EXPERIMENT("block_speed", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::block_speed_experiment
