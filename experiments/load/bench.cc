// xpyd bench asks the server for its card, makes or reads a load, sends it open loop and prints what users would see.

#include "experiments/load/bench.h"

#include <cmath>
#include <csignal>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "base/os.h"
#include "base/progress.h"
#include "base/utf8.h"
#include "experiments/simulate/arrivals.h"
#include "experiments/subcommands.h"
#include "server/cli/commands.h"

namespace xpyd::server {
namespace {

std::atomic<bool> interrupted{false};

// The first Ctrl-C ends the sending; a second one ends the program.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = int(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~InterruptGuard() { sigaction(SIGINT, &before_, nullptr); }

 private:
  struct sigaction before_ {};
};

// Turns a missing or wrong answer of the server into an I/O error, because it is no misuse of the command line.
template <class T>
T from_server(Result<T> result) {
  if (!result) throw Error{ErrorCode::io, result.error().message};
  return std::move(result).value();
}
void from_server(const Status& status) {
  if (!status) throw Error{ErrorCode::io, status.error().message};
}

// Prints each kind of failure once, with its count.
void print_errors(const std::vector<RequestRecord>& records) {
  std::map<std::string, int> counts;
  for (const RequestRecord& record : records)
    if (!record.ok()) ++counts[(record.refused ? "refused: " : "failed: ") + record.error];
  int shown = 0;
  for (const auto& [error, count] : counts) {
    if (++shown > 10) {
      std::fprintf(stderr, "xpyd: bench: and %zu more kinds of errors\n", counts.size() - 10);
      break;
    }
    std::fprintf(stderr, "xpyd: bench: %d %s\n", count, printable(error).c_str());
  }
}

void print_tables(const std::string& table, const BenchResult& result, const BenchSetting& setting, bool sessions,
                  int unanswered, int n) {
  std::printf("%s", table.c_str());
  if (unanswered > 0)
    std::printf("Interrupted: %d of %d requests were not answered; they are not counted.\n", unanswered, n);
  std::printf("%s\n%s", kBenchDefinitions,
              setting.max_concurrency > 0
                  ? "closed loop (--max-concurrency); time that a request waits at the client is not in TTFT or E2EL\n"
              : sessions
                  ? "closed loop in each session: a turn is due when its delay after the last answer has passed\n"
                  : "open loop: each request is sent when it is due\n");
  std::printf("delay between due and sent: median %.2f ms, P99 %.2f ms, max %.2f ms\n", result.lateness_ms.median,
              result.lateness_ms.p99, result.lateness_ms.max);
  if (result.without_usage > 0)
    std::printf("%d answers had no usage; their number of chunks counts as output tokens\n", result.without_usage);
}

// Number of tokens in all answers; below 0 if the server has no /tokenize.
int64_t retokenize(HttpClient& client, const std::string& model, const std::vector<RequestRecord>& records) {
  int64_t tokens = 0;
  for (const RequestRecord& record : records) {
    if (!record.ok()) continue;
    const Result<int> counted = count_tokens(client, model, record.text);
    if (!counted) return -1;
    tokens += counted.value();
  }
  return tokens;
}

Load make_load(const DatasetOptions& o, bool output_given, HttpClient& client, const ServerCard& card) {
  if (o.name == "mooncake")
    return need(mooncake_load(o.path, o.requests, o.time_scale, card.max_model_len, o.hash_block_tokens));
  if (o.name == "sharegpt") {
    ShareGpt read = need(read_sharegpt(o.path));
    Load load = need(sharegpt_load(std::move(read.conversations), o.requests, output_given ? o.output_tokens : 0,
                                   card.max_model_len, o.seed,
                                   [&](const std::string& text) { return count_tokens(client, card.model, text); }));
    load.notes.insert(load.notes.begin(), read.notes.begin(), read.notes.end());
    return load;
  }
  const auto prefix_load = o.name == "generated-shared-prefix" ? readable_prefix_load : shared_prefix_load;
  Load load = o.name == "random"
                  ? random_load(o.requests, o.input_tokens, o.output_tokens, o.range_ratio, o.seed)
                  : prefix_load(o.requests, o.prefix_groups, o.prefix_tokens, o.input_tokens, o.output_tokens, o.seed);
  for (const BenchRequest& request : load.requests)
    if (card.max_model_len > 0 && request.input_tokens + request.output_tokens > card.max_model_len)
      throw invalid("--input-len, --output-len: a request of " + std::to_string(request.input_tokens) + " + " +
                    std::to_string(request.output_tokens) + " tokens exceeds the server's max_model_len of " +
                    std::to_string(card.max_model_len));
  return load;
}

}  // namespace

// Checks the options that depend on each other.
static void check_bench(const Options& options) {
  const std::string& dataset = options.text("dataset");
  bool needs_file = dataset == "sharegpt" || dataset == "mooncake";
  if (needs_file && options.text("dataset-path").empty())
    throw invalid("--dataset-path: expected a file for --dataset " + dataset);
  if (!needs_file && options.given("dataset-path"))
    throw invalid("--dataset-path: --dataset " + dataset + " reads no file");
  const std::string& endpoint = options.text("endpoint");
  if (endpoint.empty() || endpoint[0] != '/')
    throw invalid("--endpoint: expected the path of a completions endpoint, such as /v1/completions");
  if (dataset == "mooncake" && options.given("rate"))
    throw invalid("--rate: --dataset mooncake has its own times; use --time-scale");
}

int bench_main(const Options& options) try {
  check_bench(options);
  RealClock clock;
  BenchOptions bench;
  DatasetOptions dataset;
  SendOptions send;
  options.fill(bench);
  options.fill(dataset);
  options.fill(send);
  const bool detailed = send.keep_text;
  send.keep_text |= bench.format == "sglang";
  const Goodput goodput = need(parse_goodput(bench.goodput));
  const Result<HttpUrl> url = parse_http_url(bench.url);
  if (!url) throw invalid("--url: " + url.error().message);
  need(check_result_file(options));
  HttpHeaders headers;
  if (!bench.api_key.empty()) headers.emplace_back("Authorization", "Bearer " + bench.api_key);
  raise_descriptor_limit();  // each request in flight needs a descriptor
  const std::unique_ptr<HttpClient> created = from_server(HttpClient::create(url.value(), headers));
  HttpClient& client = *created;

  const ServerCard card = from_server(read_server_card(client, send.model));
  send.model = card.model;
  send.seed = dataset.seed;
  if (send.vocab == 0) send.vocab = card.vocab;
  if (send.vocab == 0 && dataset.name != "sharegpt")
    throw invalid(
        "--vocab: expected the model's number of token ids, because the server's /v1/models does not say vocab_size");
  Load load = make_load(dataset, options.given("output-len"), client, card);
  if (is_chat(send)) from_server(make_texts(client, send, load.requests));
  int n = int(load.requests.size());
  for (const std::string& note : load.notes) std::fprintf(stderr, "xpyd: bench: %s\n", printable(note).c_str());

  double rate = dataset.rate;
  std::vector<double> due = arrival_times(n, rate, dataset.fixed_arrival, dataset.burstiness, dataset.seed);
  if (load.timed) {
    for (int i = 0; i < n; ++i) due[size_t(i)] = load.requests[size_t(i)].arrival_s;
    rate = n / due.back();
  }
  std::fprintf(stderr, "xpyd: bench: model %s at %s, context %d, %d requests\n", printable(card.model).c_str(),
               bench.url.c_str(), card.max_model_len, n);

  InterruptGuard guard;
  auto no_progress = [](int, int) {};
  // Warm-up prompts are different from the load's, so they leave nothing in a prefix cache that the load could hit.
  std::vector<BenchRequest> warmups(size_t(bench.warmups));
  for (BenchRequest& warmup : warmups) {
    warmup.text = "warm up";
    warmup.output_tokens = 2;
  }
  LoadRun warm = send_load(client, warmups, std::vector<double>(warmups.size()), send, clock, no_progress, interrupted);
  for (const RequestRecord& record : warm.records)
    if (!record.ok()) throw Error{ErrorCode::io, "warm-up failed: " + record.error};

  Progress progress("bench", n, clock, bench.progress);
  LoadRun run = send_load(
      client, load.requests, due, send, clock,
      [&](int done, int in_flight) { progress.update(done, std::to_string(in_flight) + " in flight"); }, interrupted);
  progress.finish();

  BenchResult result = summarize_bench(run.records, run.start_s, run.duration_s, goodput);
  if (bench.format == "sglang") result.retokenized = retokenize(client, card.model, run.records);
  const BenchSetting setting{
      .request_rate = rate, .max_concurrency = send.max_concurrency, .has_goodput = goodput.given};
  using nlohmann::json;
  json out = bench_json(result);
  if (detailed) out.update(bench_details(run.records, run.start_s));
  out.update(json{{"date", run_header(options)["date"]},
                  {"backend", setting.backend},
                  {"endpoint", send.endpoint},
                  {"model_id", card.model},
                  {"tokenizer_id", card.root},
                  {"num_prompts", n},
                  {"request_rate", std::isinf(rate) ? json("inf") : json(rate)},
                  {"burstiness", dataset.burstiness},
                  {"max_concurrency", send.max_concurrency > 0 ? json(send.max_concurrency) : json()},
                  {"seed", dataset.seed},
                  {"unanswered", run.unanswered},
                  {"notes", load.notes},
                  {"definitions", kBenchDefinitions}});
  if (bench.format == "json")
    std::printf("%s\n", out.dump(2).c_str());
  else
    print_tables(bench.format == "sglang" ? sglang_table(result, setting) : bench_table(result, setting), result,
                 setting, load.sessions, run.unanswered, n);
  std::fflush(stdout);
  print_errors(run.records);
  need(write_result_file(options, std::move(out)));
  if (run.unanswered > 0) return 130;
  return result.failed > 0 ? 1 : 0;
} catch (const Error& error) {
  std::fprintf(stderr, "xpyd: bench: %s\n", printable(error.message).c_str());
  return error.code == ErrorCode::invalid_argument ? 2 : 1;
}

}  // namespace xpyd::server
