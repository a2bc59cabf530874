// Tests append and every row of cuda_attention_variants(): every element against double precision, and equal bits
// across memories, batches and chunks. Host views over a host pool hold the truth, and the device gets a copy.
#include <algorithm>
#include <set>

#include "attention/attention_reference.h"
#include "attention/cuda/attention_cuda.h"
#include "attention/cuda/attention_mma.h"
#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "tests/attention/attention_case.h"
#include "tests/catch.h"
#include "tests/cuda_arrays.h"

namespace xpyd::testing {
namespace {

using Variant = CudaAttentionVariant;

bool is_contiguous(const Cache& cache) { return cache.views[0].contiguous(); }

// The tables of a step on the device. An entry of a block table is invalid unless one of its tokens [first, kv_length)
// is visible, where `first` is the first token that the step's first query sees.
struct DeviceStep {
  cuda::Memory q_offsets, kv_lengths, token_seqs, positions, tables, table_begins, splits, split_begins;
  CudaStep step;

  DeviceStep(const Cache& cache, const std::vector<Part>& parts, int window, cuda::Stream& stream) {
    std::vector<int32_t> offsets = {0}, lengths, seqs, places, table, begins, listed;
    std::vector<CudaSplit> list;
    int block = cache.layout.block_tokens;
    for (const Part& part : parts) {
      // Each table has two entries more than blocks, so that a read past one table does not reach the next.
      const int entries = is_contiguous(cache) ? 1 : (part.kv_length + block - 1) / block + 2;
      begins.push_back(int32_t(table.size()));
      listed.push_back(int32_t(list.size()));
      const CudaSplitRange range = cuda_splits(part.n_q == 1 ? part.kv_length : 0, window);
      for (int split = range.begin; split < range.end; ++split) list.push_back({int32_t(lengths.size()), split});
      offsets.push_back(offsets.back() + part.n_q);
      lengths.push_back(part.kv_length);
      for (int i = 0; i < part.n_q; ++i) {
        seqs.push_back(int32_t(lengths.size()) - 1);
        places.push_back(part.kv_length - part.n_q + i);
      }
      int first = window ? std::max(0, part.kv_length - part.n_q - window + 1) : 0;
      for (int i = 0; i < entries; ++i) {
        bool used = part.n_q > 0 && (is_contiguous(cache) || (i * block < part.kv_length && (i + 1) * block > first));
        table.push_back(used ? cache.tables[size_t(part.seq)][size_t(i)] : 0x3fffffff);
      }
      step.max_q_tokens = std::max(step.max_q_tokens, part.n_q);
      step.max_kv_length = std::max(step.max_kv_length, part.kv_length);
    }
    q_offsets = to_card(offsets, stream), kv_lengths = to_card(lengths, stream);
    token_seqs = to_card(seqs, stream), positions = to_card(places, stream), tables = to_card(table, stream),
    table_begins = to_card(begins, stream);
    splits = to_card(list, stream), split_begins = to_card(listed, stream);
    step.q_offsets = q_offsets.as<int32_t>(), step.kv_lengths = kv_lengths.as<int32_t>();
    step.token_seqs = token_seqs.as<int32_t>(), step.positions = positions.as<int32_t>();
    step.block_tables = tables.as<int32_t>();
    step.table_begins = table_begins.as<int32_t>(), step.contiguous = is_contiguous(cache);
    step.splits = splits.as<CudaSplit>(), step.n_splits = int(list.size());
    step.split_begins = split_begins.as<int32_t>();
    step.n_seqs = int(parts.size()), step.n_tokens = offsets.back();
  }
};

// All buffers of one call on the device. A padding sequence has no out. The out of all others starts as NaN.
struct DeviceCall {
  cuda::Stream stream;
  DeviceStep tables;
  cuda::Memory pool, q, out, workspace;
  CudaAttentionArgs args;
  size_t n = 0;

  DeviceCall(const Cache& cache, const std::vector<Part>& parts, const Step& step, Dtype dtype)
      : tables(cache, parts, step.args.sliding_window, stream), n(step.q.size()) {
    const KvShape& shape = cache.layout.shape;
    pool = to_card(cache.pool, stream), q = floats_to_card(step.q, dtype, stream);
    out = to_card(std::vector<std::byte>(n * dtype_bytes(dtype), std::byte{0xff}), stream);
    size_t floats = cuda_attention_workspace(tables.step.n_splits, step.args.n_heads, shape.head_dim);
    workspace = to_card(std::vector<float>(floats, std::nanf("")), stream);
    args = {.q = q.data(),
            .out = out.data(),
            .dtype = dtype,
            .pool = pool.data(),
            .layout = cache.layout,
            .step = tables.step,
            .layer = step.args.layer,
            .n_heads = step.args.n_heads,
            .sliding_window = step.args.sliding_window,
            .scale = step.args.scale,
            .workspace = workspace.as<float>()};
  }
  std::vector<float> result() { return floats_from_card(out.data(), n, args.dtype, stream); }
};

const cuda::Card& card() {
  static const cuda::Card opened = cuda::open().value();
  return opened;
}

bool needs_mma(const Variant& variant) { return std::string(variant.name).find("mma") != std::string::npos; }

// The truth of a step, and the error bound of each element. u = 2^-24, and n is the number of tokens. A score is a
// chain of head_dim products: |e| <= (head_dim + 4) 2u sum |q k| scale (twice u, because tensor cores truncate). An
// exponential adds 2^-22 and the rounding of its argument in log2 units, at most 2 u (sum |q k|) scale log2(e) more.
// Each rescaling (32 tokens at least) adds the same, and sums over tokens add (n + 8) 2u. The numerator and the
// denominator both have this error. Tensor cores take weights rounded to bf16, 2^-8, in the numerator. Last comes the
// rounding to the dtype of out.
struct Truth {
  std::vector<float> out;
  std::vector<double> chain, weighted;  // relative error of f32 sums; sum_t weight |V|

  explicit Truth(Step& step) : out(step.out.size()), chain(out.size()), weighted(out.size()) {
    AttentionArgs exact = step.args, absolute = step.args;
    std::vector<float> sums(out.size());
    exact.out = out.data(), absolute.out = sums.data();
    auto element = [&](int s, int kv, int t, int h, int d) { return double(cached(step.args, s, kv, t, h, d)); };
    attention_reference_over(exact, element);
    auto size = [&](int s, int kv, int t, int h, int d) { return std::abs(element(s, kv, t, h, d)); };
    attention_reference_over(absolute, [&](int s, int kv, int t, int h, int d) {
      return kv ? size(s, kv, t, h, d) : element(s, kv, t, h, d);
    });
    std::copy(sums.begin(), sums.end(), weighted.begin());
    const AttentionArgs& args = step.args;
    const double u = 0x1p-24;
    const int dim = args.views[0].layout->shape.head_dim;
    each_query(args, [&](int s, int head, int begin, int end, size_t row) {
      const int n = end - begin;
      double magnitude = 0;
      for (int t = begin; t < end; ++t) {
        double sum = 0;
        for (int d = 0; d < dim; ++d) sum += std::abs(double(args.q[row + size_t(d)])) * size(s, 0, t, head, d);
        magnitude = std::max(magnitude, sum * double(args.scale));
      }
      const double weight = (2 * dim + 16) * u * magnitude + (n / 32 + 3) * 0x1p-22;
      for (size_t at = row; at < row + size_t(dim); ++at) chain[at] = 2 * weight + 4 * (n + 8) * u;
    });
  }

  // Returns "" or the first element beyond its bound.
  std::string compare(const std::vector<float>& got, bool mma, Dtype dtype) const {
    for (size_t i = 0; i < out.size(); ++i) {
      const double relative = chain[i] + (mma ? 0x1.01p-8 : 0) + (dtype == Dtype::bf16 ? 0x1.01p-8 : 0x1p-24);
      double bound = relative * weighted[i] + 1e-30;
      if (!(std::abs(double(got[i]) - double(out[i])) <= bound))
        return "element " + std::to_string(i) + " of " + std::to_string(out.size()) + ": " + std::to_string(got[i]) +
               " for " + std::to_string(out[i]) + ", bound " + std::to_string(bound);
    }
    return "";
  }
};

struct Dtypes {
  Dtype q, kv;
};
constexpr Dtypes kDtypes[] = {{Dtype::f32, Dtype::f32}, {Dtype::bf16, Dtype::bf16}, {Dtype::f32, Dtype::bf16}};

// Counts the rows of the table that accept these.
int n_rows(const Heads& heads, const Dtypes& dtypes, Variant::Phase phase) {
  const bool mma = dtypes.q == Dtype::bf16 && dtypes.kv != Dtype::f32 &&
                   (heads.head_dim == 64 || heads.head_dim == 128);
  const bool wgmma = mma && card().major == 9;
  if (phase == Variant::prefill) return 1 + mma + wgmma;
  return 1 + (heads.head_dim % 8 == 0) + mma;
}
// The same for a step that decode rows accept, too.
int n_rows(const Heads& heads, const Dtypes& dtypes) {
  return n_rows(heads, dtypes, Variant::prefill) + n_rows(heads, dtypes, Variant::decode);
}

void round_q(Step& step, Dtype dtype) {
  if (dtype == Dtype::bf16)
    for (float& x : step.q) x = to_f32(to_bf16(x));
}

// Writes only what some query of the step sees. Everything else stays NaN.
void fill_visible(Cache& cache, const std::vector<Part>& parts, int window) {
  for (const Part& part : parts)
    if (part.n_q > 0)
      cache.fill(part.seq, window ? std::max(0, part.kv_length - part.n_q - window + 1) : 0, part.kv_length);
}

bool only_decodes(const std::vector<Part>& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.n_q <= 1; });
}

// Runs every variant that accepts this step, and returns how many those were.
int check_variants(const Heads& heads, const Dtypes& dtypes, const testing::CaseMemory& memory,
                   const std::vector<Part>& parts, int window, int layer = 0, int n_layers = 1) {
  KvShape shape = {n_layers, heads.n_kv_heads, heads.head_dim, dtypes.kv};
  Cache cache(shape, memory, lengths_of(parts));
  fill_visible(cache, parts, window);
  Step step(cache, parts, heads.n_heads, layer, window);
  round_q(step, dtypes.q);
  const Truth truth(step);
  int ran = 0;
  for (const Variant& variant : cuda_attention_variants()) {
    if (variant.phase == Variant::decode && !only_decodes(parts)) continue;
    DeviceCall call(cache, parts, step, dtypes.q);
    if (variant.refuses(call.args, card())) continue;
    variant.run(call.args, call.stream);
    const std::string off = truth.compare(call.result(), needs_mma(variant), dtypes.q);
    INFO(variant.name << (variant.phase == Variant::decode ? " (decode), " : " (prefill), ") << memory.name << ", q "
                      << dtype_name(dtypes.q) << ", kv " << dtype_name(dtypes.kv) << ", heads " << heads.n_heads << "/"
                      << heads.n_kv_heads << ", dim " << heads.head_dim << ", window " << window);
    CHECK(off == "");
    ++ran;
  }
  return ran;
}

std::vector<float> run(const Variant& variant, const Cache& cache, const std::vector<Part>& parts, Step& step,
                       Dtype dtype) {
  round_q(step, dtype);
  DeviceCall call(cache, parts, step, dtype);
  variant.run(call.args, call.stream);
  return call.result();
}

const testing::CaseMemory kPaged16 = kMemories[2];

}  // namespace

TEST_CASE("cuda attention: decode at every edge agrees with double precision", "[cuda][attention][numeric]") {
  std::vector<Part> all_edges, some;
  for (int length : {1, 15, 16, 17, 63, 64, 65, 129, 300, 511, 512, 513, 1025})
    all_edges.push_back({int(all_edges.size()), 1, length});
  for (int length : {1, 16, 65, 513}) some.push_back({int(some.size()), 1, length});
  for (std::vector<Part>* parts : {&all_edges, &some})
    for (int length : {40, 0}) parts->push_back({int(parts->size()), 0, length});
  const Heads all[] = {{2, 2, 8}, {4, 1, 8}, {2, 2, 64}, {4, 1, 64}, {8, 1, 64}, {1, 1, 128}, {8, 2, 128}, {8, 1, 128}};
  int turn = 0;  // every fifth pair of heads and dtypes gets all edges
  for (const Heads& heads : all)
    for (const Dtypes& dtypes : kDtypes)
      CHECK(check_variants(heads, dtypes, kPaged16, turn++ % 5 ? some : all_edges, 0) == n_rows(heads, dtypes));
}

TEST_CASE("cuda attention: unusual head shapes agree with double precision", "[cuda][attention]") {
  std::vector<Part> parts = {{0, 1, 70}, {1, 1, 9}};
  for (const Heads& heads : {Heads{7, 1, 20}, {5, 1, 33}, {12, 1, 24}, {6, 2, 80}, {4, 1, 256}, {20, 1, 64}})
    for (const Dtypes& dtypes : kDtypes)
      CHECK(check_variants(heads, dtypes, kPaged16, parts, 0) == n_rows(heads, dtypes));
}

TEST_CASE("cuda attention: prefill on a cached prefix agrees with double precision", "[cuda][attention][numeric]") {
  std::vector<Part> parts = {{0, 1, 1},  {1, 15, 15},  {2, 17, 17},  {3, 64, 64}, {4, 65, 65},
                             {5, 0, 30}, {6, 66, 130}, {7, 20, 300}, {8, 1, 129}, {9, 0, 0}},
                    some = {{0, 1, 1}, {1, 17, 17}, {2, 65, 65}, {3, 0, 30}, {4, 20, 150}};
  int turn = 0;  // every fifth pair of heads and dtypes gets all edges
  for (const Heads& heads : {Heads{2, 2, 8}, {2, 1, 64}, {2, 2, 128}, {8, 1, 64}})
    for (const Dtypes& dtypes : kDtypes) {
      const int n = n_rows(heads, dtypes, Variant::prefill);
      if (heads.n_heads == 8 && dtypes.kv != Dtype::bf16) continue;
      CHECK(check_variants(heads, dtypes, kPaged16, turn++ % 5 ? some : parts, 0) == n);
    }
  // At most 64 query tokens run on the narrow kernel.
  for (const Heads& heads : {Heads{2, 1, 64}, {1, 1, 128}})
    CHECK(check_variants(heads, kDtypes[1], kPaged16, {{0, 64, 64}, {1, 13, 100}, {2, 0, 5}}, 0) ==
          n_rows(heads, kDtypes[1], Variant::prefill));
  // Tiles of flash_wgmma have 128 tokens: whole tiles and one token more, chunks on a cached prefix, and windows.
  for (auto [heads, window] : {std::pair{Heads{4, 1, 128}, 0}, {Heads{6, 2, 128}, 130}, {Heads{8, 1, 64}, 129}})
    CHECK(check_variants(heads, kDtypes[1], kPaged16, {{0, 40, 128}, {1, 33, 385}, {2, 1, 129}, {3, 0, 9}}, window) ==
          n_rows(heads, kDtypes[1], Variant::prefill));
}

TEST_CASE("cuda attention: sliding windows agree with double precision", "[cuda][attention]") {
  for (int window : {1, 2, 16, 17, 63, 64, 65, 100, 512, 4000}) {
    std::vector<Part> decodes = {{0, 1, 50}, {1, 1, 300}, {2, 1, 600}};
    const Dtypes& dtypes = kDtypes[1];
    CHECK(check_variants({4, 1, 64}, dtypes, kPaged16, decodes, window) == n_rows({4, 1, 64}, dtypes));
    CHECK(check_variants({1, 1, 64}, dtypes, kPaged16, {{0, 70, 70}, {1, 90, 300}}, window) ==
          n_rows({1, 1, 64}, dtypes, Variant::prefill));
    CHECK(check_variants({2, 1, 8}, kDtypes[0], kPaged16, decodes, window) == 3);
  }
}

TEST_CASE("cuda attention: every memory layout, block size and order gives the same bits", "[cuda][attention]") {
  const std::vector<Part> decodes = {{0, 1, 1}, {1, 1, 77}, {2, 0, 30}, {3, 1, 530}};
  const std::vector<Part> prefills = {{0, 1, 1}, {1, 77, 77}, {2, 0, 30}, {3, 30, 161}};
  std::vector<testing::CaseMemory> memories(std::begin(kMemories), std::end(kMemories));
  memories.push_back({"paged 8", KvOrder::layer_major, 8});
  memories.push_back({"paged 256", KvOrder::token_major, 256});  // larger than a tile of any kernel
  int turn = 0;
  for (const Variant& variant : cuda_attention_variants())
    for (const Dtypes& dtypes : kDtypes) {
      const std::vector<Part>& parts = variant.phase == Variant::decode ? decodes : prefills;
      const int window = turn++ % 2 ? 40 : 0;
      std::vector<float> first;
      for (const testing::CaseMemory& memory : memories) {
        Cache cache({2, 2, 64, dtypes.kv}, memory, lengths_of(parts));
        fill_visible(cache, parts, window);
        Step step(cache, parts, 4, 1, window);
        if (variant.refuses(DeviceCall(cache, parts, step, dtypes.q).args, card())) continue;
        std::vector<float> got = run(variant, cache, parts, step, dtypes.q);
        if (first.empty()) {
          first = got;
          CHECK(Truth(step).compare(got, needs_mma(variant), dtypes.q) == "");
        }
        INFO(variant.name << ", " << memory.name << ", window " << window);
        CHECK(same_bits(got.data(), first.data(), first.size()));
      }
    }
}

TEST_CASE("cuda attention: bits depend only on the query and on what it sees", "[cuda][attention]") {
  const int dim = 64, n_heads = 4, n = 140;
  int turn = 0;
  for (const Variant& variant : cuda_attention_variants())
    for (const Dtypes& dtypes : kDtypes) {
      const int window = turn++ % 2 ? 50 : 0;
      // The same sequence runs in batches with others. Decodes run alone, then between two others. Prefills run whole,
      // then in chunks.
      Cache cache({1, 1, dim, dtypes.kv}, kPaged16, {n, 33, 700});
      for (int s = 0; s < 3; ++s) cache.fill(s, 0, std::vector<int>{n, 33, 700}[size_t(s)]);
      size_t row = size_t(n_heads) * dim;
      auto bits = [&](const std::vector<Part>& parts, size_t skip, size_t tokens) {
        Step step(cache, parts, n_heads, 0, window);
        std::vector<float> out = run(variant, cache, parts, step, dtypes.q);
        return std::vector<float>(out.begin() + long(skip * row), out.begin() + long((skip + tokens) * row));
      };
      Step probe(cache, {{0, 1, n}}, n_heads, 0, window);
      if (variant.refuses(DeviceCall(cache, {{0, 1, n}}, probe, dtypes.q).args, card())) continue;
      INFO(variant.name << ", q " << dtype_name(dtypes.q) << ", window " << window);
      if (variant.phase == Variant::decode) {
        std::vector<float> alone = bits({{0, 1, n}}, 0, 1);
        CHECK(bits({{1, 1, 33}, {0, 1, n}, {2, 1, 700}}, 1, 1) == alone);
        CHECK(bits({{2, 0, 700}, {0, 1, n}}, 0, 1) == alone);
        continue;
      }
      std::vector<float> whole = bits({{0, n, n}}, 0, n);
      for (int chunk : {1, 13, 64, 100}) {
        if (chunk == 1 && dtypes.q == Dtype::f32) continue;
        std::vector<float> pieces;
        for (int end = 0; end < n;) {
          int take = chunk == 1 && end == 0 ? n - 3 : std::min(chunk, n - end);
          end += take;
          std::vector<float> piece = bits({{1, 20, 33}, {0, take, end}}, 20, size_t(take));
          pieces.insert(pieces.end(), piece.begin(), piece.end());
        }
        CHECK(same_bits(pieces.data(), whole.data(), whole.size()));
      }
    }
}

TEST_CASE("cuda attention: huge scores give a one-hot weight, not NaN", "[cuda][attention]") {
  for (const Variant& variant : cuda_attention_variants()) {
    Cache cache({1, 1, 64, Dtype::bf16}, kPaged16, {700});
    cache.fill(0, 0, 700);
    for (int d = 0; d < 64; ++d) cache.put(0, 0, 0, 333, 0, d, 1000.0f), cache.put(0, 0, 0, 5, 0, d, -1000.0f);
    Step step(cache, {{0, 1, 700}}, 1, 0, 0);
    for (float& q : step.q) q = 1000.0f;
    std::vector<float> got = run(variant, cache, {{0, 1, 700}}, step, Dtype::bf16);
    INFO(variant.name);
    // On tensor cores the single weight is 2^rounding instead of 1. The numerator has it in bf16, the denominator in
    // f32.
    double bound = needs_mma(variant) ? 0x1.02p-7 : 0;
    for (int d = 0; d < 64; ++d) {
      float want = to_f32(to_bf16(v_number(0, 0, 333, 0, d)));
      CHECK(std::abs(got[size_t(d)] - want) <= bound * std::abs(want));
    }
  }
}

// Shared memory has 32 banks of 4 bytes. A quarter of a warp reads or writes 8 pieces of 16 bytes at once.
template <int kDim>
void check_banks() {
  using attention::cuda_kernels::swizzled;
  auto group = [](int element) { return element / 8 % 8; };
  for (int first = 0; first < 64; first += 8)
    for (int piece = 0; piece < kDim / 8; ++piece) {
      std::set<int> one_matrix, one_row;
      for (int i = 0; i < 8; ++i) one_matrix.insert(group(swizzled<kDim>(first + i, piece)));
      for (int i = 0; i < 8; ++i) one_row.insert(group(swizzled<kDim>(first, piece / 8 * 8 + i)));
      CHECK(one_matrix.size() == 8);
      CHECK(one_row.size() == 8);
    }
}

TEST_CASE("cuda attention: tiles in shared memory have no bank conflicts", "[cuda][attention]") {
  check_banks<64>();
  check_banks<128>();
}

TEST_CASE("cuda attention: the default is the newest row that accepts the arguments", "[cuda][attention]") {
  CudaAttentionArgs args;
  args.dtype = Dtype::bf16, args.layout.shape = {1, 1, 128, Dtype::bf16}, args.n_heads = 4;
  args.layout.block_tokens = 16;
  cuda::Card ampere, hopper;
  ampere.major = 8, hopper.major = 9;
  auto chosen = [](auto phase, const CudaAttentionArgs& a, const cuda::Card& on) {
    return std::string(default_cuda_attention(phase, a, on).name);
  };
  CHECK(chosen(Variant::prefill, args, hopper) == "flash_wgmma");
  CHECK(chosen(Variant::prefill, args, ampere) == "flash_mma");
  CHECK(chosen(Variant::decode, args, ampere) == "split_mma");
  CudaAttentionArgs wide = args, exact = args;
  wide.layout.shape.head_dim = 96;
  hopper.max_shared_bytes = 227 << 10;
  CHECK(chosen(Variant::prefill, wide, hopper) == "naive");
  CHECK(chosen(Variant::decode, wide, hopper) == "split_kv");
  exact.dtype = exact.layout.shape.dtype = Dtype::f32;
  for (auto phase : {Variant::prefill, Variant::decode}) CHECK(chosen(phase, exact, hopper) == "naive");
  for (int block : {1, 4, 8, 16, 24, 64, 192, 256}) {
    CudaAttentionArgs other = args;
    other.layout.block_tokens = block;
    const bool taken = block == 8 || block == 16 || block == 64 || block == 256;
    CHECK(chosen(Variant::prefill, other, hopper) == (taken ? "flash_wgmma" : "flash_mma"));
    other.step.contiguous = true;
    CHECK(chosen(Variant::prefill, other, hopper) == "flash_wgmma");
  }
}

// Memory is mapped only where the sequences have tokens. Every kernel must give the bits that it gives over whole
// memory, and touch nothing else. The last n_q tokens of each sequence are queries. `room` is the tokens of a slot,
// whose planes are whole groups. Returns how many variants accept the step.
int compare_over_groups(int dim, KvOrder order, int n_q, int window, int room = 384) {
  const size_t group = cuda::vmm::granularity();
  // A page group holds 128 tokens of one layer's K or V, or 32 of all layers. So a tile spans more than one.
  const KvShape shape{2, int(group / (128 * 2 * size_t(dim))), dim, Dtype::bf16};
  std::vector<Part> parts;
  for (int length : {128, 257, 135, 40}) parts.push_back({int(parts.size()), n_q, length});
  Cache cache(shape, {"", order, 0}, {128, 257, 135, 384});
  Random random(5);
  std::vector<bf16> some(100'003);  // repeated over the pool
  for (bf16& x : some) x = to_bf16(float(random.below(2001)) / 1000 - 1);
  for (size_t at = 0, n; at < cache.pool.size(); at += n)
    std::memcpy(&cache.pool[at], some.data(), n = std::min(2 * some.size(), cache.pool.size() - at));
  const bool by_layer = order == KvOrder::layer_major;
  const int planes = by_layer ? 2 * shape.n_layers : 1;
  const size_t token = by_layer ? cache.layout.token_stride() : shape.token_bytes();
  KvLayout apart = cache.layout;
  apart.block_tokens = room, apart.n_blocks = 4;
  auto groups_of = [&](int length) { return (size_t(length) * token + group - 1) / group; };
  size_t n_groups = 0;
  for (const Part& part : parts) n_groups += size_t(planes) * groups_of(part.kv_length);
  auto groups = make_cuda_device()->make_page_groups({.group_bytes = group, .n_groups = int(n_groups)}).value();
  auto range = groups->reserve(apart.pool_bytes()).value();
  Step step(cache, parts, 2 * shape.n_kv_heads, shape.n_layers - 1, window);
  DeviceCall call(cache, parts, step, Dtype::bf16), over(cache, parts, step, Dtype::bf16);
  over.args.pool = range->data(), over.args.layout = apart;
  const cuda::Memory table = to_card(std::vector<int32_t>{0, 1, 2, 3}, over.stream);
  over.args.step.block_tables = table.as<int32_t>();
  for (const Part& part : parts)
    for (int plane = 0; plane < planes; ++plane) {
      const size_t from = cache.layout.offset(cache.tables[size_t(part.seq)][0], plane / 2, plane % 2, 0, 0),
                   at = apart.offset(part.seq, plane / 2, plane % 2, 0, 0), m = groups_of(part.kv_length);
      n_groups -= m;  // the last ones first, so that adjacent addresses are not adjacent memory
      for (size_t i = 0; i < m; ++i) REQUIRE(range->map(at + i * group, int(n_groups + m - 1 - i), 1));
      cuda::copy(range->data() + at, call.pool.data() + from, size_t(part.kv_length) * token, over.stream);
    }
  int ran = 0;
  for (const Variant& variant : cuda_attention_variants()) {
    if (variant.phase == Variant::decode && n_q > 1) continue;
    if (variant.refuses(call.args, card())) continue;
    variant.run(call.args, call.stream);
    variant.run(over.args, over.stream);
    const std::vector<float> expected = call.result(), got = over.result();
    INFO(variant.name << ", dim " << dim << (by_layer ? ", layer" : ", token") << "_major, " << n_q
                      << " query tokens, window " << window);
    CHECK(std::none_of(expected.begin(), expected.end(), [](float x) { return std::isnan(x); }));
    CHECK(same_bits(got.data(), expected.data(), expected.size()));
    ++ran;
  }
  return ran;
}

TEST_CASE("cuda attention: over page groups the bits are the same, and nothing beyond the last token is touched",
          "[cuda][attention][vattention]") {
  int ran = 0;
  for (int dim : {64, 128})
    for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
      for (auto [n_q, window] : {std::pair{1, 0}, {1, 50}, {3, 0}, {40, 140}})
        if (n_q != 40 || (dim == 128 && order == KvOrder::token_major))
          ran += compare_over_groups(dim, order, n_q, window);
  CHECK(ran > 40);
}

TEST_CASE("issue: kernels address more than 2^32 rows in all layers, so that Yi-34B with batch 500 runs",
          "[cuda][attention][vattention]") {
  const int n_kv_heads = int(cuda::vmm::granularity() / (128 * 2 * 128));
  // The slots have so many tokens that four slots have nearly 2^32 rows in a layer.
  const int room = int((size_t(1) << 32) / (2 * 4 * size_t(n_kv_heads))) / 128 * 128 - 128;
  REQUIRE(size_t(2 * 2 * 4) * size_t(n_kv_heads) * size_t(room) > size_t(1) << 32);
  int ran = 0;
  for (int n_q : {1, 3}) ran += compare_over_groups(128, KvOrder::layer_major, n_q, 0, room);
  CHECK(ran > 5);
}

}  // namespace xpyd::testing
