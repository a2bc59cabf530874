#include "experiments/load/prefix_stats.h"

#include <fstream>
#include <map>

#include "base/json/json.h"
#include "base/random.h"
#include "experiments/subcommands.h"
#include "model/folder.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "tests/catch.h"
#include "tests/json.h"
#include "tests/matchers.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::prefix_stats_test {

PrefixInput texts(std::vector<std::string> prompts) {
  PrefixInput input;
  for (const std::string& p : prompts) input.lengths.push_back(int64_t(p.size()));
  input.prompts = std::move(prompts);
  return input;
}

// The definition word for word, and slow: every prefix of every prompt is a node.
PrefixStats by_definition(const PrefixInput& input, int64_t min_count, int64_t min_length) {
  std::map<std::string, int64_t> counts;
  PrefixStats stats;
  int64_t through = 0, reused = 0, total = 0;
  for (const std::string& p : input.prompts) {
    int64_t seen = 0;
    for (size_t n = 1; n <= p.size(); ++n) {
      seen += counts.count(p.substr(0, n));
      ++counts[p.substr(0, n)];
    }
    reused += seen;
    total += int64_t(p.size());
  }
  for (const auto& [prefix, count] : counts) {
    bool kept_child = false;
    for (int c = 0; c < 256; ++c) {
      auto child = counts.find(prefix + char(c));
      kept_child |= child != counts.end() && child->second >= min_count;
    }
    if (count < min_count || kept_child || int64_t(prefix.size()) <= min_length) continue;
    ++stats.leaves;
    through += count;
  }
  stats.r_leaf = double(stats.leaves) / double(input.prompts.size());
  stats.r_conv = double(through) / double(input.prompts.size());
  stats.length_reuse = total ? double(reused) / double(total) : 0;
  return stats;
}

std::string write_file(const testing::TempDir& dir, const std::string& text) {
  std::ofstream(dir.path + "/file") << text;
  return dir.path + "/file";
}

TEST_CASE("prefix-stats: the sorted walk agrees with the definition on random prompts", "[prefix-stats]") {
  Random random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::string> prompts(1 + random.below(30));
    for (std::string& p : prompts)
      for (auto n = random.below(7); n > 0; --n) p += char('a' + random.below(3));
    PrefixInput input = texts(prompts);
    for (int64_t min_count : {2, 3, 5})
      for (int64_t min_length : {0, 1, 3}) {
        INFO("round " << round << ", N " << min_count << ", L " << min_length);
        PrefixStats got = prefix_stats(input, min_count, min_length);
        PrefixStats want = by_definition(input, min_count, min_length);
        CHECK(got.leaves == want.leaves);
        CHECK(got.r_conv == Approx(want.r_conv));
        CHECK(got.length_reuse == Approx(want.length_reuse));
      }
  }
}

TEST_CASE("prefix-stats: the published figures of the Mooncake traces are reproduced", "[prefix-stats]") {
  // Counted independently of this code: R_leaf, R_conv, reuse of blocks and of tokens.
  struct Row {
    const char* file;
    double r_leaf, r_conv, blocks, tokens;
  };
  for (const Row& row :
       {Row{"conversation", 0.194, 0.417, 0.366, 0.374}, Row{"synthetic", 0.139, 0.530, 0.640, 0.651}}) {
    const std::string path = testing::shared_path("traces/mooncake_" + std::string(row.file) + ".jsonl");
    if (path.empty()) SKIP_TEST("no ../shared/traces");
    INFO(path);
    PrefixInput input = read_prefix_input(path).value();
    PrefixStats s = prefix_stats(input, 2, 0);
    CHECK(s.r_leaf == Approx(row.r_leaf).margin(0.0006));
    CHECK(s.r_conv == Approx(row.r_conv).margin(0.0006));
    CHECK(s.unit_reuse == Approx(row.blocks).margin(0.0006));
    CHECK(s.length_reuse == Approx(row.tokens).margin(0.0006));
    if (row.file == std::string("conversation")) {
      PrefixStats hundred = prefix_stats(input, 100, 0);
      CHECK(hundred.leaves == 1);  // the first block, which all share
      CHECK(hundred.r_conv == 1);
    }
  }
}

TEST_CASE("prefix-stats: texts of every format are counted in bytes, tokens and blocks", "[prefix-stats]") {
  testing::TempDir dir;
  const auto read = [&](const std::string& text) { return read_prefix_input(write_file(dir, text)).value(); };
  CHECK(read(R"({"conversation": [{"content": "The key"}, {"content": "ok"}]})").prompts ==
        std::vector<std::string>{"The key\nok"});
  const PrefixInput texts = read(
      "{\"instruction\": \"The key of box 1 is red.\", \"context\": \"\", \"response\": \"ok\"}\n"
      "{\"instruction\": \"The key of box 1 is blue.\", \"context\": \"\", \"response\": \"ok\"}\n");
  const PrefixStats bytes = prefix_stats(texts, 2, 0);
  REQUIRE(bytes.leaves == 1);
  CHECK(texts.text(texts.prompts[bytes.most[0].prompt].substr(0, bytes.most[0].units)) == "The key of box 1 is ");

  // A word begins with its blank.
  const auto tokenizer = Tokenizer::load(kDemoModel).value();
  const PrefixInput tokens = in_tokens(texts, *tokenizer, 1), blocks = in_tokens(texts, *tokenizer, 4);
  const PrefixStats by_tokens = prefix_stats(tokens, 2, 0);
  REQUIRE(by_tokens.leaves == 1);
  const std::string shared = tokens.text(
      tokens.prompts[by_tokens.most[0].prompt].substr(0, by_tokens.most[0].units * 4));
  CHECK(shared == "The key of box 1 is");
  CHECK(by_tokens.most[0].length == int64_t(tokenizer->encode(shared, {.add_special_tokens = false}).size()));
  CHECK(prefix_stats(blocks, 2, 0).most[0].length == by_tokens.most[0].length / 4 * 4);
}

TEST_CASE("prefix-stats: conversations and traces are read, and bad files are named", "[prefix-stats]") {
  testing::TempDir dir;
  auto chats = read_prefix_input(write_file(dir, R"([
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}, {"value": "ok"}]},
    {"conversations": []}, {"conversations": [{"value": "hi"}]}])"));
  REQUIRE(chats);
  CHECK(chats.value().prompts == std::vector<std::string>{"hi\nyo\nok", "hi"});
  auto trace = read_prefix_input(
      write_file(dir,
                 "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [7, 8]}\n"
                 "{\"timestamp\": 1, \"input_length\": 512, \"output_length\": 5, \"hash_ids\": [7]}\n"));
  REQUIRE(trace);
  PrefixStats s = prefix_stats(trace.value(), 2, 0);
  CHECK(s.leaves == 1);
  CHECK(s.most[0].length == 512);
  CHECK(s.unit_reuse == Approx(1.0 / 3));
  CHECK(s.length_reuse == Approx(512.0 / 1112));

  CHECK(read_prefix_input(dir.path + "/none").error().message.find("No such file") != std::string::npos);
  for (const auto& [text, says] : std::initializer_list<std::pair<const char*, const char*>>{
           {"", "expected a JSON array or JSON lines"},
           {"{\"a\": 1}", "expected conversations, conversation, instruction, prompt or hash_ids"},
           {"[]", "no prompts"},
           {"[{\"conversations\": [{\"from\": \"human\"}]}]", "conversations[0]"},
           {"{\"timestamp\": 0, \"hash_ids\": [1]}\n", "file:1: field \"input_length\""}}) {
    INFO(text);
    CHECK_THAT(read_prefix_input(write_file(dir, text)).error().message, Contains(says));
  }
}

}  // namespace xpyd::testing::prefix_stats_test
