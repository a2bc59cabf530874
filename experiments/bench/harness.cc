#include "experiments/bench/harness.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/clock.h"
#include "base/json/json.h"
#include "base/version.h"
#include "experiments/stats.h"

namespace xpyd::experiments {
namespace {

std::map<std::string, BenchGroup>& registry() {
  static std::map<std::string, BenchGroup> groups;  // filled before main, read afterwards
  return groups;
}

// The first line of a file of /proc, or "unknown" if the kernel has no such file.
std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

// Seconds of cpu time since boot: of the whole machine, kept by the hypervisor (steal), and used by other processes.
struct CpuSeconds {
  double all = 0, steal = 0, others = 0;
};
CpuSeconds cpu_seconds() {
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  const std::string line = first_line("/proc/stat");
  XPYD_CHECK(std::sscanf(line.c_str(), "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &iowait,
                         &irq, &softirq, &steal) == 8,
             line);
  rusage own;
  XPYD_CHECK(getrusage(RUSAGE_SELF, &own) == 0);
  const double ticks = double(sysconf(_SC_CLK_TCK)), used = (user + nice + system + irq + softirq) / ticks;
  auto seconds = [](const timeval& t) { return double(t.tv_sec) + double(t.tv_usec) * 1e-6; };
  return {used + (idle + iowait + steal) / ticks, steal / ticks, used - seconds(own.ru_utime) - seconds(own.ru_stime)};
}

double at(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  return percentile(values, p);
}

// Seconds of one repetition, as the mean over `repetitions`.
double sample(const BenchCase& c, int repetitions) {
  RealClock clock;
  double start = clock.now();
  for (int i = 0; i < repetitions; ++i) c.run();
  return (clock.now() - start) / repetitions;
}

std::string measure_name(const BenchCase& c) {
  if (!c.versus.empty()) {
    if (c.versus.size() > 2) return "x best of " + std::to_string(c.versus.size()) + " others";
    std::string text = "x " + c.versus[0];
    if (c.versus.size() == 2) text = "x best of " + c.versus[0] + ", " + c.versus[1];
    return text;
  }
  switch (c.limit) {
    case Limit::fma: return "of FMA peak";
    case Limit::bf16_dot: return "of bf16 dot peak";
    case Limit::read: return "of read bandwidth";
    case Limit::copy: return "of copy bandwidth";
    case Limit::roofline: return "of roofline";
    case Limit::none: return "";
  }
  return "";
}

// The least time that this round's peaks allow.
double bound_seconds(const BenchCase& c, const PeakRow& peak) {
  double fma = c.work.flops / (peak.fma_gflops * 1e9), read = c.work.bytes / (peak.read_gbps * 1e9);
  switch (c.limit) {
    case Limit::fma: return fma;
    case Limit::bf16_dot: return c.work.flops / (peak.bf16_dot_gflops * 1e9);
    case Limit::read: return read;
    case Limit::copy: return c.work.bytes / (peak.copy_gbps * 1e9);
    case Limit::roofline: return std::max(fma, read);
    case Limit::none: return 0;
  }
  return 0;
}

bool built_with_checks() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
  return true;
#else
  return false;
#endif
}

}  // namespace

struct Bench::State {
  std::vector<int> cpus = usable_cpus();
  std::string machine = xpyd::machine();  // before the calling thread is pinned
  cpu_set_t affinity;                     // of the calling thread, restored at the end
  std::map<int, std::unique_ptr<ThreadTeam>> teams;
  std::unique_ptr<PeakProbe> probe;
};

Bench::Bench(BenchOptions options) : options_(std::move(options)), state_(std::make_unique<State>()) {
  XPYD_CHECK(sched_getaffinity(0, sizeof state_->affinity, &state_->affinity) == 0);
  if (options_.n_threads <= 0) options_.n_threads = int(state_->cpus.size());
}
Bench::~Bench() {
  // A team restores the caller's affinity that it found, which may be the affinity for another team.
  state_->teams.clear();
  sched_setaffinity(0, sizeof state_->affinity, &state_->affinity);
}

int Bench::max_threads() const { return options_.n_threads; }

const std::vector<int>& Bench::cpus() const { return state_->cpus; }

ThreadTeam& Bench::team(int n_threads) {
  auto& team = state_->teams[n_threads];
  if (!team) {
    bool room = n_threads <= int(state_->cpus.size());
    team = std::make_unique<ThreadTeam>(n_threads, room ? state_->cpus : std::vector<int>());
  }
  return *team;
}

void Bench::print_conditions() const {
  std::printf("%s | xpyd %s, commit %s, %s build, %s | load %s | %s\n", machine().c_str(), version(), commit(),
              build_mode(), PeakProbe::isa(), first_line("/proc/loadavg").c_str(), utc_date().c_str());
  std::printf("CPU pressure: %s\n", first_line("/proc/pressure/cpu").c_str());
  if (built_with_checks())
    std::printf(
        "WARNING: built with sanitizers or without optimisation. These times do not show the speed of a release "
        "build.\n");
}

void Bench::measure(const std::vector<BenchCase>& cases, int rounds) {
  if (rounds == 0) rounds = options_.rounds;
  std::vector<const BenchCase*> good;
  for (const BenchCase& c : cases) {
    std::string wrong = c.check ? c.check() : "this case has no check";
    if (wrong.empty()) {
      good.push_back(&c);
    } else {
      ++wrong_results_;
      std::printf("%-44s NOT TIMED, the result is wrong: %s\n", c.name.c_str(), wrong.c_str());
    }
  }
  if (good.empty()) return;
  std::set<int> thread_counts;
  bool uses_copy = false, uses_dot = false;
  for (const BenchCase* c : good) {
    thread_counts.insert(c->n_threads);
    uses_copy |= c->limit == Limit::copy;
    uses_dot |= c->limit == Limit::bf16_dot;
  }
  if (!state_->probe) state_->probe = std::make_unique<PeakProbe>();

  const size_t n = good.size();
  std::vector<int> repetitions(n);
  std::map<std::pair<std::string, int>, size_t> index;
  for (size_t i = 0; i < n; ++i) {  // the warm-up round determines the repetitions
    double once = sample(*good[i], 1);
    repetitions[i] = std::clamp(int(options_.sample_ms * 1e-3 / std::max(once, 1e-9)), 1, 1'000'000);
    index[{good[i]->name, good[i]->n_threads}] = i;
  }
  std::vector<std::vector<double>> seconds(n), shares(n);
  std::vector<double> reads, now(n);
  double steal = 0, others = 0;
  int set_aside = 0;
  bool cut = false;
  RealClock clock;
  const double end_s = options_.row_s > 0 ? clock.now() + options_.row_s * double(n) : HUGE_VAL;
  auto settle = [this] { usleep(useconds_t(options_.settle_ms * 1e3)); };
  for (int round = 0; round < rounds + set_aside && set_aside <= rounds; ++round) {
    if (cut = round >= kLeastRounds && clock.now() >= end_s; cut) break;
    const CpuSeconds before = cpu_seconds();
    std::map<int, PeakRow> peaks;
    settle();
    for (int t : thread_counts) {
      PeakProbe& probe = *state_->probe;
      peaks[t] = {t, probe.fma_gflops(team(t)), probe.read_gbps(team(t)), uses_copy ? probe.copy_gbps(team(t)) : 0,
                  uses_dot ? probe.bf16_dot_gflops(team(t)) : 0};
    }
    for (size_t step = 0; step < n; ++step) {
      size_t i = (step + size_t(round)) % n;
      settle();
      now[i] = sample(*good[i], repetitions[i]);
    }
    const CpuSeconds after = cpu_seconds();
    const double all = std::max(after.all - before.all, 1e-9);
    const double stolen = (after.steal - before.steal) / all,
                 used = std::max(0.0, (after.others - before.others) / all);
    if (stolen + used > options_.max_taken) {
      ++set_aside;
      continue;
    }
    steal += stolen, others += used;
    reads.push_back(peaks.rbegin()->second.read_gbps);
    for (size_t i = 0; i < n; ++i) {
      const BenchCase& c = *good[i];
      seconds[i].push_back(now[i]);
      double bound = bound_seconds(c, peaks[c.n_threads]);
      if (!c.versus.empty()) {
        bound = HUGE_VAL;
        for (const std::string& name : c.versus)
          if (auto other = index.find({name, c.n_threads}); other != index.end())
            bound = std::min(bound, now[other->second]);
        if (bound == HUGE_VAL) continue;
      }
      shares[i].push_back(bound / now[i]);
    }
  }
  const double counted = double(reads.size());
  if (options_.max_taken < 1 && counted > 0)
    std::printf(
        "%d rounds: steal %.1f %%, other processes %.1f %%; %d more rounds do not count, because together they used "
        "over %.0f %% of the CPUs\n",
        int(counted), 100 * steal / counted, 100 * others / counted, set_aside, 100 * options_.max_taken);
  if (reads.empty()) {
    std::printf("%-44s NOT TIMED: steal and other processes used over %.0f %% of the CPUs in all %d rounds\n",
                good[0]->name.c_str(), 100 * options_.max_taken, set_aside);
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const BenchCase& c = *good[i];
    double typical = at(seconds[i], 50);
    BenchRow row{.name = c.name,
                 .n_threads = c.n_threads,
                 .rounds = int(counted),
                 .seconds = typical,
                 .gflops = c.work.flops / typical * 1e-9,
                 .gbps = c.work.bytes / typical * 1e-9,
                 .measure = measure_name(c),
                 .share = at(shares[i], 50),
                 .share_p10 = at(shares[i], 10),
                 .share_p90 = at(shares[i], 90),
                 .target = c.target,
                 .taken = (steal + others) / counted,
                 .set_aside = set_aside,
                 .cut = cut};
    report(row);
  }
  if (double spread = at(reads, 90) / at(reads, 10); spread > 1.4)
    std::printf("WARNING: the read bandwidth varied by %.2fx (p90/p10) during these rounds. Do not quote the times.\n",
                spread);
  std::fflush(stdout);
}

void Bench::report(BenchRow row) {
  row.group = group_;
  row.met = row.target <= 0 || row.share >= row.target;
  std::printf("%-44s %dT ", row.name.c_str(), row.n_threads);
  if (row.seconds > 0) std::printf("%10.1f us ", row.seconds * 1e6);
  if (row.gflops > 0) std::printf("%8.1f GFLOP/s ", row.gflops);
  if (row.gbps > 0) std::printf("%7.1f GB/s  ", row.gbps);
  if (!row.measure.empty() && row.share > 0)
    std::printf("%.3f [%.3f %.3f] %s", row.share, row.share_p10, row.share_p90, row.measure.c_str());
  if (row.target > 0) std::printf("  target %.2f %s", row.target, row.met ? "met" : "MISSED");
  if (row.cut) std::printf("  cut after %d rounds", row.rounds + row.set_aside);
  std::printf("\n");
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

void Bench::write_files() const {
  if (!options_.json.empty()) {
    nlohmann::json out;
    for (auto& [key, value] : provenance()) out[key] = value;
    out["machine"] = state_->machine;
    out["isa"] = PeakProbe::isa();
    out["load"] = first_line("/proc/loadavg");
    out["checks_on"] = built_with_checks();
    out["rows"] = nlohmann::json::array();
    for (const BenchRow& r : rows_)
      out["rows"].push_back({{"group", r.group},
                             {"name", r.name},
                             {"n_threads", r.n_threads},
                             {"rounds", r.rounds},
                             {"seconds", r.seconds},
                             {"gflops", r.gflops},
                             {"gbps", r.gbps},
                             {"measure", r.measure},
                             {"share", r.share},
                             {"share_p10", r.share_p10},
                             {"share_p90", r.share_p90},
                             {"target", r.target},
                             {"met", r.met},
                             {"taken", r.taken},
                             {"set_aside", r.set_aside},
                             {"cut", r.cut}});
    std::ofstream(options_.json) << json_text(out, 1) << "\n";
  }
  if (!options_.csv.empty()) {
    std::ofstream out(options_.csv);
    for (auto& [key, value] : provenance())
      out << "# " << key << ": " << (key == "machine" ? state_->machine : value) << "\n";
    out << "group,name,n_threads,rounds,seconds,gflops,gbps,measure,share,share_p10,share_p90,"
           "target,met,taken,set_aside,cut\n";
    for (const BenchRow& r : rows_)
      out << r.group << ",\"" << r.name << "\"," << r.n_threads << "," << r.rounds << "," << r.seconds << ","
          << r.gflops << "," << r.gbps << ",\"" << r.measure << "\"," << r.share << "," << r.share_p10 << ","
          << r.share_p90 << "," << r.target << "," << (r.met ? 1 : 0) << "," << r.taken << "," << r.set_aside << ","
          << (r.cut ? 1 : 0) << "\n";
  }
}

int Bench::run_registered() {
  print_conditions();
  for (auto& [name, group] : registry()) {
    if (!options_.groups.empty() && std::count(options_.groups.begin(), options_.groups.end(), name) == 0) continue;
    std::printf("\n%s\n", name.c_str());
    group_ = name;
    group(*this);
  }
  write_files();
  int missed = 0, targets = 0;
  for (const BenchRow& r : rows_) targets += r.target > 0, missed += !r.met;
  std::printf("\n%d rows, %d of %d targets met%s\n", int(rows_.size()), targets - missed, targets,
              wrong_results_ ? ", WRONG RESULTS" : "");
  return exit_code();
}

static std::string usage() {
  std::string names;
  for (auto& name : registered_benches()) names += " " + name;
  return "expected [GROUP...] [--rounds N] [--threads N] [--sample-ms X] [--json FILE] [--csv FILE]; "
         "the groups are" +
         names;
}

double iperf3_gbps() {
  const int port = 20000 + int(getpid() % 20000);
  const std::string text = std::to_string(port);
  const std::string command = "timeout 10 iperf3 -s -1 -p " + text + " >/dev/null 2>&1 & " +
                              "for i in 1 2 3 4 5 6 7 8 9 10; do iperf3 -c 127.0.0.1 -p " + text +
                              " -l 1M -t 1 -J 2>/dev/null && break; sleep 0.05; done; wait";
  FILE* pipe = popen(command.c_str(), "r");
  std::string out;
  char buffer[4096];
  for (size_t n; pipe && (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
  if (pipe) pclose(pipe);
  const size_t begin = out.rfind("\n{", out.size());
  const auto json = nlohmann::json::parse(begin == out.npos ? out : out.substr(begin), nullptr,
                                          /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("end") || !json["end"].contains("sum_received")) return 0;
  return json["end"]["sum_received"].value("bits_per_second", 0.0) / 8e9;
}

Result<BenchOptions> parse_bench_options(int argc, char** argv) {
  BenchOptions options;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg.rfind("--", 0) != 0) {
      if (!registry().count(arg)) {
        return invalid("no bench group named " + arg + "; " + usage());
      }
      options.groups.push_back(arg);
      continue;
    }
    if (arg == "--help") return invalid(usage());
    if (i + 1 == argc) return invalid(arg + " needs a value; " + usage());
    std::string value = argv[++i];
    char* end = nullptr;
    double number = std::strtod(value.c_str(), &end);
    bool is_number = end != value.c_str() && *end == 0;
    auto in = [&](double low, double high) { return is_number && number >= low && number <= high; };
    if (arg == "--json")
      options.json = value;
    else if (arg == "--csv")
      options.csv = value;
    else if (arg == "--rounds" && in(1, 10000))
      options.rounds = int(number);
    else if (arg == "--threads" && in(1, 1024))
      options.n_threads = int(number);
    else if (arg == "--sample-ms" && in(0.001, 60000))
      options.sample_ms = number;
    else
      return invalid(arg + " " + value + ": " + usage());
  }
  return options;
}

bool register_bench(const char* name, BenchGroup group) {
  registry()[name] = group;
  return true;
}

std::vector<std::string> registered_benches() {
  std::vector<std::string> names;
  for (auto& [name, group] : registry()) names.push_back(name);
  return names;
}

}  // namespace xpyd::experiments
