#include "base/files.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

namespace xpyd {
namespace {

// Without `rename` it only tests whether it could be done.
Status write_beside(const std::string& path, std::string_view text, bool rename) {
  const auto cannot = [&](const char* why) { return Error{ErrorCode::io, "cannot write " + path + ": " + why}; };
  struct stat there;
  if (stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) return cannot("it exists and is not a regular file");
  const std::string part = path + "." + std::to_string(std::random_device()()) + ".part";
  FILE* file = std::fopen(part.c_str(), "wbxe");  // x: an existing file is not ours
  if (!file) return cannot(std::strerror(errno));
  bool done = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  done = std::fclose(file) == 0 && done;
  if (done && rename) done = std::rename(part.c_str(), path.c_str()) == 0;
  const int error = errno;
  if (!done || !rename) std::remove(part.c_str());
  return done ? ok() : Status(cannot(std::strerror(error)));
}

}  // namespace

Status replace_file(const std::string& path, std::string_view text) { return write_beside(path, text, true); }

Status check_replaceable(const std::string& path) { return write_beside(path, "", false); }

}  // namespace xpyd
