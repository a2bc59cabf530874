// Tests --device cuda from the options to the tokens, and its error messages. Also tests one exported pool of a GPU
// between instances with their own mappings, in two processes and under whole workers.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/cuda/cuda_vmm.h"
#include "base/device/device_cuda.h"
#include "device_memory.h"
#include "disagg/processes/process_cluster.h"
#include "disagg/processes/worker.h"
#include "disagg/transport/handoff/handoff_pool.h"
#include "server/build.h"
#include "tests/catch.h"
#include "tests/disagg/card_rows.h"
#include "tests/tiny_model.h"

namespace xpyd::testing::build_test {
namespace {

using cuda::simt::SmallPages;
using cuda::simt::vmm_use;
using cuda::simt::VmmUse;

constexpr const char* kConfig =
    R"({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128,
  "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
  "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000,
  "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": false, "hidden_act": "silu"})";

struct ModelDir {
  TempDir dir;
  ModelDir() { std::ofstream(dir.path + "/config.json") << kConfig; }
};

Result<std::unique_ptr<Build>> build(const ModelDir& model, std::vector<std::string> words) {
  for (const char* word : {"--load-format", "dummy", "--kv-bytes", "1MiB"}) words.insert(words.begin() + 0, word);
  std::reverse(words.begin(), words.begin() + 4);
  words.push_back(model.dir.path);
  auto options = Options::parse(option_table(), "generate", words, 1);
  INFO((options ? "" : options.error().message));
  REQUIRE(options);
  return make_build(options.value());
}

std::vector<int32_t> tokens(const ModelDir& model, std::vector<std::string> words,
                            std::vector<int32_t> prompt = {5, 9, 33, 70, 2, 8, 8, 101, 64, 3}, float temperature = 0) {
  auto made = build(model, std::move(words));
  INFO((made ? "" : made.error().message));
  REQUIRE(made);
  auto recorder = std::make_shared<Recorder>();
  auto request = tiny_request(1, std::move(prompt), 12);
  request->sampling.temperature = temperature;
  if (temperature > 0) request->sampling.top_p = 0.9f;
  REQUIRE(made.value()->cluster->submit(request, recorder).ok());
  while (made.value()->cluster->turn()) {
  }
  CHECK(recorder->ended() == 1);
  return recorder->choice(1).tokens;
}

struct Limit {
  explicit Limit(size_t bytes) { cuda::simt::set_device_memory_limit(bytes); }
  ~Limit() { cuda::simt::set_device_memory_limit(0); }
};

TEST_CASE("--device cuda: tokens are the CPU's, however P and D share the GPU", "[simt][server]") {
  ModelDir model;
  const std::vector<int32_t> expected = tokens(model, {});
  REQUIRE(expected.size() > 1);
  const std::vector<std::vector<std::string>> ways = {
      {},
      {"--topology", "1P1D"},
      {"--topology", "1P1D", "--transport", "handoff", "--gpu-split", "off", "--allocator", "contiguous"},
      {"--topology", "1P1D", "--gpu-split", "2"},
      {"--speculate", "ngram", "--speculate-tokens", "3"},
      {"--topology", "1P1D", "--speculate", "ngram"},
      {"--topology", "1P1D", "--kv-layout", "token_major", "--cuda-decode-attention", "split_kv"}};
  for (std::vector<std::string> words : ways) {
    words.insert(words.end(), {"--device", "cuda"});
    CHECK(tokens(model, words) == expected);
  }
  // A page group holds 256 tokens of a layer's K or V, or 64 of all layers.
  for (const char* transport : {"local", "handoff"})
    for (const char* layout : {"layer_major", "token_major"})
      for (const char* ahead : {"on", "off"})
        CHECK(tokens(model, {"--device", "cuda", "--topology", "1P1D", "--transport", transport, "--allocator",
                             "vattention", "--kv-layout", layout, "--page-group-bytes", "64KiB", "--max-batch", "4",
                             "--async-scheduling", ahead}) == expected);
  CHECK(tokens(model, {"--device", "cuda", "--allocator", "vattention", "--kv-layout", "token_major", "--kv-bytes",
                       "4MiB", "--host-kv-bytes", "4MiB"}) == expected);
  CHECK(tokens(model, {"--device", "cuda", "--dtype", "bf16", "--kv-dtype", "bf16", "--cuda-prefill-attention",
                       "flash_mma", "--cuda-decode-attention", "split_mma"})
            .size() == expected.size());
}

TEST_CASE("--device cuda: the CPU applies token rules, beside requests that are sampled on the GPU",
          "[simt][server][sampler]") {
  ModelDir model;
  const auto ask = [&](const std::vector<std::string>& words, float temperature) {
    auto made = build(model, words);
    INFO((made ? "" : made.error().message));
    REQUIRE(made);
    auto recorder = std::make_shared<Recorder>();
    for (uint64_t id = 0; id < 3; ++id) {
      auto request = tiny_request(id, {5, 9, 33, int32_t(id), 2, 8}, 12);
      request->sampling.temperature = temperature;
      request->sampling.seed = id;
      if (id == 1)
        request->sampling.rules = std::make_shared<TokenRules>(TokenRules{
            .allowed = {40, 41, 42, 43}, .bad_words = {{{40, 40}}, {{41, 41}}}, .end_tokens = {42}, .min_tokens = 6});
      REQUIRE(made.value()->cluster->submit(request, recorder).ok());
    }
    while (made.value()->cluster->turn()) {
    }
    std::vector<std::vector<int32_t>> tokens;
    for (uint64_t id = 0; id < 3; ++id) tokens.push_back(recorder->choice(id).tokens);
    return tokens;
  };
  for (const float temperature : {0.0f, 1.0f}) {
    const auto expected = ask({}, temperature);
    const std::vector<int32_t>& ruled = expected[1];
    REQUIRE(ruled.size() > 1);
    for (size_t i = 0; i < ruled.size(); ++i) {
      CHECK((ruled[i] >= 40 && ruled[i] <= 43));
      if (i > 0) CHECK_FALSE((ruled[i] <= 41 && ruled[i] == ruled[i - 1]));
      if (i < 6) CHECK(ruled[i] != 42);
    }
    for (const char* topology : {"1C", "1P1D"})
      for (const char* ahead : {"on", "off"}) {
        const auto got = ask({"--device", "cuda", "--topology", topology, "--async-scheduling", ahead}, temperature);
        CHECK(got[1] == ruled);  // other requests' draws may differ where sums round in another order
        if (temperature == 0) CHECK(got == expected);
      }
  }
}

TEST_CASE("--device cuda: quantised weights stay quantised and give the CPU's tokens", "[simt][server][quantised]") {
  ModelDir model;
  for (const char* dtype : {"int8", "int4", "fp8"}) {
    INFO(dtype);
    const auto expected = tokens(model, {"--weight-dtype", dtype, "--exact"});
    CHECK(tokens(model, {"--device", "cuda", "--weight-dtype", dtype, "--topology", "1P1D"}) == expected);
  }
}

// The second of two consecutive kernels begins before the first (README.md). Each must wait for what it reads.
TEST_CASE("--device cuda: kernels that start early see the results of the kernels before them", "[simt][server]") {
  ModelDir model;
  for (const char* dtype : {"f32", "bf16"}) {
    INFO(dtype);
    for (float temperature : {0.f, 1.f}) {
      auto run = [&](const char* ahead) {
        return tokens(model, {"--device", "cuda", "--dtype", dtype, "--kv-dtype", dtype, "--async-scheduling", ahead},
                      {5, 9, 33, 70, 2, 8, 8, 101, 64, 3}, temperature);
      };
      const auto expected = run("on");
      CHECK(run("off") == expected);  // the host knows each token before it plans the next step
      cuda::simt::Late late(true);
      CHECK(run("on") == expected);
    }
  }
}

// The prompt has more tokens than the context has blocks of --block-tokens. A block of `token` is one token, and a slot
// is the whole context.
TEST_CASE("--device cuda: every allocator works with its own block size", "[simt][server]") {
  ModelDir model;
  std::vector<int32_t> prompt;
  for (int i = 0; i < 100; ++i) prompt.push_back((i * 7 + 3) % 128);
  const std::vector<int32_t> expected = tokens(model, {}, prompt);
  REQUIRE(expected.size() > 1);
  for (const char* allocator : {"paged", "token", "contiguous", "slots"})
    for (const char* topology : {"1C", "1P1D"})
      for (const char* layout : {"layer_major", "token_major"}) {
        INFO(allocator << " " << topology << " " << layout);
        CHECK(tokens(model,
                     {"--device", "cuda", "--topology", topology, "--kv-layout", layout, "--allocator", allocator},
                     prompt) == expected);
      }
}

TEST_CASE("--device cuda: impossible options are errors, and nothing aborts", "[simt][server]") {
  ModelDir model;
  auto refused = [&](std::vector<std::string> words, ErrorCode code, const std::string& says) {
    words.insert(words.end(), {"--device", "cuda"});
    auto made = build(model, words);
    REQUIRE_FALSE(made);
    INFO(made.error().message);
    CHECK(made.error().code == code);
    CHECK(made.error().message.find(says) != std::string::npos);
  };
  refused({"--gpu-split", "half"}, ErrorCode::invalid_argument, "expected off, priority");
  refused({"--gpu-split", "4"}, ErrorCode::invalid_argument, "has 4 SMs");
  refused({"--cuda-prefill-attention", "fast"}, ErrorCode::invalid_argument, "there is no variant \"fast\"");
  refused({"--cuda-prefill-attention", "flash_mma"}, ErrorCode::invalid_argument, "bf16");
  refused({"--weight-dtype", "f16"}, ErrorCode::invalid_argument,
          "supports matrices of type --dtype, int8, int4 or fp8");
  refused({"--allocator", "vattention", "--page-group-bytes", "12KiB"}, ErrorCode::invalid_argument,
          "page-group-bytes is 12288: expected a multiple of 65536");
  {
    Limit limit(64 << 10);
    refused({}, ErrorCode::unavailable, "weights");
  }
  Limit limit(24 << 20);
  refused({"--kv-bytes", "30MiB"}, ErrorCode::unavailable, "--kv-bytes");
  refused({"--kv-bytes", "30MiB", "--allocator", "vattention"}, ErrorCode::unavailable, "page groups of 2097152 bytes");
}

TEST_CASE("simt handoff: exported device memory is shared with another process and outlives its maker",
          "[simt][handoff]") {
#if defined(__SANITIZE_THREAD__)
  SKIP_TEST("ThreadSanitizer follows no threads of a forked process");
#endif
  SmallPages pages;
  auto device = make_cuda_device();
  {
    KvOptions options = tiny_options(4, 8);
    options.device = device.get();
    auto made = HandoffPool::create("paged", options, 2).value();
    CHECK(vmm_use().physical_bytes >= 2 * options.pool_bytes);
    JoinedPool p = join_handoff_pool(made->address(), "paged", options).value();
    auto p_kv = find_kv_scheme("paged")->make(p.pool, options);
    std::vector<int32_t> prompt(11, 7);
    const KvHandover handover = p_kv->handoff().hand_over(fill_on_card(*p_kv, prompt));
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      auto joined = join_handoff_pool(made->address(), "paged", options);
      if (!joined) ::_exit(2);
      auto d_kv = find_kv_scheme("paged")->make(joined.value().pool, options);
      if (joined.value().pool->data() == p.pool->data()) ::_exit(3);
      const KvHandle here = d_kv->handoff().adopt(handover, prompt, 0);
      if (here == kNoKv || rows_on_card(*d_kv, here, prompt, 0, false) != 0) ::_exit(4);
      prompt.push_back(9);
      if (!d_kv->append(here, 1)) ::_exit(5);
      rows_on_card(*d_kv, here, prompt, 11, true);
      ::_exit(0);  // it still holds its blocks, like a killed process
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    // The child's write is visible here: token 11 is in the block that both processes held.
    prompt.push_back(9);
    int wrong = 0;
    each_row(KvView{p.pool->data(), &p.pool->layout(), handover.blocks.data(), 0}, prompt, 0, 11,
             [&](std::byte* row, uint64_t pattern) { wrong += std::memcmp(row, &pattern, sizeof pattern) != 0; });
    CHECK(wrong == 0);
    made->reap();
    p_kv->handoff().discard(handover);
    p_kv->clear_prefix_cache();
    CHECK(made->ledger().count_free() == 16);
    // The maker goes, and the process that joined keeps the pool.
    const KvHandle mine = fill_on_card(*p_kv, prompt);
    made.reset();
    CHECK(rows_on_card(*p_kv, mine, prompt, 0, false) == 0);
  }
  CHECK(vmm_use() == VmmUse{});
}

TEST_CASE("simt handoff: another GPU, or none, is refused with both names", "[simt][handoff]") {
  SmallPages pages;
  auto device = make_cuda_device();
  const KvOptions on_host = tiny_options(4, 8);
  KvOptions options = on_host;
  options.device = device.get();
  auto made = HandoffPool::create("paged", options, 2).value();
  auto message = [&](const HandoffPool& pool, const KvOptions& own) {
    const auto joined = join_handoff_pool(pool.address(), "paged", own);
    REQUIRE_FALSE(joined.ok());
    CHECK(joined.error().code == ErrorCode::invalid_argument);
    return joined.error().message;
  };
  CHECK(message(*made, on_host).find("in memory of GPU-simt, but --device here is the host") != std::string::npos);
  cuda::simt::set_card_identity("GPU-other");
  CHECK(message(*made, options).find("in memory of GPU-simt, but --device here is GPU-other") != std::string::npos);
  cuda::simt::set_card_identity("GPU-simt");
  auto host_pool = HandoffPool::create("paged", on_host, 2).value();
  CHECK(message(*host_pool, options).find("in memory of the host, but --device here is GPU") != std::string::npos);
  // The GPU does not have that much memory.
  options.pool_bytes = 1 << 20;
  const auto large = [&] {
    Limit limit(64 << 10);
    return HandoffPool::create("paged", options, 2);
  }();
  REQUIRE_FALSE(large.ok());
  CHECK(large.error().code == ErrorCode::unavailable);
  CHECK(large.error().message.find("--kv-bytes: ") == 0);
  // The GPU exports no memory.
  cuda::simt::set_card_exports(false);
  const auto none = HandoffPool::create("paged", options, 2);
  cuda::simt::set_card_exports(true);
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().message ==
        "--device cuda: this card's memory cannot be shared by file descriptor; expected instances "
        "in one process (without --processes), or --device cpu");
  for (auto call : {cuda::simt::VmmCall::map, cuda::simt::VmmCall::set_access}) {
    const VmmUse before = vmm_use();
    cuda::simt::fail_vmm_call(call, 1, cuda::vmm::kOutOfMemory);
    options.pool_bytes = on_host.pool_bytes;
    CHECK_FALSE(HandoffPool::create("paged", options, 2).ok());
    CHECK(vmm_use() == before);
  }
}

TEST_CASE("simt handoff: a driver call that is not ready at once is repeated", "[simt][handoff]") {
  SmallPages pages;
  auto device = make_cuda_device();
  KvOptions options = tiny_options(4, 8);
  options.device = device.get();
  {
    cuda::simt::fail_vmm_call(cuda::simt::VmmCall::set_access, 1, cuda::vmm::kNotReady);
    const auto made = HandoffPool::create("paged", options, 2);
    REQUIRE(made.ok());
    cuda::simt::fail_vmm_call(cuda::simt::VmmCall::set_access, 1, cuda::vmm::kNotReady);
    CHECK(join_handoff_pool(made.value()->address(), "paged", options).ok());
  }
  CHECK(vmm_use() == VmmUse{});
}

// A conductor and workers as in separate processes, here in one process.
TEST_CASE("simt handoff: workers with their own mappings give the CPU's tokens and move no byte", "[simt][handoff]") {
  const ModelDir model;
  const TempDir& dir = model.dir;
  using Words = std::vector<std::string>;
  auto parse = [&](const char* command, Words words) {
    words.insert(words.begin(), {"--load-format", "dummy", "--kv-bytes", "1MiB", "--max-batch", "4"});
    words.push_back(dir.path);
    return Options::parse(option_table(), command, words, 1).value();
  };
  auto ask = [](Runtime& runtime, const std::shared_ptr<Recorder>& recorder) {
    for (uint64_t id = 1; id <= 3; ++id) {
      std::vector<int32_t> prompt;
      for (int i = 0; i < 9 + int(id) * 8; ++i) prompt.push_back((i * 7 + int(id)) % 128);
      auto request = tiny_request(id, prompt, 8);
      request->ignore_eos = true;
      REQUIRE(runtime.submit(request, recorder).ok());
    }
  };
  auto alone = make_build(parse("generate", {})).value();
  auto expected = std::make_shared<Recorder>();
  ask(*alone->runtime, expected);
  while (alone->cluster->turn()) {
  }

  {
    const Words shared = {"--device", "cuda", "--transport", "handoff"};
    Words words = shared;
    words.insert(words.end(), {"--processes", "--topology", "1P1D"});
    auto conductor = prepare_build(parse("serve", words)).value();
    auto device = find_device("cuda")->alone().value();
    conductor->options.device = device.get();
    ProcessClusterOptions options{.conductor = conductor_options(conductor->options),
                                  .limits = limits(conductor->options),
                                  .listen = "unix:" + dir.path + "/conductor",
                                  .fingerprint = fingerprint(*conductor)};
    options.conductor.lease_s = 30;
    options.pool = make_handoff_pool(conductor->options).value();
    auto cluster = ProcessCluster::create(std::move(options), conductor->clock).value();
    std::vector<std::unique_ptr<Build>> all;
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::thread> threads;
    for (const char* role : {"prefill", "decode"}) {
      words = shared;
      words.insert(words.end(), {"--role", role, "--join", cluster->address()});
      const Options own = parse("worker", words);
      all.push_back(prepare_build(own).value());
      REQUIRE(open_backend(*all.back()).ok());
      workers.push_back(std::make_unique<Worker>(WorkerOptions{.cluster = all.back()->options,
                                                               .role = role_of(role),
                                                               .join = cluster->address(),
                                                               .listen = "127.0.0.1:0",
                                                               .fingerprint = fingerprint(*all.back())},
                                                 all.back()->clock));
      threads.emplace_back([&worker = *workers.back()] {
        const Status served = worker.run();
        XPYD_CHECK(served.ok());
      });
    }
    const bool there = cluster->wait_members(2, 120);
    CHECK(there);
    if (there) {
      auto recorder = std::make_shared<Recorder>();
      ask(*cluster, recorder);
      CHECK(cluster->wait_idle(240));
      for (uint64_t id = 1; id <= 3; ++id) {
        CHECK(recorder->choice(id).ends == 1);
        CHECK(recorder->choice(id).tokens == expected->choice(id).tokens);
      }
      for (const InstanceStats& s : cluster->stats().instances) {
        CHECK(s.transfer_bytes == 0);
        CHECK(s.kv_refused == 0);
      }
    }
    for (auto& worker : workers) worker->stop();
    for (std::thread& thread : threads) thread.join();
    workers.clear();
  }
  CHECK(vmm_use() == VmmUse{});
}

}  // namespace
}  // namespace xpyd::testing::build_test
