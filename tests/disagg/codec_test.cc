#include "disagg/processes/codec.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/random.h"
#include "disagg/messages.h"
#include "disagg/net/channel.h"
#include "tests/catch.h"
#include "tests/disagg/full_messages.h"
#include "tests/disagg/words.h"

namespace xpyd::testing::codec_test {
namespace {

static_assert(n_fields<AbortAttempt> == 1);
static_assert(n_fields<KvDelivered> == 6);
static_assert(n_fields<OffloadStats> == 20);

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
  Report report;
  report.stats.heartbeat_s = kSender - 0.5;
  report.stats.step_seconds = 12;
  got = decode(frame_type(report), encode(0, 0, report, kSender), kReceiver);
  REQUIRE(got.ok());
  CHECK(std::get<Report>(got.value().message).stats.heartbeat_s == kReceiver - 0.5);
  CHECK(std::get<Report>(got.value().message).stats.step_seconds == 12);  // a duration is unchanged
}

TEST_CASE("a message that is cut, extended or of an unknown type is refused", "[disagg][control][codec]") {
  for (const Message& message : full_messages()) {
    INFO("message " << message.index());
    std::string bytes = encode(1, 2, message, kSender);
    for (size_t n = 0; n < bytes.size(); ++n)
      CHECK(!decode(frame_type(message), std::string_view(bytes).substr(0, n), kSender).ok());
    CHECK(!decode(frame_type(message), bytes + '\0', kSender).ok());
  }
  CHECK((codec_schema() == codec_schema() && codec_schema() != 0));
  std::string bytes = encode(1, 2, AbortAttempt{5}, 0);
  for (int type : {0, 15, 16 + int(std::variant_size_v<Message>), 65535}) {
    auto got = decode(uint16_t(type), bytes, 0);
    REQUIRE(!got.ok());
    CHECK(got.error().message.find("unknown message type") != std::string::npos);
  }
}

StartRequest start(const Request& request, const ChoiceState& state = {}) {
  StartRequest message;
  message.request = std::make_shared<Request>(request);
  message.state = state;
  return message;
}

// tests/issues/lies_test.cc takes each number of each message beyond its range. These rows break the rules of a type or
// of an order.
TEST_CASE("a message that no honest peer sends is refused, and the error names the field", "[disagg][control][codec]") {
  const struct {
    Message message;
    const char* says;
  } kRows[] = {
      {start({.prompt = {1, 2}}), ""},
      {start({}), "prompt: empty"},
      {start({.prompt = {1, -1}}), "prompt: -1"},
      {start({.prompt = {1}, .stop_token_ids = {3, -3}}), "stop_token_ids"},
      {start({.prompt = {1}}, {.choice = 5, .stands_for = 4}), "stands_for"},
      {start({.prompt = {1}}, {.stands_for = 0}), "stands_for: 0"},
      {KvReserved{.destination = {.blocks = {4, -1}}}, "blocks: -1"},
      {KvOffered{1, start({.prompt = {1}}).request, {{}, {.stands_for = 9}}, {}}, "stands_for: 9"},
      {PeerJoined{{.id = 1, .layout = {{4096, 4096, 4096, Dtype::f32}, KvOrder::layer_major, 1 << 29, 1 << 29}}},
       "layout"},
  };
  for (const auto& [message, says] : kRows) {
    auto got = decode(frame_type(message), encode(0, 0, message, kSender), kSender);
    const std::string error = got ? "" : got.error().message;
    INFO(says << ": " << error);
    CHECK((*says ? error.find(says) != std::string::npos : error == ""));
  }
  // A count that the bytes cannot hold.
  std::string bytes = encode(0, 0, KvRenewed{{1, 2, 3}}, 0);
  uint32_t huge = 0xffffffff;
  std::memcpy(bytes.data() + 8, &huge, 4);
  auto got = decode(frame_type(KvRenewed{}), bytes, 0);
  REQUIRE(!got.ok());
  CHECK(got.error().message.find("attempts: 4294967295 elements") != std::string::npos);
  // An explanation with broken UTF-8 still crosses.
  AttemptFailed failed{3, AttemptFailure::refused, "peer said \xff\xfe"};
  got = decode(frame_type(failed), encode(0, 0, failed, 0), 0);
  REQUIRE(got.ok());
  CHECK(std::get<AttemptFailed>(got.value().message).why == "peer said \xef\xbf\xbd\xef\xbf\xbd");
}

// Messages with flipped bits and random bytes.
TEST_CASE("any bytes decode to a message or to an error", "[disagg][control][codec]") {
  Random random(11);
  int taken = 0;
  for (const Message& message : full_messages()) {
    const std::string good = encode(1, 2, message, kSender);
    for (int round = 0; round < 2000; ++round) {
      std::string bytes = good;
      for (uint64_t k = 1 + random.below(4); k > 0; --k) bytes[random.below(bytes.size())] = char(random.below(256));
      auto got = decode(frame_type(message), bytes, kSender);
      if (!got) continue;
      ++taken;
      // A message that was decoded can be passed on, and is decoded again.
      std::string again = encode(got.value().from, got.value().to, got.value().message, kSender);
      CHECK(decode(frame_type(message), again, kSender).ok());
    }
  }
  CHECK(taken > 1000);
}

// Hidden. After a change of messages, `WRITE_SEEDS=1 xpyd_tests "[seeds]"` writes the seeds of fuzz_wire.
TEST_CASE("the seeds of fuzz_wire are written from every message", "[.seeds]") {
  if (!std::getenv("WRITE_SEEDS")) SKIP_TEST("WRITE_SEEDS is not set");
  const std::string dir = "tests/fuzz/corpus/wire/";
  std::filesystem::create_directories(dir);
  for (const Message& message : full_messages())
    std::ofstream(dir + "message-" + std::to_string(message.index()), std::ios::binary)
        << char(4 + message.index()) << '\0' << encode(1, 2, message, 1000);
  Handshake handshake(Handshake::Side::initiator, ClusterKey::random(), {NodeRole::decode, "D0"});
  std::string hello, frame;
  std::string_view none;
  REQUIRE(handshake.feed(none, hello).ok());
  for (char side : {2, 3})
    std::ofstream(dir + "handshake-" + std::to_string(side), std::ios::binary) << side << '\0' << hello;
  FrameWriter(SipKey()).append(frame, 16, "payload");
  for (char kind : {0, 1})
    std::ofstream(dir + "frames-" + std::to_string(kind), std::ios::binary) << kind << '\7' << frame << frame;
}

}  // namespace
}  // namespace xpyd::testing::codec_test
