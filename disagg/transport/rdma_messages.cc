#include "disagg/transport/rdma_messages.h"

#include <charconv>
#include <cstring>

namespace xpyd::rdma {
namespace {

constexpr uint8_t kHello = 1;
constexpr uint32_t kVersion = 0x78726401;
constexpr size_t kMaxRefusal = 256;

class Writer {
 public:
  template <class T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    for (size_t i = 0; i < sizeof value; ++i) bytes_.push_back(char(uint64_t(value) >> (8 * i)));
  }
  void put(std::string_view text) { bytes_.append(text); }
  std::string framed() && {
    Writer whole;
    whole.put(uint32_t(bytes_.size()));
    whole.put(std::string_view(bytes_));
    return std::move(whole.bytes_);
  }

 private:
  std::string bytes_;
};

// After a read past the end every value is 0, and ok() false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
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

void put(Writer& to, const RailEnd& end) {
  to.put(std::string_view(reinterpret_cast<const char*>(end.gid.data()), end.gid.size()));
  to.put(end.lid);
  to.put(end.mtu);
  to.put(end.reads);
  to.put(end.number);
  to.put(end.psn);
}

RailEnd get_end(Reader& from) {
  RailEnd end;
  std::string_view gid = from.take(end.gid.size());
  std::memcpy(end.gid.data(), gid.data(), gid.size());
  end.lid = from.get<uint16_t>();
  end.mtu = from.get<uint8_t>();
  end.reads = from.get<uint8_t>();
  end.number = from.get<uint32_t>();
  end.psn = from.get<uint32_t>();
  return end;
}

void put(Writer& to, const std::vector<RailEnd>& rails) {
  to.put(uint8_t(rails.size()));
  for (const RailEnd& end : rails) put(to, end);
}

bool get_rails(Reader& from, std::vector<RailEnd>& rails) {
  constexpr uint32_t kLimit = 1u << 24;
  const size_t n = from.get<uint8_t>();
  if (n > kMaxRails) return false;
  for (size_t i = 0; i < n; ++i) {
    const RailEnd end = get_end(from);
    if (!from.ok() || end.mtu < 1 || end.mtu > 5 || end.reads < 1 || end.number >= kLimit ||
        end.psn >= kLimit)
      return false;
    rails.push_back(end);
  }
  return from.ok();
}

bool possible(const WindowKeys& window) {
  uint64_t end = 0;
  for (const WindowKeys::Range& range : window.ranges) {
    if (range.begin < end || range.bytes == 0 || range.bytes > UINT64_MAX - range.begin)
      return false;
    end = range.begin + range.bytes;
  }
  return window.generation != 0;
}

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

std::string to_text(const Address& address) {
  std::string text =
      "rdma1," + address.host + "," + std::to_string(address.port) + "," + hex(address.token);
  for (const Address::Region& region : address.regions)
    text += "," + hex(region.base) + "+" + hex(region.bytes);
  return text;
}

Result<Address> parse_address(const std::string& text) {
  auto wrong = [](const char* what) {
    return invalid(std::string("address of an rdma transport: ") + what);
  };
  std::string_view rest = text;
  if (next(rest, ',') != "rdma1") return wrong("it does not begin with rdma1");
  Address address;
  address.host = next(rest, ',');
  if (address.host.empty()) return wrong("expected a host");
  if (!number(next(rest, ','), address.port, 10) || address.port == 0)
    return wrong("expected a port, 1 to 65535");
  if (!number(next(rest, ','), address.token, 16)) return wrong("expected a token, hexadecimal");
  while (!rest.empty()) {
    std::string_view part = next(rest, ',');
    Address::Region region;
    if (!number(next(part, '+'), region.base, 16) || !number(part, region.bytes, 16) ||
        region.bytes > UINT64_MAX - region.base)
      return wrong("expected regions, base+bytes, hexadecimal");
    if (address.regions.size() == kMaxRegions) return wrong("more than 1024 regions");
    address.regions.push_back(region);
  }
  return address;
}

std::string frame(const Hello& hello) {
  Writer to;
  to.put(kHello);
  to.put(kVersion);
  to.put(hello.from);
  to.put(hello.token);
  put(to, hello.rails);
  to.put(std::string_view(hello.refusal).substr(0, kMaxRefusal));
  return std::move(to).framed();
}

std::optional<Hello> parse_hello(std::string_view body) {
  Reader from(body);
  Hello hello;
  if (from.get<uint8_t>() != kHello || from.get<uint32_t>() != kVersion) return std::nullopt;
  hello.from = from.get<PeerId>();
  hello.token = from.get<uint64_t>();
  if (!get_rails(from, hello.rails) || from.left() > kMaxRefusal) return std::nullopt;
  hello.refusal = from.take(from.left());
  return hello;
}

std::string frame(const Message& message) {
  Writer to;
  to.put(uint8_t(message.kind));
  switch (message.kind) {
    case Message::opened:
    case Message::closed:
      to.put(message.window.index);
      to.put(message.window.generation);
      to.put(uint8_t(message.window.op));
      for (const WindowKeys::Range& range : message.window.ranges) {
        to.put(range.begin);
        to.put(range.bytes);
        for (uint32_t key : range.keys) to.put(key);
      }
      break;
    case Message::sync:
    case Message::refused:
    case Message::synced:
      to.put(message.number);
      break;
    case Message::renew:
    case Message::renewed:
      to.put(message.number);
      put(to, message.rails);
      break;
  }
  return std::move(to).framed();
}

std::optional<Message> parse_message(std::string_view body, size_t n_rails) {
  Reader from(body);
  Message message;
  const uint8_t kind = from.get<uint8_t>();
  message.kind = Message::Kind(kind);
  switch (kind) {
    case Message::opened:
    case Message::closed: {
      WindowKeys& window = message.window;
      window.index = from.get<uint32_t>();
      window.generation = from.get<uint32_t>();
      const uint8_t op = from.get<uint8_t>();
      window.op = KvOp(op);
      const size_t each = 16 + 4 * n_rails, n = from.left() / each;
      if (op > 1 || from.left() % each != 0 || n > (kind == Message::opened ? kMaxKeys : 0))
        return std::nullopt;
      window.ranges.resize(n);
      for (WindowKeys::Range& range : window.ranges) {
        range.begin = from.get<uint64_t>();
        range.bytes = from.get<uint64_t>();
        for (size_t i = 0; i < n_rails; ++i) range.keys.push_back(from.get<uint32_t>());
      }
      if (!possible(window)) return std::nullopt;
      break;
    }
    case Message::sync:
    case Message::refused:
    case Message::synced:
      message.number = from.get<uint64_t>();
      break;
    case Message::renew:
    case Message::renewed:
      message.number = from.get<uint64_t>();
      if (!get_rails(from, message.rails)) return std::nullopt;
      break;
    default:
      return std::nullopt;
  }
  if (!from.ok() || from.left() > 0) return std::nullopt;
  return message;
}

}  // namespace xpyd::rdma
