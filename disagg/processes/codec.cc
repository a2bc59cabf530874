#include "disagg/processes/codec.h"

#include <climits>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "base/siphash.h"
#include "disagg/instance/cluster.h"
#include "disagg/net/channel.h"
#include "disagg/processes/codec_fields.h"

namespace xpyd::disagg {
namespace {

// The age that stands for a time that is not set.
constexpr double kUnset = std::numeric_limits<double>::infinity();

struct Encoder : FieldWriter<Encoder> {
  double now;

  void time(const char*, double value) { to.number(value == 0 ? kUnset : now - value); }
  void request(const char*, const std::shared_ptr<const Request>& value) {
    XPYD_CHECK(value != nullptr);
    fields(*this, *value);
  }
};

// A time other than 0 is the receiver's now minus the age.
struct Decoder : FieldReader<Decoder> {
  double now;
  const Limits& limits;

  using FieldReader::number, FieldReader::numbers;
  template <class T>
  void number(const char* name, T& value, Number range) {
    const Bounds b = bounds(range, limits);
    number(name, value, b.least, b.most);
  }
  void numbers(const char* name, std::vector<int32_t>& values, Number range) {
    numbers(name, values);
    const Bounds b = bounds(range, limits);
    for (int32_t value : values)
      if (value < b.least || value > b.most)
        return from.fail(name, std::to_string(value) + ", expected from " + std::to_string(b.least) + " to " +
                                   std::to_string(b.most));
  }
  void time(const char* name, double& value) {
    double age = from.number<double>(name);
    if (age == kUnset) {
      value = 0;
    } else if (std::abs(age) <= codec::kMaxSeconds) {
      value = now - age;
    } else {
      from.fail(name, "this is not a valid time");
    }
  }
  void request(const char*, std::shared_ptr<const Request>& value) {
    auto made = std::make_shared<Request>();
    fields(*this, *made);
    if (!from.failed() && made->prompt.empty()) from.fail("prompt", "empty");
    value = std::move(made);
  }
};

struct Describer : FieldDescriber<Describer> {
  void time(const char* name, double&) { add("time", name, 8); }
  void request(const char* name, std::shared_ptr<const Request>&) {
    add("request", name, 0);
    Request one;
    fields(*this, one);
  }
};

template <class F, size_t... I>
void for_each_kind(F f, std::index_sequence<I...>) {
  (f(std::in_place_index<I>), ...);
}
using Kinds = std::make_index_sequence<std::variant_size_v<Message>>;

// The messages in the variant's order, with their direction: D from the conductor, U to the conductor, B both, A
// between instances, - only within a process.
// clang-format off
constexpr const char* kKinds[] = {
    "D StartRequest", "D AbortAttempt", "D PeerJoined", "D PeerGone", "U TokenOf",
    "U AttemptProgress", "U AttemptFailed", "U Report", "B PrefillJob", "A ReserveKv",
    "A KvReserved", "A KvDelivered", "A ReservationCancelled", "A KvOffered", "A KvTaken",
    "A KvRenewed", "- PeerBroken", "D ClearPrefixCache", "D Welcome", "D Retire",
    "U JoinRequest", "U Joined", "U LeaveRequest", "U CacheReport",
    "A FetchKv", "A KvLent", "A FetchOver"};
// clang-format on
static_assert(std::size(kKinds) == std::variant_size_v<Message>);

bool may_come(char who, Way way) {
  return way == kAnyWay || (way == kToInstance && (who == 'D' || who == 'B')) ||
         (way == kToConductor && (who == 'U' || who == 'B')) || (way == kBetweenInstances && who == 'A');
}

// Checks what must hold between fields.
struct Check {
  const Limits& limits;

  static Status choice(const ChoiceState& s) {
    if (s.choice + s.stands_for > kMaxChoices)
      return invalid("stands_for: expected at most " + std::to_string(kMaxChoices) + " choices");
    if (s.stands_for > 1 && !s.output.empty())
      return invalid("output: expected none for an attempt of several choices");
    return ok();
  }
  // The request has something left to do, and fits the context.
  Status work(const Request& r, const ChoiceState& s) const {
    const int64_t longest = int64_t(r.prompt.size()) + r.max_tokens;
    if (longest > limits.max_model_len)
      return invalid("max_tokens: " + std::to_string(longest) + " with the prompt; expected at most " +
                     std::to_string(limits.max_model_len));
    if (Status status = choice(s); !status) return status;
    if (s.choice + s.stands_for > r.n) return invalid("choice: it exceeds n = " + std::to_string(r.n));
    if (s.output.size() >= size_t(r.max_tokens))
      return invalid("output: " + std::to_string(s.output.size()) + " tokens; expected less than " +
                     std::to_string(r.max_tokens));
    return ok();
  }
  // The bound keeps later arithmetic on the layout from overflowing.
  static Status layout(const KvLayout& layout) {
    double bytes = double(layout.shape.token_bytes()) * layout.block_tokens * layout.n_blocks;
    if (bytes > 0x1p50) return invalid("layout: the pool exceeds 1 PiB");
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
      return invalid("prompt: expected at least 2 tokens, output included");
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
        return invalid("output: expected the same length for each choice, and at least one token");
    }
    return ok();
  }
  Status operator()(const TokenOf& m) const {
    if (m.event.token < 0 && m.event.finish == FinishReason::none) return invalid("token: expected a token or an end");
    return ok();
  }
};

}  // namespace

Limits limits(const ClusterOptions& o) {
  return {.vocab = o.vocab,
          .max_model_len = o.max_model_len,
          .n_layers = o.kv.shape.n_layers,
          .n_kv_heads = o.kv.shape.n_kv_heads,
          .head_dim = o.kv.shape.head_dim};
}

uint16_t frame_type(const Message& message) { return uint16_t(kFirstFrameType + message.index()); }

std::string encode(InstanceId from, InstanceId to, const Message& message, double now) {
  ByteWriter writer;
  writer.number(to);
  writer.number(from);
  Encoder encoder{{writer}, now};
  std::visit([&](const auto& m) { fields(encoder, m); }, message);
  return writer.take();
}

Result<Envelope> decode(uint16_t type, std::string_view payload, double now, const Door& door) {
  const size_t kind = size_t(type) - kFirstFrameType;
  if (type < kFirstFrameType || kind >= std::size(kKinds))
    return invalid("unknown message type " + std::to_string(type));
  const auto wrong = [kind](const Error& error) { return invalid(kKinds[kind] + 2 + (": " + error.message)); };
  if (!may_come(kKinds[kind][0], door.way)) return wrong({{}, "this peer may not send this message"});
  Envelope envelope;
  ByteReader reader(payload);
  envelope.to = reader.number<InstanceId>("to", kConductor, INT_MAX);
  envelope.from = reader.number<InstanceId>("from", kConductor, INT_MAX);
  Decoder decoder{{reader}, now, door.limits};
  for_each_kind(
      [&]<size_t I>(std::in_place_index_t<I>) {
        if (kind == I) fields(decoder, envelope.message.emplace<I>());
      },
      Kinds());
  if (Status status = reader.finish(); !status) return wrong(status.error());
  const Check check{door.limits};
  const Status fits = std::visit([&](const auto& m) { return check(m); }, envelope.message);
  if (!fits) return wrong(fits.error());
  return envelope;
}

uint64_t codec_schema() {
  static const uint64_t schema = [] {
    Describer describer;
    for_each_kind(
        [&]<size_t I>(std::in_place_index_t<I>) {
          describer.add("message", "", I);
          std::variant_alternative_t<I, Message> one;
          fields(describer, one);
        },
        Kinds());
    return siphash({0, 0}, describer.out);
  }();
  return schema;
}

}  // namespace xpyd::disagg
