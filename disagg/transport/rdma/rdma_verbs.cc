#include "disagg/transport/rdma/rdma_verbs.h"

#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/device/device.h"

namespace xpyd::disagg::rdma {
namespace {

constexpr int kQueueDepth = 512;
constexpr int kArrivals = 2048;  // transfers that may arrive before the owner polls
constexpr int kReads = 16;       // more helps only over long distances
constexpr int kPieces = 16;
// A request without an acknowledgement is sent again after 4.096 us * 2^16 (268 ms), six times (Soft-RoCE takes seven
// for "without end"). A broken path is therefore noticed after 2 to 8 s. A caller that cannot wait that long sets a
// deadline.
constexpr uint8_t kTimeout = 16, kRetries = 6;
// 7: retries without end while the owner has no posted receive, because it has not polled for long.
constexpr uint8_t kNotReadyRetries = 7;
constexpr uint8_t kNotReadyTimer = 12;  // 0.64 ms

Error unavailable(const std::string& what) { return {ErrorCode::unavailable, "rdma: " + what}; }
Error unavailable(const NicPort& nic_port, const std::string& what, int error) {
  return unavailable(nic_port.name + ": " + what + ": " + std::strerror(error));
}

// Returns every port of every device that can be opened. Appends to `trouble` why a device cannot.
std::vector<NicPort> list_ports(ibv_device* const* devices, int n_devices, std::string& trouble) {
  std::vector<NicPort> found;
  for (ibv_device* device : std::span(devices, size_t(n_devices))) {
    const std::string name = ibv_get_device_name(device);
    int n_ports = 1;
    for (int number = 1; number <= n_ports; ++number) {
      Context context(ibv_open_device(device));
      ibv_device_attr attributes{};
      ibv_port_attr port{};
      if (!context || ibv_query_device(context.get(), &attributes) != 0 ||
          ibv_query_port(context.get(), uint8_t(number), &port) != 0) {
        trouble += "; " + name + " cannot be opened (" + std::strerror(errno) +
                   "; does this user have access to /dev/infiniband?)";
        break;
      }
      n_ports = attributes.phys_port_cnt;
      NicPort& nic_port = found.emplace_back();
      nic_port.name = name + ":" + std::to_string(number);
      nic_port.port = uint8_t(number);
      nic_port.up = port.state == IBV_PORT_ACTIVE;
      nic_port.context = std::move(context);
    }
  }
  return found;
}

// Chooses a RoCE v2 address on Ethernet, IPv4-mapped if there is one, because link-local addresses work on one network
// segment only. Returns false if there is none.
bool choose_gid(NicPort& nic_port, int n_gids) {
  bool found = false;
  for (int i = 0; i < n_gids; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(nic_port.context.get(), nic_port.port, uint32_t(i), &entry, 0) != 0) continue;
    if (nic_port.ethernet && entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    const bool mapped = IN6_IS_ADDR_V4MAPPED(reinterpret_cast<const in6_addr*>(entry.gid.raw));
    if (found && !mapped) continue;
    found = true;
    nic_port.gid_index = i;
    std::copy_n(entry.gid.raw, nic_port.end.gid.size(), nic_port.end.gid.begin());
    if (mapped) break;
  }
  return found;
}

Error cannot_register(const NicPort& nic_port, size_t bytes, int error) {
  std::string why = std::strerror(error);
  rlimit limit{};
  if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < bytes)
    why = "the limit on locked memory is " + std::to_string(limit.rlim_cur >> 10) + " KiB (ulimit -l)";
  if (error == EFAULT) why += "; the memory may belong to a device whose driver exports no dma-buf";
  return unavailable(nic_port.name + " cannot register " + std::to_string(bytes >> 20) + " MiB of KV memory: " + why);
}

Status register_regions(NicPort& nic_port, const TransportOptions& options) {
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
  for (const MemoryRange& region : options.regions) {
    std::optional<DmaBuf> exported;
    if (options.queue) {
      auto tried = options.queue->dma_buf(region);
      if (!tried) return unavailable(tried.error().message);
      exported = std::move(tried.value());
    }
    nic_port.device_memory = exported.has_value();
    ibv_pd* pd = nic_port.protection.get();
    MemoryRegion registered(exported
                                ? ibv_reg_dmabuf_mr(pd, exported->offset, region.size(),
                                                    reinterpret_cast<uint64_t>(region.data()), exported->fd, kAccess)
                                : ibv_reg_mr(pd, region.data(), region.size(), kAccess));
    if (!registered) return cannot_register(nic_port, region.size(), errno);
    nic_port.regions.push_back(std::move(registered));
  }
  return ok();
}

Result<Queue> make_queue(NicPort& nic_port) {
  Queue queue;
  queue.completions.reset(ibv_create_cq(nic_port.context.get(), int(nic_port.queue_depth), nullptr, nullptr, 0));
  ibv_qp_init_attr wanted{};
  wanted.send_cq = queue.completions.get();
  wanted.recv_cq = nic_port.arrivals.get();
  wanted.srq = nic_port.receives.get();
  wanted.cap.max_send_wr = nic_port.queue_depth;
  wanted.cap.max_send_sge = nic_port.pieces;
  wanted.qp_type = IBV_QPT_RC;
  if (queue.completions) queue.pair.reset(ibv_create_qp(nic_port.protection.get(), &wanted));
  if (!queue.pair) return unavailable(nic_port, "cannot create a queue pair", errno);
  queue.end = nic_port.end;
  queue.end.number = queue.pair->qp_num;
  queue.end.psn = uint32_t(random_secret() & 0xffffff);  // random: packets of older connections do not fit
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = nic_port.port;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (int error = ibv_modify_qp(queue.pair.get(), &attributes,
                                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
    return unavailable(nic_port, "cannot set up a queue pair", error);
  return queue;
}

Status connect_queue(const NicPort& nic_port, Queue& queue, const NicPortEnd& their) {
  ibv_qp_attr to{};
  to.qp_state = IBV_QPS_RTR;
  to.path_mtu = std::min(ibv_mtu(nic_port.end.mtu), ibv_mtu(their.mtu));
  to.dest_qp_num = their.number;
  to.rq_psn = their.psn;
  to.max_dest_rd_atomic = nic_port.end.reads;
  to.min_rnr_timer = kNotReadyTimer;
  to.ah_attr.dlid = their.lid;
  to.ah_attr.port_num = nic_port.port;
  to.ah_attr.is_global = nic_port.ethernet;
  std::copy(their.gid.begin(), their.gid.end(), to.ah_attr.grh.dgid.raw);
  to.ah_attr.grh.sgid_index = uint8_t(nic_port.gid_index);
  to.ah_attr.grh.hop_limit = 64;
  if (int error = ibv_modify_qp(queue.pair.get(), &to,
                                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
    return unavailable(nic_port, "there is no route to the peer", error);
  ibv_qp_attr ready{};
  ready.qp_state = IBV_QPS_RTS;
  ready.timeout = kTimeout;
  ready.retry_cnt = kRetries;
  ready.rnr_retry = kNotReadyRetries;
  ready.sq_psn = queue.end.psn;
  ready.max_rd_atomic = std::min(nic_port.end.reads, their.reads);
  if (int error = ibv_modify_qp(queue.pair.get(), &ready,
                                IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                    IBV_QP_MAX_QP_RD_ATOMIC))
    return unavailable(nic_port, "cannot set up a queue pair", error);
  return ok();
}

Status fill(NicPort& nic_port, const TransportOptions& options) {
  ibv_context* context = nic_port.context.get();
  ibv_device_attr can{};
  ibv_port_attr port{};
  if (ibv_query_device(context, &can) != 0 || ibv_query_port(context, nic_port.port, &port) != 0)
    return unavailable(nic_port, "cannot be queried", errno);
  nic_port.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  nic_port.end.lid = port.lid;
  nic_port.end.mtu = uint8_t(port.active_mtu);
  nic_port.end.reads = uint8_t(std::clamp(std::min(can.max_qp_rd_atom, can.max_qp_init_rd_atom), 1, kReads));
  nic_port.queue_depth = uint32_t(std::min(kQueueDepth, can.max_qp_wr));
  nic_port.pieces = uint32_t(std::clamp(std::min(can.max_sge, can.max_sge_rd), 1, kPieces));
  if ((can.device_cap_flags & IBV_DEVICE_MEM_WINDOW) == 0)
    return unavailable(nic_port.name + " has no memory windows, so access to KV could not be revoked");
  if (!choose_gid(nic_port, port.gid_tbl_len) && nic_port.ethernet)
    return unavailable(nic_port.name + " has no RoCE v2 address: its network interface needs an IP address");

  const int n_arrivals = std::min({kArrivals, can.max_srq_wr, can.max_cqe});
  ibv_srq_init_attr receives{};
  receives.attr = {uint32_t(n_arrivals), 1, 0};
  nic_port.protection.reset(ibv_alloc_pd(context));
  nic_port.arrivals.reset(ibv_create_cq(context, n_arrivals, nullptr, nullptr, 0));
  if (nic_port.protection) nic_port.receives.reset(ibv_create_srq(nic_port.protection.get(), &receives));
  if (!nic_port.arrivals || !nic_port.receives) return unavailable(nic_port, "cannot create queues", errno);
  for (int i = 0; i < n_arrivals; ++i)
    if (int error = post_receive(nic_port)) return unavailable(nic_port, "cannot post receives", error);
  auto binder = make_queue(nic_port);
  if (!binder) return binder.error();
  nic_port.binder = std::move(binder).value();
  if (Status itself = connect_queue(nic_port, nic_port.binder, nic_port.binder.end); !itself) return itself;
  return register_regions(nic_port, options);
}

}  // namespace

int post_receive(NicPort& nic_port) {
  ibv_recv_wr empty{}, *bad = nullptr;
  return ibv_post_srq_recv(nic_port.receives.get(), &empty, &bad);
}

Result<std::vector<NicPort>> open_nic_ports(const TransportOptions& options) {
  int n = 0;
  const Devices devices(ibv_get_device_list(&n));
  if (!devices || n == 0)
    return unavailable(
        "this machine has no RDMA device (ibv_devices lists them); Soft-RoCE makes one of any network interface: rdma "
        "link add rxe0 type rxe netdev eth0");
  std::string trouble, known;
  std::vector<NicPort> ports = list_ports(devices.get(), n, trouble), chosen;
  for (const NicPort& port : ports) known += (known.empty() ? "" : ", ") + port.name;
  for (const std::string& nic : options.nics) {  // "mlx5_0" means its port 1
    auto it = std::ranges::find_if(ports, [&](const NicPort& p) { return nic == p.name || nic + ":1" == p.name; });
    if (it == ports.end())
      return invalid("--rdma-nics " + nic + " is given twice or is no RDMA port here: expected some of " + known +
                     trouble);
    if (!it->up) return unavailable(nic + " is not up");
    chosen.push_back(std::move(*it));
    ports.erase(it);
  }
  for (NicPort& port : ports)
    if (options.nics.empty() && port.up) chosen.push_back(std::move(port));
  if (chosen.empty()) return unavailable("no RDMA port is up" + (known.empty() ? "" : " of " + known) + trouble);
  for (NicPort& port : chosen)
    if (Status filled = fill(port, options); !filled) return filled.error();
  return chosen;
}

Result<std::vector<Queue>> make_queues(std::vector<NicPort>& nic_ports, size_t n) {
  std::vector<Queue> queues;
  for (size_t i = 0; i < n; ++i) {
    auto made = make_queue(nic_ports[i]);
    if (!made) return made.error();
    queues.push_back(std::move(made).value());
  }
  return queues;
}

Status connect_queues(std::vector<NicPort>& nic_ports, std::vector<Queue>& queues,
                      const std::vector<NicPortEnd>& theirs) {
  for (size_t i = 0; i < queues.size(); ++i)
    if (Status connected = connect_queue(nic_ports[i], queues[i], theirs[i]); !connected) return connected;
  return ok();
}

std::vector<NicPortEnd> ends_of(const std::vector<Queue>& queues) {
  std::vector<NicPortEnd> ends;
  for (const Queue& queue : queues) ends.push_back(queue.end);
  return ends;
}

}  // namespace xpyd::disagg::rdma
