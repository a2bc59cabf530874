// Every process checks a message of another one when it arrives. One bad number once aborted every process that it came
// to: a TokenOf with token 600 of 512 was replayed with its request, and aborted fifteen healthy workers one after
// another.

#include <thread>

#include "base/json/json.h"
#include "disagg/processes/codec.h"
#include "disagg/processes/codec_fields.h"
#include "disagg/processes/process_cluster.h"
#include "disagg/processes/worker.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/disagg/control_end.h"
#include "tests/disagg/full_messages.h"
#include "tests/disagg/sim_cluster.h"
#include "tests/server/quiet_stdout.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::lies_test {
namespace {

using Tokens = std::vector<int32_t>;

// An archive (codec_fields.h) that sets the n-th number of a message to an impossible value.
struct Spoiler {
  template <class T>
  using Ref = T&;

  const Limits& limits;
  int n;             // counts down
  std::string what;  // was changed; "": there are no more

  template <class T>
  void set(const char* name, T& value, std::initializer_list<double> wrongs) {
    for (double wrong : wrongs) {
      if (std::is_integral_v<T> &&
          (wrong < double(std::numeric_limits<T>::min()) || wrong > double(std::numeric_limits<T>::max())))
        continue;  // its type cannot hold that
      if (n-- != 0) continue;
      value = T(wrong);
      what = std::string(name) + " = " + std::to_string(wrong);
    }
  }
  template <class T>
  void number(const char* name, T& value, Number kind) {
    const Bounds b = bounds(kind, limits);
    set(name, value, {1.001 * double(b.least) - 1, 1.001 * double(b.most) + 1});
  }
  template <class T>
  void number(const char* name, T& value, double min, double max) {
    set(name, value, {min - 1, 2 * max + 1, std::nan("")});
  }
  template <class T>
  void number(const char*, T&) {}
  void flag(const char*, bool&) {}
  void time(const char* name, double& value) { set(name, value, {1e15, std::nan("")}); }
  template <class E>
  void choice(const char* name, E& value, E last) {
    int number = int(value);
    set(name, number, {double(last) + 1});
    value = E(number);
  }
  void text(const char*, std::string&) {}
  template <class T>
  void numbers(const char*, std::vector<T>&) {}
  void numbers(const char* name, std::vector<int32_t>& values, Number kind) { number(name, values.back(), kind); }
  template <class T>
  void list(const char* name, std::vector<T>& values, size_t max) {
    if constexpr (!std::is_same_v<T, std::string>) fields(*this, values.back());
    (void)name, (void)max;
  }
  template <class T>
  void maybe(const char*, std::optional<T>& value) {
    fields(*this, *value);
  }
  template <class T>
  void part(const char*, T& value) {
    fields(*this, value);
  }
  void request(const char*, std::shared_ptr<const Request>& value) {
    Request copy = *value;
    fields(*this, copy);
    value = std::make_shared<Request>(copy);
  }
};

struct Lie {
  Message message;
  std::string what;
};

// Every number of every message with impossible values, and every message unchanged.
std::vector<Lie> lies(const Limits& limits) {
  std::vector<Lie> all;
  for (const Message& message : full_messages()) {
    all.push_back({message, "whole"});
    for (int n = 0;; ++n) {
      Message wrong = message;
      Spoiler spoiler{limits, n, ""};
      std::visit([&](auto& m) { fields(spoiler, m); }, wrong);
      if (spoiler.what.empty()) break;
      all.push_back({std::move(wrong), spoiler.what});
    }
  }
  return all;
}

constexpr Limits kLimits{.vocab = 512, .max_model_len = 64, .n_layers = 4, .n_kv_heads = 4, .head_dim = 4};

std::string refusal(const Message& message, const Door& door) {
  auto got = decode(frame_type(message), encode(1, 2, message, kSender), kSender, door);
  return got ? "" : got.error().message;
}

TEST_CASE("lies: each number of each message beyond its range is refused, and the error names the field",
          "[lies][codec]") {
  int n = 0;
  for (const Lie& lie : lies(kLimits)) {
    const std::string text = refusal(lie.message, {kAnyWay, kLimits});
    INFO(message_name(lie.message) << ": " << lie.what << ": " << text);
    if (lie.what == "whole") {
      CHECK(text == "");
    } else {
      const std::string field = lie.what.substr(0, lie.what.find(' '));
      CHECK(text.find(message_name(lie.message) + (": " + field + ": ")) == 0);
      ++n;
    }
  }
  CHECK(n > 350);
}

TEST_CASE("lies: messages of the conductor are accepted from the conductor alone", "[lies][codec]") {
  int heard[3] = {};
  const Way ways[] = {kToInstance, kToConductor, kBetweenInstances};
  for (const Message& message : full_messages())
    for (int way = 0; way < 3; ++way) heard[way] += refusal(message, {ways[way], kLimits}) == "";
  CHECK(heard[0] == 8);
  CHECK(heard[1] == 9);
  CHECK(heard[2] == 10);
  for (const Message& message : {Message(PeerGone{3}), Message(Retire{}), Message(AbortAttempt{1})})
    CHECK(refusal(message, {kBetweenInstances, kLimits}).find("this peer may not send this message") !=
          std::string::npos);
}

TEST_CASE("lies: fields that contradict each other are refused", "[lies][codec]") {
  auto request = std::make_shared<Request>();
  request->prompt = {1, 2, 3};
  request->max_tokens = 5;
  const Door door{kAnyWay, kLimits};
  CHECK(refusal(ReserveKv{1, request, {}}, door) == "");
  CHECK(refusal(ReserveKv{1, request, {.output = {1, 2, 3, 4, 5}}}, door) != "");  // all tokens are there
  CHECK(refusal(ReserveKv{1, request, {.choice = 1}}, door) != "");                // the second choice of one
  CHECK(refusal(ReserveKv{1, request, {.stands_for = 2, .output = {1}}}, door) != "");
  CHECK(refusal(KvOffered{1, request, {}, {}}, door) != "");
  CHECK(refusal(KvOffered{1, request, {{.output = {4}}}, {}}, door) == "");
  CHECK(refusal(KvOffered{1, request, {{}}, {}}, door) != "");
  CHECK(refusal(TokenOf{1, 0, {}}, door) != "");  // neither a token nor an end
  auto longest = std::make_shared<Request>(*request);
  longest->max_tokens = 62;
  CHECK(refusal(ReserveKv{1, longest, {}}, door) != "");
  auto short_one = std::make_shared<Request>(*request);
  short_one->prompt = {1};
  CHECK(refusal(PrefillJob{1, short_one, {}, 2}, door) != "");
}

// A conductor and workers in this process, as `serve --processes` and `worker` have them. An abort of one of them ends
// the test.
class Bed {
 public:
  explicit Bed(const std::string& role) : dir_() {
    const std::vector<std::string> words = {
        "--processes", "--topology",  "1P1D", "--max-model-len", "200", "--max-batch", "4", "--threads",
        "1",           "--transport", "tcp",  "--kv-bytes",      "1MiB"};
    const Options options = Options::parse(option_table(), "serve", words, 0).value();
    build_ = prepare_build(options).value();
    REQUIRE(open_backend(*build_).ok());
    ProcessClusterOptions cluster{.conductor = conductor_options(build_->options),
                                  .limits = limits(),
                                  .listen = "unix:" + dir_.path + "/conductor",
                                  .fingerprint = fingerprint(*build_)};
    cluster.conductor.lease_s = 30;
    cluster_ = ProcessCluster::create(std::move(cluster), build_->clock).value();
    role_ = role_of(role);
  }
  ~Bed() {
    cluster_->stop();
    for (auto& worker : workers_) worker->stop();
    for (std::thread& thread : threads_) thread.join();
  }
  void add_worker(std::string join = "") {
    WorkerOptions options{.cluster = build_->options,
                          .role = role_,
                          .join = join.empty() ? cluster_->address() : join,
                          .listen = "unix:" + dir_.path + "/peer" + std::to_string(threads_.size()),
                          .fingerprint = fingerprint(*build_),
                          .retry_s = 0.002};
    workers_.push_back(std::make_unique<Worker>(std::move(options), build_->clock));
    threads_.emplace_back([&worker = *workers_.back()] { (void)worker.run(); });
  }
  ControlEndpoint endpoint(const std::string& address, NodeRole role, const char* id) const {
    return {address, {}, {role, id, fingerprint(*build_), codec_schema()}};
  }
  // The name that instance `id` of this conductor gives itself.
  std::string member(const std::string& id) const {
    return id + cluster_->id().substr(std::string("conductor").size());
  }
  // A request is answered as it should be.
  void check_answers(uint64_t id) {
    auto request = tiny_request(id, {7, 8, 9, 10}, 6);
    request->ignore_eos = true;
    REQUIRE(cluster_->submit(request, recorder).ok());
    REQUIRE(cluster_->wait_idle(60));
    CHECK(recorder->choice(id).finish == FinishReason::length);
    CHECK(recorder->choice(id).tokens.size() == 6);
  }
  ProcessCluster& cluster() { return *cluster_; }
  Build& build() { return *build_; }
  const std::string& folder() const { return dir_.path; }
  Limits limits() const { return disagg::limits(build_->options); }

  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();

 private:
  TempDir dir_;
  std::unique_ptr<Build> build_;
  std::unique_ptr<ProcessCluster> cluster_;
  Role role_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
};

void say(End& end, const Message& message) {
  end.channel->send(frame_type(message), encode(1, kConductor, message, 1000));
}

// Joins as an instance does, and has a name then.
void join(End& liar, Role role) {
  say(liar, JoinRequest{role});
  liar.wait([&] { return !liar.frames.empty(); });
  InstanceInfo info{.id = 1, .role = role, .capacity_blocks = 100, .block_tokens = 16, .max_batch = 4};
  info.layout = {{}, KvOrder::layer_major, 16, 100};
  info.address = "tcp:127.0.0.1:1";
  say(liar, Joined{info});
}

// Each lie is in the log, in order, with the name of its message.
void check_log(const std::string& log, const std::vector<Lie>& said) {
  size_t at = 0;
  for (const Lie& lie : said) {
    INFO(message_name(lie.message) << ", " << lie.what);
    at = log.find(std::string("is refused, because of its message: ") + message_name(lie.message) + ": ", at);
    REQUIRE(at != std::string::npos);
    ++at;
  }
  CHECK(said.size() > 350);
}

// The lies that may not be sent this way. Unchanged messages that may be sent are not among them.
std::vector<Lie> lies(Way way, const Limits& limits) {
  std::vector<Lie> all = lies(limits);
  std::erase_if(all, [&](const Lie& lie) { return refusal(lie.message, {way, limits}) == ""; });
  return all;
}

TEST_CASE("lies: a token beyond the vocabulary ends the member that sends it, and no other", "[lies][processes]") {
  Bed bed("colocated");
  End liar;  // outlives the loop that calls it
  ControlLoop loop(bed.build().clock);
  REQUIRE(loop.connect(bed.endpoint(bed.cluster().address(), NodeRole::colocated, "new"), 5, liar.on_open()).ok());
  join(liar, Role::colocated);
  REQUIRE(bed.cluster().wait_members(1, 20));
  auto request = tiny_request(1, {7, 8, 9, 10}, 6);
  request->ignore_eos = true;
  REQUIRE(bed.cluster().submit(request, bed.recorder).ok());
  std::optional<AttemptId> attempt;
  const auto started = [&] {
    for (const auto& [type, payload] : liar.frames)
      if (auto got = decode(uint16_t(type), payload, 0); got.ok())
        if (auto* start = std::get_if<StartRequest>(&got.value().message)) attempt = start->attempt;
    return attempt.has_value();
  };
  liar.wait(started);
  bed.add_worker();
  REQUIRE(bed.cluster().wait_members(2, 30));
  TokenOf token{*attempt, 0, {.request_id = 1, .token = bed.limits().vocab + 88}};
  say(liar, token);
  liar.wait_closed();
  CHECK(liar.closed.find("TokenOf: token: " + std::to_string(bed.limits().vocab + 88)) != std::string::npos);
  REQUIRE(bed.cluster().wait_idle(60));
  CHECK(bed.recorder->choice(1).finish == FinishReason::length);
  bed.check_answers(2);
  CHECK(bed.recorder->choice(1).tokens == bed.recorder->choice(2).tokens);
  const ConductorStats totals = bed.cluster().conductor().totals();
  CHECK(totals.failed_by[size_t(AttemptFailure::refused)] == 1);
  CHECK(totals.failed_attempts == 1);
}

TEST_CASE("lies: the conductor drops a member that sends any lie", "[lies][processes]") {
  Bed bed("colocated");
  bed.add_worker();
  REQUIRE(bed.cluster().wait_members(1, 30));
  ControlLoop loop(bed.build().clock);
  const std::vector<Lie> all = lies(kToConductor, bed.limits());
  int n = 0;
  {
    CaughtStdout caught(bed.folder() + "/log", 2);
    for (const Lie& lie : all) {
      End liar;
      REQUIRE(loop.connect(bed.endpoint(bed.cluster().address(), NodeRole::decode, "new"), 5, liar.on_open()).ok());
      if (n++ % 8 == 0) join(liar, Role::decode);  // every eighth is a member
      say(liar, lie.message);
      liar.wait_closed();
    }
    check_log(read_small_file(bed.folder() + "/log", 1 << 20).value(), all);
  }
  bed.check_answers(1);
}

TEST_CASE("lies: a worker closes the channel of a peer that sends a lie or speaks as the conductor",
          "[lies][processes]") {
  Bed bed("colocated");
  bed.add_worker();
  REQUIRE(bed.cluster().wait_members(1, 30));
  const std::string door = bed.cluster().conductor().members()[0].control;
  ControlLoop loop(bed.build().clock);
  const std::vector<Lie> all = lies(kBetweenInstances, bed.limits());
  {
    CaughtStdout caught(bed.folder() + "/log", 2);
    for (const Lie& lie : all) {
      End liar;
      REQUIRE(loop.connect(bed.endpoint(door, NodeRole::decode, bed.member("i99").c_str()), 5, liar.on_open()).ok());
      say(liar, lie.message);
      liar.wait_closed();
    }
    check_log(read_small_file(bed.folder() + "/log", 1 << 20).value(), all);
  }
  bed.check_answers(1);
}

TEST_CASE("lies: a member cannot take the channel of another one, nor a name that no instance has",
          "[lies][processes]") {
  Bed bed("colocated");
  bed.add_worker();
  REQUIRE(bed.cluster().wait_members(1, 30));
  const InstanceInfo worker = bed.cluster().conductor().members()[0];
  std::vector<std::unique_ptr<End>> ends;  // they outlive the loop that calls them
  ControlLoop loop(bed.build().clock);
  const auto call = [&](const std::string& id) -> End& {
    ends.push_back(std::make_unique<End>());
    REQUIRE(loop.connect(bed.endpoint(worker.control, NodeRole::decode, id.c_str()), 5, ends.back()->on_open()).ok());
    return *ends.back();
  };
  const auto dial = [&](const std::string& id) -> End& { return call(bed.member(id)); };
  for (const char* foreign : {"i99", "i99.", "i99.0123456789abcdef"}) {  // of another conductor
    End& other = call(foreign);
    other.wait_closed();
    CHECK(other.closed.find("the peer belongs to another conductor") != std::string::npos);
  }
  End& honest = dial("i99");
  End& liar = dial("i99");
  liar.wait_closed();
  CHECK(liar.closed.find("this instance already has a channel here") != std::string::npos);
  CHECK(honest.channel->is_open());
  honest.channel->close("it broke");
  honest.wait_closed();
  End* again = nullptr;  // a peer that lost its channel comes again, once its end is noticed
  for (int n = 0; n < 100 && !(again && again->channel->is_open()); ++n) {
    again = &dial("i99");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(again->channel->is_open());
  const std::string itself = "i" + std::to_string(worker.id);
  for (const char* name : {"i", "i-1", "i-7", "ix", "i99x", "i99999999999999", "i0", itself.c_str()}) {
    INFO(name);
    End& none = dial(name);
    none.wait_closed();
    CHECK(none.closed.find("an instance only accepts peers that joined after it") != std::string::npos);
  }
  // Few instances may come before the conductor has told of them.
  for (int id = 1000; id < 1063; ++id) dial("i" + std::to_string(id));
  const std::string& why = dial("i5000").closed;
  ends.back()->wait_closed();
  CHECK(why.find("has not announced") != std::string::npos);
  for (size_t i = ends.size() - 64; i + 1 < ends.size(); ++i) CHECK(ends[i]->channel->is_open());
  bed.add_worker();  // an instance that it tells of is not one of them
  REQUIRE(bed.cluster().wait_members(2, 30));
  for (uint64_t id = 1; id <= 4; ++id) bed.check_answers(id);
}

TEST_CASE("lies: a worker leaves a conductor that sends a lie, and joins the next one", "[lies][processes]") {
  Bed bed("colocated");
  const std::vector<Lie> all = lies(kToInstance, bed.limits());
  End conductor;  // outlives the loop that calls it
  ControlLoop loop(bed.build().clock);
  REQUIRE(
      loop.listen(bed.endpoint("unix:" + bed.folder() + "/liar", NodeRole::conductor, "c"), conductor.on_open()).ok());
  int n = 0;
  {
    CaughtStdout caught(bed.folder() + "/log", 2);
    bed.add_worker("unix:" + bed.folder() + "/liar");
    for (const Lie& lie : all) {
      conductor.wait([&] { return conductor.opens == n + 1; });
      say(conductor, lie.message);
      conductor.wait([&] { return conductor.closes == n + 1; });
      ++n;
    }
    check_log(read_small_file(bed.folder() + "/log", 1 << 20).value(), all);
  }
  // The next conductor is honest.
  conductor.wait([&] { return conductor.opens == n + 1; });
  say(conductor, Welcome{.id = 1, .name = "C0", .lease_s = 30});
  const auto joined = [&] {
    return !conductor.frames.empty() &&
           std::ranges::any_of(conductor.frames, [](const auto& frame) { return frame.first == frame_type(Joined{}); });
  };
  conductor.wait(joined);
}

}  // namespace
}  // namespace xpyd::testing::lies_test
