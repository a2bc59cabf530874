// The Llama family on CUDA: a Model over weights on the card. A step's KV pool is device memory; its block tables and
// all other arrays of StepInput are host memory, as on the CPU.
//
// begin() enqueues a whole step on the stream. wait() waits for its end, with or without logits. The step's KV is then
// in place, and its blocks may be shared, transferred or freed. Other work on the same stream (KV transfers, hooks of
// layer_done) is ordered with the step: layer_done(i) is called once the write of layer i's KV has been enqueued.
//
// Thread safety: as Model; the stream belongs to the caller's thread.
#pragma once

#include <memory>
#include <string>

#include "attention/cuda/attention_cuda.h"
#include "base/cuda/cuda.h"
#include "model/cuda/sampler_cuda.h"
#include "model/cuda/weights_cuda.h"
#include "model/model.h"

namespace xpyd::model {

struct CudaModelOptions {
  int max_step_tokens = 512;
  int max_logits = 64;
  int max_seqs = 64;          // per step
  int max_kv_length = 0;      // most tokens of a sequence; 0: the model's context
  int max_table_entries = 0;  // most blocks of a sequence; 0: as with blocks of one token
  // Rows of cuda_attention_variants(), or "auto". Sequences with one query token use the decode row, others the prefill
  // row. decode_attention may name a prefill row. One kernel then does both, and a token's bits do not depend on
  // whether it came alone or in a prompt's chunk.
  std::string prefill_attention = "auto", decode_attention = "auto";
  bool graphs = true;  // capture and replay steps of one token per sequence
};

// Checks that these rows exist and take this model and KV on this card. The error names the option.
Status check_cuda_attention(const CudaModelOptions& options, const ModelConfig& config, Dtype activations,
                            const KvLayout& layout, bool contiguous, const cuda::Card& card);

class CudaModel : public Model {
 public:
  struct Counts {
    long captures = 0;  // graphs captured
    long replays = 0;   // steps that ran as a graph
  };
  virtual Counts counts() const = 0;
};

// Allocates all memory and chooses GEMM algorithms, so it waits. Error `unavailable`: the card lacks memory, or no
// algorithm keeps a row's bits; the message says which.
Result<std::unique_ptr<CudaModel>> make_cuda_llama(std::shared_ptr<const CudaWeights> weights, const cuda::Card& card,
                                                   cuda::Stream& stream, const CudaModelOptions& options);

}  // namespace xpyd::model
