// Peak rates of a card: the denominators of all printed shares on a GPU, as base/peak/peak.h for the host. They live
// here because they need the matrix product.
//
// Thread safety: one thread, its stream's.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/cuda/cuda.h"
#include "base/dtype.h"
#include "base/row_hash.h"
#include "model/cuda/gemm_cuda.h"

namespace xpyd::model {

struct CudaPeakSizes {
  size_t copy_bytes = size_t(1) << 30;  // allocated twice on the card
  int gemm_n = 8192;
  size_t link_bytes = size_t(256) << 20;  // pinned host memory
};

// Single measurements, for benches that interleave them. The probe holds the memory that it moves.
class CudaPeakProbe {
 public:
  // Waits while algorithms are chosen. Error `unavailable`: the card lacks memory.
  static Result<std::unique_ptr<CudaPeakProbe>> make(cuda::Stream& stream, const CudaPeakSizes& sizes = {});
  // Returns the device seconds of one repetition of the work that run() enqueues on the stream.
  double seconds(const std::function<void()>& run, int repetitions);

  double copy_gbps();     // device to device, bytes read and written
  double read_gbps();     // read only
  double gemm_tflops();   // bf16, n^3, random data, as the models multiply
  double to_card_gbps();  // from pinned memory
  double from_card_gbps();

 private:
  CudaPeakProbe(cuda::Stream& stream, const CudaPeakSizes& sizes);
  double link_gbps(void* to, const void* from);

  cuda::Stream& stream_;
  const CudaPeakSizes sizes_;
  cuda::Event begin_{true}, end_{true};
  cuda::Memory from_, to_, a_, b_, c_, host_;
  CudaGemm gemm_;
  CudaGemmArgs product_;
};

// Fills with bf16 uniform in [-scale, scale): element i is scale * random_element(array, i).
void fill_random(void* bf16s, size_t n, uint64_t array, float scale, cuda::Stream& stream);

struct CudaPeak {
  std::string card;
  double copy_gbps = 0, read_gbps = 0;
  double gemm_tflops = 0;
  double to_card_gbps = 0, from_card_gbps = 0;
};
// Returns medians of interleaved rounds.
CudaPeak measure_cuda_peak(CudaPeakProbe& probe, const std::string& card, int rounds);

// Element `place` of array `array`, uniform in [-1, 1). Large arrays are never copied: the card fills them, and the
// check of a result computes the same elements again.
XPYD_HD inline bf16 random_element(uint64_t array, uint64_t place) {
  return to_bf16(float(int32_t(uint32_t(mix64((array << 56) + place + 1)))) * 0x1p-31f);
}

}  // namespace xpyd::model
