// Files that no reader sees half written, and private folders.
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

// Writes `text` to a new file beside `path` and renames it, so that a reader of `path` sees the old text or the new
// one. It does not flush to the disk (fsync). Error `io`: it cannot, or `path` is not a regular file. A device, pipe or
// socket is never replaced, because others use it.
Status replace_file(const std::string& path, std::string_view text);
// Returns the error that replace_file() would return, before there is a text to write.
Status check_replaceable(const std::string& path);

// A new folder under $TMPDIR (or /tmp) that only this user can read, for sockets and keys. It is removed with its
// owner, files included. If the owner was killed, the next PrivateFolder removes it: it recognises the name, this user,
// the mode 01700 that no other program gives, and that the lock file inside is free.
class PrivateFolder {
 public:
  PrivateFolder() : PrivateFolder(name_one(), 0700, O_CREAT | O_EXCL) {
    if (!path_.empty()) fchmod(dirfd(folder_), 01700);  // from here on the next PrivateFolder may remove it
  }
  ~PrivateFolder() {
    if (!path_.empty()) {
      rewinddir(folder_);
      while (const dirent* entry = readdir(folder_))
        if (entry->d_name != std::string_view("lock")) unlinkat(dirfd(folder_), entry->d_name, 0);
      unlinkat(dirfd(folder_), "lock", 0);  // last: without it no other owner finishes an interrupted removal
      rmdir(path_.c_str());
    }
    if (folder_) closedir(folder_);
    if (lock_ >= 0) close(lock_);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }  // empty if it could not be made; errno says why

 private:
  // Takes over the folder if it has that mode and its lock is free. A new folder without a lock is removed again.
  PrivateFolder(const std::string& path, mode_t mode, int create) {
    if (path.empty()) return;
    const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    // The descriptor is kept, so that removal works when no other can be opened.
    folder_ = fd < 0 ? nullptr : fdopendir(fd);
    if (fd >= 0 && !folder_) {
      const int why = errno;
      close(fd);
      errno = why;
    }
    struct stat about {};
    const bool seen = folder_ && fstat(fd, &about) == 0;
    if (seen) errno = EPERM;  // a file system may keep no owner or mode
    if (seen && about.st_uid == geteuid() &&
        (about.st_mode & 05777) == mode)  // except for a set-group-ID that it inherits
      lock_ = openat(fd, "lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC | create, 0600);
    if (lock_ >= 0 && flock(lock_, LOCK_EX | LOCK_NB) == 0) {
      path_ = path;
    } else if (const int why = errno; create) {
      if (lock_ >= 0) unlinkat(fd, "lock", 0);
      rmdir(path.c_str());
      errno = why;
    }
  }
  // Removes folders that are left over and makes a new one. Returns "" and sets errno if it cannot.
  static std::string name_one() {
    const char* tmp = getenv("TMPDIR");
    const std::string beside = std::string(tmp && *tmp ? tmp : "/tmp") + "/";
    if (DIR* all = opendir(beside.c_str())) {
      while (const dirent* entry = readdir(all))
        if (const std::string name = entry->d_name; name.size() == 11 && name.starts_with("xpyd-"))
          PrivateFolder(beside + name, 01700, 0);
      closedir(all);
    }
    std::string path = beside + "xpyd-XXXXXX";  // the form that mkdtemp requires
    return mkdtemp(path.data()) ? path : "";
  }

  std::string path_;
  DIR* folder_ = nullptr;
  int lock_ = -1;
};

}  // namespace xpyd
