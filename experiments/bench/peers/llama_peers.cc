// Our whole steps beside llama.cpp's, interleaved in one process. `make bench-peers` runs it.
//
// Expected: a decode step at batch 1 reads every weight once, so with equal widths both sides are as fast as memory. A
// prompt of 128 tokens is .26 TFLOP, and only the share of the FMA peak differs. Between them, at batch 8 to 32, a
// library without a product for few rows loses time.
//
// Both sides do the same work:
//  - The same function. GGUF files are written from our dummy weights (bf16), and the logits of 20 tokens are compared
//    before timing. A q4_0 file has q4_0 in every matrix, the embedding and the head included.
//  - KV of 2 bytes an element: f16 there, bf16 here. Their KV is one computed sequence, copied to all others, each with
//    a stream of its own (with `kv_unified` every row would read the KV of all sequences). Ours is random.
//  - A decode step is one token of each sequence with all its logits. Prompts run in steps of 512 tokens with the
//    logits of the last token, as is llama.cpp's default and ours.
//  - Their threads are pinned like ours and stop spinning when a step ends, so they do not run during our steps.
// llama.cpp's weights are in pages of 4 KiB, as it asks for no others. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 gives it
// huge pages.
#include <ggml-cpu.h>
#include <gguf.h>
#include <llama.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <list>
#include <optional>

#include "experiments/bench/harness.h"
#include "experiments/bench/model_case.h"
#include "experiments/bench/on_cpus.h"
#include "model/weights/weights.h"

namespace xpyd::experiments {
namespace {

// One row for each pair: a type of theirs, and ours of the same width where we have it.
struct Pair {
  const char* theirs;
  ggml_type type;
  double distance;  // largest |a - b| / |b| of the logits, from the rounding of the file's weights
  const char* ours;
  LoadOptions load;
};
const Pair kPairs[] = {
    {"bf16", GGML_TYPE_BF16, 0.02, "bf16", {.dtype = Dtype::bf16, .dummy = true}},
    {"f16", GGML_TYPE_F16, 0.02, "f16", {.dtype = Dtype::bf16, .weight_dtype = Dtype::f16, .dummy = true}},
    {"q8_0",
     GGML_TYPE_Q8_0,
     0.07,
     "int8",
     {.dtype = Dtype::bf16, .weight_dtype = Dtype::int8, .weight_group = 32, .dummy = true}},
    {"q4_0",
     GGML_TYPE_Q4_0,
     0.7,
     "int4",
     {.dtype = Dtype::bf16, .weight_dtype = Dtype::int4, .weight_group = 32, .dummy = true}},
};

// Work in one context: a prompt of `tokens` if `prefill`, then decode steps of each batch size at that context length.
struct Shape {
  int tokens;
  bool prefill;
  std::vector<int> decode, decode_too = {};  // decode_too: only with --all
  bool always = true;                        // false: only with --all
};
const Shape kShapes[] = {{128, true, {}},
                         {512, false, {1, 8}, {16, 32}},
                         {512, true, {}, {}, false},
                         {2048, true, {}, {}, false},
                         {4096, false, {1, 8, 16, 32}, {}, false}};
constexpr int kChunk = 512;

void check(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "bench-peers: llama.cpp: %s\n", what.c_str());
  std::exit(2);
}

// Our weights as a GGUF file, laid out as llama.cpp's converter does it.
class GgufFile {
 public:
  GgufFile(const Weights& w, ggml_type type) : type_(type) {
    const model::ModelConfig& c = w.config;
    gguf_set_val_str(file_, "general.architecture", "llama");
    gguf_set_val_str(file_, "tokenizer.ggml.model", "no_vocab");
    const std::pair<const char*, int> numbers[] = {{"vocab_size", c.vocab},
                                                   {"context_length", c.max_position},
                                                   {"embedding_length", c.hidden},
                                                   {"block_count", c.n_layers},
                                                   {"feed_forward_length", c.intermediate},
                                                   {"attention.head_count", c.n_heads},
                                                   {"rope.dimension_count", c.head_dim},
                                                   {"attention.head_count_kv", c.n_kv_heads}};
    for (auto& [key, value] : numbers) gguf_set_val_u32(file_, ("llama." + std::string(key)).c_str(), uint32_t(value));
    gguf_set_val_f32(file_, "llama.attention.layer_norm_rms_epsilon", float(c.rms_eps));
    gguf_set_val_f32(file_, "llama.rope.freq_base", float(c.rope_theta));
    // The divisors that RoPE scaling applies to the frequencies.
    std::vector<float> factors;
    for (size_t i = 0; i < w.rope_freqs.size(); ++i)
      factors.push_back(float(std::pow(c.rope_theta, -2.0 * double(i) / c.head_dim) / w.rope_freqs[i]));
    vector("rope_freqs.weight", factors);
    vector("output_norm.weight", w.final_norm);
    matrix("token_embd.weight", c.vocab, c.hidden, [&](int row, float* out) {
      for (int i = 0; i < c.hidden; ++i)
        out[i] = to_f32(w.embedding.as<bf16>()[size_t(row) * size_t(c.hidden) + size_t(i)]);
    });
    const int q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim, half = c.head_dim / 2;
    for (int l = 0; l < c.n_layers; ++l) {
      const model::LayerWeights& layer = w.layers[size_t(l)];
      const std::string name = "blk." + std::to_string(l) + ".";
      auto rows = [](const model::PackedMatrix& m, int first) {
        return [&m, first, packed = std::vector<bf16>(size_t(m.k))](int row, float* out) mutable {
          unpack_rows(m, first + row, first + row + 1, reinterpret_cast<std::byte*>(packed.data()), packed.size() * 2);
          std::transform(packed.begin(), packed.end(), out, to_f32);
        };
      };
      // Their RoPE rotates neighbouring elements; ours rotates the halves of a head.
      auto turned = [&](int first) {
        return [read = rows(layer.qkv, first), half](int row, float* out) mutable {
          const int in_head = row % (2 * half);
          read(row - in_head + in_head % 2 * half + in_head / 2, out);
        };
      };
      vector(name + "attn_norm.weight", layer.attention_norm);
      vector(name + "ffn_norm.weight", layer.mlp_norm);
      matrix(name + "attn_q.weight", q, c.hidden, turned(0));
      matrix(name + "attn_k.weight", kv, c.hidden, turned(q));
      matrix(name + "attn_v.weight", kv, c.hidden, rows(layer.qkv, q + kv));
      matrix(name + "attn_output.weight", c.hidden, q, rows(layer.o, 0));
      matrix(name + "ffn_gate.weight", c.intermediate, c.hidden, rows(layer.gate_up, 0));
      matrix(name + "ffn_up.weight", c.intermediate, c.hidden, rows(layer.gate_up, c.intermediate));
      matrix(name + "ffn_down.weight", c.hidden, c.intermediate, rows(layer.down, 0));
    }
  }
  ~GgufFile() {
    gguf_free(file_);
    ggml_free(tensors_);
  }
  void write(const std::string& path) {
    const std::string unfinished = path + ".unfinished";
    check(gguf_write_to_file(file_, unfinished.c_str(), false), "cannot write " + unfinished);
    std::filesystem::rename(unfinished, path);
  }

 private:
  void add(ggml_tensor* tensor, const std::string& name) {
    ggml_set_name(tensor, name.c_str());
    data_.emplace_back(ggml_nbytes(tensor));
    tensor->data = data_.back().data();
    gguf_add_tensor(file_, tensor);
  }
  void vector(const std::string& name, const std::vector<float>& values) {
    add(ggml_new_tensor_1d(tensors_, GGML_TYPE_F32, int64_t(values.size())), name);
    std::memcpy(data_.back().data(), values.data(), values.size() * sizeof(float));
  }
  template <class ReadRow>
  void matrix(const std::string& name, int n, int k, ReadRow read) {
    add(ggml_new_tensor_2d(tensors_, type_, k, n), name);
    std::vector<float> row(static_cast<size_t>(k));
    for (int r = 0; r < n; ++r) {
      read(r, row.data());
      ggml_quantize_chunk(type_, row.data(), data_.back().data() + ggml_row_size(type_, k) * size_t(r), 0, 1, k,
                          nullptr);
    }
  }

  ggml_type type_;
  gguf_context* file_ = gguf_init_empty();
  ggml_context* tensors_ = ggml_init(
      {.mem_size = 4096 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true});
  std::vector<std::vector<std::byte>> data_;
};

// n threads of llama.cpp, one on each of the first n cpus.
class Threads {
 public:
  // `all` are the cpus of the process. The bench has already pinned the calling thread to one of them.
  Threads(int n_threads, std::span<const int> all) : n(n_threads), cpus(all.begin(), all.begin() + n_threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    for (int cpu : cpus) params.cpumask[cpu] = true;
    params.strict_cpu = params.paused = true;
    pool = ggml_threadpool_new(&params);
    check(pool, "cannot create the threads");
  }
  ~Threads() { ggml_threadpool_free(pool); }
  Threads(const Threads&) = delete;
  const int n;
  const std::vector<int> cpus;
  ggml_threadpool* pool;
};

// One context for `batch` sequences of up to `context` tokens.
class Theirs {
 public:
  Theirs(llama_model* model, int batch, int context, std::span<const int32_t> tokens)
      : tokens_(tokens.begin(), tokens.end()) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = uint32_t(batch * context);
    params.n_seq_max = uint32_t(batch);
    params.n_batch = params.n_ubatch = kChunk;
    params.kv_unified = false;
    context_ = llama_init_from_model(model, params);
    check(context_, "cannot create the context");
    batch_ = llama_batch_init(kChunk, 0, 1);
  }
  ~Theirs() {
    llama_batch_free(batch_);
    llama_free(context_);
  }
  Theirs(const Theirs&) = delete;

  void use(Threads& threads) {
    threads_ = &threads;
    llama_attach_threadpool(context_, threads.pool, threads.pool);
    llama_set_n_threads(context_, threads.n, threads.n);
  }
  void prefill(int prompt) {
    llama_memory_clear(memory(), false);
    for (int done = 0; done < prompt; done += batch_.n_tokens) {
      batch_.n_tokens = std::min(kChunk, prompt - done);
      for (int i = 0; i < batch_.n_tokens; ++i) set(i, 0, done + i, done + i + 1 == prompt);
      step();
    }
  }
  // Prepares decode(): gives each of `batch` sequences `length` - 1 tokens, computed once.
  void fill(int batch, int length) {
    if (llama_memory_seq_pos_max(memory(), 0) + 1 < length - 1) prefill(length - 1);
    llama_memory_seq_rm(memory(), 0, length - 1, -1);
    for (int s = 1; s < batch; ++s) llama_memory_seq_cp(memory(), 0, s, -1, -1);
  }
  void decode(int batch, int length) {
    batch_.n_tokens = batch;
    for (int s = 0; s < batch; ++s) set(s, s, length - 1, true);
    step();
    for (int s = 0; s < batch; ++s) llama_memory_seq_rm(memory(), s, length - 1, -1);
  }
  const float* logits(int i) { return llama_get_logits_ith(context_, i); }  // of token i of the last step

 private:
  llama_memory_t memory() { return llama_get_memory(context_); }
  void set(int i, int sequence, int position, bool logits) {
    batch_.token[i] = tokens_[size_t(position)];
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = logits;
  }
  void step() {
    const OnCpus here(threads_->cpus);  // llama_decode also pins the calling thread and leaves it pinned
    const int error = llama_decode(context_, batch_);
    check(error == 0, "llama_decode returns " + std::to_string(error));
    llama_synchronize(context_);
    ggml_threadpool_pause(threads_->pool);
  }

  const std::vector<int32_t> tokens_;
  llama_context* context_;
  llama_batch batch_;
  Threads* threads_ = nullptr;
};

// "" if the logits of both sides nearly agree after 20 tokens.
std::string compare_logits(llama_model* model, Threads& threads, ModelCase& ours, double limit) {
  constexpr int kTokens = 20;
  if (std::string wrong = ours.check(); !wrong.empty()) return wrong;
  Theirs theirs(model, 1, 256, ours.tokens());
  theirs.use(threads);
  ours.prefill(kTokens, kTokens);
  theirs.prefill(kTokens);
  const float* other = theirs.logits(kTokens - 1);
  double difference = 0, size = 0;
  for (size_t i = 0; i < ours.logits().size(); ++i) {
    difference += std::pow(double(ours.logits()[i]) - double(other[i]), 2);
    size += std::pow(double(ours.logits()[i]), 2);
  }
  const double distance = std::sqrt(difference / size);
  std::printf("relative difference of xpyd's and llama.cpp's logits: %.4f (at most %.2f)\n", distance, limit);
  std::fflush(stdout);
  return distance <= limit ? "" : "the relative difference of the logits is " + std::to_string(distance);
}

void compare(Bench& bench, const Pair& pair, std::span<const int> cpus, bool all) {
  const int most = bench.max_threads();
  check(most <= int(cpus.size()), "--threads " + std::to_string(most) + ": expected at most the " +
                                      std::to_string(cpus.size()) + " CPUs that this process may use");
  const std::string path = std::string(XPYD_LLAMA_FILES) + "/llama-1b-" + pair.theirs + ".gguf";
  if (!std::filesystem::exists(path)) {
    std::printf("writing %s; later runs reuse it\n", path.c_str());
    std::fflush(stdout);
    GgufFile(*llama_1b({.dtype = Dtype::bf16, .dummy = true}, bench.team(most)), pair.type).write(path);
  }
  std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
      llama_model_load_from_file(path.c_str(), llama_model_default_params()), llama_model_free);
  check(model != nullptr, "cannot load " + path);
  const auto weights = llama_1b(pair.load, bench.team(most));
  std::vector<int> teams = {most};
  if (most > 1) teams.push_back(1);
  std::string wrong;
  {
    Threads threads(most, cpus);
    ModelCase ours(weights, bench.team(most), kChunk, 1, kChunk, Dtype::bf16);
    wrong = compare_logits(model.get(), threads, ours, pair.distance);
  }
  for (const Shape& shape : kShapes) {
    if (!shape.always && !all) continue;
    std::vector<int> batches = shape.decode;
    if (all) batches.insert(batches.end(), shape.decode_too.begin(), shape.decode_too.end());
    const int tokens = shape.tokens, most_sequences = batches.empty() ? 1 : batches.back();
    std::list<Threads> pools;  // the context pauses the one before when it gets another
    std::optional<Theirs> theirs;
    for (int n : teams) {
      ModelCase ours(weights, bench.team(n), tokens, most_sequences, kChunk, Dtype::bf16);
      Threads& threads = pools.emplace_back(n, cpus);
      if (!theirs) theirs.emplace(model.get(), most_sequences, tokens, ours.tokens());
      theirs->use(threads);
      const auto measure = [&](const std::string& what, std::function<void()> run_theirs,
                               std::function<void()> run_ours, int rounds, double target) {
        const std::string other = std::string("llama.cpp ") + pair.theirs + ", " + what;
        const auto right = [&] { return wrong; };
        bench.measure({{.name = other, .n_threads = n, .run = run_theirs, .check = right, .limit = Limit::none},
                       {.name = std::string("xpyd ") + pair.ours + ", " + what,
                        .n_threads = n,
                        .run = run_ours,
                        .check = right,
                        .limit = Limit::none,
                        .target = target,
                        .versus = {other}}},
                      rounds);
      };
      if (shape.prefill && (n == most || all))
        measure(
            "prefill " + std::to_string(tokens), [&] { theirs->prefill(tokens); },
            [&] { ours.prefill(tokens, kChunk); }, kLeastRounds, 1.25);
      if (!batches.empty()) theirs->fill(most_sequences, tokens);
      for (int batch : batches) {
        ours.set(batch, 1, tokens);
        measure(
            "decode " + std::to_string(batch) + " x " + std::to_string(tokens), [&] { theirs->decode(batch, tokens); },
            [&] { ours.run(); }, 0, batch >= 8 ? 1.5 : 1.05);
      }
    }
  }
}

int run_llama_peers(int argc, char** argv) {
  const auto last = std::remove_if(argv + 1, argv + argc, [](const char* a) { return std::string_view(a) == "--all"; });
  const bool all = last != argv + argc;
  const std::vector<int> cpus = usable_cpus();  // read before the bench pins this thread
  for (const Pair& pair : kPairs)
    register_bench(pair.theirs, [&pair, &cpus, all](Bench& bench) { compare(bench, pair, cpus, all); });
  auto options = parse_bench_options(int(last - argv), argv);
  if (!options.ok()) {
    std::fprintf(stderr, "bench-peers: %s\n--all measures every shape\n", options.error().message.c_str());
    return 2;
  }
  options.value().settle_ms = 10;
  options.value().sample_ms = 250;
  options.value().max_taken = 0.02;
  options.value().row_s = 5;  // 4 widths with 5 measurements of 2 rows: 200 s
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  Bench bench(options.value());
  return bench.run_registered();
}

}  // namespace
}  // namespace xpyd::experiments

int main(int argc, char** argv) { return xpyd::experiments::run_llama_peers(argc, argv); }
