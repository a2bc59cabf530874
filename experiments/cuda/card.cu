// Properties of the card that experiments need.
#include "experiments/experiment.h"
#include "model/cuda/peak_cuda.h"

namespace xpyd::experiments {

Result<std::string> cuda_card() {
  Result<cuda::Card> card = cuda::open();
  if (!card) return Error{card.error().code, "no CUDA device: " + card.error().message};
  return card.value().name;
}

Values cuda_peaks() {
  cuda::Stream stream;
  auto probe = CudaPeakProbe::make(stream);
  if (!probe) return {{"error", probe.error().message}};
  const CudaPeak peak = measure_cuda_peak(*probe.value(), cuda::open().value().name, 5);
  return {{"copy_gbps", peak.copy_gbps}, {"read_gbps", peak.read_gbps}, {"gemm_tflops", peak.gemm_tflops}};
}

}  // namespace xpyd::experiments
