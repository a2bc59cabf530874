// The streaming copy loop for any vector width. Each iteration loads 128 bytes, a Line at a time, and stores them with
// non-temporal stores.
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "base/lanes.h"

namespace xpyd {
namespace {

constexpr size_t kHeadBytes = 1024;  // bytes of the next copy that are fetched ahead

void copy_one(std::byte* dst, const std::byte* src, size_t bytes) {
  constexpr int kLines = int(128 / sizeof(Line));
  size_t head = size_t(-reinterpret_cast<intptr_t>(dst)) & (sizeof(Line) - 1);  // NT stores need an aligned dst
  if (head > bytes) head = bytes;
  if (head > 0) std::memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 128; dst += 128, src += 128, bytes -= 128) {
    Line lines[kLines];
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) lines[i] = load_line(src + size_t(i) * sizeof(Line));
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) stream(reinterpret_cast<Line*>(dst) + i, lines[i]);
  }
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

void copy_pieces(const Copy* pieces, size_t n) {
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

}  // namespace
}  // namespace xpyd
