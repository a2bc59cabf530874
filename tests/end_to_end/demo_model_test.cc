// Greedy text of a real model must equal another program's text. The demo model inside the binary answers from its
// context alone, so a wrong byte of KV is a wrong answer.

#include <filesystem>
#include <set>

#include "experiments/tally.h"
#include "model/folder.h"
#include "model/text/chat_template.h"
#include "model/text/tokenizer.h"
#include "model/weights/safetensors.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::demo_model_test {

constexpr const char* kFacts =
    "The key of box 17 is amber. The owner of house 3 is Grace. The key of box 3 is jade. "
    "The city of train 17 is Oslo. The colour of door 250 is teal. The captain of ship 31 is Hugo. "
    "The drink of table 17 is tea. ";

// A model folder, loaded.
struct Loaded {
  std::string dir;
  ModelConfig config = load_model_config(dir).value();
  std::unique_ptr<const Tokenizer> tokenizer = Tokenizer::load(dir).value();
  ThreadTeam team{1};
  std::shared_ptr<const Weights> weights = load_weights(dir, config, {}, team).value();
};

Loaded& demo() {
  static Loaded demo{.dir = kDemoModel};
  return demo;
}

std::vector<int32_t> demo_prompt(const std::string& question) {
  static const auto chat = ChatTemplate::load("auto", kDemoModel, [] { return int64_t{0}; }).value();
  return chat->encode(*demo().tokenizer, chat->render(*demo().tokenizer, {{"user", kFacts + question}}).value());
}

struct Answer {
  std::string text;
  uint64_t hash = 0;  // the hash of all logits of the cluster
  FinishReason finish = FinishReason::none;
};

// Asks all prompts at once and returns greedy answers, each with its own limit of tokens.
std::vector<Answer> ask_all(Loaded& model, const std::vector<std::pair<std::vector<int32_t>, int>>& prompts,
                            const char* topology, const TransportRow* transport, const char* scheme = "paged") {
  RealClock clock;
  ClusterOptions options;
  options.topology = parse_topology(topology).value();
  options.kv_scheme = find_kv_scheme(scheme);
  options.kv.pool_bytes = 32 << 20;
  options.kv.shape = kv_shape(model.config, Dtype::f32);
  options.batching = find_batch_policy("chunked");
  options.placement = find_placement_policy("least_loaded");
  options.transport = transport;
  options.step_tokens = 64;
  options.max_batch = 8;
  options.max_model_len = std::min(model.config.max_position, 512);
  options.eos_tokens = model.config.eos_tokens;
  options.tokenizer = model.tokenizer.get();
  options.make_model = [&](int, DeviceQueue&) { return make_llama(model.weights, model.team, 64, 8); };
  auto cluster = Cluster::create(std::move(options), clock).value();
  std::vector<std::shared_ptr<experiments::Tally>> sinks;
  for (const auto& [prompt, max_tokens] : prompts) {
    sinks.push_back(std::make_shared<experiments::Tally>());
    REQUIRE(cluster->submit(tiny_request(sinks.size(), prompt, max_tokens), sinks.back()).ok());
  }
  while (cluster->turn()) continue;
  std::vector<Answer> answers;
  for (const auto& sink : sinks) answers.push_back({sink->text, cluster->stats().conductor.logits_hash, sink->finish});
  return answers;
}

Answer ask(const std::vector<int32_t>& prompt, const char* topology, const TransportRow* transport) {
  return ask_all(demo(), {{prompt, 24}}, topology, transport)[0];
}

TEST_CASE("stories260k gives llama2.c's text in every topology", "[golden]") {
  const std::string dir = shared_path("models/stories260k"), golden = shared_path("golden/stories260k_greedy.json");
  if (dir.empty() || golden.empty()) SKIP_TEST("../shared/models or ../shared/golden is absent");
  Loaded model{.dir = dir};
  const auto cases = parsed_file(golden)["cases"];
  REQUIRE(cases.size() >= 6);
  std::vector<std::pair<std::vector<int32_t>, int>> prompts;
  for (const auto& c : cases) {  // llama2.c's n steps end n tokens after BOS
    const auto prompt = model.tokenizer->encode(c["prompt"].get<std::string>());
    prompts.emplace_back(prompt, c["steps"].get<int>() + 1 - int(prompt.size()));
  }
  std::set<uint64_t> hashes;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (const char* scheme : {"paged", "contiguous"}) {
      INFO(topology << " " << scheme);
      const auto answers = ask_all(model, prompts, topology, find_transport("local"), scheme);
      for (size_t i = 0; i < cases.size(); ++i)
        CHECK(cases[i]["prompt"].get<std::string>() + answers[i].text == cases[i]["text"].get<std::string>());
      hashes.insert(answers[0].hash);
    }
  CHECK(hashes.size() == 1);
}

TEST_CASE("demo model: it answers from the context, and says when a fact is not stated", "[demo]") {
  const std::pair<const char*, const char*> cases[] = {
      {"What is the key of box 17?", "The key of box 17 is amber."},
      {"Who is the owner of house 3?", "The owner of house 3 is Grace."},
      {"And the city of train 17?", "The city of train 17 is Oslo."},
      {"Tell me the colour of door 250.", "The colour of door 250 is teal."},
      {"What is the colour of door 17?", "The colour of door 17 is not stated."},
      {"What is the key of box 99?", "The key of box 99 is not stated."},
  };
  for (auto& [question, expected] : cases) {
    INFO(question);
    std::vector<int32_t> prompt = demo_prompt(question);
    Answer alone = ask(prompt, "1C", find_transport("local"));
    CHECK(alone.text == expected);
    CHECK(alone.finish == FinishReason::stop);
    for (const char* transport : {"local", "handoff"}) {
      Answer parted = ask(prompt, "1P1D", find_transport(transport));
      CHECK(parted.text == expected);
      CHECK(parted.hash == alone.hash);
    }
  }
  // As plain text without a chat template, the continuation is the answer.
  std::vector<int32_t> plain = demo().tokenizer->encode(kFacts + std::string("What is the key of box 17?"));
  CHECK(ask(plain, "1C", find_transport("local")).text == " The key of box 17 is amber.");
}

TEST_CASE("demo model: the embedded folder equals model/demo", "[demo]") {
  for (const auto& file : std::filesystem::directory_iterator("model/demo")) {
    std::string name = file.path().filename().string();
    INFO(name);
    auto embedded = read_model_file(std::filesystem::path(kDemoModel) / name, 8 << 20);
    REQUIRE(embedded.ok());
    CHECK(embedded.value() == read_model_file(file.path().string(), 8 << 20).value());
  }
  std::string dir = kDemoModel;
  CHECK(check_model_folder(dir).ok());
  CHECK_FALSE(check_model_folder(dir + "x").ok());
  CHECK(read_model_file(dir + "/nothing", 8).error().code == ErrorCode::not_found);
  CHECK(Checkpoint::open(dir + "x").error().code == ErrorCode::not_found);
}

}  // namespace xpyd::testing::demo_model_test
