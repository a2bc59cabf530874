#include "base/version.h"

#include <time.h>
#include <unistd.h>

#include <fstream>

#ifndef XPYD_COMMIT
#define XPYD_COMMIT "unknown"
#endif
#ifndef XPYD_BUILD_MODE
#define XPYD_BUILD_MODE "unknown"
#endif

namespace xpyd {

const char* version() { return "0.1.0"; }
const char* commit() { return XPYD_COMMIT; }
const char* build_mode() { return XPYD_BUILD_MODE; }

std::string machine() {
  std::string name = "unknown CPU", line;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    size_t colon = line.find(": ");
    if (colon != line.npos) name = line.substr(colon + 2);
    break;
  }
  long cores = sysconf(_SC_NPROCESSORS_ONLN);  // not the affinity: the caller may be pinned
  return name + ", " + std::to_string(cores) + (cores == 1 ? " core" : " cores");
}

std::string utc_date() {
  time_t now = time(nullptr);
  tm parts;
  gmtime_r(&now, &parts);
  char text[32];
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::map<std::string, std::string> provenance() {
  return {{"version", version()},
          {"commit", commit()},
          {"build", build_mode()},
          {"machine", machine()},
          {"date", utc_date()}};
}

}  // namespace xpyd
