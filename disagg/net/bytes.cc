#include "disagg/net/bytes.h"

#include <cstdio>
#include <limits>

#include "base/utf8.h"

namespace xpyd::disagg {

void ByteWriter::count(size_t n) {
  XPYD_CHECK(n <= std::numeric_limits<uint32_t>::max());
  number(uint32_t(n));
}

void ByteWriter::text(std::string_view value) {
  count(value.size());
  bytes_.append(value);
}

bool ByteReader::take_into(void* out, size_t n, const char* what) {
  const std::string_view bytes = raw(what, n);
  if (!failed_) std::memcpy(out, bytes.data(), n);
  return !failed_;
}

bool ByteReader::boolean(const char* what) { return number<uint8_t>(what, uint8_t{0}, uint8_t{1}) == 1; }

size_t ByteReader::count(const char* what, size_t max_count, size_t element_bytes) {
  size_t n = number<uint32_t>(what);
  if (failed_) return 0;
  if (n > max_count) {
    fail(what, std::to_string(n) + " elements; expected at most " + std::to_string(max_count));
    return 0;
  }
  if (n > rest_.size() / element_bytes) {
    fail(what, std::to_string(n) + " elements in " + std::to_string(rest_.size()) + " bytes");
    return 0;
  }
  return n;
}

std::string_view ByteReader::raw(const char* what, size_t n) {
  if (failed_) return {};
  if (n > rest_.size()) {
    fail(what, "needs " + std::to_string(n) + " bytes, " + std::to_string(rest_.size()) + " are left");
    return {};
  }
  std::string_view bytes = rest_.substr(0, n);
  rest_.remove_prefix(n);
  return bytes;
}

std::string ByteReader::text(const char* what, size_t max_bytes) {
  return std::string(raw(what, count(what, max_bytes, 1)));
}

std::string ByteReader::utf8(const char* what, size_t max_bytes) {
  std::string value = text(what, max_bytes);
  if (is_utf8(value)) return value;
  fail(what, "the text is not UTF-8");
  return {};
}

void ByteReader::fail(const char* what, const std::string& why) {
  if (failed_) return;
  failed_ = true;
  error_ = std::string(what) + ": " + why;
}

void ByteReader::fail_range(const char* what, double value, double min, double max) {
  char text[128];
  std::snprintf(text, sizeof text, "%.17g; expected from %.17g to %.17g", value, min, max);
  fail(what, text);
}

Status ByteReader::finish() {
  if (!failed_ && !rest_.empty()) fail("message", std::to_string(rest_.size()) + " bytes are left over");
  if (failed_) return invalid(error_);
  return ok();
}

}  // namespace xpyd::disagg
