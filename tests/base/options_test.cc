#include "base/options/options.h"

#include <fstream>
#include <limits>

#include "tests/catch.h"

namespace xpyd::testing::options_test {
namespace {

using enum OptionKind;
constexpr double kInf = std::numeric_limits<double>::infinity();

constexpr OptionRow kRows[] = {
    {"name", text, "", "", "NAME", 0, 0, "a name", "serve bench"},
    {"port", integer, "8000", "", "", 0, 65535, "a port", "serve"},
    {"offset", integer, "-1", "", "", -5, 5, "may be negative", "serve"},
    {"rate", number, "inf", "1/s", "", 0.5, kInf, "a rate", "serve"},
    {"top-p", number, "1", "", "", 0, 1, "a share", "serve"},
    {"kv-bytes", bytes, "512MiB", "bytes", "", 1, 1 << 30, "a size", "serve"},
    {"allocator", choice, "paged", "", "contiguous|paged", 0, 0, "a scheme", "serve"},
    {"prefix-cache", choice, "on", "", "on|off", 0, 0, "a switch", "serve"},
    {"chat", flag, "off", "", "", 0, 0, "a flag", "serve"},
    {"key", text, "", "secret", "", 0, 0, "a secret", "serve"},
    {"limit", integer, "3", "", "", 0, 9, "of bench", "bench"},
    {"limit", integer, "4", "", "", 0, 9, "of serve", "serve"},
    {"config", text, "", "", "FILE", 0, 0, "a file", "serve"},
};

Result<Options> parse(const std::vector<std::string>& words, int max_positional = 1) {
  return Options::parse(kRows, "serve", words, max_positional);
}

Options good(const std::vector<std::string>& words) {
  auto options = parse(words);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  return options.value();
}

std::string error(const std::vector<std::string>& words) {
  auto options = parse(words);
  REQUIRE_FALSE(options);
  CHECK(options.error().code != ErrorCode::unavailable);
  return options.error().message;
}

bool contains(const std::string& text, const std::string& part) {
  INFO(text << " should contain " << part);
  bool found = text.find(part) != text.npos;
  CHECK(found);
  return found;
}

std::string write_file(const testing::TempDir& dir, const std::string& content) {
  std::string path = dir.path + "/options.ini";
  std::ofstream(path) << content;
  return path;
}

TEST_CASE("options: defaults are those of the group's own rows", "[options]") {
  Options options = good({});
  CHECK(options.integer("port") == 8000);
  CHECK(options.integer("offset") == -1);
  CHECK(options.number("rate") == kInf);
  CHECK(options.integer("kv-bytes") == 512 << 20);
  CHECK(options.text("allocator") == "paged");
  CHECK(options.flag("prefix-cache"));
  CHECK_FALSE(options.flag("chat"));
  CHECK(options.integer("limit") == 4);
  CHECK_FALSE(options.given("port"));
  CHECK(options.positional().empty());
  auto bench = Options::parse(kRows, "bench", {}, 0);
  REQUIRE(bench);
  CHECK(bench.value().integer("limit") == 3);
  CHECK(bench.value().values().size() == 2);
}

TEST_CASE("options: each kind of value is read in each way of writing it", "[options]") {
  Options options = good({"--port=1", "--name", "a b", "--offset", "-3", "--rate", "2.5", "--kv-bytes", "1.5MiB",
                          "--allocator=contiguous", "--prefix-cache", "off", "--chat", "MODEL", "--top-p", "0"});
  CHECK(options.integer("port") == 1);
  CHECK(options.text("name") == "a b");
  CHECK(options.integer("offset") == -3);
  CHECK(options.number("rate") == 2.5);
  CHECK(options.number("top-p") == 0);
  CHECK(options.integer("kv-bytes") == 3 << 19);
  CHECK(options.text("allocator") == "contiguous");
  CHECK_FALSE(options.flag("prefix-cache"));
  CHECK(options.flag("chat"));
  CHECK(options.given("port"));
  CHECK(options.positional() == std::vector<std::string>{"MODEL"});  // not the flag's value

  CHECK(good({"--chat=yes"}).flag("chat"));
  CHECK_FALSE(good({"--chat=0"}).flag("chat"));
  CHECK(good({"--name="}).text("name") == "");
  CHECK(good({"--name", ""}).text("name") == "");
  CHECK(good({"--name", "-x"}).text("name") == "-x");
  CHECK(good({"--name=--port"}).text("name") == "--port");
  CHECK(good({"--name", "--other"}).text("name") == "--other");
  CHECK(good({"--name=a=b"}).text("name") == "a=b");
  CHECK(good({"--port", "1", "--port", "2"}).integer("port") == 2);  // the last one counts
  CHECK(good({"--", "--port"}).positional() == std::vector<std::string>{"--port"});
  CHECK(good({"-"}).positional() == std::vector<std::string>{"-"});
}

TEST_CASE("options: an error names what is wrong, and what was expected", "[options]") {
  for (const char* bad : {"abc", "", "65536", "-1", "1.5", "0x10", "1 ", "99999999999999999999"})
    contains(error({"--port", bad}),
             "--port: '" + std::string(bad) + "' is not valid: expected a whole number from 0 to 65535");
  for (const char* bad : {"nan", "x", "0.4", "-inf", ""})
    contains(error({"--rate", bad}), "expected a number at least 0.5 1/s");
  for (const char* bad : {"inf", "1.01", "-0.1"}) contains(error({"--top-p", bad}), "expected a number from 0 to 1");
  const struct {
    std::vector<std::string> words;
    const char* says;
  } cases[] = {
      {{"--kv-bytes", "12XB"}, "the unit is unknown"},
      {{"--kv-bytes", "2GiB"}, "from 1 to 1073741824 bytes"},
      {{"--allocator", "pagd"}, "expected contiguous|paged"},
      {{"--chat=maybe"}, "expected on|off"},
      {{"--port"}, "--port: expected a value"},
      {{"--name", "--port", "3"}, "--name: expected a value"},
      {{"a", "b"}, "unexpected argument 'b'"},
      {{"--prot", "3"}, "unknown option '--prot'"},
      {{"--prot=3"}, "unknown option '--prot'"},
      {{"--kv_bytes", "3"}, "unknown option '--kv_bytes'"},
      {{"--alloc", "paged"}, "unknown option '--alloc'"},  // beginnings are not completed
      {{"-p", "3"}, "unknown option '--p'"},
      {{"---port", "3"}, "unknown option '---port'"},
      {{"--=3"}, "unknown option"},
      {{"--no\nsense"}, "unknown option"},
  };
  for (const auto& [words, says] : cases) contains(error(words), says);
  const std::string secret = error({"--key", "hunter2", "--port", "x"});
  CHECK(secret.find("hunter2") == secret.npos);
  auto bench = Options::parse(kRows, "bench", {"--port", "3"}, 0);
  REQUIRE_FALSE(bench);
  contains(bench.error().message, "unknown option '--port'");
}

TEST_CASE("options: a file gives values, and the command line overrides them", "[options]") {
  testing::TempDir dir;
  std::string path = write_file(dir,
                                "# a comment\nport = 9000\n  kv-bytes=1GiB  # another\n"
                                "chat = true\nname = two words\n\n");
  Options options = good({"--config", path});
  CHECK(options.integer("port") == 9000);
  CHECK(options.integer("kv-bytes") == 1 << 30);
  CHECK(options.flag("chat"));
  CHECK(options.text("name") == "two words");
  CHECK(options.given("port"));
  CHECK_FALSE(options.given("rate"));
  options = good({"--port", "1", "--config", path, "--chat=off"});
  CHECK(options.integer("port") == 1);
  CHECK_FALSE(options.flag("chat"));
  CHECK(options.integer("kv-bytes") == 1 << 30);
}

TEST_CASE("options: an error in a file names the file", "[options]") {
  testing::TempDir dir;
  struct {
    const char* content;
    const char* expected;
  } cases[] = {
      {"prot = 3\n", "unknown option '--prot'"},
      {"port = 70000\n", "port: '70000' is not valid: expected a whole number from 0 to 65535"},
      {"port = 1\nport = 2\n", "port is given twice"},
      {"port\n", "expected lines of the form `name = value`"},
      {"[serve]\nport = 1\n", "expected options without a [section]"},
      {"config = other.ini\n", "cannot include another one"},
      {"= 3\n", "options.ini"},
      {"allocator = pagd\n", "expected contiguous|paged"},
  };
  for (auto [content, expected] : cases) {
    std::string path = write_file(dir, content), message = error({"--config", path});
    contains(message, path);
    contains(message, expected);
  }
  contains(error({"--config", dir.path + "/none"}), "no such file");
  contains(error({"--config", dir.path}), "--config");
  contains(error({"--config", write_file(dir, std::string(2 << 20, 'x'))}), "at most");
}

TEST_CASE("options: the printed table has every option, and no secret", "[options]") {
  Options options = good({"--name", "it's # 1", "--key", "hunter2"});
  std::string table = options.table();
  contains(table, "--name it's # 1\n");
  contains(table, "--kv-bytes 512MiB  # bytes\n");
  contains(table, "--key ***  # secret\n");
  contains(table, "--limit 4\n");
  CHECK(table.find("hunter2") == table.npos);
  CHECK(options.text("key") == "hunter2");
  CHECK(options.shown_values().at("key") == "***");
  CHECK(options.shown_values().at("port") == "8000");
  CHECK(table.find("--name") < table.find("--port"));  // the table's order, not the alphabet's
  CHECK(options.table(true) == "--name it's # 1\n--key ***  # secret\n");  // options that differ from their defaults
}

TEST_CASE("options: the manual has every option of the group, within 100 columns", "[options]") {
  std::string manual = options_manual(kRows, "serve");
  for (const OptionRow& row : kRows) contains(manual, "  --" + std::string(row.name));
  contains(manual, "--allocator contiguous|paged");
  contains(manual, "from 0 to 65535");
  contains(manual, "default 512MiB");
  size_t begin = 0;
  while (begin < manual.size()) {
    size_t end = manual.find('\n', begin);
    CHECK(end - begin <= 100);
    begin = end + 1;
  }
}

TEST_CASE("options: sizes in bytes are read with their units", "[options]") {
  struct {
    const char* text;
    int64_t bytes;
  } cases[] = {{"0", 0},
               {"1", 1},
               {"65536", 65536},
               {"7B", 7},
               {"1kB", 1000},
               {"1KB", 1000},
               {"1KiB", 1024},
               {"512MiB", 512ll << 20},
               {"3MB", 3000000},
               {"1.5GB", 1500000000},
               {"0.1GB", 100000000},
               {"2GiB", 2ll << 30},
               {".5KiB", 512},
               {"1.25TiB", 5ll << 38},
               {"1TB", 1000000000000},
               {"1048576TiB", int64_t{1} << 60}};
  for (auto [text, bytes] : cases) {
    auto parsed = parse_bytes(text);
    INFO(text);
    REQUIRE(parsed);
    CHECK(parsed.value() == bytes);
  }
  for (const char* bad : {"", "x", "-1", "+1", " 1", "1 ", "1 MiB", "1M", "1mib", "1..5KB", ".", "0.3B", "1e6",
                          "9223372036854775808", "1.0001KiB", "99999999999999999999", "8388608TiB", "1\n", "MiB"}) {
    INFO(bad);
    CHECK_FALSE(parse_bytes(bad));
  }
}

}  // namespace
}  // namespace xpyd::testing::options_test
