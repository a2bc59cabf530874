// What this program may take away, cut short or replace: nothing that is not its own.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "allocator/disk_file.h"
#include "base/clock.h"
#include "base/files.h"
#include "base/peak.h"
#include "disagg/net/address.h"
#include "disagg/net/channel.h"
#include "tests/catch.h"

namespace xpyd::testing::stranger_files_test {
namespace {

void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

Result<int> listen_unix(const std::string& path) {
  return listen_at(parse_control_address("unix:" + path).value(), nullptr);
}

bool answers(const std::string& path) {
  Result<int> fd = connect_to(parse_control_address("unix:" + path).value());
  if (fd) close(fd.value());
  return fd.ok();
}

TEST_CASE("files: a control address that names a file, a link, a pipe or a folder takes nothing away",
          "[issues][files]") {
  TempDir dir;
  const std::string file = dir.path + "/f", link = dir.path + "/l", dangling = dir.path + "/d", pipe = dir.path + "/p",
                    folder = dir.path + "/o";
  put(file, "what is not ours");
  std::filesystem::create_symlink("f", link);
  std::filesystem::create_symlink("nowhere", dangling);
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::filesystem::create_directory(folder);
  for (const std::string& path : {file, link, dangling, pipe, folder}) {
    INFO(path);
    Result<int> fd = listen_unix(path);
    CHECK_FALSE(fd.ok());
    if (fd) close(fd.value());
  }
  CHECK(text_of(file) == "what is not ours");
  CHECK(std::filesystem::is_symlink(link));
  CHECK(std::filesystem::is_symlink(dangling));
  CHECK(std::filesystem::is_fifo(pipe));
  CHECK(std::filesystem::is_directory(folder));
  CHECK_FALSE(std::filesystem::exists(dir.path + "/nowhere"));
}

TEST_CASE("files: a socket whose process died is replaced, one that lives is not", "[issues][files]") {
  TempDir dir;
  const std::string path = dir.path + "/s";
  Result<int> first = listen_unix(path);
  REQUIRE(first.ok());
  CHECK_FALSE(listen_unix(path).ok());
  CHECK(answers(path));
  // Full of clients that nobody accepts: connect() says EAGAIN, and the socket is alive.
  std::vector<int> clients;
  for (int i = 0; i < 300; ++i)
    if (Result<int> c = connect_to(parse_control_address("unix:" + path).value()); c) clients.push_back(c.value());
  CHECK(clients.size() < 300);
  CHECK_FALSE(listen_unix(path).ok());
  for (int c : clients) close(c);
  close(first.value());  // as death closes it: the name stays
  CHECK_FALSE(answers(path));
  Result<int> second = listen_unix(path);
  REQUIRE(second.ok());
  CHECK(answers(path));
  close_listener(second.value(), "unix:" + path);
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("files: another user's socket stays, though nobody answers there", "[issues][files]") {
  if (geteuid() != 0) SKIP_TEST("only root can make a file of another user");
  TempDir dir;
  const std::string path = dir.path + "/s";
  Result<int> first = listen_unix(path);
  REQUIRE(first.ok());
  close(first.value());
  REQUIRE(chown(path.c_str(), 12345, 12345) == 0);
  CHECK_FALSE(listen_unix(path).ok());
  CHECK(std::filesystem::is_socket(path));
}

// One takes the dead socket away and listens; the other, who has found it dead too, must not take away the new one.
TEST_CASE("files: of many who find a dead socket one listens, and is not robbed of its name", "[issues][files]") {
  TempDir dir;
  for (int round = 0; round < 100; ++round) {
    const std::string path = dir.path + "/s" + std::to_string(round);
    Result<int> dead = listen_unix(path);
    REQUIRE(dead.ok());
    close(dead.value());
    std::atomic<int> ready{0}, listening{0};
    std::vector<int> fds(4, -1);
    std::vector<std::thread> threads;
    for (int& fd : fds)
      threads.emplace_back([&path, &ready, &listening, &fd] {
        ++ready;
        while (ready < 4) std::this_thread::yield();
        if (Result<int> got = listen_unix(path); got) fd = got.value(), ++listening;
      });
    for (std::thread& thread : threads) thread.join();
    REQUIRE(listening == 1);
    CHECK(answers(path));
    for (int fd : fds)
      if (fd >= 0) close(fd);
  }
}

TEST_CASE("files: a control loop's socket goes with it, and what has its name since then stays", "[issues][files]") {
  TempDir dir;
  RealClock clock;
  const std::string path = dir.path + "/s", address = "unix:" + path;
  const NodeIdentity self{NodeRole::conductor, "me", 1, 1};
  auto nobody = [](ChannelPtr) { return ChannelEvents{}; };
  {
    ControlLoop loop(clock);
    REQUIRE(loop.listen({address, {}, self}, nobody).ok());
    CHECK(std::filesystem::is_socket(path));
  }
  CHECK_FALSE(std::filesystem::exists(path));
  {
    ControlLoop loop(clock);
    REQUIRE(loop.listen({address, {}, self}, nobody).ok());
    std::filesystem::remove(path);
    put(path, "somebody else's");
  }
  CHECK(text_of(path) == "somebody else's");
}

TEST_CASE("files: a result takes the place of its file and of no other", "[issues][files]") {
  TempDir dir;
  const std::string path = dir.path + "/r.json", pipe = dir.path + "/p", link = dir.path + "/l";
  put(path, "old");
  put(path + ".part", "a file of the user's");
  CHECK(check_replaceable(path).ok());
  CHECK(text_of(path) == "old");
  CHECK(text_of(path + ".part") == "a file of the user's");
  CHECK(replace_file(path, "new").ok());
  CHECK(text_of(path) == "new");
  CHECK(text_of(path + ".part") == "a file of the user's");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);  // as root it could be /dev/null
  CHECK_FALSE(check_replaceable(pipe).ok());
  CHECK_FALSE(replace_file(pipe, "new").ok());
  CHECK(std::filesystem::is_fifo(pipe));
  CHECK_FALSE(replace_file(dir.path, "new").ok());
  std::filesystem::create_symlink("r.json", link);  // to another's file: not written through
  CHECK(replace_file(link, "newer").ok());
  CHECK(text_of(path) == "new");
  CHECK(text_of(link) == "newer");
  CHECK_FALSE(check_replaceable(dir.path + "/nowhere/r.json").ok());
  size_t n = 0;
  for ([[maybe_unused]] auto& entry : std::filesystem::directory_iterator(dir.path)) ++n;
  CHECK(n == 4);
}

TEST_CASE("files: what is no measured peak of ours is not replaced by one", "[issues][files]") {
  TempDir dir;
  const char* kept = std::getenv("XDG_CACHE_HOME");
  const std::string before = kept ? kept : "";
  setenv("XDG_CACHE_HOME", std::filesystem::absolute(dir.path).c_str(), 1);
  std::filesystem::create_directory(dir.path + "/xpyd");
  const std::string path = peak_cache_path();
  put(path, "{\"a user's\": 1}");
  ThreadTeam team(1);
  CHECK(cached_peak(team).one.n_threads == 1);
  CHECK(cached_peak(team, true).one.n_threads == 1);
  CHECK(text_of(path) == "{\"a user's\": 1}");
  kept ? setenv("XDG_CACHE_HOME", before.c_str(), 1) : unsetenv("XDG_CACHE_HOME");
}

// Without a free descriptor the kernel says EMFILE before it looks whether the name is taken.
TEST_CASE("files: a disk tier out of descriptors removes no file of its name", "[issues][files]") {
  TempDir dir;
  constexpr int kNames = 2000;  // more than this program has opened
  const std::string stem = dir.path + "/xpyd-kv-" + std::to_string(getpid()) + "-";
  for (int i = 0; i < kNames; ++i) put(stem + std::to_string(i), "");
  rlimit limit;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none = {3, limit.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const bool opened = DiskFile::open(dir.path, 4096, 1).ok();
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK_FALSE(opened);
  CHECK_FALSE(DiskFile::open(dir.path, 4096, 1).ok());  // EEXIST
  for (int i = 0; i < kNames; ++i)
    if (!std::filesystem::exists(stem + std::to_string(i))) FAIL("removed: " << i);
}

}  // namespace
}  // namespace xpyd::testing::stranger_files_test
