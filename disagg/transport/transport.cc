#include "disagg/transport/transport.h"

#include "disagg/transport/shared_memory.h"
#include "disagg/transport/wires.h"

namespace xpyd {
namespace {

constexpr TransportRow kTransports[] = {
    {"local", make_local_transport, false, false, nullptr, "one process, one copy by the poster's queue"},
    {"handoff", make_handoff_transport, true, true, nullptr,
     "one pool of the instances of a host, no copy: block ids change hands"},
    {"shm", make_shm_transport, false, true, shared_memory_device,
     "processes of one machine, one copy into the peer's memfd"},
    {"tcp", make_tcp_transport, false, true, nullptr, "sockets, straight out of and into the pools"},
    {"rdma", make_rdma_transport, false, true, nullptr, "RDMA cards: one-sided writes and reads (libibverbs, RC)"},
    {"nccl", make_nccl_transport, false, true, nullptr,
     "CUDA cards: grouped ncclSend and ncclRecv (libnccl.so.2, loaded when asked for)"},
};

}  // namespace

std::span<const TransportRow> transports() { return kTransports; }

const TransportRow* find_transport(std::string_view name) {
  for (const TransportRow& row : kTransports) {
    if (name == row.name) return &row;
  }
  return nullptr;
}

}  // namespace xpyd
