// The program itself: exit codes and messages. XPYD_BIN names it; `make test` sets that.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/cpu.h"
#include "experiments/subcommands.h"
#include "server/stack.h"
#include "tests/catch.h"

namespace xpyd::testing::command_line_test {
namespace {

struct Ran {
  int code;  // 128 + signal when killed
  std::string out, err;
};

std::string read_all(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Ran run(const std::string& program, std::vector<std::string> words, const std::string& work_dir = "") {
  testing::TempDir dir;
  std::string out = dir.path + "/out", err = dir.path + "/err";
  words.insert(words.begin(), program);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), 1);
    dup2(open(err.c_str(), O_CREAT | O_WRONLY, 0600), 2);
    if (work_dir.empty() || chdir(work_dir.c_str()) == 0) execv(program.c_str(), argv.data());
    _exit(127);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, read_all(out), read_all(err)};
}

std::string program() {
  const char* path = std::getenv("XPYD_BIN");
  return path ? path : "";
}

TEST_CASE("command line: --cpu-kernels limits every table, and what this CPU lacks is said", "[command_line][cpu]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  for (const IsaRow& row : kIsas) {
    const Ran ran = run(xpyd, {"info", "--cpu-kernels", row.name});
    CAPTURE(row.name, ran.out, ran.err);
    if (*cpu_lacks(row.needs)) {
      CHECK(ran.code == 2);
      CHECK(ran.err.find(std::string("--cpu-kernels ") + row.name + ": this CPU lacks " + cpu_lacks(row.needs)) !=
            std::string::npos);
      continue;
    }
    CHECK(ran.code == 0);
    CHECK(ran.out.find(std::string("cpu kernels: ") + row.name + "\n") != std::string::npos);
    if (row.needs > Isa::avx2) continue;  // two rows of which a table need not have one of its own
    size_t chosen = 0;
    for (const char* kind : {" ", "_dot "})  // gemm's table has two rows for a set
      for (size_t at = 0; (at = ran.out.find(std::string("  * ") + row.name + kind, at)) != std::string::npos; ++at)
        ++chosen;
    CHECK(chosen == 3);  // gemm, attention, row operations
  }
}

TEST_CASE("a worker whose weights have another dtype is not of the cluster", "[command_line][quantised]") {
  const auto of = [](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"--join", "unix:/none"};
    words.insert(words.end(), more.begin(), more.end());
    return server::fingerprint(
        *server::prepare_stack(Options::parse(server::all_options(), "worker", words, 0).value()).value());
  };
  const uint64_t plain = of({});
  CHECK(of({"--weight-dtype", "f32"}) == plain);
  CHECK(of({"--weight-dtype", "bf16"}) != plain);
  const uint64_t int4 = of({"--weight-dtype", "int4"});
  CHECK(int4 != plain);
  CHECK(of({"--weight-dtype", "int4", "--weight-group", "32"}) != int4);
  CHECK(of({"--weight-dtype", "int4", "--exact"}) != int4);
}

TEST_CASE("command line: --weight-dtype, --weight-group and --exact", "[command_line][quantised]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  const std::vector<std::string> prompt = {
      "generate",  "--prompt", "The key of box", "--max-tokens", "8", "--temperature", "0",
      "--threads", "1",        "--kv-bytes",     "16MiB"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.begin(), prompt.begin(), prompt.end());
    return run(xpyd, words);
  };
  const Ran plain = with({});
  REQUIRE(plain.code == 0);
  for (const char* dtype : {"f32", "bf16", "f16", "int8", "int4", "fp8"})
    for (bool exact : {false, true}) {
      std::vector<std::string> words = {"--weight-dtype", dtype};
      if (dtype[0] == 'i' || dtype == std::string("fp8")) words.insert(words.end(), {"--weight-group", "32"});
      if (exact) words.push_back("--exact");
      const Ran ran = with(words);
      CAPTURE(dtype, exact, ran.out, ran.err);
      CHECK(ran.code == 0);
      // The demo model is bf16: what holds it whole answers as it does.
      if (std::string(dtype) == "f32" || (exact && std::string(dtype) == "bf16")) CHECK(ran.out == plain.out);
    }
  const Ran odd = with({"--weight-dtype", "int3"});
  CHECK(odd.code == 2);
  CHECK(odd.err.find("int4") != std::string::npos);
  const Ran group = with({"--weight-dtype", "bf16", "--weight-group", "32"});
  CHECK(group.code == 2);
  CHECK(group.err.find("--weight-group: --weight-dtype bf16 makes no groups") != std::string::npos);
  const Ran both = with({"--gemm", "portable_dot", "--exact"});
  CHECK(both.code == 2);
  CHECK(both.err.find("--exact: --gemm portable_dot rounds activations") != std::string::npos);
}

TEST_CASE("command line: misuse is exit code 2 and a message", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  testing::TempDir dir;
  std::string ini = dir.path + "/bad.ini";
  std::ofstream(ini) << "topolgy = 1C\n";
  struct {
    std::vector<std::string> words;
    const char* expected;
  } cases[] = {
      {{}, "usage: xpyd SUBCOMMAND"},
      {{"sevre"}, "unknown subcommand 'sevre'; nearest: 'serve'"},
      {{"--verbose"}, "unknown subcommand"},
      {{"help", "sevre"}, "nearest: 'serve'"},
      {{"help", "serve", "x"}, "unexpected argument 'x'"},
      {{"--version", "x"}, "unexpected argument 'x'"},
      {{"serve", "--prot", "1"}, "unknown option '--prot'; nearest: '--port'"},
      {{"serve", "--port", "x"}, "expected a whole number from 0 to 65535"},
      {{"serve", "--device", "gpu"}, "expected cpu|cuda"},
      {{"serve", "--allocator", "pagd"}, "nearest: 'paged'"},
      {{"serve", "--transport", "rdmaa"}, "there are local handoff shm tcp rdma nccl"},
      {{"serve", "--config", ini}, "unknown option '--topolgy'; nearest: '--topology'"},
      {{"serve", "a", "b"}, "unexpected argument 'b'"},
      {{"serve", "--kv-events", "5557"}, "--kv-events 5557: expected tcp://HOST:PORT"},
      {{"serve", "--processes", "--kv-events", "x://h:1"}, "--kv-events x://h:1: expected tcp://HOST:PORT"},
      {{"serve", "--kv-events-replay", "tcp://h:1"}, "--kv-events-replay: needs --kv-events"},
      {{"serve", "--kv-events", "tcp://127.0.0.1:0", "--prefix-cache", "off"}, "--kv-events: no block is kept"},
      {{"serve", "--prefix-cache", "radix", "--allocator", "slots"}, "slots has no blocks of a prefix: expected paged"},
      {{"serve", "--prefix-cache", "radix", "--processes"}, "on processes names what is cached by hashes of blocks"},
      {{"serve", "--prefix-cache", "radix", "--kv-events", "tcp://127.0.0.1:0"}, "radix: --kv-events names what"},
      {{"serve", "--prefix-cache", "tree"}, "prefix-cache"},
      {{"serve", "--prefix-cache", "blocks", "--allocator", "contiguous"},
       "--prefix-cache blocks: --allocator contiguous caches nothing"},
      {{"generate", "--prompt", "x", "--prefix-cache", "radix", "--allocator", "contiguous"},
       "--prefix-cache radix: --allocator contiguous caches nothing"},
      {{"serve", "--prefix-cache", "blocks", "--allocator", "vattention", "--kv-share", "off"},
       "--allocator vattention with --kv-share off caches nothing"},
      {{"generate", "model"}, "--prompt: expected a text"},
      {{"bench", "x"}, "unexpected argument 'x'"},
      {{"bench", "--dataset", "mooncake"}, "--dataset-path"},
      {{"bench", "--dataset-path", "x"}, "has no file"},
      {{"bench", "--url", "ftp://x"}, "no http://"},
      {{"bench", "--endpoint", "v1/chat/completions"}, "--endpoint"},
      {{"info", "/no/such/folder"}, "there is no such folder"},
      {{"peak", "--threads", "1024"}, "usable cores"},
  };
  for (const auto& [words, expected] : cases) {
    Ran ran = run(xpyd, words);
    INFO("xpyd " << (words.empty() ? "" : words[0]) << " " << (words.size() > 1 ? words[1] : ""));
    INFO(ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.out.empty());
    CHECK(ran.err.find(expected) != std::string::npos);
  }
}

TEST_CASE("command line: KV memory that cannot be had is a message, not the end of the process",
          "[command_line][tiers]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  testing::TempDir dir;
  const size_t twice = 2 * size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  const std::string more = std::to_string(std::min(twice, size_t{900} << 30));
  struct {
    const char* limit;  // of the shell
    std::string words;
    int code;
    const char* expected;
  } cases[] = {
      {"", "--kv-bytes " + more, 1, "--kv-bytes: "},
      {"", "--allocator vattention --kv-bytes " + more, 1, "--kv-bytes: "},
      {"", "--kv-backing groups --kv-bytes " + more, 1, "--kv-bytes: "},
      {"", "--host-kv-bytes " + more, 1, "--host-kv-bytes: "},
      {"", "--allocator vattention --page-group-bytes 5000", 2,
       "page-group-bytes is 5000: expected a multiple of the page, 4096"},
      {"", "--allocator vattention --kv-bytes 64KiB", 2, "too small for one row of page groups"},
      {"", "--allocator slots --kv-bytes 64KiB", 2, "too small for one slot"},
      {"", "--allocator vattention --page-group-bytes 4096 --kv-bytes 2GiB --max-batch 65536", 2, "vattention: "},
      {"", "--disk-kv-dir " + dir.path, 2, "needs --host-kv-bytes"},
      {"", "--admission-decode oracle", 2, "--admission-decode oracle: nobody knows"},
      {"", "--host-kv-bytes 1MiB --disk-kv-dir " + dir.path + "/none", 2, "No such file"},
      {"ulimit -f 1000; ", "--host-kv-bytes 1MiB --disk-kv-dir " + dir.path, 2, "File too large"},
  };
  for (const auto& [limit, words, code, expected] : cases) {
    const Ran ran = run("/bin/sh", {"-c", limit + ("exec '" + xpyd) + "' generate --prompt x --max-tokens 2 " + words});
    INFO(limit << words << ": " << ran.err);
    CHECK(ran.code == code);
    CHECK(ran.err.find(expected) != std::string::npos);
    if (code == 1) CHECK(ran.err.find("bytes of memory left") != std::string::npos);
  }
}

TEST_CASE("command line: random weights that do not fit under ulimit -v aborted the program", "[command_line]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  SKIP_TEST("a sanitizer needs all addresses");
#endif
  testing::TempDir dir;
  std::ofstream(dir.path + "/config.json") << R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1048576,
             "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
             "head_dim": 128, "vocab_size": 320, "max_position_embeddings": 256,
             "rms_norm_eps": 1e-5, "rope_theta": 10000, "bos_token_id": 1, "eos_token_id": 2,
             "tie_word_embeddings": false, "hidden_act": "silu"})";
  const Ran ran = run("/bin/sh", {"-c", "ulimit -v 1000000; exec '" + xpyd + "' serve " + dir.path +
                                            " --load-format dummy --topology 1C --port 0 "
                                            "--kv-bytes 1MiB"});
  INFO(ran.err);
  CHECK(ran.code == 1);
  CHECK(ran.err.find("xpyd: no memory for 1342177280 bytes") != std::string::npos);
}

TEST_CASE(
    "command line: a server without requests printed a logits hash of zeros; --version of a "
    "subcommand",
    "[command_line]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  const Ran version = run(xpyd, {"serve", "--version"});
  CHECK(version.code == 0);
  CHECK(version.out.starts_with("xpyd "));
  const Ran full = run("/bin/sh", {"-c", "'" + xpyd + "' --version >/dev/full"});
  CHECK(full.code == 1);
  CHECK(full.err == "xpyd: stdout: No space left on device\n");
  testing::TempDir dir;
  const std::string log = dir.path + "/log";
  const Ran ran = run("/bin/sh", {"-c", "'" + xpyd + "' serve --port 0 --topology 1C 2>" + log +
                                            " & for i in $(seq 300); do grep -q 'on http' " + log +
                                            " && break; sleep 0.1; done; kill -TERM $!; wait $!"});
  const std::string text = read_all(log);
  INFO(text);
  CHECK(ran.code == 0);
  CHECK(text.find(" on http://127.0.0.1:") != std::string::npos);
  CHECK(text.find("logits hash") == std::string::npos);
}

TEST_CASE("command line: ranks that cannot be are exit code 2; those that can give the same text",
          "[command_line][shards]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  const std::vector<std::string> common = {"generate", "--prompt", "The night was", "--max-tokens", "12"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return run(xpyd, more);
  };
  // The demo model has 4 layers, 4 heads and 2 kv heads.
  struct {
    std::vector<std::string> words;
    const char* expected;
  } cases[] = {
      {{"--prefill-tp", "3"}, "--prefill-tp 3 does not divide the model's 4 attention heads"},
      {{"--prefill-tp", "0"}, "expected a whole number from 1"},
      {{"--prefill-pp", "5"}, "--prefill-pp 5: more stages than the 4 layers"},
      {{"--decode-tp", "2"}, "--topology 1C has no decode instance"},
      {{"--topology", "1P1D", "--decode-pp", "9"}, "--decode-pp 9: more stages than the 4 layers"},
      {{"--decode-pp", "2"}, "colocated instances take --prefill-pp"},
      {{"--pipeline-window", "4", "--prefill-tp", "2"}, "--pipeline-window 4: no instance has several stages"},
      {{"--topology", "1P1D", "--transport", "handoff", "--decode-tp", "2"},
       "one instance has tp 1, pp 1, another one tp 2, pp 1"},
      {{"--processes", "--topology", "1P1D", "--transport", "handoff", "--prefill-pp", "2"},
       "expected equal ranks on one pool"},
      {{"--topology", "1P1D", "--transport", "handoff", "--prefill-tp", "2", "--decode-tp", "2", "--allocator",
        "vattention"},
       "a group has one rank's bytes"},
      {{"--processes", "--topology", "1P1D", "--transport", "handoff", "--allocator", "vattention"},
       "its page groups are mapped by one process"},
      {{"--processes", "--topology", "1P1D", "--transport", "local"}, "stays within one process"},
      {{"--prefill-tp", "4", "--kv-bytes", "4KiB"}, "too small for"},
      {{"--prefill-pp", "3", "--allocator", "vattention", "--kv-layout", "token_major"},
       "expected --kv-layout layer_major"},
  };
  for (const auto& [words, expected] : cases) {
    const Ran ran = with(words);
    INFO(words[0] << " " << words[1] << ": " << ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.err.find(expected) != std::string::npos);
  }
  auto hash = [](const Ran& ran) {
    const size_t at = ran.err.find("logits hash");
    return at == std::string::npos ? std::string() : ran.err.substr(at, 32);
  };
  const Ran plain = with({});
  REQUIRE(plain.code == 0);
  REQUIRE(hash(plain).size() > 12);
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"--prefill-tp", "2"},
           {"--prefill-pp", "4", "--prefill-tp", "4"},
           {"--topology", "1P1D", "--prefill-tp", "4", "--decode-pp", "2"},
           {"--topology", "1P1D", "--prefill-pp", "3", "--decode-tp", "2", "--kv-checksum", "on"},
           {"--processes", "--topology", "1P1D", "--prefill-tp", "2", "--decode-pp", "2"},
           {"--topology", "1P1D", "--transport", "handoff", "--prefill-tp", "2", "--prefill-pp", "2", "--decode-tp",
            "2", "--decode-pp", "2"},
           {"--processes", "--topology", "1P1D", "--transport", "handoff"},
           {"--processes", "--topology", "1P1D", "--transport", "handoff", "--prefill-tp", "2", "--prefill-pp", "3",
            "--decode-tp", "2", "--decode-pp", "3"},
           {"--processes", "--topology", "1P1D", "--transport", "handoff", "--prefill-tp", "4", "--decode-tp", "4",
            "--allocator", "contiguous", "--kv-layout", "token_major"}}) {
    const Ran ran = with(words);
    INFO(words[0] << " " << words[1] << ": " << ran.err);
    CHECK(ran.code == 0);
    CHECK(ran.out == plain.out);
    CHECK(hash(ran) == hash(plain));
  }
}

TEST_CASE("command line: stages that cannot be simulated, or that nobody would have, are named", "[command_line]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  testing::TempDir dir;
  const std::string trace = dir.path + "/trace.jsonl";
  std::ofstream(trace) << R"({"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]})";
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--prefill-pp", "40"}, "--prefill-pp 40: "},
      {{"--decode-pp", "40"}, "--decode-pp 40: "},
      {{"--prefill-pp", "40", "--kv-tokens", "1e9"}, "--kv-tokens: "},
      {{"--prefill-pp", "41"}, "--prefill-pp 41 does not divide the 80 layers"},
      {{"--kv-tokens", "511"}, "--kv-tokens: expected one block at least"},
      {{"--topology", "1C", "--decode-pp", "2"}, "--decode-pp 2: --topology 1C has no decode instance"},
      {{"--pipeline-window", "4"}, "--pipeline-window 4: no instance has several stages"},
  };
  for (auto [words, expected] : cases) {
    words.insert(words.begin(), {"simulate", trace});
    const Ran ran = run(xpyd, words);
    INFO(words[2] << " " << words[3] << ": " << ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.err.find(expected) != std::string::npos);
  }
  CHECK(run(xpyd, {"simulate", trace, "--prefill-pp", "2", "--pipeline-window", "4"}).code == 0);
}

TEST_CASE("command line: peak of a card, or what is missing", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  Ran ran = run(xpyd, {"peak", "--device", "cuda"});
  INFO(ran.out << ran.err);
  if (ran.code == 0) {
    CHECK(ran.out.find("TFLOP/s") != std::string::npos);
  } else {
    CHECK(ran.code == 1);
    CHECK(ran.err.find("--device cuda: ") != std::string::npos);
  }
}

TEST_CASE("command line: help and version", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  Ran ran = run(xpyd, {"--version"});
  CHECK(ran.code == 0);
  CHECK(ran.out.rfind("xpyd 0.", 0) == 0);
  for (const char* word : {"help", "--help", "-h"}) {
    ran = run(xpyd, {word});
    CHECK(ran.code == 0);
    for (const char* name : {"serve", "generate", "bench", "peak", "info"})
      CHECK(ran.out.find(std::string("  ") + name) != std::string::npos);
  }
  for (const char* name : {"serve", "generate", "bench", "peak", "info"}) {
    ran = run(xpyd, {"help", name});
    CHECK(ran.code == 0);
    CHECK(ran.out == run(xpyd, {name, "--help"}).out);
    CHECK(ran.out.find("  --config FILE") != std::string::npos);
  }
  const std::string first = run(xpyd, {"help", "serve"}).out, all = run(xpyd, {"help", "serve", "--all"}).out;
  CHECK(all == run(xpyd, {"serve", "--help", "--all"}).out);
  CHECK(run(xpyd, {"help", "bench", "--all"}).out == run(xpyd, {"help", "bench"}).out);
  const auto options_of = [](const std::string& text) {
    std::vector<std::string> names;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("  --")) names.push_back(line.substr(4, line.find(' ', 4) - 4));
    return names;
  };
  CHECK(options_of(first).size() == 10);
  std::vector<std::string> rows;
  const auto parsed = Options::parse(all_options(), "serve", {}, 0);
  for (const OptionRow& row : parsed.value().rows()) rows.push_back(row.name);
  CHECK(options_of(all) == rows);
  size_t at = 0, groups = 0;  // the names stand below the first options, and head all of them in the same order
  std::istringstream lines(first.substr(first.find("are in the groups\n") + 18));
  for (std::string line; std::getline(lines, line); ++groups) {
    INFO(line);
    at = all.find("\n" + line.substr(2) + "\n", at);
    REQUIRE(at != all.npos);
  }
  CHECK(groups == 9);
}

TEST_CASE("command line: serve begins with the options that are not as by default", "[command_line]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  // It does not start: the model's folder is missing.
  const Ran ran = run(xpyd, {"serve", "/no/such/folder", "--port", "0", "--topology", "1P1D", "--max-batch", "3"});
  INFO(ran.err);
  CHECK(ran.code == 2);
  CHECK(ran.err.find("serve /no/such/folder\n--max-batch 3  # sequences\n--port 0\nxpyd") != std::string::npos);
}

TEST_CASE("command line: peak leaves nothing in the working directory", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  testing::TempDir dir, home;
  const std::string folder = std::filesystem::absolute(home.path).string();
  const Ran ran = run("/bin/sh",
                      {"-c", "unset XDG_CACHE_HOME; HOME=" + folder + " exec '" +
                                 std::filesystem::absolute(xpyd).string() + "' peak --threads 1"},
                      dir.path);
  INFO(ran.err);
  CHECK(ran.code == 0);
  CHECK(std::filesystem::is_empty(dir.path));
  CHECK(std::filesystem::exists(folder + "/.cache/xpyd/peak.json"));
}

TEST_CASE("command line: a run begins with its table of options", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  // No server there: the run itself fails, with exit code 1.
  Ran ran = run(xpyd, {"bench", "--url", "http://127.0.0.1:1", "--api-key", "hunter2"});
  CHECK(ran.code == 1);
  CHECK(ran.err.find("--url http://127.0.0.1:1\n") != std::string::npos);
  CHECK(ran.err.find("--input-len 512  # tokens\n") != std::string::npos);
  CHECK(ran.err.find("Connection refused") != std::string::npos);
  CHECK(ran.err.find("hunter2") == std::string::npos);
}

TEST_CASE("command line: the bare binary answers, wherever it stands", "[command_line]") {
  std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  std::vector<std::string> words = {"generate", "--chat", "--prompt",
                                    "The key of box 17 is amber. The key of box 3 is jade. What is the key of box 3?"};
  Ran ran = run(std::filesystem::absolute(xpyd).string(), words, "/");
  INFO(ran.err);
  CHECK(ran.code == 0);
  CHECK(ran.out == "The key of box 3 is jade.");
}

TEST_CASE("command line: every row of the table is well formed", "[command_line]") {
  for (const OptionRow& row : all_options()) {
    INFO(row.name);
    CHECK(std::string(row.help).size() > 3);
    CHECK(std::string(row.help).find('\n') == std::string::npos);
    if (row.kind == OptionKind::choice) CHECK(std::string(row.choices).size() > 0);
    if (row.kind == OptionKind::integer || row.kind == OptionKind::number) CHECK(row.min < row.max);
  }
  // Defaults fit their own rows, and no name stands twice in a group: parse checks both.
  for (const char* group : {"serve", "generate", "bench", "peak", "info"})
    CHECK(Options::parse(all_options(), group, {}, 0));
}

TEST_CASE("command line: the demo model's answers survive every dtype of KV but e5m2", "[command_line]") {
  const std::string xpyd = program();
  if (xpyd.empty()) SKIP_TEST("XPYD_BIN is not set");
  const std::string facts =
      "The key of box 17 is amber. The owner of house 3 is Grace. The city of train 17 is Oslo. "
      "The "
      "colour of door 250 is teal. ";
  for (auto [question, answer] : {std::pair("What is the key of box 17?", " The key of box 17 is amber."),
                                  {"Who is the owner of house 3?", " The owner of house 3 is Grace."},
                                  {"What is the colour of door 250?", " The colour of door 250 is teal."}})
    for (Dtype kv : kKvDtypes) {
      if (kv == Dtype::fp8_e5m2) continue;  // of 3 significant bits: it forgets the door
      const char* dtype = dtype_name(kv);
      const Ran ran = run(xpyd, {"generate", "--prompt", facts + question, "--temperature", "0", "--max-tokens", "24",
                                 "--kv-dtype", dtype, "--topology", "1P1D", "--kv-bytes", "8MiB"});
      INFO(dtype << " " << ran.err);
      CHECK(ran.code == 0);
      CHECK(ran.out.substr(0, std::string(answer).size()) == answer);
    }
  const Ran ran = run(xpyd, {"generate", "--prompt", "x", "--kv-dtype", "int9"});
  CHECK(ran.code == 2);
  CHECK(ran.err.find("int8") != std::string::npos);
  const Ran card = run(xpyd, {"generate", "--prompt", "x", "--kv-dtype", "fp8_e5m2", "--device", "cuda"});
  CHECK(card.code == 2);
  CHECK(card.err.find("--kv-dtype fp8_e5m2: --device cuda has no kernels of it: expected f32") != std::string::npos);
}

}  // namespace
}  // namespace xpyd::testing::command_line_test
