#include "base/options/options.h"

#include <fstream>
#include <limits>

#include "tests/matchers.h"

namespace xpyd::testing::options_test {

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

void contains(const std::string& text, const std::string& part) { CHECK_THAT(text, Contains(part)); }

std::string write_file(const testing::TempDir& dir, const std::string& content) {
  std::string path = dir.path + "/options.ini";
  std::ofstream(path) << content;
  return path;
}

TEST_CASE("options: defaults are those of the group's own rows", "[options]") {
  Options options = good({});
  CHECK(options.integer("offset") == -1);
  CHECK(options.number("rate") == kInf);
  CHECK(options.integer("kv-bytes") == 512 << 20);
  CHECK(options.flag("prefix-cache"));
  CHECK(options.integer("limit") == 4);
  CHECK_FALSE(options.given("port"));
  CHECK(need(Options::parse(kRows, "bench", {}, 0)).integer("limit") == 3);
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

  CHECK_FALSE(good({"--chat=0"}).flag("chat"));
  CHECK(good({"--name="}).text("name") == "");
  CHECK(good({"--name", "--other"}).text("name") == "--other");
  CHECK(good({"--name=a=b"}).text("name") == "a=b");
  CHECK(good({"--port", "1", "--port", "2"}).integer("port") == 2);  // the last one counts
  CHECK(good({"--", "--port"}).positional() == std::vector<std::string>{"--port"});
}

TEST_CASE("options: an error names what is wrong, and what was expected", "[options]") {
  for (const char* bad : {"abc", "", "65536", "-1", "1.5", "1 ", "99999999999999999999"})
    contains(error({"--port", bad}),
             "--port: '" + std::string(bad) + "' is not valid: expected a whole number from 0 to 65535");
  for (const char* bad : {"nan", "0.4", ""}) contains(error({"--rate", bad}), "expected a number at least 0.5 1/s");
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
      {{"--alloc", "paged"}, "unknown option '--alloc'"},  // beginnings are not completed
  };
  for (const auto& [words, says] : cases) contains(error(words), says);
  const std::string secret = error({"--key", "hunter2", "--port", "x"});
  CHECK(secret.find("hunter2") == secret.npos);
}

TEST_CASE("options: a file gives values, and the command line overrides them", "[options]") {
  testing::TempDir dir;
  std::string path = write_file(dir,
                                "# a comment\nport = 9000\n  kv-bytes=1GiB  # another\n"
                                "chat = true\nname = two words\n\n");
  Options options = good({"--port", "1", "--config", path, "--chat=off"});
  CHECK(options.integer("port") == 1);
  CHECK_FALSE(options.flag("chat"));
  CHECK(options.integer("kv-bytes") == 1 << 30);
  CHECK(options.text("name") == "two words");
  CHECK(options.given("name"));
  CHECK_FALSE(options.given("rate"));
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
  };
  for (auto [content, expected] : cases) {
    std::string path = write_file(dir, content), message = error({"--config", path});
    contains(message, path);
    contains(message, expected);
  }
  contains(error({"--config", dir.path + "/none"}), "no such file");
}

TEST_CASE("options: the printed table has every option, and no secret", "[options]") {
  Options options = good({"--name", "it's # 1", "--key", "hunter2"});
  std::string table = options.table();
  contains(table, "--name it's # 1\n");
  contains(table, "--kv-bytes 512MiB  # bytes\n");
  CHECK(table.find("hunter2") == table.npos);
  CHECK(options.text("key") == "hunter2");
  CHECK(options.shown_values().at("key") == "***");
  CHECK(options.table(true) == "--name it's # 1\n--key ***  # secret\n");  // options that differ from their defaults
}

TEST_CASE("options: the manual has every option of the group", "[options]") {
  std::string manual = options_manual(kRows, "serve");
  for (const OptionRow& row : kRows) contains(manual, "  --" + std::string(row.name));
  contains(manual, "--allocator contiguous|paged");
  contains(manual, "default 512MiB");
}

TEST_CASE("options: sizes in bytes are read with their units", "[options]") {
  for (auto [text, bytes] : {std::pair{"0", int64_t{0}},
                             {"65536", 65536},
                             {"1kB", 1000},
                             {"1KiB", 1024},
                             {"512MiB", 512ll << 20},
                             {"1.5GB", 1500000000},
                             {".5KiB", 512},
                             {"1.25TiB", 5ll << 38},
                             {"1048576TiB", int64_t{1} << 60}}) {
    auto parsed = parse_bytes(text);
    INFO(text);
    REQUIRE(parsed);
    CHECK(parsed.value() == bytes);
  }
  for (const char* bad : {"", "x", "-1", " 1", "1 MiB", "1M", "1..5KB", ".", "0.3B", "1e6", "9223372036854775808",
                          "1.0001KiB", "8388608TiB", "MiB"}) {
    INFO(bad);
    CHECK_FALSE(parse_bytes(bad));
  }
}

}  // namespace xpyd::testing::options_test
