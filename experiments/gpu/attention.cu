// Attention kernels over made-up KV, in every variant that the card supports. K, V and q are functions of their place
// in the sequence, so one reference serves all memories.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <memory>
#include <numeric>
#include <sstream>

#include "allocator/kv/kv_layout.h"
#include "attention/attention.h"
#include "attention/attention_reference.h"
#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "base/random.h"
#include "experiments/gpu/rounds.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments::gpu {
namespace {

constexpr int kDim = 128;
constexpr uint64_t kQueries = 3, kCache = 4;  // arrays of random_element()
// Large queries give most of the weight to few tokens, so a lost tile or split changes the result visibly.
constexpr float kQueryScale = 16;

// n_seqs sequences of `length` tokens. The last n_q tokens of each are queries.
struct Problem {
  int n_seqs, length, n_q, n_heads, n_kv_heads;

  XPYD_HD KvShape shape() const { return {1, n_kv_heads, kDim, Dtype::bf16}; }
  // The number of a row [kDim] in the whole cache; element() gives its elements.
  XPYD_HD size_t row(int seq, int kv, int token, int head) const {
    return ((size_t(seq) * 2 + size_t(kv)) * size_t(length) + size_t(token)) * size_t(n_kv_heads) + size_t(head);
  }
  XPYD_HD bf16 element(size_t row, int d) const { return random_element(kCache, row * kDim + size_t(d)); }
  bf16 query(size_t i) const { return to_bf16(kQueryScale * to_f32(random_element(kQueries, i))); }
  size_t n_queries() const { return size_t(n_seqs) * size_t(n_q) * size_t(n_heads) * kDim; }
  Work work() const {
    const KvLayout layout{shape(), KvOrder::layer_major, length, 1};
    const KvView view{nullptr, &layout, nullptr, 0};
    const std::vector<KvView> views(size_t(n_seqs), view);
    std::vector<int32_t> offsets, lengths(size_t(n_seqs), length);
    for (int s = 0; s <= n_seqs; ++s) offsets.push_back(s * n_q);
    Work w = attention::work(
        AttentionArgs{.q_offsets = offsets, .kv_lengths = lengths, .views = views, .n_heads = n_heads});
    w.bytes -= 2 * 2 * double(n_queries());  // q and out have two bytes an element here, not four
    return w;
  }
};

__global__ void fill_cache_kernel(std::byte* pool, KvRows kv, const int32_t* tables, int stride, Problem p) {
  const int token = int(blockIdx.x), seq = int(blockIdx.y), half = p.n_kv_heads * kDim;
  for (int i = int(threadIdx.x); i < 2 * half; i += int(blockDim.x)) {
    const int which = i / half, head = i / kDim % p.n_kv_heads, d = i % kDim;
    std::byte* row = pool +
                     p.shape().row_bytes() * size_t(kv.row(tables + size_t(seq) * size_t(stride), which, token, head));
    const size_t from = p.row(seq, which, token, head);
    reinterpret_cast<bf16*>(row)[d] = p.element(from, d);
  }
}

template <class T>
cuda::Memory upload(const std::vector<T>& values, cuda::Stream& stream) {
  cuda::Memory host = cuda::Memory::pinned(std::max<size_t>(1, values.size()) * sizeof(T));
  std::copy(values.begin(), values.end(), host.as<T>());
  cuda::Memory device = cuda::Memory::device(host.size()).value();
  cuda::copy(device.data(), host.data(), host.size(), stream);
  stream.wait();
  return device;
}

// Shared by all memories of one problem: the queries, the step's tables except the blocks, and the expected results.
class Queries {
 public:
  Queries(const Problem& p, cuda::Stream& stream) : p_(p), stream_(stream) {
    const int n = p.n_seqs * p.n_q;
    std::vector<int32_t> offsets, lengths(size_t(p.n_seqs), p.length), seqs, positions;
    for (int s = 0; s <= p.n_seqs; ++s) offsets.push_back(s * p.n_q);
    for (int i = 0; i < n; ++i) seqs.push_back(i / p.n_q), positions.push_back(p.length - p.n_q + i % p.n_q);
    offsets_ = upload(offsets, stream), lengths_ = upload(lengths, stream);
    seqs_ = upload(seqs, stream), positions_ = upload(positions, stream);
    const int n_splits = cuda_splits(p.length, 0).end;  // per sequence
    std::vector<CudaSplit> splits;
    std::vector<int32_t> begins;
    for (int s = 0; s < p.n_seqs; ++s) {
      begins.push_back(s * n_splits);
      for (int i = 0; i < n_splits; ++i) splits.push_back({s, i});
    }
    n_splits_ = int(splits.size());
    splits_ = upload(splits, stream), split_begins_ = upload(begins, stream);
    q_ = cuda::Memory::device(p.n_queries() * sizeof(bf16)).value();
    out_ = cuda::Memory::device(q_.size()).value();
    fill_random(q_.data(), p.n_queries(), kQueries, kQueryScale, stream);
    workspace_ =
        cuda::Memory::device(std::max<size_t>(16, 4 * cuda_attention_workspace(n_splits_, p.n_heads, kDim))).value();
    std::vector<std::future<Truth>> truths;  // each takes seconds
    for (size_t token : {size_t{0}, size_t(n) / 3, size_t(n) - 1})
      truths.push_back(std::async(std::launch::async, [this, token] { return make(token); }));
    for (auto& truth : truths) truth_.push_back(truth.get());
  }
  const Problem& problem() const { return p_; }
  cuda::Stream& stream() const { return stream_; }

  CudaAttentionArgs args() const {
    return {.q = q_.data(),
            .out = out_.data(),
            .dtype = Dtype::bf16,
            .step = {.q_offsets = offsets_.as<int32_t>(),
                     .kv_lengths = lengths_.as<int32_t>(),
                     .token_seqs = seqs_.as<int32_t>(),
                     .positions = positions_.as<int32_t>(),
                     .splits = splits_.as<CudaSplit>(),
                     .split_begins = split_begins_.as<int32_t>(),
                     .n_splits = n_splits_,
                     .n_seqs = p_.n_seqs,
                     .n_tokens = p_.n_seqs * p_.n_q,
                     .max_q_tokens = p_.n_q,
                     .max_kv_length = p_.length},
            .n_heads = p_.n_heads,
            .scale = kScale,
            .workspace = workspace_.as<float>()};
  }

  // Compares the results of some tokens, in all heads, with double precision. Then fills `out` with NaN again.
  std::string check() const {
    std::string wrong;
    const size_t width = size_t(p_.n_heads) * kDim;
    cuda::Memory got = cuda::Memory::pinned(width * sizeof(bf16));
    for (const Truth& truth : truth_) {
      cuda::copy(got.data(), out_.as<bf16>() + truth.token * width, got.size(), stream_);
      stream_.wait();
      for (size_t i = 0; i < width && wrong.empty(); ++i) {
        // Weights are rounded to bf16 (2^-9 each) over values below 1, and the result is rounded once.
        const double error = std::abs(double(to_f32(got.as<bf16>()[i])) - double(truth.out[i]));
        if (!(error < 0.01))
          wrong = "token " + std::to_string(truth.token) + ", element " + std::to_string(i) +
                  " differs from the reference by " + std::to_string(error);
      }
    }
    cuda::fill(out_.data(), 0xff, out_.size(), stream_);
    return wrong;
  }

 private:
  static constexpr float kScale = 0.088388348f;  // 1 / sqrt(128)
  struct Truth {
    size_t token;
    std::vector<float> out;
  };
  Truth make(size_t token) const {
    const size_t width = size_t(p_.n_heads) * kDim;
    const int seq = int(token) / p_.n_q, length = p_.length - p_.n_q + int(token) % p_.n_q + 1;
    const KvLayout layout{p_.shape(), KvOrder::layer_major, length, 1};
    const KvView view{nullptr, &layout, nullptr, 0};
    std::vector<float> q(width);
    for (size_t i = 0; i < width; ++i) q[i] = to_f32(p_.query(token * width + i));
    Truth truth{token, std::vector<float>(width)};
    const int32_t offsets[] = {0, 1}, lengths[] = {length};
    attention_reference_over(
        AttentionArgs{.q = q.data(),
                      .out = truth.out.data(),
                      .q_offsets = offsets,
                      .kv_lengths = lengths,
                      .views = {&view, 1},
                      .n_heads = p_.n_heads,
                      .scale = kScale},
        [&](int, int kv, int t, int head, int d) { return double(to_f32(p_.element(p_.row(seq, kv, t, head), d))); });
    return truth;
  }

  Problem p_;
  cuda::Stream& stream_;
  cuda::Memory q_, out_, offsets_, lengths_, seqs_, positions_, splits_, split_begins_, workspace_;
  int n_splits_ = 0;
  std::vector<Truth> truth_;
};

// Values for the `block_tokens` of a Cache that has no blocks.
constexpr int kContiguous = 0;
constexpr int kPageGroups = -1;  // vAttention: contiguous addresses over groups in random order

// The KV of a problem in one memory. Blocks are in random order.
class Cache {
 public:
  Cache(const Queries& queries, int block_tokens) : queries_(queries), args_(queries.args()) {
    const Problem& p = queries.problem();
    const bool contiguous = block_tokens <= 0;
    const size_t token = size_t(p.n_kv_heads) * p.shape().row_bytes();
    int block = contiguous ? p.length : block_tokens;
    if (block_tokens == kPageGroups) {  // a slot is a whole number of groups
      const size_t step = std::lcm(cuda::vmm::granularity(), token);
      block = int((size_t(p.length) * token + step - 1) / step * step / token);
    }
    const int per_seq = (p.length + block - 1) / block;
    args_.layout = {p.shape(), KvOrder::layer_major, block, p.n_seqs * per_seq};
    Random random(7);
    auto shuffled = [&](size_t n) {
      std::vector<int32_t> order(n);
      std::iota(order.begin(), order.end(), 0);
      for (size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
      return order;
    };
    table_ = upload(shuffled(size_t(p.n_seqs) * size_t(per_seq)), queries.stream());
    if (block_tokens == kPageGroups) {
      const size_t group = cuda::vmm::granularity(), bytes = size_t(p.length) * token;
      const int per_plane = int((bytes + group - 1) / group);
      const std::vector<int32_t> order = shuffled(size_t(2 * p.n_seqs * per_plane));
      groups_ = make_cuda_page_groups({.group_bytes = group, .n_groups = int(order.size())}).value();
      range_ = groups_->reserve(args_.layout.pool_bytes()).value();
      for (int i = 0; i < int(order.size()); ++i) {
        const size_t slot = args_.layout.offset(i / per_plane % p.n_seqs, 0, i / per_plane / p.n_seqs, 0, 0);
        XPYD_CHECK(range_->map(slot + size_t(i % per_plane) * group, order[size_t(i)], 1).ok());
      }
      args_.pool = range_->data();
    } else {
      pool_ = cuda::Memory::device(args_.layout.pool_bytes()).value();
      args_.pool = pool_.data();
    }
    args_.step.block_tables = table_.as<int32_t>();
    std::vector<int32_t> begins;
    for (int s = 0; s < p.n_seqs; ++s) begins.push_back(s * per_seq);
    table_begins_ = upload(begins, queries.stream());
    args_.step.table_begins = table_begins_.as<int32_t>();
    args_.step.contiguous = contiguous;
    cuda::launch(fill_cache_kernel, "fill_cache", cuda::Shape{dim3(unsigned(p.length), unsigned(p.n_seqs)), dim3(256)},
                 queries.stream(), args_.pool, args_.layout.rows(0, contiguous), table_.as<const int32_t>(), per_seq,
                 p);
  }
  const CudaAttentionArgs& args() const { return args_; }

  Case make_case(const CudaAttentionVariant& variant, const std::string& name, Limit limit) const {
    return {.name = name,
            .run = [this, run = variant.run] { run(args_, queries_.stream()); },
            .check = [this] { return queries_.check(); },
            .work = queries_.problem().work(),
            .limit = limit};
  }

 private:
  const Queries& queries_;
  CudaAttentionArgs args_;
  cuda::Memory pool_, table_, table_begins_;
  std::shared_ptr<PageGroups> groups_;
  std::unique_ptr<VirtualRange> range_;
};

// Whether a variant supports these arguments. If not, prints the reason.
bool takes(const CudaAttentionVariant& variant, const CudaAttentionArgs& args, const cuda::Card& card,
           const std::string& what) {
  const char* why = variant.refuses(args, card);
  if (why) std::printf("%-44s refused: %s\n", (std::string(variant.name) + " " + what).c_str(), why);
  return why == nullptr;
}

// The time that another implementation took for the same on this card, minutes before and in another process: a row of
// experiments/gpu/sdpa.py, "yardstick,backend,shape,ms,tflops,versions".
struct Yardstick {
  std::string name;
  double seconds, gflops;
};
std::vector<Yardstick> read_yardsticks(const std::string& file, const std::string& shape) {
  std::vector<Yardstick> rows;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string field; std::getline(words, field, ',');) fields.push_back(field);
    if (fields.size() < 6 || !fields[2].starts_with(shape + " ")) continue;
    const double ms = std::atof(fields[3].c_str());
    if (ms > 0)
      rows.push_back({fields[1] + " " + fields[2] + ", " + fields[5], 1e-3 * ms, 1e3 * std::atof(fields[4].c_str())});
  }
  return rows;
}

std::string shape_name(const Problem& p, const char* phase) {
  return std::string(phase) + " " + (p.n_seqs > 1 ? std::to_string(p.n_seqs) + " x " : "") + std::to_string(p.length);
}

// Variants run one after the other, the newest last, each over all memories. So a fault in one keeps the rows of the
// others.
using Variant = CudaAttentionVariant;
bool slow(const Variant& v) { return v.name == std::string("naive"); }  // and not compared with others

// Cases for `v` over another memory, compared with contiguous slots.
std::vector<Case> beside_slots(const Variant& v, const Cache& contiguous, const Cache& other, const std::string& shape,
                               const std::string& memory) {
  const std::string name = v.name + (" " + shape), on_slots = name + " contiguous";
  std::vector<Case> cases = {contiguous.make_case(v, on_slots, Limit::copy),
                             other.make_case(v, name + " " + memory, Limit::copy)};
  cases[0].reported = false;  // once is enough
  cases[1].versus = on_slots;
  return cases;
}

// Reports our `cases`, which took `ours` seconds, beside the fastest backend of `who` with contiguous K and V.
void beside_yardsticks(Rounds& rounds, const std::vector<Yardstick>& others, const char* who, double target,
                       const std::vector<Case>& cases, const std::vector<double>& ours) {
  const Yardstick* best = nullptr;
  for (const Yardstick& y : others)
    if (y.name.starts_with(who) && y.name.find("page groups") == std::string::npos &&
        (!best || y.seconds < best->seconds))
      best = &y;
  for (size_t i = 0; best && i < cases.size(); ++i) {
    if (!(ours[i] > 0) || !cases[i].reported) continue;
    const double share = best->seconds / ours[i];
    rounds.bench().report({.name = cases[i].name,
                           .measure = std::string("x ") + who + "'s best",
                           .share = share,
                           .share_p10 = share,
                           .share_p90 = share,
                           .target = target});
  }
}
std::vector<Yardstick> report_yardsticks(Rounds& rounds, const std::string& file, const std::string& shape) {
  std::vector<Yardstick> others = read_yardsticks(file, shape);
  for (const Yardstick& y : others) rounds.bench().report({.name = y.name, .seconds = y.seconds, .gflops = y.gflops});
  return others;
}

}  // namespace

void decode_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks) {
  const Problem p = tiny ? Problem{2, 80, 1, 8, 1} : Problem{64, 8192, 1, 64, 8};
  const Queries queries(p, rounds.stream());
  const Cache contiguous(queries, kContiguous);
  const std::string shape = shape_name(p, "decode");
  const std::vector<Yardstick> others = report_yardsticks(rounds, yardsticks, shape);
  for (const Variant& v : cuda_attention_variants()) {
    if (v.phase != Variant::decode || !takes(v, contiguous.args(), card, shape)) continue;
    const bool contestant = v.name == std::string("split_mma");
    std::vector<Case> first = {contiguous.make_case(v, v.name + (" " + shape) + " contiguous", Limit::copy)};
    if (contestant) first[0].target = 0.85;
    beside_yardsticks(rounds, others, "FLASH", 0, first, rounds.measure(first));
    {
      const Cache groups(queries, kPageGroups);
      rounds.measure(beside_slots(v, contiguous, groups, shape, "vattention"));
    }
    for (int block : tiny ? std::vector{1, 16} : std::vector{1, 2, 4, 8, 16, 32, 64, 128, 256}) {
      if (slow(v) && block != 16) continue;
      const Cache paged(queries, block);
      std::vector<Case> cases = beside_slots(v, contiguous, paged, shape, "paged " + std::to_string(block));
      if (contestant && block == 16) cases[1].target = 0.85;
      rounds.measure(cases);
    }
  }
}

namespace {

void prefill_attention(Rounds& rounds, const cuda::Card& card, const Problem& p, const std::string& yardsticks) {
  const Queries queries(p, rounds.stream());
  const Cache contiguous(queries, kContiguous), groups(queries, kPageGroups), paged(queries, 16);
  const std::string shape = shape_name(p, "prefill");
  const std::vector<Yardstick> others = report_yardsticks(rounds, yardsticks, shape);
  for (const Variant& v : cuda_attention_variants()) {
    if (v.phase != Variant::prefill || !takes(v, paged.args(), card, shape)) continue;
    const std::string name = v.name + (" " + shape);
    if (slow(v) && p.length > 4096) {
      std::printf("%-44s not timed: this kernel would take minutes\n", name.c_str());
      continue;
    }
    std::vector<Case> cases = {
        contiguous.make_case(v, name + " contiguous", Limit::gemm),
        paged.make_case(v, name + " paged 16", Limit::gemm),
        groups.make_case(v, name + " vattention", Limit::gemm),
    };
    if (v.name == std::string("flash_wgmma")) cases[0].target = cases[1].target = 0.65;
    cases[1].versus = cases[2].versus = cases[0].name;
    const std::vector<double> ours = rounds.measure(cases);
    beside_yardsticks(rounds, others, "CUDNN", 0.75, cases, ours);
    beside_yardsticks(rounds, others, "FLASH", 1, cases, ours);
  }
  rounds.bench().write_files();
}

}  // namespace

void prefill_attention(Rounds& rounds, const cuda::Card& card, bool tiny, const std::string& yardsticks) {
  for (int length : tiny ? std::vector{96} : std::vector{8192, 16384})
    prefill_attention(rounds, card, tiny ? Problem{1, 96, 96, 2, 1} : Problem{1, length, length, 32, 8}, yardsticks);
}

}  // namespace xpyd::experiments::gpu
