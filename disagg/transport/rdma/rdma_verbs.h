// RDMA devices of the rdma transport: smart pointers for libibverbs' objects, and NIC ports. A `NicPort` is one port of
// one device. The instance's KV memory is registered there, and nothing else is.
//
// These memory regions give no remote rights. A peer can access the bytes only through the keys of a registration that
// was opened for it.
//
// Thread safety: a NicPort does not change once it is open; libibverbs' calls on it are safe from any thread.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/device/device.h"
#include "base/status.h"
#include "disagg/transport/rdma/rdma_messages.h"
#include "disagg/transport/transport.h"

namespace xpyd::disagg::rdma {

template <auto kDestroy>
struct Destroy {
  template <class T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};
// ibv_dealloc_mw is inline, so it cannot be a template argument.
inline int destroy_window(ibv_mw* window) { return ibv_dealloc_mw(window); }

using Context = std::unique_ptr<ibv_context, Destroy<ibv_close_device>>;
using Protection = std::unique_ptr<ibv_pd, Destroy<ibv_dealloc_pd>>;
using Completions = std::unique_ptr<ibv_cq, Destroy<ibv_destroy_cq>>;
using SharedReceives = std::unique_ptr<ibv_srq, Destroy<ibv_destroy_srq>>;
using MemoryRegion = std::unique_ptr<ibv_mr, Destroy<ibv_dereg_mr>>;
using QpPtr = std::unique_ptr<ibv_qp, Destroy<ibv_destroy_qp>>;
using MemoryWindow = std::unique_ptr<ibv_mw, Destroy<destroy_window>>;

struct NicPort {
  std::string name;  // "mlx5_0:1"
  Context context;
  Protection protection;
  // All links share one of each. None can overflow: requests in flight stay below send_depth, and receives come from
  // one shared queue. Completions: `sends` of transfers; `serving` of arrivals, binds and invalidations.
  Completions sends, serving;
  SharedReceives arrivals;
  std::vector<MemoryRegion> regions;  // as TransportOptions::regions

  uint8_t port = 1;
  bool ethernet = false;  // RoCE: addressed by GID
  int gid_index = 0;
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  uint8_t reads = 1;            // most RDMA READs in flight, in each direction
  int queue_depth = 0;          // most requests in flight on one queue pair
  int send_depth = 0;           // … on all initiators' queue pairs
  int serve_depth = 0;          // `serving` has room for twice as many binds and invalidations
  int receive_batch = 1;        // receives that are posted again at a time
  int pieces = 1;               // most local pieces of one request
  size_t message_bytes = 0;     // most bytes of one request
  bool device_memory = false;  // the KV lies in device memory
};

// Opens the ports in options.nics, or all that are up, and registers the KV memory. Errors name what is missing: a
// device, a permission, locked memory, a port, memory windows of type 2B.
Result<std::vector<NicPort>> open_nic_ports(const TransportOptions& options);

// Posts n empty receives; a write with immediate data consumes one. Returns an errno, or 0.
int post_receives(NicPort& nic_port, int n);

// The queue pairs of a link are reliable connections from NIC port i to NIC port i. The side with fewer ports decides
// their number. The owner's ends grant rights only through keys of registrations, and the initiator's ends grant none.
//
// Thread safety: one thread at a time works on the queue pairs of one link.

struct Queue {
  QpPtr pair;
  NicPortEnd end;  // this side's end, as it is sent to the peer
  int inline_bytes = 0;
};

enum class Role { post, serve };

// Makes a queue pair on each of the first `n_nic_ports` NIC ports, not connected yet. Error `unavailable`: a device has
// no more of them.
Result<std::vector<Queue>> make_queues(std::vector<NicPort>& nic_ports, size_t n_nic_ports, Role role);
// Connects them to the peer's ends. Afterwards they answer the peer's requests, and this side can post.
Status connect_queues(std::vector<NicPort>& nic_ports, std::vector<Queue>& queues,
                      const std::vector<NicPortEnd>& theirs);

std::vector<NicPortEnd> ends_of(const std::vector<Queue>& queues);

}  // namespace xpyd::disagg::rdma
