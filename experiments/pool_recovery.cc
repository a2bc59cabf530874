// pool_recovery: how long until answers come again when a host of the pool is cut off or dies, when links halve, when
// the conductor's host dies, and when the conductor loses sight of etcd.
//
// tests/netns/run, which says how: four hosts as network namespaces on a switch of tc's cables, the demo model on 3P2D
// (one P with its stages on two hosts) with two conductors and etcd, started by the commands of the README; five
// clients, each answer compared with an undisturbed instance's. Two rounds, of cables of 100 Mbit/s and of 1 Gbit/s; a
// sample is a round. It needs root, iproute2 and etcd; where it cannot run, the error says why.
//
// Arithmetic. A host that falls silent is missed when its lease has run out, 3 s, looked at every eighth of that; what
// it was working on is then computed elsewhere, in 0.2 to 1 s: 3 to 4.5 s for the unluckiest answer. A host that comes
// back joins in a dial (up to 1 s) and the start of a process (some tenths; both stages of the P on two hosts): 0.3
// to 3. Half the rate: an answer is a few KB and its KV some 100 KB, 10 ms at 100 Mbit/s: no more than a queue behind
// others', 0 to 1.5. A conductor's lease in etcd is 5 s, looked at every second or so; its workers notice in 2 s more
// that nobody is there: 5 to 9. One that is cut off from etcd goes on with its workers until it sees that another was
// elected, and drains: 0.3 to 3.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "experiments/experiment.h"

namespace xpyd::experiments::pool_recovery_experiment {
namespace {

std::vector<Values> points(const Setting& setting) {
  if (setting.tiny) return {};  // hosts die no faster for a test
  return {{{"rounds", 2}}};
}

Result<Finding> run(const Values& point) {
  std::error_code none;
  const auto bin = std::filesystem::read_symlink("/proc/self/exe", none).parent_path() / "xpyd";
  const std::string command = "PATH=$PWD/build/etcd/usr/bin:$PATH tests/netns/run '" + bin.string() +
                              "' --json --rounds " + point["rounds"].dump() + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return Error{ErrorCode::io, command + ": it did not start"};
  std::string out, last;
  for (std::array<char, 4096> part; size_t n = std::fread(part.data(), 1, part.size(), pipe);)
    out.append(part.data(), n);
  const int status = pclose(pipe);
  Finding found;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("{"))
      found.rows.push_back(Values::parse(line));
    else
      last = line;
  if (status != 0 || found.rows.empty()) return Error{ErrorCode::unavailable, "tests/netns/run: " + last};
  return found;
}

Measure open(const Setting&) {
  return [](const Values& point) { return run(point); };
}

REGISTER_EXPERIMENT("pool_recovery", "cpu", points, open);

}  // namespace
}  // namespace xpyd::experiments::pool_recovery_experiment
