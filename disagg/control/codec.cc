#include "disagg/control/codec.h"

#include <climits>
#include <cmath>
#include <iterator>
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

  template <class T>
  void number(const char*, T value, Number) {
    to.number(value);
  }
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
  void text(const char*, const std::string& value) { to.text(is_utf8(value) ? value : replace_invalid_utf8(value)); }
  template <class T>
  void numbers(const char*, const std::vector<T>& values, Number = {}) {
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
  const Limits& limits;

  template <class T>
  void number(const char* name, T& value, Number range) {
    const Bounds b = bounds(range, limits);
    value = from.number<T>(name, T(b.least), T(b.most));
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
  void text(const char* name, std::string& value) { value = from.utf8(name, kMaxFramePayloadBytes); }
  template <class T>
  void numbers(const char* name, std::vector<T>& values) {
    values = from.numbers<T>(name, kMaxFramePayloadBytes);
  }
  void numbers(const char* name, std::vector<int32_t>& values, Number range) {
    numbers(name, values);
    const Bounds b = bounds(range, limits);
    for (int32_t value : values)
      if (value < b.least || value > b.most)
        return from.fail(name, std::to_string(value) + ", expected from " + std::to_string(b.least) + " to " +
                                   std::to_string(b.most));
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
    out += std::string(kind) + " " + name + " " + std::to_string(bytes) + " " + std::to_string(a) + " " +
           std::to_string(b) + "\n";
  }
  template <class T>
  void number(const char* name, T&, Number range) {
    add("number", name, sizeof(T), double(range));
  }
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
  void numbers(const char* name, std::vector<T>&, Number range = Number::n_kinds) {
    add("numbers", name, sizeof(T), double(range));
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

// The kinds in the variant's order, and who says them to whom: D down, from the conductor; U up, to
// it; B both; A across, between instances; - by a worker to its own instance.
// clang-format off
constexpr const char* kKinds[] = {
    "D StartRequest", "D AbortAttempt", "D PeerJoined", "D PeerGone", "U TokenOf",
    "U AttemptProgress", "U AttemptFailed", "U Report", "B PrefillJob", "A ReserveKv",
    "A KvReserved", "A KvDelivered", "A ReservationCancelled", "A KvOffered", "A KvTaken",
    "A KvRenewed", "- PeerBroken", "D ClearPrefixCache", "D Welcome", "D Retire",
    "U JoinRequest", "U Joined", "U LeaveRequest", "U CacheReport"};
// clang-format on
static_assert(std::size(kKinds) == std::variant_size_v<Message::variant>);

bool may_come(char who, Way way) {
  return way == kAnyWay || (way == kToInstance && (who == 'D' || who == 'B')) ||
         (way == kToConductor && (who == 'U' || who == 'B')) || (way == kBetweenInstances && who == 'A');
}

// What must hold between fields.
struct Check {
  const Limits& limits;

  static Status choice(const ChoiceState& s) {
    if (s.choice + s.stands_for > kMaxChoices)
      return invalid("stands_for: more than " + std::to_string(kMaxChoices) + " choices");
    if (s.stands_for > 1 && !s.output.empty()) return invalid("output: of several choices, expected none");
    return ok();
  }
  // Something of the request is left to be done, and fits the context.
  Status work(const Request& r, const ChoiceState& s) const {
    const int64_t longest = int64_t(r.prompt.size()) + r.max_tokens;
    if (longest > limits.max_model_len)
      return invalid("max_tokens: " + std::to_string(longest) + " with the prompt, expected " +
                     std::to_string(limits.max_model_len) + " at most");
    if (Status status = choice(s); !status) return status;
    if (s.choice + s.stands_for > r.n) return invalid("choice: of a request with " + std::to_string(r.n));
    if (s.output.size() >= size_t(r.max_tokens))
      return invalid("output: " + std::to_string(s.output.size()) + " tokens, expected less than " +
                     std::to_string(r.max_tokens));
    return ok();
  }
  // So that no later arithmetic on it overflows.
  static Status layout(const KvLayout& layout) {
    double bytes = double(layout.shape.token_bytes()) * layout.block_tokens * layout.n_blocks;
    if (bytes > 0x1p50) return invalid("layout: a pool of more than 1 PiB");
    return ok();
  }

  template <class M>
  Status operator()(const M& m) const {
    if constexpr (requires { m.info; }) return layout(m.info.layout);
    if constexpr (requires { m.state; }) return work(*m.request, m.state);
    return ok();
  }
  Status operator()(const PrefillJob& m) const {
    if (m.request->prompt.size() + m.state.output.size() < 2)
      return invalid("prompt: nothing that another instance could compute");
    return work(*m.request, m.state);
  }
  Status operator()(const KvDelivered& m) const {
    for (const ChoiceState& state : m.choices)
      if (Status status = choice(state); !status) return status;
    return ok();
  }
  Status operator()(const KvOffered& m) const {
    if (m.choices.empty()) return invalid("choices: none");
    for (const ChoiceState& state : m.choices) {
      if (Status status = work(*m.request, state); !status) return status;
      if (state.output.empty() || state.output.size() != m.choices[0].output.size())
        return invalid("output: expected as much of each choice, and one token at least");
    }
    return ok();
  }
  Status operator()(const TokenOf& m) const {
    if (m.event.token < 0 && m.event.finish == FinishReason::none) return invalid("token: none, and no end either");
    return ok();
  }
};

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

Result<Envelope> decode(uint16_t type, std::string_view payload, double now, const Door& door) {
  const size_t kind = size_t(type) - kFirstFrameType;
  if (type < kFirstFrameType || kind >= std::size(kKinds))
    return invalid("a message of unknown type " + std::to_string(type));
  const auto wrong = [kind](const Error& error) { return invalid(kKinds[kind] + 2 + (": " + error.message)); };
  if (!may_come(kKinds[kind][0], door.way)) return wrong({{}, "not for this one to say"});
  Envelope envelope;
  ByteReader reader(payload);
  envelope.to = reader.number<InstanceId>("to", kConductor, INT_MAX);
  envelope.from = reader.number<InstanceId>("from", kConductor, INT_MAX);
  Decoder decoder{reader, now, door.limits};
  for_each_kind(
      [&]<size_t I>(std::in_place_index_t<I>) {
        if (kind == I) codec::fields(decoder, envelope.message.emplace<I>());
      },
      Kinds());
  if (Status status = reader.finish(); !status) return wrong(status.error());
  const Check check{door.limits};
  const Status fits = std::visit([&](const auto& m) { return check(m); },
                                 static_cast<const Message::variant&>(envelope.message));
  if (!fits) return wrong(fits.error());
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
