// xpyd generate: one prompt through the whole path, without HTTP. The continuation alone goes to stdout.

#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "server/commands.h"
#include "server/signals.h"
#include "server/stack.h"

namespace xpyd::server {
namespace {

// Prints text as it becomes certain and keeps the times.
class Printer final : public EventSink {
 public:
  void on_event(TokenEvent event) override {
    std::fputs(event.text.c_str(), stdout);
    std::fflush(stdout);
    std::lock_guard lock(mutex_);
    if (event.token >= 0) times.push_back(event.time_s);
    if (event.finish != FinishReason::none) {
      end = std::move(event);
      ended_ = true;
      done_.notify_all();
    }
  }
  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return ended_; });
  }
  std::vector<double> times;  // of each token
  TokenEvent end;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool ended_ = false;
};

}  // namespace

int generate_main(const Options& options) {
  SignalThread signals;
  Result<std::unique_ptr<Stack>> built = build_stack(options);
  if (!built) return fail(" generate", built.error());
  Stack& stack = *built.value();
  if (!stack.tokenizer) return fail(" generate", invalid("the model folder has no tokenizer.json"), 2);

  auto request = std::make_shared<Request>();
  request->id = 1;
  const std::string& prompt = options.text("prompt");
  if (options.flag("chat")) {
    if (!stack.chat_template)
      return fail(" generate", invalid("--chat: the model has no chat template; --chat-template names one"), 2);
    auto pieces = stack.chat_template->render({{"user", prompt}}, true);
    if (!pieces) return fail(" generate", pieces.error(), 2);
    request->prompt = stack.chat_template->encode(*stack.tokenizer, pieces.value());
    request->prompt_is_text_prefix = false;
  } else {
    request->prompt = stack.tokenizer->encode(prompt);
  }
  if (request->prompt.empty())
    return fail(" generate", invalid("--prompt is empty, and this model has no BOS token"), 2);
  int room = stack.options.max_model_len - int(request->prompt.size());
  if (room < 1)
    return fail(" generate",
                invalid("--prompt has " + std::to_string(request->prompt.size()) + " tokens, the context has " +
                        std::to_string(stack.options.max_model_len)),
                2);
  options.fill(*request);
  request->max_tokens = std::min(room, request->max_tokens);
  request->sampling.seed = stack.options.seed;
  request->arrival_s = stack.clock.now();

  auto printer = std::make_shared<Printer>();
  if (options.flag("processes"))
    signals.handle([&](int) {
      stack.runtime->drain();
      stack.runtime->abort(request->id);
    });
  const Status started = stack.runtime->start();
  const Status taken = started ? stack.runtime->submit(request, printer) : started;
  if (taken) printer->wait();
  signals.finish();
  stack.runtime->stop();
  if (signals.first()) return 128 + signals.first();
  if (!taken) return fail(" generate", taken.error(), started ? 2 : 1);
  const std::vector<double>& times = printer->times;
  double ttft = times.empty() ? 0 : times.front() - request->arrival_s;
  double tbt = times.size() < 2 ? 0 : (times.back() - times.front()) / double(times.size() - 1);
  std::fprintf(stderr, "\nprompt %zu tokens, output %zu tokens (%s), TTFT %.1f ms, TBT %.2f ms\n",
               request->prompt.size(), times.size(), finish_reason_name(printer->end.finish), 1e3 * ttft, 1e3 * tbt);
  std::fprintf(stderr, "logits hash %016llx\n", static_cast<unsigned long long>(stack.runtime->logits_hash()));
  if (printer->end.finish == FinishReason::error) return fail(" generate", {ErrorCode::io, printer->end.error}, 1);
  return 0;
}

}  // namespace xpyd::server
