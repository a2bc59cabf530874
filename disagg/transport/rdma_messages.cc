#include "disagg/transport/rdma_messages.h"

#include <cstring>

namespace xpyd::rdma {
namespace {

constexpr uint8_t kHello = 1;
constexpr uint32_t kVersion = 0x78726401;
constexpr size_t kMaxRefusal = 256;

void put(SideWriter& to, const RailEnd& end) {
  to.put(std::string_view(reinterpret_cast<const char*>(end.gid.data()), end.gid.size()));
  to.put(end.lid);
  to.put(end.mtu);
  to.put(end.reads);
  to.put(end.number);
  to.put(end.psn);
}

RailEnd get_end(SideReader& from) {
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

void put(SideWriter& to, const std::vector<RailEnd>& rails) {
  to.put(uint8_t(rails.size()));
  for (const RailEnd& end : rails) put(to, end);
}

bool get_rails(SideReader& from, std::vector<RailEnd>& rails) {
  constexpr uint32_t kLimit = 1u << 24;
  const size_t n = from.get<uint8_t>();
  if (n > kMaxRails) return false;
  for (size_t i = 0; i < n; ++i) {
    const RailEnd end = get_end(from);
    if (!from.ok() || end.mtu < 1 || end.mtu > 5 || end.reads < 1 || end.number >= kLimit || end.psn >= kLimit)
      return false;
    rails.push_back(end);
  }
  return from.ok();
}

bool possible(const WindowKeys& window) {
  uint64_t end = 0;
  for (const WindowKeys::Range& range : window.ranges) {
    if (range.begin < end || range.bytes == 0 || range.bytes > UINT64_MAX - range.begin) return false;
    end = range.begin + range.bytes;
  }
  return window.generation != 0;
}

}  // namespace

std::string frame(const Hello& hello) {
  SideWriter to;
  to.put(kHello);
  to.put(kVersion);
  to.put(hello.from);
  to.put(hello.token);
  put(to, hello.rails);
  to.put(std::string_view(hello.refusal).substr(0, kMaxRefusal));
  return std::move(to).framed();
}

std::optional<Hello> parse_hello(std::string_view body) {
  SideReader from(body);
  Hello hello;
  if (from.get<uint8_t>() != kHello || from.get<uint32_t>() != kVersion) return std::nullopt;
  hello.from = from.get<PeerId>();
  hello.token = from.get<uint64_t>();
  if (!get_rails(from, hello.rails) || from.left() > kMaxRefusal) return std::nullopt;
  hello.refusal = from.take(from.left());
  return hello;
}

std::string frame(const Message& message) {
  SideWriter to;
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
    case Message::synced: to.put(message.number); break;
    case Message::renew:
    case Message::renewed:
      to.put(message.number);
      put(to, message.rails);
      break;
  }
  return std::move(to).framed();
}

std::optional<Message> parse_message(std::string_view body, size_t n_rails) {
  SideReader from(body);
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
      if (op > 1 || from.left() % each != 0 || n > (kind == Message::opened ? kMaxKeys : 0)) return std::nullopt;
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
    case Message::synced: message.number = from.get<uint64_t>(); break;
    case Message::renew:
    case Message::renewed:
      message.number = from.get<uint64_t>();
      if (!get_rails(from, message.rails)) return std::nullopt;
      break;
    default: return std::nullopt;
  }
  if (!from.ok() || from.left() > 0) return std::nullopt;
  return message;
}

}  // namespace xpyd::rdma
