// Mixtures of experts through the whole path: the greedy tokens of double precision and one logits hash, whatever
// manages memory, splits the model and carries KV.
#include "model/folder.h"
#include "server/build.h"
#include "tests/model/moe_model.h"
#include "tests/program.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::moe_e2e_test {

constexpr int kTokens = 10;
constexpr const char* kPrompt = "The key of box 17 is amber. The owner of house 3 is Grace. What is the key of box 17?";

// A folder with the demo model's tokenizer, and the words that all runs have.
struct Bed {
  explicit Bed(const std::string& family) : model(family, "BF16", 3, 920) {
    std::ofstream(model.write() + "/tokenizer.json")
        << read_model_file(std::string(kDemoModel) + "/tokenizer.json", 1 << 20).value();
  }
  Words words(const Words& more) const {
    Words all = {std::filesystem::absolute(model.dir.path).string(), "--max-model-len", "200", "--max-batch", "4"};
    all.insert(all.end(), {"--threads", "1", "--kv-bytes", "2MiB", "--chunk-tokens", "24"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  MoeModel model;
};

// Adds up the rows of all experts in the event logs of a run.
int64_t logged_rows(const std::string& folder) {
  constexpr std::string_view kName = "\"expert_rows\":[";
  int64_t sum = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string log = read_all(file.path().string());
    for (size_t at = log.find(kName); at != log.npos; at = log.find(kName, at)) {
      at += kName.size();
      std::istringstream numbers(log.substr(at, log.find(']', at) - at));
      for (std::string n; std::getline(numbers, n, ',');) sum += std::stoll(n);
    }
  }
  return sum;
}

TEST_CASE("moe: both families have double precision's tokens and one logits hash in every setup", "[moe]") {
  NEEDS_PROGRAM();
  const Words setups[] = {
      {"--topology", "1C"},
      {"--topology", "1P1D"},
      {"--topology", "1P1D", "--allocator", "vattention", "--transport", "tcp"},
      {"--topology", "1C", "--prefill-tp", "2"},
      {"--topology", "1P1D", "--prefill-tp", "2", "--decode-tp", "4"},
      {"--topology", "1C", "--prefill-tp", "4", "--expert-parallel", "on"},
      {"--topology", "1P1D", "--prefill-tp", "2", "--decode-tp", "2", "--expert-parallel", "decode"},
      {"--topology", "1P1D", "--prefill-pp", "3", "--decode-pp", "2", "--prefill-tp", "2"}};
  const Words processes[] = {
      {"--topology", "1P1D", "--processes", "--transport", "tcp", "--prefill-tp", "2", "--expert-parallel", "prefill"},
      {"--topology", "1P1D", "--processes", "--transport", "tcp", "--ranks", "processes", "--prefill-pp", "3",
       "--prefill-tp", "2", "--expert-parallel", "on"}};
  for (const char* family : {"mixtral", "qwen3_moe"}) {
    const Bed bed(family);
    std::set<std::string> hashes;
    std::vector<int32_t> expected;
    for (const Words& setup : setups) {
      CAPTURE(family, setup);
      auto build = make_build(Options::parse(option_table(), "serve", bed.words(setup), 1).value()).value();
      const std::vector<int32_t> prompt = build->tokenizer->encode(kPrompt);
      if (expected.empty()) expected = bed.model.greedy(prompt, kTokens);
      auto said = std::make_shared<Recorder>();
      REQUIRE(build->runtime->submit(tiny_request(1, prompt, kTokens), said).ok());
      while (!build->runtime->wait_idle(0)) build->cluster->turn();
      CHECK(said->choice(1).tokens == expected);
      char hash[32];
      const uint64_t sum = build->runtime->stats().conductor.logits_hash;
      std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(sum));
      hashes.insert(hash);
    }
    REQUIRE(hashes.size() == 1);
    std::set<int64_t> rows;
    for (const Words& setup : processes) {
      CAPTURE(family, setup);
      Words words = bed.words(setup);
      TempDir logs;
      words.insert(words.begin(), "generate");
      words.insert(words.end(), {"--event-log", logs.path + "/log"});
      words.insert(words.end(), {"--prompt", kPrompt, "--temperature", "0", "--max-tokens", std::to_string(kTokens)});
      const Ran ran = run_program(words);
      INFO(ran.err);
      CHECK(ran.code == 0);
      CHECK(has(ran.err, "logits hash " + *hashes.begin()));
      rows.insert(logged_rows(logs.path));
    }
    // Stages in other processes report what their experts did.
    CHECK((rows.size() == 1 && *rows.begin() > 0));
  }
}

TEST_CASE("moe: whole experts of ranks are refused on a card by name", "[moe]") {
  const Bed bed("mixtral");
  const auto build = prepare_build(
      Options::parse(option_table(), "serve", bed.words({"--device", "cuda", "--expert-parallel", "on"}), 1).value());
  REQUIRE_FALSE(build);
  CHECK(has(build.error().message, "--expert-parallel on: --device cuda has one tensor rank"));
}

}  // namespace xpyd::testing::moe_e2e_test
