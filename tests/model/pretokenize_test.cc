// Tests how text is normalized and split before merges.
#include "model/text/pretokenize.h"

#include "base/status.h"
#include "model/unicode.h"
#include "tests/json.h"

namespace xpyd::testing::pretokenize_test {

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
  CHECK(words(split(kGpt2), std::string(3'000'000, ' ') + "x").size() == 2);
  CHECK(words(split(kGpt2), std::string(3'000'000, 'x')).size() == 1);
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
