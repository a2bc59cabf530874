// Moves one sequence's KV from a paged pool to the host tier and back, times it, and compares every byte.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "allocator/kv_memory.h"
#include "allocator/kv_pool.h"
#include "allocator/offload/offloaded_memory.h"
#include "base/random.h"
#include "experiments/stats.h"

namespace xpyd::experiments {

struct Swap {
  double out_s = 0, in_s = 0;  // until the last byte arrived
  double engine_out_s = 0;     // time of out_s in which the engine's thread was busy
  int64_t bytes = 0, copies_out = 0, copies_in = 0;
};

// Moves one sequence's KV out of a pool and back.
class Swapper {
 public:
  // `scattered` puts free blocks in random order, as in a pool that has served for a while.
  static Result<std::unique_ptr<Swapper>> create(const KvShape& shape, KvOrder order, int block_tokens, int n_tokens,
                                                 bool scattered, double gbps, uint64_t seed) {
    std::unique_ptr<Swapper> s(new Swapper);
    s->n_tokens_ = n_tokens;
    s->random_ = Random(seed);
    KvOptions options{.shape = shape,
                      .order = order,
                      .block_tokens = block_tokens,
                      .max_sequence_tokens = n_tokens + 1,
                      .prefix_cache = false};  // so that the pool itself finds nothing
    options.pool_bytes = size_t(2 * n_tokens) * shape.token_bytes();
    options.tiers = {
        .host_bytes = size_t(n_tokens) * shape.token_bytes(), .block_tokens = block_tokens, .copy_gbps = gbps};
    Result<std::shared_ptr<KvPool>> pool = make_block_pool("paged", options);
    if (!pool) return pool.error();
    std::unique_ptr<KvMemory> memory = find_kv_scheme("paged")->make(pool.value(), options);
    if (scattered) scatter(*memory, s->random_);
    Result<std::unique_ptr<KvMemory>> tiered = make_offloaded(std::move(memory), options);
    if (!tiered) return tiered.error();
    s->memory_ = std::move(tiered).value();
    return s;
  }

  // Returns "" or a message.
  std::string run(Swap& swap) {
    const uint64_t salt = ++salt_;
    memory_->clear_prefix_cache();
    std::vector<int32_t> tokens;
    for (int i = 0; i <= n_tokens_; ++i) tokens.push_back(int32_t(random_.below(1 << 16)));
    const OffloadStats before = memory_->stats().tiers;

    Result<KvReservation> first = memory_->reserve(tokens, salt);
    if (!first || !memory_->append(first.value().handle, n_tokens_))
      return "the pool has no free memory for the sequence";
    const KvHandle source = first.value().handle;
    each_row(source, [&](uint64_t* row, size_t words, uint64_t at) {
      for (size_t i = 0; i < words; ++i) row[i] = word(salt, at + i);
    });
    // At most a quarter of the pool is in flight at once.
    const int piece = std::max(1, n_tokens_ / 8);
    for (int at = 0; at < n_tokens_; at += piece) {
      const double start = clock_.now();
      memory_->commit(source, std::span(tokens).subspan(size_t(at), size_t(std::min(piece, n_tokens_ - at))));
      swap.engine_out_s += clock_.now() - start;
      wait();
      swap.out_s += clock_.now() - start;
    }
    each_row(source, [&](uint64_t* row, size_t words, uint64_t) { std::memset(row, 0, 8 * words); });
    memory_->free(source);

    const double start = clock_.now();
    Result<KvReservation> second = memory_->reserve(tokens, salt);
    if (!second) return second.error().message;
    while (!memory_->ready(second.value().handle)) pause();
    swap.in_s = clock_.now() - start;
    if (memory_->written_tokens(second.value().handle) != n_tokens_)
      return std::to_string(memory_->written_tokens(second.value().handle)) + " of " + std::to_string(n_tokens_) +
             " tokens were swapped in";
    bool same = true;
    each_row(second.value().handle, [&](const uint64_t* row, size_t words, uint64_t at) {
      for (size_t i = 0; i < words; ++i) same &= row[i] == word(salt, at + i);
    });
    memory_->free(second.value().handle);
    const OffloadStats after = memory_->stats().tiers;
    swap.bytes = after.bytes_out - before.bytes_out;
    swap.copies_out = after.copies_out - before.copies_out;
    swap.copies_in = after.copies_in - before.copies_in;
    return same ? "" : "the bytes swapped in differ from the bytes swapped out";
  }

 private:
  Swapper() = default;

  static uint64_t word(uint64_t salt, uint64_t at) { return (salt << 40) ^ (at * 0x9e3779b97f4a7c15u); }

  static void scatter(KvMemory& memory, Random& random) {
    std::vector<KvHandle> all;
    const int32_t token = 0;
    for (Result<KvReservation> r = memory.reserve({&token, 1}, 0); r; r = memory.reserve({&token, 1}, 0)) {
      all.push_back(r.value().handle);
      if (!memory.append(all.back(), 1)) break;
    }
    for (size_t i = all.size(); i > 0; --i) {
      std::swap(all[i - 1], all[random.below(i)]);
      memory.free(all[i - 1]);
    }
  }

  template <class Visit>
  void each_row(KvHandle handle, Visit visit) {
    const KvView view = memory_->view(handle);
    const KvShape& shape = view.layout->shape;
    uint64_t at = 0;
    for (int token = 0; token < n_tokens_; ++token)
      for (int layer = 0; layer < shape.n_layers; ++layer)
        for (int kv = 0; kv < 2; ++kv)
          for (int head = 0; head < shape.n_kv_heads; ++head, at += shape.row_bytes() / 8)
            visit(reinterpret_cast<uint64_t*>(view.row(layer, kv, token, head)), shape.row_bytes() / 8, at);
  }

  static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void wait() {
    while (memory_->poll()) pause();
  }

  RealClock clock_;
  int n_tokens_ = 0;
  uint64_t salt_ = 0;
  Random random_;
  std::unique_ptr<KvMemory> memory_;
};

// Means over `rounds` rounds, after one round that touches all memory.
inline Swap swap_time(Swapper& swapper, int rounds, std::string& wrong) {
  std::vector<double> out, in, engine_out;
  Swap swap;
  for (int round = 0; round <= rounds && wrong.empty(); ++round) {
    swap = Swap();
    wrong = swapper.run(swap);
    if (round == 0) continue;
    out.push_back(swap.out_s);
    in.push_back(swap.in_s);
    engine_out.push_back(swap.engine_out_s);
  }
  swap.out_s = summarize(out).mean;
  swap.in_s = summarize(in).mean;
  swap.engine_out_s = summarize(engine_out).mean;
  return swap;
}

}  // namespace xpyd::experiments
