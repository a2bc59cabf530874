// xpyd_gpu_report [--tiny] [--json FILE] [--csv FILE]: everything that only a GPU can say, in one
// run of a few minutes: the card's peaks, attention kernels, products, whole steps. `make
// gpu-report` runs it after the tests.
//
// The arithmetic, on an H200 (4.8 TB/s and 990 TFLOP/s on paper; the shares below use what the run
// measures):
//   prefill 16K causal, 32 heads of 128: 4 * 16384^2 / 2 * 32 * 128 = 2.2 TFLOP, 2.8 ms at 790
//   TFLOP/s. decode 64 x 8K, 8 KV heads of 128, bf16: 64 * 8192 * 8 * 128 * 2 * 2 = 2.1 GB, 0.5 ms
//   at 4.3 TB/s. 8B decode, batch 1: 16 GB of weights, 3.7 ms. Batch 64 with 1K of context each:
//   + 8.6 GB of KV, 5.7 ms. 8B prefill of 8K: 2 * 7.5e9 * 8192 = 123 TFLOP + attention 17, 0.18 s.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "allocator/kv_layout.h"
#include "attention/attention.h"
#include "attention/attention_cuda.h"
#include "base/random.h"
#include "experiments/gpu/rounds.h"
#include "model/model_cuda.h"
#include "model/weights.h"

namespace xpyd::gpu {
namespace {

template <class T>
cuda::Memory upload(const std::vector<T>& values, cuda::Stream& stream) {
  cuda::Memory host = cuda::Memory::pinned(std::max<size_t>(1, values.size()) * sizeof(T));
  std::memcpy(host.data(), values.data(), values.size() * sizeof(T));
  cuda::Memory device = cuda::Memory::device(host.size()).value();
  cuda::copy(device.data(), host.data(), host.size(), stream);
  stream.wait();
  return device;
}

std::vector<bf16> random_bf16(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<bf16> values(n);
  for (bf16& v : values) v = to_bf16(float(random.uniform() * 2 - 1));
  return values;
}

// Attention of n_seqs sequences of `length` tokens, the last `n_q` of which ask, over blocks in
// random order.
class AttentionSetting {
 public:
  AttentionSetting(int n_seqs, int length, int n_q, int n_heads, int n_kv_heads, int block_tokens,
                   bool contiguous, cuda::Stream& stream)
      : n_seqs_(n_seqs), length_(length), n_q_(n_q), n_heads_(n_heads), stream_(stream) {
    const int block = contiguous ? length : block_tokens, per_seq = (length + block - 1) / block;
    layout_ = {{1, n_kv_heads, 128, Dtype::bf16}, KvOrder::layer_major, block, n_seqs * per_seq};
    Random random(7);
    tables_.resize(size_t(n_seqs) * size_t(per_seq));
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i] = int32_t(i);
    for (size_t i = tables_.size(); i > 1; --i) std::swap(tables_[i - 1], tables_[random.below(i)]);
    // One pseudo-random block of values, repeated: making gigabytes on the host would take longer
    // than the run.
    pool_host_ =
        random_bf16(std::min<size_t>(layout_.pool_bytes() / sizeof(bf16), size_t(1) << 22), 3);
    pool_ = cuda::Memory::device(layout_.pool_bytes()).value();
    cuda::Memory piece = upload(pool_host_, stream);
    for (size_t done = 0; done < layout_.pool_bytes(); done += piece.size())
      cuda::copy(pool_.data() + done, piece.data(),
                 std::min(piece.size(), layout_.pool_bytes() - done), stream);
    stream.wait();
    const int n = n_seqs * n_q;
    q_host_ = random_bf16(size_t(n) * size_t(n_heads) * 128, 5);
    // Large queries: few tokens have most of the weight, so that a lost tile or split is seen in
    // the result.
    for (bf16& x : q_host_) x = to_bf16(16 * to_f32(x));
    std::vector<int32_t> offsets, lengths(size_t(n_seqs), length), seqs, positions;
    for (int s = 0; s <= n_seqs; ++s) offsets.push_back(s * n_q);
    for (int i = 0; i < n; ++i)
      seqs.push_back(i / n_q), positions.push_back(length - n_q + i % n_q);
    q_ = upload(q_host_, stream);
    out_ = cuda::Memory::device(q_.size()).value();
    offsets_ = upload(offsets, stream), lengths_ = upload(lengths, stream),
    seqs_ = upload(seqs, stream);
    positions_ = upload(positions, stream), device_tables_ = upload(tables_, stream);
    workspace_ = cuda::Memory::device(std::max<size_t>(4, 4 * cuda_attention_workspace(
                                                                  n_seqs, n, n_heads, 128, length)))
                     .value();
    args_ = {.q = q_.data(),
             .out = out_.data(),
             .dtype = Dtype::bf16,
             .pool = pool_.data(),
             .layout = layout_,
             .step = {.q_offsets = offsets_.as<int32_t>(),
                      .kv_lengths = lengths_.as<int32_t>(),
                      .token_seqs = seqs_.as<int32_t>(),
                      .positions = positions_.as<int32_t>(),
                      .block_tables = device_tables_.as<int32_t>(),
                      .table_stride = per_seq,
                      .contiguous = contiguous,
                      .n_seqs = n_seqs,
                      .n_tokens = n,
                      .max_q_tokens = n_q,
                      .max_kv_length = length},
             .n_heads = n_heads,
             .scale = float(1 / std::sqrt(128.0)),
             .workspace = workspace_.as<float>()};
  }
  const CudaAttentionArgs& args() const { return args_; }

  Work work() const {
    KvView view{nullptr, &layout_, tables_.data(), 0};
    std::vector<KvView> views(size_t(n_seqs_), view);
    std::vector<int32_t> offsets, lengths(size_t(n_seqs_), length_);
    for (int s = 0; s <= n_seqs_; ++s) offsets.push_back(s * n_q_);
    AttentionArgs host{
        .q_offsets = offsets, .kv_lengths = lengths, .views = views, .n_heads = n_heads_};
    Work w = xpyd::work(host);
    w.bytes -= double(n_seqs_) * n_q_ * n_heads_ * 128 *
               4;  // q and out have two bytes an element here, not four
    return w;
  }

  // Some tokens, first to last, all heads, against double precision.
  std::string check() const {
    std::vector<bf16> got(q_host_.size());
    cuda::Memory host = cuda::Memory::pinned(out_.size());
    cuda::copy(host.data(), out_.data(), out_.size(), stream_);
    stream_.wait();
    std::memcpy(got.data(), host.data(), host.size());
    const size_t width = size_t(n_heads_) * 128, n = size_t(n_seqs_ * n_q_);
    std::vector<std::byte>& pool = mirror_;
    const size_t piece = pool_host_.size() * sizeof(bf16);
    for (size_t done = pool.size(); done < layout_.pool_bytes(); done += piece) {
      pool.resize(std::min(done + piece, layout_.pool_bytes()));
      std::memcpy(pool.data() + done, pool_host_.data(), pool.size() - done);
    }
    for (size_t token : {size_t{0}, n / 3, n - 1}) {
      const int seq = int(token) / n_q_, length = length_ - n_q_ + int(token) % n_q_ + 1;
      KvView view{pool.data(), &layout_,
                  tables_.data() + size_t(seq) * size_t(args_.step.table_stride), 0};
      std::vector<float> q(width), want(width);
      for (size_t i = 0; i < width; ++i) q[i] = to_f32(q_host_[token * width + i]);
      const int32_t offsets[] = {0, 1}, lengths[] = {length};
      attention_reference({.q = q.data(),
                           .out = want.data(),
                           .q_offsets = offsets,
                           .kv_lengths = lengths,
                           .views = {&view, 1},
                           .n_heads = n_heads_,
                           .scale = args_.scale});
      for (size_t i = 0; i < width; ++i) {
        // Weights rounded to bf16 (2^-9 each) over values below 1, and one rounding of the result.
        const double error = std::abs(double(to_f32(got[token * width + i])) - double(want[i]));
        if (!(error < 0.01))
          return "token " + std::to_string(token) + ", element " + std::to_string(i) + ": off by " +
                 std::to_string(error);
      }
    }
    return "";
  }

 private:
  int n_seqs_, length_, n_q_, n_heads_;
  cuda::Stream& stream_;
  KvLayout layout_;
  std::vector<int32_t> tables_;
  std::vector<bf16> pool_host_, q_host_;
  mutable std::vector<std::byte> mirror_;  // the pool on the host, made by the first check
  cuda::Memory pool_, q_, out_, offsets_, lengths_, seqs_, positions_, device_tables_, workspace_;
  CudaAttentionArgs args_;
};

void peaks(Rounds& rounds, Bench& bench, bool tiny) {
  auto row = [&](const char* name, double seconds, double gbps, double gflops) {
    bench.report({.name = name, .seconds = seconds, .gflops = gflops, .gbps = gbps});
  };
  row("copy on the card (read and written)", 0, rounds.copy_gbps(), 0);
  row("bf16 GEMM through cuBLASLt", 0, 0, 1e3 * rounds.gemm_tflops());
  const size_t bytes = size_t(tiny ? 1 : 256) << 20;
  cuda::Memory host = cuda::Memory::pinned(bytes), device = cuda::Memory::device(bytes).value();
  cuda::Stream& stream = rounds.stream();
  auto link = [&](void* to, const void* from) {
    return 1e-9 * double(bytes) / rounds.time([&] { cuda::copy(to, from, bytes, stream); }, 4);
  };
  row("pinned host to device", 0, link(device.data(), host.data()), 0);
  row("device to pinned host", 0, link(host.data(), device.data()), 0);
  auto small = [&] { cuda::fill(device.data(), 0, 4, stream); };
  row("one small operation on a stream", rounds.time(small, 1000), 0, 0);
  cuda::Graph graph = cuda::Graph::capture(stream, [&] {
    for (int i = 0; i < 100; ++i) small();
  });
  row("one small operation in a graph of 100", rounds.time([&] { graph.launch(stream); }, 20) / 100,
      0, 0);
}

void attention(Rounds& rounds, const cuda::Card& card, bool tiny) {
  auto cases_of = [&](const AttentionSetting& setting, CudaAttentionVariant::Phase phase,
                      const std::string& what, Limit limit, double target,
                      std::vector<Case>& cases) {
    for (const CudaAttentionVariant& v : cuda_attention_variants()) {
      if (v.phase != phase) continue;
      if (v.name == std::string("naive") && setting.args().step.max_q_tokens > 4096) {
        std::printf("%-60s not timed: it would take minutes\n", ("naive " + what).c_str());
        continue;
      }
      if (const char* why = v.refuses(setting.args(), card)) {
        std::printf("%-60s refused: %s\n", (std::string(v.name) + " " + what).c_str(), why);
        continue;
      }
      cases.push_back(
          {.name = std::string(v.name) + " " + what,
           .run = [&rounds, &setting, run = v.run] { run(setting.args(), rounds.stream()); },
           .check = [&setting] { return setting.check(); },
           .work = setting.work(),
           .limit = limit,
           .target = v.name == std::string("split_mma") ? target : 0});
    }
  };
  const int long_prompt = tiny ? 96 : 16384, batch = tiny ? 2 : 64, context = tiny ? 80 : 8192;
  const int heads = tiny ? 2 : 32;
  for (bool contiguous : {true, false}) {
    AttentionSetting setting(1, long_prompt, long_prompt, heads, std::max(1, heads / 4), 16,
                             contiguous, rounds.stream());
    std::vector<Case> cases;
    cases_of(setting, CudaAttentionVariant::prefill,
             "prefill " + std::to_string(long_prompt) + (contiguous ? " contiguous" : " paged 16"),
             Limit::gemm, 0, cases);
    rounds.measure(cases);
  }
  for (int block : tiny ? std::vector{0, 16} : std::vector{0, 1, 8, 16, 64, 256}) {
    AttentionSetting setting(batch, context, 1, tiny ? 8 : 64, tiny ? 1 : 8, std::max(block, 1),
                             block == 0, rounds.stream());
    std::vector<Case> cases;
    cases_of(setting, CudaAttentionVariant::decode,
             "decode " + std::to_string(batch) + " x " + std::to_string(context) +
                 (block ? " paged " + std::to_string(block) : " contiguous"),
             Limit::copy, 0.85, cases);
    rounds.measure(cases);
  }
}

// A model of an 8-billion-parameter Llama's shape with random weights.
void model(Rounds& rounds, const cuda::Card& card, bool tiny) {
  const char* dir = tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-8b";
  Result<ModelConfig> loaded = load_model_config(dir);
  XPYD_CHECK(loaded.ok(), loaded.ok() ? "" : loaded.error().message);
  const ModelConfig& config = loaded.value();
  std::shared_ptr<const CudaWeights> weights;
  {
    ThreadTeam team(tiny ? 1 : 16);
    auto host = load_weights(dir, config, {.dtype = Dtype::bf16, .dummy = true}, team);
    weights = upload_weights(*host.value(), rounds.stream()).value();
  }
  const int prompt = tiny ? 24 : 8192, batch = tiny ? 4 : 64, context = tiny ? 32 : 1024,
            slots = batch;
  CudaModelOptions options{.max_step_tokens = prompt,
                           .max_logits = batch,
                           .max_seqs = batch,
                           .max_kv_length = std::max(prompt, context),
                           .max_table_entries = 1};
  // Not the defaults until this report has verified them: the ones that the targets are about.
  options.prefill_attention = "flash_mma";
  options.decode_attention = "split_mma";
  auto made = make_cuda_llama(weights, card, rounds.stream(), options);
  XPYD_CHECK(made.ok(), made.ok() ? "" : made.error().message);
  CudaModel& llama = *made.value();
  std::printf("%s", llama.describe().c_str());
  KvLayout layout{kv_shape(config, Dtype::bf16), KvOrder::layer_major, std::max(prompt, context),
                  slots};
  cuda::Memory pool = cuda::Memory::device(layout.pool_bytes()).value();
  cuda::fill(pool.data(), 0, layout.pool_bytes(), rounds.stream());
  struct Step {
    std::vector<int32_t> ids, offsets{0}, lengths, rows;
    std::vector<KvView> views;
  };
  auto make = [&](int n_seqs, int n_q, int length) {
    Step s;
    for (int i = 0; i < n_seqs; ++i) {
      for (int t = 0; t < n_q; ++t) s.ids.push_back((i * 131 + t * 7) % config.vocab);
      s.offsets.push_back(int32_t(s.ids.size()));
      s.lengths.push_back(length);
      s.rows.push_back(int32_t(s.ids.size()) - 1);
      s.views.push_back({pool.data(), &layout, nullptr, i});
    }
    return s;
  };
  for (auto [n_seqs, n_q, length, name, target] :
       {std::tuple{1, 1, context, "8B decode, batch 1", 0.85},
        {batch, 1, context, "8B decode, full batch", 0.87},
        {1, prompt, prompt, "8B prefill", 0.60}}) {
    Step s = make(n_seqs, n_q, length);
    StepInput input{.token_ids = s.ids,
                    .q_offsets = s.offsets,
                    .kv_lengths = s.lengths,
                    .views = s.views,
                    .logit_rows = s.rows};
    std::vector<Chosen> chosen(static_cast<size_t>(n_seqs));
    // Decoding: the next step is enqueued, with the tokens that this one will choose, before this
    // one is waited for.
    int under_way = 0, n_nans = 0;
    auto end = [&] {
      llama.end(chosen.data());
      for (const Chosen& c : chosen) n_nans += c.nan_logits;
      --under_way;
    };
    auto next = [&] {
      if (n_q == 1 && under_way > 0)
        for (int i = 0; i < n_seqs; ++i) s.ids[size_t(i)] = -1 - i;
      llama.begin(input, {});
      if (++under_way > (n_q == 1 ? 1 : 0)) end();
    };
    auto wrong = [&] {
      while (under_way > 0) end();
      return n_nans ? std::to_string(n_nans) + " NaN among the logits" : std::string();
    };
    rounds.measure({{.name = name,
                     .run = next,
                     .check = wrong,
                     .work = llama.work(input),
                     .limit = Limit::roofline,
                     .target = target}});
    if (!wrong().empty()) rounds.found_wrong(name, wrong());
  }
  std::printf("%s", llama.describe().c_str());
}

}  // namespace

int run(int argc, char** argv) {
  bool tiny = argc > 1 && std::string(argv[1]) == "--tiny";
  if (tiny) --argc, ++argv;
  auto options = parse_bench_options(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "xpyd_gpu_report: %s\n", options.error().message.c_str());
    return 2;
  }
  auto card = cuda::open();
  if (!card) {
    std::fprintf(stderr, "xpyd_gpu_report: %s\n", card.error().message.c_str());
    return 1;
  }
  const cuda::Card& c = card.value();
  Bench bench(options.value());
  std::printf("%s, compute capability %d.%d, %d SMs, %zu MiB, driver %d, runtime %d\n",
              c.name.c_str(), c.major, c.minor, c.n_sms, c.memory_bytes >> 20, c.driver, c.runtime);
  bench.print_conditions();
  Sizes sizes;
  if (tiny) sizes = {.copy_bytes = 1 << 16, .gemm_n = 32, .rounds = 2, .sample_seconds = 1e-9};
  Rounds rounds(bench, sizes);
  peaks(rounds, bench, tiny);
  bench.write_files();  // after each part: what is known stays when a later part cannot run
  attention(rounds, c, tiny);
  bench.write_files();
  model(rounds, c, tiny);
  bench.write_files();
  return rounds.all_right() ? 0 : 1;
}

}  // namespace xpyd::gpu
