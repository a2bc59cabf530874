// The Llama family on CUDA: xpyd::Model over weights on the card. KV pools of its steps are device
// memory, block tables and all other arrays of StepInput host memory, as on the CPU.
//
// begin() enqueues a whole step on the stream; wait() waits once, at its end, with or without logits: then the step's KV
// is in place, and its blocks may be shared, handed over or given up.
// Work of others that is enqueued on the same stream (KV transfers, hooks of layer_done) is in
// order with it: layer_done(i) is called when the writing of layer i's KV has been enqueued.
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
  int max_seqs = 64;          // of one step
  int max_kv_length = 0;      // tokens of one sequence; 0: the model's context
  int max_table_entries = 0;  // blocks of one sequence; 0: as with blocks of one token
  // Rows of cuda_attention_variants(), or "auto". Sequences with one query token take the decode
  // row, others the prefill row. Where decode_attention names a prefill row, one kernel does both,
  // and a token's bits are the same whether it came in a prompt's chunk or alone.
  std::string prefill_attention = "auto", decode_attention = "auto";
  bool graphs = true;       // steps of one token per sequence are captured and replayed
  bool early_start = true;  // kernels start while those before end, where the card can (base/cuda/cuda.h)
};

// Whether these rows exist and take this model and KV on this card; the error names the option.
Status check_cuda_attention(const CudaModelOptions& options, const ModelConfig& config, Dtype activations,
                            const KvLayout& layout, bool contiguous, const cuda::Card& card);

class CudaModel : public Model {
 public:
  struct Counts {
    long steps = 0;     // forward passes
    long captures = 0;  // graphs made
    long replays = 0;   // steps that ran as a graph
  };
  virtual Counts counts() const = 0;
  virtual std::string describe() const = 0;  // what was chosen: products, attention, graphs; one per line
};

// Allocates all its memory here and chooses GEMM algorithms, so it waits. Error `unavailable`: no
// room on the card, or no algorithm that keeps a row's bits; says which.
Result<std::unique_ptr<CudaModel>> make_cuda_llama(std::shared_ptr<const CudaWeights> weights, const cuda::Card& card,
                                                   cuda::Stream& stream, const CudaModelOptions& options);

}  // namespace xpyd::model
