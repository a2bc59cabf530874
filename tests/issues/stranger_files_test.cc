// This program removes, truncates and replaces no file of others, and leaves no secret behind.

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "disagg/net/address.h"
#include "model/folder.h"
#include "model/text/tokenizer.h"
#include "server/cli/commands.h"
#include "tests/program.h"

namespace xpyd::testing::stranger_files_test {

namespace fs = std::filesystem;

void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

Result<int> listen_unix(const std::string& path) {
  return listen_at(parse_control_address("unix:" + path).value(), nullptr);
}

bool answers(const std::string& path) {
  Result<int> fd = connect_to(parse_control_address("unix:" + path).value());
  if (fd) close(fd.value());
  return fd.ok();
}

TEST_CASE("files: a control address that names a file, a link, a pipe or a folder removes nothing", "[issues][files]") {
  TempDir dir;
  const std::string file = dir.path + "/f", link = dir.path + "/l", dangling = dir.path + "/d", pipe = dir.path + "/p",
                    folder = dir.path + "/o";
  put(file, "what is not ours");
  fs::create_symlink("f", link);
  fs::create_symlink("nowhere", dangling);
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  fs::create_directory(folder);
  for (const std::string& path : {file, link, dangling, pipe, folder}) {
    INFO(path);
    Result<int> fd = listen_unix(path);
    CHECK_FALSE(fd.ok());
    if (fd) close(fd.value());
  }
  CHECK(read_all(file) == "what is not ours");
  CHECK(fs::is_symlink(link));
  CHECK(fs::is_symlink(dangling));
  CHECK(fs::is_fifo(pipe));
  CHECK(fs::is_directory(folder));
  CHECK_FALSE(fs::exists(dir.path + "/nowhere"));
}

TEST_CASE("files: the socket of a dead process is replaced; a live one and a file that has its name since stay",
          "[issues][files]") {
  TempDir dir;
  const std::string path = dir.path + "/s";
  Result<int> first = listen_unix(path);
  REQUIRE(first.ok());
  CHECK_FALSE(listen_unix(path).ok());
  CHECK(answers(path));
  CHECK(fs::status(path).permissions() == fs::perms(0600));  // for its user alone
  // A full backlog makes connect() say EAGAIN, and the socket is alive.
  std::vector<int> clients;
  for (int i = 0; i < 300; ++i)
    if (Result<int> c = connect_to(parse_control_address("unix:" + path).value()); c) clients.push_back(c.value());
  CHECK(clients.size() < 300);
  CHECK_FALSE(listen_unix(path).ok());
  for (int c : clients) close(c);
  close(first.value());  // as the end of a process closes it: the name stays
  CHECK_FALSE(answers(path));
  Result<int> second = listen_unix(path);
  REQUIRE(second.ok());
  CHECK(answers(path));
  close_listener(second.value(), "unix:" + path);
  CHECK_FALSE(fs::exists(path));
  Result<int> third = listen_unix(path);
  REQUIRE(third.ok());
  fs::remove(path);
  put(path, "somebody else's");
  close_listener(third.value(), "unix:" + path);
  CHECK(read_all(path) == "somebody else's");
}

TEST_CASE("files: a result replaces its own file and no other", "[issues][files]") {
  TempDir dir;
  const std::string path = dir.path + "/r.json", pipe = dir.path + "/p", link = dir.path + "/l";
  put(path, "old");
  put(path + ".part", "a file of the user's");
  CHECK(check_replaceable(path).ok());
  CHECK(read_all(path) == "old");
  CHECK(read_all(path + ".part") == "a file of the user's");
  CHECK(replace_file(path, "new").ok());
  CHECK(read_all(path) == "new");
  CHECK(read_all(path + ".part") == "a file of the user's");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);  // for root it could be /dev/null
  CHECK_FALSE(check_replaceable(pipe).ok());
  CHECK_FALSE(replace_file(pipe, "new").ok());
  CHECK(fs::is_fifo(pipe));
  CHECK_FALSE(replace_file(dir.path, "new").ok());
  fs::create_symlink("r.json", link);  // a link to another's file is not written through
  CHECK(replace_file(link, "newer").ok());
  CHECK(read_all(path) == "new");
  CHECK(read_all(link) == "newer");
  CHECK_FALSE(check_replaceable(dir.path + "/nowhere/r.json").ok());
  size_t n = 0;
  for ([[maybe_unused]] auto& entry : fs::directory_iterator(dir.path)) ++n;
  CHECK(n == 4);
}

TEST_CASE("files: a private folder is of its owner alone, and is removed with its files", "[issues][private_folder]") {
  std::string path;
  {
    const PrivateFolder folder;
    path = folder.path();
    REQUIRE(path != "");
    CHECK((fs::status(path).permissions() & fs::perms::mask) == fs::perms::owner_all);
    std::ofstream(path + "/key") << "secret";
  }
  CHECK(!fs::exists(path));
}

TEST_CASE("export: the demo model is written as a folder, and nobody's file is touched", "[export]") {
  TempDir dir;
  const std::string made = dir.path + "/demo";
  REQUIRE(export_demo(made).ok());
  CHECK(check_model_folder(made).ok());
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"})
    CHECK(read_all(made + "/" + name) == *embedded_file(std::string(kDemoModel) + "/" + name));
  CHECK(Tokenizer::load(made).ok());
  CHECK_FALSE(export_demo(made).ok());  // not empty any more
  fs::create_directory(dir.path + "/other");
  std::ofstream(dir.path + "/other/mine") << "x";
  CHECK_FALSE(export_demo(dir.path + "/other").ok());
  std::ofstream(dir.path + "/file") << "x";
  CHECK_FALSE(export_demo(dir.path + "/file").ok());
  CHECK(read_all(dir.path + "/file") == "x");
  CHECK_FALSE(export_demo(dir.path + "/no/such/parent").ok());
}

}  // namespace xpyd::testing::stranger_files_test
