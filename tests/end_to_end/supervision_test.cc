// Tests `xpyd serve --processes` under faults of its workers and of its own start, as a user meets them.
// `make check` runs the slow ones.
#include <sys/socket.h>
#include <sys/un.h>

#include <memory>
#include <optional>

#include "tests/program.h"

namespace xpyd::testing::supervision_test {

namespace fs = std::filesystem;

Words of_processes(Words more) {
  more.push_back("--processes");
  return more;
}

// Listens at a path.
struct Listener {
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  explicit Listener(const std::string& path) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::copy(path.begin(), path.end(), name.sun_path);
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0);
    REQUIRE(listen(fd, 1) == 0);
  }
  ~Listener() { close(fd); }
};

TEST_CASE("serve: a bad or busy --cluster-bind is one line and exit code 2, and leaves nothing behind",
          "[supervision]") {
  NEEDS_PROGRAM();
  TempDir dir;
  const std::string file = fs::absolute(dir.path + "/f").string(), live = fs::absolute(dir.path + "/live").string();
  std::ofstream(file) << "x\n";
  const Listener local(dir.path + "/live");
  for (const std::string& address : Words{"nonsense", "127.0.0.1:99999", "192.0.2.1:7000",
                                          "unix:/" + std::string(200, 'x'), "unix:/nowhere/at/all", "unix:" + file,
                                          "unix:" + live}) {
    INFO(address);
    Server server(of_processes({"--topology", "1C", "--cluster-bind", address}));
    CHECK(server.end() == 2);
    const std::string log = server.log();
    INFO(log);
    CHECK(count(log, "xpyd serve: --cluster-bind: ") == 1);
    CHECK(log.find('\n', log.find("xpyd serve: --cluster-bind: ")) == log.size() - 1);
    CHECK(server.files_left() == 0);
  }
  CHECK(read_all(file) == "x\n");
  CHECK(fs::is_socket(live));
}

std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> all;
  std::error_code gone;
  for (auto& fd : fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", gone))
    if (const std::string what = fs::read_symlink(fd.path(), gone); what.starts_with("socket:")) all.insert(what);
  return all;
}

TEST_CASE("serve: a worker holds no socket of the conductor, whose port is free once it is killed", "[supervision]") {
  NEEDS_PROGRAM();
  Server server(of_processes({"--topology", "1P1D"}));
  const int port = server.port();
  REQUIRE(port > 0);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<Client>(port));
    clients.back()->send(request_text("GET", "/health", ""));
    CHECK(clients.back()->read().status == 200);
  }
  const pid_t before = server.worker("prefill");
  kill(before, SIGKILL);  // the next worker starts while clients are connected
  REQUIRE(until(60, [&] {
    const pid_t now = server.worker("prefill");
    return now > 0 && now != before && get(port, "/health").status == 200;
  }));
  const std::set<std::string> own = sockets_of(server.pid);
  CHECK(own.size() > 20);
  const std::set<pid_t> workers = server.children();
  REQUIRE(workers.size() == 2);
  for (pid_t worker : workers) {
    for (const std::string& held : sockets_of(worker)) CHECK(own.count(held) == 0);
    for (const char* fd : {"/fd/0", "/fd/1"})  // else `serve | tee` would wait for it
      CHECK(fs::read_symlink("/proc/" + std::to_string(worker) + fd) == "/dev/null");
  }
  for (pid_t worker : workers) kill(worker, SIGSTOP);  // so that they stay
  server.end(SIGKILL);
  Server next({"--topology", "1C", "--port", std::to_string(port)});
  CHECK(next.port() == port);
  for (auto& client : clients) CHECK(client->at_end());
  for (pid_t worker : workers) kill(worker, SIGKILL);
}

TEST_CASE("serve: workers that fail at start end the server at once, with their message and exit code",
          "[supervision]") {
  NEEDS_PROGRAM();
  Server server(
      of_processes({"--topology", "1P1D", "--host-kv-bytes", "1MiB", "--disk-kv-dir", "/nowhere/at/all"}));
  CHECK(server.end() == 2);
  const std::string log = server.log();
  INFO(log);
  CHECK(has(log, "xpyd worker: --disk-kv-dir /nowhere/at/all: No such file"));
  CHECK(has(log, "\nxpyd serve: worker "));
  CHECK(count(log, "before all workers served") == 1);
  CHECK(server.files_left() == 0);
}

TEST_CASE("serve: a worker that is killed is restarted, and a retired one is not", "[supervision]") {
  NEEDS_PROGRAM();
  Server server(of_processes({"--topology", "1P1D"}));
  const int port = server.port();
  REQUIRE(port > 0);
  for (const char* role : {"prefill", "decode"}) {
    const pid_t told = server.worker(role);
    kill(told, SIGKILL);
    CHECK(until(60, [&] {
      const pid_t now = server.worker(role);
      return now > 0 && now != told && get(port, "/health").status == 200;
    }));
  }
  CHECK(count(server.log(), "ended: signal 9") == 2);
  // A worker that dies is started again in the role that it was given last.
  const pid_t first = server.worker("prefill");
  CHECK(post(port, "/retire_instance", R"({"name":"P0","role":"decode"})").status == 200);
  REQUIRE(until(60, [&] { return has(get(port, "/stats").body, "\"D1\""); }));
  kill(first, SIGKILL);
  CHECK(until(60, [&] {
    const std::set<pid_t> now = server.children();
    return now.size() == 2 && !now.contains(first) && has(get(port, "/stats").body, "\"D1\"");
  }));
  CHECK(server.worker("prefill") == -1);
  CHECK(post(port, "/retire_instance", R"({"name":"D1"})").status == 200);
  CHECK(server.said("ended: exit code 0\n"));
  CHECK(server.children().size() == 1);
  CHECK(server.end(SIGTERM) == 0);
  CHECK(server.files_left() == 0);
}

TEST_CASE("serve: SIGTERM ends a start at once, from its first instruction", "[supervision]") {
  NEEDS_PROGRAM();
  for (const Words& words : {Words{"--topology", "1P1D"}, of_processes({"--topology", "1P1D"})}) {
    Server server(words);
    CHECK(server.end(SIGTERM) == 128 + SIGTERM);
    CHECK(server.files_left() == 0);
  }
}

TEST_CASE("serve: a signal ends a start at once, even if its workers never join", "[.][slow][supervision]") {
  NEEDS_PROGRAM();
  std::optional<Server> held;
  std::set<pid_t> workers;
  for (int tries = 0; tries < 50; ++tries) {  // workers may be quicker than this test
    held.emplace(of_processes({"--topology", "1P1D", "--kv-bytes", "1GiB"}));  // touching it takes a while
    // Both workers run their own program by now. A worker stopped before its exec() would hold up posix_spawn().
    REQUIRE(until(60, [&] {
      workers = {held->worker("prefill"), held->worker("decode")};
      return workers.size() == 2 && !workers.count(-1);
    }));
    for (pid_t worker : workers) kill(worker, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for messages under way
    if (!has(held->log(), "on http://")) break;
    held.reset();
  }
  REQUIRE(held);
  CHECK(held->end(SIGINT) == 128 + SIGINT);
  for (pid_t worker : workers) CHECK(kill(worker, 0) != 0);
  CHECK(held->files_left() == 0);
}

}  // namespace xpyd::testing::supervision_test
