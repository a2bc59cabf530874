// Arrival times of a load's requests, decided by a seed. The distributions are our own, because those of the standard
// library differ between implementations.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/random.h"

namespace xpyd {

// Returns a seed derived from a seed and a number.
inline uint64_t mix_seed(uint64_t a, uint64_t b) { return Random(a * 0x9e3779b97f4a7c15u + b).next(); }

// A normal sample with mean 0 and variance 1 (Box-Muller).
inline double normal_sample(Random& random) {
  double radius = std::sqrt(2 * random.exponential());
  return radius * std::cos(2 * M_PI * random.uniform());
}

// A gamma sample with scale 1: Marsaglia & Tsang (2000) for shape >= 1, and Gamma(shape + 1) * U^(1 / shape) below 1.
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

// Returns the arrival times in seconds of n requests at `rate` per second. If `rate` is inf, all are 0. If `fixed`,
// request i arrives at i / rate. Otherwise gaps follow a gamma distribution of shape `burstiness` (1 = Poisson) and are
// scaled so that the last arrival is exactly n / rate, as in vLLM's client. So the noise of a finite sample does not
// change the rate.
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
