#include "model/pretokenize.h"

#include "tests/catch.h"

namespace xpyd::testing::pretokenize_test {

namespace {

std::vector<std::string> words(SplitPattern pattern, std::string_view text) {
  std::vector<std::string_view> views;
  split_text(pattern, text, views);
  return {views.begin(), views.end()};
}

using Strings = std::vector<std::string>;

}  // namespace

TEST_CASE("pretokenize: words as the regexes cut them", "[model][tokenizer]") {
  const struct {
    std::string text;
    Strings llama3, qwen2, gpt2;  // empty: as llama3
  } cases[] = {
      {"", {}, {}, {}},
      {" ", {" "}, {}, {}},
      {"'\u017fx'Sx",
       {"'\u017f", "x", "'S", "x"},
       {},
       {"'", "\u017fx", "'", "Sx"}},  // U+017F is an s when case is ignored
      {"I'LL'll've", {"I", "'LL", "'ll", "'ve"}, {}, {"I", "'", "LL", "'ll", "'ve"}},
      {"'sa 'a '", {"'s", "a", " '", "a", " '"}, {}, {}},
      {"a\r\n\n  b   c", {"a", "\r\n\n", " ", " b", "  ", " c"}, {}, {"a", "\r\n\n ", " b", "  ", " c"}},
      {"  \n \t x", {"  \n", " \t", " x"}, {}, {"  \n \t", " x"}},
      {"\t\tx\n", {"\t", "\tx", "\n"}, {}, {"\t", "\t", "x", "\n"}},
      {"x  ", {"x", "  "}, {}, {}},
      {"12345 6\u00bd7",
       {"123", "45", " ", "6\u00bd7"},
       {"1", "2", "3", "4", "5", " ", "6", "\u00bd", "7"},
       {"12345", " 6\u00bd7"}},
      {"?!\r\n\nx ?!", {"?!\r\n\n", "x", " ?!"}, {}, {"?!", "\r\n", "\n", "x", " ?!"}},
      {"\u00a0x \u3000 y", {"\u00a0x", " \u3000", " y"}, {}, {"\u00a0", "x", " \u3000", " y"}},
      {"\u0301a\u0301 b", {"\u0301a", "\u0301", " b"}, {}, {"\u0301", "a", "\u0301", " b"}},
      {"(a)", {"(a", ")"}, {}, {"(", "a", ")"}},
      {"\U0001f600\U0001f600 \U0001f600\n",
       {"\U0001f600\U0001f600", " \U0001f600\n"},
       {},
       {"\U0001f600\U0001f600", " \U0001f600", "\n"}},
  };
  for (auto& one : cases) {
    INFO(one.text);
    CHECK(words(SplitPattern::llama3, one.text) == one.llama3);
    CHECK(words(SplitPattern::qwen2, one.text) == (one.qwen2.empty() ? one.llama3 : one.qwen2));
    CHECK(words(SplitPattern::gpt2, one.text) == (one.gpt2.empty() ? one.llama3 : one.gpt2));
  }
}

TEST_CASE("pretokenize: Metaspace and added spaces", "[model][tokenizer]") {
  const std::string m = "\u2581";
  PreTokenizerStep step;
  step.kind = PreTokenizerStep::Kind::metaspace;
  step.replacement = m;
  auto run = [&](std::string_view text, bool at_start) {
    Words out;
    pre_tokenize({step}, text, at_start, out);
    return Strings(out.views.begin(), out.views.end());
  };
  using Prepend = PreTokenizerStep::Prepend;
  CHECK(run("a  b ", false) == Strings{m + "a", m, m + "b", m});
  CHECK(run(" a", true) == Strings{m + "a"});
  step.prepend = Prepend::first;
  CHECK(run("a b", true) == Strings{m + "a", m + "b"});
  CHECK(run("a b", false) == Strings{"a", m + "b"});
  step.split_words = false;
  CHECK(run("a b", true) == Strings{m + "a" + m + "b"});
  step.prepend = Prepend::never;
  CHECK(run("a b", true) == Strings{"a" + m + "b"});

  PreTokenizerStep space;
  space.kind = PreTokenizerStep::Kind::add_space;
  Words out;
  for (auto& [text, with] : {std::pair{"a", " a"}, {" a", " a"}}) {
    pre_tokenize({space}, text, true, out);
    CHECK(Strings(out.views.begin(), out.views.end()) == Strings{with});
  }
}

TEST_CASE("pretokenize: replace_all", "[model][tokenizer]") {
  for (auto& [text, result] : {std::pair{"", ""}, {"aaa", "ba"}, {"xaax", "xbx"}, {"a", "a"}}) {
    std::string changed = text;
    replace_all(changed, "aa", "b");
    CHECK(changed == result);
  }
}

}  // namespace xpyd::testing::pretokenize_test
