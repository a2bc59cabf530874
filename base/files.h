// Files that no reader sees half written, and private folders.
//
// Thread safety: plain functions; a folder belongs to one thread.
#pragma once

#include <stdlib.h>

#include <filesystem>
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
// owner, files included.
class PrivateFolder {
 public:
  PrivateFolder() {
    const char* tmp = getenv("TMPDIR");
    std::string path = std::string(tmp && *tmp ? tmp : "/tmp") + "/xpyd-XXXXXX";
    if (mkdtemp(path.data())) path_ = path;  // its mode is 0700
  }
  ~PrivateFolder() {
    if (path_.empty()) return;
    std::error_code failed;
    std::filesystem::remove_all(path_, failed);
    if (failed) std::filesystem::remove_all(path_, failed);  // all descriptors may have been in use for a moment
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::string& path() const { return path_; }  // empty if it could not be made; errno says why

 private:
  std::string path_;
};

}  // namespace xpyd
