// The cost of the event log: the same requests through a cluster that writes one and through a cluster that does not.
//
// Expected: a step's line has 25 numbers as text, 5 us; a request's line takes 3 us, and 15 bytes a token. A step of
// llama-mini takes 5,000 us, so 0.1 %. A step of llama-tiny takes 100 us, so 5 %; no model in service has such short
// steps.
#include <atomic>
#include <filesystem>

#include "base/files.h"
#include "experiments/bench/harness.h"
#include "server/build.h"

namespace xpyd::experiments {
namespace {

using namespace server;

struct Count final : EventSink {
  std::atomic<int> left, tokens{0};
  explicit Count(int requests) : left(requests) {}
  void on_event(TokenEvent event) override {
    tokens += event.token >= 0;
    if (event.finish == FinishReason::none) return;
    left.fetch_sub(1);
    left.notify_one();
  }
};

std::unique_ptr<Build> serve(const std::string& model, std::vector<std::string> more) {
  std::vector<std::string> words = {model, "--load-format", "dummy", "--kv-bytes", "16MiB", "--max-batch", "8"};
  words.insert(words.end(), {"--topology", "1C", "--threads", "1", "--prefix-cache", "off", "--max-model-len", "256"});
  words.insert(words.end(), more.begin(), more.end());
  Result<Options> parsed = Options::parse(option_table(), "serve", words, 1);
  XPYD_CHECK(parsed.ok(), parsed.error().message);
  Result<std::unique_ptr<Build>> build = make_build(parsed.value());
  XPYD_CHECK(build.ok(), build.error().message);
  XPYD_CHECK(build.value()->cluster->start().ok());
  return std::move(build).value();
}

constexpr int kRequests = 16, kPrompt = 64, kOutput = 64;

// Returns the number of tokens that came.
int run(Build& build, uint64_t& id) {
  auto sink = std::make_shared<Count>(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    auto request = std::make_shared<Request>();
    request->id = ++id;
    for (int k = 0; k < kPrompt; ++k) request->prompt.push_back(int32_t((uint64_t(k) * 7 + id) % 100));
    request->sampling.temperature = 0;
    request->max_tokens = kOutput;
    request->ignore_eos = true;
    XPYD_CHECK(build.cluster->submit(std::move(request), sink).ok());
  }
  for (int now = sink->left; now > 0; now = sink->left) sink->left.wait(now);
  return sink->tokens;
}

void bench_event_log(Bench& bench) {
  const PrivateFolder folder;
  XPYD_CHECK(!folder.path().empty(), "cannot create a temporary folder");
  for (const char* model : {"llama-mini", "llama-tiny"}) {
    const std::string path = std::string("experiments/models/") + model, name = std::string("16 requests, ") + model;
    const std::string file = folder.path() + "/" + model;
    const std::shared_ptr<Build> plain = serve(path, {}), logged = serve(path, {"--event-log", file});
    auto id = std::make_shared<uint64_t>(0);
    const auto whole = [=](const std::shared_ptr<Build>& build) {
      return std::string(run(*build, *id) == kRequests * kOutput ? "" : "a token is missing");
    };
    bench.measure(
        {{.name = name + ": no log",
          .run = [=] { run(*plain, *id); },
          .check = [=] { return whole(plain); },
          .limit = Limit::none},
         {.name = name + ": --event-log",
          .run = [=] { run(*logged, *id); },
          .check = [=] { return std::filesystem::file_size(file) > 0 ? whole(logged) : "the event log is empty"; },
          .limit = Limit::none,
          .target = 0.98,
          .versus = {name + ": no log"}}});
  }
}

REGISTER_BENCH("event_log", bench_event_log);

}  // namespace
}  // namespace xpyd::experiments
