// RDMA devices of the rdma transport: smart pointers for libibverbs' objects, NIC ports, and queue pairs. A `NicPort`
// is one port of one device. The instance's KV memory is registered there, and nothing else is.
//
// These memory regions give no remote rights. A peer can access the bytes only through the keys of a registration.
//
// A link has one queue pair for each NIC port (`Queue`), a reliable connection from port i to port i. The side with
// fewer ports decides their number.
//
// Thread safety: a NicPort does not change once it is open; libibverbs' calls on it are safe from any thread. One
// thread at a time works on a Queue.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "disagg/transport/bootstrap.h"
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

using Devices = std::unique_ptr<ibv_device*, Destroy<ibv_free_device_list>>;
using Context = std::unique_ptr<ibv_context, Destroy<ibv_close_device>>;
using Protection = std::unique_ptr<ibv_pd, Destroy<ibv_dealloc_pd>>;
using Completions = std::unique_ptr<ibv_cq, Destroy<ibv_destroy_cq>>;
using SharedReceives = std::unique_ptr<ibv_srq, Destroy<ibv_destroy_srq>>;
using MemoryRegion = std::unique_ptr<ibv_mr, Destroy<ibv_dereg_mr>>;
using QpPtr = std::unique_ptr<ibv_qp, Destroy<ibv_destroy_qp>>;
using MemoryWindow = std::unique_ptr<ibv_mw, Destroy<destroy_window>>;

// One end of a queue pair, as the peer is told.
struct NicPortEnd {
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;               // ibv_mtu
  uint8_t reads = 0;             // most RDMA READs in flight, in each direction
  uint32_t number = 0, psn = 0;  // 24 bits
};
template <class A>
void fields(A& a, typename A::template Ref<NicPortEnd> s) {
  constexpr int k24Bits = (1 << 24) - 1;
  auto& [gid, lid, mtu, reads, number, psn] = s;
  a.bytes("gid", gid);
  XPYD_EACH(a, lid);
  a.number("mtu", mtu, 1, 5);
  a.number("reads", reads, 1, 255);
  a.number("number", number, 0, k24Bits);
  a.number("psn", psn, 0, k24Bits);
}

// The only message in each direction of a link's channel: the initiator offers its queue pairs, and the owner answers
// with its own. An answer without queue pairs is a refusal, and `refusal` gives the reason.
constexpr size_t kMaxNicPorts = 16;  // of one link
struct Offer {
  std::vector<NicPortEnd> nic_ports;
  std::string refusal;
};
template <class A>
void fields(A& a, typename A::template Ref<Offer> s) {
  auto& [nic_ports, refusal] = s;
  a.list("rails", nic_ports, kMaxNicPorts);
  XPYD_EACH(a, refusal);
}

struct Queue {
  Completions completions;  // of its own requests
  QpPtr pair;
  NicPortEnd end;  // this side's
};

struct NicPort {
  std::string name;  // "mlx5_0:1"
  uint8_t port = 1;
  bool up = false;
  Context context;
  Protection protection;
  Completions arrivals;               // of all peers' transfers
  SharedReceives receives;            // each arrival consumes one
  std::vector<MemoryRegion> regions;  // as TransportOptions::regions
  Queue binder;                       // connected to itself; binds memory windows

  NicPortEnd end;         // without the numbers of a queue pair
  bool ethernet = false;  // RoCE: addressed by GID
  int gid_index = 0;
  uint32_t queue_depth = 0;    // most requests in flight on one queue pair
  uint32_t pieces = 1;         // most local pieces of one request
  bool device_memory = false;  // the KV lies in device memory
};

// Opens the ports in options.nics, or all that are up, and registers the KV memory. Errors name what is missing: a
// device, a permission, locked memory, a port, memory windows.
Result<std::vector<NicPort>> open_nic_ports(const TransportOptions& options);

// Posts an empty receive, which a write with immediate data consumes. Returns an errno, or 0.
int post_receive(NicPort& nic_port);

// Makes a queue pair on each of the first `n` NIC ports, not connected yet. Error `unavailable`: a device has no more
// of them.
Result<std::vector<Queue>> make_queues(std::vector<NicPort>& nic_ports, size_t n);
// Connects them to the peer's ends. Afterwards both sides can post.
Status connect_queues(std::vector<NicPort>& nic_ports, std::vector<Queue>& queues,
                      const std::vector<NicPortEnd>& theirs);
std::vector<NicPortEnd> ends_of(const std::vector<Queue>& queues);

}  // namespace xpyd::disagg::rdma
