#include "base/json/json.h"

#include <sys/stat.h>

#include <fstream>

#include "base/utf8.h"
#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::json_test {

using nlohmann::json;

namespace {

std::string error_of(std::string_view text, const JsonLimits& limits = {}) {
  auto result = parse_json(text, "f.json", limits);
  return result.ok() ? "parsed: " + result.value().dump() : result.error().message;
}

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  bool found = text.find(part) != text.npos;
  CHECK(found);
  return found;
}

}  // namespace

TEST_CASE("json: values equal those that nlohmann parses", "[base]") {
  const char* texts[] = {
      "null",
      "true",
      "-0",
      "18446744073709551615",
      "-9223372036854775808",
      "1.5e3",
      "\"a\\u0000b\\ud83d\\ude00\"",
      "[]",
      "{}",
      "[[],[1,[2,{\"a\":[]}]],{\"b\":{}}]",
      " {\"a\": [1, 2, {\"b\": null}], \"c\": \"d\", \"\": false} ",
      "\"\xf0\x9f\x98\x80\"",
  };
  for (const char* text : texts) {
    INFO(text);
    auto result = parse_json(text, "t");
    REQUIRE(result.ok());
    CHECK(result.value() == json::parse(text));
    CHECK(result.value().type() == json::parse(text).type());
  }
}

TEST_CASE("json: text that is not strict JSON is refused, with the byte of the error", "[base]") {
  const struct {
    std::string text, says;
  } cases[] = {
      {"", "f.json: byte 1: "},
      {"{\"a\":1", "byte 7: "},
      {"[1,]", "byte 4: "},
      {"[1] x", "byte 5: "},
      {"[1] [2]", "byte 5: "},
      {"// c\n1", "byte 1: "},
      {"NaN", "byte 1: "},
      {std::string("{}\0x", 4), "byte 3: a NUL byte"},
      {"01", "byte 2: "},
      {"1e999", "byte 5: "},
      {"\"\\ud800\"", "surrogate"},
      {"\"a\nb\"", "control character"},
      {"{\"abc\":1,\"abc\":2}", "byte 14: duplicate key \"abc\""},
      {"{\"x\":{\"a\":1,\"b\":2,\"a\":3}}", "duplicate key \"a\""},
      {"\"ab\xff\"", "byte 4: "},
      {"\"\xc0\x80\"", "UTF-8"},
      {"\"\xed\xa0\x80\"", "UTF-8"},
      {"\"\xf4\x90\x80\x80\"", "UTF-8"},
      {std::string("\0", 1), "byte 1: "},
  };
  for (auto& [text, says] : cases) {
    std::string error = error_of(text);
    INFO(text);
    contains(error, "f.json: byte ");
    contains(error, says);
  }
  // Different objects may have the same key.
  CHECK(error_of("[{\"a\":1},{\"a\":1}]") == "parsed: [{\"a\":1},{\"a\":1}]");
}

TEST_CASE("json: depth and bytes are bounded", "[base]") {
  auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  CHECK(error_of(nested(64)).starts_with("parsed"));
  contains(error_of(nested(65)), "byte 65: it is nested deeper than 64");
  contains(error_of(std::string(1'000'000, '[')), "nested deeper than 64");
  std::string objects;
  for (int i = 0; i < 100; ++i) objects += "{\"a\":";
  contains(error_of(objects), "nested deeper than 64");
  CHECK(error_of("[[1]]", {.max_depth = 2}).starts_with("parsed"));
  contains(error_of("[[[1]]]", {.max_depth = 2}), "nested deeper than 2");

  CHECK(error_of("[1,2]", {.max_bytes = 5}).starts_with("parsed"));
  contains(error_of("[1,2]", {.max_bytes = 4}), "f.json: 5 bytes of JSON; expected at most 4");

  // An error quotes a little of a huge token, in printable ASCII.
  std::string error = error_of("\"" + std::string(1 << 20, 'x') + "\xff\"");
  CHECK(error.size() < 400);
  for (char c : error_of("\"\xc3\xa9\x01\"")) CHECK((c >= ' ' && c < 0x7f));
}

TEST_CASE("json: field readers check type and range at the edges", "[base]") {
  json object = json::parse(R"({"i": 5, "neg": -1, "f": 1.0, "s": "16", "b": true, "z": null,
                                "u": 9223372036854775808, "big": 1e300, "a": [1], "o": {"k": 1},
                                "m": 9223372036854775807})");
  for (auto [min, max, good] : {std::tuple{5, 5, true}, {4, 6, true}, {6, 9, false}, {0, 4, false}})
    CHECK(get_int(object, "i", min, max).ok() == good);
  CHECK(get_int(object, "i", 0, 9).value() == 5);
  CHECK(get_int(object, "neg", -1, 9).value() == -1);
  CHECK(get_int(object, "m", 0, INT64_MAX).value() == INT64_MAX);
  for (const char* name : {"neg", "f", "s", "b", "z", "u", "big", "a", "o", "none"}) {
    auto result = get_int(object, name, 0, INT64_MAX, "config.json");
    INFO(name);
    REQUIRE(!result.ok());
    contains(result.error().message,
             std::string("config.json: field \"") + name + "\": expected an integer from 0 to ");
  }
  contains(get_int(object, "none", 0, 1).error().message, "missing");
  contains(get_int(object, "s", 0, 1).error().message, "got \"16\"");

  CHECK(get_double(object, "i", 0, 9).value() == 5.0);
  CHECK(get_double(object, "big", 0, 1e301).value() == 1e300);
  CHECK(!get_double(object, "big", 0, 1e299).ok());
  CHECK(!get_double(object, "s", 0, 99).ok());
  CHECK(get_bool(object, "b").value());
  CHECK(!get_bool(object, "i").ok());
  CHECK(get_string(object, "s").value() == "16");
  CHECK(!get_string(object, "i").ok());
  CHECK(get_array(object, "a").value()->size() == 1);
  CHECK(!get_array(object, "o").ok());
  CHECK(get_object(object, "o").value()->at("k") == 1);
  CHECK(!get_object(object, "a").ok());
  CHECK(find_field(object, "z") == nullptr);
  CHECK(find_field(object, "none") == nullptr);
  CHECK(find_field(object, "i") == &object["i"]);
  CHECK(!get_int(json(3), "i", 0, 9).ok());  // not an object at all
}

TEST_CASE("json: JsonFields throws the first error", "[base]") {
  json object = json::parse(R"({"i": 5, "f": 0.5, "b": false, "s": "x", "z": null, "a": [1]})");
  JsonFields good(object, "c");
  CHECK(good.integer("i", 1, 9) == 5);
  CHECK(good.integer_or("z", 1, 9, 7) == 7);
  CHECK(good.integer_or("i", 1, 9, 7) == 5);
  CHECK(good.number("f", 0, 1) == 0.5);
  CHECK(good.number_or("none", 0, 1, 0.25) == 0.25);
  CHECK(good.boolean("b") == false);
  CHECK(good.boolean_or("none", true));
  CHECK(good.string_or("none", "y") == "y");

  auto error = [](auto read) {
    try {
      read();
    } catch (const Error& thrown) {
      return thrown.message;
    }
    return std::string();
  };
  CHECK(error([&] { good.no_others(); }) == "c: a: no such field; expected b, f, i, none, z");
  CHECK(good.array("a").size() == 1);
  CHECK(good.string("s") == "x");
  CHECK(error([&] { good.no_others(); }) == "");
  CHECK(error([&] { good.integer_or("i", 6, 9, 6); }) == "c: field \"i\": expected an integer from 6 to 9, got 5");
  CHECK(error([] { JsonFields(json::array(), "c"); }) == "c: expected an object, got array");
}

TEST_CASE("json: a text in quotes is that text again when it is parsed", "[base]") {
  std::string ascii;
  for (int c = 0; c < 0x80; ++c) ascii += char(c);
  for (const std::string& text : {std::string(), ascii, std::string("a\\b"), std::string("\u00e9\u20ac\U0001d11e")})
    CHECK(json::parse(json_quote(text)) == text);
  CHECK(json_quote("\xc1\x80x") == "\"\ufffd\ufffdx\"");
}

TEST_CASE("json: a file that is absent, too long or not regular is an error", "[base]") {
  testing::TempDir dir;
  std::ofstream(dir.path + "/a.json") << "[1, 2]";
  CHECK(parse_json_file(dir.path + "/a.json").value() == json::parse("[1,2]"));
  CHECK(parse_json_file(dir.path + "/none").error().code == ErrorCode::not_found);
  CHECK(parse_json_file(dir.path + "/a.json/b").error().code == ErrorCode::not_found);
  contains(parse_json_file(dir.path).error().message, "not a regular file");
  contains(parse_json_file(dir.path + "/a.json", {.max_bytes = 5}).error().message,
           "/a.json: 6 bytes; expected at most 5");
  REQUIRE(mkfifo((dir.path + "/fifo").c_str(), 0600) == 0);
  contains(parse_json_file(dir.path + "/fifo").error().message, "not a regular file");
}

TEST_CASE("utf8: every code point is decoded as it was encoded", "[base]") {
  int wrong = 0;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string text;
    append_utf8(text, c);
    CodePoint got = next_code_point(text);
    wrong += !(got.valid && got.value == c && got.bytes == int(text.size()));
    for (size_t n = 1; n < text.size(); ++n) {  // its beginnings are unfinished
      got = next_code_point(text.substr(0, n));
      wrong += !(got.unfinished && !got.valid && got.bytes == int(n));
      wrong += unfinished_utf8_suffix("x" + text.substr(0, n)) != n;
    }
    wrong += unfinished_utf8_suffix(text) != 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE("utf8: bad sequences are replaced as Python replaces them", "[base]") {
  const std::string r(kReplacementCharacter);
  const struct {
    std::string bytes, replaced;
  } cases[] = {
      {"", ""},
      {"a\xffz", "a" + r + "z"},
      {"\xc0\x80", r + r},
      {"\xe2\x82", r},
      {"\xe2\x82x", r + "x"},
      {"\xed\xa0\x80", r + r + r},
      {"\xe0\x8f\x8f", r + r + r},
      {"\xf0\x80\x80\x80", r + r + r + r},
      {"\xf0\x9f\x98\xf0\x9f\x98\x80", r + "\U0001f600"},
      {"\xf4\x90\x80\x80", r + r + r + r},
      {"\xf8\x88\x80\x80", r + r + r + r},
      {"\xc3\xc3\xa9", r + "\u00e9"},
  };
  for (auto& [bytes, replaced] : cases) {
    INFO(replaced);
    CHECK(replace_invalid_utf8(bytes) == replaced);
    CHECK(is_utf8(replaced));
    CHECK(is_utf8(bytes) == (bytes == replaced));
  }
  CHECK(unfinished_utf8_suffix("\x80\x80") == 0);
  CHECK(unfinished_utf8_suffix("\xed\xa0") == 0);  // a surrogate: nothing finishes it
  CHECK(unfinished_utf8_suffix("\xf0\x9f\x98\xf0\x9f") == 2);
}

}  // namespace xpyd::testing::json_test
