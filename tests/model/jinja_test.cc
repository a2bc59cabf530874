// Tests the template language: jinja2's output for the same templates (tests/data/jinja_cases.json, made by
// make_jinja_fixtures.py), and the bounds of depth, output and steps.
#include "model/jinja/jinja.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "tests/catch.h"

namespace xpyd::testing::jinja_test {

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// Returns the output, or "ERROR " and the reason.
std::string render(const std::string& source, const jinja::Dict& variables = {}, int64_t now = 0) {
  auto made = jinja::Template::parse(source);
  if (!made.ok()) return "ERROR " + made.error().message;
  auto out = made.value().render(variables, now);
  return out.ok() ? out.value() : "ERROR " + out.error().message;
}

TEST_CASE("jinja: every construct renders as jinja2 renders it", "[model][jinja]") {
  setenv("TZ", "UTC", 1);
  tzset();
  auto text = read_small_file(data_path("jinja_cases.json"), 1 << 20);
  REQUIRE(text.ok());
  const auto file = nlohmann::ordered_json::parse(text.value());
  const jinja::Value variables = jinja::json_value(file["variables"].dump());
  int rendered = 0, errors = 0;
  for (const auto& one : file["cases"]) {
    const std::string got = render(one["template"], *variables.dict(), file["now"]);
    INFO(one["template"].get<std::string>());
    INFO(got);
    if (one.contains("error")) {
      ++errors;
      CHECK(got.starts_with("ERROR line "));
    } else {
      ++rendered;
      CHECK(got == one["text"].get<std::string>());
    }
  }
  CHECK(rendered >= 90);
  CHECK(errors >= 60);
  // Constructs that jinja2 renders and this interpreter does not have are refused and never approximated.
  for (const auto& one : file["refused"]) {
    const std::string got = render(one, *variables.dict(), file["now"]);
    INFO(one.get<std::string>());
    INFO(got);
    CHECK(got.starts_with("ERROR line "));
  }
  CHECK(file["refused"].size() >= 40);
  CHECK(has(render("{{ \xff }}"), "the template is not UTF-8"));
  CHECK(render("a\n{{ raise_exception('No ' ~ 1) }}") == "ERROR line 2: No 1");
}

TEST_CASE("jinja: depth, output and steps are bounded", "[model][jinja]") {
  const auto many = [](const std::string& part, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += part;
    return text;
  };
  const std::string sources[] = {
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{{ " + many("(", 9999) + "1" + many(")", 9999) + " }}",
      "{{ " + many("[", 9999) + many("]", 9999) + " }}",
      "{{ " + many("not ", 9999) + "1 }}",
      "{{ 1" + many(" + 1", 9999) + " }}",
      "{{ a" + many(".b", 9999) + " }}",
      "{{ a" + many("|string", 9999) + " }}",
      "{{ 1" + many(" if 1 else 1", 9999) + " }}",
      many("{% if 1 %}", 9999) + many("{% endif %}", 9999),
      many("{% for x in y %}", 9999),
      "{{ " + many("n", 256) + " }}",
  };
  for (const std::string& source : sources) {
    INFO(source.substr(0, 120));
    const std::string got = render(source);
    INFO(got.substr(0, 200));
    CHECK(got.starts_with("ERROR "));
  }
  const std::string numbers = "[" + many("1,", 99) + "]", mebibyte = "{% set s = '" + many("x", 1 << 20) + "' %}";
  CHECK(has(render(mebibyte + "{% for x in " + numbers + " %}{{ s }}{% endfor %}"), "more than 64 MiB"));
  // Each of these would take days, or more memory than there is.
  const std::string loops = "{% for a in n %}{% for b in n %}{% for c in n %}{% for d in n %}{% for e in n %}";
  const std::string ends = many("{% endfor %}", 5);
  const std::string twice = "{% set ns = namespace(v='0123456789abcdef', w=[]) %}{% for a in n %}";
  const std::pair<const char*, std::string> endless[] = {
      {"loops", loops + ends},
      {"a text", twice + "{% set ns.v = ns.v ~ ns.v %}{% endfor %}"},
      {"a list of itself", twice + "{% set ns.w = [ns.w, ns.w] %}{% endfor %}{{ ns.w|tojson }}"},
      {"comparison", twice + "{% set ns.w = [ns.w, ns.w] %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}"
                             "{{ ns.w == ns.v }}"},
      {"join", twice + "{% set ns.v = n|join(ns.v) %}{% endfor %}"},
      {"a namespace", loops + "{% set q = namespace(a=1) %}" + ends},
      {"a time", mebibyte + loops + "{% set q = strftime_now(s) %}" + ends},
      {"a key", mebibyte + "{% set d = {s: 1} %}" + loops + "{% set q = d[s] %}" + ends},
      {"strip", twice + "{% set ns.v = ns.v ~ ns.v %}{% if ns.v.strip(ns.v) %}{% endif %}{% endfor %}"},
  };
  for (const auto& [what, source] : endless) {
    INFO(what);
    const std::string got = render("{% set n = " + numbers + " %}" + source);
    INFO(got.substr(0, 200));
    CHECK((has(got, "the rendering takes more than 67108864 steps") || has(got, "a value has more than 64 MiB")));
  }
  CHECK(has(render("{% set n = " + numbers + " %}{% set ns = namespace(v=[]) %}"
                   "{% for a in n %}{% for b in n %}{% set ns.v = [ns.v] %}{% endfor %}{% endfor %}"),
            "lists and dicts are nested too deeply"));
  // Integers have 64 bits.
  for (const char* beyond : {"9223372036854775807 + 1", "-9223372036854775807 - 2", "0 - 9223372036854775807 - 2"})
    CHECK(has(render("{{ " + std::string(beyond) + " }}"), "of integers goes beyond 64 bits"));
  CHECK(render("{{ 9223372036854775806 % 9223372036854775807 }}") == "9223372036854775806");
  CHECK(render("{{ -9223372036854775807 % 9223372036854775807 }}") == "0");
  // A long template is not a deep one.
  CHECK(render("{% if 0 %}" + many("{% elif 0 %}", 999) + "{% else %}x{% endif %}") == "x");
  // A namespace that holds itself is freed (LeakSanitizer checks it).
  CHECK(render("{% set ns = namespace() %}{% set ns.me = ns %}x") == "x");
}

}  // namespace xpyd::testing::jinja_test
