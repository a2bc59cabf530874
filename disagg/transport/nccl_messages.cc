#include "disagg/transport/nccl_messages.h"

#include <cstring>

namespace xpyd::nccl {
namespace {

constexpr uint8_t kHello = 1;
constexpr uint32_t kVersion = 0x786e6302;
constexpr size_t kMaxRefusal = 256;

void put(SideWriter& to, const NcclUniqueId& id) { to.put(std::string_view(id.internal, sizeof id.internal)); }

NcclUniqueId get_id(SideReader& from) {
  NcclUniqueId id;
  const std::string_view bytes = from.take(sizeof id.internal);
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

// The counts are not believed before the bytes are there.
bool get_ask(SideReader& from, Ask& ask) {
  ask.post = from.get<uint64_t>();
  ask.group = from.get<uint32_t>();
  ask.n_groups = from.get<uint32_t>();
  ask.number = from.get<uint32_t>();
  ask.window.index = from.get<uint32_t>();
  ask.window.generation = from.get<uint32_t>();
  ask.window.secret = from.get<uint64_t>();
  const uint8_t op = from.get<uint8_t>();
  ask.op = KvOp(op);
  const size_t n = from.left() / 16;
  if (!from.ok() || op > 1 || ask.group >= ask.n_groups || from.left() % 16 != 0 || n > kGroupParts) return false;
  size_t left = kGroupBytes;
  for (size_t i = 0; i < n; ++i) {
    const Range range{from.get<uint64_t>(), from.get<uint64_t>()};
    if (range.bytes == 0 || range.bytes > left || range.bytes > UINT64_MAX - range.begin) return false;
    left -= range.bytes;
    ask.ranges.push_back(range);
  }
  return true;
}

}  // namespace

std::string frame(const Hello& hello) {
  SideWriter to;
  to.put(kHello);
  to.put(kVersion);
  to.put(hello.from);
  to.put(hello.token);
  put(to, hello.id);
  to.put(std::string_view(hello.refusal).substr(0, kMaxRefusal));
  return std::move(to).framed();
}

std::optional<Hello> parse_hello(std::string_view body) {
  SideReader from(body);
  Hello hello;
  if (from.get<uint8_t>() != kHello || from.get<uint32_t>() != kVersion) return std::nullopt;
  hello.from = from.get<PeerId>();
  hello.token = from.get<uint64_t>();
  hello.id = get_id(from);
  if (!from.ok() || from.left() > kMaxRefusal) return std::nullopt;
  hello.refusal = from.take(from.left());
  return hello;
}

std::string frame(const Message& message) {
  SideWriter to;
  to.put(uint8_t(message.kind));
  to.put(message.seq);
  if (message.kind == Message::renew) put(to, message.id);
  if (message.kind == Message::ask) {
    const Ask& ask = message.asked;
    to.put(ask.post);
    to.put(ask.group);
    to.put(ask.n_groups);
    to.put(ask.number);
    to.put(ask.window.index);
    to.put(ask.window.generation);
    to.put(ask.window.secret);
    to.put(uint8_t(ask.op));
    for (const Range& range : ask.ranges) {
      to.put(range.begin);
      to.put(range.bytes);
    }
  }
  return std::move(to).framed();
}

std::optional<Message> parse_message(std::string_view body) {
  SideReader from(body);
  Message message;
  const uint8_t kind = from.get<uint8_t>();
  if (kind < Message::ask || kind > Message::renew) return std::nullopt;
  message.kind = Message::Kind(kind);
  message.seq = from.get<uint64_t>();
  if (message.kind == Message::renew) message.id = get_id(from);
  if (message.kind == Message::ask && !get_ask(from, message.asked)) return std::nullopt;
  if (!from.ok() || from.left() > 0) return std::nullopt;
  return message;
}

}  // namespace xpyd::nccl
