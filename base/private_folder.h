// A new folder of this user's alone under $TMPDIR (or /tmp), gone with its owner: for sockets and
// keys.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

namespace xpyd {

class PrivateFolder {
 public:
  PrivateFolder() {
    const char* base = getenv("TMPDIR");
    path_ = std::string(base && *base ? base : "/tmp") + "/xpyd-XXXXXX";  // mkdtemp's own form
    if (!mkdtemp(path_.data())) path_.clear();
  }
  ~PrivateFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }  // empty: it could not be made

 private:
  std::string path_;
};

}  // namespace xpyd
