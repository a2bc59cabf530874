// Bytes of a side channel's frames, and the addresses at which side channels are reached. Numbers
// are little endian. What is read comes from outside: a read past the end is seen, never made.
//
// Thread safety: plain values and functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace xpyd {

class SideWriter {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    for (size_t i = 0; i < sizeof value; ++i) bytes_.push_back(char(uint64_t(value) >> (8 * i)));
  }
  void put(std::string_view text) { bytes_.append(text); }
  std::string framed() && {  // with the length before it
    SideWriter whole;
    whole.put(uint32_t(bytes_.size()));
    whole.put(std::string_view(bytes_));
    return std::move(whole.bytes_);
  }

 private:
  std::string bytes_;
};

// After a read past the end every value is 0, and ok() false.
class SideReader {
 public:
  explicit SideReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    uint64_t value = 0;
    std::string_view raw = take(sizeof(T));
    for (size_t i = 0; i < raw.size(); ++i) value |= uint64_t(uint8_t(raw[i])) << (8 * i);
    return T(value);
  }
  std::string_view take(size_t n) {
    if (n > bytes_.size()) {
      ok_ = false;
      n = 0;
    }
    std::string_view taken = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return taken;
  }
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

// KvTransport::address() of such a wire: KIND,HOST,PORT,TOKEN,BASE+BYTES,..., text without blanks,
// known to the cluster only. `token` is what lets somebody in.
struct SideAddress {
  struct Region {
    uint64_t base = 0, bytes = 0;
    bool operator==(const Region&) const = default;
  };
  bool operator==(const SideAddress&) const = default;
  std::string host;  // without commas
  uint16_t port = 0;
  uint64_t token = 0;
  std::vector<Region> regions;
};
std::string to_text(const std::string& kind, const SideAddress& address);
Result<SideAddress> parse_side_address(const std::string& kind, const std::string& text);

}  // namespace xpyd
