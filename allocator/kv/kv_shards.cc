#include "allocator/kv/kv_shards.h"

namespace xpyd::allocator {

KvRange KvShards::layers(int stage) const {
  if (!stage_layers.empty()) {
    int begin = 0;
    for (int s = 0; s < stage; ++s) begin += stage_layers[size_t(s)];
    return {begin, begin + stage_layers[size_t(stage)]};
  }
  const int least = n_layers / pp, left = n_layers % pp;
  const int first_long = long_stage < 0 ? pp - left : long_stage;
  auto is_long = [&](int s) { return (s - first_long + pp) % pp < left; };
  int begin = stage * least;
  for (int s = 0; s < stage; ++s) begin += is_long(s);
  return {begin, begin + least + is_long(stage)};
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
  if (s.long_stage >= s.pp) return invalid("long_stage " + std::to_string(s.long_stage) + ": there are " + pp);
  if (s.stage_layers.empty()) return ok();
  int total = 0;
  bool positive = int(s.stage_layers.size()) == s.pp;
  for (int n : s.stage_layers) {
    positive = positive && n >= 1 && n <= s.n_layers;
    if (positive) total += n;
  }
  if (!positive || total != s.n_layers)
    return invalid("layers per stage: expected " + std::to_string(s.pp) + " positive numbers that add up to " +
                   std::to_string(s.n_layers));
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
