// What somebody meets in the first minutes: options under the names of other servers, models in
// forms that are not read, the demo model without a tokenizer for clients, names in the API.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/json.h"
#include "base/utf8.h"
#include "experiments/subcommands.h"
#include "model/folder.h"
#include "model/tokenizer.h"
#include "server/commands.h"
#include "server/stack.h"
#include "tests/catch.h"
#include "tests/server/api_fixture.h"
#include "tests/server/fake_server.h"
#include "tests/server/quiet_stdout.h"

namespace xpyd::testing::first_minutes_test {
namespace {

namespace fs = std::filesystem;

std::string refusal(const std::string& group, std::vector<std::string> words) {
  auto options = Options::parse(all_options(), group, words, 1);
  return options ? "" : options.error().message;
}
bool says(const std::string& message, const std::string& what) {
  INFO(message);
  const bool found = message.find(what) != std::string::npos;
  CHECK(found);
  return found;
}

TEST_CASE("other servers' names of options were answered with '--transport' and the like", "[options]") {
  says(refusal("serve", {"--tensor-parallel-size", "2"}), "here it is '--prefill-tp', '--decode-tp'");
  says(refusal("serve", {"--max-num-seqs=8"}), "here it is '--max-batch'");
  says(refusal("serve", {"--gpu-memory-utilization", "0.9"}), "here it is '--kv-bytes'");
  says(refusal("serve", {"--max-num-batched-tokens", "9"}), "here it is '--chunk-tokens'");
  says(refusal("serve", {"-p", "9"}), "here it is '--port'");
  says(refusal("generate", {"-p", "x"}), "here it is '--prompt'");
  says(refusal("bench", {"--num-prompts", "9"}), "here it is '--requests'");
  for (const char* far : {"--speculative-config", "--zzz", "--quantization"}) {
    const std::string message = refusal("serve", {far, "x"});
    says(message, "unknown option");
    CHECK(message.find("nearest") == std::string::npos);
  }
}

struct Environment {
  std::string name;
  Environment(const std::string& n, const std::string& value) : name(n) { setenv(name.c_str(), value.c_str(), 1); }
  ~Environment() { unsetenv(name.c_str()); }
};

TEST_CASE("XPYD_* in the environment were ignored", "[options]") {
  TempDir dir;
  std::ofstream(dir.path + "/f.ini") << "max-connections = 7\nmax-batch = 9\n";
  Environment batch("XPYD_MAX_BATCH", "5"), queue("XPYD_MAX_CONNECTIONS", "6"), key("XPYD_API_KEY", "k"),
      flag("XPYD_DEV_ENDPOINTS", "on"), other("XPYD_BENCH", "no option");
  auto plain = Options::parse(all_options(), "serve", {}, 1);
  REQUIRE(plain);
  CHECK(plain.value().integer("max-batch") == 5);
  CHECK(plain.value().given("max-batch"));
  CHECK(plain.value().text("api-key") == "k");
  CHECK(plain.value().flag("dev-endpoints"));
  CHECK(plain.value().table().find("--api-key '***'") != std::string::npos);
  auto all = Options::parse(all_options(), "serve", {"--config", dir.path + "/f.ini", "--max-batch", "3"}, 1);
  REQUIRE(all);
  CHECK(all.value().integer("max-batch") == 3);  // the command line first, then the file
  CHECK(all.value().integer("max-connections") == 7);
  Environment wrong("XPYD_PORT", "tcp://10.0.0.1:80");
  says(refusal("serve", {}), "XPYD_* in the environment: port: 'tcp://10.0.0.1:80' does not fit");
}

TEST_CASE("a model in another form was 'not a folder' or lacked a file", "[serve]") {
  TempDir dir;
  const auto file = [&](const std::string& name) { std::ofstream(dir.path + "/" + name) << "x"; };
  const auto refused = [&](const std::string& path, const std::string& what) {
    const Status status = check_model_folder(path, true);
    REQUIRE_FALSE(status.ok());
    says(status.error().message, what);
  };
  refused("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir");
  refused("/no/such/folder", "there is no such folder");
  refused("./no/folder", "there is no such folder");
  file("m.gguf"), file("pytorch_model.bin"), file("m.safetensors"), file("notes.txt");
  refused(dir.path + "/m.gguf", "is a GGUF file");
  refused(dir.path + "/pytorch_model.bin", "is a pickle");
  refused(dir.path + "/m.safetensors", "expected its folder");
  refused(dir.path + "/notes.txt", "is not a folder");
  fs::create_directory(dir.path + "/bin");
  file("bin/pytorch_model.bin"), file("bin/config.json"), file("bin/tokenizer.json");
  refused(dir.path + "/bin", "has its weights in pytorch_model.bin");
  CHECK(check_model_folder(dir.path + "/bin", false).ok());  // --load-format dummy
  fs::create_directory(dir.path + "/lora");
  file("lora/adapter_config.json"), file("lora/adapter_model.safetensors");
  refused(dir.path + "/lora", "LoRA adapter");
  fs::create_directory(dir.path + "/spm");
  file("spm/model.safetensors"), file("spm/config.json"), file("spm/tokenizer.model");
  refused(dir.path + "/spm", "save_pretrained");
  file("spm/tokenizer.json");
  CHECK(check_model_folder(dir.path + "/spm", true).ok());
}

TEST_CASE("export: the demo model as a folder, and nobody's file is touched", "[export]") {
  TempDir dir;
  const std::string made = dir.path + "/demo";
  REQUIRE(export_demo(made).ok());
  CHECK(check_model_folder(made, true).ok());
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"})
    CHECK(read_small_file(made + "/" + name, 8 << 20).value() == *embedded_file(std::string(kDemoModel) + "/" + name));
  CHECK(Tokenizer::load(made).ok());
  CHECK_FALSE(export_demo(made).ok());  // not empty any more
  fs::create_directory(dir.path + "/other");
  std::ofstream(dir.path + "/other/mine") << "x";
  CHECK_FALSE(export_demo(dir.path + "/other").ok());
  std::ofstream(dir.path + "/file") << "x";
  CHECK_FALSE(export_demo(dir.path + "/file").ok());
  CHECK(read_small_file(dir.path + "/file", 8).value() == "x");
  CHECK_FALSE(export_demo(dir.path + "/no/such/parent").ok());
}

TEST_CASE("the demo model's folder in the cache: written once, whole, and over nothing", "[export]") {
  TempDir dir;
  const char* before = getenv("XDG_CACHE_HOME");
  Environment cache("XDG_CACHE_HOME", fs::absolute(dir.path).string());
  Result<std::string> first = cached_demo();
  INFO((first ? "" : first.error().message));
  REQUIRE(first);
  const std::string folder = first.value();
  CHECK(fs::path(folder).parent_path() == fs::absolute(dir.path) / "xpyd");
  struct stat of {};
  REQUIRE(stat(fs::path(folder).parent_path().c_str(), &of) == 0);
  CHECK((of.st_mode & 0777) == 0700);
  const auto written = fs::last_write_time(folder + "/config.json");
  CHECK(cached_demo().value() == folder);
  CHECK(fs::last_write_time(folder + "/config.json") == written);
  CHECK(std::distance(fs::directory_iterator(fs::path(folder).parent_path()), {}) == 1);  // no rest
  // Another's content stays, and is said.
  std::ofstream(folder + "/config.json") << "{}";
  CHECK_FALSE(cached_demo());
  CHECK(read_small_file(folder + "/config.json", 8).value() == "{}");
  // A link in its place, to somebody's file.
  std::ofstream(dir.path + "/precious") << "precious";
  fs::remove_all(folder);
  fs::create_directory_symlink(fs::absolute(dir.path), folder);
  CHECK_FALSE(cached_demo());
  fs::remove(folder);
  fs::create_directory(folder);
  fs::permissions(folder, fs::perms::owner_all);
  fs::create_symlink(fs::absolute(dir.path + "/precious"), folder + "/config.json");
  CHECK_FALSE(cached_demo());
  CHECK(read_small_file(dir.path + "/precious", 16).value() == "precious");
  // A cache folder that others can write to is not trusted.
  fs::remove_all(folder);
  fs::permissions(dir.path + "/xpyd", fs::perms(0777));
  CHECK_FALSE(cached_demo());
  CHECK_FALSE(fs::exists(folder));
  if (before) setenv("XDG_CACHE_HOME", before, 1);
}

TEST_CASE("the model's folder and every served name are names; the first is in answers", "[server][api]") {
  TestServer server([](ServerOptions& o) {
    o.names = {"tiny", "small", "org/tiny"};
    o.other_names = {"models/tiny"};
  });
  const json list = parsed(server.get("/v1/models").body)["data"];
  REQUIRE(list.size() == 3);
  CHECK(list[0]["id"] == "tiny");
  CHECK(list[2]["id"] == "org/tiny");
  CHECK(list[2]["root"] == "models/tiny");
  CHECK(parsed(server.get("/v1/models/org/tiny").body)["id"] == "org/tiny");
  for (const char* name : {"tiny", "small", "org/tiny", "models/tiny"}) {
    Reply reply = server.post("/v1/completions", R"({"prompt":"a","model":")" + std::string(name) + "\"}");
    REQUIRE(reply.status == 200);
    CHECK(parsed(reply.body)["model"] == "tiny");
  }
  CHECK(server.post("/v1/completions", R"({"prompt":"a","model":"tin"})").status == 404);
  says(refusal("serve", {"--served-model-name", "a,,b"}), "");
  for (const char* names : {"a,,b", "a\x1b[2Jb", "a\nb"}) {
    auto options = Options::parse(all_options(), "serve", {"--served-model-name", names}, 1);
    REQUIRE(options);
    CHECK_FALSE(check_options(options.value(), "serve").ok());
  }
}

TEST_CASE("log lines had neither time nor level", "[server][api]") {
  auto lines = [](LogLevel level) {
    TestServer server([&](ServerOptions& o) { o.log_level = level; });
    server.post("/v1/completions", R"({"prompt":"a","max_tokens":1})");
    server.post("/v1/completions", R"({"prompt":1})");
    server.get("/v1/models");
    server.service.wait([&](auto& s) { return s.in_flight() == 0; });
    server.server->stop();
    server.join();
    return server.log();
  };
  const auto info = lines(LogLevel::info);
  REQUIRE(info.size() == 2);
  // 2026-11-22T14:46:09.123Z info request id=…
  CHECK(info[0].substr(10, 1) == "T");
  CHECK(info[0].substr(19, 1) == ".");
  CHECK(info[0].substr(23).starts_with("Z info request id="));
  CHECK(info[1].substr(23).starts_with("Z warning refused route=/v1/completions status=400"));
  CHECK(lines(LogLevel::warning).size() == 1);
  CHECK(lines(LogLevel::error).empty());
  CHECK(lines(LogLevel::debug).size() == 3);
}

TEST_CASE("bench showed a server's terminal escapes", "[bench]") {
  CHECK(printable("a\x1b[2Jb\x07\xc2\x9b"
                  "c\n\x7f\xff"
                  "d\xc3\xa9") ==
        "a?[2Jb??c??\xef\xbf\xbd"
        "d\xc3\xa9");
  FakeServer server([](int fd, const FakeRequest& request) {
    if (request.target == "/v1/models")
      return FakeServer::send_json(fd,
                                   R"({"data":[{"id":"evil\u001b]0;title\u0007","max_model_len":99,"vocab_size":9}]})");
    FakeServer::send_json(fd, R"({"error":{"message":"no \u001b[31mred\u009b"}})", "500 \x1b[1mBad");
  });
  TempDir dir;
  const std::string log = dir.path + "/stderr";
  auto options = Options::parse(all_options(), "bench",
                                {"--url", server.url(), "--requests", "2", "--progress", "off", "--warmups", "0",
                                 "--input-len", "3", "--output-len", "4"},
                                0);
  REQUIRE(options);
  {
    QuietStdout quiet;
    const int kept = dup(2), file = open(log.c_str(), O_CREAT | O_WRONLY, 0600);
    dup2(file, 2);
    bench_main(options.value());
    std::fflush(stderr);
    dup2(kept, 2);
    close(kept), close(file);
  }
  const std::string text = read_small_file(log, 1 << 16).value();
  INFO(printable(text));
  CHECK(text.find("red") != std::string::npos);
  CHECK(text.find('\x1b') == std::string::npos);
  CHECK(text.find('\x07') == std::string::npos);
  CHECK(text.find("\xc2\x9b") == std::string::npos);
}

TEST_CASE("metrics under vLLM\'s newer names, and buckets for tokens of 0.2 ms", "[server][metrics]") {
  Metrics metrics("vllm", "tiny", 256);
  metrics.inter_token(0.00021);
  FinishedRequest done;
  done.generated = {11, 6};
  done.finishes = {FinishReason::length, FinishReason::length};
  done.n = 2;
  done.preemptions = 3;
  done.arrival_s = 1, done.queued_s = 1, done.scheduled_s = 1.5, done.first_token_s = 2;
  done.last_token_s = 2.004;
  metrics.finished(done);
  ServiceStats stats;
  InstanceStats d;
  d.name = "D0";
  d.waiting = 4, d.queue_remote_prefilling = 5;
  d.transfers = 2, d.transfer_bytes = 4096, d.transfer_descriptors = 6, d.transfer_seconds = 0.5;
  d.kv_refused = 7, d.leases_expired = 8;
  d.kv.prefix_query_tokens = 100, d.kv.prefix_hit_tokens = 30;
  d.kv.tiers.host_capacity = 10, d.kv.tiers.host_blocks = 5, d.kv.tiers.host_hit_tokens = 16;
  d.kv.tiers.disk_hit_tokens = 4, d.kv.tiers.bytes_out = 1000, d.kv.tiers.bytes_in = 500;
  stats.instances = {d};
  stats.conductor.prefill_jobs = 9;
  const std::string text = metrics.render(stats);
  const auto has = [&](const std::string& name, const std::string& engine, const std::string& more,
                       const std::string& value) {
    const std::string line = "\nvllm:" + name + "{model_name=\"tiny\",engine=\"" + engine + "\"" + more + "} " + value +
                             "\n";
    INFO(line);
    CHECK(text.find(line) != std::string::npos);
  };
  has("inter_token_latency_seconds_bucket", "all", ",le=\"2e-04\"", "0");
  has("inter_token_latency_seconds_bucket", "all", ",le=\"3e-04\"", "1");
  has("num_requests_waiting_by_reason", "D0", ",reason=\"capacity\"", "4");
  has("num_requests_waiting_by_reason", "D0", ",reason=\"deferred\"", "5");
  has("request_time_per_output_token_seconds_bucket", "all", ",le=\"3e-04\"", "0");
  has("request_time_per_output_token_seconds_bucket", "all", ",le=\"5e-04\"", "1");
  has("request_num_preemptions_sum", "all", "", "3");
  has("request_num_preemptions_bucket", "all", ",le=\"2\"", "0");
  has("external_prefix_cache_queries_total", "D0", "", "70");
  has("external_prefix_cache_hits_total", "D0", "", "20");
  has("kv_offload_store_bytes_total", "D0", "", "1000");
  has("kv_offload_load_bytes_total", "D0", "", "500");
  has("kv_offload_cpu_cache_usage_perc", "D0", "", "0.5");
  has("nixl_bytes_transferred_sum", "D0", "", "4096");
  has("nixl_bytes_transferred_count", "D0", "", "2");
  has("nixl_num_descriptors_sum", "D0", "", "6");
  has("nixl_post_time_seconds_sum", "D0", "", "0.5");
  has("nixl_num_failed_transfers_total", "D0", "", "7");
  has("nixl_num_kv_expired_reqs_total", "D0", "", "8");
  has("global_prefill_queue_length", "all", "", "9");
}

}  // namespace
}  // namespace xpyd::testing::first_minutes_test
