// Sessions and the supervisor in the simulated cluster, under a virtual clock: clients hold
// conversations while instances crash, hang and cannot be started, replies get lost, strangers push
// conversations out and the server is started anew. A checker that knows only what clients sent and
// got back decides whether each answer follows from a history that its client can believe in.
//
//   make test TESTS='[history]'     SEEDS=2000 or SEED=77 as with make chaos

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>

#include "server/sessions.h"
#include "server/supervisor.h"
#include "tests/catch.h"
#include "tests/disagg/sim_cluster.h"

namespace xpyd::testing {
namespace {

using Tokens = std::vector<int32_t>;

Tokens joined(Tokens first, const Tokens& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// What clients of one name may believe to be its history. Turns of a name exclude one another.
class Believed {
 public:
  // A turn was answered: the history was one of those that may be, or this one is not to be
  // explained.
  bool answered(const Tokens& brought, const Tokens& output) {
    std::set<Tokens> after;
    for (const Tokens& history : may_be_) {
      const Tokens prompt = joined(history, brought);
      if (checksum_tokens(prompt, int(output.size())) == output)
        after.insert(joined(prompt, output));
    }
    may_be_ = std::move(after);
    return !gone_ && !may_be_.empty();
  }
  // The reply got lost: the turn is in the history or it is not.
  void lost(const Tokens& brought, int n) {
    for (const Tokens& history : std::set<Tokens>(may_be_)) {
      const Tokens prompt = joined(history, brought);
      may_be_.insert(joined(prompt, checksum_tokens(prompt, n)));
    }
  }
  // A 410. It needs something that can be gone.
  bool told_gone() {
    gone_ = true;
    return !(may_be_.size() == 1 && may_be_.begin()->empty());
  }
  // Somebody else has begun under the name: what was before is gone.
  void taken_over() { gone_ = true; }
  bool certain() const { return !may_be_.contains({}); }  // there is a history
  void begin_anew() { may_be_ = {{}}, gone_ = false; }

 private:
  std::set<Tokens> may_be_{{}};
  bool gone_ = false;
};

class Sim final : public SimCluster {
 public:
  explicit Sim(uint64_t seed) : random_(seed * 6151 + 5) {}
  std::string run();
  int turns = 0, refused = 0, started = 0, taken_over = 0, restarts = 0;  // of the server

 private:
  struct Child {
    NodePtr node;
    Role role;
    bool hangs = false;
  };
  struct Talker {
    std::string name;
    bool returns_generation = false;
    std::string generation;  // of the last reply
    Sessions::Turn turn;     // under way
    uint64_t request = 0;    // 0: none
    Tokens so_far, brought, output;
    int wants = 0;
    double next_s = 0;
  };
  class Sink final : public EventSink {
   public:
    explicit Sink(Sim& sim) : sim_(sim) {}
    void on_event(TokenEvent event) override { sim_.on_event(event); }

   private:
    Sim& sim_;
  };
  bool chance(double p) { return random_.uniform() < p; }
  void wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = "at " + std::to_string(clock.seconds) + " s: " + what;
  }
  void supervise();
  void disturb();
  void take_turn(Talker& talker);
  void forget(Talker& talker);
  void on_event(const TokenEvent& event);
  void serve_anew();

  Random random_;
  SupervisorOptions policy_{
      .first_wait_s = 0.02, .longest_wait_s = 0.5, .silence_s = 1, .start_s = 2};
  Supervisor supervisor_{policy_, 4};
  std::vector<Child> children_;
  double no_processes_until_s_ = 0;  // starts fail
  std::shared_ptr<Sessions> sessions_;
  std::vector<Talker> talkers_;
  std::map<std::string, Believed> believed_;
  std::shared_ptr<Sink> sink_ = std::make_shared<Sink>(*this);
  uint64_t last_request_ = 0, last_name_ = 0;
  std::string wrong_;
};

void Sim::serve_anew() {
  for (Talker& talker : talkers_) {
    if (talker.request) conductor().abort(talker.request);
    talker.turn = {};
    talker.request = 0;
    talker.next_s = clock.seconds;
  }
  sessions_ = std::make_shared<Sessions>(6, 4000);
  // Without a generation nobody can tell a restarted server's new name from an old one.
  for (Talker& talker : talkers_)
    if (talker.generation.empty()) believed_[talker.name].begin_anew();
}

void Sim::supervise() {
  std::vector<Presence> seen(children_.size());
  std::set<InstanceId> members;
  for (const InstanceInfo& info : conductor().members()) members.insert(info.id);
  for (size_t i = 0; i < children_.size(); ++i)
    seen[i] = children_[i].node && members.contains(children_[i].node->id) ? Presence::serving
                                                                           : Presence::absent;
  const Supervisor::Orders orders = supervisor_.look(seen, clock.seconds);
  for (size_t i : orders.kill) {
    if (children_[i].node && members.contains(children_[i].node->id))
      wrong("a child that serves is killed");
    if (children_[i].node) crash(children_[i].node->id, true);
    children_[i] = {.role = children_[i].role};
    supervisor_.ended(i, false, clock.seconds);
  }
  for (size_t i : orders.start) {
    ++started;
    supervisor_.started(i, clock.seconds);
    if (clock.seconds < no_processes_until_s_)
      supervisor_.ended(i, false, clock.seconds);
    else
      children_[i].node = add(children_[i].role);
  }
}

void Sim::disturb() {
  constexpr double kTick = 0.001;
  Child& child = children_[random_.below(children_.size())];
  const size_t i = size_t(&child - children_.data());
  if (child.node && chance(2 * kTick)) {  // it dies, and its parent is told
    crash(child.node->id, chance(0.5));
    child = {.role = child.role};
    supervisor_.ended(i, false, clock.seconds);
  } else if (child.node && !child.hangs && chance(0.5 * kTick)) {  // it hangs for ever
    child.node->stopped_until_s = std::numeric_limits<double>::infinity();
    child.hangs = true;
  }
  if (chance(0.2 * kTick)) no_processes_until_s_ = clock.seconds + 2 * random_.uniform();
  if (chance(0.1 * kTick)) ++restarts, serve_anew();
  for (int n = chance(0.05) ? 3 : 0; n > 0; --n) {  // a stranger's conversations
    Sessions::Turn turn;
    if (sessions_->begin(session_key("stranger" + std::to_string(++last_name_), ""), turn) ==
        Sessions::State::taken)
      turn.commit({.tokens = Tokens(random_.below(100) + 1, 7)});
  }
  if (chance(0.05)) {  // and one under a name whose history was dropped
    const std::string& name = talkers_[random_.below(talkers_.size())].name;
    Sessions::Turn turn;
    if (believed_[name].certain() &&
        sessions_->begin(session_key(name, ""), turn, Sessions::kNew) == Sessions::State::taken) {
      turn.commit({.tokens = Tokens(random_.below(100) + 1, 7)});
      believed_[name].taken_over();
      ++taken_over;
    }
  }
}

// Takes another name, and believes in nothing.
void Sim::forget(Talker& talker) {
  talker.name = "talk" + std::to_string(++last_name_);
  talker.generation.clear();
}

void Sim::take_turn(Talker& talker) {
  talker.next_s = clock.seconds + 0.05 * random_.uniform();
  Believed& believed = believed_[talker.name];
  const std::string key = session_key(talker.name, "");
  switch (sessions_->begin(key, talker.turn, talker.generation)) {
    case Sessions::State::busy:
    case Sessions::State::full:
      return;
    case Sessions::State::stale:  // a reply of its own got lost
      ++refused;
      if (!talker.returns_generation) wrong("stale, though no generation was sent");
      return forget(talker);
    case Sessions::State::dropped:
      ++refused;
      if (!believed.told_gone() && talker.generation.empty())
        wrong(talker.name + " is gone, and never was");
      if (chance(0.7)) forget(talker);  // or asks again, and is to hear the same
      return;
    case Sessions::State::taken:
      break;
  }
  talker.so_far = talker.turn.so_far().tokens;
  if (talker.so_far.size() > 100) {  // the context is not endless: session_end
    talker.turn.end();
    talker.generation.clear();
    return believed.begin_anew();
  }
  talker.brought.clear();
  for (uint64_t n = 1 + random_.below(12); n > 0; --n)
    talker.brought.push_back(int32_t(random_.below(251)));
  talker.output.clear();
  talker.wants = 1 + int(random_.below(6));
  auto request = std::make_shared<Request>();
  request->id = ++last_request_;
  request->prompt = joined(talker.so_far, talker.brought);
  request->sampling.temperature = 0;
  request->max_tokens = talker.wants;
  request->ignore_eos = true;
  request->cache_salt = talker.turn.salt();
  request->arrival_s = clock.seconds;
  talker.request = request->id;
  if (!conductor().submit(std::move(request), sink_)) {
    talker.turn.release();
    talker.request = 0;
  } else if (chance(0.05)) {  // the client goes away
    conductor().abort(talker.request);
  }
}

void Sim::on_event(const TokenEvent& event) {
  auto found = std::find_if(talkers_.begin(), talkers_.end(),
                            [&](const Talker& t) { return t.request == event.request_id; });
  if (found == talkers_.end()) return;  // of a server that was
  Talker& talker = *found;
  if (event.token >= 0) talker.output.push_back(event.token);
  if (event.finish == FinishReason::none) return;
  talker.request = 0;
  Believed& believed = believed_[talker.name];
  if (event.finish != FinishReason::length) {  // a turn is in it whole or not at all
    talker.turn.release();
    return;
  }
  ++turns;
  const std::string generation = talker.turn.generation();
  talker.turn.commit({.tokens = joined(joined(talker.so_far, talker.brought), talker.output)});
  if (chance(0.05)) return believed.lost(talker.brought, talker.wants);
  if (!believed.answered(talker.brought, talker.output))
    return wrong(talker.name + " got an answer that no history of its explains; " +
                 (talker.output == checksum_tokens(joined(talker.so_far, talker.brought),
                                                   int(talker.output.size()))
                      ? "it follows from what the store had, " +
                            std::to_string(talker.so_far.size()) + " tokens"
                      : "it does not follow from what the store had"));
  if (talker.returns_generation) talker.generation = generation;
}

std::string Sim::run() {
  SimOptions options;
  options.conductor.max_tries = 200;
  options.conductor.max_queue_bytes = 1 << 30;
  open(std::move(options));
  for (Role role : {Role::prefill, Role::prefill, Role::decode, Role::decode})
    children_.push_back({.role = role});
  talkers_.resize(6);
  for (size_t i = 0; i < talkers_.size(); ++i) {
    talkers_[i].returns_generation = i % 2 == 0;
    forget(talkers_[i]);
  }
  talkers_[3].name = talkers_[1].name;  // two clients of one name
  serve_anew();
  constexpr double kWild = 6, kCalm = 4;  // seconds
  for (int n = 0; wrong_.empty() && clock.seconds < kWild + kCalm; ++n) {
    if (clock.seconds < kWild) disturb();
    if (n % 20 == 0) supervise();
    for (Talker& talker : talkers_)
      if (!talker.request && clock.seconds >= talker.next_s) take_turn(talker);
    tick();
  }
  // A hung child is silent for a lease and policy_.silence_s, and waits longest_wait_s at most.
  for (const Child& child : children_)
    if (wrong_.empty() && (!child.node || child.hangs)) wrong("a child is not back");
  // Each child is started 1 + log2(longest / first) times while the wait grows, and then once in
  // longest_wait_s; it begins anew when it has served for so long.
  const double most = 4 * (2 + kWild * 10);
  if (started > most) wrong(std::to_string(started) + " starts");
  for (Talker& talker : talkers_) talker.turn = {};
  close();
  return wrong_;
}

int of_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

TEST_CASE("history: each answer follows from a history that its client can believe in",
          "[history][session][chaos]") {
  const int one = of_environment("SEED", 0);
  const int first = one ? one : of_environment("FIRST_SEED", 1);
  const int last = one ? one : of_environment("SEEDS", 30), step = of_environment("SEED_STEP", 1);
  int turns = 0, refused = 0, taken_over = 0, restarts = 0;
  for (int seed = first; seed <= last; seed += step) {
    Sim sim{uint64_t(seed)};
    INFO("seed " << seed);
    CHECK(sim.run() == "");
    turns += sim.turns, refused += sim.refused, restarts += sim.restarts;
    taken_over += sim.taken_over;
  }
  if (one || last < 10) return;
  CHECK(turns > 20 * last / step);  // it was about something
  CHECK(refused > last / step);
  CHECK(taken_over > 0);
  CHECK(restarts > 0);
}

}  // namespace
}  // namespace xpyd::testing
