// Tests a block of experts on CUDA against the CPU's, which moe_test.cc compares with double precision.
#include "model/cuda/experts_cuda.h"
#include "model/moe/moe.h"
#include "tests/model/cuda_fixture.h"
#include "tests/model/llama_cases.h"

namespace xpyd::testing::experts_cuda_test {
namespace {

// `shape` has the sizes of a Qwen3-MoE. Bound: largest difference for outputs whose size is about 1.
void check(const std::string& shape, Dtype dtype, int n, double bound) {
  CAPTURE(shape, dtype_name(dtype));
  ThreadTeam team(1);
  cuda::Stream stream;
  Random random(3);
  const ModelConfig config = parse_model_config(R"({"model_type": "qwen3_moe", "num_hidden_layers": 1, "head_dim": 8,
      "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 16, "rope_theta": 1e4,
      "max_position_embeddings": 16, "rms_norm_eps": 1e-5, )" +
                                                    shape + "}",
                                                "config.json")
                                 .value();
  const Experts& e = config.experts;
  const size_t hidden = size_t(config.hidden);
  auto host = load_weights("", config, {.dtype = dtype, .dummy = true}, team).value();
  const LayerWeights& layer = host->layers[0];
  // Experts 0 and 1 have equal scores.
  const auto router = random_floats(size_t(e.count) * hidden, random, Dtype::f32, 0.4);
  const_cast<PackedMatrix&>(layer.router) = pack_matrix(
      e.count, config.hidden, 1, Dtype::f32,
      [&](int row, float* out) { std::copy_n(&router[size_t(row == 1 ? 0 : row) * hidden], hidden, out); }, team);
  auto weights = upload_weights(*host, stream).value();
  // Three of four tokens are alike, so that one expert has most rows.
  const int stride = (config.hidden + 7) / 8 * 8;
  std::vector<float> x = random_floats(size_t(n) * hidden, random, dtype, 2), strided(size_t(n * stride));
  for (size_t t = 0; t < size_t(n); ++t) {
    if (t % 4 && dtype == Dtype::bf16) std::copy_n(x.begin(), hidden, &x[t * hidden]);
    std::copy_n(&x[t * hidden], hidden, &strided[t * size_t(stride)]);
  }
  RowTeam rows(team, default_gemm(true), n, 4096);
  MoeBlock block(config, {{0, e.count}, {0, kRowParallelGroups}}, n, rows);
  std::vector<float> out(size_t(n * e.used) * hidden), want(size_t(n) * hidden);
  block.run(layer, x.data(), n, out.data());
  const auto read = [&](int, size_t at, int m, float* part) { std::copy_n(&out[at], m, part); };
  for (int t = 0; t < n; ++t) block.combine(t, read, &want[size_t(t) * hidden]);

  const cuda::Memory on_x = floats_to_card(strided, dtype, stream);
  CudaExperts experts(config, dtype, n);
  const cuda::Memory scratch = cuda::Memory::device(experts.place(nullptr)).value();
  experts.place(scratch.data());
  const auto run = [&](int first, int tokens) {
    const cuda::Memory sum = to_card(std::vector<float>(size_t(tokens) * hidden), stream);
    experts.run(weights->layers[0], on_x.data() + size_t(first * stride) * dtype_bytes(dtype), stride, sum.as<float>(),
                tokens, stream);
    return from_card<float>(sum.data(), size_t(tokens) * hidden, stream);
  };
  const std::vector<float> whole = run(0, n);
  CHECK(largest_difference(whole, want) < bound);
  for (auto [first, tokens] : {std::pair{0, 1}, {1, 1}, {4, 9}, {n - 20, 20}}) {
    const auto from = whole.begin() + ptrdiff_t(size_t(first) * hidden);
    CHECK(same_bits(run(first, tokens), {from, from + ptrdiff_t(size_t(tokens) * hidden)}));
  }
}

TEST_CASE("cuda experts: a block is the CPU's, and a token's bits depend on no other token", "[cuda][moe][model]") {
  check(R"("hidden_size": 36, "moe_intermediate_size": 21, "num_experts": 9, "num_experts_per_tok": 3)", Dtype::f32, 45,
        1e-5);
  check(R"("hidden_size": 32, "moe_intermediate_size": 8, "num_experts": 40, "num_experts_per_tok": 3,
           "norm_topk_prob": false)",
        Dtype::f32, 30, 1e-5);
  // Two tiles of rows, two of outputs, and several depths of which the last one is not whole.
  check(R"("hidden_size": 140, "moe_intermediate_size": 75, "num_experts": 4, "num_experts_per_tok": 2)", Dtype::bf16,
        190, 0.04);
}

}  // namespace
}  // namespace xpyd::testing::experts_cuda_test
