#include "experiments/load/datasets.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <set>

#include "experiments/load/arrivals.h"
#include "tests/json.h"

namespace xpyd::testing::datasets_test {

std::string write_file(const testing::TempDir& dir, const std::string& content) {
  std::string path = dir.path + "/data";
  std::ofstream(path) << content;
  return path;
}

void check_error(const Error& error, const std::string& part) {
  INFO(error.message << " should contain " << part);
  CHECK(error.message.find(part) != std::string::npos);
}

TEST_CASE("datasets: random lengths fill their range, and tokens follow from the seed", "[datasets]") {
  Load load = random_load(2000, 100, 10, 0.5, 7);
  REQUIRE(load.requests.size() == 2000);
  std::set<int> inputs, outputs;
  for (const BenchRequest& request : load.requests) {
    inputs.insert(request.input_tokens);
    outputs.insert(request.output_tokens);
  }
  CHECK(*inputs.begin() == 50);  // both ends are reached: floor and ceil of (1 -+ r) L
  CHECK(*inputs.rbegin() == 150);
  CHECK(*outputs.begin() == 5);
  CHECK(*outputs.rbegin() == 15);
  std::vector<int32_t> a = prompt_tokens(load.requests[0], 64), b = prompt_tokens(load.requests[1], 64);
  CHECK(int(a.size()) == load.requests[0].input_tokens);
  CHECK(a != b);
  std::set<int32_t> ids(a.begin(), a.end());
  CHECK(*ids.begin() >= 0);
  CHECK(*ids.rbegin() < 64);
  CHECK(ids.size() > 20);
  CHECK(prompt_tokens(random_load(1, 100, 10, 0.5, 7).requests[0], 64) == a);  // the seed decides
  CHECK(prompt_tokens(random_load(1, 100, 10, 0.5, 8).requests[0], 64) != a);
  for (const BenchRequest& request : random_load(50, 1, 1, 0.9, 1).requests)
    CHECK((request.input_tokens >= 1 && request.output_tokens >= 1));
}

TEST_CASE("datasets: shared prefixes are shared within a group only", "[datasets]") {
  Load load = shared_prefix_load(7, 3, 40, 10, 5, 1);
  std::vector<std::vector<int32_t>> prompts;
  for (const BenchRequest& request : load.requests) {
    CHECK(request.input_tokens == 50);
    prompts.push_back(prompt_tokens(request, 1000));
    REQUIRE(prompts.back().size() == 50);
  }
  auto common = [&](size_t a, size_t b) {
    size_t n = 0;
    while (n < 50 && prompts[a][n] == prompts[b][n]) ++n;
    return n;
  };
  CHECK(common(0, 3) >= 40);
  CHECK(common(0, 3) < 50);
  CHECK(common(0, 6) >= 40);
  CHECK(common(0, 1) < 10);
  CHECK(common(1, 4) >= 40);
}

// Files are read as the simulator reads them (traces_test.cc).
TEST_CASE("datasets: a mooncake file gives arrivals, lengths, shared blocks and sessions", "[datasets]") {
  testing::TempDir dir;
  const auto line = [](int time_ms, int input, int output, int first_id = 0) {
    std::string ids = std::to_string(first_id);
    for (int i = 1; i < (input + 511) / 512; ++i) ids += "," + std::to_string(i);
    return "{\"timestamp\":" + std::to_string(time_ms) + ",\"input_length\":" + std::to_string(input) +
           ",\"output_length\":" + std::to_string(output) + ",\"hash_ids\":[" + ids + "]}\n";
  };
  const std::string path = write_file(dir, "\xEF\xBB\xBF" + line(5000, 600, 1) + "\n" + line(6000, 2000, 900) +
                                               line(9000, 601, 20, 7) + line(9500, 1, 1));
  auto load = mooncake_load(path, 3, 2, 1000);
  REQUIRE(load);
  CHECK(load.value().timed);
  auto& requests = load.value().requests;
  REQUIRE(requests.size() == 3);  // the first three rows
  CHECK(requests[0].arrival_s == 0);
  CHECK(requests[1].arrival_s == 0.5);  // 1 s of trace at twice the speed
  CHECK(requests[2].arrival_s == 2);
  CHECK(requests[1].output_tokens == 500);  // 900 clipped to half of 1000
  CHECK(requests[1].input_tokens == 500);   // 2000 clipped to the rest
  CHECK(requests[2].input_tokens == 601);
  REQUIRE(requests[0].spans.size() == 2);
  CHECK(requests[0].spans[1].tokens == 88);
  CHECK(load.value().notes ==
        std::vector<std::string>{
            "clipped to the server's max_model_len of 1000 tokens: 1 prompts and 1 outputs of 3 requests"});
  // Equal ids after equal ids are equal tokens.
  const std::vector<int32_t> a = prompt_tokens(requests[0], 32000), b = prompt_tokens(requests[1], 32000),
                             c = prompt_tokens(requests[2], 32000);
  CHECK(a.size() == 600);
  CHECK(b.size() == 500);
  CHECK(std::equal(b.begin(), b.end(), a.begin()));
  CHECK(a[0] != c[0]);
  CHECK(a[512] != c[512]);

  write_file(dir, line(0, 1, 1) + "\n{bad\n");
  load = mooncake_load(path, 9, 1, 0);
  REQUIRE_FALSE(load);
  check_error(load.error(), "--dataset-path: " + path + ":3");
}

TEST_CASE("datasets: ShareGPT conversations give their first prompt and reply, and odd rows are counted",
          "[datasets]") {
  testing::TempDir dir;
  std::string path = write_file(dir, R"( [
  {"id": "a", "conversations": [{"from": "human", "value": "q \" ] }"}, {"from": "gpt", "value": "r"},
                                {"from": "human", "value": "ignored"}]},
  {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
  {"id": "c", "conversations": []},
  {"id": "d", "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}
  , {"id": "e", "conversations": [{"from": "system", "value": "Be kind."}, {"from": "user", "value": "q2"},
                                  {"from": "gpt", "value": "r2"}]},
  null, "a, text ]", {"conversations": [{"from": "human", "from": "human", "value": "q"}]}
] )");
  auto read = read_sharegpt(path);
  INFO((read ? "" : read.error().message));
  REQUIRE(read);
  const auto& talks = read.value().conversations;
  REQUIRE(talks.size() == 2);
  CHECK(talks[0].prompt == "q \" ] }");
  CHECK(talks[0].reply == "r");
  CHECK(talks[1].prompt == "Be kind.\nq2");
  REQUIRE(read.value().notes.size() == 1);
  CHECK(read.value().notes[0].starts_with("3 rows are not conversations and are skipped; the first: "));
  // The same as lines.
  const auto lines = read_sharegpt(
      write_file(dir,
                 "\xEF\xBB\xBF"
                 R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]})"
                 "\n3.5\n"));
  REQUIRE(lines);
  CHECK(lines.value().conversations.size() == 1);
  CHECK(lines.value().notes.size() == 1);

  for (const json& one : parsed_file(data_path("hostile/sharegpt.json"))) {
    path = write_file(dir, one[0]);
    auto bad = read_sharegpt(path);
    INFO(as_text(one));
    REQUIRE_FALSE(bad);
    check_error(bad.error(), path);
    check_error(bad.error(), one[1]);
  }
  CHECK_FALSE(read_sharegpt(dir.path + "/none"));
}

TEST_CASE("datasets: ShareGPT's filter drops prompts and replies that are too short or too long", "[datasets]") {
  // Here a text of n letters counts as n tokens.
  auto count = [](const std::string& text) -> Result<int> { return int(text.size()); };
  auto talk = [](size_t prompt, size_t reply) { return Exchange{std::string(prompt, 'q'), std::string(reply, 'r')}; };
  std::vector<Exchange> talks = {talk(3, 10),    talk(4, 3),     talk(4, 4),     talk(1025, 5),
                                 talk(1024, 10), talk(10, 2039), talk(10, 2038), talk(900, 200)};
  auto load = sharegpt_load(talks, 100, 0, 0, 1, count);
  REQUIRE(load);
  std::set<std::pair<int, int>> kept;
  for (const BenchRequest& r : load.value().requests) {
    kept.emplace(r.input_tokens, r.output_tokens);
    CHECK(int(r.text.size()) == r.input_tokens);
  }
  CHECK(kept == std::set<std::pair<int, int>>{{4, 4}, {1024, 10}, {10, 2038}, {900, 200}});
  // A given output length replaces the reply's.
  load = sharegpt_load(talks, 100, 7, 0, 1, count);
  REQUIRE(load);
  CHECK(load.value().requests.size() == 6);
  // The server's context also limits.
  load = sharegpt_load(talks, 100, 0, 1034, 1, count);
  REQUIRE(load);
  CHECK(load.value().requests.size() == 2);
  check_error(invalid(load.value().notes[0]), "2 beyond the server's max_model_len");
  CHECK_FALSE(sharegpt_load(talks, 100, 0, 7, 1, count));
}

TEST_CASE("datasets: arrivals have the given rate and burstiness", "[datasets]") {
  double inf = std::numeric_limits<double>::infinity();
  CHECK(arrival_times(3, inf, false, 1, 1) == std::vector<double>{0, 0, 0});
  CHECK(arrival_times(3, 4, true, 1, 1) == std::vector<double>{0, 0.25, 0.5});
  CHECK(arrival_times(0, 4, false, 1, 1).empty());
  for (double shape : {0.25, 1.0, 4.0}) {
    int n = 20000;
    std::vector<double> times = arrival_times(n, 50, false, shape, 3);
    CHECK(times == arrival_times(n, 50, false, shape, 3));
    CHECK(times != arrival_times(n, 50, false, shape, 4));
    CHECK(std::is_sorted(times.begin(), times.end()));
    CHECK(times.back() == Approx(n / 50.0));  // exactly n / rate
    // Gamma gaps have mean 1 / rate and coefficient of variation 1 / sqrt(shape).
    double mean = 0, square = 0, last = 0;
    for (double t : times) {
      mean += t - last;
      square += (t - last) * (t - last);
      last = t;
    }
    mean /= n;
    double cv = std::sqrt(square / n - mean * mean) / mean;
    INFO("shape " << shape);
    CHECK(cv == Approx(1 / std::sqrt(shape)).epsilon(0.05));
  }
}

}  // namespace xpyd::testing::datasets_test
