// block_size: does attention over larger blocks cost more, or over more bytes?
//
// vAttention's Fig. 3 (vLLM's paged_attention_v2, A100) held the NUMBER of blocks, 1,024, and drew
// block tables from them at random: at 16 tokens all of them are 64 MiB, at 128 they are 512 MiB,
// and the share that the 40 MB of L2 can hold falls with the block (up to 1.9 times slower at 64
// and 128). Here, this machine's default kernel reads the same number of rows in three ways:
//   blocks      a fixed number of blocks, as published: the pool grows with the block
//   bytes       a fixed pool that no cache holds: the number of blocks falls instead
//   cached      a fixed pool that the caches hold
//
// Arithmetic, 32 MiB of L3: 8 KV heads of 128 in f32 (bf16 would cost the CPU its conversion, and hide memory), K and
// V, are 8 KiB a token; 128 blocks are 4 MiB at 4 tokens, 16 MiB at 16, 64 MiB at 64 and 256 MiB at 256. With 8 query
// heads a byte takes part in half a multiply-add, so that memory is the limit (23 to 32 GB/s, against 40 and more of
// L3): from 4 to 256 tokens `blocks` becomes 1.2 to 2.5 times slower. `bytes` and `cached` do not move, but for blocks
// of 1 to 4, whose runs are 4 to 16 KiB and too short for the prefetchers, the same effect as in paged_attention.
#include <algorithm>
#include <thread>

#include "experiments/attention_case.h"

namespace xpyd::experiments::block_size_experiment {
namespace {

struct Sizes {
  AttentionShape shape;
  int n_blocks;
  size_t bytes, cached;
  std::vector<int> blocks;
};
Sizes sizes_of(bool tiny) {
  const AttentionShape shape{tiny ? 2 : 4, 1, tiny ? 256 : 4096, 8, 8, 128, Dtype::f32};
  if (tiny) return {shape, 4, 1 << 20, 1 << 19, {16, 64}};
  return {shape, 128, size_t{128} << 20, size_t{4} << 20, {1, 2, 4, 8, 16, 32, 64, 128, 256}};
}

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  for (int block : sizes_of(setting.tiny).blocks) all.push_back({{"block", block}});
  return all;
}

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    const Sizes sizes = sizes_of(setting.tiny);
    const int block = point["block"];
    const size_t block_bytes =
        size_t(block) * KvShape{1, sizes.shape.n_kv_heads, sizes.shape.head_dim, sizes.shape.dtype}.token_bytes();
    const std::vector<AttentionMemory> memories = {{"blocks", block, sizes.n_blocks},
                                                   {"bytes", block, int(sizes.bytes / block_bytes)},
                                                   {"cached", block, int(sizes.cached / block_bytes)}};
    std::vector<std::unique_ptr<AttentionCase>> cases;
    std::vector<AttentionCase*> pointers;
    for (const AttentionMemory& m : memories) {
      cases.push_back(std::make_unique<AttentionCase>(sizes.shape, m, setting.seed));
      pointers.push_back(cases.back().get());
    }
    Finding found;
    const std::vector<Timed> timed = time_attention(pointers, setting.tiny ? 0 : 1.5, *team, found.wrong);
    for (size_t i = 0; i < timed.size(); ++i)
      for (size_t part = 0; part < timed[i].means.size(); ++part) {
        const double s = timed[i].means[part];
        found.rows.push_back({{"held", memories[i].name},
                              {"n_blocks", memories[i].n_blocks},
                              {"pool_mib", double(cases[i]->pool_bytes()) / (1 << 20)},
                              {"sample", part},
                              {"ms", 1e3 * s},
                              {"gbps", 1e-9 * work(cases[i]->args()).bytes / s}});
      }
    return found;
  };
}

REGISTER_EXPERIMENT("block_size", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::block_size_experiment
