// Green contexts are the driver's.
#include <cuda.h>

#include "base/cuda_driver.h"
#include "base/cuda_split.h"

namespace xpyd::cuda {
namespace {

struct Driver {
  CUresult (*device_resource)(CUdevice, CUdevResource*, CUdevResourceType) = nullptr;
  CUresult (*split)(CUdevResource*, unsigned*, const CUdevResource*, CUdevResource*, unsigned, unsigned) = nullptr;
  CUresult (*describe)(CUdevResourceDesc*, CUdevResource*, unsigned) = nullptr;
  CUresult (*create)(CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned) = nullptr;
  CUresult (*destroy)(CUgreenCtx) = nullptr;
  CUresult (*stream)(CUstream*, CUgreenCtx, unsigned, int) = nullptr;
  bool complete() {
    constexpr unsigned kSince = 12050;
    return look_up(device_resource, "cuDeviceGetDevResource", kSince) &&
           look_up(split, "cuDevSmResourceSplitByCount", kSince) &&
           look_up(describe, "cuDevResourceGenerateDesc", kSince) && look_up(create, "cuGreenCtxCreate", kSince) &&
           look_up(destroy, "cuGreenCtxDestroy", kSince) && look_up(stream, "cuGreenCtxStreamCreate", kSince);
  }
};

class GreenSplit final : public Split {
 public:
  explicit GreenSplit(const Driver& driver) : driver_(driver) {}
  ~GreenSplit() override {
    for (CUgreenCtx part : parts_)
      if (part) driver_.destroy(part);
  }
  // The name of the call that failed, with its code; "" when all went well.
  std::string cut(int n_sms) {
    auto failed = [](const char* call, CUresult code) {
      return std::string(call) + " failed: error " + std::to_string(int(code));
    };
    CUdevResource all{}, group[2] = {};
    unsigned n_groups = 1;
    if (CUresult r = driver_.device_resource(0, &all, CU_DEV_RESOURCE_TYPE_SM); r != CUDA_SUCCESS)
      return failed("cuDeviceGetDevResource", r);
    if (CUresult r = driver_.split(&group[0], &n_groups, &all, &group[1], 0, unsigned(n_sms));
        r != CUDA_SUCCESS || n_groups != 1)
      return failed("cuDevSmResourceSplitByCount", r);
    for (int part = 0; part < 2; ++part) {
      n_sms_[part] = int(group[part].sm.smCount);
      if (n_sms_[part] == 0) return "part " + std::to_string(part) + " would have no SM";
      CUdevResourceDesc description{};
      if (CUresult r = driver_.describe(&description, &group[part], 1); r != CUDA_SUCCESS)
        return failed("cuDevResourceGenerateDesc", r);
      if (CUresult r = driver_.create(&parts_[part], description, 0, CU_GREEN_CTX_DEFAULT_STREAM); r != CUDA_SUCCESS)
        return failed("cuGreenCtxCreate", r);
    }
    return "";
  }
  int n_sms(int part) const override { return n_sms_[part]; }
  cudaStream_t make_stream(int part, bool high_priority) override {
    int least = 0, greatest = 0;
    XPYD_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess);
    CUstream stream = nullptr;
    CUresult made = driver_.stream(&stream, parts_[part], CU_STREAM_NON_BLOCKING, high_priority ? greatest : least);
    XPYD_CHECK(made == CUDA_SUCCESS, "cuGreenCtxStreamCreate: error " + std::to_string(int(made)));
    return stream;
  }

 private:
  Driver driver_;
  CUgreenCtx parts_[2] = {};
  int n_sms_[2] = {};
};

}  // namespace

int Split::n_sms_of(const Stream& stream) {
  CUresult (*green)(CUstream, CUgreenCtx*) = nullptr;
  CUresult (*resource)(CUgreenCtx, CUdevResource*, CUdevResourceType) = nullptr;
  CUgreenCtx part = nullptr;
  CUdevResource sms{};
  if (!look_up(green, "cuStreamGetGreenCtx", 12040) || !look_up(resource, "cuGreenCtxGetDevResource", 12040) ||
      green(stream.handle(), &part) != CUDA_SUCCESS || !part ||
      resource(part, &sms, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS)
    return 0;
  return int(sms.sm.smCount);
}

Result<std::unique_ptr<Split>> Split::cut(const Card& card, int n_sms) {
  if (n_sms < 1 || n_sms >= card.n_sms)
    return invalid("--gpu-split " + std::to_string(n_sms) + ": " + card.name + " has " + std::to_string(card.n_sms) +
                   " SMs, and each part needs some");
  Driver driver;
  if (!driver.complete())
    return Error{ErrorCode::unavailable, "--gpu-split: green contexts need a driver for CUDA 12.5 or later"};
  auto split = std::make_unique<GreenSplit>(driver);
  if (std::string wrong = split->cut(n_sms); !wrong.empty())
    return Error{ErrorCode::unavailable, "--gpu-split " + std::to_string(n_sms) + ": " + wrong};
  return Result<std::unique_ptr<Split>>(std::move(split));
}

}  // namespace xpyd::cuda
