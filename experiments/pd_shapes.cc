// pd_shapes: what crosses between P with tp = a and D with tp = b, for a and b in 1..16: pairs of
// ranks, bytes, messages and their size. Nothing runs: the numbers are those of the plan that
// transfers follow (disagg/transfer_plan.h), of one block of 16 tokens of 32 layers with heads of 128
// in bf16. Shapes that cannot be (ranks that would share a head unequally) are left out.
//
// NHD is [token][head][dim], the order of KvOrder::layer_major, HND is [head][token][dim], which no memory here has:
// its messages are counted from the same rectangles. One K or V row of a head is 256 bytes. Where both sides have the
// same heads, a block's plane is one piece in either. Where they have not, NHD has a piece of (common heads) x 256
// bytes for each token and HND one for them all: 16 times fewer. `spread` takes each head from one of the ranks that
// hold it, `stripe` a part of the tokens from each of them: 16 -> 8 with 8 heads then uses 16 links instead of 8.
#include <algorithm>

#include "experiments/experiment.h"
#include "experiments/shard_traffic.h"

namespace xpyd::experiments::pd_shapes_experiment {
namespace {

constexpr int kBlock = 16, kLayers = 32;

std::vector<Values> points(const Setting&) {
  std::vector<Values> all;
  for (int heads : {8, 2, 1})
    for (const char* replicas : {"spread", "stripe"}) all.push_back({{"kv_heads", heads}, {"replicas", replicas}});
  return all;
}

// One message is contiguous on both sides: all tokens of a run of heads, or one head's of a part of them.
int64_t hnd_messages(const ShardMap& map) {
  int64_t n = 0;
  for (const ShardMove& move : map.moves) {
    if (token_part(kBlock, move.part, move.parts).size() == 0) continue;
    n += 2 * move.rect.layers.size() * (move.parts == 1 ? 1 : move.rect.heads.size());
  }
  return n;
}

Result<Finding> run(const Values& point) {
  const int heads = point["kv_heads"];
  const KvShape whole{kLayers, heads, 128, Dtype::bf16};
  const ReplicaUse use = point["replicas"] == "stripe" ? ReplicaUse::stripe : ReplicaUse::spread;
  Finding found;
  for (int a = 1; a <= 16; ++a)
    for (int b = 1; b <= 16; ++b) {
      const KvShards p{.n_layers = kLayers, .n_kv_heads = heads, .tp = a},
          d{.n_layers = kLayers, .n_kv_heads = heads, .tp = b};
      if (!check_shards(p) || !check_shards(d)) continue;
      const ShardMap map = map_shards(p, d, use);
      const ShardTraffic nhd = shard_traffic(map, whole, KvOrder::layer_major, kBlock);
      const int64_t hnd = hnd_messages(map);
      found.rows.push_back({{"p_tp", a},
                            {"d_tp", b},
                            {"edges", nhd.edges},
                            {"sources", nhd.sources},
                            {"bytes_over_unique", double(nhd.bytes) / double(nhd.unique_bytes)},
                            {"most_sent_share", double(nhd.most_sent_bytes) / double(nhd.bytes)},
                            {"nhd_messages", nhd.messages},
                            {"hnd_messages", hnd},
                            {"nhd_message_bytes", double(nhd.bytes) / double(nhd.messages)},
                            {"hnd_message_bytes", double(nhd.bytes) / double(hnd)}});
    }
  return found;
}

Measure open(const Setting&) { return run; }

REGISTER_EXPERIMENT("pd_shapes", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pd_shapes_experiment
