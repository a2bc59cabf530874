// What --huge-pages is worth: the same steps of the 1-billion-parameter Llama (random weights, bf16) over weights, KV
// and scratch in pages of 4 KiB and of 2 MiB, taking turns.
//
// Expected: a decode step streams 2.47 GB once. That is 603,000 pages of 4 KiB, each of which the TLB misses once; a
// walk whose tables are in L2 is 20 to 30 ns, and the next page's is under way while this one is read, so of 75 ms
// between none and a fifth; with 2 MiB it is 1,200 walks. A prompt uses each weight for 512 rows, and does not see it.
#include <map>

#include "experiments/bench/harness.h"
#include "experiments/bench/model_case.h"

namespace xpyd::experiments {
namespace {

constexpr int kTokens = 512, kManySequences = 8;

void bench_pages(Bench& bench) {
  const int all = bench.max_threads();
  const std::pair<const char*, HugePages> rows[] = {{"off", HugePages::off}, {"transparent", HugePages::transparent}};
  std::map<std::string, ModelCase> models;
  for (auto& [name, pages] : rows) {
    use_huge_pages(pages);
    models.try_emplace(name, llama_1b({.dtype = Dtype::bf16, .dummy = true}, bench.team(all)), bench.team(all), kTokens,
                       kManySequences, kTokens, Dtype::bf16);
  }
  use_huge_pages(HugePages::transparent);
  for (const auto& [what, batch, n] :
       {std::tuple{"decode batch 1", 1, 1}, {"decode batch 8", kManySequences, 1}, {"prefill 512", 1, kTokens}}) {
    std::vector<BenchCase> cases;
    for (auto& [name, pages] : rows) {
      ModelCase& model = models.at(name);
      const auto set = [&model, batch = batch, n = n] { model.set(batch, n, kTokens); };
      set();
      cases.push_back({.name = std::string("--huge-pages ") + name + ", " + what,
                       .n_threads = all,
                       .run = [&model] { model.run(); },
                       .check =
                           [&model, set] {
                             std::string wrong = model.check();
                             set();
                             return wrong;
                           },
                       .work = model.work(),
                       .limit = Limit::none,
                       .versus = cases.empty() ? std::vector<std::string>() : std::vector{cases[0].name}});
    }
    bench.measure(cases, n == 1 ? 0 : std::max(3, bench.options().rounds / 5));
  }
}

REGISTER_BENCH("pages", bench_pages);

}  // namespace
}  // namespace xpyd::experiments
