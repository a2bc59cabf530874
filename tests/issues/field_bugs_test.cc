// Bugs of other projects under their names (reference: the projects' issue trackers), which a run of chaos would not
// find; and requests that end the instances which compute them.

#include "base/json/json.h"
#include "tests/disagg/scene.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::field_bugs_test {

class Meddled : public Scene {
 public:
  using Scene::Scene;
  void ask(uint64_t id, int length = 60, int max_tokens = 12) { Scene::ask(id, length, max_tokens, int(id)); }
  void send(InstanceId from, InstanceId to, Message message) override {
    const int times = meddle ? meddle(from, to, message) : 1;
    for (int i = 0; i < times; ++i) Scene::send(from, to, message);
  }
  std::function<int(InstanceId, InstanceId, Message&)> meddle;  // how often the message is sent, changed or not
};

// An error of the peer was swallowed, and the client waited for ever.
TEST_CASE("llm-d#2433: a client hears of a failure that nobody can repair", "[issues]") {
  SimOptions options;
  options.conductor.patience_s = 2;
  Meddled scene("1P1D", options);
  scene.ask(1, 60, 90);
  scene.ticks(30);
  scene.crash(scene.find("D1")->id, true);
  for (int i = 0; i < 5000 && !scene.conductor().wait_idle(0); ++i) scene.tick();
  const Recorder::Choice choice = scene.recorder->choice(1);
  CHECK(choice.ends == 1);
  CHECK(choice.finish == FinishReason::error);
  CHECK(choice.error == "no instance came to replace the one that was lost");
}

// A burst of remote prefills, which cost D nothing, starved D's decodes.
TEST_CASE("dynamo's vLLM patch: a burst of remote prefills does not starve decode", "[issues]") {
  Meddled scene("1P1D", in("decode_first"));
  scene.ask(1, 20, 60);
  while (scene.n_tokens(1) < 5) scene.tick();
  for (uint64_t id = 2; id < 12; ++id) scene.ask(id, 100, 2);
  const int before = scene.n_tokens(1);
  scene.ticks(30);
  CHECK(scene.n_tokens(1) >= before + 25);
  scene.settle();
}

// The queue of finished prefills was put back in reverse, so that early ones waited longest.
TEST_CASE("dynamo's vLLM patch: prompts that wait for D are admitted in their order", "[issues]") {
  SimOptions options;
  options.max_batch = 1;
  Meddled scene("1P1D", options);
  std::vector<uint64_t> order;
  for (uint64_t id = 1; id < 7; ++id) scene.ask(id, 30, 6);
  for (int i = 0; i < 5000 && !scene.conductor().wait_idle(0); ++i) {
    scene.tick();
    for (uint64_t id = 1; id < 7; ++id)
      if (scene.recorder->choice(id).ends == 1 && std::find(order.begin(), order.end(), id) == order.end())
        order.push_back(id);
  }
  CHECK(order == std::vector<uint64_t>{1, 2, 3, 4, 5, 6});
  scene.settle();
}

// ---- Requests that end the instances that compute them.

class Deadly final : public Meddled {
 public:
  // `at` is the token of request 1, counted from 1, whose sender ends before it sends it. With 0 the instance ends when
  // it is told of the request.
  explicit Deadly(const std::string& topology, int at = 1) : Meddled(topology) {
    meddle = [this, at](InstanceId from, InstanceId to, const Message& m) {
      if (auto* start = std::get_if<StartRequest>(&m); start && start->request->id == 1 && from == kConductor) {
        deadly_ = start->attempt, told_ = 0;
        if (at == 0) dead_ = to;
        if (at == 0) return 0;
      }
      if (auto* token = std::get_if<TokenOf>(&m); token && token->attempt == deadly_ && ++told_ == at) dead_ = from;
      return dead_ == from && from != kConductor ? 0 : 1;
    };
  }
  ~Deadly() override { close(); }
  // Asks request 1, which has time for ever, and is not expected to be answered.
  void ask_deadly(int max_tokens) { Scene::ask(1, std::vector<int32_t>(40, 17), max_tokens, 1e9); }
  void run() {
    for (int i = 0; i < 20000 && !conductor().wait_idle(0); ++i) {
      tick();
      if (dead_ < 0) continue;
      const Role role = nodes.at(dead_)->role;
      crash(std::exchange(dead_, -1), true);
      ++crashes;
      add(role);
    }
  }
  int crashes = 0;

 private:
  int told_ = 0;
  InstanceId dead_ = -1;
  AttemptId deadly_ = 0;
};

TEST_CASE("conductor: a request that ends four instances ends with an error", "[lies][conductor]") {
  TempDir dir;
  for (const char* topology : {"3C", "1P3D", "2P2D"})
    for (int at : {0, 1, 2, 3}) {
      INFO(topology << ", token " << at);
      Deadly scene(topology, at);
      scene.ask_deadly(40);
      {
        CaughtStdout log(dir.path + "/log", 2);
        scene.run();
      }
      scene.settle();
      CHECK(scene.recorder->choice(1).ends == 1);
      CHECK(scene.recorder->choice(1).finish == FinishReason::error);
      CHECK(scene.crashes == 4);
      CHECK(scene.recorder->choice(1).error.find("given up after too many attempts") != std::string::npos);
      const std::string log = read_small_file(dir.path + "/log", 1 << 20).value();
      CHECK(log.find("request 1 is given up after 4 failed attempts") != std::string::npos);
    }
}

}  // namespace xpyd::testing::field_bugs_test
