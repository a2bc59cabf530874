// An event log in a folder of its own, and its readings.
#pragma once

#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "disagg/conductor/event_log.h"
#include "experiments/event_log/replay.h"
#include "experiments/event_log/trace_view.h"
#include "tests/catch.h"

namespace xpyd::testing {

struct Logged {
  TempDir folder;
  const std::string path = folder.path + "/log";
  std::shared_ptr<EventLog> log = EventLog::create(path, "{}").value();  // the file is whole once this is null

  std::vector<std::string> lines() const {
    std::ifstream file(path);
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }
  void write(const std::vector<std::string>& all) const {
    std::ofstream file(path);
    for (const std::string& line : all) file << line << "\n";
  }
  std::vector<RequestTrace> traces() const {
    auto read = read_traces({&path, 1});
    REQUIRE(read.ok());
    return std::move(read).value();
  }
  Result<std::map<std::string, Replayed>> try_replay(const ReplayOptions& options = {}) {
    differences.clear();
    return replay({&path, 1}, options, [this](const std::string& line, const std::string& now) {
      differences.push_back(line + "\nnow " + now);
    });
  }
  // Replays the log. Without another policy every decision must be the same.
  std::map<std::string, Replayed> replayed(const ReplayOptions& options = {}) {
    auto counts = try_replay(options);
    INFO((counts ? "" : counts.error().message));
    REQUIRE(counts.ok());
    if (options.instead.empty()) CHECK(differences == std::vector<std::string>());
    return std::move(counts).value();
  }
  std::vector<std::string> differences;
};

}  // namespace xpyd::testing
