// Shared by the CUDA tests of the model: a model of a folder on the GPU, and KV in device memory.
#pragma once

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "model/cuda/model_cuda.h"
#include "tests/cuda_arrays.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing {

// Unit roundoff: u = 2^-24 for f32, 2^-8 for bf16.
constexpr double kU = 0x1p-24;
inline double roundoff(Dtype dtype) { return dtype == Dtype::bf16 ? 0x1p-8 : kU; }
inline bool near(double got, double want, double bound) { return std::fabs(got - want) <= bound; }

inline std::vector<float> random_floats(size_t n, Random& random, Dtype dtype = Dtype::f32, double scale = 1,
                                        double centre = 0) {
  std::vector<float> x(n);
  for (float& v : x) {
    v = float((random.uniform() * 2 - 1 + centre) * scale);
    if (dtype == Dtype::bf16) v = to_f32(to_bf16(v));
  }
  return x;
}

// A model of a folder on the GPU, beside the host's model of the same weights.
struct CudaLoaded {
  CudaLoaded(const std::string& dir, CudaModelOptions options = small(), LoadOptions load = {})
      : host(dir, load, 1, options.max_step_tokens), card(cuda::open().value()) {
    auto uploaded = upload_weights(*host.weights, stream);
    INFO((uploaded ? "" : uploaded.error().message));
    REQUIRE(uploaded.ok());
    weights = uploaded.value();
    model = make(options);
  }
  std::unique_ptr<CudaModel> make(const CudaModelOptions& options) {
    auto made = make_cuda_llama(weights, card, stream, options);
    INFO((made ? "" : made.error().message));
    REQUIRE(made.ok());
    return std::move(made).value();
  }
  // One attention kernel serves both phases, so chunking cannot change a bit.
  static CudaModelOptions small() {
    return {.max_step_tokens = 64,
            .max_logits = 64,
            .max_seqs = 8,
            .prefill_attention = "naive",
            .decode_attention = "naive"};
  }
  LoadedModel host;
  cuda::Card card;
  cuda::Stream stream;
  std::shared_ptr<const CudaWeights> weights;
  std::unique_ptr<CudaModel> model;
};

// KV on the GPU for up to n_seqs sequences of max_tokens tokens, all NaN at first. With block_tokens 0 the slots are
// contiguous, otherwise blocks are scattered over the pool.
struct CudaKv {
  CudaKv(const Model& model, cuda::Stream& stream, int max_tokens, int n_seqs = 1, int block_tokens = 0,
         KvOrder order = KvOrder::layer_major, Dtype dtype = Dtype::f32)
      : blocks_per_seq(block_tokens ? (max_tokens + block_tokens - 1) / block_tokens : 1),
        layout{kv_shape(model.config(), dtype), order, block_tokens ? block_tokens : max_tokens,
               blocks_per_seq * n_seqs},
        pool(cuda::Memory::device(layout.pool_bytes()).value()),
        contiguous(block_tokens == 0) {
    cuda::fill(pool.data(), 0xff, pool.size(), stream);
    int step = 7;  // coprime to the number of blocks, so it permutes them
    while (std::gcd(step, layout.n_blocks) != 1) ++step;
    for (int i = 0; i < layout.n_blocks; ++i) tables.push_back((i * step + 1) % layout.n_blocks);
  }
  KvView view(int seq = 0) const {
    const int32_t* table = tables.data() + seq * blocks_per_seq;
    return {pool.data(), &layout, contiguous ? nullptr : table, contiguous ? *table : 0};
  }
  int blocks_per_seq;
  KvLayout layout;
  cuda::Memory pool;
  bool contiguous;
  std::vector<int32_t> tables;  // [n_seqs, blocks_per_seq]
};

}  // namespace xpyd::testing
