#include "disagg/held_post.h"

#include "tests/catch.h"

namespace xpyd::testing::held_post_test {
namespace {

struct Log final : Post {
  std::vector<std::pair<InstanceId, std::string>> sent;
  void send(InstanceId, InstanceId to, Message message) override {
    const auto* token = std::get_if<TokenOf>(&message);
    sent.push_back({to, token                                          ? "token " + std::to_string(token->index)
                        : std::holds_alternative<Report>(message)      ? "report"
                        : std::holds_alternative<KvDelivered>(message) ? "delivered"
                                                                       : "other"});
  }
};

TEST_CASE("held post: a decode instance hears of a prompt behind the conductor's first token", "[held_post]") {
  using Sent = std::vector<std::pair<InstanceId, std::string>>;
  Log log;
  HeldPost post(log);
  post.send(1, kConductor, TokenOf{.index = 5});
  post.hold();
  post.send(1, 2, ReserveKv{});  // before any token: D's answer is wanted while the step runs
  CHECK(log.sent == Sent{{kConductor, "token 5"}, {2, "other"}});
  post.send(1, kConductor, TokenOf{.index = 3});
  CHECK_FALSE(post.has_answers());
  post.send(1, kConductor, TokenOf{.index = 0});
  CHECK(post.has_answers());
  post.send(1, 2, KvDelivered{});
  CHECK(log.sent.size() == 2);
  post.release(1, Report{});
  CHECK(Sent(log.sent.begin() + 2, log.sent.end()) ==
        Sent{{kConductor, "report"}, {kConductor, "token 3"}, {kConductor, "token 0"}, {2, "delivered"}});
  post.send(1, 2, KvDelivered{});
  CHECK(log.sent.size() == 7);
  CHECK_FALSE(post.has_answers());
}

}  // namespace
}  // namespace xpyd::testing::held_post_test
