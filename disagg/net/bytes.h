// The byte format of the control protocol: little-endian integers of fixed width, and strings and arrays behind a u32
// count. A reader never allocates more elements than the remaining bytes could hold. No input causes undefined
// behaviour.
//
// Thread safety: each object belongs to one thread.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace xpyd::disagg {

static_assert(std::endian::native == std::endian::little, "integers are copied as they lie");

template <class T>
concept WireNumber = (std::integral<T> || std::floating_point<T>)&&!std::same_as<T, bool>;

class ByteWriter {
 public:
  ByteWriter() { bytes_.reserve(256); }  // one allocation for most messages
  template <WireNumber T>
  void number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void boolean(bool value) { number(uint8_t{value}); }
  void text(std::string_view value);
  template <WireNumber T>
  void numbers(const std::vector<T>& values) {
    count(values.size());
    if (!values.empty()) bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  void count(size_t n);  // the caller writes n elements next
  void raw(std::string_view bytes) { bytes_.append(bytes); }

  size_t size() const { return bytes_.size(); }
  const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// A reader keeps the first error, so the caller checks once, with finish(). After an error every read returns zero or
// nothing. `what` names the field in the error.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <WireNumber T>
  T number(const char* what) {
    T value{};
    if (!take_into(&value, sizeof value, what)) value = T{};
    return value;
  }
  // Requires min <= value <= max, else fails.
  template <WireNumber T>
  T number(const char* what, T min, T max) {
    T value = number<T>(what);
    if (failed()) return T{};
    if (value >= min && value <= max) return value;
    fail_range(what, double(value), double(min), double(max));
    return T{};
  }
  bool boolean(const char* what);  // requires 0 or 1
  std::string text(const char* what, size_t max_bytes);
  std::string utf8(const char* what, size_t max_bytes);  // requires valid UTF-8
  template <WireNumber T>
  std::vector<T> numbers(const char* what, size_t max_count) {
    size_t n = count(what, max_count, sizeof(T));
    std::vector<T> values(n);
    if (n && !take_into(values.data(), n * sizeof(T), what)) values.clear();
    return values;
  }
  // Reads a count of elements that each take at least `element_bytes` (> 0).
  size_t count(const char* what, size_t max_count, size_t element_bytes);
  std::string_view raw(const char* what, size_t n);
  bool take_into(void* out, size_t n, const char* what);  // false: failed, nothing written

  void fail(const char* what, const std::string& why);
  bool failed() const { return failed_; }
  size_t left() const { return rest_.size(); }
  // Ok if nothing failed and no bytes are left.
  Status finish();

 private:
  void fail_range(const char* what, double value, double min, double max);

  std::string_view rest_;
  bool failed_ = false;
  std::string error_;
};

}  // namespace xpyd::disagg
