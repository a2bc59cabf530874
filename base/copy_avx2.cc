// The streaming copy loop: per iteration 128 bytes, four 32-byte loads and four non-temporal stores.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "base/copy.h"

namespace xpyd {

namespace {

constexpr size_t kHeadBytes = 1024;  // of the next piece, fetched ahead

void copy_one(std::byte* dst, const std::byte* src, size_t bytes) {
  size_t head = size_t(-reinterpret_cast<intptr_t>(dst)) & 31;  // NT stores need an aligned dst
  if (head > bytes) head = bytes;
  if (head > 0) std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 128; dst += 128, src += 128, bytes -= 128) {
    const __m256i* from = reinterpret_cast<const __m256i*>(src);
    __m256i* to = reinterpret_cast<__m256i*>(dst);
    __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

}  // namespace

void copy_streaming_avx2(const Copy* pieces, size_t n);

void copy_streaming_avx2(const Copy* pieces, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (i + 1 < n) {
      size_t ahead = pieces[i + 1].bytes < kHeadBytes ? pieces[i + 1].bytes : kHeadBytes;
      const char* next = reinterpret_cast<const char*>(pieces[i + 1].source);
      for (size_t at = 0; at < ahead; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
    }
    copy_one(pieces[i].destination, pieces[i].source, pieces[i].bytes);
  }
  _mm_sfence();
}

}  // namespace xpyd
