// --wire-kv-dtype: a prompt's KV crosses in fewer bits than it is kept in (CacheGen, HACK, KVServe). P makes int8 or
// int4 rows of its own (attention/kv_row.h), the wire carries them, and D makes rows of its own dtype of what comes.
//
// No memory is set aside for them. D has blocks for the wide rows, and the narrow ones arrive in these: one behind the
// other, from the beginning of what the layout has in one piece, which is a layer's K or V of a block (layer_major) or
// of a token (token_major). When the window is closed they are widened from the last one back, so that none is written
// over before it is read. P packs what it posts into memory of its own, until the post is done.
//
// A row that has crossed depends on the row that P computed, and on nothing else: not on wire, grain, layout, block
// size or ranks. Nobody else finds it as a prefix: what another prompt found would then depend on who had asked before.
//
// Thread safety: plain functions and values.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "disagg/order.h"
#include "disagg/transfer_plan.h"

namespace xpyd::disagg {

inline constexpr const char* kWireKvNames[] = {"off", "int8", "int4", "auto"};

// Of a form that has its own: int8, int4.
constexpr Dtype wire_dtype(WireKv form) { return form == WireKv::int8 ? Dtype::int8 : Dtype::int4; }
// What one row of this shape takes on the wire; 0: there are no such rows, or they are no shorter.
size_t wire_row_bytes(const KvShape& shape, WireKv form);

// ---- What crosses.

using PackedRows = std::vector<std::unique_ptr<std::byte[]>>;

// Packs a region (of the whole model) of a sequence and plans its copies to a place at a peer. `packed` must last until
// they are done. `sums`: added to, [checksum_groups()] of the sequence, for widen_kv() to compare; null: not wanted.
// Before: the CPU can read the rows.
void pack_kv(const Peers& peers, KvHandle kv, PeerId peer, const KvPlace& place, const KvRegion& region, WireKv form,
             TransferPlan& plan, PackedRows& packed, std::vector<uint64_t>* sums);

constexpr size_t checksum_groups(int n_tokens) { return size_t((n_tokens + kChecksumTokens - 1) / kChecksumTokens); }
// Of the tokens from 0 on, all of which have arrived. Returns the sums over what was there, where they are
// wanted, of each kChecksumTokens tokens: the narrow rows' XXH3-64, each with its place, added up.
std::vector<uint64_t> widen_kv(const KvMemory& memory, KvHandle kv, int n_tokens, WireKv form, bool sums);

// ---- Which form (--wire-kv-dtype auto).

// One prompt, in seconds and in bytes of all of its rows.
struct WireKvView {
  double bytes = 0, int8_bytes = 0, int4_bytes = 0;  // 0: not to be had
  double pack_int8_s = 0, pack_int4_s = 0;           // by P, between its layers
  double widen_int8_s = 0, widen_int4_s = 0;         // by D, when all has come
  double wire_s_per_byte = 0;                        // measured; 0: not yet
  double compute_s = 0;                              // of the prompt, on P
  double overlap = 0;                                // overlap(): the share of the transfer that may hide there
};
// With which D goes on first: what of the transfer is not hidden, and the converting, of which nothing is.
WireKv choose_wire_kv(const WireKvView& view);

// What converting one byte of wide rows takes, on this machine, now.
struct ConvertCost {
  double pack_int8 = 0, pack_int4 = 0, widen_int8 = 0, widen_int4 = 0;
};
ConvertCost measure_converting(const KvShape& shape, Clock& clock);

}  // namespace xpyd::disagg
