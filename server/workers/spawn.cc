#include "server/workers/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "server/build.h"

namespace xpyd::server {

Command worker_command(const Options& options, std::span<const std::string_view> without) {
  Command arguments = {"xpyd", "worker"};
  if (!options.positional().empty()) arguments.push_back(options.positional()[0]);
  for (const OptionRow& row : option_table()) {
    const std::string name = row.name;
    if ((" " + std::string(row.group) + " ").find(" worker ") == std::string::npos ||
        std::ranges::find(without, name) != without.end() || !options.values().contains(name) || !options.given(name))
      continue;
    if (row.kind == OptionKind::flag) {
      if (options.flag(name)) arguments.push_back("--" + name);
    } else {
      arguments.insert(arguments.end(), {"--" + name, options.values().at(name)});
    }
  }
  return arguments;
}

Result<pid_t> spawn_self(Command command) {
  std::vector<char*> argv;
  for (std::string& argument : command) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&files, 3);
  sigset_t none, standard;
  sigemptyset(&none);
  sigemptyset(&standard);
  sigaddset(&standard, SIGPIPE);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &standard);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  // The command line holds everything that the child needs. XPYD_CONFIG, for example, names the server's file.
  std::vector<char*> environment;
  for (char** variable = environ; *variable; ++variable)
    if (std::strncmp(*variable, "XPYD_", 5) != 0) environment.push_back(*variable);
  environment.push_back(nullptr);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, "/proc/self/exe", &files, &attributes, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error == 0) return pid;
  return Error{ErrorCode::io, std::string("the process cannot be started: ") + std::strerror(error)};
}

void end_all(std::vector<pid_t>& pids, double seconds, const std::function<void()>& look) {
  constexpr double kLook = 0.01;
  const auto lives = [](pid_t pid) { return pid > 0; };
  for (pid_t pid : pids)
    if (lives(pid)) kill(pid, SIGTERM);
  for (look(); seconds > 0 && std::ranges::any_of(pids, lives); look(), seconds -= kLook) RealClock().sleep(kLook);
  for (pid_t& pid : pids) {
    if (!lives(pid)) continue;
    kill(pid, SIGKILL);
    waitpid(std::exchange(pid, -1), nullptr, 0);
  }
}

}  // namespace xpyd::server
