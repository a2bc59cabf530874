#include "disagg/control/codec.h"

#include <climits>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/siphash.h"
#include "base/utf8.h"
#include "disagg/control/channel.h"
#include "disagg/control/codec_fields.h"
#include "disagg/control/frame.h"
#include "disagg/control/wire.h"
#include "disagg/envelope.h"

namespace xpyd {
namespace {

// Of a time that is not set.
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Encoder {
  template <class T>
  using Ref = const T&;

  ByteWriter& to;
  double now;

  void number(const char*, int value, int, int) { to.number(value); }
  template <class T>
  void real(const char*, T value, double, double) {
    to.number(value);
  }
  template <class T>
  void bits(const char*, T value) {
    to.number(value);
  }
  void flag(const char*, bool value) { to.boolean(value); }
  void time(const char*, double value) { to.number(value == 0 ? kNever : now - value); }
  template <class E>
  void choice(const char*, E value, E) {
    to.number(uint8_t(value));
  }
  // An explanation may quote bytes from anywhere.
  void text(const char*, const std::string& value) {
    to.text(is_utf8(value) ? value : replace_invalid_utf8(value));
  }
  template <class T>
  void numbers(const char*, const std::vector<T>& values, std::type_identity_t<T> = 0) {
    to.numbers(values);
  }
  template <class T>
  void list(const char*, const std::vector<T>& values, size_t max) {
    XPYD_CHECK(values.size() <= max);
    to.count(values.size());
    for (const T& value : values) {
      if constexpr (std::is_same_v<T, std::string>)
        text("", value);
      else
        codec::fields(*this, value);
    }
  }
  template <class T>
  void maybe(const char*, const std::optional<T>& value) {
    to.boolean(value.has_value());
    if (value) codec::fields(*this, *value);
  }
  template <class T>
  void part(const char*, const T& value) {
    codec::fields(*this, value);
  }
  void request(const char*, const std::shared_ptr<const Request>& value) {
    XPYD_CHECK(value != nullptr);
    codec::fields(*this, *value);
  }
};

// Every time but 0 is the receiver's now less the age.
struct Decoder {
  template <class T>
  using Ref = T&;

  ByteReader& from;
  double now;

  void number(const char* name, int& value, int min, int max) {
    value = from.number<int>(name, min, max);
  }
  template <class T>
  void real(const char* name, T& value, double min, double max) {
    value = from.number<T>(name, T(min), T(max));
  }
  template <class T>
  void bits(const char* name, T& value) {
    value = from.number<T>(name);
  }
  void flag(const char* name, bool& value) { value = from.boolean(name); }
  void time(const char* name, double& value) {
    double age = from.number<double>(name);
    if (age == kNever) {
      value = 0;
    } else if (std::abs(age) <= codec::kMaxSeconds) {
      value = now - age;
    } else {
      from.fail(name, "not a time");
    }
  }
  template <class E>
  void choice(const char* name, E& value, E last) {
    value = E(from.number<uint8_t>(name, 0, uint8_t(last)));
  }
  void text(const char* name, std::string& value) {
    value = from.utf8(name, kMaxFramePayloadBytes);
  }
  template <class T>
  void numbers(const char* name, std::vector<T>& values, std::type_identity_t<T> min = 0) {
    values = from.numbers<T>(name, kMaxFramePayloadBytes);
    for (T value : values)
      if (value < min) return from.fail(name, std::to_string(value) + " is below the least");
  }
  // One by one: an element in memory is larger than its bytes here may be.
  template <class T>
  void list(const char* name, std::vector<T>& values, size_t max) {
    size_t n = from.count(name, max, 1);
    for (size_t i = 0; i < n && !from.failed(); ++i) {
      values.emplace_back();
      if constexpr (std::is_same_v<T, std::string>)
        text(name, values.back());
      else
        codec::fields(*this, values.back());
    }
  }
  template <class T>
  void maybe(const char* name, std::optional<T>& value) {
    if (from.boolean(name)) codec::fields(*this, value.emplace());
  }
  template <class T>
  void part(const char*, T& value) {
    codec::fields(*this, value);
  }
  void request(const char*, std::shared_ptr<const Request>& value) {
    auto made = std::make_shared<Request>();
    codec::fields(*this, *made);
    if (!from.failed() && made->prompt.empty()) from.fail("prompt", "empty");
    value = std::move(made);
  }
};

// Names, types and limits as text.
struct Describer {
  template <class T>
  using Ref = T&;

  std::string out;

  void add(const char* kind, const char* name, size_t bytes, double a = 0, double b = 0) {
    out += std::string(kind) + " " + name + " " + std::to_string(bytes) + " " + std::to_string(a) +
           " " + std::to_string(b) + "\n";
  }
  void number(const char* name, int&, int min, int max) { add("number", name, 4, min, max); }
  template <class T>
  void real(const char* name, T&, double min, double max) {
    add("real", name, sizeof(T), min, max);
  }
  template <class T>
  void bits(const char* name, T&) {
    add(std::is_integral_v<T> ? "integer" : "float", name, sizeof(T));
  }
  void flag(const char* name, bool&) { add("flag", name, 1); }
  void time(const char* name, double&) { add("time", name, 8); }
  template <class E>
  void choice(const char* name, E&, E last) {
    add("choice", name, 1, double(last));
  }
  void text(const char* name, std::string&) { add("text", name, 1); }
  template <class T>
  void numbers(const char* name, std::vector<T>&, std::type_identity_t<T> min = 0) {
    add("numbers", name, sizeof(T), double(min));
  }
  template <class T>
  void list(const char* name, std::vector<T>&, size_t max) {
    add("list", name, 0, double(max));
    T one{};
    if constexpr (!std::is_same_v<T, std::string>) codec::fields(*this, one);
  }
  template <class T>
  void maybe(const char* name, std::optional<T>&) {
    add("maybe", name, 1);
    T one{};
    codec::fields(*this, one);
  }
  template <class T>
  void part(const char* name, T& value) {
    add("part", name, 0);
    codec::fields(*this, value);
  }
  void request(const char* name, std::shared_ptr<const Request>&) {
    add("request", name, 0);
    Request one;
    codec::fields(*this, one);
  }
};

template <class F, size_t... I>
void for_each_kind(F f, std::index_sequence<I...>) {
  (f(std::in_place_index<I>), ...);
}
using Kinds = std::make_index_sequence<std::variant_size_v<Message::variant>>;

// What must hold between fields.
Status check_choice(const ChoiceState& state) {
  if (state.choice + state.stands_for > codec::kMaxChoices)
    return invalid("stands_for: more than " + std::to_string(codec::kMaxChoices) + " choices");
  return ok();
}

// So that no later arithmetic on it overflows.
Status check_layout(const KvLayout& layout) {
  double bytes = double(layout.shape.token_bytes()) * layout.block_tokens * layout.n_blocks;
  if (bytes > 0x1p50) return invalid("layout: a pool of more than 1 PiB");
  return ok();
}

Status check(const Message& message) {
  Status status = ok();
  auto one = [&](const ChoiceState& state) {
    if (status) status = check_choice(state);
  };
  std::visit(
      [&](const auto& m) {
        if constexpr (requires { m.info; }) status = check_layout(m.info.layout);
        if constexpr (requires { m.state; }) one(m.state);
        if constexpr (requires { m.choices; })
          for (const ChoiceState& state : m.choices) one(state);
      },
      message);
  return status;
}

}  // namespace

uint16_t frame_type(const Message& message) { return uint16_t(kFirstFrameType + message.index()); }

std::string encode(InstanceId from, InstanceId to, const Message& message, double now) {
  ByteWriter writer;
  writer.number(to);
  writer.number(from);
  Encoder encoder{writer, now};
  std::visit([&](const auto& m) { codec::fields(encoder, m); }, message);
  return writer.take();
}

Result<Envelope> decode(uint16_t type, std::string_view payload, double now) {
  Envelope envelope;
  ByteReader reader(payload);
  envelope.to = reader.number<InstanceId>("to", kConductor, INT_MAX);
  envelope.from = reader.number<InstanceId>("from", kConductor, INT_MAX);
  Decoder decoder{reader, now};
  bool known = false;
  for_each_kind(
      [&]<size_t I>(std::in_place_index_t<I>) {
        if (type != kFirstFrameType + I) return;
        known = true;
        codec::fields(decoder, envelope.message.emplace<I>());
      },
      Kinds());
  if (!known) return invalid("a message of unknown type " + std::to_string(type));
  if (Status status = reader.finish(); !status) return status.error();
  if (Status status = check(envelope.message); !status) return status.error();
  return envelope;
}

Result<InstanceId> destination(std::string_view payload) {
  ByteReader reader(payload);
  InstanceId to = reader.number<InstanceId>("to", kConductor, INT_MAX);
  if (reader.failed()) return reader.finish().error();
  return to;
}

uint64_t codec_schema() {
  static const uint64_t schema = [] {
    Describer describer;
    for_each_kind(
        [&]<size_t I>(std::in_place_index_t<I>) {
          describer.add("message", "", I);
          std::variant_alternative_t<I, Message::variant> one;
          codec::fields(describer, one);
        },
        Kinds());
    return siphash({0, 0}, describer.out);
  }();
  return schema;
}

}  // namespace xpyd
