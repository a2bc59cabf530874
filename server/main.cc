// The program: finds the subcommand in a table, checks and prints its options, and runs it. Exit codes: 0 done, 1 it
// ran and failed, 2 misuse, 128 + N: signal N ended it before it served.
#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include "base/cpu.h"
#include "base/log.h"
#include "base/table.h"
#include "base/version.h"
#include "experiments/subcommands.h"
#include "server/build.h"
#include "server/cli/commands.h"

namespace xpyd::server {
namespace {

struct Subcommand {
  const char* name;
  int (*run)(const Options& options);
  const char* positional;  // "[MODEL_DIR]" or ""
  const char* summary;
};

constexpr Subcommand kSubcommands[] = {
    {"tour", tour_main, "", "show one prompt through prefill and decode, a step at a time"},
    {"serve", serve_main, "[MODEL_DIR]", "serve a model over HTTP"},
    {"worker", worker_main, "[MODEL_DIR]", "run one instance in its own process and join a server elsewhere"},
    {"generate", generate_main, "[MODEL_DIR]", "continue one prompt; the text goes to stdout"},
    {"bench", bench_main, "", "put load on a server and measure latency and throughput"},
    {"peak", peak_main, "", "measure the peak rates of this machine, to which results are compared"},
    {"info", info_main, "[MODEL_DIR]", "print a model's shape and the memory that it needs"},
    {"prefix-stats", prefix_stats_main, "FILE", "measure how much the prompts of a file share prefixes"},
    {"simulate", simulate_main, "FILE", "serve a trace by a simulated cluster in virtual time"},
    {"replay", replay_main, "FILE...", "repeat the decisions of an event log; exit code 1 if one differs"},
    {"trace", trace_main, "FILE...", "convert an event log to a Chrome trace, for ui.perfetto.dev"},
    {"calibrate", calibrate_main, "FILE...", "print the cost model fitted to an event log, for simulate --hardware"},
    {"explain", explain_main, "FILE...", "show where requests of an event log spent their time"},
    {"export", export_main, "DIR", "write the built-in demo model as a folder"},
};

bool takes_model(const Subcommand& subcommand) { return subcommand.positional == std::string("[MODEL_DIR]"); }

const Subcommand* find_subcommand(const std::string& name) { return find_row(kSubcommands, name); }

std::string overview() {
  std::string text = "usage: xpyd SUBCOMMAND [OPTIONS]\n\n";
  for (const Subcommand& subcommand : kSubcommands) {
    std::string usage = std::string("  ") + subcommand.name + " " + subcommand.positional;
    usage.resize(26, ' ');
    text += usage + subcommand.summary + "\n";
  }
  text +=
      "\n  help [SUBCOMMAND]       print the options of a subcommand\n  "
      "--version               print the version of this program\n";
  text += "\n  Each option can also be set in the environment: XPYD_KV_BYTES sets --kv-bytes. The command line wins.\n";
  return text;
}

std::string manual(const Subcommand& subcommand) {
  std::string positional = *subcommand.positional ? std::string(" ") + subcommand.positional : "";
  return std::string("usage: xpyd ") + subcommand.name + positional + " [OPTIONS]\n" + subcommand.summary + "\n" +
         (takes_model(subcommand) ? "without MODEL_DIR, the built-in demo model is used\n\n" : "\n") +
         options_manual(all_options(), subcommand.name);
}

int misuse(const std::string& message, const std::string& hint) {
  std::fprintf(stderr, "xpyd: %s\n%s\n", message.c_str(), hint.c_str());
  return 2;
}

int unknown_subcommand(const std::string& name) {
  return misuse("unknown subcommand '" + name + "'", "`xpyd help` lists all subcommands");
}

int help(const std::vector<std::string>& arguments) {
  if (arguments.size() > 1) return misuse("help: unexpected argument '" + arguments[1] + "'", "`xpyd help SUBCOMMAND`");
  std::string text = overview();
  if (!arguments.empty()) {
    const Subcommand* subcommand = find_subcommand(arguments[0]);
    if (!subcommand) return unknown_subcommand(arguments[0]);
    text = manual(*subcommand);
  }
  std::fputs(text.c_str(), stdout);
  return 0;
}

int run(const std::vector<std::string>& words) {
  if (words.empty()) {
    std::fputs(overview().c_str(), stderr);
    return 2;
  }
  std::string name = words[0];
  std::vector<std::string> arguments(words.begin() + 1, words.end());
  if (name == "help" || name == "--help" || name == "-h") return help(arguments);
  if (name == "--version") {
    if (!arguments.empty()) return misuse("--version: unexpected argument '" + arguments[0] + "'", "`xpyd --version`");
    std::printf("xpyd %s (%s, commit %s)\n", version(), build_mode(), commit());
    return 0;
  }
  const Subcommand* subcommand = find_subcommand(name);
  if (!subcommand) return unknown_subcommand(name);
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    if (argument == "--help" || argument == "-h") return help({name});
    if (argument == "--version") return run({argument});
  }

  const bool serves = subcommand->run == serve_main || subcommand->run == worker_main;
  const std::string positional = subcommand->positional;
  const int max_positional = positional.ends_with("...") ? INT_MAX : positional.empty() ? 0 : 1;
  auto options = Options::parse(all_options(), name, arguments, max_positional);
  Status status = options ? check_options(options.value(), name) : Status(options.error());
  if (!status) return misuse(name + ": " + status.error().message, "`xpyd help " + name + "` lists all options");
  std::string subject = takes_model(*subcommand)               ? model_dir(options.value())
                        : options.value().positional().empty() ? ""
                                                               : options.value().positional()[0];
  std::string text = std::string("xpyd ") + version() + " (" + build_mode() + ", commit " + commit() + "): " + name +
                     " " + subject + "\n" + options.value().table(serves);
  // A reader of the output that stops or goes away must neither end nor delay the process.
  if (serves || subcommand->run == generate_main) std::signal(SIGPIPE, SIG_IGN);
  if (const IsaRow* isa = cpu_kernels(options.value())) limit_isa(isa->needs);
  if (serves) {
    set_log_level(log_level(options.value().text("log-level")));
    say(text);
  } else {
    std::fputs(text.c_str(), stderr);
  }
  try {
    return subcommand->run(options.value());
  } catch (const Error& error) {
    return fail((" " + name).c_str(), error);
  }
}

// Ends the process with a message when a thread other than main's runs out of memory. A bug still dumps core.
[[noreturn]] void end_of_thread() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    std::fprintf(stderr, "xpyd: %s\n", error.message.c_str());
    std::_Exit(1);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "xpyd: the process is out of memory\n");
    std::_Exit(1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "xpyd: %s\n", error.what());
  } catch (...) {
  }
  std::abort();
}

}  // namespace
}  // namespace xpyd::server

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond ulimit -f becomes a failed write with a message
  std::set_terminate(xpyd::server::end_of_thread);
  try {
    const std::vector<std::string> words(argv + 1, argv + argc);
    int code = xpyd::server::run(words);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
      std::fprintf(stderr, "xpyd: stdout: %s\n", std::strerror(errno));
      code = std::max(code, 1);
    }
    return code;
  } catch (const std::system_error& error) {
    std::fprintf(stderr, "xpyd: cannot start a thread: %s\n", error.what());
    return 1;
  } catch (const std::exception& error) {  // out of memory, or a bug: our code throws none on purpose
    std::fprintf(stderr, "xpyd: %s\n", error.what());
    return 1;
  }
}
