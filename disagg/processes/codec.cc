#include "disagg/processes/codec.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "disagg/net/channel.h"
#include "disagg/processes/codec_fields.h"

namespace xpyd::disagg {
namespace {

// These fields are Clock seconds. All other numbers cross unchanged.
constexpr std::string_view kTimes[] = {"arrival_s", "deadline_s", "queued_s", "scheduled_s", "time_s", "heartbeat_s"};
bool is_time(std::string_view name) { return std::ranges::find(kTimes, name) != std::end(kTimes); }

// The age that stands for a time that is not set.
constexpr double kUnset = std::numeric_limits<double>::infinity();

struct Encoder : FieldWriter<Encoder> {
  double now;

  using FieldWriter::number;
  void number(const char* name, double value) {
    to.number(!is_time(name) ? value : value == 0 ? kUnset : now - value);
  }
  template <class T>
  void shared(const char*, const std::shared_ptr<const T>& value) {
    XPYD_CHECK(value != nullptr);
    fields(*this, *value);
  }
};

// A time other than 0 is the receiver's now minus the age.
struct Decoder : FieldReader<Decoder> {
  double now;

  using FieldReader::number;
  void number(const char* name, double& value) {
    value = from.number<double>(name);
    if (is_time(name)) value = value == kUnset ? 0 : now - value;
  }
  template <class T>
  void shared(const char*, std::shared_ptr<const T>& value) {
    auto made = std::make_shared<T>();
    fields(*this, *made);
    value = std::move(made);
  }
};

template <class F, size_t... I>
void for_each_kind(F f, std::index_sequence<I...>) {
  (f(std::in_place_index<I>), ...);
}

constexpr size_t kKinds = std::variant_size_v<Message>;

}  // namespace

uint16_t frame_type(const Message& message) { return uint16_t(kFirstFrameType + message.index()); }

std::string encode(InstanceId from, InstanceId to, const Message& message, double now) {
  ByteWriter writer;
  writer.number(to);
  writer.number(from);
  Encoder encoder{{writer}, now};
  std::visit([&](const auto& m) { fields(encoder, m); }, message);
  return writer.take();
}

InstanceId receiver_of(std::string_view payload) {
  InstanceId to = kConductor;
  if (payload.size() >= sizeof to) std::memcpy(&to, payload.data(), sizeof to);
  return to;
}

std::string with_sender(std::string_view payload, InstanceId from) {
  std::string changed(payload);
  if (changed.size() >= 2 * sizeof from) std::memcpy(changed.data() + sizeof from, &from, sizeof from);
  return changed;
}

Result<Envelope> decode(uint16_t type, std::string_view payload, double now) {
  const size_t kind = size_t(type) - kFirstFrameType;
  if (type < kFirstFrameType || kind >= kKinds) return invalid("unknown message type " + std::to_string(type));
  Envelope envelope;
  ByteReader reader(payload);
  envelope.to = reader.number<InstanceId>("to");
  envelope.from = reader.number<InstanceId>("from");
  Decoder decoder{{reader}, now};
  for_each_kind(
      [&]<size_t I>(std::in_place_index_t<I>) {
        if (kind == I) fields(decoder, envelope.message.emplace<I>());
      },
      std::make_index_sequence<kKinds>());
  if (Status status = reader.finish(); !status)
    return invalid("message of type " + std::to_string(type) + ": " + status.error().message);
  return envelope;
}

}  // namespace xpyd::disagg
