// Bad tokenizer.json: a clear error that names the file and the field, within bounded memory.
#include <algorithm>
#include <fstream>

#include "base/json.h"
#include "base/utf8.h"
#include "model/tokenizer.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::tokenizer_load_test {

using testing::as_text;
using testing::data_path;
using testing::json;

namespace {

json fixture(const std::string& name) {
  auto source = parse_json_file(data_path("tokenizers/" + name + ".json"));
  if (!source.ok()) FAIL(source.error().message);
  return source.value();
}

std::string error_of(const std::string& text) {
  auto tokenizer = Tokenizer::parse(text, "T.json");
  return tokenizer.ok() ? "loaded" : tokenizer.error().message;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

}  // namespace

TEST_CASE("tokenizer.json: one thing wrong at a time", "[model][tokenizer]") {
  const auto check = [](const json& spoilt, const std::string& says) {
    const std::string error = error_of(as_text(spoilt));
    INFO(says);
    INFO(error);
    CHECK(error.starts_with("T.json: "));
    CHECK(has(error, says));
    CHECK(error.size() < 500);
  };
  // A place, what stands there instead (else it is taken away), and what is said of that.
  const json hostile = parsed_file(data_path("hostile/tokenizer.json"));
  for (const auto& [name, cases] : hostile.items()) {
    const json base = fixture(name);
    CHECK(error_of(as_text(base)) == "loaded");
    for (const json& one : cases) {
      json spoilt = base;
      const json::json_pointer place(one[0].get<std::string>());
      if (one.size() == 3)
        spoilt[place] = one[1];
      else if (json& parent = spoilt[place.parent_pointer()]; parent.is_array())
        parent.erase(size_t(std::stoi(place.back())));
      else
        parent.erase(place.back());
      check(spoilt, one.back());
    }
  }
  // And two things that belong together.
  json none = fixture("llama2"), twice = none, order = none, late = fixture("qwen2"), regex = late;
  none["model"]["unk_token"] = nullptr, none["model"]["byte_fallback"] = false;
  check(none, "some text has no tokens");
  twice["added_tokens"][3] = twice["added_tokens"][4];
  check(twice, "was added before");
  std::swap(order["decoder"]["decoders"][1], order["decoder"]["decoders"][2]);
  check(order, "order is not supported");
  std::swap(late["pre_tokenizer"]["pretokenizers"][0], late["pre_tokenizer"]["pretokenizers"][1]);
  check(late, "a step after ByteLevel");
  regex["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = std::string(20000, 'a');
  check(regex, "a regex of more than 16384 bytes");
}

TEST_CASE("tokenizer.json: truncated anywhere, or not JSON", "[model][tokenizer]") {
  std::string text = as_text(fixture("llama2"));
  for (size_t n = 0; n < text.size(); n += 1 + n / 20) {
    std::string error = error_of(text.substr(0, n));
    if (!has(error, "T.json: byte ")) FAIL(error);
  }
  CHECK(has(error_of(std::string(100000, '[')), "nested deeper"));
  CHECK(has(error_of("{\"model\":{},\"model\":{}}"), "duplicate key \"model\""));
  CHECK(has(error_of("{\"model\":\"\xff\"}"), "T.json: byte 11"));
}

TEST_CASE("tokenizer.json: absurd sizes are refused", "[model][tokenizer]") {
  json source = fixture("llama2");
  std::string many = as_text(source);
  many.pop_back();
  many += ",\"many\":[";
  std::string one = "{\"id\":1,\"content\":\"x\"},";
  for (int i = 0; i < 1'400'000; ++i) many += one;  // 4.2 million values
  many += "0]}";
  CHECK(has(error_of(many), "more than 4194304 values"));
  many = "";

  json added = source;
  int32_t n = 2000;
  for (int i = 0; i < (1 << 17) + 1; ++i)
    added["added_tokens"].push_back({{"id", n + i}, {"content", "t" + std::to_string(i)}});
  CHECK(has(error_of(as_text(added)), "131078 tokens, at most 131072 are supported"));

  json deep = source;
  for (int i = 0; i < 25; ++i)
    deep["normalizer"] = {{"type", "Sequence"}, {"normalizers", json::array({deep["normalizer"]})}};
  CHECK(error_of(as_text(deep)) == "loaded");
  for (int i = 0; i < 20; ++i) deep["normalizer"]["normalizers"].push_back({{"type", "NFC"}});
  CHECK(has(error_of(as_text(deep)), "more than 16 steps"));

  // A hole among the ids is nothing; it decodes to nothing.
  json hole = source;
  hole["model"]["vocab"]["far away"] = (1 << 20) - 1;
  auto tokenizer = Tokenizer::parse(as_text(hole), "T.json");
  REQUIRE(tokenizer.ok());
  CHECK(tokenizer.value()->vocab_size() == 1 << 20);
  CHECK(tokenizer.value()->decode({5000, (1 << 20) - 1}) == "far away");
}

TEST_CASE("tokenizer.json: the folder and the file", "[model][tokenizer]") {
  auto none = Tokenizer::load("no/such/folder");
  REQUIRE(!none.ok());
  CHECK(none.error().code == ErrorCode::not_found);
  CHECK(has(none.error().message, "no/such/folder/tokenizer.json"));
  testing::TempDir dir;
  std::ofstream(dir.path + "/tokenizer.json") << as_text(fixture("gpt2"));
  CHECK(Tokenizer::load(dir.path).ok());
}

TEST_CASE("tokenizer: special tokens that are normalized obey the parts", "[model][tokenizer]") {
  // Looked for as "▁<x>", in text where Prepend and Replace have moved every position.
  json source = fixture("llama2");
  int32_t id = 5000;
  source["added_tokens"].push_back({{"id", id}, {"content", "<x>"}, {"special", true}, {"normalized", true}});
  auto loaded = Tokenizer::parse(as_text(source), "T.json");
  REQUIRE(loaded.ok());
  auto& tokenizer = *loaded.value();
  auto count = [&](std::vector<Tokenizer::Part> parts) {
    auto ids = tokenizer.encode(parts, false);
    return std::count(ids.begin(), ids.end(), id);
  };
  CHECK(count({{"<x> a <x>", true}}) == 2);
  CHECK(count({{"<x> a <x>", false}}) == 0);
  CHECK(count({{"<x> a", true}, {" <x>", false}}) == 1);
  CHECK(count({{"a a ", true}, {"a <x> b", false}, {" <x>", true}, {" <x>", false}}) == 1);
  CHECK(count({{" <", true}, {"x>", false}}) == 0);
  CHECK(tokenizer.decode({id, id}).empty());
}

TEST_CASE("tokenizer: merges make no special token in text that may have none", "[model][tokenizer]") {
  // "the" as a special token that merges make, too; and by ignore_merges.
  for (const char* name : {"llama2", "llama3"}) {
    json source = fixture(name);
    int32_t id = source["model"]["vocab"]["the"];
    source["added_tokens"].push_back({{"id", id}, {"content", "the"}, {"special", true}, {"normalized", false}});
    auto loaded = Tokenizer::parse(as_text(source), "T.json");
    REQUIRE(loaded.ok());
    auto& tokenizer = *loaded.value();
    for (std::string text : {"the", "othe", "a the the", "bathe"}) {
      auto ids = tokenizer.encode(text, {.add_special_tokens = false, .parse_special_tokens = false});
      INFO(name << " " << text);
      CHECK(std::count(ids.begin(), ids.end(), id) == 0);
      CHECK(tokenizer.decode(ids) == text);
      auto parsed = tokenizer.encode(text, {.add_special_tokens = false});
      CHECK(std::count(parsed.begin(), parsed.end(), id) >= 1);
    }
  }
}

// A vocabulary in which every wanted word is a token: what is cut otherwise becomes other tokens.
TEST_CASE("tokenizer.json: words of published models' pre-tokenizers are those of tokenizers", "[model][tokenizer]") {
  const char* elsewhere = std::getenv("XPYD_PRETOKENIZERS");
  const auto file = parse_json_file(elsewhere ? elsewhere : data_path("pretokenizers.json"));
  REQUIRE(file.ok());
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  // GPT-2's characters of bytes.
  std::string character[256];
  uint32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool self = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    append_utf8(character[b], self ? uint32_t(b) : next++);
  }
  int words_seen = 0;
  for (const json& one : file.value()["cases"]) {
    json vocab = json::object();
    auto add = [&](const std::string& bytes) {
      std::string key;
      for (const char c : bytes) key += character[uint8_t(c)];
      vocab.emplace(key, vocab.size());
    };
    for (int b = 0; b < 256; ++b) add(std::string(1, char(b)));
    for (const json& words : one["words"])
      for (const json& word : words) add(word);
    json source = {{"model", {{"type", "BPE"}, {"ignore_merges", true}, {"merges", json::array()}, {"vocab", vocab}}},
                   {"decoder", byte_level},
                   {"pre_tokenizer", one["pre_tokenizer"]}};
    if (!has(as_text(one["pre_tokenizer"]), "ByteLevel"))
      source["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {one["pre_tokenizer"], byte_level}}};
    INFO(as_text(one["pre_tokenizer"]).substr(0, 400));
    auto tokenizer = Tokenizer::parse(as_text(source), "T.json");
    if (!tokenizer.ok()) {
      FAIL_CHECK(tokenizer.error().message);
      continue;
    }
    for (size_t i = 0; i < one["words"].size(); ++i) {
      std::vector<std::string> got;
      for (const int32_t id : tokenizer.value()->encode(file.value()["strings"][i].get<std::string>()))
        got.push_back(tokenizer.value()->piece(id));
      const auto wanted = one["words"][i].get<std::vector<std::string>>();
      if (got != wanted) {
        INFO(as_text(file.value()["strings"][i]));
        CHECK(got == wanted);
        break;
      }
      words_seen += int(wanted.size());
    }
  }
  CHECK(words_seen > 9000);
}

TEST_CASE("tokenizer.json: a regex that takes for ever is an error that names the file", "[model][tokenizer]") {
  json source = fixture("qwen2");
  source["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:a+)+[bc]";
  auto tokenizer = Tokenizer::parse(as_text(source), "T.json");
  REQUIRE(tokenizer.ok());
  std::string says;
  try {
    tokenizer.value()->encode(std::string(1000, 'a'));
  } catch (const Error& error) {
    says = error.message;
  }
  CHECK(says ==
        "T.json: field \"pre_tokenizer.pretokenizers[0]\": the regex takes too much time or memory on a text of "
        "1000 bytes");
}

}  // namespace xpyd::testing::tokenizer_load_test
