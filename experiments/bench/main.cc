// xpyd_bench [names...] runs the named groups of benchmarks, or all.
#include <cstdio>

#include "experiments/bench/harness.h"

int main(int argc, char** argv) {
  auto options = xpyd::experiments::parse_bench_options(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "xpyd_bench: %s\n", options.error().message.c_str());
    return 2;
  }
  return xpyd::experiments::Bench(options.value()).run_registered();
}
