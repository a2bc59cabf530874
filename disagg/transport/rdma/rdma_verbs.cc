#include "disagg/transport/rdma/rdma_verbs.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace xpyd::disagg::rdma {
namespace {

constexpr int kQueueDepth = 512;   // requests of one queue pair in flight
constexpr int kSendDepth = 16384;  // … of all initiators' queue pairs of a NIC port
constexpr int kServeDepth = 4096;  // see NicPort::serve_depth
constexpr int kArrivals = 2048;    // transfers that may arrive before the owner polls
constexpr int kReceiveBatch = 64;  // receives that one call posts again
constexpr int kReads = 16;         // more helps only over long distances
constexpr int kPieces = 16;

Error unavailable(const std::string& what) { return {ErrorCode::unavailable, "--transport rdma: " + what}; }

std::string system_error(int error) { return std::strerror(error); }

struct Devices {
  int n = 0;
  ibv_device** list = ibv_get_device_list(&n);
  Devices() = default;
  Devices(const Devices&) = delete;
  ~Devices() {
    if (list) ibv_free_device_list(list);
  }
};

struct Port {
  ibv_device* device;
  Context context;
  ibv_device_attr attributes;
  ibv_port_attr port;
  uint8_t number;
  std::string name() const { return std::string(ibv_get_device_name(device)) + ":" + std::to_string(number); }
};

// Returns every port of every device that can be opened. Appends to `trouble` why a device cannot.
std::vector<Port> list_ports(const Devices& devices, std::string& trouble) {
  std::vector<Port> found;
  for (int i = 0; i < devices.n; ++i) {
    ibv_device* device = devices.list[i];
    int n_ports = 1;
    for (int number = 1; number <= n_ports; ++number) {
      Context context(ibv_open_device(device));
      ibv_device_attr attributes{};
      ibv_port_attr port{};
      if (!context || ibv_query_device(context.get(), &attributes) != 0 ||
          ibv_query_port(context.get(), uint8_t(number), &port) != 0) {
        trouble += std::string("; ") + ibv_get_device_name(device) + " cannot be opened (" + system_error(errno) +
                   "; does this user have access to /dev/infiniband?)";
        break;
      }
      n_ports = attributes.phys_port_cnt;
      found.push_back({device, std::move(context), attributes, port, uint8_t(number)});
    }
  }
  return found;
}

// "mlx5_0" means its port 1.
bool named(const Port& port, const std::string& nic) {
  return nic == port.name() || (port.number == 1 && nic == ibv_get_device_name(port.device));
}

// Chooses a RoCE v2 address on Ethernet, IPv4-mapped if there is one, because link-local addresses work on one network
// segment only. Returns false if there is none.
bool choose_gid(NicPort& nic_port, int n_gids) {
  int best = -1;
  for (int i = 0; i < n_gids; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(nic_port.context.get(), nic_port.port, uint32_t(i), &entry, 0) != 0) continue;
    if (nic_port.ethernet && entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool mapped = std::memcmp(entry.gid.raw, kMapped, sizeof kMapped) == 0;
    if (best >= 0 && !mapped) continue;
    best = i;
    std::copy_n(entry.gid.raw, nic_port.gid.size(), nic_port.gid.begin());
    if (mapped) break;
  }
  nic_port.gid_index = std::max(0, best);
  return best >= 0;
}

Error cannot_register(const NicPort& nic_port, size_t bytes, int error) {
  std::string why = system_error(error);
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

Status fill(NicPort& nic_port, const Port& port, const TransportOptions& options) {
  const ibv_device_attr& can = port.attributes;
  nic_port.ethernet = port.port.link_layer == IBV_LINK_LAYER_ETHERNET;
  nic_port.lid = port.port.lid;
  nic_port.mtu = port.port.active_mtu;
  nic_port.message_bytes = std::max<size_t>(port.port.max_msg_sz, 4096);
  nic_port.reads = uint8_t(std::clamp(std::min(can.max_qp_rd_atom, can.max_qp_init_rd_atom), 1, kReads));
  nic_port.queue_depth = std::min(kQueueDepth, can.max_qp_wr);
  nic_port.send_depth = std::min(kSendDepth, can.max_cqe);
  nic_port.pieces = std::clamp(std::min(can.max_sge, can.max_sge_rd), 1, kPieces);
  if ((can.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
    return unavailable(nic_port.name + " has no memory windows of type 2B, so access to KV could not be revoked");
  if (!choose_gid(nic_port, port.port.gid_tbl_len) && nic_port.ethernet)
    return unavailable(nic_port.name + " has no RoCE v2 address: its network interface needs an IP address");

  const int n_arrivals = std::min({kArrivals, can.max_srq_wr, can.max_cqe / 2});
  nic_port.serve_depth = std::min(kServeDepth, can.max_cqe / 4);
  ibv_srq_init_attr receives{};
  receives.attr = {uint32_t(n_arrivals), 1, 0};
  nic_port.protection.reset(ibv_alloc_pd(nic_port.context.get()));
  nic_port.sends.reset(ibv_create_cq(nic_port.context.get(), nic_port.send_depth, nullptr, nullptr, 0));
  nic_port.serving.reset(
      ibv_create_cq(nic_port.context.get(), n_arrivals + 2 * nic_port.serve_depth, nullptr, nullptr, 0));
  if (nic_port.protection) nic_port.arrivals.reset(ibv_create_srq(nic_port.protection.get(), &receives));
  if (!nic_port.protection || !nic_port.sends || !nic_port.serving || !nic_port.arrivals)
    return unavailable(nic_port.name + " cannot create completion queues: " + system_error(errno));
  nic_port.receive_batch = std::clamp(n_arrivals / 4, 1, kReceiveBatch);
  if (int error = post_receives(nic_port, n_arrivals))
    return unavailable(nic_port.name + " cannot post receives: " + system_error(error));
  return register_regions(nic_port, options);
}

}  // namespace

int post_receives(NicPort& nic_port, int n) {
  ibv_recv_wr chain[kReceiveBatch], *bad = nullptr;
  while (n > 0) {
    const int now = std::min(n, kReceiveBatch);
    for (int i = 0; i < now; ++i) {
      chain[i] = {};
      chain[i].next = i + 1 < now ? &chain[i + 1] : nullptr;
    }
    if (int error = ibv_post_srq_recv(nic_port.arrivals.get(), chain, &bad)) return error;
    n -= now;
  }
  return 0;
}

Result<std::vector<NicPort>> open_nic_ports(const TransportOptions& options) {
  Devices devices;
  if (!devices.list || devices.n == 0)
    return unavailable(
        "this machine has no RDMA device (ibv_devices lists them); Soft-RoCE makes one of any network interface: rdma "
        "link add rxe0 type rxe netdev eth0");
  std::string trouble;
  std::vector<Port> ports = list_ports(devices, trouble);
  std::vector<Port*> chosen;
  std::string known;
  for (const Port& port : ports) known += (known.empty() ? "" : ", ") + port.name();
  for (const std::string& nic : options.nics) {
    auto it = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return named(port, nic); });
    if (it == ports.end())
      return invalid("--rdma-nics " + nic + ": there is no such RDMA port; expected one of: " + known + trouble);
    if (it->port.state != IBV_PORT_ACTIVE) return unavailable(nic + " is not up");
    chosen.push_back(&*it);
  }
  if (options.nics.empty()) {
    for (Port& port : ports)
      if (port.port.state == IBV_PORT_ACTIVE) chosen.push_back(&port);
  }
  if (chosen.empty()) return unavailable("no RDMA port is up" + (known.empty() ? "" : " of " + known) + trouble);

  std::vector<NicPort> nic_ports;
  for (Port* port : chosen) {
    NicPort nic_port;
    nic_port.name = port->name();
    nic_port.port = port->number;
    if (!port->context) return invalid("--rdma-nics: " + nic_port.name + " is given twice");
    nic_port.context = std::move(port->context);
    if (auto filled = fill(nic_port, *port, options); !filled) return filled.error();
    nic_ports.push_back(std::move(nic_port));
  }
  return nic_ports;
}

namespace {

// A request without an acknowledgement is sent again after 4.096 us * 2^16 (268 ms), six times (Soft-RoCE takes seven
// for "without end"). A broken path is therefore noticed after 2 to 8 s. A caller that cannot wait that long sets a
// deadline.
constexpr uint8_t kTimeout = 16, kRetries = 6;
// 7: retries without end while the owner has no posted receive, because it has not polled for long.
constexpr uint8_t kNotReadyRetries = 7;
constexpr uint8_t kNotReadyTimer = 12;  // 0.64 ms
constexpr uint32_t kInlineBytes = 220;

Error unavailable(const NicPort& nic_port, const char* what, int error) {
  return {ErrorCode::unavailable, nic_port.name + ": " + what + ": " + std::strerror(error)};
}

ibv_qp* create(NicPort& nic_port, Role role, uint32_t& inline_bytes) {
  ibv_qp_init_attr attributes{};
  ibv_cq* completions = role == Role::post ? nic_port.sends.get() : nic_port.serving.get();
  attributes.send_cq = completions;
  attributes.recv_cq = completions;
  attributes.srq = role == Role::serve ? nic_port.arrivals.get() : nullptr;
  attributes.cap.max_send_wr = uint32_t(nic_port.queue_depth);
  attributes.cap.max_send_sge = role == Role::post ? uint32_t(nic_port.pieces) : 1;
  attributes.cap.max_recv_wr = role == Role::post ? 1 : 0;
  attributes.cap.max_recv_sge = role == Role::post ? 1 : 0;
  attributes.cap.max_inline_data = role == Role::post ? kInlineBytes : 0;
  attributes.qp_type = IBV_QPT_RC;
  ibv_qp* pair = ibv_create_qp(nic_port.protection.get(), &attributes);
  if (!pair && role == Role::post) {  // some devices have no inline data
    attributes.cap.max_inline_data = 0;
    pair = ibv_create_qp(nic_port.protection.get(), &attributes);
  }
  inline_bytes = attributes.cap.max_inline_data;
  return pair;
}

}  // namespace

Result<std::vector<Queue>> make_queues(std::vector<NicPort>& nic_ports, size_t n_nic_ports, Role role) {
  std::vector<Queue> queues;
  for (size_t i = 0; i < n_nic_ports; ++i) {
    NicPort& nic_port = nic_ports[i];
    Queue queue;
    uint32_t inline_bytes = 0;
    queue.pair.reset(create(nic_port, role, inline_bytes));
    if (!queue.pair) return unavailable(nic_port, "cannot create a queue pair", errno);
    queue.inline_bytes = int(inline_bytes);
    queue.end = {nic_port.gid,
                 nic_port.lid,
                 uint8_t(nic_port.mtu),
                 nic_port.reads,
                 queue.pair->qp_num,
                 uint32_t(random_secret() & 0xffffff)};  // random: packets of older connections do not fit
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = nic_port.port;
    if (role == Role::serve) attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (int error = ibv_modify_qp(queue.pair.get(), &attributes,
                                  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
      return unavailable(nic_port, "cannot set up a queue pair", error);
    queues.push_back(std::move(queue));
  }
  return queues;
}

Status connect_queues(std::vector<NicPort>& nic_ports, std::vector<Queue>& queues,
                      const std::vector<NicPortEnd>& theirs) {
  if (theirs.size() != queues.size()) return invalid("the peer has a different number of NIC ports");
  for (size_t i = 0; i < queues.size(); ++i) {
    const NicPort& nic_port = nic_ports[i];
    const NicPortEnd& their = theirs[i];
    ibv_qp_attr to{};
    to.qp_state = IBV_QPS_RTR;
    to.path_mtu = std::min(nic_port.mtu, ibv_mtu(their.mtu));
    to.dest_qp_num = their.number;
    to.rq_psn = their.psn;
    to.max_dest_rd_atomic = nic_port.reads;
    to.min_rnr_timer = kNotReadyTimer;
    to.ah_attr.dlid = their.lid;
    to.ah_attr.port_num = nic_port.port;
    to.ah_attr.is_global = nic_port.ethernet;
    std::copy(their.gid.begin(), their.gid.end(), to.ah_attr.grh.dgid.raw);
    to.ah_attr.grh.sgid_index = uint8_t(nic_port.gid_index);
    to.ah_attr.grh.hop_limit = 64;
    if (int error = ibv_modify_qp(queues[i].pair.get(), &to,
                                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
      return unavailable(nic_port, "there is no route to the peer", error);
    ibv_qp_attr ready{};
    ready.qp_state = IBV_QPS_RTS;
    ready.timeout = kTimeout;
    ready.retry_cnt = kRetries;
    ready.rnr_retry = kNotReadyRetries;
    ready.sq_psn = queues[i].end.psn;
    ready.max_rd_atomic = std::min(nic_port.reads, their.reads);
    if (int error = ibv_modify_qp(queues[i].pair.get(), &ready,
                                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                      IBV_QP_MAX_QP_RD_ATOMIC))
      return unavailable(nic_port, "cannot set up a queue pair", error);
  }
  return ok();
}

std::vector<NicPortEnd> ends_of(const std::vector<Queue>& queues) {
  std::vector<NicPortEnd> ends;
  for (const Queue& queue : queues) ends.push_back(queue.end);
  return ends;
}

}  // namespace xpyd::disagg::rdma
