// xpyd peak: what this machine can do, measured now; other runs read the figures from the cache it
// leaves.
#include <sched.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/peak.h"
#include "server/commands.h"
#include "server/result_file.h"

namespace xpyd {
namespace {

std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

int fail(const Error& error, int code) {
  std::fprintf(stderr, "xpyd: peak: %s\n", error.message.c_str());
  return code;
}

}  // namespace

int peak_main(const Options& options) {
  const std::string& json_path = options.text("json");
  if (Status status = check_writable(json_path); !status) return fail(status.error(), 2);
  std::vector<int> cpus = usable_cpus();
  int threads = int(options.integer("threads"));
  if (threads == 0) threads = cpus.empty() ? 1 : int(cpus.size());
  if (threads > int(cpus.size()) && !cpus.empty())
    return fail(
        invalid("--threads: this machine has " + std::to_string(cpus.size()) + " usable cores"), 2);
  if (!cpus.empty()) cpus.resize(size_t(threads));
  ThreadTeam team(threads, cpus);
  std::remove(peak_cache_path().c_str());  // cached_peak then measures and keeps
  Peak peak = cached_peak(team);
  std::printf("%s", to_text(peak).c_str());
  if (json_path.empty()) return 0;
  nlohmann::json out = nlohmann::json::parse(to_json(peak));
  out["run"] = run_header(options);
  Status status = write_json(json_path, out);
  return status ? 0 : fail(status.error(), 1);
}

}  // namespace xpyd
