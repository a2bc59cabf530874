// The rdma transport: one-sided verbs (libibverbs, reliable connections) between instances of any process or host. Its
// other parts are rdma_verbs (devices, queue pairs) and rdma_serving (the owner's half). This file has the initiator's
// half.
#include "disagg/transport/rdma/rdma.h"

#include <arpa/inet.h>

#include <algorithm>

#include "disagg/transport/transports.h"

namespace xpyd::disagg::rdma {
namespace {

// How long an unwanted transfer waits for its requests in flight before the link destroys its queue pairs.
constexpr double kUnwantedSeconds = 2;
constexpr size_t kRequestBytes = 1 << 20;
constexpr size_t kMaxMessageBytes = 4096;
// Bytes in flight on one queue pair. A cancelled transfer waits for as many; 400 Gb/s * 20 us are 1 MB.
constexpr size_t kAheadBytes = 4 << 20;
constexpr size_t kStripeBytes = 256 << 10;  // smaller transfers use one NIC port

}  // namespace

bool plan_requests(std::span<const Copy> copies, KvOp op, std::span<const AddressRange> ranges,
                   std::span<const MemoryRange> regions, const RequestLimits& limits, Requests& planned) {
  const bool write = op == KvOp::write;
  planned = {};
  uint32_t range = 0;
  for (const Copy& copy : copies) {
    const std::byte* local_side = write ? copy.source : copy.destination;
    auto local = reinterpret_cast<uint64_t>(local_side);
    auto remote = reinterpret_cast<uint64_t>(write ? copy.destination : copy.source);
    const size_t region = copy.bytes == 0 ? 0 : region_of(regions, local_side, copy.bytes);
    XPYD_CHECK(copy.bytes == 0 || region < regions.size(),
               "the local side of a copy is outside the memory of this transport");
    planned.bytes += copy.bytes;
    for (size_t left = copy.bytes; left > 0;) {
      // Consecutive copies mostly lie in the same range.
      if (range >= ranges.size() || remote - ranges[range].begin >= ranges[range].bytes) {
        const AddressRange* found = find_range(ranges, remote, 1);
        if (!found) return false;
        range = uint32_t(found - ranges.data());
      }
      Request* request = planned.list.empty() ? nullptr : &planned.list.back();
      LocalPiece* piece = planned.pieces.empty() ? nullptr : &planned.pieces.back();
      // Adjacent addresses in two memory regions are two pieces.
      const bool longer = piece && piece->address + piece->bytes == local && piece->region == uint32_t(region);
      if (!request || request->range != range || request->remote + request->bytes != remote ||
          request->bytes == limits.bytes || (request->n_pieces == limits.pieces && !longer)) {
        planned.list.push_back({remote, range, uint32_t(planned.pieces.size()), 0, 0});
        request = &planned.list.back();
      }
      const size_t in_range = ranges[range].bytes - (remote - ranges[range].begin);
      const auto n = uint32_t(std::min({left, in_range, limits.bytes - request->bytes}));
      if (longer && request->n_pieces > 0) {
        piece->bytes += n;
      } else {
        planned.pieces.push_back({local, n, uint32_t(region)});
        ++request->n_pieces;
      }
      request->bytes += n;
      local += n, remote += n, left -= n;
    }
  }
  return true;
}

BatchSize next_batch(const Requests& planned, KvOp op, size_t next, int room, bool alone) {
  const bool write = op == KvOp::write;
  const size_t all = planned.list.size();
  BatchSize size;
  // The owner counts the last request of a write. The owner does not see a read, and a write without bytes has no
  // request, so a notice follows them.
  const bool notice = !write || all == 0;
  const int most = std::min(kBatchRequests, room);
  size_t bytes = 0;
  while (next < all && bytes < kBatchBytes && size.n < most && (!write || alone || next + 1 < all)) {
    bytes += planned.list[next++].bytes;
    ++size.n;
  }
  size.last = next == all && (!notice || (alone && room > size.n));
  size.notice = notice && size.last;
  return size;
}

RdmaTransport::RdmaTransport(const TransportOptions& options, std::vector<NicPort> nic_ports)
    : PostingTransport("rdma", options),
      nic_ports_(std::move(nic_ports)),
      serving_(nic_ports_, options.regions),
      bootstrap_("rdma", options.self, transport_limits(kMaxMessageBytes)),
      clock_(*options.clock),
      device_queue_(nic_ports_[0].device_memory ? options.queue : nullptr),
      calls_("rdma", options_) {
  for (const NicPort& nic_port : nic_ports_) most_pieces_ = std::min(most_pieces_, nic_port.pieces);
  pieces_.resize(size_t(kBatchRequests) * most_pieces_);
}

// The bootstrap ends first, because its callbacks use the members. Queue pairs are destroyed before their NIC ports.
RdmaTransport::~RdmaTransport() {
  bootstrap_.end();
  transfers_.clear(), peers_.clear();
}

Status RdmaTransport::start() {
  return bootstrap_.listen(options_, [this](const ChannelPtr& channel, PeerId peer) {
    return hear(
        channel,
        [this, channel, peer, joined = false](std::string_view bytes) mutable {
          const auto offer = from_bytes<Offer>(bytes);
          if (joined || !offer || offer.value().nic_ports.empty()) return false;
          return joined = serving_.join(peer, channel, offer.value());
        },
        [this, channel, peer] { serving_.leave(peer, channel.get()); });
  });
}

Status RdmaTransport::call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer) {
  auto made = make_queues(nic_ports_, std::min(nic_ports_.size(), kMaxNicPorts));
  if (!made) return made.error();
  auto queues = std::make_shared<std::vector<Queue>>(std::move(made).value());  // for the bootstrap's I/O thread only
  return bootstrap_.call(address, 0, answer, [queues](const ChannelPtr& channel, const auto& wanted) {
    wanted->channel = held(channel);
    say(channel, Offer{ends_of(*queues), ""});
    auto left = std::make_shared<std::atomic<bool>>(false);
    return hear(
        channel,
        [queues, left, weak = std::weak_ptr(wanted)](std::string_view bytes) {
          auto offer = from_bytes<Offer>(bytes);
          auto waits = weak.lock();
          if (!offer || !waits || !waits->channel) return false;
          waits->set(Connected{std::move(waits->channel), left, std::move(*queues), std::move(offer).value()});
          return true;
        },
        [left] { *left = true; });
  });
}

Result<std::shared_ptr<Link>> RdmaTransport::connect_peer(PeerId peer, const std::string& address) {
  auto met = calls_.ask(peer, address, [&](const auto& answer) { return call(address, answer); });
  if (!met) return met.error();
  if (!met.value()) return std::shared_ptr<Link>();
  if (auto known = peers_.find(peer); known != peers_.end()) end(*known->second);
  auto& [channel, left, queues, offer] = *met.value();
  const size_t n = offer.nic_ports.size();
  Status connected = invalid("the peer refuses the connection: " + offer.refusal);
  if (n > 0 && n <= queues.size()) {
    queues.resize(n);
    connected = connect_queues(nic_ports_, queues, offer.nic_ports);
  }
  if (!connected)
    return Error{ErrorCode::unavailable,
                 "instance " + std::to_string(peer) + " over rdma: " + connected.error().message};
  auto link = std::make_shared<Link>(Link{
      address, parse_transport_address("rdma", address).value().regions, std::move(channel), std::move(left), {}, {}});
  for (Queue& queue : queues) link->queue_pairs.push_back({std::move(queue), {}});
  return link;
}

void RdmaTransport::leave(PeerId peer, const std::shared_ptr<Link>& link) {
  calls_.give_up(peer);
  if (link) end(*link);
  serving_.leave(peer, nullptr);
}

std::shared_ptr<Transfer> RdmaTransport::begin(TransferId, const std::shared_ptr<Link>& link, const KvTransfer& what,
                                               const TransferPlan& plan) {
  const RemoteKey& key = what.registration;
  const bool permitted = key.generation != 0 && key.secret == permit(options_.self, what.op) &&
                         key.rkeys.size() >= key.ranges.size() * link->queue_pairs.size();
  auto t = std::make_shared<Transfer>(Transfer{.link = link, .what = what});
  if (!permitted ||
      !plan_requests(plan.copies, what.op, key.ranges, options_.regions, {kRequestBytes, most_pieces_}, t->requests))
    return nullptr;
  if (device_queue_ && what.op == KvOp::write) t->mark = device_queue_->mark();
  link->waiting.push_back(t.get());
  pump(*link);
  return t;
}

TransferState RdmaTransport::progress(Transfer& t, bool unwanted) {
  Link& link = *t.link;
  if (t.state == TransferState::in_flight) poll_completions(link);
  if (*link.left) end(link);
  pump(link);
  if (t.state != TransferState::in_flight || !unwanted) return t.state;
  const double now = clock_.now();
  if (t.until_s == 0) {
    t.until_s = now + kUnwantedSeconds;
    std::erase(link.waiting, &t);
  }
  if (t.batches == 0) t.state = TransferState::failed;
  if (t.state == TransferState::in_flight && now >= t.until_s) end(link);
  return t.state;
}

// Posts what the queue pairs take, in the order of post().
void RdmaTransport::pump(Link& link) {
  while (!link.waiting.empty() && advance(link, *link.waiting.front())) link.waiting.pop_front();
}

bool RdmaTransport::advance(Link& link, Transfer& t) {
  if (t.mark != 0 && !device_queue_->reached(t.mark)) return false;
  const bool striped = link.queue_pairs.size() > 1 && t.requests.bytes >= kStripeBytes;
  while (!t.sent) {
    if (striped || t.nic_port < 0)
      t.nic_port = int(std::ranges::min_element(link.queue_pairs, {}, &QueuePair::bytes) - link.queue_pairs.begin());
    const QueuePair& pair = link.queue_pairs[size_t(t.nic_port)];
    if (pair.bytes >= kAheadBytes) return false;
    const int room = int(nic_ports_[size_t(t.nic_port)].queue_depth - pair.requests);
    const BatchSize size = next_batch(t.requests, t.what.op, t.next, room, !striped || t.batches == 0);
    if (size.n == 0 && !size.notice) return false;
    if (!send_batch(link, t, size)) {
      end(link);
      return false;
    }
  }
  return true;
}

bool RdmaTransport::send_batch(Link& link, Transfer& t, const BatchSize& size) {
  const auto nic_port = size_t(t.nic_port);
  QueuePair& pair = link.queue_pairs[nic_port];
  const RemoteKey& key = t.what.registration;
  const bool write = t.what.op == KvOp::write;
  const int n = size.n + int(size.notice);
  size_t bytes = 0, n_pieces = 0;
  for (int i = 0; i < n; ++i) {
    ibv_send_wr& wr = requests_[i];
    wr = {};
    wr.next = &wr + 1;
    if (i == size.n) continue;  // the notice
    const Request& request = t.requests.list[t.next++];
    wr.sg_list = &pieces_[n_pieces];
    wr.num_sge = int(request.n_pieces);
    for (uint32_t k = 0; k < request.n_pieces; ++k) {
      const LocalPiece& piece = t.requests.pieces[request.first_piece + k];
      pieces_[n_pieces++] = {piece.address, piece.bytes, nic_ports_[nic_port].regions[piece.region]->lkey};
    }
    wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    wr.wr.rdma = {request.remote, key.rkeys[request.range * (key.rkeys.size() / key.ranges.size()) + nic_port]};
    bytes += request.bytes;
  }
  ibv_send_wr& last = requests_[n - 1];
  last.next = nullptr;
  last.send_flags = IBV_SEND_SIGNALED;
  if (size.last) {
    last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    last.imm_data = htonl(key.generation);
    if (!write) last.send_flags |= IBV_SEND_FENCE;  // starts after the reads have completed
    t.sent = true;
  }
  pair.batches.push_back({&t, uint32_t(n), bytes});
  pair.requests += uint32_t(n);
  pair.bytes += bytes;
  ++t.batches;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(pair.queue.pair.get(), requests_, &bad) == 0;
}

void RdmaTransport::poll_completions(Link& link) {
  for (QueuePair& pair : link.queue_pairs) {
    ibv_wc found;
    while (ibv_poll_cq(pair.queue.completions.get(), 1, &found) == 1) {
      if (found.status != IBV_WC_SUCCESS) return end(link);
      const Batch batch = pair.batches.front();
      pair.batches.pop_front();
      pair.requests -= batch.requests;
      pair.bytes -= batch.bytes;
      Transfer& t = *batch.transfer;
      if (--t.batches == 0 && (t.sent || t.until_s > 0)) t.state = t.sent ? TransferState::done : TransferState::failed;
    }
  }
}

void RdmaTransport::end(Link& link) {
  for (const QueuePair& pair : link.queue_pairs)
    for (const Batch& batch : pair.batches) batch.transfer->state = TransferState::failed;
  for (Transfer* t : link.waiting) t->state = TransferState::failed;
  link.waiting.clear();
  link.queue_pairs.clear();
  link.channel->close("its queue pairs are destroyed");
}

}  // namespace xpyd::disagg::rdma

namespace xpyd::disagg {

MadeTransport make_rdma_transport(const TransportOptions& options) {
  XPYD_CHECK(options.clock != nullptr);
  auto nic_ports = rdma::open_nic_ports(options);
  if (!nic_ports) return nic_ports.error();
  auto made = std::make_unique<rdma::RdmaTransport>(options, std::move(nic_ports.value()));
  if (auto started = made->start(); !started) return started.error();
  return std::unique_ptr<KvTransport>(std::move(made));
}

}  // namespace xpyd::disagg
