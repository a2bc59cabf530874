// paged_attention on a card: vAttention's Figs 2, 3, 7 and 8 without their confounds. Each kernel is one source over
// both memories. A pool holds the same bytes whatever the block size, and all of them are read.
//
// 32 query heads, 8 KV heads of 128, bf16, blocks in random order; `block` 0 is contiguous.
//   prefill  a whole prompt (Fig 2: 1K to 32K)
//   chunk    2,048 tokens behind a long context (Fig 7: up to 128K)
//   decode   `batch` sequences of 16K (Figs 3 and 8)
//
// Expected on an H200 at 4.3 TB/s and 700 TFLOP/s: decode of 32 x 16K reads 2.1 GB, 0.5 ms. A row of 256 bytes a head
// is two to eight sectors, so from blocks of 16 on a table costs one look-up in 32 KB and nothing else: 1.00 to 1.08 of
// contiguous. (Published: equal, against their own paged kernel; 1.9 times between blocks of 16 and 128 at the same
// number of blocks.) Prefill of 32K is 8.8 TFLOP, 13 ms; a row is read for 64 to 128 queries: 1.00 to 1.10. (Published:
// up to 1.37 and 1.42.)
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_reference.h"
#include "attention/cuda/attention_cuda.h"
#include "base/random.h"
#include "experiments/experiment.h"
#include "experiments/stats.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments {
namespace {

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;
constexpr uint64_t kQueries = 3, kCache = 4;  // arrays of random_element()
constexpr float kQueryScale = 8;              // most of the weight is on few tokens

struct Shape {
  int n_seqs, n_q, length;
  XPYD_HD bf16 cached(int seq, int kv, int token, int head, int d) const {
    const size_t row = (size_t(seq) * 2 + size_t(kv)) * size_t(length) + size_t(token);
    return random_element(kCache, (row * kKvHeads + size_t(head)) * kDim + size_t(d));
  }
};

__global__ void fill_kernel(bf16* pool, KvRows rows, const int32_t* tables, int stride, Shape shape) {
  const int token = int(blockIdx.x), seq = int(blockIdx.y);
  for (int i = int(threadIdx.x); i < 2 * kKvHeads * kDim; i += int(blockDim.x)) {
    const int kv = i / (kKvHeads * kDim), head = i / kDim % kKvHeads, d = i % kDim;
    const size_t row = rows.row(tables + size_t(seq) * size_t(stride), kv, token, head);
    pool[row * kDim + size_t(d)] = shape.cached(seq, kv, token, head, d);
  }
}

template <class T>
cuda::Memory to_card(const std::vector<T>& values, cuda::Stream& stream) {
  cuda::Memory host = cuda::Memory::pinned(values.size() * sizeof(T));
  std::copy(values.begin(), values.end(), host.as<T>());
  cuda::Memory memory = cuda::Memory::device(host.size()).value();
  cuda::copy(memory.data(), host.data(), host.size(), stream);
  stream.wait();
  return memory;
}

class Problem {
 public:
  Problem(const Shape& s, int block, cuda::Stream& stream) : shape_(s), stream_(stream) {
    const int tokens = block == 0 ? s.length : block, per_seq = (s.length + tokens - 1) / tokens;
    const int n = s.n_seqs * s.n_q;
    std::vector<int32_t> table(size_t(s.n_seqs) * size_t(per_seq)), offsets, seqs, positions;
    Random random(7);
    for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i);
    for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random.below(i)]);
    for (int i = 0; i <= s.n_seqs; ++i) offsets.push_back(i * s.n_q);
    for (int i = 0; i < n; ++i) seqs.push_back(i / s.n_q), positions.push_back(s.length - s.n_q + i % s.n_q);
    table_ = to_card(table, stream), offsets_ = to_card(offsets, stream);
    seqs_ = to_card(seqs, stream), positions_ = to_card(positions, stream);
    const int n_splits = cuda_splits(s.length, 0).end;  // per sequence
    std::vector<CudaSplit> splits;
    std::vector<int32_t> split_begins, table_begins;
    for (int i = 0; i < s.n_seqs; ++i) {
      table_begins.push_back(i * per_seq);
      split_begins.push_back(i * n_splits);
      for (int split = 0; split < n_splits; ++split) splits.push_back({i, split});
    }
    splits_ = to_card(splits, stream), split_begins_ = to_card(split_begins, stream);
    table_begins_ = to_card(table_begins, stream);
    lengths_ = to_card(std::vector<int32_t>(size_t(s.n_seqs), s.length), stream);
    const size_t n_elements = size_t(n) * kHeads * kDim;
    q_ = cuda::Memory::device(n_elements * sizeof(bf16)).value();
    out_ = cuda::Memory::device(q_.size()).value();
    cuda::fill(out_.data(), 0xff, out_.size(), stream);
    fill_random(q_.data(), n_elements, kQueries, kQueryScale, stream);
    args_.layout = {{1, kKvHeads, kDim, Dtype::bf16}, KvOrder::layer_major, tokens, s.n_seqs * per_seq};
    pool_ = cuda::Memory::device(args_.layout.pool_bytes()).value();
    workspace_ = cuda::Memory::device(
                     std::max<size_t>(16, 4 * cuda_attention_workspace(int(splits.size()), kHeads, kDim)))
                     .value();
    args_.q = q_.data(), args_.out = out_.data(), args_.dtype = Dtype::bf16;
    args_.pool = pool_.data();
    args_.step = {.q_offsets = offsets_.as<int32_t>(),
                  .kv_lengths = lengths_.as<int32_t>(),
                  .token_seqs = seqs_.as<int32_t>(),
                  .positions = positions_.as<int32_t>(),
                  .block_tables = table_.as<int32_t>(),
                  .table_begins = table_begins_.as<int32_t>(),
                  .splits = splits_.as<CudaSplit>(),
                  .split_begins = split_begins_.as<int32_t>(),
                  .n_splits = int(splits.size()),
                  .contiguous = block == 0,
                  .n_seqs = s.n_seqs,
                  .n_tokens = n,
                  .max_q_tokens = s.n_q,
                  .max_kv_length = s.length};
    args_.n_heads = kHeads;
    args_.scale = 1 / std::sqrt(float(kDim));
    args_.workspace = workspace_.as<float>();
    cuda::launch(fill_kernel, "fill_cache", cuda::Shape{dim3(unsigned(s.length), unsigned(s.n_seqs)), dim3(256)},
                 stream, pool_.as<bf16>(), args_.layout.rows(0, block == 0), table_.as<const int32_t>(), per_seq, s);
  }
  const CudaAttentionArgs& args() const { return args_; }

  // Compares the last token, in all heads, with double precision. Weights are rounded to bf16 over values below 1.
  std::string check() const {
    const size_t width = size_t(kHeads) * kDim, n = size_t(shape_.n_seqs) * size_t(shape_.n_q);
    cuda::Memory got = cuda::Memory::pinned(width * sizeof(bf16));
    cuda::copy(got.data(), out_.as<bf16>() + (n - 1) * width, got.size(), stream_);
    stream_.wait();
    std::vector<float> q(width), want(width);
    for (size_t i = 0; i < width; ++i)
      q[i] = to_f32(to_bf16(kQueryScale * to_f32(random_element(kQueries, (n - 1) * width + i))));
    const KvLayout layout{args_.layout.shape, KvOrder::layer_major, shape_.length, 1};
    const KvView view{nullptr, &layout, nullptr, 0};
    const int32_t one[] = {0, 1}, lengths[] = {shape_.length};
    attention_reference_over(AttentionArgs{.q = q.data(),
                                           .out = want.data(),
                                           .q_offsets = one,
                                           .kv_lengths = lengths,
                                           .views = {&view, 1},
                                           .n_heads = kHeads,
                                           .scale = args_.scale},
                             [&](int, int kv, int token, int head, int d) {
                               return double(to_f32(shape_.cached(shape_.n_seqs - 1, kv, token, head, d)));
                             });
    for (size_t i = 0; i < width; ++i)
      if (const double off = std::abs(double(to_f32(got.as<bf16>()[i])) - double(want[i])); !(off < 0.01))
        return "element " + std::to_string(i) + " is off by " + std::to_string(off);
    return "";
  }
  Work work() const {
    const KvLayout layout{args_.layout.shape, KvOrder::layer_major, shape_.length, 1};
    const std::vector<KvView> views(size_t(shape_.n_seqs), KvView{nullptr, &layout, nullptr, 0});
    std::vector<int32_t> offsets, lengths(size_t(shape_.n_seqs), shape_.length);
    for (int i = 0; i <= shape_.n_seqs; ++i) offsets.push_back(i * shape_.n_q);
    Work w = attention::work(
        AttentionArgs{.q_offsets = offsets, .kv_lengths = lengths, .views = views, .n_heads = kHeads});
    w.bytes -= 2 * 2 * double(shape_.n_seqs) * shape_.n_q * kHeads * kDim;  // q and out are bf16 here
    return w;
  }

 private:
  Shape shape_;
  cuda::Stream& stream_;
  CudaAttentionArgs args_;
  cuda::Memory table_, table_begins_, offsets_, lengths_, seqs_, positions_, splits_, split_begins_;
  cuda::Memory q_, out_, pool_, workspace_;
};

std::vector<Values> points(const Setting& setting) {
  std::vector<Values> all;
  auto add = [&](const char* phase, int batch, int context, std::vector<int> blocks) {
    for (int block : blocks)
      all.push_back({{"phase", phase}, {"batch", batch}, {"context", context}, {"block", block}});
  };
  if (setting.tiny) {
    add("prefill", 1, 40, {0, 16});
    add("chunk", 1, 100, {16});
    add("decode", 2, 70, {0, 1, 16});
    return all;
  }
  for (int context : {1024, 2048, 4096, 8192, 16384, 32768}) add("prefill", 1, context, {0, 16, 256});
  for (int context : {8192, 32768, 65536, 131072}) add("chunk", 1, context, {0, 16, 256});
  for (int batch : {1, 2, 4, 8, 16, 32}) add("decode", batch, 16384, {0, 1, 16, 32, 64, 128, 256});
  return all;
}

Measure open(const Setting& setting) {
  auto stream = std::make_shared<cuda::Stream>();
  return [=](const Values& point) -> Result<Finding> {
    Result<cuda::Card> card = cuda::open();
    if (!card) return card.error();
    const std::string phase = point["phase"];
    const int context = point["context"];
    const int n_q = phase == "decode" ? 1 : phase == "prefill" ? context : setting.tiny ? 30 : 2048;
    Problem problem({point["batch"], n_q, context}, point["block"], *stream);
    const auto wanted = n_q == 1 ? CudaAttentionVariant::decode : CudaAttentionVariant::prefill;
    // The newest kernel that this card supports. The check below covers it.
    const CudaAttentionVariant* variant = nullptr;
    for (const CudaAttentionVariant& v : cuda_attention_variants())
      if (v.phase == wanted && !v.refuses(problem.args(), card.value())) variant = &v;
    auto run = [&] { variant->run(problem.args(), *stream); };
    run();
    if (std::string wrong = problem.check(); !wrong.empty()) return Finding{{}, variant->name + (": " + wrong)};
    cuda::Event begin(true), end(true);
    auto seconds = [&](int repetitions) {
      begin.record(*stream);
      for (int i = 0; i < repetitions; ++i) run();
      end.record(*stream);
      end.wait();
      return cuda::Event::seconds(begin, end) / repetitions;
    };
    const int repetitions = setting.tiny ? 1 : std::clamp(int(0.02 / seconds(1)), 1, 1000);
    std::vector<double> samples;
    for (int i = 0; i < (setting.tiny ? 1 : 9); ++i) samples.push_back(seconds(repetitions));
    const Summary s = summarize(samples);
    const Work w = problem.work();
    return Finding{{{{"variant", variant->name},
                     {"ms", 1e3 * s.mean},
                     {"ms_least", 1e3 * s.min},
                     {"gbps", 1e-9 * w.bytes / s.mean},
                     {"tflops", 1e-12 * w.flops / s.mean}}},
                   ""};
  };
}

REGISTER_EXPERIMENT("paged_attention", "cuda", points, open);

}  // namespace
}  // namespace xpyd::experiments
