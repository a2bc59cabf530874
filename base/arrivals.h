// When requests of a load arrive, by seed. Our own distributions, because the standard library's differ between
// implementations.
//
// Thread safety: plain functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/random.h"

namespace xpyd {

// Another seed, which a seed and a number decide.
inline uint64_t mix_seed(uint64_t a, uint64_t b) { return Random(a * 0x9e3779b97f4a7c15u + b).next(); }

// Mean 0, variance 1 (Box-Muller).
inline double normal_sample(Random& random) {
  double radius = std::sqrt(2 * random.exponential());
  return radius * std::cos(2 * M_PI * random.uniform());
}

// Scale 1. Marsaglia & Tsang (2000) for shape >= 1; below 1 by Gamma(shape + 1) * U^(1 / shape).
inline double gamma_sample(Random& random, double shape) {
  if (shape == 1) return random.exponential();
  if (shape < 1) {
    double u = 1 - random.uniform();
    return gamma_sample(random, shape + 1) * std::pow(u, 1 / shape);
  }
  double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    double x = normal_sample(random);
    double v = 1 + c * x;
    if (v <= 0) continue;
    v = v * v * v;
    double u = 1 - random.uniform();
    if (std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

// Arrival times in seconds of n requests at `rate` per second; inf: all 0. Fixed: i / rate. Otherwise gaps of a gamma
// distribution of that shape (1 = Poisson), scaled so that the last arrival is exactly n / rate, as vLLM's client does:
// it takes the noise of a finite sample out of the rate.
inline std::vector<double> arrival_times(int n, double rate, bool fixed, double burstiness, uint64_t seed) {
  std::vector<double> times(size_t(n), 0.0);
  if (std::isinf(rate)) return times;
  if (fixed) {
    for (int i = 0; i < n; ++i) times[size_t(i)] = i / rate;
    return times;
  }
  Random random(mix_seed(seed, 5));
  double t = 0;
  for (double& time : times) time = t += gamma_sample(random, burstiness);
  for (double& time : times) time *= n / rate / t;
  return times;
}

}  // namespace xpyd
