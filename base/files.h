// Files that nobody sees half written, and folders that nobody else sees.
//
// Thread safety: plain functions; a folder belongs to one thread.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd {

// Written as a whole: beside, under a name of nobody's, then renamed. Whoever reads `path`
// meanwhile sees the old text or the new one. Only a regular file is replaced: renaming over a
// device, a pipe or a socket would take that away from everybody.
Status replace_file(const std::string& path, std::string_view text);
// Its error, found before there is a text.
Status check_replaceable(const std::string& path);

// A new folder of this user's alone under $TMPDIR (or /tmp), gone with its owner, with the files in
// it: for sockets and keys. One whose owner was killed goes when the next one is made: it has our
// name, this user, the mode 01700 that nobody else gives, and its owner's lock, a file, is free.
class PrivateFolder {
 public:
  PrivateFolder() : PrivateFolder(name_one(), 0700, O_CREAT | O_EXCL) {
    if (!path_.empty()) fchmod(dirfd(folder_), 01700);  // from now on it may be found left over
  }
  ~PrivateFolder() {
    if (!path_.empty()) {
      rewinddir(folder_);
      while (const dirent* entry = readdir(folder_))
        if (entry->d_name != std::string_view("lock")) unlinkat(dirfd(folder_), entry->d_name, 0);
      unlinkat(dirfd(folder_), "lock", 0);  // last: without it nobody finishes what is cut short
      rmdir(path_.c_str());
    }
    if (folder_) closedir(folder_);
    if (lock_ >= 0) close(lock_);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }  // empty: it could not be made

 private:
  // Takes over the folder, if it has that mode and nobody else has it; a new one may as well go.
  PrivateFolder(const std::string& path, mode_t mode, int create) {
    if (path.empty()) return;
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    // Kept, so that nothing stays behind where there is no descriptor left at the end.
    folder_ = fd < 0 ? nullptr : fdopendir(fd);
    if (fd >= 0 && !folder_) {
      const int why = errno;
      close(fd);
      errno = why;
    }
    struct stat about {};
    const bool seen = folder_ && fstat(fd, &about) == 0;
    if (seen) errno = EPERM;  // of a file system that keeps no owner or mode
    if (seen && about.st_uid == geteuid() &&
        (about.st_mode & 05777) == mode)  // but for a set-group-ID that it inherits
      lock_ = openat(fd, "lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC | create, 0600);
    if (lock_ >= 0 && flock(lock_, LOCK_EX | LOCK_NB) == 0) {
      path_ = path;
    } else if (const int why = errno; create) {
      if (lock_ >= 0) unlinkat(fd, "lock", 0);
      rmdir(path.c_str());
      errno = why;
    }
  }
  // A new one, after those that are left over are gone. Empty, and errno: it cannot be made.
  static std::string name_one() {
    const char* tmp = getenv("TMPDIR");
    const std::string beside = std::string(tmp && *tmp ? tmp : "/tmp") + "/";
    if (DIR* all = opendir(beside.c_str())) {
      while (const dirent* entry = readdir(all))
        if (const std::string name = entry->d_name; name.size() == 11 && name.starts_with("xpyd-"))
          PrivateFolder(beside + name, 01700, 0);
      closedir(all);
    }
    std::string path = beside + "xpyd-XXXXXX";  // mkdtemp's own form
    return mkdtemp(path.data()) ? path : "";
  }

  std::string path_;
  DIR* folder_ = nullptr;
  int lock_ = -1;
};

}  // namespace xpyd
