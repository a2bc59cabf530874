// One attention problem, laid out in one of several memories. Shared by the experiments about memory and kernels.
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
      length;  // length: KV tokens of each sequence, a whole number of blocks and page groups
  int n_heads = 32, n_kv_heads = 8, head_dim = 128;  // Llama-3-8B
  Dtype dtype = Dtype::bf16;
};

// Where the KV is. block == 0 means contiguous: one slot per sequence.
struct AttentionMemory {
  std::string name;
  int block = 0;  // tokens per block; blocks are in random order
  // 0: each block is used once. Else there are n_blocks blocks, and tables draw from them at random.
  int n_blocks = 0;
  // Bytes of the page groups behind contiguous addresses, in random order. 0: one allocation.
  size_t group = 0;
  bool in_order = false;  // the groups are in order: one mapping
  int n_layers = 1;       // above 1: token_major, the KV of all layers of a token is adjacent
};

// The same values at the same place of a sequence in every memory, unless blocks are drawn.
class AttentionCase {
 public:
  AttentionCase(const AttentionShape& shape, const AttentionMemory& memory, uint64_t seed);
  const AttentionArgs& args() const { return args_; }
  // Compares the kernel's output for the last token of the last sequence with double precision. "" if it is right.
  std::string check() const;
  // A hash of the whole output. It is equal for all memories.
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

// The number of parts into which the time is split. Each part has its own mean, and the spread comes from these. All
// contestants take turns in each part, so part i of one is compared with part i of another.
inline constexpr int kTimedParts = 12;
struct Timed {
  std::vector<double> means;  // [kTimedParts], seconds of one call
};
// Runs and checks each case once. Then runs all in turn for `seconds`, so that no drift favours one. If a check fails,
// returns its message in `wrong` and times nothing.
std::vector<Timed> time_attention(const std::vector<AttentionCase*>& cases, double seconds, ThreadTeam& team,
                                  std::string& wrong);

}  // namespace xpyd::experiments
