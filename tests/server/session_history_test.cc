// The endpoints (Api, Generation, Sessions) in front of the simulated cluster, on a virtual clock.
// Clients hold conversations, whole and as streams. Meanwhile instances crash, hang and fail to start, requests time
// out, clients leave, replies get lost, other sessions evict conversations, and the server restarts. A checker knows
// only what clients sent and received. It decides whether each answer follows from a history that its client can
// believe in, and whether each refusal is allowed.
//
//   make test TESTS='[history]'     SEEDS=2000 or SEED=77 as with make chaos

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "server/openai/api.h"
#include "server/workers/local_workers.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/json.h"

namespace xpyd::testing::session_history_test {

using Tokens = std::vector<int32_t>;
constexpr int kContext = 160;  // tokens

Tokens joined(Tokens first, const Tokens& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// The work queue of a server's I/O thread, which the simulation runs. Bodies are parsed on other threads.
class Mail {
 public:
  void post(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (!closed_) works_.push_back(std::move(work));
    came_.notify_all();
  }
  void run() {
    while (auto work = take()) work();
  }
  // Waits for the body that is being parsed. Its result is the next event.
  void wait() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [&] { return !works_.empty(); });
  }
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    works_.clear();
  }

 private:
  std::function<void()> take() {
    std::lock_guard lock(mutex_);
    if (works_.empty()) return {};
    auto work = std::move(works_.front());
    works_.pop_front();
    return work;
  }
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::function<void()>> works_;
  bool closed_ = false;
};

// What a client has received of one answer.
class Exchange final : public HttpExchange {
 public:
  void respond(HttpResponse response) override {
    status = response.status, body = std::move(response.body), ended = true;
  }
  void begin_stream(HttpResponse head) override { status = head.status; }
  void write(std::string bytes) override { body += bytes; }
  void end_stream() override { ended = true; }
  void on_gone(std::function<void()> callback) override { gone_ = std::move(callback); }
  void leave() {
    if (gone_) gone_();
  }
  // Returns one part for a whole answer, and all events for a stream.
  std::vector<json> parts() const {
    std::vector<json> found;
    if (!body.starts_with("data: ")) return {parsed(body)};
    for (size_t at = 0; (at = body.find("data: {", at)) != body.npos;) {
      const size_t end = body.find("\n\n", at);
      found.push_back(parsed(body.substr(at + 6, end - at - 6)));
      at = end;
    }
    return found;
  }

  int status = 0;
  std::string body;
  bool ended = false;

 private:
  std::function<void()> gone_;
};

// The conductor as one server sees it. Servers follow each other, and each counts its requests from 1.
class FrontDoor final : public Service {
 public:
  FrontDoor(Conductor& conductor, uint64_t server) : conductor_(conductor), first_(server << 32) {}
  Status submit(std::shared_ptr<const Request> request, std::shared_ptr<EventSink> sink) override {
    auto same = std::make_shared<Request>(*request);
    same->id += first_;
    return conductor_.submit(std::move(same), std::move(sink));
  }
  void abort(uint64_t id) override { conductor_.abort(first_ + id); }
  ServiceStats stats() const override { return conductor_.stats(); }
  std::string trouble() const override { return conductor_.trouble(); }

 private:
  Conductor& conductor_;
  const uint64_t first_;
};

class Sim final : public SimCluster {
 public:
  explicit Sim(uint64_t seed) : random_(seed * 6151 + 5) {}
  std::string run();
  std::map<std::string, int> counts;  // how often each event happened

 private:
  struct Child {
    NodePtr node;
    Role role;
    bool hangs = false;
    double start_s = 0;  // while there is no node
  };
  struct Talker {
    std::string name;
    std::string generation = Sessions::kNew;  // of the last reply
    Tokens history;                           // of that generation
    bool gone = false;                        // the session is gone, and nothing is answered after it
    std::shared_ptr<Exchange> exchange;       // of the turn under way
    Tokens brought;
    int wants = 0;      // tokens asked for
    bool ends = false;  // this turn sends session_end
    bool alone = true;  // no other turn under this name is under way
    double asked_s = 0, leaves_s = 0, next_s = 0;
  };
  struct Server {
    std::shared_ptr<Mail> mail = std::make_shared<Mail>();
    std::unique_ptr<FrontDoor> door;
    std::unique_ptr<Api> api;
  };
  struct Stranger {
    std::string name;
    std::shared_ptr<Exchange> exchange;
  };
  bool chance(double p) { return random_.uniform() < p; }
  void wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = "at " + std::to_string(clock.seconds) + " s: " + what;
  }
  std::shared_ptr<Exchange> post(const std::string& name, const std::string& generation, const Tokens& prompt,
                                 int max_tokens, const std::string& more = "");
  void supervise();
  void disturb();
  void take_turn(Talker& talker);
  void forget(Talker& talker);
  static void begin_anew(Talker& talker);
  void answered(Talker& talker);
  void refused(Talker& talker, const Exchange& exchange);
  void serve_anew();

  static constexpr double kTimeout = 1, kGrace = 5;  // seconds: of a request, and until a lost instance is noticed
  Random random_;
  static constexpr double kWait = 0.05;  // seconds from a child's end to its next start
  std::vector<Child> children_;
  double no_processes_until_s_ = 0;  // until then starts fail
  std::shared_ptr<Server> server_;
  std::vector<Talker> talkers_;
  std::vector<Stranger> strangers_;
  uint64_t last_server_ = 0, last_name_ = 0;
  std::string wrong_;
};

// Connections break, and the server's sessions are gone.
void Sim::serve_anew() {
  for (Talker& talker : talkers_) talker.exchange = nullptr, talker.next_s = clock.seconds;
  strangers_.clear();
  if (server_) server_->mail->close();
  server_ = std::make_shared<Server>();
  server_->door = std::make_unique<FrontDoor>(conductor(), ++last_server_);
  ServerOptions options;
  options.max_model_len = kContext;
  options.vocab_size = checksum_config().vocab;
  options.request_timeout_s = kTimeout;
  options.max_sessions = 6;
  options.session_bytes = 4000;
  options.log = [](const std::string&) {};
  server_->api = std::make_unique<Api>(
      options, *server_->door, nullptr, nullptr, clock,
      [mail = server_->mail](std::function<void()> work) { mail->post(std::move(work)); });
  for (Talker& talker : talkers_) talker.gone = talker.generation != Sessions::kNew;
}

std::shared_ptr<Exchange> Sim::post(const std::string& name, const std::string& generation, const Tokens& prompt,
                                    int max_tokens, const std::string& more) {
  auto exchange = std::make_shared<Exchange>();
  std::string ids;
  for (int32_t id : prompt) ids += (ids.empty() ? "" : ",") + std::to_string(id);
  server_->mail->run();
  server_->api->handle({.method = "POST",
                        .path = "/v1/completions",
                        .body = R"({"session_id":")" + name + R"(","session_generation":")" + generation +
                                R"(","prompt":[)" + ids + R"(],"max_tokens":)" + std::to_string(max_tokens) +
                                R"(,"temperature":0,"ignore_eos":true,"return_token_ids":true)" + more + "}"},
                       exchange);
  server_->mail->wait();
  server_->mail->run();
  return exchange;
}

// Starts children again. One that the conductor has given up is killed first.
void Sim::supervise() {
  std::set<InstanceId> members;
  for (const InstanceInfo& info : conductor().members()) members.insert(info.id);
  for (Child& child : children_) {
    if (child.node && !members.contains(child.node->id)) {
      crash(child.node->id, true);
      child = {.role = child.role, .start_s = clock.seconds + kWait};
    }
    if (child.node || clock.seconds < child.start_s) continue;
    ++counts["starts"];
    if (clock.seconds < no_processes_until_s_)
      child.start_s = clock.seconds + kWait;
    else
      child.node = add(child.role);
  }
}

void Sim::disturb() {
  constexpr double kTick = 0.001;
  Child& child = children_[random_.below(children_.size())];
  if (child.node && chance(2 * kTick)) {  // it dies, and its parent is told
    crash(child.node->id, chance(0.5));
    child = {.role = child.role, .start_s = clock.seconds + kWait};
  } else if (child.node && !child.hangs && chance(0.5 * kTick)) {  // it hangs for ever
    child.node->stopped_until_s = std::numeric_limits<double>::infinity();
    child.hangs = true;
  }
  if (chance(0.2 * kTick)) no_processes_until_s_ = clock.seconds + 2 * random_.uniform();
  if (chance(0.1 * kTick)) ++counts["restarts"], serve_anew();
  const auto speak = [&](const std::string& name) {
    strangers_.push_back(
        {name, post(name, Sessions::kNew, Tokens(random_.below(100) + 1, 7), 1 + int(random_.below(6)))});
  };
  if (chance(0.03)) speak("stranger" + std::to_string(++last_name_));  // a conversation of its own
  if (chance(0.05)) {                                                  // and one under a name that may be dropped
    const Talker& talker = talkers_[random_.below(talkers_.size())];
    if (talker.generation != Sessions::kNew && !talker.exchange) speak(talker.name);
  }
  std::erase_if(strangers_, [&](const Stranger& stranger) {
    if (!stranger.exchange->ended) return false;
    if (stranger.exchange->status == 200)
      for (Talker& talker : talkers_)
        if (talker.name == stranger.name) ++counts["taken over"], talker.gone = talker.generation != Sessions::kNew;
    return true;
  });
}

// Takes another name and starts without a history.
void Sim::forget(Talker& talker) {
  talker.name = "talk" + std::to_string(++last_name_);
  begin_anew(talker);
}

void Sim::begin_anew(Talker& talker) {
  talker.generation = Sessions::kNew;
  talker.history.clear();
  talker.gone = false;
}

void Sim::take_turn(Talker& talker) {
  talker.brought.clear();
  for (uint64_t n = 1 + random_.below(12); n > 0; --n) talker.brought.push_back(int32_t(random_.below(251)));
  talker.wants = 1 + int(random_.below(6));
  talker.ends = talker.history.size() > 100;  // the context is bounded
  std::string more;
  if (talker.ends) more += R"(,"session_end":true)";
  if (chance(0.5)) more += R"(,"stream":true)";
  talker.asked_s = clock.seconds;
  talker.leaves_s = chance(0.05) ? clock.seconds + 0.02 * random_.uniform() : 0;
  talker.alone = std::none_of(talkers_.begin(), talkers_.end(),
                              [&](const Talker& other) { return other.name == talker.name && other.exchange; }) &&
                 std::none_of(strangers_.begin(), strangers_.end(),
                              [&](const Stranger& s) { return s.name == talker.name; });
  talker.exchange = post(talker.name, talker.generation, talker.brought, talker.wants, more);
}

// Called when the turn's answer is whole.
void Sim::answered(Talker& talker) {
  const auto exchange = std::move(talker.exchange);
  talker.exchange = nullptr;
  talker.next_s = clock.seconds + 0.05 * random_.uniform();
  const std::vector<json> parts = exchange->parts();
  if (exchange->status != 200 || parts.empty() || parts.back().contains("error")) return refused(talker, *exchange);
  Tokens output;
  for (const json& part : parts)
    if (part.contains("choices") && !part["choices"].empty())
      for (const json& id : part["choices"][0]["token_ids"]) output.push_back(id.get<int32_t>());
  ++counts["turns"];
  if (int(output.size()) != talker.wants)
    return wrong(talker.name + " got an answer of " + std::to_string(output.size()) + " tokens");
  const Tokens prompt = joined(talker.history, talker.brought);
  if (talker.gone || checksum_tokens(prompt, talker.wants) != output)
    return wrong(talker.name + " got an answer that its history does not explain");
  if (!talker.ends && chance(0.05)) {  // the reply gets lost: the session is one turn ahead of its client
    talker.gone = talker.generation != Sessions::kNew;
    return;
  }
  talker.history = joined(prompt, output);
  talker.generation = parts.back()["session_generation"].get<std::string>();
  if (!talker.ends) return;
  ++counts["ended"];
  begin_anew(talker);
}

// A turn is in its session whole or not at all. After a refusal the session is unchanged.
void Sim::refused(Talker& talker, const Exchange& exchange) {
  const json error = exchange.parts().back()["error"];
  const std::string code = error["code"].is_string() ? error["code"].get<std::string>() : "";
  const int status = exchange.status;
  ++counts[code.empty() ? std::to_string(status) : code];
  if (status == 409 && code == "session_busy") {
    if (talker.alone) wrong(talker.name + " is busy, and nobody has asked anything of it");
    return;
  }
  if (status == 409 && code == "session_stale") return forget(talker);  // a reply was lost, or the name is taken
  if (status == 410 && code == "session_expired") {
    if (talker.generation == Sessions::kNew) wrong(talker.name + " is gone, and never was");
    talker.gone = true;
    if (chance(0.7)) forget(talker);  // otherwise it asks again, and must get the same answer
    return;
  }
  if (status == 503 || code == "request_timeout") return;
  wrong(talker.name + " got " + std::to_string(status) + " " + exchange.body);
}

std::string Sim::run() {
  SimOptions options;
  options.conductor.max_tries = 200;
  options.kv.max_sequence_tokens = kContext;
  options.kv.pool_bytes = kContext * 5 / 4 * kv_shape(checksum_config(), Dtype::f32).token_bytes();  // preempts
  open(std::move(options));
  for (Role role : {Role::prefill, Role::prefill, Role::decode, Role::decode}) children_.push_back({.role = role});
  talkers_.resize(6);
  for (Talker& talker : talkers_) forget(talker);
  talkers_[3].name = talkers_[1].name;  // two clients share a name
  serve_anew();
  constexpr double kWild = 6, kCalm = 4;  // seconds
  for (int n = 0; wrong_.empty() && clock.seconds < kWild + kCalm; ++n) {
    if (clock.seconds < kWild) disturb();
    if (n % 20 == 0) supervise();
    for (Talker& talker : talkers_) {
      if (talker.exchange && talker.exchange->ended) answered(talker);
      if (talker.exchange && talker.leaves_s > 0 && clock.seconds >= talker.leaves_s) {
        ++counts["left"];
        talker.exchange->leave();
        talker.exchange = nullptr;
      }
      if (!talker.exchange && clock.seconds >= talker.next_s) take_turn(talker);
      if (talker.exchange && clock.seconds > talker.asked_s + kTimeout + kGrace + 1)
        wrong(talker.name + " got no answer");
    }
    tick();
    server_->mail->run();
  }
  for (const auto& [id, node] : nodes) counts["preemptions"] += int(node->instance->stats().preemptions);
  // A hung child is silent for a lease.
  for (const Child& child : children_)
    if (wrong_.empty() && (!child.node || child.hangs)) wrong("a child is not back");
  server_->mail->close();
  close();
  return wrong_;
}

int of_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

TEST_CASE("history: each answer follows from a history that its client can believe in", "[history][session][chaos]") {
  const int one = of_environment("SEED", 0);
  const int first = one ? one : of_environment("FIRST_SEED", 1);
  const int last = one ? one : of_environment("SEEDS", 30), step = of_environment("SEED_STEP", 1);
  std::map<std::string, int> counts;
  for (int seed = first; seed <= last; seed += step) {
    Sim sim{uint64_t(seed)};
    INFO("seed " << seed);
    CHECK(sim.run() == "");
    for (const auto& [what, n] : sim.counts) counts[what] += n;
  }
  if (one || last / step < 30) return;
  CHECK(counts["turns"] > 20 * last / step);  // the run must have covered enough turns
  for (const char* what : {"restarts", "left", "ended", "preemptions", "request_timeout", "session_busy",
                           "session_stale", "session_expired", "taken over"}) {
    INFO(what);
    CHECK(counts[what] > 0);
  }
}

}  // namespace xpyd::testing::session_history_test
