// CUDA: one card, one copy of the weights on it, a stream per instance.
#include <cstdlib>

#include "allocator/kv_memory.h"
#include "base/device/device_cuda.h"
#include "base/log.h"
#include "model/cuda/model_cuda.h"
#include "model/cuda/peak_cuda.h"
#include "server/build.h"

namespace xpyd::server {
namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(cuda::Card card, std::shared_ptr<const CudaWeights> weights, CudaModelOptions model, bool priorities)
      : card_(std::move(card)),
        weights_(std::move(weights)),
        model_(std::move(model)),
        device_(make_cuda_device(priorities)) {}
  Device& device() override { return *device_; }
  Result<std::unique_ptr<Model>> make_model(int, DeviceQueue& queue) override {
    Result<std::unique_ptr<CudaModel>> made = make_cuda_llama(weights_, card_, stream_of(queue), model_);
    if (!made) return made.error();
    return Result<std::unique_ptr<Model>>(std::move(made).value());
  }

 private:
  cuda::Card card_;
  std::shared_ptr<const CudaWeights> weights_;
  CudaModelOptions model_;
  std::unique_ptr<Device> device_;
};

}  // namespace

Result<std::unique_ptr<Backend>> open_cuda_backend(const Build& build) try {
  const ClusterOptions& o = build.options;
  const BackendOptions& b = build.backend_options;
  // A kernel that is loaded at its first launch waits for running kernels, and NCCL's kernels wait for a peer. So
  // modules are loaded eagerly.
  if (o.transport->name == std::string("nccl")) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  const cuda::Card card = need(cuda::open());
  log_line(LogLevel::info, "xpyd: %s, compute capability %d.%d, %d SMs, %zu of %zu MiB free", card.name.c_str(),
           card.major, card.minor, card.n_sms, card.free_bytes >> 20, card.memory_bytes >> 20);
  const bool contiguous = o.kv_scheme->contiguous;
  CudaModelOptions model{.max_step_tokens = build.max_step_tokens(),
                         .max_logits = o.max_batch,
                         .max_seqs = o.max_batch,
                         .max_kv_length = o.max_model_len,
                         .max_table_entries = 1,
                         .prefill_attention = b.cuda_prefill_attention,
                         .decode_attention = b.cuda_decode_attention};
  const int block_tokens = contiguous ? o.max_model_len : o.kv_scheme->block_tokens(o.kv);
  if (!contiguous) model.max_table_entries = (o.max_model_len + block_tokens - 1) / block_tokens;
  const KvLayout layout{o.kv.shape, o.kv.order, block_tokens, 1};
  need(check_cuda_attention(model, build.config, b.load.dtype, layout, contiguous, card));
  cuda::Stream stream;
  const std::shared_ptr<const Weights> host = need(load_host_weights(build));
  return std::unique_ptr<Backend>(std::make_unique<CudaBackend>(card, need(upload_weights(*host, stream)),
                                                                std::move(model), b.gpu_split == "priority"));
} catch (const Error& error) {
  return error;
}

Result<DevicePeak> cuda_device_peak() try {
  const cuda::Card card = need(cuda::open());
  cuda::Stream stream;
  const CudaPeak peak = measure_cuda_peak(*need(CudaPeakProbe::make(stream)), card.name, 9);
  return DevicePeak{peak.card,
                    {{"copy on the card, read and written", "GB/s", peak.copy_gbps},
                     {"read on the card", "GB/s", peak.read_gbps},
                     {"bf16 GEMM", "TFLOP/s", peak.gemm_tflops},
                     {"pinned host to device", "GB/s", peak.to_card_gbps},
                     {"device to pinned host", "GB/s", peak.from_card_gbps}},
                    {1e12 * peak.gemm_tflops, 1e9 * peak.read_gbps}};
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
