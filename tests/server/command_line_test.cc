// Runs the program itself and checks exit codes and messages. XPYD_BIN names the program, and `make test` sets it.
#include "base/cpu.h"
#include "experiments/subcommands.h"
#include "server/build.h"
#include "server/cli/commands.h"
#include "tests/program.h"

namespace xpyd::testing::command_line_test {

struct Case {
  Words words;
  const char* expected;
};

// Requires for each case exit code 2, the expected words on stderr, and nothing on stdout.
void check_misuse(const std::vector<Case>& cases, const Words& before = {}) {
  for (const auto& [more, expected] : cases) {
    Words words = before;
    words.insert(words.end(), more.begin(), more.end());
    const Ran ran = run_program(words);
    INFO("xpyd " << (words.empty() ? "" : words[0]) << " … " << (words.empty() ? "" : words.back()) << "\n" << ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.out.empty());
    CHECK(has(ran.err, expected));
  }
}

TEST_CASE("command line: --cpu-kernels limits every kernel table, and names the instructions that this CPU lacks",
          "[command_line][cpu]") {
  NEEDS_PROGRAM();
  for (const IsaRow& row : kIsas) {
    const Ran ran = run_program({"info", "--cpu-kernels", row.name});
    CAPTURE(row.name, ran.out, ran.err);
    if (*cpu_lacks(row.needs)) {
      CHECK(ran.code == 2);
      CHECK(ran.err.find(std::string("--cpu-kernels ") + row.name + ": this CPU lacks " + cpu_lacks(row.needs)) !=
            std::string::npos);
      continue;
    }
    CHECK(ran.code == 0);
    CHECK(ran.out.find(std::string("CPU kernels: ") + row.name + "\n") != std::string::npos);
    if (row.needs > Isa::avx2) continue;  // a table need not have its own kernel for both of these rows
    size_t chosen = 0;
    for (const char* kind : {"*", "_dot8*"})  // gemm has three rows for each instruction set
      chosen += count(ran.out, std::string(" ") + row.name + kind);
    CHECK(chosen == 3);  // one each of gemm, attention and row operations
  }
}

TEST_CASE("a conductor that predicts seconds begins with the model's work and the machine's peaks", "[command_line]") {
  const Words words = {"--placement", "mooncake", "--kv-bytes", "4MiB", "--chunk-tokens", "96", "--stream-kv", "chunk"};
  const auto build = server::prepare_build(Options::parse(server::all_options(), "serve", words, 0).value()).value();
  const disagg::ConductorOptions options = disagg::conductor_options(build->options);
  REQUIRE(options.prior);
  CHECK(options.prior->model.config.hidden == build->config.hidden);
  CHECK(options.prior->rates.flops_per_s > 1e8);
  CHECK(options.prior->rates.bytes_per_s > 1e8);
  CHECK(options.step_tokens == 96);
  CHECK(options.stream_kv == disagg::StreamKv::chunk);
}

TEST_CASE("a worker whose weights have another dtype has another fingerprint", "[command_line][quantised]") {
  const auto of = [](const Words& more) {
    Words words = {"--join", "unix:/none"};
    words.insert(words.end(), more.begin(), more.end());
    return server::fingerprint(
        *server::prepare_build(Options::parse(server::all_options(), "worker", words, 0).value()).value());
  };
  const uint64_t plain = of({});
  CHECK(of({"--weight-dtype", "f32"}) == plain);
  CHECK(of({"--weight-dtype", "bf16"}) != plain);
  const uint64_t int4 = of({"--weight-dtype", "int4"});
  CHECK(int4 != plain);
  CHECK(of({"--weight-dtype", "int4", "--weight-group", "32"}) != int4);
  CHECK(of({"--weight-dtype", "int4", "--exact"}) != int4);
}

TEST_CASE("command line: misuse is exit code 2 and a message", "[command_line]") {
  NEEDS_PROGRAM();
  check_misuse({
      {{}, "usage: xpyd SUBCOMMAND"},
      {{"sevre"}, "unknown subcommand 'sevre'"},
      {{"help", "sevre"}, "unknown subcommand 'sevre'"},
      {{"serve", "--prot", "1"}, "unknown option '--prot'"},
      {{"serve", "--transport", "rdmaa"}, "expected local|handoff|shm|tcp|rdma|nccl"},
      {{"serve", "--kv-events", "5557"}, "--kv-events 5557: expected tcp://HOST:PORT"},
      {{"serve", "--processes", "--kv-events", "x://h:1"}, "--kv-events x://h:1: expected tcp://HOST:PORT"},
      {{"serve", "--kv-events-replay", "tcp://h:1"}, "--kv-events-replay: needs --kv-events"},
      {{"serve", "--kv-events", "tcp://127.0.0.1:0", "--prefix-cache", "off"},
       "--kv-events: with these options no KV is kept"},
      {{"serve", "--prefix-cache", "radix", "--allocator", "slots"}, "slots has no prefix blocks: expected paged"},
      {{"serve", "--prefix-cache", "radix", "--processes"}, "the conductor of worker processes needs hashes of blocks"},
      {{"serve", "--prefix-cache", "radix", "--kv-events", "tcp://127.0.0.1:0"}, "radix: --kv-events needs hashes"},
      {{"generate", "model"}, "--prompt: expected the text"},
      {{"generate", "--prompt", "x", "--weight-dtype", "int3"}, "int4"},
      {{"generate", "--prompt", "x", "--gemm", "portable_dot", "--exact"},
       "--exact: --gemm portable_dot rounds activations"},
      {{"worker", "--join", "nonsense", "--kv-bytes", "1MiB"}, "nonsense"},
      {{"bench", "--dataset", "mooncake"}, "--dataset-path"},
      {{"bench", "--dataset-path", "x"}, "reads no file"},
      {{"bench", "--url", "ftp://x"}, "expected http://HOST:PORT"},
      {{"bench", "--endpoint", "v1/chat/completions"}, "--endpoint"},
      {{"info", "/no/such/folder"}, "there is no such folder"},
      {{"peak", "--threads", "1024"}, "usable cores"},
      // A configuration that cannot work is refused before the server listens.
      {{"serve", "--topology", "1P"}, "P and D need each other"},
      {{"serve", "--topology", "x"}, "1P1D"},
      {{"serve", "--kv-bytes", "100"}, "kv-bytes"},
      {{"serve", "--seed", "9007199254740993"}, "--seed: '9007199254740993' is not valid: expected a whole number from 0 to"},
      {{"serve", "--max-model-len", "5000"}, "--max-model-len"},
      {{"serve", "--gemm", "nonesuch"}, "--gemm"},
      {{"serve", "--attention", "nonesuch"}, "--attention"},
      {{"generate", "--prompt", "x", "--kv-dtype", "int9"}, "int8"},
      {{"generate", "--prompt", "x", "--kv-dtype", "fp8_e5m2", "--device", "cuda"},
       "--kv-dtype fp8_e5m2: --device cuda does not support it: expected f32"},
  });
  TestServer other;  // for the case of a port that is in use
  const std::string port = std::to_string(other.port());
  const Ran ran = run_program({"serve", "--port", port, "--topology", "1C", "--kv-bytes", "2MiB"});
  CHECK(ran.code != 0);
  CHECK((has(ran.err, port) && has(ran.err, "in use")));
}

TEST_CASE("command line: KV memory that cannot be allocated is a message and not an abort", "[command_line][tiers]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const size_t twice = 2 * size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  const std::string more = std::to_string(std::min(twice, size_t{900} << 30));
  struct {
    const char* limit;  // a shell command that sets a limit
    std::string words;
    int code;
    const char* expected;
  } cases[] = {
      {"", "--kv-bytes " + more, 1, "--kv-bytes: "},
      {"", "--allocator vattention --kv-bytes " + more, 1, "--kv-bytes: "},
      {"", "--host-kv-bytes " + more, 1, "--host-kv-bytes: "},
      {"", "--allocator slots --kv-bytes 64KiB", 2, "too small for one slot"},
      {"", "--allocator vattention --page-group-bytes 4096 --kv-bytes 2GiB --max-batch 65536", 2, "vattention: "},
      {"", "--host-kv-bytes 100", 2, "--host-kv-bytes is 100"},
      {"", "--disk-kv-dir " + dir.path, 2, "needs --host-kv-bytes"},
      {"", "--host-kv-bytes 1MiB --disk-kv-bytes 100 --disk-kv-dir " + dir.path, 2, "--disk-kv-bytes is 100"},
      {"", "--host-kv-bytes 1MiB --disk-kv-bytes 60TiB --disk-kv-dir " + dir.path, 2, "the disk has only"},
      {"", "--host-kv-bytes 1MiB --disk-kv-dir " + dir.path + "/none", 2, "No such file"},
      {"ulimit -f 1000; ", "--host-kv-bytes 1MiB --disk-kv-dir " + dir.path, 2, "File too large"},
  };
  for (const auto& [limit, words, code, expected] : cases) {
    Words all = {"generate", "--prompt", "x", "--max-tokens", "2"};
    std::istringstream options(words);
    all.insert(all.end(), std::istream_iterator<std::string>(options), {});
    const Ran ran = run_program(all, {.shell = limit});
    INFO(limit << words << ": " << ran.err);
    CHECK(ran.code == code);
    CHECK(has(ran.err, expected));
    if (code == 1) CHECK(has(ran.err, "bytes of memory left"));
  }
}

TEST_CASE("command line: impossible ranks are exit code 2", "[command_line][shards]") {
  NEEDS_PROGRAM();
  const Words common = {"generate", "--prompt", "The night was", "--max-tokens", "12", "--threads", "1"};
  // The demo model has 4 layers, 4 heads and 2 KV heads.
  check_misuse(
      {
          {{}, "no instance has several pipeline stages: expected --prefill-pp or --decode-pp"},
          {{"--prefill-pp", "2", "--transport", "handoff"}, "--transport handoff works within one process only"},
          {{"--prefill-pp", "2", "--transport", "tcp", "--allocator", "vattention"},
           "--allocator vattention: its page groups are mapped by one process"},
          {{"--prefill-pp", "2", "--transport", "tcp", "--allocator", "slots", "--slot-prealloc", "1"},
           "stages that are processes allocate all slots"},
      },
      {"serve", "--ranks", "processes"});
  check_misuse(
      {
          {{"--prefill-tp", "3"}, "--prefill-tp 3 does not divide the model's 4 attention heads"},
          {{"--topology", "1P1D", "--decode-pp", "9"}, "--decode-pp 9: there are more stages than the 4 layers"},
          {{"--topology", "1P1D", "--transport", "handoff", "--decode-tp", "2"},
           "one instance has tp 1, pp 1, another one tp 2, pp 1"},
          {{"--topology", "1P1D", "--transport", "handoff", "--allocator", "contiguous"},
           "--allocator contiguous: --transport handoff hands over tables of blocks: expected --allocator paged"},
          {{"--processes", "--topology", "1P1D", "--allocator", "vattention"},
           "--allocator vattention: its page groups are mapped while it runs, and --transport shm"},
          {{"--topology", "1P1D", "--allocator", "vattention", "--transport", "rdma"},
           "and --transport rdma makes the pool known to its peers once: expected --transport local or tcp"},
          {{"--topology", "1P1D", "--disagg", "decode_first", "--kv-transfer", "pull"},
           "--kv-transfer pull: with --disagg decode_first prefill instances write the KV: expected push"},
          {{"--topology", "1P1D", "--decode-copies", "2"},
           "--decode-copies 2: --topology 1P1D has 1 decode instances: expected at least as many"},
          {{"--topology", "1P2D", "--decode-copies", "2", "--disagg", "decode_first"},
           "--decode-copies 2: with --disagg decode_first the prompt waits for one decode instance"},
          {{"--topology", "1P2D", "--decode-copies", "2", "--transport", "handoff"},
           "--decode-copies 2: --transport handoff has one pool for all instances"},
          {{"--topology", "1P2D", "--decode-copies", "2", "--prefix-cache", "off"},
           "--decode-copies 2: a copy is kept in a prefix cache"},
          {{"--processes", "--topology", "1P1D", "--transport", "local"}, "works within one process only"},
          {{"--processes", "--topology", "1P1D", "--transport", "handoff"}, "works within one process only"},
      },
      common);
}

TEST_CASE("command line: help has every option, and --version prints, also after a subcommand", "[command_line]") {
  NEEDS_PROGRAM();
  for (const Words& words : {Words{"--version"}, {"serve", "--version"}}) {
    const Ran version = run_program(words);
    CHECK(version.code == 0);
    CHECK(version.out.starts_with("xpyd 0."));
  }
  for (const char* name : {"serve", "generate", "bench", "peak", "info"}) {
    CHECK(has(run_program({"--help"}).out, std::string("  ") + name));
    const Ran help = run_program({"help", name});
    CHECK(help.code == 0);
    CHECK(help.out == run_program({name, "--help"}).out);
    const auto options = Options::parse(all_options(), name, {}, 0);
    for (const OptionRow& row : options.value().rows()) CHECK(has(help.out, std::string("\n  --") + row.name));
  }
}

TEST_CASE("command line: the bare binary answers from any working directory, with each KV dtype", "[command_line]") {
  NEEDS_PROGRAM();
  std::set<std::string> hashes;
  for (Dtype kv : kKvDtypes) {
    const Words words = {"generate", "--chat", "--topology", "1P1D", "--kv-bytes", "8MiB", "--kv-dtype",
                         dtype_name(kv), "--prompt",
                         "The key of box 17 is amber. The key of box 3 is jade. What is the key of box 3?"};
    const Ran ran = run_program(words, {.folder = "/"});
    INFO(dtype_name(kv) << " " << ran.err);
    CHECK(ran.code == 0);
    CHECK(ran.out == "The key of box 3 is jade.");
    CHECK(hashes.insert(ran.err.substr(ran.err.find("logits hash"))).second);
  }
}

// ---- options, parsed in this process

std::string refusal(const std::string& group, const Words& words) {
  auto options = Options::parse(all_options(), group, words, 1);
  return options ? "" : options.error().message;
}

TEST_CASE("a served model name that is empty or has control characters is refused", "[options]") {
  for (const char* served : {"a\x1b[2Jb", "a\nb"}) {
    auto options = Options::parse(all_options(), "serve", {"--served-model-name", served}, 1);
    REQUIRE(options);
    CHECK_FALSE(check_options(options.value(), "serve").ok());
  }
}

struct Environment {
  std::string name;
  Environment(const std::string& n, const std::string& value) : name(n) { setenv(name.c_str(), value.c_str(), 1); }
  ~Environment() { unsetenv(name.c_str()); }
};

TEST_CASE("XPYD_ environment variables set options, and the file and the command line override them", "[options]") {
  TempDir dir;
  std::ofstream(dir.path + "/f.ini") << "max-connections = 7\nmax-batch = 9\n";
  Environment batch("XPYD_MAX_BATCH", "5"), queue("XPYD_MAX_CONNECTIONS", "6"), key("XPYD_API_KEY_FILE", "k"),
      flag("XPYD_PROCESSES", "on"), other("XPYD_BENCH", "no option");
  auto plain = Options::parse(all_options(), "serve", {}, 1);
  REQUIRE(plain);
  CHECK(plain.value().integer("max-batch") == 5);
  CHECK(plain.value().given("max-batch"));
  CHECK(plain.value().text("api-key-file") == "k");
  CHECK(plain.value().flag("processes"));
  auto all = Options::parse(all_options(), "serve", {"--config", dir.path + "/f.ini", "--max-batch", "3"}, 1);
  REQUIRE(all);
  CHECK(all.value().integer("max-batch") == 3);  // the command line wins, then the file
  CHECK(all.value().integer("max-connections") == 7);
  Environment wrong("XPYD_PORT", "tcp://10.0.0.1:80");
  CHECK(has(refusal("serve", {}), "XPYD_* in the environment: port: 'tcp://10.0.0.1:80' is not valid"));
}

}  // namespace xpyd::testing::command_line_test
