// One attention problem, laid in one of several memories: what experiments about memory and kernels have in common.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/device/page_groups.h"
#include "base/memory.h"
#include "experiments/experiment.h"

namespace xpyd::experiments {

struct AttentionShape {
  int n_seqs, n_q,
      length;  // length: tokens of KV of each, a whole number of blocks and page groups
  int n_heads = 32, n_kv_heads = 8, head_dim = 128;  // Llama-3-8B
  Dtype dtype = Dtype::bf16;
};

// Where the KV is. block == 0: contiguous, one slot a sequence.
struct AttentionMemory {
  std::string name;
  int block = 0;  // tokens of a block; blocks in random order
  // 0: each block is used once; else so many exist, and tables draw from them at random.
  int n_blocks = 0;
  // Bytes of the page groups, in random order, behind contiguous addresses. 0: one allocation.
  size_t group = 0;
  bool in_order = false;  // … of groups that are neighbours: one mapping
  int n_layers = 1;       // more: token_major, the KV of all layers of a token side by side
};

// The same values at the same place of a sequence, whatever the memory (unless blocks are drawn).
class AttentionCase {
 public:
  AttentionCase(const AttentionShape& shape, const AttentionMemory& memory, uint64_t seed);
  const AttentionArgs& args() const { return args_; }
  // What the kernel has put out for the last token of the last sequence, against double precision. "": right.
  std::string check() const;
  // Of the whole output: equal for all memories.
  uint64_t hash() const;
  size_t pool_bytes() const { return layout_.pool_bytes(); }

 private:
  KvLayout layout_;
  Buffer pool_;
  std::shared_ptr<PageGroups> groups_;
  std::unique_ptr<VirtualRange> range_;
  std::vector<int32_t> tables_, q_offsets_ = {0}, kv_lengths_;
  std::vector<KvView> views_;
  std::vector<float> q_, out_;
  AttentionArgs args_;
};

// Parts of the time, each with its own mean: what a spread is made of. All contestants take turns
// in each part, so that part i of one is compared with part i of another.
inline constexpr int kTimedParts = 12;
struct Timed {
  std::vector<double> means;  // [kTimedParts], seconds of one call
};
// Runs each once, then checks it; then all in turn, again and again for `seconds`, so that no drift
// favours one. `wrong`: what the check said, and nothing is timed.
std::vector<Timed> time_attention(const std::vector<AttentionCase*>& cases, double seconds, ThreadTeam& team,
                                  std::string& wrong);

}  // namespace xpyd::experiments
