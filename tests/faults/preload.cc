// A library to be preloaded. It lets one call of the C library fail, once, and reports which one it was. The server
// does not know of it. The environment says:
//
//   FAULT_KIND   a name of kKinds below
//   FAULT_AT     the n-th call of that kind fails (from 1); 0 or unset: none fails
//   FAULT_SITE   instead of FAULT_AT: the first call from this place fails (a hash of return addresses)
//   FAULT_IN     "serve" or "worker": only processes with this subcommand
//   FAULT_ONCE   a file that the first failure makes; if it is there already, nothing fails
//   FAULT_LIST   a file that gets a line for each new place: "kind hash"; and at the end of the
//                process "kind n", the number of calls
//
// A failing call is reported on stderr. For a call on a TCP connection the peer's port is added, so that a client can
// tell that its own connection broke.
//
// A process whose binary's name is not xpyd is left alone. Calls that libc makes by itself are not seen.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>

namespace {

enum Kind { kOpen, kRead, kWrite, kSocket, kMap, kThread, kNKinds };
constexpr const char* kKinds[kNKinds] = {"open", "read", "write", "socket", "map", "thread"};

struct State {
  bool on = false, listing = false;
  int kind = -1;
  long at = 0;
  uint64_t site = 0;
  char once[256] = {};
  int list = -1;
  std::atomic<long> calls[kNKinds] = {};
  std::atomic<uint64_t> seen[1 << 15] = {};
};
State state;
thread_local int inside = 0;  // calls of the library itself do not count

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

template <class F>
F* next(F*, const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

// The place of a call: the return addresses of at most eight frames. The driver switches address randomisation off, so
// that they are the same in the next process.
__attribute__((noinline)) uint64_t site_of() {
  void* frames[10];
  const int n = backtrace(frames, 10);
  uint64_t hash = 0xcbf29ce484222325;
  for (int i = 2; i < n; ++i) hash = (hash ^ reinterpret_cast<uint64_t>(frames[i])) * 0x100000001b3;
  return hash | 1;
}

bool first_time(uint64_t site) {
  for (size_t i = site % (1 << 15);; i = (i + 1) % (1 << 15)) {
    uint64_t empty = 0;
    if (state.seen[i].load() == site) return false;
    if (state.seen[i].compare_exchange_strong(empty, site)) return true;
    if (empty == site) return false;
  }
}

bool take_turn() {
  if (!state.once[0]) return true;
  const int fd = int(syscall(SYS_openat, AT_FDCWD, state.once, O_CREAT | O_EXCL | O_CLOEXEC | O_WRONLY, 0600));
  if (fd < 0) return false;
  syscall(SYS_close, fd);
  return true;
}

// 0 if `fd` is no TCP connection.
int peer_port(int fd) {
  sockaddr_in peer{};
  socklen_t bytes = sizeof peer;
  if (fd < 0 || getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) return 0;
  return peer.sin_family == AF_INET ? ntohs(peer.sin_port) : 0;
}

// Returns whether this call, on `fd` if that is given, is the one to fail.
bool fails(Kind kind, int fd = -1) {
  if (!state.on || inside) return false;
  if (!state.listing && state.kind != kind) return false;
  Inside guard;
  const int saved = errno;
  const long n = ++state.calls[kind];
  bool chosen = state.kind == kind && state.at == n;
  if (state.listing || state.site) {
    const uint64_t site = site_of() ^ (uint64_t(kind) << 60);
    if (state.listing && first_time(site)) {
      char line[64];
      const int length = snprintf(line, sizeof line, "%s %016llx\n", kKinds[kind], (unsigned long long)site);
      syscall(SYS_write, state.list, line, length);
    }
    chosen = state.site == site && state.kind == kind;
  }
  errno = saved;
  if (!chosen || !take_turn()) return false;
  state.site = 0;
  state.at = 0;
  char line[128];
  const int length = snprintf(line, sizeof line, "fault: %s call %ld of process %d fails, peer port %d\n", kKinds[kind],
                              n, getpid(), peer_port(fd));
  syscall(SYS_write, 2, line, length);
  return true;
}

__attribute__((constructor)) void begin() {
  Inside guard;
  void* warm[2];
  backtrace(warm, 2);  // loads libgcc now
  char command[512] = {};
  const int fd = int(syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY, 0));
  const long bytes = fd >= 0 ? syscall(SYS_read, fd, command, sizeof command - 1) : 0;
  if (fd >= 0) syscall(SYS_close, fd);
  const char* base = strrchr(command, '/') ? strrchr(command, '/') + 1 : command;
  const char* subcommand = command + strlen(command) + 1;
  if (strncmp(base, "xpyd", 5) != 0 || bytes <= subcommand - command) return;
  if (const char* in = getenv("FAULT_IN"); in && strcmp(in, subcommand) != 0) return;
  if (const char* kind = getenv("FAULT_KIND"))
    for (int k = 0; k < kNKinds; ++k)
      if (!strcmp(kind, kKinds[k])) state.kind = k;
  if (const char* at = getenv("FAULT_AT")) state.at = atol(at);
  if (const char* site = getenv("FAULT_SITE")) state.site = strtoull(site, nullptr, 16);
  if (const char* once = getenv("FAULT_ONCE")) snprintf(state.once, sizeof state.once, "%s", once);
  if (const char* list = getenv("FAULT_LIST")) {
    state.list = int(syscall(SYS_openat, AT_FDCWD, list, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0600));
    state.listing = state.list >= 0;
  }
  state.on = true;
}

__attribute__((destructor)) void end() {
  if (!state.listing) return;
  for (int k = 0; k < kNKinds; ++k) {
    char line[64];
    const int length = snprintf(line, sizeof line, "%s %ld\n", kKinds[k], state.calls[k].load());
    syscall(SYS_write, state.list, line, length);
  }
}

int with_error(int error) {
  errno = error;
  return -1;
}

int open_at(int folder, const char* path, int flags, mode_t mode) {
  return fails(kOpen) ? with_error(EMFILE) : int(syscall(SYS_openat, folder, path, flags, mode));
}

}  // namespace

extern "C" {

#define NEXT(name) static auto* real = next(&name, #name)
// A call that fails with `error` if `fault` holds, and is libc's otherwise.
#define CALL(Result, name, parameters, arguments, fault, error) \
  Result name parameters {                                      \
    NEXT(name);                                                 \
    if (fault) return errno = error, Result(-1);                \
    return real arguments;                                      \
  }

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_t(va_arg(more, int));
  va_end(more);
  return open_at(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));
int openat(int folder, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_t(va_arg(more, int));
  va_end(more);
  return open_at(folder, path, flags, mode);
}
FILE* fopen(const char* path, const char* mode) {
  NEXT(fopen);
  if (fails(kOpen)) return errno = EMFILE, nullptr;
  Inside guard;
  return real(path, mode);
}
FILE* fopen64(const char* path, const char* mode) __attribute__((alias("fopen")));
char* mkdtemp(char* form) noexcept {
  NEXT(mkdtemp);
  if (fails(kOpen)) return errno = EACCES, nullptr;
  return real(form);
}
CALL(int, memfd_create, (const char* name, unsigned flags) noexcept, (name, flags), fails(kOpen), EMFILE)
CALL(int, eventfd, (unsigned value, int flags) noexcept, (value, flags), fails(kOpen), EMFILE)
CALL(int, epoll_create1, (int flags) noexcept, (flags), fails(kOpen), EMFILE)
CALL(int, pipe2, (int* ends, int flags) noexcept, (ends, flags), fails(kOpen), EMFILE)

CALL(ssize_t, read, (int fd, void* out, size_t n), (fd, out, n), fails(kRead, fd), EIO)
CALL(ssize_t, pread, (int fd, void* out, size_t n, off_t at), (fd, out, n, at), fails(kRead, fd), EIO)
CALL(ssize_t, pread64, (int fd, void* out, size_t n, off64_t at), (fd, out, n, at), fails(kRead, fd), EIO)
CALL(ssize_t, readv, (int fd, const iovec* parts, int n), (fd, parts, n), fails(kRead, fd), EIO)
CALL(ssize_t, recv, (int fd, void* out, size_t n, int flags), (fd, out, n, flags), fails(kRead, fd), ECONNRESET)
CALL(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags), fails(kRead, fd), ECONNRESET)

// An eventfd always takes a wake-up, so callers need not be ready for an error.
bool is_eventfd(int fd) {
  char link[32], name[32] = {};
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return readlink(link, name, sizeof name - 1) > 0 && strstr(name, "eventfd");
}
// A lost line of the log (stderr) cannot be told to anybody, and the test reads the server's port there.
CALL(ssize_t, write, (int fd, const void* from, size_t n), (fd, from, n),
     fd != STDERR_FILENO && !(n == 8 && is_eventfd(fd)) && fails(kWrite, fd), ENOSPC)
CALL(ssize_t, pwrite, (int fd, const void* from, size_t n, off_t at), (fd, from, n, at), fails(kWrite, fd), ENOSPC)
CALL(ssize_t, writev, (int fd, const iovec* parts, int n), (fd, parts, n), fails(kWrite, fd), ENOSPC)
CALL(ssize_t, send, (int fd, const void* from, size_t n, int flags), (fd, from, n, flags), fails(kWrite, fd),
     ECONNRESET)
CALL(ssize_t, sendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags), fails(kWrite, fd), ECONNRESET)
CALL(int, ftruncate, (int fd, off_t n) noexcept, (fd, n), fails(kWrite, fd), ENOSPC)

CALL(int, socket, (int domain, int type, int protocol) noexcept, (domain, type, protocol), fails(kSocket), EMFILE)
CALL(int, socketpair, (int domain, int type, int protocol, int* out) noexcept, (domain, type, protocol, out),
     fails(kSocket), EMFILE)
CALL(int, bind, (int fd, const sockaddr* at, socklen_t n) noexcept, (fd, at, n), fails(kSocket, fd), EADDRINUSE)
CALL(int, listen, (int fd, int backlog) noexcept, (fd, backlog), fails(kSocket, fd), EADDRINUSE)
CALL(int, accept4, (int fd, sockaddr* at, socklen_t* n, int flags), (fd, at, n, flags), fails(kSocket), EMFILE)
CALL(int, accept, (int fd, sockaddr* at, socklen_t* n), (fd, at, n), fails(kSocket), EMFILE)
CALL(int, connect, (int fd, const sockaddr* at, socklen_t n), (fd, at, n), fails(kSocket, fd), ECONNREFUSED)
CALL(int, setsockopt, (int fd, int level, int name, const void* value, socklen_t n) noexcept,
     (fd, level, name, value, n), fails(kSocket, fd), ENOMEM)

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  NEXT(mmap);
  if (fails(kMap)) return errno = ENOMEM, MAP_FAILED;
  return real(at, bytes, protection, flags, fd, offset);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) noexcept {
  NEXT(pthread_create);
  if (fails(kThread)) return EAGAIN;
  Inside guard;
  return real(thread, attributes, body, argument);
}

}  // extern "C"
