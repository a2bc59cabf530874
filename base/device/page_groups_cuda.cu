// Page groups (base/device/page_groups.h) of a card: physical memory (base/cuda/cuda_vmm.h) mapped to addresses.
//
// A group is one physical allocation, because the driver maps an allocation as a whole. A run of n groups takes n cheap
// cuMemMap and one cuMemSetAccess, which takes most of the time (vAttention, Table 3: 2 and 38 us for 2 MiB).
//
// Addresses without memory stay unmapped. A kernel that touches them makes an illegal access, which ends the program:
// PageGroupOptions::guard is always on. kvcached instead maps one page of zeros to all addresses without memory. That
// costs an unmap before every map, and a map for every group of addresses at the start. Our kernels read no token
// beyond their sequence's length, so they do not need it. cudaDeviceSynchronize() is never needed before an unmap,
// because callers unmap only what no running work uses.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "base/os.h"

namespace xpyd {
namespace {

using namespace cuda;

bool normal(int code) { return code == vmm::kOutOfMemory || code == vmm::kNotReady; }
void must(int code, const char* call) { XPYD_CHECK(code == 0, std::string(call) + ": " + vmm::code_name(code)); }
// Running out of memory is a normal outcome; every other code is a bug of ours or a broken card.
Error refused(int code, const char* call) {
  XPYD_CHECK(normal(code), std::string(call) + ": " + vmm::code_name(code));
  return {ErrorCode::unavailable, std::string(call) + ": " + vmm::code_name(code)};
}

class CudaGroups final : public PageGroups, public std::enable_shared_from_this<CudaGroups> {
 public:
  using PageGroups::PageGroups;
  ~CudaGroups() override {
    for (vmm::Handle handle : handles_) must(vmm::release(handle), "cuMemRelease");
  }
  Status create() {
    handles_.reserve(size_t(options_.n_groups));
    for (int i = 0; i < options_.n_groups; ++i) {
      vmm::Handle handle = 0;
      if (const int code = vmm::create(&handle, options_.group_bytes); code != 0) {
        Error error = refused(code, "cuMemCreate");
        error.message = "out of device memory: " + std::to_string(options_.n_groups) + " page groups of " +
                        std::to_string(options_.group_bytes) + " bytes requested, but there is room for " +
                        std::to_string(i) + " (" + error.message + ")";
        return error;
      }
      handles_.push_back(handle);
    }
    return ok();
  }
  Result<std::unique_ptr<VirtualRange>> reserve(size_t bytes) override;
  vmm::Handle handle(int group) const { return handles_[size_t(group)]; }

 private:
  std::vector<vmm::Handle> handles_;
};

class CudaRange final : public VirtualRange {
 public:
  CudaRange(std::shared_ptr<CudaGroups> groups, vmm::Address at, size_t bytes, size_t reserved)
      : groups_(std::move(groups)),
        o_(groups_->options()),
        at_(at),
        reserved_(reserved),
        mapped_(reserved / o_.group_bytes) {
    data_ = reinterpret_cast<std::byte*>(at);
    bytes_ = bytes;
  }
  ~CudaRange() override {
    if (std::any_of(mapped_.begin(), mapped_.end(), [](uint8_t is) { return is != 0; })) {
      vmm::wait_for_card();  // as cudaFree does
      unmap(0, int(mapped_.size()));
    }
    must(vmm::address_free(at_, reserved_), "cuMemAddressFree");
  }

  Status map(size_t offset, int group, int n) override {
    const size_t first = checked(offset, n), size = o_.group_bytes;
    XPYD_CHECK(group >= 0 && group + n <= o_.n_groups);
    for (int i = 0; i < n; ++i) {
      XPYD_CHECK(!mapped_[first + size_t(i)], "a page group where one is");
      const int code = vmm::map(at_ + offset + size_t(i) * size, size, groups_->handle(group + i));
      if (code != 0) return undo(offset, i, refused(code, "cuMemMap"));
    }
    // Without this call the mapping cannot be accessed.
    if (const int code = vmm::set_access(at_ + offset, size_t(n) * size); code != 0)
      return undo(offset, n, refused(code, "cuMemSetAccess"));
    for (int i = 0; i < n; ++i) mapped_[first + size_t(i)] = 1;
    return ok();
  }

  void unmap(size_t offset, int n) override {
    const size_t end = checked(offset, n) + size_t(n), size = o_.group_bytes;
    for (size_t i = offset / size; i < end;) {
      if (!mapped_[i]) {
        ++i;
        continue;
      }
      const size_t begin = i;
      while (i < end && mapped_[i]) mapped_[i++] = 0;
      take_away(begin * size, (i - begin) * size);
    }
  }

 private:
  size_t checked(size_t offset, int n) const {
    XPYD_CHECK(offset % o_.group_bytes == 0 && n >= 0 && offset + size_t(n) * o_.group_bytes <= reserved_);
    return offset / o_.group_bytes;
  }
  void take_away(size_t offset, size_t bytes) { must(vmm::unmap(at_ + offset, bytes), "cuMemUnmap"); }
  Error undo(size_t offset, int n, Error error) {
    if (n > 0) take_away(offset, size_t(n) * o_.group_bytes);
    return error;
  }

  const std::shared_ptr<CudaGroups> groups_;
  const PageGroupOptions& o_;
  const vmm::Address at_;
  const size_t reserved_;
  std::vector<uint8_t> mapped_;  // by group of addresses; bytes and not bits, so that threads share no word
};

Result<std::unique_ptr<VirtualRange>> CudaGroups::reserve(size_t bytes) {
  const size_t whole = round_up(bytes, options_.group_bytes);
  vmm::Address at = 0;
  if (const int code = vmm::address_reserve(&at, whole); code != 0)
    return Error{ErrorCode::unavailable, "reserving " + std::to_string(whole) +
                                             " bytes of addresses: cuMemAddressReserve: " + vmm::code_name(code)};
  return std::unique_ptr<VirtualRange>(std::make_unique<CudaRange>(shared_from_this(), at, bytes, whole));
}

}  // namespace

Result<std::shared_ptr<PageGroups>> make_cuda_page_groups(const PageGroupOptions& o) {
  if (Status status = vmm::available(); !status) return status.error();
  const size_t granularity = vmm::granularity();
  if (o.group_bytes == 0 || o.group_bytes % granularity != 0)
    return invalid("page-group-bytes is " + std::to_string(o.group_bytes) + ": expected a multiple of " +
                   std::to_string(granularity) + ", the smallest page group of this card");
  XPYD_CHECK(o.n_groups > 0);
  auto groups = std::make_shared<CudaGroups>(o);
  if (Status status = groups->create(); !status) return status.error();
  return std::shared_ptr<PageGroups>(std::move(groups));
}

}  // namespace xpyd
