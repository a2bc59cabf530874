// xpyd peak: what this machine can do, measured now; other runs read the figures from the cache it leaves.
#include <sched.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/json.h"
#include "base/peak.h"
#include "server/backend.h"
#include "server/commands.h"

namespace xpyd::server {
namespace {

std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

// A device's own figures.
Result<nlohmann::json> peak_of_device(const DeviceRow& device) {
  Result<DevicePeak> peak = device.peak();
  if (!peak) return peak.error();
  std::printf("%s\n", peak.value().device.c_str());
  nlohmann::json out = {{"machine", peak.value().device}, {"figures", nlohmann::json::array()}};
  for (const PeakFigure& figure : peak.value().figures) {
    std::printf("%-40s %10.2f %s\n", figure.name, figure.value, figure.unit);
    out["figures"].push_back({{"name", figure.name}, {"value", figure.value}, {"unit", figure.unit}});
  }
  return out;
}

Result<nlohmann::json> peak_of_host(int threads) {
  std::vector<int> cpus = usable_cpus();
  if (threads == 0) threads = cpus.empty() ? 1 : int(cpus.size());
  if (threads > int(cpus.size()) && !cpus.empty())
    return invalid("--threads: this machine has " + std::to_string(cpus.size()) + " usable cores");
  if (!cpus.empty()) cpus.resize(size_t(threads));
  ThreadTeam team(threads, cpus);
  const Peak peak = cached_peak(team, true);
  std::printf("%s", to_text(peak).c_str());
  return parse_json(to_json(peak), "peak");
}

}  // namespace

int peak_main(const Options& options) {
  if (Status status = check_result_file(options); !status) return fail(": peak", status.error(), 2);
  const DeviceRow& device = *find_device(options.text("device"));
  Result<nlohmann::json> out = device.peak ? peak_of_device(device) : peak_of_host(int(options.integer("threads")));
  if (!out) return fail(": peak", out.error());
  const Status status = write_result_file(options, std::move(out).value());
  return status ? 0 : fail(": peak", status.error(), 1);
}

}  // namespace xpyd::server
