// KvTransport: how KV bytes cross from one instance to another. Specification of every wire.
//
// An instance has one transport. It registers the instance's KV memory when it is made (one region
// per rank), says how peers find it (address), and connects to those it is told of.
//
// A window is a permission that the owner of memory gives one peer: write (or read) these bytes, until the window is
// closed. Its key, a place and a generation of it, is never used twice in the life of a transport, so a write that
// comes late, from a peer that was given up or stopped and went on, is refused. close() revokes: once it has said true,
// nobody reads or writes there through this window any more, and the blocks may go to others. False: a piece is on its
// way into memory at this very moment; ask again (a peer that was stopped in the middle keeps its blocks in quarantine
// until it goes on or disconnect() says that it is dead).
//
// post() starts the copies of a plan. Of each copy one side is local, the other is remote: an address that remote() of
// the peer is the base of. From post until poll says done or failed, the source rows are final and stay where they are,
// and the destination rows belong to this transfer alone. Transfers may finish in any order. `done`: every byte is in
// place on the other side, and arrived() of the window there has counted this post. A wire brings a post once.
// `failed`: an unknown part is, and more may land until the window is closed (what arrived() counts is whole even so);
// the local side is left alone. poll() does not block. An id is forgotten once poll has said done or failed. cancel()
// asks to end it early; it still has to be polled. A transfer that is not done by its deadline fails.
//
// connect() never waits for a peer: it begins, or goes on, and says whether it is done. Its caller
// asks again, in a loop that has other work, too. What a wire needs of names and of the peer's
// memory (addresses are numeric; shm maps the peer's pool) it does within one call.
//
// A wire that cannot work here says why when it is made (make), or when a peer cannot be reached
// (connect). None stands in for another.
//
// A zero-copy transport (`handoff`) moves no bytes: the two instances share one pool, and block ids
// pass in the delivery message itself. Windows and post() are then never used.
//
// Thread safety: everything from the instance's own thread. A transport may have threads of its
// own. Clocks: Clock seconds of the instance.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/copy.h"
#include "base/device/device.h"
#include "base/status.h"
#include "disagg/net/fields.h"

namespace xpyd::disagg {

using PeerId = int32_t;  // an instance, as the cluster counts them; never reused
using TransferId = int64_t;
enum class TransferState { in_flight, done, failed };
enum class KvOp : uint8_t { write, read };  // as the poster sees it
template <>
inline constexpr KvOp kLast<KvOp> = KvOp::read;

using MemoryRange = std::span<std::byte>;

// Which bytes cross: transfer_plan.h makes it. Its length is the number of descriptors.
struct TransferPlan {
  std::vector<Copy> copies;
  size_t bytes = 0;
};

// Of an owner's memory, as it and its peers say it to each other.
struct AddressRange {
  uint64_t begin = 0, bytes = 0;
  bool operator==(const AddressRange&) const = default;
};
XPYD_FIELDS(AddressRange, begin, bytes)

// Plain value; travels in control messages.
struct RemoteKey {
  uint32_t index = 0;       // of the owner's table
  uint32_t generation = 0;  // 0: no window
  uint64_t secret = 0;      // what else the wire needs (rdma: the remote key)
  bool operator==(const RemoteKey&) const = default;
};
XPYD_FIELDS(RemoteKey, index, generation, secret)

struct KvTransfer {
  PeerId peer = -1;
  KvOp op = KvOp::write;
  RemoteKey registration;  // the peer's
  double deadline_s = 0;   // Clock; 0: none
};

// Cumulative, by this side.
struct TransportStats {
  int64_t posts = 0, failed = 0, bytes = 0, descriptors = 0;
  int64_t refused = 0;  // pieces from peers that no open window allowed
};

class KvTransport {
 public:
  virtual ~KvTransport() = default;
  virtual bool zero_copy() const { return false; }

  virtual std::string address() const { return ""; }
  // Before any post to the peer and any window for it. True: connected, now or already. False: not
  // yet; ask again. Error `unavailable`: it cannot be reached, or has not answered for
  // TransportOptions::connect_s; asking again begins anew. disconnect() gives an attempt up.
  virtual Result<bool> connect(PeerId peer, const std::string& address) = 0;
  // The peer is gone, and will never write again: its transfers fail, its windows can be closed.
  virtual void disconnect(PeerId peer) = 0;
  // Where the peer's region begins, as plans for it say it. Not to be dereferenced.
  virtual std::byte* remote(PeerId peer, int region) const = 0;

  // `ranges`: inside this side's regions, what the peer may touch.
  virtual Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) = 0;
  virtual bool close(const RemoteKey& registration) = 0;
  // Posts that have arrived whole through an open window.
  virtual int arrived(const RemoteKey& registration) const = 0;

  virtual TransferId post(const KvTransfer& transfer, const TransferPlan& plan) = 0;
  virtual TransferState poll(TransferId id) = 0;
  virtual void cancel(TransferId id) = 0;
  virtual TransportStats stats() const = 0;
};

struct TransportOptions {
  std::vector<MemoryRange> regions;  // this instance's KV memory, one per rank
  DeviceQueue* queue = nullptr;      // the instance's, on the device where the regions are
  Clock* clock = nullptr;
  PeerId self = -1;
  std::string host = "127.0.0.1";  // where to listen, for wires that do
  int connections = 4;             // tcp: to each peer
  double connect_s = 5;            // Clock seconds for a peer to answer connect()
  std::vector<std::string> nics;   // rdma: devices, "mlx5_0:1"; empty: all that are up
};

struct TransportRow {
  const char* name;
  Result<std::unique_ptr<KvTransport>> (*make)(const TransportOptions& options);
  bool shared_pool;          // the instances must draw from one pool
  bool leaves_process;       // works between processes
  Device& (*pool_device)();  // where the KV must be allocated, instead of on the CPU; null: anywhere
  const char* source;
};

std::span<const TransportRow> transports();
const TransportRow* find_transport(std::string_view name);  // null: no such wire

}  // namespace xpyd::disagg
