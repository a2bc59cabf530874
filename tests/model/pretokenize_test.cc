// Tests how text is split before merges, and the Unicode properties of its characters.
#include "model/text/pretokenize.h"

#include "base/status.h"
#include "model/unicode.h"
#include "tests/json.h"

namespace xpyd::testing::pretokenize_test {

namespace {

using Strings = std::vector<std::string>;

Strings words(const PreTokenizerStep& step, std::string_view text) {
  Words out;
  pre_tokenize({step}, text, true, out);
  return {out.views.begin(), out.views.end()};
}

PreTokenizerStep split(std::string_view regex) {
  return {.kind = PreTokenizerStep::Kind::split, .regex = std::make_shared<const Regex>(regex, "T.json")};
}

constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
}  // namespace

TEST_CASE("pretokenize: Metaspace and prepended spaces are those of Hugging Face", "[model][tokenizer]") {
  const std::string m = "\u2581";
  PreTokenizerStep step{.kind = PreTokenizerStep::Kind::metaspace};
  step.replacement = m;
  auto run = [&](std::string_view text, bool at_start) {
    Words out;
    pre_tokenize({step}, text, at_start, out);
    return Strings(out.views.begin(), out.views.end());
  };
  using Prepend = PreTokenizerStep::Prepend;
  CHECK(run("a  b ", false) == Strings{m + "a" + m + m + "b" + m});
  CHECK(run(" a", true) == Strings{m + "a"});
  step.prepend = Prepend::first;
  CHECK(run("a b", true) == Strings{m + "a" + m + "b"});
  CHECK(run("a b", false) == Strings{"a" + m + "b"});
  step.prepend = Prepend::never;
  CHECK(run("a b", true) == Strings{"a" + m + "b"});

  const PreTokenizerStep space{.kind = PreTokenizerStep::Kind::add_space};
  CHECK(words(space, "a") == Strings{" a"});
  CHECK(words(space, " a") == Strings{" a"});
}

TEST_CASE("pretokenize: a regex that takes for ever ends with an error", "[model][tokenizer]") {
  const std::pair<std::string, std::string> cases[] = {
      {"(?:a+)+[bc]", std::string(100'000, 'a')},
      {"a*a*a*a*a*a*[bc]", std::string(100'000, 'a')},
      {"(?:a|a)*[bc]", std::string(5000, 'a')},
  };
  for (auto& [regex, text] : cases) {
    INFO(regex);
    const PreTokenizerStep step = split(regex);
    std::string says = "ended";
    try {
      words(step, text);
    } catch (const Error& error) {
      says = error.message;
    }
    CHECK(says == "T.json: the regular expression takes too much time or memory on a text of " +
                      std::to_string(text.size()) + " bytes");
  }
  // A long text alone is harmless: backing up from the end of a run takes one step for each character.
  for (const char* regex : {kLlama3, kGpt2}) {
    CHECK(words(split(regex), std::string(3'000'000, ' ') + "x").size() == 2);
    CHECK(words(split(regex), std::string(3'000'000, 'x')).size() == 1);
  }
}

TEST_CASE("pretokenize: replace_all replaces from left to right without overlap", "[model][tokenizer]") {
  for (auto& [text, result] : {std::pair{"", ""}, {"aaa", "ba"}, {"xaax", "xbx"}, {"a", "a"}}) {
    std::string changed = text;
    replace_all(changed, "aa", "b");
    CHECK(changed == result);
  }
}

TEST_CASE("unicode: character classes are right at their edges", "[model][unicode]") {
  struct Row {
    uint32_t c;
    bool letter, number, space, word;
  };
  const Row rows[] = {
      {'a', 1, 0, 0, 1},     {'Z', 1, 0, 0, 1},     {'@', 0, 0, 0, 0},     {'[', 0, 0, 0, 0},
      {'`', 0, 0, 0, 0},     {'{', 0, 0, 0, 0},     {'0', 0, 1, 0, 1},     {'9', 0, 1, 0, 1},
      {'/', 0, 0, 0, 0},     {':', 0, 0, 0, 0},     {'_', 0, 0, 0, 1},     {8, 0, 0, 0, 0},
      {9, 0, 0, 1, 0},       {13, 0, 0, 1, 0},      {14, 0, 0, 0, 0},      {0x1c, 0, 0, 0, 0},
      {' ', 0, 0, 1, 0},     {0x85, 0, 0, 1, 0},    {0xa0, 0, 0, 1, 0},    {0xaa, 1, 0, 0, 1},
      {0xb2, 0, 1, 0, 0},    {0x301, 0, 0, 0, 1},   {0x200b, 0, 0, 0, 0},  {0x200c, 0, 0, 0, 1},
      {0x2028, 0, 0, 1, 0},  {0x2160, 0, 1, 0, 1},  {0x24b6, 0, 0, 0, 1},  {0x24ea, 0, 1, 0, 0},
      {0x3000, 0, 0, 1, 0},  {0x3007, 0, 1, 0, 1},  {0x4e00, 1, 0, 0, 1},  {0x9fff, 1, 0, 0, 1},
      {0xd7a3, 1, 0, 0, 1},  {0xfeff, 0, 0, 0, 0},  {0x105c0, 1, 0, 0, 1}, {0x1d7ff, 0, 1, 0, 1},
      {0x1f600, 0, 0, 0, 0}, {0x323af, 1, 0, 0, 1}, {0x323b0, 0, 0, 0, 0}, {0x10ffff, 0, 0, 0, 0},
  };
  for (const Row& row : rows) {
    INFO(row.c);
    CHECK(unicode::is_letter(row.c) == row.letter);
    CHECK(unicode::is_number(row.c) == row.number);
    CHECK(unicode::is_space(row.c) == row.space);
    CHECK(unicode::is_word(row.c) == row.word);
  }
  // The sizes of the classes in Unicode 16.0.
  size_t letters = 0, numbers = 0, spaces = 0;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    letters += unicode::is_letter(c);
    numbers += unicode::is_number(c);
    spaces += unicode::is_space(c);
  }
  CHECK(letters == 141028);
  CHECK(numbers == 1911);
  CHECK(spaces == 25);
}

TEST_CASE("unicode: normalization form C maps each case and is idempotent", "[model][unicode]") {
  for (const json& one : parsed_file(data_path("unicode_nfc.json"))) {  // from, to, and the reason
    INFO(as_text(one));
    const std::string from = one[0], to = one[1];
    CHECK(unicode::nfc(from) == to);
    CHECK(unicode::nfc(to) == to);
  }
  // A long run of marks is not sorted in quadratic time.
  std::string marks = "a";
  for (int i = 0; i < 100000; ++i) marks += i % 2 ? "\u0323" : "\u0301";
  std::string sorted = unicode::nfc(marks);  // U+1EA1 is as long as a and U+0323
  CHECK(sorted.size() == marks.size());
  CHECK(sorted.starts_with("\u1ea1\u0323\u0323"));
  CHECK(sorted.ends_with("\u0301\u0301"));
}

}  // namespace xpyd::testing::pretokenize_test
