// xpyd_gpu_report measures, in a few minutes, all that needs a GPU: the card's peaks, attention kernels, products,
// whole steps. `make gpu-report` runs it after the tests, each part in a process of its own.
//
// Expected on an H200 (4.8 TB/s and 990 TFLOP/s on paper; shares below are of what the run measures):
//   prefill 16K causal, 32 heads of 128: 4 * 16384^2 / 2 * 32 * 128 = 2.2 TFLOP, 2.8 ms at 790 TFLOP/s
//   decode 64 x 8K, 8 KV heads of 128, bf16: 64 * 8192 * 8 * 128 * 2 * 2 = 2.1 GB, 0.5 ms at 4.3 TB/s
//   8B decode, batch 1: 16 GB of weights, 3.7 ms; batch 64 with 1K of context each: + 8.6 GB of KV, 5.7 ms
//   8B prefill of 8K: 2 * 7.5e9 * 8192 = 123 TFLOP + attention 17, 0.18 s
// The report uses at most 30 GB of the card: 16 GB of weights, 8.6 GB of KV, 2 GB to copy. 9 rounds of 10 ms a case are
// 0.1 s. Most of the time passes while the host makes 8 billion random weights (about 30 s) and the references (about 5
// s).
#include <algorithm>
#include <cstdio>

#include "experiments/gpu/rounds.h"

namespace xpyd::experiments::gpu {

void peaks(Rounds& rounds, const cuda::Card& card, bool tiny) {
  Bench& bench = rounds.bench();
  const CudaPeak peak = measure_cuda_peak(rounds.probe(), card.name, tiny ? 1 : 9);
  bench.report({.name = "copy on the card (read and written)", .gbps = peak.copy_gbps});
  bench.report({.name = "read on the card", .gbps = peak.read_gbps});
  bench.report({.name = "bf16 GEMM", .gflops = 1e3 * peak.gemm_tflops});
  bench.report({.name = "pinned host to device", .gbps = peak.to_card_gbps});
  bench.report({.name = "device to pinned host", .gbps = peak.from_card_gbps});
  bench.write_files();
}

int run(int argc, char** argv) {
  bool tiny = false;
  std::string yardsticks;
  std::vector<std::string> parts;
  std::vector<char*> rest = {argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--tiny")
      tiny = true;
    else if (word == "--yardsticks" && i + 1 < argc)
      yardsticks = argv[++i];
    else if (word == "peaks" || word == "decode" || word == "prefill" || word == "products" || word == "model" ||
             word == "vmm" || word == "transfer")
      parts.push_back(word);
    else
      rest.push_back(argv[i]);
  }
  auto options = parse_bench_options(int(rest.size()), rest.data());
  if (!options.ok()) {
    std::fprintf(stderr, "xpyd_gpu_report: peaks, decode, prefill, products, model, transfer, vmm; %s\n",
                 options.error().message.c_str());
    return 2;
  }
  auto wanted = [&](const char* name) {
    return parts.empty() || std::find(parts.begin(), parts.end(), name) != parts.end();
  };
  auto card = cuda::open();
  if (!card) {
    std::fprintf(stderr, "xpyd_gpu_report: %s\n", card.error().message.c_str());
    return 1;
  }
  const cuda::Card& c = card.value();
  Bench bench(options.value());
  std::printf("%s, compute capability %d.%d, %d SMs, %zu MiB, driver %d, runtime %d\n", c.name.c_str(), c.major,
              c.minor, c.n_sms, c.memory_bytes >> 20, c.driver, c.runtime);
  bench.print_conditions();
  Sizes sizes;
  if (tiny)
    sizes = {.peak = {.copy_bytes = 1 << 16, .gemm_n = 32, .link_bytes = 1 << 16}, .rounds = 2, .sample_seconds = 1e-9};
  Rounds rounds(bench, sizes);
  if (wanted("peaks")) peaks(rounds, c, tiny);
  if (wanted("decode")) decode_attention(rounds, c, tiny, yardsticks);
  if (wanted("prefill")) prefill_attention(rounds, c, tiny, yardsticks);
  if (wanted("products")) products(rounds, c, tiny);
  if (wanted("model")) whole_model(rounds, c, tiny);
  if (wanted("transfer")) kv_transfer(rounds, tiny);
  if (wanted("vmm")) virtual_memory(rounds, c, tiny);
  return rounds.all_right() ? 0 : 1;
}

}  // namespace xpyd::experiments::gpu
