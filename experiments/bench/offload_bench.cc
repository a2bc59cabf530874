// Swapping KV between a pool and the host tier: in, as a share of the copy bandwidth; out, as the cost for running
// requests. And the disk tier: the bandwidth of its file beside fio's.
//
// Expected, in: Llama-3-8B in bf16 has 128 KiB of KV per token, 2 MiB per block of 16. If both sides are token_major,
// one copy moves a run of blocks, and a thread that copies with streaming stores reaches the copy peak. Look-up,
// pinning and 64 polls of a prompt of 1024 tokens remain: some 100 us beside 128 MiB / 15 GB/s = 9 ms. If the pool is
// layer_major, a piece is K or V of one token in one layer, 2 KiB. The copy then runs at the speed that 65,536 such
// pieces allow. (light-vllm's swap_blocks with 32 KiB a piece reached 12 of 25 GB/s on PCIe; reference: KV offloading,
// E1.)
// Expected, out: a prompt token of llama-mini costs 2 * parameters FLOP, and its KV leaves once. The copy takes memory
// bandwidth for about 1 us of every few hundred, and half a core if no core is idle.
// Expected, disk: fio with the same engine, block and depth reaches what the disk can do. The file's thread also
// computes a checksum of each block, at some 15 GB/s, while other blocks are in flight. So the tier is as fast as fio
// unless the disk is faster than that.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "allocator/offload/disk_file.h"
#include "allocator/offload/offloaded_memory.h"
#include "base/clock.h"
#include "disagg/instance/cluster.h"
#include "experiments/bench/harness.h"
#include "experiments/stats.h"
#include "experiments/tally.h"

namespace xpyd::experiments {
namespace {

constexpr int kPrompt = 1024;

std::vector<int32_t> prompt_of(int seed, int n) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(seed * 100'003 + i);
  return tokens;
}

// A memory whose offload tiers hold one prompt that its pool no longer has.
struct Swap {
  Swap(const char* scheme, KvOrder order, KvShape shape) : tokens(prompt_of(1, kPrompt + 1)) {
    KvOptions o;
    o.shape = shape;
    o.order = order;
    o.prefix_cache = false;
    o.max_sequence_tokens = 2 * kPrompt;
    o.vattention.max_sequences = 2;
    o.pool_bytes = size_t(2 * kPrompt) * shape.token_bytes();
    o.vattention.page_group_bytes = size_t(2) << 20;
    o.tiers.host_bytes = o.pool_bytes;
    auto pool = make_block_pool(scheme, o).value();
    auto tiers = OffloadTiers::create(shape, o.tiers, cpu_device(), {}).value();
    kv = std::make_unique<OffloadedMemory>(find_kv_scheme(scheme)->make(pool, o), std::move(tiers), cpu_device(),
                                           clock);
    const KvHandle handle = kv->reserve(tokens, 0).value().handle;
    XPYD_CHECK(kv->append(handle, kPrompt + 1));
    each_row(handle, [](uint64_t* row, uint64_t pattern) { *row = pattern; });
    kv->commit(handle, tokens);
    kv->free(handle);
    kv->drain();
  }
  template <class F>
  void each_row(KvHandle handle, F&& f) {
    const KvView view = kv->view(handle);
    for (int t = 0; t < kPrompt; ++t)
      for (int layer = 0; layer < kv->layout().shape.n_layers; ++layer)
        for (int k = 0; k < 2; ++k)
          f(reinterpret_cast<uint64_t*>(view.row(layer, k, t, 0)), uint64_t(t) << 32 | uint64_t(layer * 2 + k));
  }
  KvHandle in() {
    const KvReservation r = kv->reserve(tokens, 0).value();
    XPYD_CHECK(r.loading && r.cached_tokens == kPrompt);
    while (!kv->ready(r.handle)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    XPYD_CHECK(kv->written_tokens(r.handle) == kPrompt);
    return r.handle;
  }
  std::string check() {
    const KvHandle handle = in();
    bool right = true;
    each_row(handle, [&](uint64_t* row, uint64_t pattern) { right &= *row == pattern; });
    kv->free(handle);
    return right ? "" : "the KV that was swapped in differs from the KV that was swapped out";
  }
  std::vector<int32_t> tokens;
  RealClock clock;
  std::unique_ptr<OffloadedMemory> kv;
};

void bench_swap_in(Bench& bench) {
  const KvShape shape{.n_layers = 32, .n_kv_heads = 8, .head_dim = 128, .dtype = Dtype::bf16};
  std::vector<std::unique_ptr<Swap>> swaps;
  std::vector<BenchCase> cases;
  auto add = [&](const char* scheme, KvOrder order, double target) {
    auto swap = std::make_unique<Swap>(scheme, order, shape);
    const int64_t before = swap->kv->stats().tiers.copies_in;
    swap->kv->free(swap->in());
    const int64_t pieces = swap->kv->stats().tiers.copies_in - before;
    cases.push_back({.name = std::string("1024 tokens of an 8B into ") + scheme +
                             (order == KvOrder::token_major ? " token_major, " : " layer_major, ") +
                             std::to_string(pieces) + " pieces",
                     .n_threads = 1,
                     .run = [s = swap.get()] { s->kv->free(s->in()); },
                     .check = [s = swap.get()] { return s->check(); },
                     .work = {.bytes = double(kPrompt) * double(shape.token_bytes())},
                     .limit = Limit::copy,
                     .target = target});
    swaps.push_back(std::move(swap));
  };
  add("paged", KvOrder::token_major, 0.85);
  add("vattention", KvOrder::token_major, 0.85);
  add("paged", KvOrder::layer_major, 0);
  bench.measure(cases);
}

// The same prompts with and without offload tiers, in turn. No prompt is ever found again.
void bench_swap_out(Bench& bench) {
  const std::string dir = "experiments/models/llama-mini";
  Result<ModelConfig> config = load_model_config(dir);
  if (!config) {
    std::printf("not run: the folder %s is missing or not a model\n", dir.c_str());
    return;
  }
  constexpr int kTokens = 512, kOutput = 32, kRequests = 4;
  for (const int threads : {1, bench.max_threads()}) {
    if (threads == bench.max_threads() && threads == 1) break;
    ThreadTeam& team = bench.team(threads);
    auto weights = load_weights(dir, config.value(), {.dummy = true}, team).value();
    RealClock clock;
    std::unique_ptr<Cluster> clusters[2];
    for (int on = 0; on < 2; ++on) {
      ClusterOptions o;
      o.topology = {Role::colocated};
      o.kv_scheme = find_kv_scheme("paged");
      o.kv.shape = kv_shape(config.value(), Dtype::f32);
      o.kv.pool_bytes = size_t(8 * (kTokens + kOutput)) * o.kv.shape.token_bytes();
      if (on) o.kv.tiers.host_bytes = 2 * o.kv.pool_bytes;
      o.batching = find_batch_policy("chunked");
      o.placement = find_placement_policy("least_loaded");
      o.transport = find_transport("local");
      o.max_batch = 8;
      o.step_tokens = 256;
      o.max_model_len = 2 * kTokens;
      o.make_model = [&](int, DeviceQueue&) {
        return Result<std::unique_ptr<Model>>(make_llama(weights, team, 256, 8));
      };
      clusters[on] = Cluster::create(std::move(o), clock).value();
    }
    uint64_t id = 0;
    auto run = [&](int on) {
      auto sink = std::make_shared<experiments::Tally>();
      for (int i = 0; i < kRequests; ++i) {
        auto request = std::make_shared<Request>();
        request->id = ++id;
        for (int t = 0; t < kTokens; ++t) request->prompt.push_back(int32_t((id * 7919 + uint64_t(t) * 31) % 1000));
        request->max_tokens = kOutput;
        request->ignore_eos = true;
        XPYD_CHECK(clusters[on]->submit(request, sink).ok());
      }
      const double start = clock.now();
      while (sink->ended < kRequests) clusters[on]->turn();
      const double seconds = clock.now() - start;
      while (clusters[on]->turn()) {
      }
      return seconds;
    };
    std::vector<double> ratios, seconds;
    const int rounds = 2 * bench.options().rounds;
    for (int round = -1; round < rounds; ++round) {
      double taken[2];
      for (int turn = 0; turn < 2; ++turn) {
        const int on = (turn + round + 1) % 2;
        taken[on] = run(on);
      }
      if (round < 0) continue;
      ratios.push_back(taken[0] / taken[1]);
      seconds.push_back(taken[1]);
    }
    const OffloadStats out = clusters[1]->instances()[0]->memory().stats().tiers;
    std::printf("swapped out: %.1f MB per run; %ld copies and %ld dropped blocks in all runs\n",
                double(out.bytes_out) / 1e6 / (rounds + 1), long(out.copies_out), long(out.dropped_out));
    std::sort(ratios.begin(), ratios.end());
    bench.report({.name = "4 prompts of 512, 32 tokens each, llama-mini: with swap-out",
                  .n_threads = threads,
                  .rounds = rounds,
                  .seconds = summarize(seconds).median,
                  .measure = "x without",
                  .share = percentile(ratios, 50),
                  .share_p10 = percentile(ratios, 10),
                  .share_p90 = percentile(ratios, 90),
                  .target = 0.98});
  }
}

// One pass of a disk file over all its blocks; returns seconds.
struct DiskPass {
  static constexpr size_t kBlock = size_t{2} << 20;  // 16 tokens of an 8B model
  static constexpr int kBlocks = 256;
  DiskPass() {
    for (int i = 0; i < DiskFile::kDepth; ++i)
      for (size_t at = 0; at < kBlock; at += sizeof(uint64_t)) {
        const uint64_t word = (uint64_t(i) << 32 | at) * 0x9e3779b97f4a7c15u;
        std::memcpy(memory.get() + size_t(i) * kBlock + at, &word, sizeof word);
      }
  }
  double run(bool write) {
    std::vector<DiskFile::Done> done;
    std::vector<int> buffers;  // [block in flight]
    for (int i = DiskFile::kDepth; i-- > 0;) buffers.push_back(i);
    std::vector<int> buffer_of(kBlocks);
    const double start = clock.now();
    for (int next = 0, ended = 0; ended < kBlocks;) {
      while (next < kBlocks && !buffers.empty()) {
        buffer_of[size_t(next)] = buffers.back();
        buffers.pop_back();
        std::byte* at = memory.get() + size_t(buffer_of[size_t(next)]) * kBlock;
        write ? file->write(next, at, next) : file->read(next, at, sums[size_t(next)], next);
        ++next;
      }
      done.clear();
      file->take(done);
      for (const DiskFile::Done& d : done) {
        XPYD_CHECK(d.outcome == DiskFile::Outcome::done);
        if (write) sums[size_t(d.id)] = d.checksum;
        buffers.push_back(buffer_of[size_t(d.id)]);
      }
      ended += int(done.size());
      if (done.empty()) clock.sleep(20e-6);
    }
    return clock.now() - start;
  }
  RealClock clock;
  std::shared_ptr<std::byte> memory = cpu_device().allocate_host(DiskFile::kDepth * kBlock).value();
  std::vector<uint64_t> sums = std::vector<uint64_t>(kBlocks);
  std::unique_ptr<DiskFile> file;
};

// GB/s reported by fio; 0 if fio is missing or failed.
double fio(const std::string& path, bool write) {
  const std::string way = write ? "write" : "read";
  const std::string command = "fio --name=xpyd --filename=" + path + " --rw=" + way +
                              " --bs=2M --size=512M --iodepth=" + std::to_string(DiskFile::kDepth) +
                              " --ioengine=io_uring --direct=1 --output-format=json 2>/dev/null";
  std::string said;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return 0;
  char part[4096];
  for (size_t n; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) said.append(part, n);
  const bool ran = pclose(pipe) == 0;
  const std::string name = "\"bw_bytes\" : ";
  const size_t at = said.find(name, said.find("\"" + way + "\" :"));
  return ran && at != said.npos ? std::atof(said.c_str() + at + name.size()) / 1e9 : 0;
}

// Uses the folder $BENCH_DISK, or build/.
void bench_disk(Bench& bench) {
  const char* named = std::getenv("BENCH_DISK");
  const std::string dir = named ? named : "build";
  DiskPass pass;
  auto file = DiskFile::open(dir, DiskPass::kBlock, DiskPass::kBlocks);
  if (!file) {
    std::printf("not run: %s\n", file.error().message.c_str());
    return;
  }
  pass.file = std::move(file).value();
  const std::string others = dir + "/xpyd-fio-" + std::to_string(getpid());
  const double gb = double(DiskPass::kBlock) * DiskPass::kBlocks / 1e9;
  for (const bool write : {true, false}) {  // once each, untimed, so that extents are written
    pass.run(write);
    fio(others, write);
  }
  for (const bool write : {true, false}) {
    std::vector<double> ratios, seconds, others_gbps;
    for (int round = 0; round < bench.options().rounds; ++round) {
      double its = round % 2 ? fio(others, write) : 0;
      seconds.push_back(pass.run(write));
      if (round % 2 == 0) its = fio(others, write);
      others_gbps.push_back(its);
      ratios.push_back(its > 0 ? gb / seconds.back() / its : 0);
    }
    std::sort(ratios.begin(), ratios.end());
    const double taken = summarize(seconds).median;
    std::printf("fio: %.2f GB/s\n", summarize(others_gbps).median);
    bench.report({.name = std::string(write ? "write" : "read") + " 256 blocks of 2 MiB, 32 under way, O_DIRECT",
                  .n_threads = 1,
                  .rounds = bench.options().rounds,
                  .seconds = taken,
                  .gbps = gb / taken,
                  .measure = "x fio (0: none here)",
                  .share = percentile(ratios, 50),
                  .share_p10 = percentile(ratios, 10),
                  .share_p90 = percentile(ratios, 90),
                  .target = 0.85});
  }
  ::unlink(others.c_str());
}

REGISTER_BENCH("disk", bench_disk);
REGISTER_BENCH("swap_in", bench_swap_in);
REGISTER_BENCH("swap_out", bench_swap_out);

}  // namespace
}  // namespace xpyd::experiments
