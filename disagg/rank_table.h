// The rank table of the xPyD design that was built on NCCL groups (vLLM's `simple_connector` and the blog notes about
// it), corrected: who is in which group, under which rank and port. xpyd itself needs no groups (both sides plan from
// their shapes, transfer_plan.h); `xpyd info --ranks` prints the table for whoever reads those notes, and
// tests/disagg/rank_table_test.cc holds every printed mistake beside what is right.
//
// PS prefill instances of PTP ranks, DS decode instances of DTP ranks; PTP divides DTP. There are
// PTP groups: P rank r of every P instance, and those ranks of every D instance that hold its
// heads. `kv_rank` counts instances: P 0 .. PS-1, then D.
#pragma once

#include <string>

#include "allocator/kv_shards.h"
#include "base/status.h"

namespace xpyd::disagg {

struct RankTable {
  int prefill_instances = 1, decode_instances = 1;  // PS, DS
  int prefill_tp = 1, decode_tp = 1;                // PTP, DTP

  bool is_prefill(int kv_rank) const { return kv_rank < prefill_instances; }
  int tp_of(int kv_rank) const { return is_prefill(kv_rank) ? prefill_tp : decode_tp; }
  // D ranks for each P rank ("TPM").
  int decode_per_prefill() const { return decode_tp / prefill_tp; }

  int n_groups() const { return prefill_tp; }
  int group(int kv_rank, int tp_rank) const { return is_prefill(kv_rank) ? tp_rank : tp_rank / decode_per_prefill(); }
  int group_rank(int kv_rank, int tp_rank) const {
    if (is_prefill(kv_rank)) return kv_rank;
    return prefill_instances + (kv_rank - prefill_instances) * decode_per_prefill() + tp_rank % decode_per_prefill();
  }
  int group_size() const { return prefill_instances + decode_instances * decode_per_prefill(); }
  int global_rank(int kv_rank, int tp_rank) const {
    if (is_prefill(kv_rank)) return kv_rank * prefill_tp + tp_rank;
    return prefill_instances * prefill_tp + (kv_rank - prefill_instances) * decode_tp + tp_rank;
  }
  int world_size() const { return prefill_instances * prefill_tp + decode_instances * decode_tp; }
  // Of the group, counted from a base: data; its signals are on the next one.
  int port(int kv_rank, int tp_rank) const { return 2 * group(kv_rank, tp_rank) + 1; }
  // Heads of D rank `tp_rank` in the P rank of its group, in that rank's own numbers.
  KvRange slice(int tp_rank, int n_kv_heads) const {
    const int part = tp_rank % decode_per_prefill(), heads = n_kv_heads / decode_tp;
    return {part * heads, (part + 1) * heads};
  }
};

// The table has no row for other numbers: the message says which, and that transfer_plan.h has.
inline Status check_rank_table(const RankTable& t, int n_kv_heads) {
  if (t.prefill_instances < 1 || t.decode_instances < 1 || t.prefill_tp < 1 || t.decode_tp < 1)
    return invalid("rank table: expected at least one instance and one rank on each side");
  if (t.decode_tp % t.prefill_tp != 0)
    return invalid("rank table: decode tp " + std::to_string(t.decode_tp) + " is not a multiple of prefill tp " +
                   std::to_string(t.prefill_tp) + ": the table has no rows for that, map_shards() has");
  if (n_kv_heads % t.decode_tp != 0)
    return invalid("rank table: decode tp " + std::to_string(t.decode_tp) + " does not divide " +
                   std::to_string(n_kv_heads) + " kv heads: the table has no rows for that, map_shards() has");
  return ok();
}

}  // namespace xpyd::disagg
