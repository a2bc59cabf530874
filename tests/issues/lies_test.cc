// A member that sends what is no message is disconnected, and no other member notices.

#include <thread>

#include "disagg/processes/codec.h"
#include "disagg/processes/process_cluster.h"
#include "disagg/processes/worker.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/disagg/control_end.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::lies_test {
namespace {

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
                          .fingerprint = fingerprint(*build_),
                          .retry_s = 0.002};
    workers_.push_back(std::make_unique<Worker>(std::move(options), build_->clock));
    threads_.emplace_back([&worker = *workers_.back()] { (void)worker.run(); });
  }
  ControlEndpoint endpoint(const std::string& address, const char* id) const {
    return {address, {}, {id, fingerprint(*build_)}};
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

// A message without its last byte.
void lie(End& end, const Message& message) {
  std::string bytes = encode(1, kConductor, message, 1000);
  bytes.pop_back();
  end.channel->send(frame_type(message), bytes);
}

TEST_CASE("lies: the conductor drops a member that sends what is no message, and places its work anew",
          "[lies][processes]") {
  Bed bed("colocated");
  End liar;  // outlives the loop that calls it
  ControlLoop loop(bed.build().clock);
  REQUIRE(loop.connect(bed.endpoint(bed.cluster().address(), "new"), 5, liar.on_open()).ok());
  join(liar, Role::colocated);
  REQUIRE(bed.cluster().wait_members(1, 20));
  auto request = tiny_request(1, {7, 8, 9, 10}, 6);
  request->ignore_eos = true;
  REQUIRE(bed.cluster().submit(request, bed.recorder).ok());
  const auto started = [&] {
    return std::ranges::any_of(liar.frames, [](const auto& frame) { return frame.first == frame_type(StartRequest{}); });
  };
  liar.wait(started);
  bed.add_worker();
  REQUIRE(bed.cluster().wait_members(2, 30));
  lie(liar, TokenOf{});
  liar.wait_closed();
  CHECK(liar.closed.find("message refused: message of type ") != std::string::npos);
  REQUIRE(bed.cluster().wait_idle(60));
  CHECK(bed.recorder->choice(1).finish == FinishReason::length);
  bed.check_answers(2);
  CHECK(bed.recorder->choice(1).tokens == bed.recorder->choice(2).tokens);
  CHECK(bed.cluster().conductor().stats().conductor.failed_attempts == 1);
}

TEST_CASE("lies: a worker leaves a conductor that sends what is no message, and joins the next one",
          "[lies][processes]") {
  Bed bed("colocated");
  End conductor;  // outlives the loop that calls it
  ControlLoop loop(bed.build().clock);
  REQUIRE(loop.listen(bed.endpoint("unix:" + bed.folder() + "/liar", "c"), conductor.on_open()).ok());
  bed.add_worker("unix:" + bed.folder() + "/liar");
  conductor.wait([&] { return conductor.opens == 1; });
  lie(conductor, Welcome{});
  conductor.wait([&] { return conductor.closes == 1; });
  // The next conductor is honest.
  conductor.wait([&] { return conductor.opens == 2; });
  say(conductor, Welcome{.id = 1, .name = "C0", .lease_s = 30});
  const auto joined = [&] {
    return std::ranges::any_of(conductor.frames, [](const auto& frame) { return frame.first == frame_type(Joined{}); });
  };
  conductor.wait(joined);
}

}  // namespace
}  // namespace xpyd::testing::lies_test
