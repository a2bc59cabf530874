#include "tests/disagg/fake_nccl.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/device/device.h"
#include "base/job_thread.h"
#include "disagg/net/hello.h"
#include "disagg/transport/nccl/nccl_api.h"
#include "disagg/transport/transports.h"

namespace xpyd::testing {
namespace {

class FakeStream final : public DeviceQueue, public VendorQueue {
 public:
  void enqueue(std::function<void()> work) {
    ++enqueued_;
    thread_.post([this, work = std::move(work)] {
      work();
      ++done_;
      return true;
    });
  }
  void copy(std::span<const Copy>, bool) override { XPYD_CHECK(false, "fake NCCL: no copies on its streams"); }
  int64_t mark() override { return enqueued_; }
  bool reached(int64_t mark) override { return done_ >= mark; }
  void wait() override { thread_.drain(); }
  void* handle() override { return static_cast<FakeStream*>(this); }
  std::unique_ptr<DeviceQueue> make_beside() override { return std::make_unique<FakeStream>(); }

 private:
  std::atomic<int64_t> enqueued_{0}, done_{0};
  JobThread thread_;
};

struct Call {
  bool send;
  char* data;
  size_t bytes;
};

// One rank of a communicator. Its socket stands for the network, and its kernels watch `stop_`.
class Comm {
 public:
  Comm(const NcclUniqueId& id, int rank, int listener) : rank_(rank) {
    joining_ = std::thread([this, id, listener] { join(id, listener); });
  }
  ~Comm() {
    abort();
    close(stop_);
    if (socket_ >= 0) close(socket_);
  }
  int rank() const { return rank_; }
  int state() { return state_; }
  void fail() { state_ = kNcclRemoteError; }

  void abort() {
    eventfd_write(stop_, 1);
    if (joining_.joinable()) joining_.join();
    if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
  }

  // The kernel of a group.
  void run(const std::vector<Call>& calls) {
    for (const Call& call : calls) {
      uint64_t bytes = call.bytes;
      if (!move(call.send, reinterpret_cast<char*>(&bytes), sizeof bytes)) return;
      XPYD_CHECK(bytes == call.bytes, "fake NCCL: a send and its receive differ in size");
      if (!move(call.send, call.data, call.bytes)) return;
    }
  }

  bool launching = false;  // of the calling thread
  std::function<void()> launch;

 private:
  void join(const NcclUniqueId& id, int listener) {
    int fd = -1;
    if (rank_ == 0) {
      if (wait(listener, POLLIN)) fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      close(listener);
    } else {
      sockaddr_un at{.sun_family = AF_UNIX, .sun_path = {}};
      std::memcpy(at.sun_path + 1, id.internal, 24);
      fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&at), offsetof(sockaddr_un, sun_path) + 25) != 0)
        close(std::exchange(fd, -1));
    }
    socket_ = fd;
    char ours = char(rank_), theirs = 0;
    if (fd >= 0 && ::send(fd, &ours, 1, MSG_NOSIGNAL) == 1 && wait(fd, POLLIN) && recv(fd, &theirs, 1, 0) == 1) {
      XPYD_CHECK(theirs == 1 - ours, "fake NCCL: two ranks with one number");
      state_ = kNcclSuccess;
    } else {
      state_ = kNcclRemoteError;
    }
  }

  // Returns false if the communicator is aborted.
  bool wait(int fd, short events) {
    pollfd both[2] = {{stop_, POLLIN, 0}, {fd, events, 0}};
    while (poll(both, 2, -1) < 0) {
    }
    return !(both[0].revents & POLLIN);
  }
  bool move(bool send, char* data, size_t bytes) {
    while (bytes > 0) {
      if (!wait(socket_, send ? POLLOUT : POLLIN)) return false;
      const ssize_t n = send ? ::send(socket_, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                             : recv(socket_, data, bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) {
        fail();
        pollfd stop{stop_, POLLIN, 0};
        while (poll(&stop, 1, -1) < 1) {
        }
        return false;
      }
      data += n, bytes -= size_t(n);
    }
    return true;
  }

  const int rank_;
  const int stop_ = eventfd(0, EFD_CLOEXEC);
  int socket_ = -1;
  std::atomic<int> state_{kNcclInProgress};
  std::thread joining_;
};

struct Library {
  std::mutex mutex;
  std::map<std::string, int> listeners;                // by name, of ids that were made here and are not used yet
  std::map<const void*, std::shared_ptr<Comm>> comms;  // not aborted
  std::atomic<bool> fail_joins{false};
  std::atomic<int> made{0};

  std::shared_ptr<Comm> find(NcclComm comm) {
    std::lock_guard lock(mutex);
    auto at = comms.find(comm);
    XPYD_CHECK(at != comms.end(), "fake NCCL: no such communicator, or it has been aborted");
    return at->second;
  }
};

Library& library() {
  static auto* all = new Library;  // threads of streams may outlast main
  return *all;
}

struct Grouped {
  bool open = false;
  std::shared_ptr<Comm> comm;
  FakeStream* stream = nullptr;
  std::vector<Call> calls;
};
thread_local Grouped grouped;

std::string name_of(const NcclUniqueId& id) { return std::string(id.internal, 24); }

int get_unique_id(NcclUniqueId* id) {
  *id = {};
  std::snprintf(id->internal, sizeof id->internal, "fake-nccl-%014llx",
                static_cast<unsigned long long>(random_secret() >> 8));
  sockaddr_un at{.sun_family = AF_UNIX, .sun_path = {}};
  std::memcpy(at.sun_path + 1, id->internal, 24);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  XPYD_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&at), offsetof(sockaddr_un, sun_path) + 25) == 0 &&
             listen(fd, 1) == 0);
  std::lock_guard lock(library().mutex);
  library().listeners[name_of(*id)] = fd;
  return kNcclSuccess;
}

int comm_init_rank_config(NcclComm* comm, int n_ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  XPYD_CHECK(n_ranks == 2 && (rank == 0 || rank == 1));
  XPYD_CHECK(config->magic == 0xcafebeef && config->size >= 20 && config->blocking == 0);
  std::lock_guard lock(library().mutex);
  int listener = -1;
  if (rank == 0) {
    auto at = library().listeners.find(name_of(id));
    XPYD_CHECK(at != library().listeners.end(), "fake NCCL: rank 0 has not made this id");
    listener = at->second;
    library().listeners.erase(at);
  }
  auto made = std::make_shared<Comm>(id, rank, listener);
  *comm = reinterpret_cast<NcclComm>(made.get());
  library().comms[made.get()] = made;
  ++library().made;
  if (library().fail_joins) made->fail();
  return kNcclInProgress;
}

int comm_get_async_error(NcclComm handle, int* result) {
  auto comm = library().find(handle);
  *result = library().fail_joins ? int(kNcclInvalidUsage) : comm->state();
  if (*result == kNcclSuccess && comm->launching) {
    comm->launch();  // the next call finds it done
    comm->launching = false;
    *result = kNcclInProgress;
  }
  return kNcclSuccess;
}

std::atomic<int> reclaims = 0;

int comm_abort(NcclComm handle) {
  auto comm = library().find(handle);
  comm->abort();
  // NCCL goes on in a thread after an abort since 2.28.
  ++reclaims;
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    --reclaims;
  }).detach();
  std::lock_guard lock(library().mutex);
  library().comms.erase(handle);
  return kNcclSuccess;
}

int group_start() {
  XPYD_CHECK(!grouped.open);
  grouped.open = true;
  return kNcclSuccess;
}

int add(bool send, void* data, size_t count, int type, int peer, NcclComm handle, void* stream) {
  XPYD_CHECK(grouped.open, "fake NCCL: a call outside of a group");
  auto comm = library().find(handle);
  if (comm->state() != kNcclSuccess) return comm->state();
  XPYD_CHECK(!comm->launching, "fake NCCL: the last group is still being enqueued");
  XPYD_CHECK(type == kNcclUint8 && peer == 1 - comm->rank() && count > 0 && stream);
  XPYD_CHECK(!grouped.comm || (grouped.comm == comm && grouped.stream == stream));
  XPYD_CHECK(grouped.calls.empty() || grouped.calls[0].send == send, "fake NCCL: a group here goes one way");
  XPYD_CHECK(grouped.calls.size() < 2048);
  grouped.comm = comm, grouped.stream = static_cast<FakeStream*>(stream);
  grouped.calls.push_back({send, static_cast<char*>(data), count});
  return kNcclSuccess;
}
int send(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  return add(true, const_cast<void*>(data), count, type, peer, comm, stream);
}
int recv(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  return add(false, data, count, type, peer, comm, stream);
}

int group_end() {
  XPYD_CHECK(grouped.open);
  Grouped group = std::exchange(grouped, {});
  if (!group.comm) return kNcclSuccess;
  group.comm->launching = true;
  group.comm->launch = [weak = std::weak_ptr(group.comm), stream = group.stream, calls = std::move(group.calls)] {
    stream->enqueue([comm = weak.lock(), calls] { comm->run(calls); });
  };
  return kNcclInProgress;
}

const char* get_error_string(int result) { return result == kNcclInvalidUsage ? "invalid usage" : "fake error"; }
const char* get_last_error(NcclComm) { return ""; }

}  // namespace

Result<std::unique_ptr<KvTransport>> make_fake_nccl_transport(const TransportOptions& options) {
  static const NcclApi api{.get_unique_id = get_unique_id,
                           .comm_init_rank_config = comm_init_rank_config,
                           .comm_get_async_error = comm_get_async_error,
                           .comm_abort = comm_abort,
                           .group_start = group_start,
                           .group_end = group_end,
                           .send = send,
                           .recv = recv,
                           .get_error_string = get_error_string,
                           .get_last_error = get_last_error,
                           .version = 22809};
  static FakeStream queue;  // of the process
  TransportOptions ours = options;
  ours.queue = &queue;
  return make_nccl_transport(ours, api);
}

void fail_fake_joins(bool fail) { library().fail_joins = fail; }

void break_fake_comms() {
  std::lock_guard lock(library().mutex);
  for (auto& [handle, comm] : library().comms) comm->fail();
}

int fake_reclaims() { return reclaims; }
int fake_comms_made() { return library().made; }

}  // namespace xpyd::testing
