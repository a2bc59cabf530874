// paged_attention: what a block table costs attention, and page groups, the same kernel over each.
//
// CPU: this machine's default kernel, 32 query heads, 8 KV heads of 128, bf16 KV. Blocks, and the page groups behind
// contiguous addresses (vAttention), are in random order. decode: 4 sequences of 4,096 tokens, 67 MB of KV, larger than
// the caches whatever the block size. prefill: 1,024 tokens of one prompt. All memories take turns, call by call.
//
// The published comparison of prefills (Fig. 2) set a kernel that splits KV against one that does not, and that of
// blocks (Fig. 3) let the bytes grow with the block: experiment block_size. Here the kernel splits KV at the same
// tokens whatever the memory, so that no memory can have another number of splits; outputs must have the same bits.
//
// Arithmetic: a KV row of 8 heads is 2 KB, read in order inside a block; a block of 16 is 32 KB, so the prefetchers
// start anew every 512 lines. One table look-up and a division per row and head, beside 128 multiply-adds: below 5 %.
// Blocks of 1 are runs of 2 KB: up to 1.5 times slower. Prefill reads each row for many queries: no difference. Page
// groups are read as if they were one allocation: what is different is where a page table entry points. A fair
// allocation has pages of 4 KiB, too ("whole"); one with huge pages ("contiguous", what --allocator contiguous has
// where the system grants them) saves page walks: up to 5 %, of the page's size, not of the mapping.
//
// token_major, contiguous, 8 layers ("tensor slicing", vAttention section 8.2; experiment max_batch): K of a token's
// layer is 2 KB, the next token's is 32 KB further. Decoding is as with blocks of 1, and each row is on another page:
// up to 1.7 times slower (kvcached measured 1.56 for blocks of all layers).
#include <algorithm>
#include <cstdio>
#include <thread>

#include "experiments/attention_case.h"

namespace xpyd::experiments::paged_attention_experiment {
namespace {

// "whole": pages of 4 KiB in order, one mapping.
std::vector<AttentionMemory> memories_of(const AttentionShape& shape) {
  std::vector<AttentionMemory> all = {{"contiguous"}};
  for (int block : {1, 4, 16, 64, 256}) all.push_back({"paged", block});
  const KvLayout layout{
      {1, shape.n_kv_heads, shape.head_dim, shape.dtype}, KvOrder::layer_major, shape.length, shape.n_seqs};
  all.push_back({.name = "whole", .group = 4096, .in_order = true});
  for (size_t group : {size_t{4096}, size_t{65536}, size_t{2} << 20})
    if (layout.pool_bytes() % group == 0) all.push_back({.name = "vattention", .group = group});
  all.push_back({.name = "token_major", .n_layers = 8});
  return all;
}

std::vector<Values> points(const Setting&) { return {{{"phase", "prefill"}}, {{"phase", "decode"}}}; }

Measure open(const Setting& setting) {
  auto team = std::make_shared<ThreadTeam>(std::max(1, int(std::thread::hardware_concurrency())));
  return [=](const Values& point) -> Result<Finding> {
    const bool decode = point["phase"] == "decode";
    const AttentionShape shape = decode         ? setting.tiny ? AttentionShape{2, 1, 256} : AttentionShape{4, 1, 4096}
                                         : setting.tiny ? AttentionShape{1, 64, 256}
                                                : AttentionShape{1, 1024, 1024};
    const std::vector<AttentionMemory> memories = memories_of(shape);
    std::vector<std::unique_ptr<AttentionCase>> cases;
    std::vector<AttentionCase*> pointers;
    for (const AttentionMemory& m : memories) {
      cases.push_back(std::make_unique<AttentionCase>(shape, m, setting.seed));
      pointers.push_back(cases.back().get());
    }
    Finding found;
    const std::vector<Timed> timed = time_attention(pointers, setting.tiny ? 0 : 8, *team, found.wrong);
    for (const auto& c : cases)
      if (c->hash() != cases[0]->hash() && found.wrong.empty()) found.wrong = "two memories have outputs of other bits";
    if (!found.wrong.empty()) return found;
    for (size_t i = 0; i < timed.size(); ++i) {
      const Work w = work(cases[i]->args());
      for (size_t part = 0; part < timed[i].means.size(); ++part) {
        const double s = timed[i].means[part];
        found.rows.push_back({{"memory", memories[i].name},
                              {"block", memories[i].block},
                              {"group_kib", memories[i].in_order ? 0 : double(memories[i].group) / 1024},
                              {"variant", default_attention().name},
                              {"sample", part},
                              {"ms", 1e3 * s},
                              {"gbps", 1e-9 * w.bytes / s},
                              {"gflops", 1e-9 * w.flops / s}});
      }
    }
    return found;
  };
}

REGISTER_EXPERIMENT("paged_attention", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::paged_attention_experiment
