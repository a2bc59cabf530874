// Compares every string of tests/data/tokenizers with the output of Hugging Face's tokenizers.
#include "model/text/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "base/json/json.h"
#include "base/utf8.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::tokenizer_test {

const char* const kNames[] = {"llama3", "qwen2", "gpt2", "llama2", "mistral"};

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

// Returns the streamed text, and checks that every prefix of the stream is valid UTF-8.
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

// Checks every string against its fixture.
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
    auto got_plain = tokenizer->encode(tokenizer->guard(clean), {.guarded = true});
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

json source_of(const std::string& name) {
  auto source = parse_json_file(data_path("tokenizers/" + name + ".json"));
  if (!source.ok()) FAIL(source.error().message);
  return source.value();
}

std::string error_of(const std::string& text) {
  auto tokenizer = Tokenizer::parse(text, "T.json");
  return tokenizer.ok() ? "loaded" : tokenizer.error().message;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

TEST_CASE("tokenizer: every string encodes and decodes as in Hugging Face", "[model][tokenizer]") {
  for (const char* name : kNames) {
    DYNAMIC_SECTION(name) { check_strings(name); }
  }
}

TEST_CASE("tokenizer: random ids decode as in Hugging Face", "[model][tokenizer]") {
  for (const char* name : kNames) {
    DYNAMIC_SECTION(name) { check_random_ids(name); }
  }
}

TEST_CASE("tokenizer: stories260k encodes and decodes as in Hugging Face", "[model][tokenizer]") {
  if (shared_path("models/stories260k").empty()) SKIP_TEST("no ../shared/models/stories260k");
  check_strings("stories260k");
  check_random_ids("stories260k");
  auto loaded = Tokenizer::load(shared_path("models/stories260k"));
  REQUIRE(loaded.ok());
  CHECK(loaded.value()->vocab_size() == 512);
}

TEST_CASE("tokenizer: single tokens have their ids, pieces and special flags", "[model][tokenizer]") {
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

TEST_CASE("detokenizer: a stream emits only text that later tokens cannot change", "[model][tokenizer]") {
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
  // This takes less than a second in release, even where the whole text is one word. With n^2 it would take hours.
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

TEST_CASE("tokenizer: special tokens in guarded text are text", "[model][tokenizer]") {
  for (const char* name : kNames) {
    auto tokenizer = open_named(name);
    std::vector<std::string> specials;
    auto source = parse_json_file(fixture(std::string(name) + ".json"));
    REQUIRE(source.ok());
    for (auto& token : source.value()["added_tokens"])
      if (token["special"]) specials.push_back(token["content"]);
    REQUIRE(specials.size() >= 2);
    auto count = [&](const std::string& text) {
      const auto ids = tokenizer->encode(text, {.add_special_tokens = false, .guarded = true});
      return std::count_if(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer->is_special(id); });
    };
    for (const std::string& special : specials) {
      INFO(name << " " << special);
      const std::string text = "x" + special + " y", guarded = tokenizer->guard(text);
      CHECK(count(text) == 1);
      CHECK(count(guarded) == 0);
      CHECK(count(special + guarded + special) == 2);
      CHECK(count(tokenizer->guard(special + special + text)) == 0);
      CHECK(count(tokenizer->guard(special.substr(0, 2) + special)) == 0);  // another one begins inside
      const auto ids = tokenizer->encode(guarded, {.add_special_tokens = false, .guarded = true});
      const std::string back = tokenizer->decode(ids);
      CHECK((back == text || back == " " + text));  // gpt2: add_prefix_space
    }
    // A text without special tokens is its own guarded text.
    const std::string text = "Hello  world, it's  \u00e9 1234\n\n  ok";
    CHECK(tokenizer->guard(text) == text);
    CHECK(tokenizer->encode(text, {.guarded = true}) == tokenizer->encode(text));
  }
}

// --- Bad tokenizer.json: a clear error that names the file and the field, within bounded memory.

TEST_CASE("tokenizer.json: a single wrong field is an error that names it", "[model][tokenizer]") {
  const auto check = [](const json& spoilt, const std::string& says) {
    const std::string error = error_of(as_text(spoilt));
    INFO(says);
    INFO(error);
    CHECK(error.starts_with("T.json: "));
    CHECK(has(error, says));
    CHECK(error.size() < 500);
  };
  // A place, its new value (without one it is removed), and the message.
  const json hostile = parsed_file(data_path("hostile/tokenizer.json"));
  for (const auto& [name, cases] : hostile.items()) {
    const json base = source_of(name);
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
  // A fault of two fields that belong together.
  json late = source_of("qwen2");
  std::swap(late["pre_tokenizer"]["pretokenizers"][0], late["pre_tokenizer"]["pretokenizers"][1]);
  check(late, "a step after ByteLevel");
}

TEST_CASE("tokenizer.json: a file truncated anywhere is an error", "[model][tokenizer]") {
  std::string text = as_text(source_of("llama2"));
  for (size_t n = 0; n < text.size(); n += 1 + n / 20) {
    std::string error = error_of(text.substr(0, n));
    if (!has(error, "T.json: byte ")) FAIL(error);
  }
}

TEST_CASE("tokenizer.json: absurd sizes are refused", "[model][tokenizer]") {
  json source = source_of("llama2");
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

  // A gap among the ids is allowed. Its ids decode to nothing.
  json hole = source;
  hole["model"]["vocab"]["far away"] = (1 << 20) - 1;
  auto tokenizer = Tokenizer::parse(as_text(hole), "T.json");
  REQUIRE(tokenizer.ok());
  CHECK(tokenizer.value()->vocab_size() == 1 << 20);
  CHECK(tokenizer.value()->decode({5000, (1 << 20) - 1}) == "far away");
}

TEST_CASE("tokenizer.json: a folder loads its file, and a missing one is named", "[model][tokenizer]") {
  auto none = Tokenizer::load("no/such/folder");
  REQUIRE(!none.ok());
  CHECK(none.error().code == ErrorCode::not_found);
  CHECK(has(none.error().message, "no/such/folder/tokenizer.json"));
  testing::TempDir dir;
  std::ofstream(dir.path + "/tokenizer.json") << as_text(source_of("gpt2"));
  CHECK(Tokenizer::load(dir.path).ok());
}

TEST_CASE("tokenizer: merges make no special token in text that may have none", "[model][tokenizer]") {
  // "the" is a special token that merges, or ignore_merges, also make.
  for (const char* name : {"llama2", "llama3"}) {
    json source = source_of(name);
    int32_t id = source["model"]["vocab"]["the"];
    source["added_tokens"].push_back({{"id", id}, {"content", "the"}, {"special", true}, {"normalized", false}});
    auto loaded = Tokenizer::parse(as_text(source), "T.json");
    REQUIRE(loaded.ok());
    auto& tokenizer = *loaded.value();
    for (std::string text : {"the", "othe", "a the the", "bathe"}) {
      auto ids = tokenizer.encode(tokenizer.guard(text), {.add_special_tokens = false, .guarded = true});
      INFO(name << " " << text);
      CHECK(std::count(ids.begin(), ids.end(), id) == 0);
      CHECK(tokenizer.decode(ids) == text);
      auto parsed = tokenizer.encode(text, {.add_special_tokens = false});
      CHECK(std::count(parsed.begin(), parsed.end(), id) >= 1);
    }
  }
}

// Every expected word is a token of the vocabulary, so another split gives other tokens.
TEST_CASE("tokenizer.json: published models' pre-tokenizers split words as tokenizers does", "[model][tokenizer]") {
  const char* elsewhere = std::getenv("XPYD_PRETOKENIZERS");
  const auto file = parse_json_file(elsewhere ? elsewhere : data_path("pretokenizers.json"));
  REQUIRE(file.ok());
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  // GPT-2's characters for bytes.
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
  CHECK(words_seen > 3500);
}

}  // namespace xpyd::testing::tokenizer_test
