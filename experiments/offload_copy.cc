// offload_copy: what a copy between the KV pool and the host tier costs, by its size and by how the
// two are laid out. offload_cost: the time to compute N tokens of KV against the time to move them.
//
// The real tiers over the real paged memory: blocks go out when they are full, and come back for a
// sequence that begins with the same tokens. Both tiers are this machine's memory; a copy is one
// piece that its thread moves. What comes back is compared byte for byte before anything counts.
//
// offload_copy (KV offloading, granularity): 64 MiB of KV of 4 KiB a token. `token_major`: a block
// is one piece, neighbours on both sides are one. `layer_major`: the host is token_major, so a
// piece is one token's row of one layer, 512 bytes, whatever the block. Arithmetic. memcpy moves 6
// to 10 GB/s here, and a piece costs some 50 to 100 ns beside its bytes: 4 KiB take 0.5 us, so 4
// KiB pieces reach 0.75 or more of 2 MiB ones; 512 bytes take 64 ns and a piece of
// them twice as long at most, less where its neighbours are fetched ahead: layer_major reaches 0.25
// to 1.1 of token_major. A GPU's copy call costs 2.1 us and its link moves 12 GB/s (measured by
// wde, reference 6.3): 4 KiB reach 1.95 GB/s, and the knee is at 25 KiB. `law_gbps` is that
// arithmetic for the pieces which were counted here. Each block is also hashed, looked up and
// entered, by the engine's thread
// (`engine_us_per_block`): 1 to 5 us, the same as 8 to 40 KB of copying, so that blocks of one
// token move at half the rate of large ones or less.
//
// offload_cost (E1): llama-mini in f32, prefill in chunks of 512 through the cluster. Published:
// prefill 5 times (3B) to 19 times (32B) as long as swapping in (their notes print "less"; greater
// is meant). Arithmetic. A token is 50 MFLOP on 150 GFLOP/s, 0.36 ms, and 8 KiB of KV at 3 to 8
// GB/s, 1 to 2.7 us: 130 to 360 times. This machine computes slowly and copies fast; a GPU has
// 1,000 times the arithmetic and twice the link. So `link` is also set to a fifth of that: the KV
// of a prompt then takes 1/5 of its prefill, as their 3B does, and the first token of a prompt that
// is swapped in comes after 0.2 of the time, plus one step of one token (8 ms, 0.02 of 370).
#include <algorithm>
#include <cstring>

#include "base/stats.h"
#include "experiments/offload.h"
#include "experiments/swapper.h"

namespace xpyd::experiments::offload_copy_experiment {
namespace {

constexpr double kCallUs = 2.1, kLinkGbps = 12;  // of a GPU (reference 6.3)

// ---- offload_copy

// GB/s of one thread that copies as many bytes in pieces of 2 MiB: around the caches, or as memcpy does.
double plain_gbps(size_t bytes, bool streaming) {
  std::vector<std::byte> from(bytes, std::byte{1}), to(bytes, std::byte{2});
  std::vector<double> rates;
  RealClock clock;
  for (int round = 0; round < 3; ++round) {
    const double start = clock.now();
    for (size_t at = 0; at < bytes; at += 2 << 20) {
      const Copy copy{&from[at], &to[at], std::min<size_t>(2 << 20, bytes - at)};
      if (streaming)
        copy_streaming({&copy, 1});
      else
        std::memcpy(copy.destination, copy.source, copy.bytes);
    }
    rates.push_back(1e-9 * double(bytes) / (clock.now() - start));
  }
  return summarize(rates).mean;
}

std::vector<Values> copy_points(const Setting& setting) {
  std::vector<Values> all;
  auto add = [&](const char* order, const char* blocks, const std::vector<int>& sizes) {
    for (int block : sizes)
      if (!setting.tiny || block <= 16) all.push_back({{"order", order}, {"blocks", blocks}, {"block", block}});
  };
  add("token_major", "scattered", {1, 2, 4, 8, 16, 64, 512});
  add("token_major", "in order", {1, 16, 512});
  add("layer_major", "scattered", {1, 16, 512});
  return all;
}

Measure copy_open(const Setting& setting) {
  return [=](const Values& point) -> Result<Finding> {
    const KvShape shape{.n_layers = 4, .n_kv_heads = 2, .head_dim = 64, .dtype = Dtype::f32};
    const int n_tokens = setting.tiny ? 256 : 16384, block = point["block"];
    const KvOrder order = point["order"] == "token_major" ? KvOrder::token_major : KvOrder::layer_major;
    auto swapper = Swapper::create(shape, order, block, n_tokens, point["blocks"] == "scattered", 0, setting.seed);
    if (!swapper) return swapper.error();
    std::string wrong;
    const Swap s = swap_time(*swapper.value(), setting.tiny ? 1 : 3, wrong);
    if (!wrong.empty()) return Finding{{}, wrong};
    const size_t bytes = size_t(s.bytes);
    const double piece_out = double(bytes) / double(s.copies_out), n_blocks = double(n_tokens / block),
                 law_us = std::max(kCallUs, piece_out / (1e3 * kLinkGbps));
    return Finding{{{{"block_bytes", size_t(block) * shape.token_bytes()},
                     {"bytes", bytes},
                     {"copies_out", s.copies_out},
                     {"copies_in", s.copies_in},
                     {"out_gbps", 1e-9 * double(bytes) / s.out_s},
                     {"in_gbps", 1e-9 * double(bytes) / s.in_s},
                     {"engine_us_per_block", 1e6 * s.engine_out_s / n_blocks},
                     {"stream_gbps", plain_gbps(bytes, true)},
                     {"memcpy_gbps", plain_gbps(bytes, false)},
                     {"law_gbps", 1e-3 * piece_out / law_us}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("offload_copy", "cpu", copy_points, copy_open);

// ---- offload_cost

constexpr int kBlock = 16;  // tokens of the pool's and the tier's blocks: the defaults

std::vector<Values> cost_points(const Setting& setting) {
  std::vector<Values> all;
  for (int n : setting.tiny ? std::vector{64} : std::vector{256, 512, 1024, 2048})
    all.push_back({{"tokens", n}, {"link_times", 0}});
  all.push_back({{"tokens", setting.tiny ? 64 : 1024}, {"link_times", 5}});
  return all;
}

Measure cost_open(const Setting& setting) {
  std::vector<std::string> common = {offload_model(setting), "--max-batch", "8", "--kv-bytes"};
  if (setting.tiny)
    common.insert(common.end(), {"4MiB"});
  else
    common.insert(common.end(), {"128MiB", "--max-model-len", "4096"});
  auto bed = std::make_shared<Bed>(setting, common);
  auto asked = std::make_shared<int>(0);
  return [=](const Values& point) -> Result<Finding> {
    const int n = point["tokens"];
    const double times = point["link_times"];
    Result<std::string> gbps = slow_link(*bed, setting, times);
    if (!gbps) return gbps.error();
    Result<std::string> wrong = bed->open({"--topology", "1C", "--chunk-tokens", "512", "--prefix-cache", "off",
                                           "--host-kv-bytes", setting.tiny ? "4MiB" : "128MiB", "--kv-copy-gbps",
                                           gbps.value()});
    if (!wrong) return wrong.error();
    if (!wrong.value().empty()) return Finding{{}, wrong.value()};
    std::vector<double> prefill, reuse;
    for (int round = 0; round < (setting.tiny ? 1 : 3); ++round) {
      // The last token is computed either way: its logits are wanted.
      const std::vector<BenchRequest> prompt = {document(setting.seed, (*asked)++, n + 1, 1)};
      Run computed = run_load(bed->stack(), prompt, {});
      if (times > 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // on its way out
      Run fetched = run_load(bed->stack(), prompt, {});
      for (const Run* run : {&computed, &fetched})
        if (!run->wrong.empty()) return Finding{{}, run->wrong};
      if (fetched.logits_hash != computed.logits_hash)
        return Finding{{}, "a prompt whose KV came back has other logits"};
      if (fetched.hit_share * (n + 1) < n - 0.5) return Finding{{}, "not all of a prompt's KV came back"};
      prefill.push_back(computed.ttft_ms[0]);
      reuse.push_back(fetched.ttft_ms[0]);
    }
    auto swapper = Swapper::create(kv_shape(bed->stack().config, Dtype::f32), KvOrder::layer_major, kBlock, n, true,
                                   std::stod(gbps.value()), setting.seed);
    if (!swapper) return swapper.error();
    std::string unequal;
    const Swap swap = swap_time(*swapper.value(), setting.tiny ? 1 : 5, unequal);
    if (!unequal.empty()) return Finding{{}, unequal};
    const double prefill_ms = summarize(prefill).mean;
    return Finding{{{{"copy_gbps", std::stod(gbps.value())},  // 0: no limit
                     {"prefill_ms", prefill_ms},
                     {"out_ms", 1e3 * swap.out_s},
                     {"in_ms", 1e3 * swap.in_s},
                     {"reuse_ms", summarize(reuse).mean},
                     {"prefill_over_out", 1e-3 * prefill_ms / swap.out_s},
                     {"prefill_over_in", 1e-3 * prefill_ms / swap.in_s},
                     {"kv_bytes", swap.bytes}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("offload_cost", "cpu", cost_points, cost_open);

}  // namespace
}  // namespace xpyd::experiments::offload_copy_experiment
