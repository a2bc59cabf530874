// Every string of tests/data/tokenizers against what Hugging Face's tokenizers makes of it.
#include "model/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/json.h"
#include "base/utf8.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::tokenizer_test {

using testing::as_text;
using testing::data_path;
using testing::json;
using testing::parsed;
using testing::shared_path;

namespace {

const char* const kNames[] = {"llama3", "qwen2", "gpt2", "llama2", "mistral", "metaspace"};

std::string fixture(const std::string& name) { return data_path("tokenizers/" + name); }

std::unique_ptr<const Tokenizer> open(const std::string& path) {
  auto text = read_small_file(path, 1 << 20);
  if (!text.ok()) FAIL(text.error().message);
  auto tokenizer = Tokenizer::parse(text.value(), path);
  if (!tokenizer.ok()) FAIL(tokenizer.error().message);
  return std::move(tokenizer).value();
}

std::unique_ptr<const Tokenizer> open_named(const std::string& name) {
  if (name != "stories260k") return open(fixture(name + ".json"));
  return open(shared_path("models/stories260k") + "/tokenizer.json");
}

std::vector<std::string> lines(const std::string& path) {
  std::ifstream in(path);
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) out.push_back(line);
  if (out.empty()) FAIL("no lines in " + path);
  return out;
}

std::vector<std::string> strings() {
  std::vector<std::string> out;
  for (const std::string& line : lines(fixture("strings.txt"))) {
    if (line[0] == 'x') {
      std::string raw;
      for (size_t i = 1; i + 1 < line.size(); i += 2)
        raw.push_back(static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16)));
      out.push_back(raw);
    } else {
      out.push_back(parsed(line));
    }
  }
  return out;
}

std::vector<std::string> fields(const std::string& line) {
  std::vector<std::string> out;
  size_t begin = 0;
  for (size_t tab; (tab = line.find('\t', begin)) != line.npos; begin = tab + 1)
    out.push_back(line.substr(begin, tab - begin));
  out.push_back(line.substr(begin));
  return out;
}

std::vector<int32_t> ids_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<int32_t> out;
  for (int32_t id; in >> id;) out.push_back(id);
  return out;
}

// Also checks that every prefix of the stream is UTF-8.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  Detokenizer detokenizer(tokenizer, skip);
  std::string text;
  for (int32_t id : ids) {
    std::string piece = detokenizer.feed(id);
    if (!is_utf8(piece)) FAIL("a piece is not UTF-8");
    text += piece;
  }
  return text + detokenizer.flush();
}

// Agreement on every string; returns how many were compared.
void check_strings(const std::string& name) {
  auto tokenizer = open_named(name);
  auto texts = strings();
  auto expected = lines(fixture(name + ".txt"));
  REQUIRE(texts.size() == expected.size());
  REQUIRE(texts.size() >= 2000);
  int wrong = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto field = fields(expected[i]);
    REQUIRE(field.size() == 3);
    std::string clean = replace_invalid_utf8(texts[i]);
    auto ids = ids_of(field[0]);
    auto plain = field[2] == "=" ? ids : ids_of(field[2]);
    std::string back = field[1] == "=" ? clean : std::string(parsed(field[1]));
    auto got = tokenizer->encode(texts[i]);
    auto got_plain = tokenizer->encode(texts[i], {.parse_special_tokens = false});
    bool good = got == ids && got_plain == plain && tokenizer->decode(ids) == back &&
                streamed(*tokenizer, ids, true) == back;
    if (good) continue;
    if (++wrong > 3) continue;
    INFO(name << " line " << i + 1 << ": " << as_text(clean));
    CHECK(got == ids);
    CHECK(got_plain == plain);
    CHECK(tokenizer->decode(ids) == back);
    CHECK(streamed(*tokenizer, ids, true) == back);
  }
  CHECK(wrong == 0);
}

void check_random_ids(const std::string& name) {
  auto tokenizer = open_named(name);
  for (const std::string& line : lines(fixture(name + ".ids.txt"))) {
    auto field = fields(line);
    REQUIRE(field.size() == 3);
    INFO(name << ": " << line);
    auto ids = ids_of(field[0]);
    std::string skipped = parsed(field[1]);
    std::string kept = field[2] == "=" ? skipped : std::string(parsed(field[2]));
    CHECK(tokenizer->decode(ids) == skipped);
    CHECK(tokenizer->decode(ids, false) == kept);
    CHECK(streamed(*tokenizer, ids, true) == skipped);
    CHECK(streamed(*tokenizer, ids, false) == kept);
  }
}

}  // namespace

TEST_CASE("tokenizer: every string as Hugging Face has it", "[model][tokenizer]") {
  for (const char* name : kNames) {
    DYNAMIC_SECTION(name) { check_strings(name); }
  }
}

TEST_CASE("tokenizer: random ids as Hugging Face decodes them", "[model][tokenizer]") {
  for (const char* name : kNames) {
    DYNAMIC_SECTION(name) { check_random_ids(name); }
  }
}

TEST_CASE("tokenizer: stories260k as Hugging Face has it", "[model][tokenizer]") {
  if (shared_path("models/stories260k").empty()) SKIP_TEST("no ../shared/models/stories260k");
  check_strings("stories260k");
  check_random_ids("stories260k");
  auto loaded = Tokenizer::load(shared_path("models/stories260k"));
  REQUIRE(loaded.ok());
  CHECK(loaded.value()->vocab_size() == 512);
}

TEST_CASE("tokenizer: facts about single tokens", "[model][tokenizer]") {
  auto llama2 = open_named("llama2");
  CHECK(llama2->token_id("<s>") == 1);
  CHECK(llama2->token_id("<0x41>") == 3 + 0x41);
  CHECK(llama2->token_id("no such token") == -1);
  CHECK(llama2->is_special(1));
  CHECK(!llama2->is_special(3));
  CHECK(!llama2->is_special(-1));
  CHECK(!llama2->is_special(1 << 30));
  CHECK(llama2->piece(3 + 0x41) == "A");
  CHECK(llama2->piece(3 + 0xff) == "\xff");
  CHECK(llama2->piece(2) == "</s>");
  CHECK(llama2->piece(llama2->token_id("▁the")) == " the");
  CHECK(llama2->piece(-1).empty());
  CHECK(llama2->piece(llama2->vocab_size()).empty());
  CHECK(llama2->strips_leading_space());

  auto llama3 = open_named("llama3");
  CHECK(!llama3->strips_leading_space());
  CHECK(llama3->piece(llama3->token_id("Ġthe")) == " the");
  CHECK(llama3->piece(llama3->token_id("Ċ")) == "\n");
  CHECK(llama3->vocab_size() == llama3->token_id("<|eot_id|>") + 1);
  CHECK(llama3->encode("a", {.add_special_tokens = false}) == std::vector<int32_t>{llama3->token_id("a")});
  CHECK(llama3->encode("").size() == 1);  // BOS
}

TEST_CASE("detokenizer: a stream says what it knows and no more", "[model][tokenizer]") {
  auto llama2 = open_named("llama2");
  int32_t the = llama2->token_id("▁the"), byte = 3;
  REQUIRE(the > 0);
  Detokenizer first(*llama2, true);
  CHECK(first.feed(1).empty());  // BOS is skipped and strips nothing
  CHECK(first.feed(the) == "the");
  CHECK(first.feed(the) == " the");
  CHECK(first.flush().empty());

  Detokenizer later(*llama2, true);
  later.continues_text();
  CHECK(later.feed(the) == " the");
  CHECK(later.feed(byte + 0xc3).empty());  // a run of bytes waits for its end
  CHECK(later.feed(1).empty());
  CHECK(later.feed(byte + 0xa9).empty());
  CHECK(later.feed(the) == "é the");
  CHECK(later.feed(byte + 0x41).empty());
  CHECK(later.feed(byte + 0xff).empty());
  CHECK(later.flush() == "\ufffd\ufffd");  // one bad byte spoils its run
  CHECK(later.flush().empty());

  auto llama3 = open_named("llama3");
  auto ids = llama3->encode("\U00010348!", {.add_special_tokens = false});
  REQUIRE(ids.size() == 5);
  Detokenizer emoji(*llama3, true);
  for (int i = 0; i < 3; ++i) CHECK(emoji.feed(ids[i]).empty());
  CHECK(emoji.feed(ids[3]) == "\U00010348");
  CHECK(emoji.feed(ids[0]).empty());
  CHECK(emoji.feed(ids[4]) == "\ufffd!");
  CHECK(emoji.feed(ids[0]).empty());
  CHECK(emoji.flush() == "\ufffd");
  CHECK(Detokenizer().flush().empty());
}

TEST_CASE("tokenizer: long words take n log n", "[model][tokenizer]") {
  // Under a second in release, even where the whole text is one word; with n^2 this would take hours.
  for (const char* name : {"llama3", "llama2", "gpt2"}) {
    auto tokenizer = open_named(name);
    for (std::string unit : {"a", " ", "\n", "\u0301", "ab ", "0", "<", "\xff"}) {
      std::string text;
      size_t bytes = unit == "a" || unit == " " ? 1u << 20 : 1u << 17;
      while (text.size() < bytes) text += unit;
      auto ids = tokenizer->encode(text, {.add_special_tokens = false});
      INFO(name << " " << as_text(replace_invalid_utf8(unit)));
      CHECK(!ids.empty());
      std::string back = tokenizer->decode(ids), clean = replace_invalid_utf8(text);
      if (back[0] == ' ' && clean[0] != ' ') back.erase(0, 1);  // gpt2: add_prefix_space
      CHECK(back == clean);
    }
  }
}

TEST_CASE("tokenizer: special tokens in parts that do not allow them are text", "[model][tokenizer]") {
  for (const char* name : {"llama3", "qwen2", "gpt2", "llama2", "mistral", "metaspace"}) {
    auto tokenizer = open_named(name);
    std::vector<std::string> specials;
    auto source = parse_json_file(fixture(std::string(name) + ".json"));
    REQUIRE(source.ok());
    for (auto& token : source.value()["added_tokens"])
      if (token["special"] && token["content"] != "<unk>") specials.push_back(token["content"]);
    REQUIRE(specials.size() >= 2);
    auto count = [&](const std::vector<int32_t>& ids) {
      return std::count_if(ids.begin(), ids.end(),
                           [&](int32_t id) { return tokenizer->is_special(id) && tokenizer->piece(id) != "<unk>"; });
    };
    for (const std::string& special : specials) {
      INFO(name << " " << special);
      std::string text = "x" + special + " y";
      CHECK(count(tokenizer->encode(text, {.add_special_tokens = false})) == 1);
      CHECK(count(tokenizer->encode(text, {false, false})) == 0);
      // Allowed in the first part only; neither half nor whole comes from the second.
      Tokenizer::Part parts[] = {{special, true}, {text, false}, {special, true}};
      CHECK(count(tokenizer->encode(parts, false)) == 2);
      size_t half = special.size() / 2;
      Tokenizer::Part halves[] = {{std::string_view(special).substr(0, half), true},
                                  {std::string_view(special).substr(half), false}};
      CHECK(count(tokenizer->encode(halves, false)) == 0);
      // Nor can a part take the beginning of what follows it.
      Tokenizer::Part greedy[] = {{std::string_view(special).substr(0, half), false}, {special, true}};
      CHECK(count(tokenizer->encode(greedy, false)) == 1);
    }
    // Without special tokens in it, a text in parts is the text.
    std::string text = "Hello  world, it's  \u00e9 1234\n\n  ok";
    for (size_t cut : {0, 1, 5, 6, 7, 14, 22}) {
      Tokenizer::Part parts[] = {{std::string_view(text).substr(0, cut), true},
                                 {std::string_view(text).substr(cut), false}};
      CHECK(tokenizer->encode(parts, true) == tokenizer->encode(text));
    }
  }
}

}  // namespace xpyd::testing::tokenizer_test
