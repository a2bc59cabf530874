#include "base/peak/peak.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/clock.h"
#include "base/json/json.h"
#include "base/peak/peak_kernels.h"
#include "base/version.h"

namespace xpyd {
namespace {

double portable_fma(long iterations, float* sink) {
  constexpr int kChains = 48;
  float sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = float(i);
  for (long n = 0; n < iterations; ++n)
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * 0.5f + 1.0f;
  for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
  *sink = sums[0];
  return double(iterations) * kChains * 2;
}

void portable_read(const std::byte* p, size_t bytes, float* sink) {
  uint64_t sums[kPeakRows] = {};
  for (const std::byte* end = p + bytes; p < end; p += kPeakRows * kPeakRowBytes)
    for (size_t i = 0; i < kPeakRowBytes; i += sizeof(uint64_t))
      for (int r = 0; r < kPeakRows; ++r)
        sums[r] ^= *reinterpret_cast<const uint64_t*>(p + size_t(r) * kPeakRowBytes + i);
  for (int r = 1; r < kPeakRows; ++r) sums[0] ^= sums[r];
  *sink = float(sums[0]);
}

void portable_copy(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }

const PeakKernels& kernels() {
#if defined(__x86_64__)
  static const PeakKernels rows[] = {kAvx512Peak, kAvx2Peak, kPortablePeak};
#else
  static const PeakKernels rows[] = {kPortablePeak};
#endif
  static const PeakKernels& best = best_row(rows);
  return best;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Seconds of one run of `body` on the team.
template <class Body>
double timed(ThreadTeam& team, Body body) {
  RealClock clock;
  double start = clock.now();
  team.run(body);
  return clock.now() - start;
}

// machine() without the number of cores.
std::string processor() {
  std::string name = machine();
  return name.substr(0, name.rfind(','));
}

nlohmann::json row_json(const PeakRow& row) {
  return {{"n_threads", row.n_threads}, {"fma_gflops", row.fma_gflops},           {"read_gbps", row.read_gbps},
          {"copy_gbps", row.copy_gbps}, {"bf16_dot_gflops", row.bf16_dot_gflops}, {"int8_dot_gops", row.int8_dot_gops}};
}

using InRegisters = double (*)(long iterations, float* sink);
InRegisters dot([[maybe_unused]] Isa isa) {  // null if this processor has none
#if defined(__x86_64__)
  if (cpu_has(isa)) return isa == Isa::avx512_bf16 ? bf16_dot_peak : int8_dot_peak;
#endif
  return nullptr;
}

// 10^9 operations a second; 0 for a null function.
double giga_operations(ThreadTeam& team, InRegisters run) {
  if (!run) return 0;
  std::vector<double> operations(size_t(team.size()), 0);
  std::vector<float> sinks(size_t(team.size()) * 16, 0);
  double best = 0;
  // It uses registers only, so only other processes make it slower: the best of four is the machine's rate.
  for (int attempt = 0; attempt < 4; ++attempt) {
    double seconds = timed(team,
                           [&](int rank) { operations[size_t(rank)] = run(1'000'000, &sinks[size_t(rank) * 16]); });
    double total = 0;
    for (double o : operations) total += o;
    best = std::max(best, total / seconds * 1e-9);
  }
  return best;
}

std::string or_none(double figure) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", figure);
  return figure > 0 ? text : "-";
}

}  // namespace

const PeakKernels kPortablePeak = {Isa::portable, portable_fma, portable_read, portable_copy};

PeakProbe::PeakProbe(size_t bytes) : buffer_(bytes) {
  // Values that neither memory compression nor a shared zero page can shorten.
  for (size_t i = 0; i < bytes / 8; i += 8) buffer_.as<uint64_t>()[i] = i * 0x9e3779b97f4a7c15u;
}

const char* PeakProbe::isa() { return best_row(kIsas).name; }

double PeakProbe::fma_gflops(ThreadTeam& team) { return giga_operations(team, kernels().fma); }
double PeakProbe::bf16_dot_gflops(ThreadTeam& team) { return giga_operations(team, dot(Isa::avx512_bf16)); }
double PeakProbe::int8_dot_gops(ThreadTeam& team) { return giga_operations(team, dot(Isa::avx512_vnni)); }

double PeakProbe::read_gbps(ThreadTeam& team) {
  constexpr size_t kUnit = kPeakRows * kPeakRowBytes;
  int units = int(buffer_.size() / kUnit);
  std::vector<float> sinks(size_t(team.size()) * 16, 0);
  double seconds = timed(team, [&](int rank) {
    Range mine = share(units, rank, team.size());
    kernels().read(buffer_.data() + size_t(mine.begin) * kUnit, size_t(mine.end - mine.begin) * kUnit,
                   &sinks[size_t(rank) * 16]);
  });
  return double(units) * kUnit / seconds * 1e-9;
}

double PeakProbe::copy_gbps(ThreadTeam& team) {
  constexpr size_t kUnit = 64 << 10;
  int units = int(buffer_.size() / 2 / kUnit);
  double seconds = timed(team, [&](int rank) {
    Range mine = share(units, rank, team.size());
    size_t begin = size_t(mine.begin) * kUnit, bytes = size_t(mine.end - mine.begin) * kUnit;
    std::byte* to = buffer_.data() + size_t(units) * kUnit;
    kernels().copy(to + begin, buffer_.data() + begin, bytes);
  });
  return double(units) * kUnit / seconds * 1e-9;
}

Peak measure_peak(ThreadTeam& team) {
  constexpr int kRounds = 15;
  PeakProbe probe;
  ThreadTeam solo(1);
  std::array<std::array<std::vector<double>, 5>, 2> seen;
  for (int round = -1; round < kRounds; ++round)  // round -1 warms up
    for (int i = 0; i < 2; ++i) {
      ThreadTeam& t = i == 0 ? solo : team;
      double values[5] = {probe.fma_gflops(t), probe.read_gbps(t), probe.copy_gbps(t), probe.bf16_dot_gflops(t),
                          probe.int8_dot_gops(t)};
      for (size_t j = 0; round >= 0 && j < 5; ++j) seen[size_t(i)][j].push_back(values[j]);
    }
  auto row = [&](size_t i, int n) {
    auto& s = seen[i];
    return PeakRow{n, median(s[0]), median(s[1]), median(s[2]), median(s[3]), median(s[4])};
  };
  return {.machine = processor(), .isa = PeakProbe::isa(), .one = row(0, 1), .all = row(1, team.size())};
}

std::string to_text(const Peak& peak) {
  char line[256];
  std::string text = peak.machine + ", " + peak.isa + "\n";
  std::snprintf(line, sizeof line, "%-8s %14s %12s %12s %16s %12s\n", "threads", "FMA GFLOP/s", "read GB/s",
                "copy GB/s", "bf16 dot GFLOP/s", "int8 GOP/s");
  text += line;
  for (const PeakRow* row : {&peak.one, &peak.all}) {
    if (row == &peak.all && row->n_threads == 1) break;
    std::snprintf(line, sizeof line, "%-8d %14.1f %12.1f %12.1f %16s %12s\n", row->n_threads, row->fma_gflops,
                  row->read_gbps, row->copy_gbps, or_none(row->bf16_dot_gflops).c_str(),
                  or_none(row->int8_dot_gops).c_str());
    text += line;
  }
  return text;
}

std::string to_json(const Peak& peak) {
  return json_text(nlohmann::json{
      {"machine", peak.machine}, {"isa", peak.isa}, {"one", row_json(peak.one)}, {"all", row_json(peak.all)}});
}

}  // namespace xpyd
