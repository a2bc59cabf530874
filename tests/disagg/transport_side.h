// One side of a transport under test, in this process or in another one, behind one interface, so that the same tests
// run over both. The other process is this program started anew by posix_spawn, so it has no thread or lock of ours. It
// obeys commands that come as lines over a socket.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "disagg/transport/transport.h"

namespace xpyd::testing {

// A transport as the suite sees it. Static objects register them, and the suite (transport_test.cc) runs over all.
struct TestedTransport {
  std::string name;
  std::function<Result<std::unique_ptr<KvTransport>>(const TransportOptions&)> make;
  std::function<std::shared_ptr<std::byte>(size_t bytes)> memory;  // KV memory for it, zeroed
  bool leaves_process = true;
  bool shares_process = true;            // two of them may be in one process
  bool needs_owner = true;               // nothing moves while the owner of the registration stands still
  bool asks_ranges = true;               // a piece outside its registration is refused
  std::string environment = {};          // variable of the other process, which gets NAME=<instance>
  std::function<std::string()> missing;  // why it cannot work on this machine, or ""; may be null
};
struct RegisterTransport {
  explicit RegisterTransport(TestedTransport transport);
};
const std::vector<TestedTransport>& tested_transports();

// Memory of a side: two regions, with offsets that count through both.
constexpr size_t kRegionBytes[] = {size_t(18) << 20, size_t(1) << 20};
constexpr size_t kSideBytes = kRegionBytes[0] + kRegionBytes[1];

struct Piece {
  size_t local = 0, remote = 0, bytes = 0;
};
struct Extent {
  size_t begin = 0, bytes = 0;
};

class Side {
 public:
  virtual ~Side() = default;
  virtual std::string address() = 0;
  virtual std::string connect(PeerId peer, const std::string& address) = 0;  // the error, or ""
  virtual void disconnect(PeerId peer) = 0;
  virtual RemoteKey open(PeerId peer, KvOp op, const std::vector<Extent>& extents) = 0;
  virtual bool close(const RemoteKey& registration) = 0;
  virtual int arrived(const RemoteKey& registration) = 0;
  virtual TransferId post(const KvTransfer& transfer, const std::vector<Piece>& pieces) = 0;
  virtual TransferState poll(TransferId id) = 0;
  virtual void cancel(TransferId id) = 0;
  // fill() makes bytes `at`, `at` + 1, … those of the pattern `seed` from `from` on. differing() counts those that
  // differ.
  virtual void fill(size_t at, size_t bytes, uint64_t seed, size_t from = 0) = 0;
  virtual size_t differing(size_t at, size_t bytes, uint64_t seed, size_t from = 0) = 0;
  // Sends writes of `pieces` one after another, the last one after the call of end_storm(), which returns how many were
  // done and how many failed. It runs on its own in another process alone.
  virtual void storm(const KvTransfer& transfer, const std::vector<Piece>& pieces) = 0;
  struct Stormed {
    int64_t done = 0, failed = 0;
  };
  virtual Stormed end_storm() = 0;
  virtual pid_t pid() { return 0; }  // of the other process
};

std::unique_ptr<Side> make_side_here(const TestedTransport& transport, PeerId self);
std::unique_ptr<Side> make_side_there(const TestedTransport& transport, PeerId self);

// Waits until the condition holds, and throws after a minute.
void wait_until(const std::function<bool()>& holds);
// Polls until the transfer is settled, and returns its state.
TransferState settle(Side& side, TransferId id);
// Calls close() until it returns true.
void close_for_good(Side& side, const RemoteKey& registration);

}  // namespace xpyd::testing
