// Tests `xpyd tour` as a user runs it. XPYD_BIN names the program, and `make test` sets it.
#include <regex>

#include "tests/program.h"

namespace xpyd::testing::tour_test {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Returns the groups of the last line that matches the whole pattern, or nothing.
std::vector<std::string> last_match(const std::string& text, const std::string& pattern) {
  std::vector<std::string> groups;
  std::smatch match;
  for (const std::string& line : lines_of(text))
    if (std::regex_match(line, match, std::regex(pattern))) groups = {match.begin(), match.end()};
  return groups;
}

TEST_CASE("tour: it has one engine's bits, and the text and hash of `xpyd generate`", "[tour]") {
  NEEDS_PROGRAM();
  const Ran tour = run_program({"tour"});
  const std::string text = tour.out + tour.err;
  INFO(text);
  REQUIRE(tour.code == 0);
  const auto prompt = last_match(text, "prompt, \\d+ tokens: \"(.*)\"");
  const auto answer = last_match(text, "D decodes \"(.*)\" and, in the same batch, \" .*\"");
  const auto hash = last_match(text, "logits hash ([0-9a-f]{16}) equals that of one engine alone");
  REQUIRE((prompt.size() == 2 && answer.size() == 2 && hash.size() == 2));
  CHECK(answer[1] == " The key of box 17 is amber.");

  // 1P1D, and one instance that does both phases: threads, mailboxes and a conductor run the same steps.
  for (const char* topology : {"1P1D", "1C"}) {
    const Ran generated = run_program(
        {"generate", "--topology", topology, "--prompt", prompt[1], "--kv-bytes", "16MiB"});
    CHECK(generated.out == answer[1]);
    const auto its_hash = last_match(generated.err, ".*logits hash ([0-9a-f]{16}).*");
    REQUIRE(its_hash.size() == 2);
    CHECK(its_hash[1] == hash[1]);
  }
}

// RoPE's angles come from the C library, and another library may round differently.
std::string without_hash(const std::string& line) {
  return std::regex_replace(line, std::regex("hash [0-9a-f]{16} "), "hash ");
}

TEST_CASE("tour: README.md shows the output", "[tour]") {
  NEEDS_PROGRAM();
  const std::string readme = read_all("README.md");
  const size_t begin = readme.find("\nprompt, ") + 1, end = readme.find("\n```", begin);
  REQUIRE((begin > 0 && end != readme.npos));
  std::vector<std::string> printed = lines_of(run_program({"tour"}).out);
  // The step that samples the end of the sequence adds no text.
  printed.erase(std::unique(printed.begin(), printed.end()), printed.end());
  size_t at = 0, shown = 0;
  bool gap = false;  // "…": lines are left out
  for (const std::string& line : lines_of(readme.substr(begin, end - begin))) {
    if (line.ends_with("…")) {
      gap = true;
      continue;
    }
    INFO(line);
    while (gap && at < printed.size() && printed[at] != line) ++at;
    REQUIRE(at < printed.size());
    CHECK(without_hash(printed[at++]) == without_hash(line));
    gap = false;
    ++shown;
  }
  CHECK(at == printed.size());
  CHECK(shown >= 10);
}

}  // namespace
TEST_CASE("tour: --allocator vattention draws the page groups", "[tour][vattention]") {
  NEEDS_PROGRAM();
  const Ran tour = run_program({"tour", "--allocator", "vattention"});
  const std::string text = tour.out + tour.err;
  INFO(text);
  CHECK(tour.code == 0);
  CHECK(last_match(text, "A ends .* oo +B ## .*").size() == 1);
}

}  // namespace xpyd::testing::tour_test
