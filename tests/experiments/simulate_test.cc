#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/random.h"
#include "experiments/simulate/hardware.h"
#include "experiments/simulate/links.h"
#include "tests/json.h"

namespace xpyd::testing::simulate_test {

TEST_CASE("timeline: events run in order of time, and of planning for equal times", "[simulate]") {
  Timeline timeline;
  std::vector<int> order;
  timeline.at(2, [&] { order.push_back(2); });
  timeline.at(1, [&] {
    order.push_back(1);
    timeline.at(0.5, [&] { order.push_back(10); });  // late: runs now
    timeline.at(2, [&] { order.push_back(3); });
  });
  CHECK(timeline.run() == 4);
  CHECK(order == std::vector{1, 10, 2, 3});
  CHECK(timeline.now() == 2);
}

TEST_CASE("links: transfers share both ends equally as they come and go", "[simulate]") {
  Timeline timeline;
  Links links(timeline);
  for (int end = 0; end < 4; ++end) links.set_rate(end, 100);
  double a = 0, b = 0, c = 0;
  links.send(0, 1, 300, 0, [&] { a = timeline.now(); });
  timeline.at(1, [&] { links.send(0, 2, 100, 0.5, [&] { b = timeline.now(); }); });
  timeline.at(1, [&] { links.send(3, 2, 50, 0, [&] { c = timeline.now(); }); });
  timeline.run();
  // From time 1 on, a and b share the link out of 0, and b and c share the link into 2: 50 each. c ends at 2 and b at
  // 3. a has 100 left then.
  CHECK(c == 2);
  CHECK(b == 3.5);
  CHECK(a == 4);
  CHECK(links.bytes() == 450);
}

TEST_CASE("links: a cancelled transfer frees its share and never arrives", "[simulate]") {
  Timeline timeline;
  Links links(timeline);
  links.set_rate(0, 100), links.set_rate(1, 100);
  double a = 0;
  bool b = false;
  links.send(0, 1, 200, 0, [&] { a = timeline.now(); });
  const Links::Id id = links.send(0, 1, 1000, 0, [&] { b = true; });
  CHECK(links.busy(0) == 2);
  CHECK(links.rate(0, 1) == Approx(100.0 / 3));
  timeline.at(2, [&] { links.cancel(id), links.cancel(id); });
  timeline.run();
  CHECK(a == 3);
  CHECK_FALSE(b);
  CHECK(links.busy(1) == 0);
}

TEST_CASE("timeline: a cancelled event does not run and is not kept", "[simulate]") {
  Timeline timeline;
  Random random(5);
  std::vector<uint32_t> names;
  std::vector<int> expected, happened;
  for (int i = 0; i < 1000; ++i) names.push_back(timeline.at(double(i), [&, i] { happened.push_back(i); }));
  for (int i = 0; i < 1000; ++i)
    if (i % 10 == 0) {
      expected.push_back(i);
    } else {
      timeline.call_off(names[size_t(i)]);
      timeline.call_off(timeline.at(5000, [&, i] { happened.push_back(i); }));
    }
  CHECK(timeline.planned() <= 2 * 100 + 1);
  CHECK(timeline.run() == 100);
  CHECK(happened == expected);
  CHECK(timeline.now() == 990);
}

TEST_CASE("links: all bytes arrive, and no link exceeds its rate, under random transfers", "[simulate]") {
  Timeline timeline;
  Links links(timeline);
  Random random(3);
  std::vector<double> in(5), first(5, 1e9), last(5);
  for (int end = 0; end < 5; ++end) links.set_rate(end, 50 + 50 * end);
  int arrived = 0;
  for (int i = 0; i < 400; ++i) {
    const int from = int(random.below(5)), to = int(random.below(5));
    const double bytes = double(1 + random.below(1000)), at = random.uniform() * 100;
    timeline.at(at, [&, from, to, bytes, at] {
      first[size_t(to)] = std::min(first[size_t(to)], at);
      links.send(from, to, bytes, 0,
                 [&, to, bytes] { ++arrived, in[size_t(to)] += bytes, last[size_t(to)] = timeline.now(); });
    });
  }
  timeline.run();
  CHECK(arrived == 400);
  for (size_t end = 0; end < 5; ++end)
    CHECK(in[end] <= (50 + 50 * double(end)) * (last[end] - first[end]) * (1 + 1e-9));
}

TEST_CASE("hardware: Mooncake's figures follow from the table", "[simulate]") {
  const Hardware a800 = find_hardware("a800x8").value();
  const SimulatedModel llama = find_simulated_model("llama-3-70b").value();
  CHECK(a800.cards == 8);
  CHECK(llama.kv_token_bytes() == 327680);  // FAST '25: 320 KB
  // Mooncake's replay (8 A800, MFU .44) takes F(n) = l (a n^2 d + b n d^2) FLOPs with l 80, d 8192, a 4 and b 22.
  const double n = 8192, flops = 80 * (4 * n * n * 8192 + 22 * n * 8192 * 8192);
  const double steps = step_cost(llama, a800).seconds(model::prompt_steps(n, 0, 2048));
  CHECK(steps == Approx(flops / (8 * 312e12 * 0.44)).epsilon(0.15));
  CHECK(kv_tokens(llama, a800) > 1.2e6);
  CHECK(kv_tokens(llama, find_hardware("v100").value()) == 0);
}

TEST_CASE("hardware: names with counts are found, and bad ones are errors", "[simulate]") {
  CHECK(find_hardware("h100").value().cards == 1);
  for (const char* bad : {"", "a800x", "a800x0", "a800x9999", "b100"}) {
    INFO(bad);
    CHECK(find_hardware(bad).error().code == ErrorCode::not_found);
  }
  CHECK(find_simulated_model("llama").error().message.find("qwen2.5-7b") != std::string::npos);
  CHECK_FALSE(find_hardware("no/such.json").ok());
  for (const SimulatedModel& model : model_table())
    for (const Hardware& hardware : hardware_table()) CHECK(step_cost(model, hardware).seconds({.tokens = 1}) > 0);
}

// Returns FILE with `fields`, one of which is changed or added. With "" that field is left out.
std::string with(nlohmann::json fields, const std::string& name, const std::string& value, const std::string& path) {
  std::string text;
  if (value.empty()) fields.erase(name);
  for (const auto& [key, old] : fields.items())
    if (key != name) text += (text.empty() ? "" : ", ") + ("\"" + key + "\": ") + old.dump();
  if (!value.empty()) text += ", \"" + name + "\": " + value;
  std::ofstream(path) << "{" << text << "}";
  return path;
}

TEST_CASE("hardware: an error in a file names the file and the field", "[simulate]") {
  const TempDir dir;
  const std::string path = dir.path + "/x.json";
  // Values of a field as they stand in a file. With "" the field is left out.
  const json hostile = parsed_file(data_path("hostile/hardware.json"));
  const auto check = [&](const json& fields, const char* of, auto find) {
    for (const auto& [field, values] : hostile[of].items())
      for (const json& value : values) {
        INFO(field << ": " << value);
        const auto found = find(with(fields, field, value, path));
        REQUIRE_FALSE(found.ok());
        CHECK(found.error().message.find(path) != std::string::npos);
        CHECK(found.error().message.find(field) != std::string::npos);
      }
  };
  const nlohmann::json card = {{"flops_per_s", 1e14}, {"bytes_per_s", 1e12}, {"memory_bytes", 1e10}};
  REQUIRE(find_hardware(with(card, "cards", "2", path)).ok());
  check(card, "hardware", [](const std::string& file) { return find_hardware(file); });
  const nlohmann::json model = {{"n_layers", 2},     {"n_heads", 2},      {"head_dim", 64}, {"active_parameters", 1e9},
                                {"parameters", 2e9}, {"kv_elements", 256}};
  REQUIRE(find_simulated_model(with(model, "name", "\"x\"", path)).ok());
  check(model, "models", [](const std::string& file) { return find_simulated_model(file); });
  for (const char* text : {"", "[]", "7", "{", R"({"flops_per_s": NaN})", R"({"flops_per_s": 1e999})"}) {
    INFO(text);
    std::ofstream(path) << text;
    for (const std::string& error : {find_hardware(path).error().message, find_simulated_model(path).error().message})
      CHECK(error.find(path) != std::string::npos);
  }
}

}  // namespace xpyd::testing::simulate_test
