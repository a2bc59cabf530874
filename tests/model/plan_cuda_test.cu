// Tests how a decode step is cut for the GPU. The plan sets the size of the grid, the copy and the workspace.
#include <numeric>
#include <vector>

#include "model/cuda/plan_cuda.h"
#include "tests/catch.h"

namespace xpyd::testing {
namespace {

constexpr int kBlock = 16;
const KvLayout kLayout{{32, 8, 128, Dtype::bf16}, KvOrder::layer_major, kBlock, 1 << 20};

// One-token sequences of these lengths. Entry i of sequence s's block table is 10000 s + i.
struct Decodes {
  explicit Decodes(std::vector<int> of) : lengths(std::move(of)) {
    for (size_t s = 0; s < lengths.size(); ++s) {
      tables.emplace_back(size_t(lengths[s] + kBlock - 1) / kBlock);
      std::iota(tables[s].begin(), tables[s].end(), int32_t(10000 * s));
      ids.push_back(int32_t(s));
      offsets.push_back(int32_t(s) + 1);
    }
    for (const auto& table : tables) views.push_back({nullptr, &kLayout, table.data(), 0});
  }
  StepInput input() const { return {ids, offsets, lengths, views, ids, nullptr}; }
  std::vector<int> lengths;
  std::vector<int32_t> ids, offsets = {0};
  std::vector<std::vector<int32_t>> tables;
  std::vector<KvView> views;
};

struct Planner {
  explicit Planner(int max_seqs, int window = 0) {
    options.max_step_tokens = options.max_logits = options.max_seqs = max_seqs;
    options.max_kv_length = 131072;
    options.max_table_entries = options.max_kv_length / kBlock;
    const size_t ints = StepPlanner::max_ints(options);
    // Device memory of the interpreter or of a GPU.
    memory = cuda::Memory::device(ints * sizeof(int32_t)).value();
    planner.allocate(options, window, memory.as<int32_t>(), ints);
    planner.begin();
  }
  template <class T>
  std::vector<T> read(const T* from, int n) {
    cuda::Memory host = cuda::Memory::pinned(std::max<size_t>(1, size_t(n)) * sizeof(T));
    cuda::copy(host.data(), from, size_t(n) * sizeof(T), stream);
    stream.wait();
    return {host.as<T>(), host.as<T>() + n};
  }
  // Each sequence of these parts, in order, must have its own length and its own table, and each split that it sees
  // exactly once.
  void check(const std::vector<CudaStep>& parts, const Decodes& all, int window) {
    planner.copy(stream);
    size_t s = 0;
    for (const CudaStep& part : parts) {
      const auto offsets = read(part.q_offsets, part.n_seqs + 1), lengths = read(part.kv_lengths, part.n_seqs),
                 tables = read(part.table_begins, part.n_seqs), listed = read(part.split_begins, part.n_seqs);
      const auto splits = read(part.splits, part.n_splits);
      CHECK(part.n_splits <= StepPlanner::max_splits(options));
      int next = 0;
      for (int i = 0; i < part.n_seqs && s < all.lengths.size(); ++i, ++s) {
        REQUIRE(lengths[size_t(i)] == all.lengths[s]);
        CHECK(offsets[size_t(i)] == i);
        CHECK(read(part.block_tables + tables[size_t(i)], int(all.tables[s].size())) == all.tables[s]);
        CHECK(listed[size_t(i)] == next);
        const int seen = window ? std::max(0, all.lengths[s] - window) : 0;
        for (int split = seen / 512; split * 512 < all.lengths[s]; ++split, ++next) {
          REQUIRE(next < part.n_splits);
          CHECK(splits[size_t(next)].seq == i);
          CHECK(splits[size_t(next)].split == split);
        }
      }
      for (; next < part.n_splits; ++next) CHECK(splits[size_t(next)].seq == -1);
    }
    CHECK(s == all.lengths.size());
  }
  CudaModelOptions options;
  cuda::Stream stream;
  cuda::Memory memory;
  StepPlanner planner;
};

// 255 sequences of 1,000 tokens and one of 131,072 need 766 splits. Padding all to the longest once launched 256 x 256
// for each KV head, copied 2 M table entries and took 1.1 GB of workspace.
std::vector<int> one_long() {
  std::vector<int> lengths(256, 1000);
  lengths[100] = 131072;
  return lengths;
}

}  // namespace

TEST_CASE("cuda plan: one long sequence does not pad the others to its length", "[cuda][model]") {
  const Decodes step(one_long());
  Planner p(256);
  const std::optional<Plan> plan = p.planner.plan_padded(step.input(), 256);
  REQUIRE(plan);
  CHECK(plan->all.n_splits == 1024);  // 255 x 2 + 256, and padding
  CHECK(p.planner.bytes() <= 160 * 1024);
  CHECK(4 * cuda_attention_workspace(StepPlanner::max_splits(p.options), 32, 128) < 70 << 20);
  p.check(plan->parts.decode, step, 0);

  Planner exact(256);
  const Plan other = exact.planner.plan(step.input(), true);
  REQUIRE(other.parts.decode.size() == 1);
  CHECK(other.parts.decode[0].n_splits == 766);
  CHECK(exact.planner.bytes() <= 130 * 1024);
  exact.check(other.parts.decode, step, 0);
}

TEST_CASE("cuda plan: more splits than the workspace holds become several parts", "[cuda][model]") {
  Planner p(40);
  const Decodes step(std::vector<int>(40, 131072));  // 10,240 splits
  CHECK_FALSE(p.planner.plan_padded(step.input(), 40));
  p.planner.begin();
  const Plan plan = p.planner.plan(step.input(), true);
  REQUIRE(plan.parts.decode.size() == 3);
  CHECK(plan.parts.decode[0].n_seqs == 16);
  CHECK(plan.parts.decode[2].n_seqs == 8);
  p.check(plan.parts.decode, step, 0);
}

TEST_CASE("cuda plan: splits that no query sees are not listed", "[cuda][model]") {
  for (int window : {1, 512, 4096, 5000}) {
    const Decodes step({131072, 513, 4097, 4, 40000, 9215, 9216, 9217});
    Planner padded(8, window), exact(8, window);
    const std::optional<Plan> plan = padded.planner.plan_padded(step.input(), 8);
    REQUIRE(plan);
    CHECK(plan->all.n_splits <= 8 * (window / 512 + 2));
    padded.check(plan->parts.decode, step, window);
    const Plan other = exact.planner.plan(step.input(), true);
    exact.check(other.parts.decode, step, window);
  }
}

}  // namespace xpyd::testing
