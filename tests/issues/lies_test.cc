// A member that sends what is no message is disconnected, and no other member notices.

#include "disagg/processes/codec.h"
#include "tests/disagg/control_end.h"
#include "tests/process_bed.h"

namespace xpyd::testing::lies_test {

constexpr double kPatient = 30;  // seconds, as long as the liar may be silent

void say(End& end, const Message& message) {
  end.channel->send(frame_type(message), encode(1, kConductor, message, 1000));
}

// Joins as an instance does, and has a name then.
void join(End& liar, Role role) {
  say(liar, JoinRequest{role});
  liar.wait([&] { return !liar.frames.empty(); });
  InstanceInfo info{.id = 1, .role = role, .capacity_blocks = 100, .block_tokens = 16, .max_batch = 4};
  info.layout = {{}, KvOrder::layer_major, 16, 100};
  info.address = "tcp:127.0.0.1:1";
  say(liar, Joined{info});
}

// A message without its last byte.
void lie(End& end, const Message& message) {
  std::string bytes = encode(1, kConductor, message, 1000);
  bytes.pop_back();
  end.channel->send(frame_type(message), bytes);
}

TEST_CASE("lies: the conductor drops a member that sends what is no message, and places its work anew",
          "[lies][processes]") {
  NEEDS_PROGRAM();
  Bed bed({"--transport", "tcp"}, kPatient, "1C");
  End liar;  // outlives the loop that calls it
  ControlLoop loop(bed.clock());
  REQUIRE(loop.connect(bed.endpoint(bed.cluster().address(), "new"), 5, liar.on_open()).ok());
  join(liar, Role::colocated);
  REQUIRE(bed.cluster().wait_members(1, 20));
  bed.ask(4, 0, 6);
  const auto started = [&] {
    return std::ranges::any_of(liar.frames, [](const auto& frame) { return frame.first == frame_type(StartRequest{}); });
  };
  liar.wait(started);
  bed.start("colocated");
  REQUIRE(bed.cluster().wait_members(2, 60));
  lie(liar, TokenOf{});
  liar.wait_closed();
  INFO(liar.closed);
  CHECK(liar.closed.find("message refused: message of type ") != std::string::npos);
  bed.ask(4, 0, 6);
  bed.check_answers();
  CHECK(bed.cluster().conductor().stats().conductor.failed_attempts == 1);
}

TEST_CASE("lies: a worker leaves a conductor that sends what is no message, and joins the next one",
          "[lies][processes]") {
  NEEDS_PROGRAM();
  Bed bed({"--transport", "tcp"}, kPatient, "1C");
  End conductor;  // outlives the loop that calls it
  ControlLoop loop(bed.clock());
  const std::string address = "unix:" + bed.folder() + "/liar";
  REQUIRE(loop.listen(bed.endpoint(address, "c"), conductor.on_open()).ok());
  bed.start_worker({"--role", "colocated", "--join", address, "--give-up", "60"});
  conductor.wait([&] { return conductor.opens == 1; });
  lie(conductor, Welcome{});
  conductor.wait([&] { return conductor.closes == 1; });
  // The next conductor is honest.
  conductor.wait([&] { return conductor.opens == 2; });
  say(conductor, Welcome{.id = 1, .name = "C0", .lease_s = kPatient});
  const auto joined = [&] {
    return std::ranges::any_of(conductor.frames, [](const auto& frame) { return frame.first == frame_type(Joined{}); });
  };
  conductor.wait(joined);
}

}  // namespace xpyd::testing::lies_test
