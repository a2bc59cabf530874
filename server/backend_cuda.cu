// CUDA: one card, one copy of the weights on it, a stream per instance.
#include <cstdio>
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
  CudaBackend(cuda::Card card, std::shared_ptr<const CudaWeights> weights, CudaModelOptions model, CudaSharing sharing)
      : card_(std::move(card)),
        weights_(std::move(weights)),
        model_(std::move(model)),
        device_(make_cuda_device(std::move(sharing))) {}
  Device& device() override { return *device_; }
  Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue& queue) override {
    Result<std::unique_ptr<CudaModel>> made = make_cuda_llama(weights_, card_, stream_of(queue), model_);
    if (!made) return made.error();
    if (instance == 0) {
      first_ = made.value().get();
      std::fprintf(stderr, "%s", describe().c_str());
    }
    return Result<std::unique_ptr<Model>>(std::move(made).value());
  }

  std::string describe() const override { return first_ ? first_->describe() : ""; }

 private:
  const CudaModel* first_ = nullptr;
  cuda::Card card_;
  std::shared_ptr<const CudaWeights> weights_;
  CudaModelOptions model_;
  std::unique_ptr<Device> device_;
};

CudaSharing parse_split(const std::string& text, const cuda::Card& card) {
  if (text == "off" || text == "priority") return {text == "priority", nullptr};
  char* end = nullptr;
  const long n_sms = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || n_sms < 1 || n_sms > 100000)
    throw invalid("--gpu-split " + text + ": expected off, priority, or the number of SMs for prefill");
  std::shared_ptr<cuda::Split> split = need(cuda::Split::cut(card, int(n_sms)));
  log_line(LogLevel::info, "xpyd: %d SMs for prefill and %d for decode", split->n_sms(0), split->n_sms(1));
  return {false, std::move(split)};
}

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
  CudaSharing sharing = parse_split(b.gpu_split, card);
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
  if (o.kv.shape.dtype == Dtype::int4 && build.config.head_dim % 4 != 0)
    return invalid("--kv-dtype int4 on CUDA: head_dim is " + std::to_string(build.config.head_dim) +
                   ", expected a multiple of 4");
  const KvLayout layout{o.kv.shape, o.kv.order, block_tokens, 1};
  need(check_cuda_attention(model, build.config, b.load.dtype, layout, contiguous, card));
  cuda::Stream stream;
  const std::shared_ptr<const Weights> host = need(load_host_weights(build));
  return std::unique_ptr<Backend>(
      std::make_unique<CudaBackend>(card, need(upload_weights(*host, stream)), std::move(model), std::move(sharing)));
} catch (const Error& error) {
  return error;
}

Result<std::unique_ptr<Device>> open_cuda_alone() {
  if (Result<cuda::Card> card = cuda::open(); !card) return card.error();
  return make_cuda_device();
}

Result<DevicePeak> cuda_device_peak() try {
  const cuda::Card card = need(cuda::open());
  cuda::Stream stream;
  const CudaPeak peak = measure_cuda_peak(*need(CudaPeakProbe::make(stream)), card.name, 9);
  return DevicePeak{peak.card,
                    {{"copy on the card, read and written", "GB/s", peak.copy_gbps},
                     {"read on the card", "GB/s", peak.read_gbps},
                     {"bf16 GEMM, cuBLASLt's fastest", "TFLOP/s", peak.gemm_tflops},
                     {"bf16 GEMM whose rows keep their bits", "TFLOP/s", peak.one_order_tflops},
                     {"pinned host to device", "GB/s", peak.to_card_gbps},
                     {"device to pinned host", "GB/s", peak.from_card_gbps},
                     {"one kernel on a stream", "us", peak.launch_us},
                     {"one kernel in a graph of 100", "us", peak.graph_launch_us}},
                    {1e12 * peak.one_order_tflops, 1e9 * peak.read_gbps}};
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::server
