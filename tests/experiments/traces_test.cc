#include "experiments/simulate/traces.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <list>
#include <map>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "tests/catch.h"
#include "tests/json.h"

namespace xpyd::testing::traces_test {

Result<Trace> load(const std::string& format, const std::string& path, const TraceOptions& options = {}) {
  return find_trace_format(format)->load(path, options);
}

struct HitShare {
  double blocks = 0, tokens = 0;
  size_t unique_blocks = 0;
};
// The leading blocks of prompts that a cache has, as shares of all blocks and tokens. The cache evicts the least
// recently used block, and the last blocks of a prompt before its first.
HitShare hit_share(const Trace& trace, size_t capacity = ~size_t{0}) {
  std::list<uint64_t> recent;  // the most recently used first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> cached;
  std::unordered_set<uint64_t> seen;
  double hit_blocks = 0, hit_tokens = 0, blocks = 0, tokens = 0;
  for (const TraceRequest& request : trace.requests) {
    size_t hits = 0;
    while (hits < request.blocks.size() && cached.count(request.blocks[hits])) ++hits;
    hit_blocks += double(hits);
    hit_tokens += std::min(double(hits) * trace.block_tokens, double(request.prompt_tokens));
    blocks += double(request.blocks.size());
    tokens += request.prompt_tokens;
    for (size_t i = request.blocks.size(); i-- > 0;) {
      const uint64_t id = request.blocks[i];
      seen.insert(id);
      if (const auto at = cached.find(id); at != cached.end()) {
        recent.splice(recent.begin(), recent, at->second);
      } else {
        recent.push_front(id);
        cached[id] = recent.begin();
      }
    }
    while (recent.size() > capacity) {
      cached.erase(recent.back());
      recent.pop_back();
    }
  }
  return {hit_blocks / blocks, hit_tokens / tokens, seen.size()};
}

// Checks what holds for every trace.
void check_trace(const Trace& trace) {
  double last_s = 0;
  int wrong = 0, index = 0;
  for (const TraceRequest& r : trace.requests) {
    const size_t blocks = size_t((r.prompt_tokens - 1) / trace.block_tokens + 1);
    wrong += r.arrival_s < last_s || r.prompt_tokens < 1 || r.output_tokens < 1 || r.blocks.size() != blocks ||
             r.after >= index || r.think_s < 0;
    last_s = r.arrival_s;
    ++index;
  }
  CHECK(wrong == 0);
  REQUIRE(!trace.requests.empty());
  CHECK(trace.requests[0].arrival_s == 0);
}

struct Means {
  double prompt = 0, output = 0;
};
Means means(const Trace& trace) {
  Means sum;
  for (const TraceRequest& r : trace.requests) sum.prompt += r.prompt_tokens, sum.output += r.output_tokens;
  return {sum.prompt / double(trace.requests.size()), sum.output / double(trace.requests.size())};
}

std::string write_file(const testing::TempDir& dir, const std::string& content, const std::string& name = "trace") {
  std::string path = dir.path + "/" + name;
  std::ofstream(path) << content;
  return path;
}

Trace loaded(const std::string& format, const std::string& path, const TraceOptions& options = {}) {
  auto trace = load(format, path, options);
  INFO((trace ? "" : trace.error().message));
  REQUIRE(trace);
  check_trace(trace.value());
  return std::move(trace).value();
}

bool equal(const Trace& a, const Trace& b) {
  return std::equal(a.requests.begin(), a.requests.end(), b.requests.begin(), b.requests.end(),
                    [](const TraceRequest& x, const TraceRequest& y) {
                      return x.arrival_s == y.arrival_s && x.prompt_tokens == y.prompt_tokens &&
                             x.output_tokens == y.output_tokens && x.blocks == y.blocks && x.session == y.session &&
                             x.after == y.after && x.think_s == y.think_s;
                    });
}

// Prints a line for each request: arrival time, tokens and blocks, session, and the delay after which request's end.
// Blocks and sessions are numbered in order of appearance.
std::string shape(const Trace& trace) {
  std::map<uint64_t, size_t> blocks;
  std::map<int, size_t> sessions;
  std::ostringstream text;
  for (const TraceRequest& r : trace.requests) {
    text << std::round(r.arrival_s * 1e6) / 1e6 << ": " << r.prompt_tokens << "+" << r.output_tokens << ", blocks";
    for (const uint64_t block : r.blocks) text << " " << blocks.emplace(block, blocks.size()).first->second;
    if (r.session >= 0) text << ", session " << sessions.emplace(r.session, sessions.size()).first->second;
    if (r.after >= 0) text << ", " << r.think_s << " after " << r.after;
    text << "\n";
  }
  return text.str();
}

std::string bailian_row(int chat, int parent, double at_s, int input, const char* ids) {
  return "{\"chat_id\": " + std::to_string(chat) + ", \"parent_chat_id\": " + std::to_string(parent) +
         ", \"timestamp\": " + std::to_string(at_s) + ", \"input_length\": " + std::to_string(input) +
         ", \"output_length\": 9, \"type\": \"text\", \"turn\": 1, \"hash_ids\": " + ids + "}\n";
}

TEST_CASE("traces: speed, jitter and repeat change a trace as documented", "[traces]") {
  testing::TempDir dir;
  std::string rows;
  for (int i = 0; i < 20; ++i)
    rows += "{\"timestamp\": " + std::to_string(i / 5 * 3000) + ", \"input_length\": 10, \"output_length\": 1, " +
            "\"hash_ids\": [" + std::to_string(i % 2) + "]}\n";
  const std::string path = write_file(dir, rows);
  const Trace plain = loaded("mooncake", path);
  CHECK(plain.requests.back().arrival_s == 9);
  CHECK(loaded("mooncake", path, {.speed = 4}).requests.back().arrival_s == 9.0 / 4);

  const Trace jittered = loaded("mooncake", path, {.jitter_s = 3, .seed = 1});
  std::set<double> times;
  for (const TraceRequest& r : jittered.requests) times.insert(r.arrival_s);
  CHECK(times.size() == 20);
  CHECK(*times.rbegin() < 12);
  CHECK(equal(jittered, loaded("mooncake", path, {.jitter_s = 3, .seed = 1})));
  CHECK_FALSE(equal(jittered, loaded("mooncake", path, {.jitter_s = 3, .seed = 2})));

  const Trace twice = loaded("mooncake", path, {.repeat = 2});
  REQUIRE(twice.requests.size() == 40);
  CHECK(twice.requests[20].arrival_s == Approx(9 * 20.0 / 19));
  CHECK(hit_share(plain).unique_blocks == 2);
  CHECK(hit_share(twice).unique_blocks == 4);
  const Trace chats = loaded("tool_agent", "", {.limit = 3000, .repeat = 2});
  std::set<int> sessions[2];
  for (int i = 0; i < 6000; ++i) sessions[i / 3000].insert(chats.requests[size_t(i)].session);
  CHECK(*sessions[1].upper_bound(-1) == *sessions[0].rbegin() + 1);
  CHECK_FALSE(load("mooncake", path, {.speed = 0}));
  CHECK_FALSE(load("mooncake", path, {.repeat = 0}));
}

TEST_CASE("traces: a bad file is an error with its line and what was expected", "[traces]") {
  testing::TempDir dir;
  // A format, the place of the error, the content, and what is expected.
  for (const json& one : parsed_file(data_path("hostile/traces.json"))) {
    const std::string format = one[0], where = one[1], content = one[2], expected = one[3];
    const std::string path = write_file(dir, content);
    auto bad = load(format, path);
    INFO(format << " " << content);
    REQUIRE_FALSE(bad);
    INFO(bad.error().message);
    CHECK(bad.error().message.find(path + where) == 0);
    CHECK(bad.error().message.find(expected) != std::string::npos);
  }
  for (const TraceFormat& format : trace_formats()) {
    if (std::string(format.source).find("generated") == 0) continue;
    INFO(format.name);
    CHECK_FALSE(format.load(dir.path + "/none", {}));
    CHECK_FALSE(format.load(dir.path + "/", {}));
  }
}

TEST_CASE("traces: a weka session includes its sub-agents", "[traces]") {
  testing::TempDir dir;
  const std::string session = R"({"block_size": 64, "hash_id_scope": "local", "tool_tokens": 100, "system_tokens": 28,
    "requests": [
      {"t": 0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 3], "api_time": 4, "think_time": 0},
      {"t": 30, "type": "subagent", "duration_ms": 25000, "tool_tokens": 64, "requests": [
        {"t": 0, "type": "s", "in": 130, "out": 0, "hash_ids": [9, 10], "api_time": 2},
        {"t": 7, "type": "s", "in": 192, "out": 4, "hash_ids": [9, 10, 11], "think_time": 5}]},
      {"t": 20, "type": "subagent", "duration_ms": 15500, "requests": [
        {"t": 0, "type": "s", "in": 70, "out": 6, "hash_ids": [9]}]},
      {"t": 33, "type": "n", "in": 300, "out": 5, "hash_ids": [1, 2, 3, 4], "api_time": 4, "think_time": 29},
      {"t": 50, "type": "s", "in": 20, "out": 5, "hash_ids": []}]})";
  write_file(dir, session, "b.json");
  write_file(dir, session, "a.json");
  write_file(dir, "not a trace", "README.md");
  const double inf = std::numeric_limits<double>::infinity();
  const Trace one = loaded("weka", dir.path + "/a.json", {.rate = inf});
  CHECK(one.closed_loop);
  // In order of time: the main agent at 0, the two sub-agents at 4.5 and 5, the second request of the first at 12, and
  // the main agent at 33 and 50. All agents of a session share its ids.
  CHECK(shape(one) ==
        "0: 200+5, blocks 0 1 2 3, session 0\n"
        "4.5: 70+6, blocks 4 5, session 1, 0.5 after 0\n"
        "5: 130+1, blocks 4 6 7, session 2, 1 after 0\n"
        "12: 192+4, blocks 4 6 8, session 2, 5 after 2\n"
        "33: 300+5, blocks 0 1 2 9 10, session 0, 3 after 3\n"
        "50: 20+5, blocks 11, session 0, 13 after 4\n");
  CHECK(one.notes == std::vector<std::string>{"1 answers of 0 tokens are treated as answers of 1 token"});
  const Trace both = loaded("weka", dir.path, {.seed = 3, .rate = 0.01});
  REQUIRE(both.requests.size() == 12);
  CHECK(std::ranges::count(both.requests, -1, &TraceRequest::after) == 2);
  CHECK(hit_share(both).unique_blocks == 2 * hit_share(one).unique_blocks);
  // Each of two repetitions of a closed loop waits for its own requests.
  const Trace twice = loaded("weka", dir.path, {.repeat = 2, .rate = inf});
  for (size_t i = 0; i < 12; ++i)
    CHECK(twice.requests[12 + i].after == (twice.requests[i].after < 0 ? -1 : twice.requests[i].after + 12));
  CHECK(twice.requests[12].session == twice.requests[0].session + 6);
}

TEST_CASE("traces: the published sessions of WEKA have the published shape", "[traces]") {
  const std::string path = testing::shared_path("traces/weka");
  if (path.empty()) SKIP_TEST("no ../shared/traces");
  const Trace trace = loaded("weka", path);
  CHECK(trace.requests.size() == 1426);
  CHECK(means(trace).prompt == Approx(104828).margin(1));
  CHECK(means(trace).output == Approx(502).margin(1));
  CHECK(hit_share(trace).blocks == Approx(.946).margin(.0006));
  CHECK(hit_share(trace).tokens == Approx(.946).margin(.0006));
}

TEST_CASE("traces: each format gives its times, lengths, prefix blocks and sessions", "[traces]") {
  const std::string question(130, 'q'), answer(9, 'a');
  const struct {
    const char* format;
    TraceOptions options;
    std::string text, shape, note = "";
    bool closed_loop = false;
  } cases[] = {
      // Equal ids after unequal prefixes are different blocks.
      {"mooncake",
       {},
       R"({"timestamp": 4000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 5, 6]}

{"timestamp": 5500, "input_length": 1024, "output_length": 2, "hash_ids": [0, 5]}
{"timestamp": 5500, "input_length": 600, "output_length": 1, "hash_ids": [7, 5]})",
       "0: 1025+7, blocks 0 1 2\n1.5: 1024+2, blocks 0 1\n1.5: 600+1, blocks 3 4\n"},
      // In order of time: the second and third turn of "a" as early as they can come, then the others.
      {"mooncake",
       {.speed = 2, .hash_block_tokens = 16},
       R"({"session_id": "a", "timestamp": 100, "input_length": 17, "output_length": 2, "hash_ids": [1, 2]}
{"session_id": 7, "timestamp": 300, "input_length": 16, "output_length": 2, "hash_ids": [1]}
{"session_id": "a", "delay": 50, "input_length": 40, "output_length": 2, "hash_ids": [1, 2, 3]}
{"timestamp": 400, "input_length": 3, "output_length": 2, "hash_ids": [9]}
{"session_id": "a", "delay": 0, "timestamp": 1, "input_length": 41, "output_length": 2, "hash_ids": [1, 2, 4]})",
       "0: 17+2, blocks 0 1, session 0\n0.025: 40+2, blocks 0 1 2, session 0, 0.05 after 0\n"
       "0.025: 41+2, blocks 0 1 3, session 0, 0 after 1\n0.1: 16+2, blocks 0, session 1\n0.15: 3+2, blocks 4\n",
       "",
       true},
      // Chats continue each other. The second one's tail has no id.
      {"bailian",
       {},
       bailian_row(7, -1, 1, 20, "[1, 2]") + bailian_row(8, -1, 2, 17, "[1]") +
           bailian_row(9, 7, 61.5, 33, "[1, 3, 4]") + bailian_row(10, 5, 70, 16, "[6]"),
       "0: 20+9, blocks 0 1, session 0\n1: 17+9, blocks 0 2, session 1\n"
       "60.5: 33+9, blocks 0 3 4, session 0, 60.5 after 0\n69: 16+9, blocks 5, session 2\n",
       "1 chats continue one that is not in the file; they are treated as new"},
      {"azure",
       {},
       "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-12-31 23:59:59.9999999,374,44\r\n"
       "2024-01-01 00:00:00.0000001,65,1\r\n2024-01-01 00:00:02+00:00,64,109",
       "0: 374+44, blocks 0 1 2 3 4 5\n0: 65+1, blocks 6 7\n2: 64+109, blocks 8\n"},
      {"burstgpt",
       {},
       "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
       "6,GPT-4,300,0,300,API log\n45.5,ChatGPT,10,230,240,Conversation log\n",
       "0: 472+18, blocks 0 1 2 3 4 5 6 7\n40.5: 10+230, blocks 8\n",
       "1 rows without prompt or response tokens (failures) are dropped"},
      {"burstgpt",
       {},
       "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
       "5,a,2.5,GPT-4,4,1,5,x\n6,b,1,GPT-4,4,1,5,x\n9,a,1,GPT-4,9,1,10,x\n10,a,1,GPT-4,9,1,10,x\n",
       "0: 4+1, blocks 0, session 0\n1: 4+1, blocks 1, session 1\n4: 9+1, blocks 2, session 0, 1.5 after 0\n"
       "5: 9+1, blocks 3, session 0, 0 after 2\n"},
      // 130 letters and a line end make a quarter as many tokens. 128 bytes are two whole blocks.
      {"sharegpt",
       {.seed = 1, .rate = 2, .think_s = 4},
       R"([{"id": "x", "conversations": [{"from": "human", "value": ")" + question +
           R"("}, {"from": "gpt", "value": ")" + answer +
           R"("}, {"from": "human", "value": "more"}, {"from": "gpt", "value": "yes"}]},
{"conversations": [{"from": "gpt", "value": "alone"}]},
{"conversations": [{"from": "human", "value": ")" +
           question + R"(?"}, {"from": "gpt", "value": "r"}]}])",
       "0: 33+3, blocks 0 1 2, session 0\n0: 37+1, blocks 0 1 3, session 0, 4 after 0\n"
       "0.774196: 33+1, blocks 0 1 4, session 1\n",
       "",
       true},
      {"lmsys",
       {},
       R"({"conversation_id": "c", "conversation": [{"content": "hello", "role": "user"}, )"
       R"({"content": "hi you", "role": "assistant"}]})",
       "0: 2+2, blocks 0, session 0\n"},
  };
  testing::TempDir dir;
  for (const auto& c : cases) {
    const Trace trace = loaded(c.format, write_file(dir, c.text), c.options);
    INFO(c.format << " " << c.text);
    CHECK(shape(trace) == c.shape);
    CHECK(trace.closed_loop == c.closed_loop);
    if (c.note != "") CHECK(trace.notes == std::vector{c.note});
  }
  const Trace dolly = loaded(
      "dolly", write_file(dir, R"({"instruction": "Which?", "context": "", "response": "This.", "category": "open_qa"}
{"instruction": "Why?", "context": "Because.", "response": "Therefore.", "category": "closed_qa"})"),
      {.rate = 10});
  REQUIRE(dolly.requests.size() == 2);
  CHECK(dolly.requests[0].prompt_tokens + dolly.requests[1].prompt_tokens == 2 + 4);
}

TEST_CASE("traces: the generator of tool&agent has the published marginals", "[traces]") {
  const uint64_t seed = GENERATE(1, 2);
  const Trace trace = loaded("tool_agent", "", {.seed = seed});
  CHECK(trace.requests.size() == 23608);
  std::unordered_map<uint64_t, int> first;
  for (const TraceRequest& r : trace.requests) ++first[r.blocks[0]];
  std::multiset<int> counts;
  for (auto [id, n] : first) counts.insert(n);
  CHECK(counts == std::multiset<int>{18, 3449, 9203, 10938});
  const Means mean = means(trace);
  const HitShare ideal = hit_share(trace);
  CHECK(mean.prompt == Approx(8596).epsilon(.03));
  CHECK(mean.output == Approx(182).epsilon(.03));
  CHECK(trace.requests.back().arrival_s == Approx(3600).margin(3));
  CHECK(ideal.tokens == Approx(.553).margin(.015));
  CHECK(ideal.blocks == Approx(.553).margin(.03));
  const double targets[][2] = {{.01, .346}, {.05, .449}, {.10, .508}, {.25, .551}, {.50, .552}};
  for (auto [share, hit] : targets) {
    const HitShare got = hit_share(trace, size_t(share * double(ideal.unique_blocks)));
    INFO("with a share of " << share << " of the blocks cached, hits are " << got.tokens << " of tokens and "
                            << got.blocks << " of blocks");
    CHECK(got.tokens == Approx(hit).margin(.015));
    CHECK(got.blocks == Approx(hit).margin(.03));
  }
  if (seed == 1) CHECK_FALSE(equal(trace, loaded("tool_agent", "", {.seed = 2})));
  if (seed == 1) CHECK(equal(trace, loaded("tool_agent", "", {.seed = 1})));
}

TEST_CASE("traces: the generator with a pool of clients is bursty and skewed", "[traces]") {
  const TraceOptions options{.limit = 20000, .seed = 4, .rate = 20, .clients = 50};
  const Trace trace = loaded("servegen", "", options);
  CHECK(trace.requests.size() == 20000);
  CHECK(trace.requests.back().arrival_s == Approx(1000).epsilon(.15));
  // Arrivals are burstier than Poisson, whose counts per second have a variance equal to their mean.
  std::vector<double> counts(size_t(trace.requests.back().arrival_s) + 1);
  for (const TraceRequest& r : trace.requests) ++counts[size_t(r.arrival_s)];
  const double mean = 20000 / double(counts.size());
  double variance = 0;
  for (double n : counts) variance += (n - mean) * (n - mean) / double(counts.size());
  CHECK(variance > 1.5 * mean);
  // A few clients send most requests, and share their system prompts.
  std::unordered_map<uint64_t, int> first;
  int most = 0;
  for (const TraceRequest& r : trace.requests) most = std::max(most, ++first[r.blocks[0]]);
  CHECK(most > 1000);
  CHECK(hit_share(trace).tokens > .1);
  CHECK(hit_share(trace).tokens < .6);
  // Prompt lengths have a body and a tail.
  std::vector<int> prompts;
  for (const TraceRequest& r : trace.requests) prompts.push_back(r.prompt_tokens);
  std::sort(prompts.begin(), prompts.end());
  CHECK(prompts[19980] > 10 * prompts[10000]);
  CHECK(equal(trace, loaded("servegen", "", options)));
}

}  // namespace xpyd::testing::traces_test
