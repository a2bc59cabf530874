#include "disagg/transport/rdma_link.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace xpyd::rdma {
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

// Of a connection that no other can be mistaken for.
uint32_t random_psn() {
  uint32_t value = 0;
  XPYD_CHECK(getrandom(&value, sizeof value, 0) == ssize_t(sizeof value));
  return value & 0xffffff;
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
    queue.end = {rail.gid, rail.lid, uint8_t(rail.mtu), rail.reads, queue.pair->qp_num, random_psn()};
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

}  // namespace xpyd::rdma
