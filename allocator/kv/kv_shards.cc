#include "allocator/kv/kv_shards.h"

#include <algorithm>

namespace xpyd::allocator {

KvRange KvShards::layers(int stage) const {
  const int least = n_layers / pp, first_long = pp - n_layers % pp;
  const int begin = stage * least + std::max(0, stage - first_long);
  return {begin, begin + least + (stage >= first_long)};
}

KvRange KvShards::heads(int tensor_rank) const {
  if (tp > n_kv_heads) {
    const int head = tensor_rank / replicas();
    return {head, head + 1};
  }
  return {int(long(n_kv_heads) * tensor_rank / tp), int(long(n_kv_heads) * (tensor_rank + 1) / tp)};
}

int KvShards::first_owner(int head) const {
  if (tp > n_kv_heads) return head * replicas();
  return int((long(head + 1) * tp - 1) / n_kv_heads);  // the last rank r with r * n / tp <= head
}

Status check_shards(const KvShards& s, const std::string& tp_name, const std::string& pp_name) {
  const std::string tp = tp_name + " " + std::to_string(s.tp), pp = pp_name + " " + std::to_string(s.pp);
  if (s.tp < 1) return invalid(tp + ": expected at least 1");
  if (s.pp < 1) return invalid(pp + ": expected at least 1");
  if (s.pp > s.n_layers)
    return invalid(pp + ": there are more stages than the " + std::to_string(s.n_layers) + " layers");
  if (s.tp > s.n_kv_heads && s.tp % s.n_kv_heads != 0)
    return invalid(tp + ": there are more ranks than the " + std::to_string(s.n_kv_heads) +
                   " kv heads; expected a multiple of their number");
  return ok();
}

KvShape rank_shape(const KvShape& whole, const KvShards& shards, int rank) {
  const KvRect rect = shards.rect(rank);
  KvShape shape = whole;
  shape.n_layers = rect.layers.size();
  shape.n_kv_heads = rect.heads.size();
  return shape;
}

}  // namespace xpyd::allocator
