// The rules of the driver's virtual memory calls as vmm_simt.cc keeps them: each broken once,
// beside its clean twin; and page groups when the driver refuses.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "device_memory.h"
#include "tests/catch.h"

namespace xpyd::cuda {
namespace {

using simt::FaultCatcher, simt::SmallPages;

constexpr size_t kPage = 4096;

__global__ void add_one(uint32_t* words) { words[threadIdx.x] += 1; }

// What a child that does this says on stderr; "" when it lives.
template <class F>
std::string last_words(F work) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::dup2(ends[1], 2);
    ::signal(SIGSEGV, SIG_DFL);  // not the test framework's
    vmm::Address at = 0;         // whose place the interpreter's takes now
    (void)vmm::address_reserve(&at, kPage);
    work();
    ::_exit(7);
  }
  ::close(ends[1]);
  std::string text(4096, ' ');
  const ssize_t n = ::read(ends[0], text.data(), text.size());
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  text.resize(size_t(std::max<ssize_t>(0, n)));
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 7) == text.empty());
  return text;
}

TEST_CASE("simt vmm: what the driver refuses is refused", "[simt]") {
  SmallPages pages;
  vmm::Address at = 0, elsewhere = 0;
  REQUIRE(vmm::address_reserve(&at, 8 * kPage) == 0);
  REQUIRE(vmm::address_reserve(&elsewhere, 2 * kPage) == 0);
  CHECK(vmm::address_reserve(&elsewhere, kPage + 1) != 0);
  vmm::Handle one = 0, two = 0, none = 0;
  CHECK(vmm::create(&none, kPage / 2) != 0);
  REQUIRE(vmm::create(&one, kPage) == 0);
  REQUIRE(vmm::create(&two, 2 * kPage) == 0);

  CHECK(vmm::map(at + 512, kPage, one) != 0);            // not aligned
  CHECK(vmm::map(at + 8 * kPage, kPage, one) != 0);      // not reserved
  CHECK(vmm::map(at, 2 * kPage, one) != 0);              // not its size
  CHECK(vmm::map(at + 7 * kPage, 2 * kPage, two) != 0);  // half outside
  REQUIRE(vmm::map(at, kPage, one) == 0);
  CHECK(vmm::map(at, kPage, one) != 0);  // something is there
  REQUIRE(vmm::map(at + kPage, 2 * kPage, two) == 0);
  CHECK(vmm::map(at + 2 * kPage, kPage, one) != 0);  // the second half of it
  REQUIRE(vmm::map(elsewhere, kPage, one) == 0);     // twice is allowed

  CHECK(vmm::set_access(at, 4 * kPage) != 0);  // beyond what is mapped
  CHECK(vmm::set_access(at, 2 * kPage) != 0);  // half a mapping
  CHECK(vmm::set_access(at, 3 * kPage) == 0);
  CHECK(vmm::unmap(at + kPage, kPage) != 0);  // half a mapping
  CHECK(vmm::unmap(at + 4 * kPage, kPage) != 0);
  CHECK(vmm::address_free(at, 8 * kPage) != 0);  // mappings there
  CHECK(simt::vmm_use() == simt::VmmUse{2, 2, 3, 3 * kPage});

  // Released while mapped: it lives as long as its mappings.
  Stream stream;
  REQUIRE(vmm::release(one) == 0);
  CHECK(vmm::release(one) != 0);
  CHECK(vmm::map(at + 4 * kPage, kPage, one) != 0);
  auto* words = reinterpret_cast<uint32_t*>(at);
  fill(words, 0, kPage, stream);
  launch(add_one, "add_one", Shape{1, 32}, stream, words);
  CHECK(words[31] == 1);
  CHECK(simt::vmm_use().handles == 2);
  REQUIRE(vmm::unmap(at, 3 * kPage) == 0);  // two whole mappings at once
  CHECK(vmm::unmap(at, kPage) != 0);
  REQUIRE(vmm::unmap(elsewhere, kPage) == 0);
  CHECK(simt::vmm_use().handles == 1);
  REQUIRE(vmm::release(two) == 0);
  CHECK(vmm::address_free(at, 4 * kPage) != 0);  // not as it was reserved
  REQUIRE(vmm::address_free(at, 8 * kPage) == 0);
  REQUIRE(vmm::address_free(elsewhere, 2 * kPage) == 0);
  CHECK(simt::vmm_use() == simt::VmmUse{});
}

TEST_CASE("simt vmm: memory without access, or unmapped too early, is a fault", "[simt]") {
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
    if (!waits) {  // the twin above has unmapped
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

TEST_CASE("simt vmm: who waits for the whole card waits for another thread's capture", "[simt]") {
  Stream stream;
  Memory memory = Memory::device(64).value();
  std::atomic<bool> begun = false, done = false;
  std::thread waiting;
  Graph graph = Graph::capture(stream, [&] {
    fill(memory.data(), 1, 64, stream);
    waiting = std::thread([&] {
      begun = true;
      vmm::wait_for_card();
      done = true;
    });
    while (!begun) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    CHECK_FALSE(done);
  });
  waiting.join();
  CHECK(done);
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("simt vmm: a kernel's touch of addresses without memory ends the program", "[simt]") {
  SmallPages pages;
  auto device = make_cuda_device();
  auto groups = device->make_page_groups({.group_bytes = kPage, .n_groups = 2}).value();
  auto range = groups->reserve(4 * kPage).value();
  REQUIRE(range->map(0, 0, 1));
  auto kernel = [&](size_t offset) {
    Stream stream;
    launch(add_one, "add_one", Shape{1, 32}, stream, reinterpret_cast<uint32_t*>(range->data() + offset));
  };
  const std::string says = "kernel add_one touches address";
  CHECK(last_words([&] { kernel(0); }) == "");
  CHECK(last_words([&] { kernel(kPage); }).find(says) != std::string::npos);
  REQUIRE(range->map(kPage, 1, 1));
  CHECK(last_words([&] { kernel(kPage); }) == "");
  range->unmap(0, 1);
  CHECK(last_words([&] { kernel(0); }).find(says) != std::string::npos);
}
#endif

TEST_CASE("simt vmm: page groups undo what the driver began and refused", "[simt]") {
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
