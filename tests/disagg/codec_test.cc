#include "disagg/processes/codec.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "disagg/messages.h"
#include "disagg/net/channel.h"
#include "tests/catch.h"
#include "tests/disagg/words.h"
#include "tests/fields.h"

namespace xpyd::testing::codec_test {

constexpr double kSender = 5000, kReceiver = 123.5;  // "now" by the clocks of both sides

// Sets every member to a value that is not its default, all different as far as types allow.
class Filler {
 public:
  template <class T>
  void operator()(T& x) {
    int next = ++counter_;
    if constexpr (std::is_same_v<T, bool>) {
      x = !x;
    } else if constexpr (std::is_same_v<T, float>) {
      x = 0.5f + float(next);
    } else if constexpr (std::is_same_v<T, double>) {
      x = kSender - next - 0.25;
    } else if constexpr (std::is_enum_v<T>) {
      x = T(1);
    } else if constexpr (std::is_same_v<T, int>) {
      x = next;
    } else if constexpr (std::is_integral_v<T>) {
      x = T(0x1122334455660000) + T(next);
    } else if constexpr (std::is_same_v<T, std::string>) {
      x = "text " + std::to_string(next) + " é";
    } else if constexpr (requires { x.push_back({}); }) {
      x.resize(size_t(2 + next % 3));
      for (auto& element : x) (*this)(element);
    } else if constexpr (fields_detail::is_optional<T>) {
      (*this)(x.emplace());
    } else if constexpr (requires { x.use_count(); }) {
      auto made = std::make_shared<std::remove_const_t<typename T::element_type>>();
      (*this)(*made);
      x = made;
    } else {
      for_each_field(x, *this);
    }
  }

 private:
  int counter_ = 0;
};

// One message of each kind, with every field set.
std::vector<Message> full_messages() {
  std::vector<Message> messages;
  [&]<size_t... I>(std::index_sequence<I...>) {
    (Filler()(std::get<I>(messages.emplace_back(std::in_place_index<I>))), ...);
  }(std::make_index_sequence<std::variant_size_v<Message>>());
  return messages;
}

// All members of a message, as text.
std::string print_message(const Message& message) {
  std::ostringstream out;
  std::visit(Put{out}, message);
  return out.str();
}

// A field that codec_fields.h does not send arrives with its default, and this test finds it.
TEST_CASE("every field of every message arrives", "[disagg][control][codec]") {
  std::vector<Message> all = full_messages();
  for (const Message& message : all) {
    INFO("message " << message.index());
    std::string bytes = encode(7, 9, message, kSender);
    // Both sides use the same clock, so times and durations are unchanged.
    auto same = decode(frame_type(message), bytes, kSender);
    if (!same) FAIL(same.error().message);
    CHECK(print_message(same.value().message) == print_message(message));
    CHECK(same.value().from == 7);
    CHECK(same.value().to == 9);
    // The filler leaves no field at its default, because a default looks like a field that was not sent.
    Message blank = std::visit([](const auto& m) -> Message { return std::decay_t<decltype(m)>(); }, message);
    if (!std::visit(
            [](const auto& m) {
              return requires { *m.request; }
              || std::is_empty_v<std::decay_t<decltype(m)>>;
            },
            blank))
      CHECK(print_message(blank) != print_message(message));
  }
}

TEST_CASE("a time crosses as an age and arrives in the receiver's clock", "[disagg][control][codec]") {
  TokenOf message;
  message.event.token = 1;
  message.event.queued_s = kSender - 2;
  message.event.scheduled_s = kSender + 1;
  message.event.time_s = 0;  // none
  auto got = decode(frame_type(message), encode(0, 0, message, kSender), kReceiver);
  REQUIRE(got.ok());
  const TokenEvent& event = std::get<TokenOf>(got.value().message).event;
  CHECK(event.queued_s == kReceiver - 2);
  CHECK(event.scheduled_s == kReceiver + 1);
  CHECK(event.time_s == 0);
  StartRequest start;
  Request request;
  request.prompt = {1};
  request.arrival_s = kSender - 4;
  request.deadline_s = kSender + 60;
  start.request = std::make_shared<Request>(request);
  start.state.queued_s = kSender - 3;
  got = decode(frame_type(start), encode(0, 0, start, kSender), kReceiver);
  REQUIRE(got.ok());
  auto& back = std::get<StartRequest>(got.value().message);
  CHECK(back.request->arrival_s == kReceiver - 4);
  CHECK(back.request->deadline_s == kReceiver + 60);
  CHECK(back.state.queued_s == kReceiver - 3);
  CHECK(back.state.scheduled_s == 0);
  InstanceStats stats;
  stats.heartbeat_s = kSender - 0.5;
  stats.step_seconds = 12;
  const Report report{std::make_shared<InstanceStats>(stats)};
  got = decode(frame_type(report), encode(0, 0, report, kSender), kReceiver);
  REQUIRE(got.ok());
  CHECK(std::get<Report>(got.value().message).stats->heartbeat_s == kReceiver - 0.5);
  CHECK(std::get<Report>(got.value().message).stats->step_seconds == 12);  // a duration is unchanged
}

TEST_CASE("a message that is cut, extended or of an unknown type or value is refused", "[disagg][control][codec]") {
  for (const Message& message : full_messages()) {
    INFO("message " << message.index());
    std::string bytes = encode(1, 2, message, kSender);
    for (size_t n = 0; n < bytes.size(); ++n)
      CHECK(!decode(frame_type(message), std::string_view(bytes).substr(0, n), kSender).ok());
    CHECK(!decode(frame_type(message), bytes + '\0', kSender).ok());
  }
  std::string bytes = encode(1, 2, AbortAttempt{5}, 0);
  for (int type : {0, 15, 16 + int(std::variant_size_v<Message>), 65535}) {
    auto got = decode(uint16_t(type), bytes, 0);
    REQUIRE(!got.ok());
    CHECK(got.error().message.find("unknown message type") != std::string::npos);
  }
  bytes = encode(0, 0, JoinRequest{}, 0);
  bytes.back() = 9;  // an enumerator that does not exist
  const auto got = decode(frame_type(JoinRequest{}), bytes, 0);
  REQUIRE(!got.ok());
  CHECK(got.error().message.find("role: 9") != std::string::npos);
}

TEST_CASE("a message is passed on with its sender changed", "[disagg][control][codec]") {
  const AbortAttempt message{5};
  const std::string bytes = encode(kConductor, 3, message, kSender);
  CHECK(receiver_of(bytes) == 3);
  const auto got = decode(frame_type(message), with_sender(bytes, 7), kSender);
  REQUIRE(got.ok());
  CHECK(got.value().from == 7);
  CHECK(got.value().to == 3);
  CHECK(std::get<AbortAttempt>(got.value().message).attempt == 5);
  for (size_t n = 0; n < 8; ++n) {  // cut ones cannot be decoded, by whomever they reach
    const std::string cut = bytes.substr(0, n);
    CHECK(receiver_of(cut) == (n < 4 ? kConductor : 3));
    CHECK_FALSE(decode(frame_type(message), with_sender(cut, 7), kSender).ok());
  }
}

TEST_CASE("an explanation with broken UTF-8 still crosses", "[disagg][control][codec]") {
  const AttemptFailed failed{3, "peer said \xff\xfe"};
  const auto got = decode(frame_type(failed), encode(0, 0, failed, 0), 0);
  REQUIRE(got.ok());
  CHECK(std::get<AttemptFailed>(got.value().message).why == "peer said \xef\xbf\xbd\xef\xbf\xbd");
}

// Hidden. After a change of messages, `WRITE_SEEDS=1 xpyd_tests "[seeds]"` writes the seeds of fuzz_wire.
TEST_CASE("the seeds of fuzz_wire are written from every message", "[.seeds]") {
  if (!std::getenv("WRITE_SEEDS")) SKIP_TEST("WRITE_SEEDS is not set");
  const std::string dir = "tests/fuzz/corpus/wire/";
  std::filesystem::create_directories(dir);
  for (const Message& message : full_messages())
    std::ofstream(dir + "message-" + std::to_string(message.index()), std::ios::binary)
        << char(4 + message.index()) << '\0' << encode(1, 2, message, 1000);
  Handshake handshake(Handshake::Side::initiator, ClusterKey::random(), {"D0"});
  std::string hello, frame;
  std::string_view none;
  REQUIRE(handshake.feed(none, hello).ok());
  for (char side : {2, 3})
    std::ofstream(dir + "handshake-" + std::to_string(side), std::ios::binary) << side << '\0' << hello;
  FrameWriter(SipKey()).append(frame, 16, "payload");
  std::ofstream(dir + "frames-0", std::ios::binary) << '\0' << '\7' << frame << frame;
}

}  // namespace xpyd::testing::codec_test
