// cpp_live: how far is the live pipeline from the closed form and from the recurrence, and what do two stages make of
// two cores, by the number of waves under way?
//
// The engine over two stages of llama-mini in bf16, made 16 layers deep (a thread each), beside one core, a team of two
// threads and two tensor ranks, in turn; all must give one hash. Each wave's time on each stage is measured on the
// stage's thread, so what is compared is the schedule alone: the seconds that the engine took, with the closed form and
// with the recurrence of those times.
//
// one: a prompt of 1,024 tokens in 16 chunks of 64. Sum t + (P - 1) max t, with t the slower stage's. Arithmetic: a
// chunk takes some 25 ms on one core and half of that on a stage. Beside it stand a boundary (a store, and a wait that
// spins: some us) and the engine (below 100 us a wave, while stages compute): under 1 %. But the closed form takes
// every wave for as long on one stage as on the other, and the slower of both: stages that take turns at being slower,
// as on a shared machine, end sooner than it says, by up to a few percent. The recurrence knows each.
// queue: 8 prompts of 256 in chunks of 64, 32 chunks. One core takes N t. Two stages take half of t each, and N + 1
// turns: 2 * 32 / 33. But a chunk that wants no logits ends when the last layer's KV is written, which spares the last
// stage some .8 of a layer: of 16 layers 8 and 7.2, so that the first stage works all the time and the last .9 of
// it: 15.2 / 8
// * 32 / 33 = 1.84 times one core, where two cores are twice one. (With 8 layers and 16 chunks, as this was first run:
// 7.2 / 4 * 16 / 17 = 1.69; 1.68 were found.) W = P is lockstep: wave i begins when i - 2 has ended. Two stages of
// equal times lose nothing by it; with noise 1 to 5 %. W = 1 waits for each step of 64, one piece: half, as one core.
#include <algorithm>
#include <map>
#include <tuple>

#include "experiments/experiment.h"
#include "experiments/pipelined.h"

namespace xpyd::experiments::cpp_live_experiment {
namespace {

std::vector<Values> points(const Setting&) { return {{{"load", "one"}}, {{"load", "queue"}}}; }

struct Contestant {
  const char* how;
  PipelinedShape shape;
  std::unique_ptr<Pipelined> pipelined = nullptr;
};

Measure open(const Setting& setting) {
  struct State {
    ModelConfig config;
    std::shared_ptr<const Weights> weights;
    std::map<std::string, std::vector<Contestant>> loads;
    int turn = 0;
  };
  auto state = std::make_shared<State>();
  const std::string dir = setting.tiny ? "experiments/models/llama-tiny" : "experiments/models/llama-mini";
  state->config = load_model_config(dir).value();
  if (!setting.tiny) state->config.n_layers = 16;
  ThreadTeam team(1);
  state->weights = load_weights(dir, state->config, {.dtype = Dtype::bf16, .dummy = true}, team).value();
  const int scale = setting.tiny ? 8 : 1;
  for (const char* load : {"one", "queue"}) {
    const bool one = load == std::string("one");
    for (const auto& [how, pp, tp, threads, window] :
         std::initializer_list<std::tuple<const char*, int, int, int, int>>{{"one core", 1, 1, 1, 0},
                                                                            {"team of two", 1, 1, 2, 0},
                                                                            {"tp 2", 1, 2, 1, 0},
                                                                            {"W 1", 2, 1, 1, 1},
                                                                            {"W 2", 2, 1, 1, 2},
                                                                            {"W 4", 2, 1, 1, 4},
                                                                            {"W 64", 2, 1, 1, 64}}) {
      PipelinedShape shape{.tp = tp, .pp = pp, .threads = threads, .window = window};
      shape.chunk_tokens = 64 / scale, shape.prompts = one ? 1 : 8;
      shape.prompt_tokens = (one ? 1024 : 256) / scale;
      state->loads[load].push_back({how, shape});
    }
  }
  return [state](const Values& point) -> Result<Finding> {
    std::vector<Contestant>& all = state->loads.at(point["load"]);
    Finding finding;
    uint64_t hash = 0;
    const int first = state->turn++;
    for (size_t i = 0; i < all.size(); ++i) {
      Contestant& c = all[(i + size_t(first)) % all.size()];
      if (!c.pipelined) {
        c.pipelined = std::make_unique<Pipelined>(state->weights, state->config, c.shape);
        c.pipelined->run();  // touches its memory
      }
      const PipelinedRun run = c.pipelined->run();
      if (hash != 0 && run.hash != hash) finding.wrong = "other logits than before";
      hash = run.hash;
      Values row{{"how", c.how}, {"seconds", run.seconds}, {"work_us", run.work_us}};
      std::vector<double> slowest;
      for (const auto& wave : run.waves) slowest.push_back(*std::max_element(wave.stage_s.begin(), wave.stage_s.end()));
      const bool waves = c.shape.window > 1;
      row.update({{"closed_s", waves ? model::pipeline_seconds(slowest, c.shape.pp) : 0.0}});
      row.update({{"recurrence_s", waves ? model::pipeline_times(run.waves, c.shape.window).end() : 0.0}});
      row.update({{"stage_s", run.stage_s}});
      finding.rows.push_back(std::move(row));
    }
    return finding;
  };
}

REGISTER_EXPERIMENT("cpp_live", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::cpp_live_experiment
