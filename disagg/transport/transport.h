// KvTransport carries KV bytes from one instance to another. This is the specification of all transports.
//
// An instance has one transport. It gets the instance's KV memory when it is made (one region per rank), says how peers
// find it (address()), and connects to the peers that it is told.
//
// A registration is the owner's permission for one peer to write, or to read, some ranges, from open() to close(). Its
// remote key (RemoteKey) is a place and a generation, and is never used twice in the life of a transport. So a late
// access by a peer that was given up, or stopped and continued, is refused. Once close() returns true, nobody accesses
// memory through the registration any more, and the blocks may go to others. False: a piece is being moved at this
// moment; ask again. A peer that is stopped in the middle keeps its blocks in quarantine until it continues or is known
// to be dead.
//
// post() starts a transfer, which is the copies of a plan. In each copy one side is local and the other side is an
// address relative to remote(). From post() until poll() says done or failed, the source bytes must be final and stay
// in place, and the destination bytes belong to this transfer alone. A plan may have any number of copies of any size
// and alignment, and what a link cannot take yet waits in the transport without a bound. Transfers may finish in any
// order. `done`: every byte is in place, and arrived() of the peer's registration has counted this transfer. No
// transport delivers a transfer twice. `failed`: an unknown part is in place, and more may land until the registration
// is closed (arrived() still counts only whole transfers); local memory is no longer used. poll() does not block, and
// forgets the id with its last answer. cancel() asks for an early end; the transfer must still be polled. A transfer
// that is not done by its deadline fails. No transport repeats a failed transfer.
//
// connect() never waits for a peer. It begins or continues, and says whether it is done; its caller has other work and
// asks again. Within one call it only does local work: addresses are numeric, and shm maps the peer's pool.
//
// A transport that cannot work here says why when it is made, or when a peer cannot be reached (connect()). No
// transport replaces another one silently.
//
// A zero-copy transport (`handoff`) moves no bytes: the instances share one pool, and block ids cross inside the
// delivery message. open() and post() are then never used.
//
// Thread safety: the instance's own thread makes all calls. A transport may have threads of its own. Times are seconds
// of the instance's Clock.
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

using PeerId = int32_t;  // an instance's number in the cluster; never reused
using TransferId = int64_t;
enum class TransferState { in_flight, done, failed };
enum class KvOp : uint8_t { write, read };  // as the initiator (the side that calls post()) sees it
template <>
inline constexpr KvOp kLast<KvOp> = KvOp::read;

using MemoryRange = std::span<std::byte>;

// The bytes that cross (made by transfer_plan.h). The number of copies is the number of descriptors.
struct TransferPlan {
  std::vector<Copy> copies;
  size_t bytes = 0;
};

// A range of an owner's memory, as it and its peers name it in messages.
struct AddressRange {
  uint64_t begin = 0, bytes = 0;
  bool operator==(const AddressRange&) const = default;
};
XPYD_FIELDS(AddressRange, begin, bytes)

// The remote key of a registration. A plain value that travels in control messages.
struct RemoteKey {
  uint32_t index = 0;       // place in the owner's table
  uint32_t generation = 0;  // 0: no registration
  uint64_t secret = 0;      // what else the owner or the initiator asks for
  std::vector<AddressRange> ranges = {};  // rdma: sorted and disjoint
  std::vector<uint32_t> rkeys = {};       // rdma: the card's keys, [ranges][NIC ports of the owner]
  bool operator==(const RemoteKey&) const = default;
};
XPYD_FIELDS(RemoteKey, index, generation, secret, ranges, rkeys)

struct KvTransfer {
  PeerId peer = -1;
  KvOp op = KvOp::write;
  RemoteKey registration;  // the peer's
  double deadline_s = 0;   // Clock; 0: none
};

class KvTransport {
 public:
  virtual ~KvTransport() = default;
  virtual bool zero_copy() const { return false; }

  virtual std::string address() const { return ""; }
  // Requires: called before any post() to the peer and any open() for it. True: connected. False: not yet, ask again.
  // Error `unavailable`: the peer cannot be reached, or has not answered for TransportOptions::connect_s; asking again
  // starts anew. disconnect() gives up an attempt to connect.
  virtual Result<bool> connect(PeerId peer, const std::string& address) = 0;
  // Declares the peer gone for ever. Its transfers fail, and its registrations can be closed (on shm only once its
  // process has ended).
  virtual void disconnect(PeerId peer) = 0;
  // Returns the base address of the peer's region for use in plans. It must not be dereferenced.
  virtual std::byte* remote(PeerId peer, int region) const = 0;

  // Opens a registration for the peer. Errors: `invalid_argument`, a range is outside this side's regions;
  // `unavailable`, the peer is not connected.
  virtual Result<RemoteKey> open(PeerId peer, KvOp op, std::span<const MemoryRange> ranges) = 0;
  // Revokes it. Returns true if no piece is inside, also if it was closed before. False: ask again.
  virtual bool close(const RemoteKey& registration) = 0;
  // Returns how many transfers have arrived whole through an open registration.
  virtual int arrived(const RemoteKey& registration) const = 0;

  // Starts a transfer. It never blocks on the peer, and poll() tells every failure.
  virtual TransferId post(const KvTransfer& transfer, const TransferPlan& plan) = 0;
  // Requires: poll() has not said done or failed for this id.
  virtual TransferState poll(TransferId id) = 0;
  virtual void cancel(TransferId id) = 0;  // ignores ids that it does not know
};

struct TransportOptions {
  std::vector<MemoryRange> regions;  // this instance's KV memory, one per rank
  DeviceQueue* queue = nullptr;      // the instance's, on the device of the regions
  Clock* clock = nullptr;
  PeerId self = -1;
  std::string host = "127.0.0.1";  // where to listen, if the transport listens
  int connections = 4;             // tcp: to each peer
  double connect_s = 5;            // Clock seconds for a peer to answer connect()
  std::vector<std::string> nics;   // rdma: devices, "mlx5_0:1"; empty: all that are up
};

struct TransportRow {
  const char* name;
  Result<std::unique_ptr<KvTransport>> (*make)(const TransportOptions& options);
  bool shared_pool;          // the instances must draw from one pool
  bool leaves_process;       // works between processes
  Device& (*pool_device)();  // where KV must be allocated instead of on the CPU; null: anywhere
  bool pins_pool;            // the pool's pages must not change after make(), so no scheme may map them later
  const char* source;
};

std::span<const TransportRow> transports();
const TransportRow* find_transport(std::string_view name);  // null: there is no such transport

}  // namespace xpyd::disagg
