// A session's next turn goes to the instance that holds its KV, because placement asks every memory
// what it has of the prompt; no table of sessions is needed for that.
#include "tests/catch.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::session_placement_test {
namespace {

TEST_CASE("placement: prefix_aware sends a session's next turn to its KV", "[disagg]") {
  for (const char* scheme : {"paged", "token", "slots"}) {
    TinySetup setup{.topology = "3C", .scheme = scheme, .placement = "prefix_aware"};
    setup.pool_bytes = std::string(scheme) == "slots" ? 3 << 20 : 1 << 20;
    TinyCluster tiny(setup);
    std::vector<std::vector<int32_t>> said(5);
    uint64_t id = 0;
    for (int turn = 0; turn < 3; ++turn)
      for (size_t c = 0; c < said.size(); ++c) {
        for (int i = 0; i < 20; ++i) said[c].push_back(int32_t((c * 31 + size_t(i) * 7) % 96));
        auto request = tiny_request(++id, said[c], 6);
        request->cache_salt = c + 1;
        request->ignore_eos = true;
        REQUIRE(tiny.submit(request).ok());
        tiny.run();
        const Recorder::Choice choice = tiny.recorder->choice(id);
        INFO(scheme << " turn " << turn << " session " << c);
        const int known = int(said[c].size()) - 21;  // of the turn before, all but its last token
        const int block = std::string(scheme) == "paged" ? 16 : 1;
        CHECK(choice.cached_tokens == (turn == 0 ? 0 : known / block * block));
        said[c].insert(said[c].end(), choice.tokens.begin(), choice.tokens.end());
      }
  }
}

}  // namespace
}  // namespace xpyd::testing::session_placement_test
