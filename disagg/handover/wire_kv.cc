#include "disagg/handover/wire_kv.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "attention/kv_row.h"

namespace xpyd::disagg {
namespace {

// Where rows of so many bytes lie in the room of wide ones, and how many tokens from `token` on lie there in one piece.
struct WirePlace {
  const KvView& view;
  size_t row_bytes;

  int first(int token) const {  // of the piece
    const KvLayout& layout = *view.layout;
    return layout.order == KvOrder::layer_major ? token - token % layout.block_tokens : token;
  }
  int end(int token) const {
    return view.layout->order == KvOrder::layer_major ? first(token) + view.layout->block_tokens : token + 1;
  }
  std::byte* row(int layer, int kv, int token, int head) const {
    const int begin = first(token), heads = view.layout->shape.n_kv_heads;
    return view.row(layer, kv, begin, 0) + size_t((token - begin) * heads + head) * row_bytes;
  }
};

// Of a row with its place, so that rows which have changed places are seen.
uint64_t row_sum(const std::byte* row, size_t bytes, int rank, int layer, int kv, int token, int head) {
  const uint64_t place = (((uint64_t(rank) << 12 | uint64_t(layer)) << 1 | uint64_t(kv)) << 12 | uint64_t(head)) << 28;
  return XXH3_64bits_withSeed(row, bytes, place ^ uint64_t(token));
}

const float* as_floats(const KvShape& shape, const std::byte* row, float* buffer) {
  if (shape.dtype == Dtype::f32) return reinterpret_cast<const float*>(row);
  read_kv_row(shape.dtype, shape.head_dim, row, 0, shape.head_dim, buffer);
  return buffer;
}

}  // namespace

size_t wire_row_bytes(const KvShape& shape, WireKv form) {
  KvShape narrow = shape;
  narrow.dtype = wire_dtype(form);
  return kv_rows_supported(narrow) && narrow.row_bytes() < shape.row_bytes() ? narrow.row_bytes() : 0;
}

void pack_kv(const Peers& peers, KvHandle kv, PeerId peer, const KvPlace& place, const KvRegion& region, WireKv form,
             TransferPlan& plan, PackedRows& packed, std::vector<uint64_t>* sums) {
  plan.copies.clear();
  plan.bytes = 0;
  peers.each_piece(kv, peer, place, region, [&](const ShardMove& move, const KvView& from, const KvView& to,
                                                const KvRegion& r) {
    const KvShape& shape = from.layout->shape;
    const size_t row_bytes = wire_row_bytes(shape, form);
    const WirePlace there{to, row_bytes};
    std::vector<float> x(size_t(shape.head_dim));
    const int heads = r.head_end - r.head_begin, layers = r.layer_end - r.layer_begin;
    const size_t bytes = size_t(layers) * 2 * size_t(r.token_end - r.token_begin) * size_t(heads) * row_bytes;
    std::byte* at = packed.emplace_back(std::make_unique_for_overwrite<std::byte[]>(bytes)).get();
    plan.bytes += bytes;
    const std::byte* piece_end = nullptr;  // at the peer
    for (int plane = 0; plane < 2 * layers; ++plane)
      for (int token = r.token_begin; token < r.token_end; ++token) {
        const int layer = plane / 2, which = plane % 2;
        std::byte* const begin = there.row(r.to_layer + layer, which, token, r.to_head);
        if (begin != piece_end) plan.copies.push_back({at, begin, 0});
        for (int head = 0; head < heads; ++head, at += row_bytes) {
          const std::byte* row = from.row(r.layer_begin + layer, which, token, r.head_begin + head);
          write_kv_row(wire_dtype(form), shape.head_dim, as_floats(shape, row, x.data()), at);
          if (sums)
            (*sums)[size_t(token / kChecksumTokens)] += row_sum(at, row_bytes, move.destination_rank,
                                                                r.to_layer + layer, which, token, r.to_head + head);
        }
        plan.copies.back().bytes += size_t(heads) * row_bytes;
        piece_end = begin + size_t(heads) * row_bytes;
      }
  });
}

std::vector<uint64_t> widen_kv(const KvMemory& memory, KvHandle kv, int n_tokens, WireKv form, bool sums) {
  std::vector<uint64_t> all(sums ? checksum_groups(n_tokens) : 0);
  for (int rank = 0; rank < memory.n_ranks(); ++rank) {
    const KvView view = memory.view(kv, rank);
    const KvShape& shape = view.layout->shape;
    const size_t row_bytes = wire_row_bytes(shape, form);
    const WirePlace here{view, row_bytes};
    std::vector<std::byte> row(row_bytes);
    std::vector<float> x(size_t(shape.head_dim));
    for (int plane = 0; plane < 2 * shape.n_layers; ++plane)
      for (int begin = 0; begin < n_tokens; begin = here.end(begin))
        for (int token = std::min(here.end(begin), n_tokens) - 1; token >= begin; --token)
          for (int head = shape.n_kv_heads - 1; head >= 0; --head) {
            const int layer = plane / 2, which = plane % 2;
            std::memcpy(row.data(), here.row(layer, which, token, head), row_bytes);
            if (sums)
              all[size_t(token / kChecksumTokens)] += row_sum(row.data(), row_bytes, rank, layer, which, token, head);
            read_kv_row(wire_dtype(form), shape.head_dim, row.data(), 0, shape.head_dim, x.data());
            write_kv_row(shape.dtype, shape.head_dim, x.data(), view.row(layer, which, token, head));
          }
  }
  return all;
}

// ---- Which form.

WireKv choose_wire_kv(const WireKvView& v) {
  if (v.wire_s_per_byte <= 0) return WireKv::off;
  const auto seconds = [&](double bytes, double pack_s, double widen_s) {
    const double wire_s = bytes * v.wire_s_per_byte;
    return pack_s + wire_s - std::min(wire_s * v.overlap, v.compute_s) + widen_s;
  };
  WireKv best = WireKv::off;
  double least = seconds(v.bytes, 0, 0);
  const auto look = [&](WireKv form, double bytes, double pack_s, double widen_s) {
    if (bytes <= 0 || seconds(bytes, pack_s, widen_s) >= least) return;
    least = seconds(bytes, pack_s, widen_s);
    best = form;
  };
  look(WireKv::int8, v.int8_bytes, v.pack_int8_s, v.widen_int8_s);
  look(WireKv::int4, v.int4_bytes, v.pack_int4_s, v.widen_int4_s);
  return best;
}

ConvertCost measure_converting(const KvShape& shape, Clock& clock) {
  constexpr size_t kBytes = size_t{1} << 20;
  const size_t rows = std::max<size_t>(1, kBytes / shape.row_bytes());
  std::vector<float> x(size_t(shape.head_dim));
  for (size_t d = 0; d < x.size(); ++d) x[d] = float(d % 17) - 8;
  std::vector<std::byte> wide(rows * shape.row_bytes()), narrow(wide.size());
  for (size_t i = 0; i < rows; ++i) write_kv_row(shape.dtype, shape.head_dim, x.data(), &wide[i * shape.row_bytes()]);
  const auto per_byte = [&](auto&& convert) {
    const double start = clock.now();
    for (size_t i = 0; i < rows; ++i) convert(i);
    return (clock.now() - start) / double(wide.size());
  };
  ConvertCost cost;
  for (const WireKv form : {WireKv::int8, WireKv::int4}) {
    const size_t row_bytes = wire_row_bytes(shape, form);
    if (row_bytes == 0) continue;
    const bool int8 = form == WireKv::int8;
    (int8 ? cost.pack_int8 : cost.pack_int4) = per_byte([&](size_t i) {
      write_kv_row(wire_dtype(form), shape.head_dim, as_floats(shape, &wide[i * shape.row_bytes()], x.data()),
                   &narrow[i * row_bytes]);
    });
    (int8 ? cost.widen_int8 : cost.widen_int4) = per_byte([&](size_t i) {
      read_kv_row(wire_dtype(form), shape.head_dim, &narrow[i * row_bytes], 0, shape.head_dim, x.data());
      write_kv_row(shape.dtype, shape.head_dim, x.data(), &wide[i * shape.row_bytes()]);
    });
  }
  return cost;
}

}  // namespace xpyd::disagg
