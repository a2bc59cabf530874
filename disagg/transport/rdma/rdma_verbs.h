// RDMA devices as the rdma wire holds them: owners of libibverbs' objects, and rails. A rail is one
// port of one device, with the instance's KV memory registered there and nothing else.
//
// Registration gives no remote rights: a peer can touch these bytes only through a window's own keys.
//
// Thread safety: a rail does not change once it is open; libibverbs' calls on it are safe from any thread.
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
// ibv_dealloc_mw is inline and has no address of its own.
inline int destroy_window(ibv_mw* registration) { return ibv_dealloc_mw(registration); }

using Context = std::unique_ptr<ibv_context, Destroy<ibv_close_device>>;
using Protection = std::unique_ptr<ibv_pd, Destroy<ibv_dealloc_pd>>;
using Completions = std::unique_ptr<ibv_cq, Destroy<ibv_destroy_cq>>;
using SharedReceives = std::unique_ptr<ibv_srq, Destroy<ibv_destroy_srq>>;
using MemoryRegion = std::unique_ptr<ibv_mr, Destroy<ibv_dereg_mr>>;
using QpPtr = std::unique_ptr<ibv_qp, Destroy<ibv_destroy_qp>>;
using MemoryWindow = std::unique_ptr<ibv_mw, Destroy<destroy_window>>;

// How the keys of a window come about.
enum class Keys {
  automatic,      // memory windows where the device has type 2B
  registrations,  // a registration of each range, removed when the window closes
};

struct NicPort {
  std::string name;  // "mlx5_0:1"
  Context context;
  Protection protection;
  // One of each for all links, and none can run over: requests in flight stay below send_depth, and all links draw
  // their receives from one queue. sends: of ends that post; serving: arrivals, and the serving ends' own requests.
  Completions sends, serving;
  SharedReceives arrivals;
  std::vector<MemoryRegion> regions;  // as TransportOptions::regions

  uint8_t port = 1;
  bool ethernet = false;  // RoCE: addressed by GID
  int gid_index = 0;
  std::array<uint8_t, 16> gid{};
  uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  uint8_t reads = 1;            // outstanding RDMA READs, both as asker and as asked
  int queue_depth = 0;          // sends of one queue pair
  int send_depth = 0;           // of all that post
  int serve_depth = 0;          // of all that serve
  int receive_batch = 1;        // receives that are posted again at a time
  int pieces = 1;               // gathered or scattered by one request
  size_t message_bytes = 0;     // of one request, at most
  bool memory_windows = false;  // type 2B
  bool device_memory = false;   // the KV memory is not the host's
};

// Errors say what is missing: a device, a permission, locked memory, a name.
Result<std::vector<NicPort>> open_nic_ports(const TransportOptions& options, Keys keys);

// Empty receives, which is all that a write with immediate data uses up. An errno; 0: they are there.
int post_receives(NicPort& nic_port, int n);

// Queue pairs of a link: reliable connections, rail i of one side to rail i of the other, as many
// as the side with fewer has. A link carries the posts of one side into the memory of the other;
// the end that serves has remote rights only through windows, the end that posts has none at all.
//
// Thread safety: functions on one link's queues by one thread at a time.

struct Queue {
  QpPtr pair;
  NicPortEnd end;  // ours, as the peer is told of it
  int inline_bytes = 0;
};

enum class Role { post, serve };

// The first `n_nic_ports`, not connected yet. Error `unavailable`: a device has no more of them.
Result<std::vector<Queue>> make_queues(std::vector<NicPort>& nic_ports, size_t n_nic_ports, Role role);
// After it the other side's requests are answered, and ours can be posted.
Status connect_queues(std::vector<NicPort>& nic_ports, std::vector<Queue>& queues,
                      const std::vector<NicPortEnd>& theirs);

std::vector<NicPortEnd> ends_of(const std::vector<Queue>& queues);

}  // namespace xpyd::disagg::rdma
