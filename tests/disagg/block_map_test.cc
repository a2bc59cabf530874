// The map of blocks that the page draws. It is exact, and it exists only while somebody looks.
#include "disagg/block_map.h"

#include <map>

#include "tests/disagg/scene.h"

namespace xpyd::testing::block_map_test {
namespace {

int held(const BlockMap& map, uint64_t request) {
  int blocks = 0;
  for (const BlockMap::Holder& h : map.holders) blocks += h.request == request ? h.blocks : 0;
  return blocks;
}

TEST_CASE("block map: every block is in one cell, and counts once for each request", "[disagg][page]") {
  std::vector<KvState> states(2500, KvState::free);
  states[2] = states[3] = KvState::active, states[4] = KvState::cached, states[2499] = KvState::in_transfer;
  const BlockMap map = map_blocks(states, {{3, 9}, {2499, 8}, {2, 9}, {3, 9}, {3, 7}});
  CHECK(map.per_cell == 3);
  REQUIRE(map.cells.size() == 834);
  CHECK(map.cells[0] == std::array{2, 1, 0, 0});  // free, active, cached, in transfer
  CHECK(map.cells[1] == std::array{1, 1, 1, 0});
  CHECK(map.cells[833] == std::array{0, 0, 0, 1});
  REQUIRE(map.holders.size() == 4);
  CHECK(map.holders[0].request == 9);
  CHECK((map.holders[1].cell == 1 && map.holders[1].request == 7));
  CHECK(held(map, 9) == 2);
  CHECK(held(map, 8) == 1);
  CHECK(map_blocks(std::vector(1024, KvState::free), {}).cells.size() == 1024);
  std::vector<std::pair<int32_t, uint64_t>> many;
  for (int i = 0; i < 9000; ++i) many.emplace_back(i % 1000, i);
  CHECK(map_blocks(states, many).holders.size() == kMapHolders);
}

// An instance reports the same counts of blocks as its memory, at any moment.
TEST_CASE("block map: the map of an instance agrees with its memory at any moment", "[disagg][page]") {
  for (const char* scheme : {"paged", "contiguous", "slots", "vattention"})
    for (const char* topology : {"1P1D", "1C"}) {
      INFO(scheme << " " << topology);
      SimOptions options{.scheme = scheme};
      options.kv.vattention.page_group_bytes = 4096;
      Scene sim(topology, options);
      sim.ticks(10);
      std::map<KvState, int> seen;
      int holders = 0;
      for (uint64_t id = 1; id <= 24; ++id) {
        sim.ask(id, 30 + int(id % 7), 6, int(id));
        sim.ticks(int(id % 12));
        for (const auto& [number, node] : sim.nodes) CHECK(node->instance->block_map() == nullptr);
        sim.tick();
        for (const auto& [number, node] : sim.nodes) {
          const auto map = node->instance->block_map();
          REQUIRE(map != nullptr);
          std::array<int, kKvStates> counted = {};
          for (const auto& cell : map->cells)
            for (size_t s = 0; s < cell.size(); ++s) counted[s] += cell[s], seen[KvState(s)] += cell[s];
          const KvStats kv = node->instance->memory().stats();
          CHECK(counted == std::array{kv.free, kv.active, kv.cached, kv.in_transfer});
          for (const BlockMap::Holder& h : map->holders) {
            CHECK(h.request == id);
            const auto& cell = map->cells[size_t(h.cell)];
            CHECK((h.blocks > 0 && h.blocks <= cell[int(KvState::active)] + cell[int(KvState::in_transfer)]));
          }
          // The request holds every used block. During a transfer it holds blocks of both memories.
          CHECK(held(*map, id) == kv.active + kv.in_transfer);
          holders += int(map->holders.size());
        }
        const ServicePicture picture = sim.conductor().picture();
        REQUIRE(picture.traces.size() == std::min<size_t>(id, 51));
        sim.ticks(5200);  // it ends, and nobody asks for the map any more
      }
      CHECK(sim.recorder->ended() == 24);
      CHECK(seen[KvState::active] > 0);
      CHECK((seen[KvState::in_transfer] > 0) == (topology == std::string("1P1D")));
      CHECK(holders > 8);
    }
}

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
}  // namespace xpyd::testing::block_map_test
