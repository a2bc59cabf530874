// Attention over addresses that have memory only where the sequences have tokens: every kernel
// gives the bits that it gives over whole memory, and touches nothing else.
#include <algorithm>

#include "attention/attention_cuda.h"
#include "base/cuda_vmm.h"
#include "base/device_cuda.h"
#include "base/random.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

template <class T>
cuda::Memory upload(const std::vector<T>& from, cuda::Stream& stream) {
  cuda::Memory host = cuda::Memory::pinned(from.size() * sizeof(T));
  std::copy(from.begin(), from.end(), host.as<T>());
  cuda::Memory memory = cuda::Memory::device(host.size()).value();
  cuda::copy(memory.data(), host.data(), host.size(), stream);
  stream.wait();
  return memory;
}
std::vector<bf16> random_values(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<bf16> values(n);
  for (bf16& x : values) x = to_bf16(float(random.below(2001)) / 1000 - 1);
  return values;
}

struct Problem {
  KvLayout layout;           // slots of whole groups
  std::vector<int> lengths;  // by slot
  int n_q, window;           // the last n_q tokens of each ask
  int room = 0;              // over page groups: tokens of a slot; 0: as many
};

// Runs every variant that takes the problem over both; returns how many.
int compare(const Problem& p, size_t group_bytes) {
  const KvShape& shape = p.layout.shape;
  const int n_seqs = int(p.lengths.size()), n_heads = 2 * shape.n_kv_heads, n = n_seqs * p.n_q;
  const int layer = shape.n_layers - 1;
  KvLayout apart = p.layout;
  if (p.room) apart.block_tokens = p.room;
  cuda::Stream stream;
  cuda::Memory whole = upload(random_values(p.layout.pool_bytes() / 2, 5), stream);
  // Groups behind tokens only; the rest of the last one stays as it came.
  const bool by_layer = p.layout.order == KvOrder::layer_major;
  const int planes = by_layer ? 2 * shape.n_layers : 1;
  const size_t token = by_layer ? p.layout.token_stride() : shape.token_bytes();
  auto groups_of = [&](int length) { return (size_t(length) * token + group_bytes - 1) / group_bytes; };
  size_t n_groups = 0;
  for (int length : p.lengths) n_groups += size_t(planes) * groups_of(length);
  auto device = make_cuda_device();
  auto groups = device->make_page_groups({.group_bytes = group_bytes, .n_groups = int(n_groups)}).value();
  auto range = groups->reserve(apart.pool_bytes()).value();
  for (int slot = 0; slot < n_seqs; ++slot)
    for (int plane = 0; plane < planes; ++plane) {
      const int length = p.lengths[size_t(slot)];
      const size_t from = p.layout.offset(slot, plane / 2, plane % 2, 0, 0),
                   at = apart.offset(slot, plane / 2, plane % 2, 0, 0), m = groups_of(length);
      n_groups -= m;  // the last ones first: neighbours in memory are not neighbours here
      for (size_t i = 0; i < m; ++i) REQUIRE(range->map(at + i * group_bytes, int(n_groups + m - 1 - i), 1));
      cuda::copy(range->data() + at, whole.data() + from, size_t(length) * token, stream);
    }

  std::vector<int32_t> offsets = {0}, seqs, positions, slots, listed;
  std::vector<CudaSplit> list;
  for (int s = 0; s < n_seqs; ++s) {
    offsets.push_back((s + 1) * p.n_q), slots.push_back(s);
    listed.push_back(int32_t(list.size()));
    const CudaSplitRange seen = cuda_splits(p.lengths[size_t(s)], p.window);
    for (int split = seen.begin; split < seen.end; ++split) list.push_back({s, split});
    for (int i = 0; i < p.n_q; ++i) seqs.push_back(s), positions.push_back(p.lengths[size_t(s)] - p.n_q + i);
  }
  const size_t n_out = size_t(n) * size_t(n_heads) * size_t(shape.head_dim);
  const int longest = *std::max_element(p.lengths.begin(), p.lengths.end());
  cuda::Memory q = upload(random_values(n_out, 6), stream), offsets_at = upload(offsets, stream),
               lengths_at = upload(std::vector<int32_t>(p.lengths.begin(), p.lengths.end()), stream),
               seqs_at = upload(seqs, stream), positions_at = upload(positions, stream),
               slots_at = upload(slots, stream), splits_at = upload(list, stream), listed_at = upload(listed, stream);
  cuda::Memory out = cuda::Memory::device(2 * n_out).value(), host = cuda::Memory::pinned(2 * n_out);
  cuda::Memory workspace =
      cuda::Memory::device(16 + 4 * cuda_attention_workspace(int(list.size()), n_heads, shape.head_dim)).value();
  auto bits = [&](const CudaAttentionVariant& variant, std::byte* pool, const KvLayout& layout) {
    CudaAttentionArgs args{.q = q.data(),
                           .out = out.data(),
                           .dtype = Dtype::bf16,
                           .pool = pool,
                           .layout = layout,
                           .step = {.q_offsets = offsets_at.as<int32_t>(),
                                    .kv_lengths = lengths_at.as<int32_t>(),
                                    .token_seqs = seqs_at.as<int32_t>(),
                                    .positions = positions_at.as<int32_t>(),
                                    .block_tables = slots_at.as<int32_t>(),
                                    .table_begins = slots_at.as<int32_t>(),  // 0, 1, …
                                    .splits = splits_at.as<CudaSplit>(),
                                    .split_begins = listed_at.as<int32_t>(),
                                    .n_splits = int(list.size()),
                                    .contiguous = true,
                                    .n_seqs = n_seqs,
                                    .n_tokens = n,
                                    .max_q_tokens = p.n_q,
                                    .max_kv_length = longest},
                           .layer = layer,
                           .n_heads = n_heads,
                           .sliding_window = p.window,
                           .scale = 0.1f,
                           .workspace = workspace.as<float>()};
    std::vector<uint16_t> result;
    if (variant.refuses(args, cuda::open().value())) return result;
    cuda::fill(out.data(), 0xff, out.size(), stream);
    variant.run(args, stream);
    cuda::copy(host.data(), out.data(), out.size(), stream);
    stream.wait();
    result.assign(host.as<uint16_t>(), host.as<uint16_t>() + n_out);
    return result;
  };
  int ran = 0;
  for (const CudaAttentionVariant& variant : cuda_attention_variants()) {
    if (variant.phase == CudaAttentionVariant::decode && p.n_q > 1) continue;
    const std::vector<uint16_t> expected = bits(variant, whole.data(), p.layout);
    if (expected.empty()) continue;
    INFO(variant.name << ", dim " << shape.head_dim << (by_layer ? ", layer" : ", token") << "_major, " << p.n_q
                      << " tokens ask, window " << p.window);
    CHECK(std::count(expected.begin(), expected.end(), uint16_t(0xffff)) == 0);
    CHECK(bits(variant, range->data(), apart) == expected);
    ++ran;
  }
  return ran;
}

TEST_CASE("cuda attention: over page groups the same bits, and nothing beyond the last token",
          "[cuda][attention][vattention]") {
  const size_t group = cuda::vmm::granularity();
  int ran = 0;
  for (int dim : {64, 128})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (auto [n_q, window] : {std::pair{1, 0}, {1, 50}, {3, 0}, {40, 140}}) {
        // A group holds 128 tokens of one layer's K or V; of all, 32: a tile has more than one.
        const KvShape shape{2, int(group / (128 * 2 * size_t(dim))), dim, Dtype::bf16};
        if (n_q == 40 && (dim == 64 || order == KvOrder::layer_major)) continue;
        ran += compare({{shape, order, 384, 4}, {128, 257, 135, 40}, n_q, window}, group);
      }
  CHECK(ran > 40);
}

TEST_CASE(
    "issue: kernels counted the rows of all layers in 32 bits, and Yi-34B with batch 500 was "
    "refused",
    "[cuda][attention][vattention]") {
  const size_t group = cuda::vmm::granularity();
  const KvShape shape{2, int(group / (128 * 2 * 128)), 128, Dtype::bf16};
  // Tokens of a slot: nearly 2^32 rows in a layer of four slots.
  const int room = int((size_t(1) << 32) / (2 * 4 * size_t(shape.n_kv_heads))) / 128 * 128 - 128;
  const KvLayout apart{shape, KvOrder::layer_major, room, 4};
  REQUIRE(apart.pool_bytes() / shape.row_bytes() > size_t(1) << 32);
  int ran = 0;
  for (auto [n_q, window] : {std::pair{1, 0}, {3, 0}})
    ran += compare({{shape, KvOrder::layer_major, 384, 4}, {128, 257, 135, 40}, n_q, window, room}, group);
  CHECK(ran > 5);
}

}  // namespace
}  // namespace xpyd::testing
