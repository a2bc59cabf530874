// Tests the rules of the driver's virtual memory calls in vmm_simt.cc: each rule is broken once beside a clean twin.
// Also tests page groups when the driver refuses a call.
#include <tuple>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "device_memory.h"
#include "tests/catch.h"

namespace xpyd::cuda {
namespace {

using simt::FaultCatcher, simt::SmallPages;

constexpr size_t kPage = 4096;

TEST_CASE("simt vmm: an access before set_access, or after an early unmap, is a fault", "[simt]") {
  SmallPages pages;
  vmm::Address at = 0;
  vmm::Handle handle = 0;
  REQUIRE(vmm::address_reserve(&at, 2 * kPage) == 0);
  REQUIRE(vmm::create(&handle, kPage) == 0);
  REQUIRE(vmm::map(at, kPage, handle) == 0);
  Memory host = Memory::pinned(kPage);
  auto* words = reinterpret_cast<uint32_t*>(at);
  {
    Stream stream;
    FaultCatcher catcher;
    copy(words, host.data(), kPage, stream);  // before set_access
    CHECK(catcher.faults().size() == 1);
    REQUIRE(vmm::set_access(at, kPage) == 0);
    copy(words, host.data(), kPage, stream);
    CHECK(catcher.faults().size() == 1);
    copy(host.data(), words + 1, kPage, stream);  // one word beyond
    CHECK(catcher.faults().size() == 2);
  }
  simt::Late late(true);
  for (bool waits : {true, false}) {
    if (!waits) {  // the clean twin has unmapped it
      REQUIRE(vmm::map(at, kPage, handle) == 0);
      REQUIRE(vmm::set_access(at, kPage) == 0);
    }
    Stream stream;
    FaultCatcher catcher;
    fill(words, 1, kPage, stream);
    if (waits) stream.wait();
    REQUIRE(vmm::unmap(at, kPage) == 0);
    stream.wait();
    CHECK(catcher.faults().size() == size_t(!waits));
  }
  REQUIRE(vmm::release(handle) == 0);
  REQUIRE(vmm::address_free(at, 2 * kPage) == 0);
}

TEST_CASE("simt vmm: page groups undo what the driver began and then refused", "[simt]") {
  SmallPages pages;
  auto device = make_cuda_device();
  {
    auto groups = device->make_page_groups({.group_bytes = kPage, .n_groups = 4}).value();
    auto range = groups->reserve(8 * kPage).value();
    REQUIRE(range->map(0, 3, 1));
    const simt::VmmUse before = simt::vmm_use();
    for (auto [call, n, code] : {std::tuple{simt::VmmCall::map, 1, vmm::kOutOfMemory},
                                 {simt::VmmCall::map, 3, vmm::kOutOfMemory},
                                 {simt::VmmCall::set_access, 1, vmm::kOutOfMemory},
                                 {simt::VmmCall::set_access, 1, vmm::kNotReady}}) {
      simt::fail_vmm_call(call, n, code);
      Status status = range->map(2 * kPage, 0, 3);
      REQUIRE_FALSE(status);
      CHECK(status.error().code == ErrorCode::unavailable);
      CHECK(status.error().message.find(vmm::code_name(code)) != std::string::npos);
      CHECK(simt::vmm_use() == before);
    }
    REQUIRE(range->map(2 * kPage, 0, 3));  // and the next try succeeds
    simt::fail_vmm_call(simt::VmmCall::create, 3, vmm::kOutOfMemory);
    CHECK_FALSE(device->make_page_groups({.group_bytes = kPage, .n_groups = 4}));
    CHECK(simt::vmm_use().handles == 4);
  }
  CHECK(simt::vmm_use() == simt::VmmUse{});
}

}  // namespace
}  // namespace xpyd::cuda
