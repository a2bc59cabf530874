// A new folder of this user's alone under $TMPDIR (or /tmp), gone with its owner, with the files in
// it: for sockets and keys.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace xpyd {

class PrivateFolder {
 public:
  PrivateFolder() {
    const char* base = getenv("TMPDIR");
    path_ = std::string(base && *base ? base : "/tmp") + "/xpyd-XXXXXX";  // mkdtemp's own form
    const bool made = mkdtemp(path_.data());
    // Kept, so that nothing stays behind where there is no descriptor left at the end.
    if (made) folder_ = opendir(path_.c_str());
    if (folder_) return;
    const int why = errno;
    if (made) rmdir(path_.c_str());
    errno = why;
    path_.clear();
  }
  ~PrivateFolder() {
    if (!folder_) return;
    rewinddir(folder_);
    while (const dirent* entry = readdir(folder_)) unlinkat(dirfd(folder_), entry->d_name, 0);
    closedir(folder_);
    rmdir(path_.c_str());
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }  // empty: it could not be made

 private:
  std::string path_;
  DIR* folder_ = nullptr;
};

}  // namespace xpyd
