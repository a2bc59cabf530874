#include "disagg/control/hmac.h"

#include <fcntl.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace xpyd {

Sha256 hmac_sha256(std::string_view key, std::string_view message) {
  auto bytes = [](std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); };
  Sha256 digest;
  hmac_sha256_ctx context;
  hmac_sha256_set_key(&context, key.size(), bytes(key));
  hmac_sha256_update(&context, message.size(), bytes(message));
  hmac_sha256_digest(&context, digest.size(), digest.data());
  return digest;
}

bool equal_in_constant_time(const Sha256& a, const Sha256& b) { return memeql_sec(a.data(), b.data(), a.size()) == 1; }

void fill_random(void* bytes, size_t n) {
  char* out = static_cast<char*>(bytes);
  while (n > 0) {
    ssize_t got = getrandom(out, n, 0);
    XPYD_CHECK(got > 0 || errno == EINTR, std::strerror(errno));
    if (got <= 0) continue;
    out += got;
    n -= size_t(got);
  }
}

ClusterKey ClusterKey::random() {
  ClusterKey key;
  key.bytes_.resize(32);
  fill_random(key.bytes_.data(), key.bytes_.size());
  return key;
}

Result<ClusterKey> ClusterKey::from_file(const std::string& path) {
  auto bad = [&](const std::string& why) { return invalid("cluster key file " + path + ": " + why); };
  // A FIFO would block the open; fstat and read look at the same file whatever happens to the name.
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return bad(std::strerror(errno));
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } closer{fd};
  struct stat info;
  if (fstat(fd, &info) != 0) return bad(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return bad("not a regular file");
  if (info.st_mode & (S_IRWXO | S_IWGRP)) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", unsigned(info.st_mode & 07777));
    return bad(std::string("its mode is ") + mode + ", so others may read or change it; expected 0600 or 0640");
  }
  ClusterKey key;
  key.bytes_.resize(kMaxClusterKeyBytes + 1);
  size_t n = 0;
  while (n < key.bytes_.size()) {
    ssize_t got = read(fd, key.bytes_.data() + n, key.bytes_.size() - n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return bad(std::strerror(errno));
    if (got == 0) break;
    n += size_t(got);
  }
  if (n > kMaxClusterKeyBytes) return bad("more than 4096 bytes");
  while (n > 0 && (key.bytes_[n - 1] == '\n' || key.bytes_[n - 1] == '\r')) --n;
  key.bytes_.resize(n);
  if (n < kMinClusterKeyBytes)
    return bad(std::to_string(n) + " bytes; expected at least " + std::to_string(kMinClusterKeyBytes) +
               " (head -c 32 /dev/urandom | base64 >FILE makes good ones)");
  return key;
}

}  // namespace xpyd
