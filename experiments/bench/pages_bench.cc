// The gain of --huge-pages: the same steps of the 1-billion-parameter Llama (random weights, bf16) in turn over
// weights, KV and scratch in pages of 4 KiB and of 2 MiB.
//
// Expected: a decode step reads 2.47 GB once, in 603,000 pages of 4 KiB. The TLB misses once for each. A page walk with
// its tables in L2 takes 20 to 30 ns, but the next page's walk overlaps with reading this page. So the walks cost
// between none and a fifth of the 75 ms. With 2 MiB there are 1,200 walks. A prompt uses each weight for 512 rows, so
// it gains nothing.
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
      const auto set = [&model, sequences = batch, tokens = n] { model.set(sequences, tokens, kTokens); };
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
