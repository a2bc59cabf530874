#include "disagg/transport/side_bytes.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace xpyd {
namespace {

constexpr size_t kMaxRegions = 1024;

template <class T>
bool number(std::string_view text, T& value, int base) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return error == std::errc() && end == text.data() + text.size();
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(value));
  return text;
}

// The text up to the next `separator`, which is taken as well.
std::string_view next(std::string_view& text, char separator) {
  const size_t at = std::min(text.find(separator), text.size());
  std::string_view taken = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return taken;
}

}  // namespace

std::string to_text(const std::string& kind, const SideAddress& address) {
  std::string text = kind + "," + address.host + "," + std::to_string(address.port) + "," + hex(address.token);
  for (const SideAddress::Region& region : address.regions) text += "," + hex(region.base) + "+" + hex(region.bytes);
  return text;
}

Result<SideAddress> parse_side_address(const std::string& kind, const std::string& text) {
  auto wrong = [&](const std::string& what) { return invalid("address of a " + kind + " transport: " + what); };
  std::string_view rest = text;
  if (next(rest, ',') != kind) return wrong("it does not begin with " + kind);
  SideAddress address;
  address.host = next(rest, ',');
  if (address.host.empty()) return wrong("expected a host");
  if (!number(next(rest, ','), address.port, 10) || address.port == 0) return wrong("expected a port, 1 to 65535");
  if (!number(next(rest, ','), address.token, 16)) return wrong("expected a token, hexadecimal");
  while (!rest.empty()) {
    std::string_view part = next(rest, ',');
    SideAddress::Region region;
    if (!number(next(part, '+'), region.base, 16) || !number(part, region.bytes, 16) ||
        region.bytes > UINT64_MAX - region.base)
      return wrong("expected regions, base+bytes, hexadecimal");
    if (address.regions.size() == kMaxRegions) return wrong("more than 1024 regions");
    address.regions.push_back(region);
  }
  return address;
}

}  // namespace xpyd
