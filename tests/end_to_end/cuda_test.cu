// The parity test (parity_test.cc) on CUDA: one logits hash per GPU, whatever manages memory, schedules, splits and
// transfers, and the CPU's tokens.
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/cuda/cuda_vmm.h"
#include "experiments/gpu/rounds.h"
#include "tests/catch.h"
#include "tests/end_to_end/cuda_parity.h"

namespace xpyd::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStride = 97;
#else
constexpr int kStride = 11;  // of 1440 combinations; coprime with every factor, so that each value occurs
#endif

}  // namespace

void check_cuda_parity(int stride) {
  OnCuda cuda;
  TinySetup first{.scheme = "contiguous", .batching = "static", .prefix_cache = false, .step_tokens = 2048};
  first.ahead = false;
  RaggedRun on_cpu = run_ragged(first);
  cuda.put(first, false);
  RaggedRun expected = run_ragged(first);
  CHECK(expected.tokens == on_cpu.tokens);
  int index = 0, ran = 0;
  for (const char* topology : {"1C", "1P1D", "2P2D"})
    for (auto& [scheme, block] :
         {std::pair{"contiguous", 16}, {"paged", 1}, {"paged", 16}, {"paged", 64}, {"vattention", 16}})
      for (KvOrder order : {KvOrder::layer_major, KvOrder::token_major})
        for (auto& [batching, step] : {std::pair{"prefill_first", 2048}, {"chunked", 7}, {"chunked", 64}})
          for (const char* transport : {"local", "handoff"})
            for (StreamKv stream : {StreamKv::layer, StreamKv::request})
              for (bool prefix : {false, true})
                for (bool graphs : {false, true}) {
                  if (transport[0] == 'h' && scheme[0] != 'p') continue;  // tables of blocks are handed over
                  if (index++ % stride != 0) continue;
                  TinySetup setup{.topology = topology, .scheme = scheme, .batching = batching, .transport = transport};
                  setup.order = order;
                  setup.stream_kv = stream;
                  setup.block_tokens = block;
                  setup.prefix_cache = prefix;
                  setup.step_tokens = step;
                  setup.ahead = index % 3 != 0;
                  setup.pool_bytes = scheme == std::string("contiguous") ? 3 << 20 : 1 << 19;
                  if (scheme == std::string("vattention")) {  // room for six sequences at once
                    setup.page_group_bytes = cuda::vmm::granularity();
                    setup.pool_bytes = 6 * size_t(order == KvOrder::layer_major ? 4 : 1) * setup.page_group_bytes;
                  }
                  cuda.put(setup, graphs);
                  INFO(setup.describe() << (graphs ? ", graphs" : ""));
                  RaggedRun got = run_ragged(setup);
                  CHECK(got.tokens == expected.tokens);
                  REQUIRE(got.hash == expected.hash);
                  ++ran;
                }
  std::printf("cuda parity on %s: %d of %d combinations have the hash %016llx\n", cuda.card.name.c_str(), ran, index,
              static_cast<unsigned long long>(expected.hash));
}

namespace {

TEST_CASE("cuda parity: memory, batching, topology and transport give one hash, and the CPU's tokens",
          "[cuda][parity]") {
  check_cuda_parity(kStride);
}

TEST_CASE("gpu report: its tiny run finds every result right, beside the yardsticks", "[cuda][report]") {
  TempDir dir;
  std::ofstream(dir.path + "/sdpa.csv")
      << "yardstick,backend,shape,ms,tflops,versions\n"
      << "sdpa,CUDNN_ATTENTION,prefill 96 causal bf16 heads 2/1 dim 128,1e9,0.1,torch 2.9\n"
      << "sdpa,CUDNN_ATTENTION,prefill 96 causal bf16 heads 2/1 dim 128 over page groups,1e-9,0.1,"
         "torch 2.9\n"
      << "sdpa,CUDNN_ATTENTION,prefill 967 causal bf16 heads 2/1 dim 128,1e-9,0.1,torch 2.9\n"
      << "sdpa,FLASH_ATTENTION,prefill 96 causal bf16 heads 2/1 dim 128,1e-9,0.1,torch 2.9\n";
  std::vector<std::string> words = {"xpyd_gpu_report",      "--tiny", "--yardsticks",
                                    dir.path + "/sdpa.csv", "--csv",  dir.path + "/report.csv"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  CHECK(gpu::run(int(argv.size()), argv.data()) == 0);
  std::ifstream in(dir.path + "/report.csv");
  int of_cudnn = 0, of_flash = 0, yardsticks = 0, shares = 0;
  for (std::string line; std::getline(in, line);) {
    yardsticks += line.find("torch 2.9") != std::string::npos;
    shares += line.find("of copy bandwidth") != std::string::npos;
    of_flash += line.find("x FLASH's best") != std::string::npos;
    if (line.find("x CUDNN's best") == std::string::npos) continue;
    ++of_cudnn;
    // The line ends with the columns met, taken, set_aside and cut. Any time is below 1e9 ms, so the target is met.
    size_t end = line.size();
    for (int column = 0; column < 3; ++column) end = line.rfind(',', end - 1);
    CHECK(line.substr(0, end).ends_with(",1"));
  }
  CHECK(yardsticks == 3);
  CHECK(of_cudnn >= 6);  // at least two variants, contiguous, paged and over page groups
  CHECK(of_flash == of_cudnn);
  CHECK(shares >= 6);
}

}  // namespace
}  // namespace xpyd::testing
