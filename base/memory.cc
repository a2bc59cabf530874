#include "base/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/copy.h"
#include "base/os.h"

namespace xpyd {
namespace {

// A line of /proc/meminfo; 0: unknown.
size_t meminfo(const char* format) {
  unsigned long value = 0;
  if (std::FILE* file = std::fopen("/proc/meminfo", "r")) {
    char line[128];
    while (std::fgets(line, sizeof line, file))
      if (std::sscanf(line, format, &value) == 1) break;
    std::fclose(file);
  }
  return value;
}

std::atomic<HugePages> pages_of_process = HugePages::transparent;

// Whether memory of so many bytes is of huge pages that the system has reserved.
bool of_reserved(size_t bytes) { return bytes >= kHugePage && huge_pages() == HugePages::reserved; }

Error too_few_reserved(size_t bytes) {
  return {ErrorCode::unavailable, "--huge-pages explicit: " + std::to_string(bytes) + " bytes: this machine has " +
                                      std::to_string(meminfo("HugePages_Free: %lu")) +
                                      " free huge pages of 2 MiB (vm.nr_hugepages)"};
}

constexpr size_t kReserve = 1 << 20;  // bytes; to end requests and say goodbye
std::atomic<void*> reserve = nullptr;
std::atomic<bool> happened = false;

void say(size_t bytes, const char* more) {
  char line[80], room[32] = "";
  if (bytes) std::snprintf(room, sizeof room, " for %zu bytes", bytes);
  const int n = std::snprintf(line, sizeof line, "xpyd: no memory%s%s\n", room, more);
  [[maybe_unused]] const ssize_t written = write(2, line, size_t(n));  // a full pipe: as it is
}

}  // namespace

void use_huge_pages(HugePages pages) { pages_of_process = pages; }
HugePages huge_pages() { return pages_of_process; }

void ask_for_pages(void* at, size_t bytes) {
  if (!of_reserved(bytes)) madvise(at, bytes, huge_pages() == HugePages::off ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}

Buffer::Buffer(size_t bytes, Pages pages) : bytes_(bytes) {
  if (bytes == 0) return;
  const bool reserved = pages == Pages::chosen && of_reserved(bytes);
  mapped_ = reserved ? round_up(bytes, kHugePage) : bytes;
  void* p;
  while ((p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (reserved ? MAP_HUGETLB : 0),
                   -1, 0)) == MAP_FAILED) {
    if (reserved) throw too_few_reserved(bytes);
    out_of_memory(bytes);
  }
  data_ = static_cast<std::byte*>(p);
  if (!reserved) madvise(p, bytes, huge_pages() == HugePages::off ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  for (size_t i = 0; i < bytes; i += 4096) reinterpret_cast<volatile char*>(data_)[i] = 0;
}

Buffer::~Buffer() {
  if (data_) munmap(data_, mapped_);
}

Status check_available_memory(size_t bytes) {
  if (of_reserved(bytes)) {
    if (bytes > meminfo("HugePages_Free: %lu") * kHugePage) return too_few_reserved(bytes);
    return ok();
  }
  if (const size_t there = meminfo("MemAvailable: %lu kB") << 10; there > 0 && bytes > there)
    return Error{ErrorCode::unavailable,
                 std::to_string(bytes) + " bytes: this machine has " + std::to_string(there) + " bytes of memory left"};
  return ok();
}

void prepare_for_out_of_memory() {
  void* bytes = std::malloc(kReserve);
  if (bytes) std::memset(bytes, 1, kReserve);
  reserve = bytes;
  std::set_new_handler([] { out_of_memory(0); });
  // Libraries that call malloc() themselves throw without asking the handler, from any thread.
  static const std::terminate_handler otherwise = std::set_terminate([] {
    try {
      if (std::current_exception()) throw;
    } catch (const std::bad_alloc&) {
      say(0, "");
      _exit(1);
    } catch (...) {
    }
    otherwise();
  });
}

void out_of_memory(size_t bytes) {
  happened = true;
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  void* kept = reserve.exchange(nullptr);
  if (!kept || !sigismember(&blocked, SIGTERM)) {
    say(bytes, "");
    _exit(1);
  }
  say(bytes, ": ending");
  std::free(kept);
  kill(getpid(), SIGTERM);
}

bool was_out_of_memory() { return happened; }

#if defined(__x86_64__)
void copy_streaming_avx2(const Copy* copies, size_t n);    // copy_avx2.cc
void copy_streaming_avx512(const Copy* copies, size_t n);  // copy_avx512.cc
#endif

std::span<const CopyVariant> copy_variants() {
  static constexpr CopyVariant kVariants[] = {
#if defined(__x86_64__)
      {"avx512", copy_streaming_avx512, Isa::avx512},
      {"avx2", copy_streaming_avx2, Isa::avx2},
#endif
      {"portable",
       [](const Copy* copies, size_t n) {
         for (const Copy* copy = copies; copy < copies + n; ++copy)
           if (copy->bytes > 0) std::memcpy(copy->destination, copy->source, copy->bytes);
       },
       Isa::portable}};
  return kVariants;
}

void copy_streaming(std::span<const Copy> copies) {
  static const CopyVariant& best = best_row(copy_variants());
  best.run(copies.data(), copies.size());
}

}  // namespace xpyd
