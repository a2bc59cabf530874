#include "disagg/rank_table.h"

#include <string>

namespace xpyd {

Status check_rank_table(const RankTable& t, int n_kv_heads) {
  if (t.prefill_instances < 1 || t.decode_instances < 1 || t.prefill_tp < 1 || t.decode_tp < 1)
    return invalid("rank table: expected at least one instance and one rank on each side");
  if (t.decode_tp % t.prefill_tp != 0)
    return invalid("rank table: decode tp " + std::to_string(t.decode_tp) +
                   " is not a multiple of prefill tp " + std::to_string(t.prefill_tp) +
                   ": the table has no rows for that, map_shards() has");
  if (n_kv_heads % t.decode_tp != 0)
    return invalid("rank table: decode tp " + std::to_string(t.decode_tp) + " does not divide " +
                   std::to_string(n_kv_heads) +
                   " kv heads: the table has no rows for that, map_shards() has");
  return ok();
}

}  // namespace xpyd
