#include "disagg/transport/rdma/rdma_verbs.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace xpyd::disagg::rdma {
namespace {

constexpr int kQueueDepth = 512;   // requests of one queue pair in flight
constexpr int kSendDepth = 16384;  // of all of them
constexpr int kServeDepth = 4096;  // keys that are being made or revoked
constexpr int kArrivals = 2048;    // posts that may arrive before the owner looks
constexpr int kReceiveBatch = 64;  // as many as one request to the card gives back
constexpr int kReads = 16;         // more only pays over long lines
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

// Every port of every device that can be opened; `trouble` gets why one cannot.
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

// "mlx5_0" names port 1.
bool named(const Port& port, const std::string& nic) {
  return nic == port.name() || (port.number == 1 && nic == ibv_get_device_name(port.device));
}

// RoCE v2, IPv4-mapped where there is one: link-local addresses work on one segment only.
bool choose_gid(Rail& rail, int n_gids) {
  int best = -1;
  for (int i = 0; i < n_gids; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(rail.context.get(), rail.port, uint32_t(i), &entry, 0) != 0) continue;
    if (rail.ethernet && entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool mapped = std::memcmp(entry.gid.raw, kMapped, sizeof kMapped) == 0;
    if (best >= 0 && !mapped) continue;
    best = i;
    std::copy_n(entry.gid.raw, rail.gid.size(), rail.gid.begin());
    if (mapped) break;
  }
  rail.gid_index = std::max(0, best);
  return best >= 0;
}

Error cannot_register(const Rail& rail, size_t bytes, int error) {
  std::string why = system_error(error);
  rlimit limit{};
  if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur < bytes)
    why = "the limit on locked memory is " + std::to_string(limit.rlim_cur >> 10) + " KiB (ulimit -l)";
  if (error == EFAULT) why += "; is it memory of a device whose driver exports no dma-buf?";
  return unavailable(rail.name + " does not register " + std::to_string(bytes >> 20) + " MiB of KV memory: " + why);
}

Status register_regions(Rail& rail, const TransportOptions& options) {
  const int access = IBV_ACCESS_LOCAL_WRITE | (rail.memory_windows ? IBV_ACCESS_MW_BIND : 0);
  for (const MemoryRange& region : options.regions) {
    std::optional<DmaBuf> exported;
    if (options.queue) {
      auto tried = options.queue->dma_buf(region);
      if (!tried) return unavailable(tried.error().message);
      exported = std::move(tried.value());
    }
    if (exported && !rail.memory_windows)
      return unavailable(rail.name +
                         " has no memory windows (type 2B), without which windows of "
                         "device memory cannot be revoked");
    rail.device_memory = exported.has_value();
    ibv_pd* pd = rail.protection.get();
    Registration registered(exported
                                ? ibv_reg_dmabuf_mr(pd, exported->offset, region.size(),
                                                    reinterpret_cast<uint64_t>(region.data()), exported->fd, access)
                                : ibv_reg_mr(pd, region.data(), region.size(), access));
    if (!registered) return cannot_register(rail, region.size(), errno);
    rail.regions.push_back(std::move(registered));
  }
  return ok();
}

Status fill(Rail& rail, const Port& port, Keys keys, const TransportOptions& options) {
  const ibv_device_attr& can = port.attributes;
  rail.ethernet = port.port.link_layer == IBV_LINK_LAYER_ETHERNET;
  rail.lid = port.port.lid;
  rail.mtu = port.port.active_mtu;
  rail.message_bytes = std::max<size_t>(port.port.max_msg_sz, 4096);
  rail.reads = uint8_t(std::clamp(std::min(can.max_qp_rd_atom, can.max_qp_init_rd_atom), 1, kReads));
  rail.queue_depth = std::min(kQueueDepth, can.max_qp_wr);
  rail.send_depth = std::min(kSendDepth, can.max_cqe);
  rail.pieces = std::clamp(std::min(can.max_sge, can.max_sge_rd), 1, kPieces);
  rail.memory_windows = keys == Keys::automatic && (can.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0;
  if (!choose_gid(rail, port.port.gid_tbl_len) && rail.ethernet)
    return unavailable(rail.name + " has no RoCE v2 address: give its network interface an address");

  const int n_arrivals = std::min({kArrivals, can.max_srq_wr, can.max_cqe / 2});
  rail.serve_depth = std::min(kServeDepth, can.max_cqe / 4);
  ibv_srq_init_attr receives{};
  receives.attr = {uint32_t(n_arrivals), 1, 0};
  rail.protection.reset(ibv_alloc_pd(rail.context.get()));
  rail.sends.reset(ibv_create_cq(rail.context.get(), rail.send_depth, nullptr, nullptr, 0));
  rail.serving.reset(ibv_create_cq(rail.context.get(), n_arrivals + 2 * rail.serve_depth, nullptr, nullptr, 0));
  if (rail.protection) rail.arrivals.reset(ibv_create_srq(rail.protection.get(), &receives));
  if (!rail.protection || !rail.sends || !rail.serving || !rail.arrivals)
    return unavailable(rail.name + " gives no queues: " + system_error(errno));
  rail.receive_batch = std::clamp(n_arrivals / 4, 1, kReceiveBatch);
  if (int error = post_receives(rail, n_arrivals))
    return unavailable(rail.name + " takes no receives: " + system_error(error));
  return register_regions(rail, options);
}

}  // namespace

int post_receives(Rail& rail, int n) {
  ibv_recv_wr chain[kReceiveBatch], *bad = nullptr;
  while (n > 0) {
    const int now = std::min(n, kReceiveBatch);
    for (int i = 0; i < now; ++i) {
      chain[i] = {};
      chain[i].next = i + 1 < now ? &chain[i + 1] : nullptr;
    }
    if (int error = ibv_post_srq_recv(rail.arrivals.get(), chain, &bad)) return error;
    n -= now;
  }
  return 0;
}

Result<std::vector<Rail>> open_rails(const TransportOptions& options, Keys keys) {
  Devices devices;
  if (!devices.list || devices.n == 0)
    return unavailable(
        "this machine has no RDMA device (ibv_devices lists them; Soft-RoCE makes one of any "
        "network interface: rdma link add rxe0 type rxe netdev eth0)");
  std::string trouble;
  std::vector<Port> ports = list_ports(devices, trouble);
  std::vector<Port*> chosen;
  std::string known;
  for (const Port& port : ports) known += (known.empty() ? "" : ", ") + port.name();
  for (const std::string& nic : options.nics) {
    auto it = std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return named(port, nic); });
    if (it == ports.end())
      return invalid("--nics " + nic + ": there is no such RDMA port; there are: " + known + trouble);
    if (it->port.state != IBV_PORT_ACTIVE) return unavailable(nic + " is not up");
    chosen.push_back(&*it);
  }
  if (options.nics.empty()) {
    for (Port& port : ports)
      if (port.port.state == IBV_PORT_ACTIVE) chosen.push_back(&port);
  }
  if (chosen.empty()) return unavailable("no RDMA port is up" + (known.empty() ? "" : " of " + known) + trouble);

  std::vector<Rail> rails;
  for (Port* port : chosen) {
    Rail rail;
    rail.name = port->name();
    rail.port = port->number;
    if (!port->context) return invalid("--nics: " + rail.name + " is named twice");
    rail.context = std::move(port->context);
    if (auto filled = fill(rail, *port, keys, options); !filled) return filled.error();
    rails.push_back(std::move(rail));
  }
  return rails;
}

namespace {

// An answer that is lost is asked for again after 4.096 us * 2^16 (268 ms), seven times, so a line
// that is cut is noticed after two to eight seconds; whoever cannot wait that long sets a deadline.
constexpr uint8_t kTimeout = 16, kRetries = 7;
// A full receive queue at the owner (it has not looked for long) is waited for without end.
constexpr uint8_t kNotReadyRetries = 7;
constexpr uint8_t kNotReadyTimer = 12;  // 0.64 ms
constexpr uint32_t kInlineBytes = 220;

Error unavailable(const Rail& rail, const char* what, int error) {
  return {ErrorCode::unavailable, rail.name + ": " + what + ": " + std::strerror(error)};
}

ibv_qp* create(Rail& rail, Role role, uint32_t& inline_bytes) {
  ibv_qp_init_attr attributes{};
  ibv_cq* completions = role == Role::post ? rail.sends.get() : rail.serving.get();
  attributes.send_cq = completions;
  attributes.recv_cq = completions;
  attributes.srq = role == Role::serve ? rail.arrivals.get() : nullptr;
  attributes.cap.max_send_wr = uint32_t(rail.queue_depth);
  attributes.cap.max_send_sge = role == Role::post ? uint32_t(rail.pieces) : 1;
  attributes.cap.max_recv_wr = role == Role::post ? 1 : 0;
  attributes.cap.max_recv_sge = role == Role::post ? 1 : 0;
  attributes.cap.max_inline_data = role == Role::post ? kInlineBytes : 0;
  attributes.qp_type = IBV_QPT_RC;
  ibv_qp* pair = ibv_create_qp(rail.protection.get(), &attributes);
  if (!pair && role == Role::post) {  // some devices have none
    attributes.cap.max_inline_data = 0;
    pair = ibv_create_qp(rail.protection.get(), &attributes);
  }
  inline_bytes = attributes.cap.max_inline_data;
  return pair;
}

}  // namespace

Result<std::vector<Queue>> make_queues(std::vector<Rail>& rails, size_t n_rails, Role role) {
  std::vector<Queue> queues;
  for (size_t i = 0; i < n_rails; ++i) {
    Rail& rail = rails[i];
    Queue queue;
    uint32_t inline_bytes = 0;
    queue.pair.reset(create(rail, role, inline_bytes));
    if (!queue.pair) return unavailable(rail, "no queue pair", errno);
    queue.inline_bytes = int(inline_bytes);
    queue.end = {
        rail.gid,           rail.lid,
        uint8_t(rail.mtu),  rail.reads,
        queue.pair->qp_num, uint32_t(random_secret() & 0xffffff)};  // of a connection that no other can be mistaken for
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = rail.port;
    if (role == Role::serve) attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (int error = ibv_modify_qp(queue.pair.get(), &attributes,
                                  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
      return unavailable(rail, "queue pair", error);
    queues.push_back(std::move(queue));
  }
  return queues;
}

Status connect_queues(std::vector<Rail>& rails, std::vector<Queue>& queues, const std::vector<RailEnd>& theirs) {
  if (theirs.size() != queues.size()) return invalid("the other side has another number of rails");
  for (size_t i = 0; i < queues.size(); ++i) {
    const Rail& rail = rails[i];
    const RailEnd& their = theirs[i];
    ibv_qp_attr to{};
    to.qp_state = IBV_QPS_RTR;
    to.path_mtu = std::min(rail.mtu, ibv_mtu(their.mtu));
    to.dest_qp_num = their.number;
    to.rq_psn = their.psn;
    to.max_dest_rd_atomic = rail.reads;
    to.min_rnr_timer = kNotReadyTimer;
    to.ah_attr.dlid = their.lid;
    to.ah_attr.port_num = rail.port;
    to.ah_attr.is_global = rail.ethernet;
    std::copy(their.gid.begin(), their.gid.end(), to.ah_attr.grh.dgid.raw);
    to.ah_attr.grh.sgid_index = uint8_t(rail.gid_index);
    to.ah_attr.grh.hop_limit = 64;
    if (int error = ibv_modify_qp(queues[i].pair.get(), &to,
                                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
      return unavailable(rail, "no way to the other side", error);
    ibv_qp_attr ready{};
    ready.qp_state = IBV_QPS_RTS;
    ready.timeout = kTimeout;
    ready.retry_cnt = kRetries;
    ready.rnr_retry = kNotReadyRetries;
    ready.sq_psn = queues[i].end.psn;
    ready.max_rd_atomic = std::min(rail.reads, their.reads);
    if (int error = ibv_modify_qp(queues[i].pair.get(), &ready,
                                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                      IBV_QP_MAX_QP_RD_ATOMIC))
      return unavailable(rail, "queue pair", error);
  }
  return ok();
}

std::vector<RailEnd> ends_of(const std::vector<Queue>& queues) {
  std::vector<RailEnd> ends;
  for (const Queue& queue : queues) ends.push_back(queue.end);
  return ends;
}

}  // namespace xpyd::disagg::rdma
