// The last answers, which the page draws.
#include "tests/disagg/scene.h"

namespace xpyd::testing::last_answers_test {
namespace {

TEST_CASE("the last answers: the page gets the newest 50 requests, newest first, each with its phases in order",
          "[disagg][page]") {
  Scene sim("1P1D");
  sim.ticks(10);
  for (uint64_t id = 1; id <= 60; ++id) {
    sim.ask(id, 30, 6, int(id));
    REQUIRE(sim.conductor().picture().traces[0].ended == 0);  // under way
    sim.ticks(100);
  }
  const ServicePicture picture = sim.conductor().picture();
  REQUIRE(picture.traces.size() == 50);
  for (size_t i = 0; i < 50; ++i) {
    const RequestTrace& trace = picture.traces[i];
    INFO("request " << trace.request);
    CHECK(trace.request == 60 - i);
    CHECK(trace.prefill + trace.decode + trace.finish == "P0D1length");
    CHECK((trace.prompt == 30 && trace.output == 6 && trace.gaps.empty()));
    CHECK((trace.t <= trace.placed && trace.placed < trace.started && trace.started <= trace.prompt_done));
    CHECK((trace.prompt_done < trace.joined && trace.joined < trace.second && trace.second < trace.ended));
    CHECK((trace.first >= trace.prompt_done && trace.first < trace.second && trace.ended <= picture.t));
  }
}

}  // namespace
}  // namespace xpyd::testing::last_answers_test
