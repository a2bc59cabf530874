// base/cuda/cuda.h's SM partitions on the interpreter: two parts by count, in multiples of 2 as on sm_80, with ordinary
// streams.
#include <map>
#include <mutex>

#include "base/cuda/cuda.h"

namespace xpyd::cuda {
namespace {

std::mutex mutex;
std::map<cudaStream_t, int> sms;  // the number of SMs of each part's stream

class CountedSplit final : public Split {
 public:
  CountedSplit(int first, int second) : n_sms_{first, second} {}
  int n_sms(int part) const override { return n_sms_[part]; }
  cudaStream_t make_stream(int part, bool) override {
    std::lock_guard lock(mutex);
    const cudaStream_t stream = simt::make_stream();
    sms[stream] = n_sms_[part];
    return stream;
  }

 private:
  int n_sms_[2];
};

}  // namespace

int Split::n_sms_of(const Stream& stream) {
  std::lock_guard lock(mutex);
  const auto found = sms.find(stream.handle());
  return found == sms.end() ? 0 : found->second;
}

Result<std::unique_ptr<Split>> Split::cut(const Card& card, int n_sms) {
  const int first = (n_sms + 1) / 2 * 2;
  if (n_sms < 1 || first >= card.n_sms)
    return invalid("--gpu-split " + std::to_string(n_sms) + ": " + card.name + " has " + std::to_string(card.n_sms) +
                   " SMs, and each part needs some");
  return Result<std::unique_ptr<Split>>(std::make_unique<CountedSplit>(first, card.n_sms - first));
}

}  // namespace xpyd::cuda
