// The tiny model on CUDA, for tests of the whole path.
#pragma once

#include <algorithm>
#include <memory>

#include "base/device/device_cuda.h"
#include "model/cuda/model_cuda.h"
#include "model/weights/weights.h"
#include "tests/tiny_model.h"

namespace xpyd::testing {

struct OnCuda {
  cuda::Card card = cuda::open().value();
  std::unique_ptr<Device> device = make_cuda_device();
  std::shared_ptr<const CudaWeights> weights;
  OnCuda() {
    cuda::Stream stream;
    weights = upload_weights(*tiny_weights(), stream).value();
  }
  void put(TinySetup& setup, bool graphs) {
    setup.device = device.get();
    setup.make_model = [this, graphs](const TinySetup& s, DeviceQueue& queue) -> Result<std::unique_ptr<Model>> {
      CudaModelOptions options{.max_step_tokens = std::max(s.step_tokens, s.max_batch),
                               .max_logits = s.max_batch,
                               .max_seqs = s.max_batch,
                               .decode_attention = "naive",
                               .graphs = graphs};
      options.prefill_attention = "naive";
      auto model = make_cuda_llama(weights, card, stream_of(queue), options);
      if (!model) return model.error();
      return Result<std::unique_ptr<Model>>(std::move(model).value());
    };
  }
};

// Runs every `stride`-th combination of memory, batching, topology, transport, graphs and planning ahead on CUDA. Each
// must have the first one's logits hash, and the CPU's tokens.
void check_cuda_parity(int stride);

}  // namespace xpyd::testing
