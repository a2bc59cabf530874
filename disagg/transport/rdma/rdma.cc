// The rdma transport: one-sided verbs (libibverbs, reliable connections) between instances of any process or host. Its
// other parts are rdma_verbs (devices, queue pairs), rdma_messages and bootstrap (messages over TCP), rdma_plan
// (ranges, requests, batches) and rdma_serving (the owner's half). This file has the initiator's half.
#include "disagg/transport/rdma/rdma.h"

#include <arpa/inet.h>

#include <algorithm>

#include "disagg/transport/transports.h"

namespace xpyd::disagg::rdma {
namespace {

// How long a cancelled transfer waits for its requests in flight before the link destroys its queue pairs.
constexpr double kCancelSeconds = 2;
constexpr size_t kRequestBytes = 1 << 20;
constexpr uint32_t kMaxIndex = 1 << 20;

// The limits that every NIC port allows.
RequestLimits limits_of(const std::vector<NicPort>& nic_ports) {
  RequestLimits limits{kRequestBytes, UINT32_MAX};
  for (const NicPort& nic_port : nic_ports) {
    limits.bytes = std::min(limits.bytes, nic_port.message_bytes);
    limits.pieces = std::min(limits.pieces, uint32_t(nic_port.pieces));
  }
  return limits;
}

}  // namespace

RdmaTransport::RdmaTransport(const TransportOptions& options, std::vector<NicPort> nic_ports)
    : PostingTransport("rdma", options),
      nic_ports_(std::move(nic_ports)),
      serving_(nic_ports_, options.regions),
      bootstrap_("rdma", options.self, transport_limits(kMaxMessageBytes)),
      limits_(limits_of(nic_ports_)),
      clock_(*options.clock),
      device_queue_(nic_ports_[0].device_memory ? options.queue : nullptr),
      calls_("rdma", options_),
      nic_port_requests_(nic_ports_.size()),
      requests_(kBatchRequests + 1),
      pieces_(size_t(kBatchRequests) * limits_.pieces) {}

// The bootstrap ends first, because its callbacks use the members. Queue pairs are destroyed before their NIC ports.
RdmaTransport::~RdmaTransport() {
  bootstrap_.end();
  transfers_.clear(), peers_.clear();
}

Status RdmaTransport::start() {
  return bootstrap_.listen(options_,
                           [this](const ChannelPtr& channel, PeerId peer) { return accepted(channel, peer); });
}

ChannelEvents RdmaTransport::accepted(const ChannelPtr& channel, PeerId peer) {
  return hear(
      channel,
      [this, channel, peer, n_nic_ports = size_t(0)](std::string_view bytes) mutable {
        if (n_nic_ports > 0) {
          const auto message = read_message(bytes, n_nic_ports);
          return message && serving_.take(peer, message.value());
        }
        const auto offer = from_bytes<Offer>(bytes);
        if (offer && !offer.value().nic_ports.empty()) n_nic_ports = serving_.join(peer, channel, offer.value());
        return n_nic_ports > 0;
      },
      [this, channel, peer] { serving_.left(peer, channel.get()); });
}

bool Inbox::take(const Message& message) {
  std::lock_guard lock(mutex);
  switch (message.kind) {
    case Message::opened:
      if (message.registration.index > kMaxIndex) return false;
      keys[message.registration.index] = std::make_shared<const RegistrationKeys>(message.registration);
      return true;
    case Message::closed: {
      auto it = keys.find(message.registration.index);
      if (it != keys.end() && it->second->generation == message.registration.generation) keys.erase(it);
      return true;
    }
    case Message::synced: synced = std::max(synced.load(), message.number); return true;
    case Message::renewed:
      keys.clear();  // their queue pairs are destroyed
      renewed = message.nic_ports;
      news = true;
      return true;
    default: return false;
  }
}

Result<std::shared_ptr<Link>> RdmaTransport::connect_peer(PeerId peer, const std::string& address) {
  auto met = calls_.ask(peer, address, [&](const auto& answer) { return call(address, answer); });
  if (!met) return met.error();
  if (!met.value()) return std::shared_ptr<Link>();
  auto link = answered(address, *met.value());
  if (!link)
    return Error{ErrorCode::unavailable, "instance " + std::to_string(peer) + " over rdma: " + link.error().message};
  if (auto known = peers_.find(peer); known != peers_.end()) die(*known->second);
  serving_.connect(peer);
  return link;
}

Status RdmaTransport::call(const std::string& address, const std::shared_ptr<Answer<Connected>>& answer) {
  auto made = make_queues(nic_ports_, std::min(nic_ports_.size(), kMaxNicPorts), Role::post);
  if (!made) return made.error();
  auto queues = std::make_shared<std::vector<Queue>>(std::move(made).value());  // for the bootstrap's I/O thread only
  return bootstrap_.call(address, 0, answer, [queues](const ChannelPtr& channel, const auto& wanted) {
    wanted->channel = held(channel);
    say(channel, Offer{ends_of(*queues), ""});
    auto inbox = std::make_shared<Inbox>();
    return hear(
        channel,
        [queues, inbox, weak = std::weak_ptr(wanted), n = size_t(0)](std::string_view bytes) mutable {
          if (n > 0) {
            const auto message = read_message(bytes, n);
            return message && inbox->take(message.value());
          }
          auto offer = from_bytes<Offer>(bytes);
          auto waits = weak.lock();
          if (!offer || !waits) return false;
          n = offer.value().nic_ports.size();
          waits->set(Connected{std::move(waits->channel), inbox, std::move(*queues), std::move(offer).value()});
          return n > 0;
        },
        [inbox] {
          std::lock_guard lock(inbox->mutex);
          inbox->left = true;
          inbox->news = true;
        });
  });
}

Result<std::shared_ptr<Link>> RdmaTransport::answered(const std::string& address, Connected& met) {
  if (met.offer.nic_ports.empty()) return invalid("the peer refuses the connection: " + met.offer.refusal);
  if (met.offer.nic_ports.size() > met.queues.size()) return invalid("the peer has too many NIC ports");
  met.queues.resize(met.offer.nic_ports.size());
  if (auto connected = connect_queues(nic_ports_, met.queues, met.offer.nic_ports); !connected)
    return connected.error();
  auto link = std::make_shared<Link>();
  link->address = address;
  link->regions = parse_transport_address("rdma", address).value().regions;
  link->channel = std::move(met.channel);
  link->inbox = met.inbox;
  number_lines(*link, met.queues);
  return link;
}

void RdmaTransport::leave(PeerId peer, const std::shared_ptr<Link>& link) {
  calls_.give_up(peer);
  if (link) die(*link);
  serving_.disconnect(peer);
}

std::shared_ptr<Transfer> RdmaTransport::begin(TransferId, const std::shared_ptr<Link>& link, const KvTransfer& what,
                                               const TransferPlan& plan) {
  auto t = std::make_shared<Transfer>();
  t->link = link;
  t->what = what;
  t->copies = plan.copies;
  t->batches.assign(nic_ports_.size(), 0);
  if (device_queue_ && what.op == KvOp::write) t->mark = device_queue_->mark();
  link->waiting.push_back(t.get());
  pump(*link);
  return t;
}

void RdmaTransport::settle(Transfer& t, bool good) {
  t.stage = good ? Transfer::done : Transfer::failed;
  t.keys.reset();
}

TransferState RdmaTransport::progress(Transfer& t, bool unwanted) {
  Link& link = *t.link;
  if (!t.settled()) {
    poll_completions();
    pump(link);
  }
  if (!t.settled() && unwanted && t.until_s == 0) {
    t.until_s = clock_.now() + kCancelSeconds;
    if (t.stage != Transfer::sent) {  // a sent transfer has no request that could be held back
      std::erase(link.waiting, &t);
      t.stage = Transfer::stopped;
      if (t.n_batches == 0) settle(t, false);
    }
  }
  const double now = clock_.now();
  const bool late = t.what.deadline_s > 0 && now >= t.what.deadline_s;
  if (!t.settled() && (late || (t.until_s > 0 && now >= t.until_s))) {
    std::erase(link.waiting, &t);
    if (t.n_batches > 0) renew(link, &t, false);
    if (!t.settled()) settle(t, false);
  }
  if (!t.settled()) return TransferState::in_flight;
  return t.stage == Transfer::done ? TransferState::done : TransferState::failed;
}

// Advances every waiting transfer as far as possible, in the order of post().
void RdmaTransport::pump(Link& link) {
  read_mail(link);
  bool full = false;
  for (size_t i = 0; i < link.waiting.size();) {
    Transfer& t = *link.waiting[i];
    if (t.stage == Transfer::refused && t.sync != 0 && link.inbox->synced >= t.sync) settle(t, false);
    if (link.state == Link::ready) {
      if (t.stage == Transfer::seeking) seek(link, t);
      if (t.stage == Transfer::moving && !full) {
        full = !advance(link, t);
        if (link.state != Link::ready) return;  // it broke, and `waiting` may have changed
      }
    }
    if (t.stage == Transfer::seeking || t.stage == Transfer::moving || t.stage == Transfer::refused)
      ++i;
    else
      link.waiting.erase(link.waiting.begin() + long(i));
  }
}

// Looks up the keys of a transfer's registration. Keys come on the link's channel and may arrive later than the control
// message that names the registration. The transfer therefore asks the owner once, and a key that is missing after the
// answer does not exist.
void RdmaTransport::seek(Link& link, Transfer& t) {
  if (t.mark != 0 && !device_queue_->reached(t.mark)) return;
  {
    std::lock_guard lock(link.inbox->mutex);
    auto it = link.inbox->keys.find(t.what.registration.index);
    if (it != link.inbox->keys.end() && t.what.registration.secret == 0 &&
        it->second->generation == t.what.registration.generation) {
      t.keys = it->second;
      t.stage = Transfer::moving;
    } else if (t.sync != 0 && link.inbox->synced < t.sync) {
      return;
    }
  }
  if (t.stage == Transfer::moving) {
    if (!t.planned)
      t.planned = t.keys->op == t.what.op && plan_requests(t.copies, *t.keys, options_.regions, limits_, t.requests);
    if (!t.planned) refuse(link, t);
  } else if (t.sync != 0) {
    refuse(link, t);
  } else {
    t.sync = ++link.last_sync;
    say(link.channel, Message{Message::sync, {}, t.sync, {}});
  }
}

// For a transfer that no registration allows: tells the owner. The transfer fails when the owner has counted it.
void RdmaTransport::refuse(Link& link, Transfer& t) {
  t.stage = Transfer::refused;
  t.sync = ++link.last_sync;
  say(link.channel, Message{Message::refused, {}, t.sync, {}});
}

// ---- queue pairs: posting, completions, errors, renewal

namespace {

// Bytes in flight on one queue pair. A cancelled transfer waits for as many; 400 Gb/s * 20 us are 1 MB.
constexpr size_t kAheadBytes = 4 << 20;
constexpr size_t kStripeBytes = 256 << 10;  // smaller transfers use one NIC port

}  // namespace

void RdmaTransport::number_lines(Link& link, std::vector<Queue>& queues) {
  link.queue_pairs.clear();
  for (size_t nic_port = 0; nic_port < queues.size(); ++nic_port) {
    link.queue_pairs.push_back({std::move(queues[nic_port]), ++last_serial_, {}, 0, 0});
    places_[last_serial_] = {&link, nic_port};
  }
}

bool RdmaTransport::advance(Link& link, Transfer& t) {
  while (t.stage == Transfer::moving) {
    if (t.nic_port < 0 || t.requests.bytes >= kStripeBytes) {
      t.nic_port = 0;
      for (size_t nic_port = 1; nic_port < link.queue_pairs.size(); ++nic_port)
        if (link.queue_pairs[nic_port].bytes < link.queue_pairs[size_t(t.nic_port)].bytes) t.nic_port = int(nic_port);
    }
    QueuePair& queue_pair = link.queue_pairs[size_t(t.nic_port)];
    const int n_before = queue_pair.requests;
    if (queue_pair.bytes >= kAheadBytes) return false;
    if (!send_batch(link, t, size_t(t.nic_port))) {
      renew(link, &t, false);
      return false;
    }
    if (queue_pair.requests == n_before) return false;  // full, or the last request waits for other NIC ports
  }
  return true;
}

bool RdmaTransport::send_batch(Link& link, Transfer& t, size_t nic_port) {
  QueuePair& queue_pair = link.queue_pairs[nic_port];
  const bool write = t.what.op == KvOp::write;
  const int room = std::min(nic_ports_[nic_port].queue_depth - queue_pair.requests,
                            nic_ports_[nic_port].send_depth - nic_port_requests_[nic_port]);
  const bool alone = t.n_batches == t.batches[nic_port];
  const BatchSize size = next_batch(t.requests, t.what.op, t.next, room, alone);
  const int n = size.n + int(size.notice);
  if (n == 0) return true;
  size_t bytes = 0, n_pieces = 0;
  for (int i = 0; i < n; ++i) {
    ibv_send_wr& wr = requests_[size_t(i)];
    wr = {};
    wr.wr_id = uint64_t(queue_pair.serial) << 1;
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
    wr.wr.rdma = {request.remote, t.keys->key(request.range, nic_port)};
    if (write && !device_queue_ && int(request.bytes) <= queue_pair.queue.inline_bytes) wr.send_flags = IBV_SEND_INLINE;
    bytes += request.bytes;
  }
  ibv_send_wr& last = requests_[size_t(n - 1)];
  last.next = nullptr;
  last.wr_id |= 1;
  last.send_flags |= IBV_SEND_SIGNALED;
  if (size.last) {
    last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    last.imm_data = htonl(t.keys->generation);
    if (size.notice && !write) last.send_flags |= IBV_SEND_FENCE;  // starts after the reads have completed
    t.stage = Transfer::sent;
  }
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(queue_pair.queue.pair.get(), requests_.data(), &bad);
  queue_pair.batches.push_back({&t, n, bytes});
  queue_pair.requests += n;
  queue_pair.bytes += bytes;
  nic_port_requests_[nic_port] += n;
  ++t.batches[nic_port];
  ++t.n_batches;
  return error == 0;
}

void RdmaTransport::poll_completions() {
  constexpr int kMost = 16;
  ibv_wc found[kMost];
  for (size_t nic_port = 0; nic_port < nic_ports_.size(); ++nic_port) {
    int n;
    do {
      n = ibv_poll_cq(nic_ports_[nic_port].sends.get(), kMost, found);
      for (int i = 0; i < n; ++i) completed(nic_port, found[i]);
    } while (n == kMost);
  }
}

void RdmaTransport::completed(size_t nic_port, const ibv_wc& wc) {
  auto place = places_.find(uint32_t(wc.wr_id >> 1));
  if (place == places_.end()) return;  // its queue pair is destroyed
  Link& link = *place->second.link;
  QueuePair& queue_pair = link.queue_pairs[nic_port];
  const Batch batch = queue_pair.batches.front();
  if (wc.status != IBV_WC_SUCCESS) return renew(link, batch.transfer, wc.status == IBV_WC_REM_ACCESS_ERR);
  if ((wc.wr_id & 1) == 0) return;
  queue_pair.batches.pop_front();
  queue_pair.requests -= batch.requests;
  queue_pair.bytes -= batch.bytes;
  nic_port_requests_[nic_port] -= batch.requests;
  Transfer& t = *batch.transfer;
  --t.batches[nic_port];
  --t.n_batches;
  if (t.n_batches == 0 && (t.stage == Transfer::sent || t.stage == Transfer::stopped))
    settle(t, t.stage == Transfer::sent);
}

std::vector<Transfer*> RdmaTransport::drop_queues(Link& link) {
  std::vector<Transfer*> hit;
  for (size_t nic_port = 0; nic_port < link.queue_pairs.size(); ++nic_port) {
    QueuePair& queue_pair = link.queue_pairs[nic_port];
    places_.erase(queue_pair.serial);
    queue_pair.queue.pair.reset();
    for (const Batch& batch : queue_pair.batches) {
      nic_port_requests_[nic_port] -= batch.requests;
      Transfer& t = *batch.transfer;
      --t.batches[nic_port];
      if (--t.n_batches == 0) hit.push_back(&t);
    }
    queue_pair.batches.clear();
    queue_pair.requests = 0;
    queue_pair.bytes = 0;
  }
  return hit;
}

void RdmaTransport::renew(Link& link, Transfer* culprit, bool refused) {
  if (link.state == Link::lost) return;
  const size_t n = link.queue_pairs.size();
  for (Transfer* t : drop_queues(link)) {
    if (refused && t == culprit && t->stage != Transfer::stopped) {
      // The transfer fails when the owner's `renewed` says that it has counted it.
      t->stage = Transfer::refused;
      t->sync = 0;
      if (std::find(link.waiting.begin(), link.waiting.end(), t) == link.waiting.end()) link.waiting.push_back(t);
      continue;
    }
    settle(*t, false);
    std::erase(link.waiting, t);
  }
  for (Transfer* t : link.waiting)  // they have not failed, but need new keys
    if (t->stage == Transfer::moving) t->stage = Transfer::seeking, t->sync = 0;
  auto made = make_queues(nic_ports_, n, Role::post);
  if (!made) return die(link);
  number_lines(link, made.value());
  link.state = Link::renewing;
  Message message{Message::renew, {}, refused ? 1u : 0u, {}};
  for (const QueuePair& queue_pair : link.queue_pairs) message.nic_ports.push_back(queue_pair.queue.end);
  say(link.channel, message);
}

void RdmaTransport::read_mail(Link& link) {
  if (!link.inbox->news || link.state == Link::lost) return;
  std::optional<std::vector<NicPortEnd>> renewed;
  bool left;
  {
    std::lock_guard lock(link.inbox->mutex);
    renewed.swap(link.inbox->renewed);
    left = link.inbox->left;
    link.inbox->news = false;
  }
  bool up = !left && renewed && link.state == Link::renewing && renewed->size() == link.queue_pairs.size();
  if (up) {
    std::vector<Queue> queues;
    for (QueuePair& queue_pair : link.queue_pairs) queues.push_back(std::move(queue_pair.queue));
    up = connect_queues(nic_ports_, queues, *renewed).ok();
    for (size_t i = 0; i < queues.size(); ++i) link.queue_pairs[i].queue = std::move(queues[i]);
  }
  if (!up) return die(link);
  link.state = Link::ready;
  // The owner has counted the transfers that it refused.
  std::erase_if(link.waiting, [this](Transfer* t) {
    if (t->stage != Transfer::refused || t->sync != 0) return false;
    settle(*t, false);
    return true;
  });
}

void RdmaTransport::die(Link& link) {
  if (std::exchange(link.state, Link::lost) == Link::lost) return;
  for (Transfer* t : drop_queues(link)) {
    settle(*t, false);
    std::erase(link.waiting, t);
  }
  for (Transfer* t : std::exchange(link.waiting, {})) settle(*t, false);
  link.queue_pairs.clear();
  link.channel->close("the connection attempt was given up");
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
