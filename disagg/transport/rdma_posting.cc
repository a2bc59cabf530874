#include "disagg/transport/rdma_posting.h"

#include <arpa/inet.h>

#include <algorithm>

namespace xpyd::rdma {
namespace {

constexpr double kConnectSeconds = 5;
// How long a cancelled transfer waits for what is under way before it takes the link down with it.
constexpr double kCancelSeconds = 2;
constexpr size_t kRequestBytes = 1 << 20;
constexpr size_t kBatchBytes = 1 << 20;
constexpr size_t kBatchRequests = 64;
// Under way in one queue: 400 Gb/s * 20 us are 1 MB, and a cancelled transfer waits for this much.
constexpr size_t kAheadBytes = 4 << 20;
constexpr size_t kStripeBytes = 256 << 10;  // smaller transfers use one rail
constexpr uint32_t kMaxIndex = 1 << 20;

}  // namespace

Posting::Posting(std::vector<Rail>& rails, std::vector<MemoryRange> regions, Clock& clock,
                 DeviceQueue* device_queue)
    : rails_(rails),
      regions_(std::move(regions)),
      clock_(clock),
      device_queue_(device_queue),
      rail_requests_(rails.size()) {}

Posting::~Posting() = default;

bool Posting::Mail::take(const Message& message) {
  std::lock_guard lock(mutex);
  switch (message.kind) {
    case Message::opened:
      if (message.window.index > kMaxIndex) return false;
      keys[message.window.index] = message.window;
      return true;
    case Message::closed: {
      auto it = keys.find(message.window.index);
      if (it != keys.end() && it->second.generation == message.window.generation) keys.erase(it);
      return true;
    }
    case Message::synced:
      synced = std::max(synced, message.number);
      return true;
    case Message::renewed:
      keys.clear();  // of queue pairs that are gone
      renewed = message.rails;
      return true;
    default:
      return false;
  }
}

Posting::Link* Posting::find(PeerId peer) {
  auto it = links_.find(peer);
  return it == links_.end() ? nullptr : &it->second;
}

void Posting::number_lines(Link& link, std::vector<Queue>& queues) {
  link.lines.clear();
  for (size_t rail = 0; rail < queues.size(); ++rail) {
    link.lines.push_back({std::move(queues[rail]), ++last_serial_, {}, 0, 0});
    places_[last_serial_] = {&link, rail};
  }
}

Status Posting::connect(PeerId self, PeerId peer, const Address& address, SideChannels& channels) {
  disconnect(peer);
  auto wrong = [&](const std::string& why) {
    return Error{ErrorCode::unavailable, "instance " + std::to_string(peer) + " over rdma: " + why};
  };
  auto made = make_queues(rails_, std::min(rails_.size(), kMaxRails), Role::post);
  if (!made) return wrong(made.error().message);
  std::vector<Queue>& queues = made.value();
  std::shared_ptr<SideChannel> channel;
  auto answered =
      call_side(address.host, address.port, frame(Hello{self, address.token, ends_of(queues), ""}),
                kConnectSeconds, kSideLimits, channel);
  if (!answered) return wrong(answered.error().message);
  auto hello = parse_hello(answered.value());
  if (!hello) return wrong("its answer is none");
  if (hello->rails.empty()) return wrong("it refuses: " + hello->refusal);
  if (hello->rails.size() > queues.size()) return wrong("its answer has too many rails");
  queues.resize(hello->rails.size());
  if (auto connected = connect_queues(rails_, queues, hello->rails); !connected)
    return wrong(connected.error().message);

  Link& link = links_[peer];
  link.peer = peer;
  link.address = address;
  link.channel = channel;
  link.mail = std::make_shared<Mail>();
  channel->trusted = true;
  channel->frame = [mail = link.mail, n = queues.size()](std::string_view body) {
    auto message = parse_message(body, n);
    return message && mail->take(*message);
  };
  channel->left = [mail = link.mail] {
    std::lock_guard lock(mail->mutex);
    mail->left = true;
  };
  number_lines(link, queues);
  channels.add(channel);
  return ok();
}

void Posting::disconnect(PeerId peer) {
  Link* link = find(peer);
  if (!link) return;
  die(*link);
  links_.erase(peer);
}

std::byte* Posting::remote(PeerId peer, int region) const {
  auto it = links_.find(peer);
  if (it == links_.end() || region < 0 || size_t(region) >= it->second.address.regions.size())
    return nullptr;
  return reinterpret_cast<std::byte*>(it->second.address.regions[size_t(region)].base);
}

TransferId Posting::post(const KvTransfer& transfer, const TransferPlan& plan) {
  const TransferId id = ++last_id_;
  Transfer& t = transfers_[id];
  t.what = transfer;
  t.copies = plan.copies;
  ++stats_.posts;
  Link* link = find(transfer.peer);
  const bool late = transfer.deadline_s > 0 && clock_.now() >= transfer.deadline_s;
  if (!link || link->state == Link::dead || late) {
    settle(t, false);
    return id;
  }
  if (device_queue_ && transfer.op == KvOp::write) t.mark = device_queue_->mark();
  t.batches.assign(rails_.size(), 0);
  link->waiting.push_back(id);
  pump(*link);
  return id;
}

void Posting::settle(Transfer& t, bool good) {
  t.stage = good ? Transfer::done : Transfer::failed;
  if (!good) {
    ++stats_.failed;
    return;
  }
  stats_.bytes += int64_t(t.bytes);
  stats_.descriptors += int64_t(t.copies.size());
}

void Posting::leave_queue(Link& link, TransferId id) { std::erase(link.waiting, id); }

TransferState Posting::poll(TransferId id) {
  auto it = transfers_.find(id);
  XPYD_CHECK(it != transfers_.end(), "poll of a transfer that is none");
  Transfer& t = it->second;
  auto settled = [&] { return t.stage == Transfer::done || t.stage == Transfer::failed; };
  Link* link = find(t.what.peer);
  if (!settled()) {
    poll_completions();
    if (link) pump(*link);
  }
  if (!settled() && t.what.deadline_s > 0 && clock_.now() >= t.what.deadline_s) {
    leave_queue(*link, id);
    if (t.n_batches > 0) renew(*link, id, false);
    if (!settled()) settle(t, false);
  }
  if (!settled()) return TransferState::in_flight;
  const bool good = t.stage == Transfer::done;
  transfers_.erase(it);
  return good ? TransferState::done : TransferState::failed;
}

void Posting::cancel(TransferId id) {
  auto it = transfers_.find(id);
  if (it == transfers_.end()) return;
  Transfer& t = it->second;
  if (t.stage == Transfer::done || t.stage == Transfer::failed) return;
  const double until = clock_.now() + kCancelSeconds;
  if (t.what.deadline_s == 0 || t.what.deadline_s > until) t.what.deadline_s = until;
  if (t.stage == Transfer::sent) return;  // nothing is left to hold back
  leave_queue(*find(t.what.peer), id);
  t.stage = Transfer::stopped;
  if (t.n_batches == 0) settle(t, false);
}

bool Posting::find_local(const std::byte* at, size_t bytes, size_t& region) const {
  for (region = 0; region < regions_.size(); ++region) {
    const MemoryRange& r = regions_[region];
    if (at >= r.data() && at + bytes <= r.data() + r.size()) return true;
  }
  return false;
}

// Requests of all copies. False: some of the remote side is outside the window.
bool Posting::plan(Transfer& t) const {
  const bool write = t.what.op == KvOp::write;
  if (t.keys.op != t.what.op) return false;
  size_t most = kRequestBytes;
  uint32_t most_pieces = UINT32_MAX;
  for (const Rail& rail : rails_) {
    most = std::min(most, rail.message_bytes);
    most_pieces = std::min(most_pieces, uint32_t(rail.pieces));
  }
  uint32_t range = 0;
  for (const Copy& copy : t.copies) {
    const std::byte* local = write ? copy.source : copy.destination;
    auto remote = reinterpret_cast<uint64_t>(write ? copy.destination : copy.source);
    size_t region;
    XPYD_CHECK(copy.bytes == 0 || find_local(local, copy.bytes, region),
               "the local side of a copy is outside the memory of this transport");
    t.bytes += copy.bytes;
    for (size_t left = copy.bytes; left > 0;) {
      const auto& ranges = t.keys.ranges;
      auto holds = [&](uint32_t i) {
        return i < ranges.size() && remote >= ranges[i].begin &&
               remote - ranges[i].begin < ranges[i].bytes;
      };
      if (!holds(range)) {
        auto after = std::upper_bound(
            ranges.begin(), ranges.end(), remote,
            [](uint64_t value, const WindowKeys::Range& r) { return value < r.begin; });
        if (after == ranges.begin()) return false;
        range = uint32_t(after - ranges.begin() - 1);
        if (!holds(range)) return false;
      }
      Request* last = t.requests.empty() ? nullptr : &t.requests.back();
      if (!last || last->range != range || last->remote + last->bytes != remote ||
          last->bytes == most ||
          (last->pieces == most_pieces &&
           t.pieces.back().addr + t.pieces.back().length != reinterpret_cast<uint64_t>(local))) {
        t.requests.push_back({remote, range, uint32_t(t.pieces.size()), 0, 0});
        last = &t.requests.back();
      }
      const size_t room = ranges[range].bytes - (remote - ranges[range].begin);
      const auto n = uint32_t(std::min({left, room, most - last->bytes}));
      ibv_sge* piece = last->pieces > 0 ? &t.pieces.back() : nullptr;
      if (piece && piece->addr + piece->length == reinterpret_cast<uint64_t>(local) &&
          piece->lkey == uint32_t(region))
        piece->length += n;
      else if (piece && last->pieces == most_pieces) {
        // Neighbours in address, but of two registrations.
        t.requests.push_back({remote, range, uint32_t(t.pieces.size()), 0, 0});
        continue;
      } else {
        t.pieces.push_back({reinterpret_cast<uint64_t>(local), n, uint32_t(region)});
        ++last->pieces;
      }
      last->bytes += n;
      local += n, remote += n, left -= n;
    }
  }
  t.planned = true;
  return true;
}

// A piece that no window allows: the owner hears of it, and has counted it when this transfer
// fails.
void Posting::refuse(Link& link, Transfer& t) {
  t.stage = Transfer::refused;
  t.sync = ++link.last_sync;
  link.channel->send(frame(Message{Message::refused, {}, t.sync, {}}));
}

// Window keys come on the channel, control messages go their own way: a key that is not there yet
// may be under way, until the owner has answered.
void Posting::seek(Link& link, Transfer& t) {
  if (t.mark != 0 && !device_queue_->reached(t.mark)) return;
  {
    std::lock_guard lock(link.mail->mutex);
    auto it = link.mail->keys.find(t.what.window.index);
    const bool here = it != link.mail->keys.end() && t.what.window.secret == 0 &&
                      it->second.generation == t.what.window.generation;
    if (here) {
      t.keys = it->second;
      t.stage = Transfer::moving;
    } else if (t.sync != 0 && link.mail->synced < t.sync) {
      return;
    }
  }
  if (t.stage == Transfer::moving) {
    if (!t.planned && !plan(t)) refuse(link, t);
  } else if (t.sync != 0) {
    refuse(link, t);
  } else {
    t.sync = ++link.last_sync;
    link.channel->send(frame(Message{Message::sync, {}, t.sync, {}}));
  }
}

bool Posting::send_batch(Link& link, TransferId id, Transfer& t, size_t rail) {
  Line& line = link.lines[rail];
  const bool write = t.what.op == KvOp::write;
  requests_.clear();
  pieces_.clear();
  requests_.reserve(kBatchRequests + 1);
  pieces_.reserve((kBatchRequests + 1) * size_t(rails_[rail].pieces));
  size_t bytes = 0;
  const bool alone = t.n_batches == t.batches[rail];  // nothing is under way on other rails
  const int room = std::min(rails_[rail].queue_depth - line.requests,
                            rails_[rail].send_depth - rail_requests_[rail]) -
                   1;
  auto is_last = [&] { return t.next + 1 == t.requests.size(); };
  while (t.next < t.requests.size() && bytes < kBatchBytes && requests_.size() < kBatchRequests &&
         int(requests_.size()) < room && (!write || !is_last() || alone)) {
    const Request& request = t.requests[t.next];
    ibv_send_wr wr{};
    wr.sg_list = pieces_.data() + pieces_.size();
    wr.num_sge = int(request.pieces);
    for (uint32_t i = 0; i < request.pieces; ++i) {
      ibv_sge piece = t.pieces[request.first_piece + i];
      piece.lkey = rails_[rail].regions[piece.lkey]->lkey;
      pieces_.push_back(piece);
    }
    wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    wr.wr.rdma = {request.remote, t.keys.ranges[request.range].keys[rail]};
    if (write && !device_queue_ && int(request.bytes) <= line.queue.inline_bytes)
      wr.send_flags = IBV_SEND_INLINE;
    if (write && is_last()) {
      wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      wr.imm_data = htonl(t.keys.generation);
    }
    requests_.push_back(wr);
    bytes += request.bytes;
    ++t.next;
  }
  bool whole = t.next == t.requests.size() && (!requests_.empty() || room > 0);
  // Behind the reads, and for a write of nothing.
  if (whole && (!write || t.requests.empty())) {
    if (alone) {
      ibv_send_wr notice{};
      notice.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      notice.imm_data = htonl(t.keys.generation);
      notice.send_flags = write ? 0 : IBV_SEND_FENCE;
      requests_.push_back(notice);
    } else {
      whole = false;
    }
  }
  if (requests_.empty()) return true;
  for (size_t i = 0; i + 1 < requests_.size(); ++i) requests_[i].next = &requests_[i + 1];
  for (ibv_send_wr& wr : requests_) wr.wr_id = uint64_t(line.serial) << 1;
  requests_.back().wr_id |= 1;
  requests_.back().send_flags |= IBV_SEND_SIGNALED;
  if (whole) t.stage = Transfer::sent;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(line.queue.pair.get(), requests_.data(), &bad);
  const int n = int(requests_.size());
  line.batches.push_back({id, n, bytes});
  line.requests += n;
  line.bytes += bytes;
  rail_requests_[rail] += n;
  ++t.batches[rail];
  ++t.n_batches;
  return error == 0;
}

bool Posting::advance(Link& link, TransferId id, Transfer& t) {
  while (t.stage == Transfer::moving) {
    if (t.rail < 0 || t.bytes >= kStripeBytes) {
      t.rail = 0;
      for (size_t rail = 1; rail < link.lines.size(); ++rail)
        if (link.lines[rail].bytes < link.lines[size_t(t.rail)].bytes) t.rail = int(rail);
    }
    Line& line = link.lines[size_t(t.rail)];
    const int n_before = line.requests;
    if (line.bytes >= kAheadBytes) return false;
    if (!send_batch(link, id, t, size_t(t.rail))) {
      renew(link, id, false);
      return false;
    }
    if (line.requests == n_before) return false;  // full, or the last one waits for other rails
  }
  return true;
}

void Posting::pump(Link& link) {
  read_mail(link);
  if (link.waiting.empty()) return;
  uint64_t synced;
  {
    std::lock_guard lock(link.mail->mutex);
    synced = link.mail->synced;
  }
  bool full = false;
  const std::vector<TransferId> order(link.waiting.begin(), link.waiting.end());
  for (TransferId id : order) {
    Transfer& t = transfers_.at(id);
    if (t.stage == Transfer::refused && t.sync != 0 && synced >= t.sync) settle(t, false);
    if (link.state == Link::ready) {
      if (t.stage == Transfer::seeking) seek(link, t);
      if (t.stage == Transfer::moving && !full) full = !advance(link, id, t);
    }
    if (t.stage != Transfer::seeking && t.stage != Transfer::moving && t.stage != Transfer::refused)
      leave_queue(link, id);
  }
}

void Posting::read_mail(Link& link) {
  std::optional<std::vector<RailEnd>> renewed;
  {
    std::lock_guard lock(link.mail->mutex);
    renewed.swap(link.mail->renewed);
    if (link.mail->left && link.state != Link::dead)
      renewed.reset();
    else if (!renewed)
      return;
  }
  if (link.state == Link::dead) return;
  bool up = renewed && link.state == Link::renewing && renewed->size() == link.lines.size();
  if (up) {
    std::vector<Queue> queues;
    for (Line& line : link.lines) queues.push_back(std::move(line.queue));
    up = connect_queues(rails_, queues, *renewed).ok();
    for (size_t i = 0; i < queues.size(); ++i) link.lines[i].queue = std::move(queues[i]);
  }
  if (!up) return die(link);
  link.state = Link::ready;
  for (TransferId id : std::vector<TransferId>(link.waiting.begin(), link.waiting.end())) {
    Transfer& t = transfers_.at(id);
    if (t.stage != Transfer::refused || t.sync != 0) continue;
    settle(t, false);
    leave_queue(link, id);
  }
}

void Posting::poll_completions() {
  ibv_wc found[16];
  for (size_t rail = 0; rail < rails_.size(); ++rail) {
    for (int n; (n = ibv_poll_cq(rails_[rail].sends.get(), 16, found)) > 0;)
      for (int i = 0; i < n; ++i) completed(rail, found[i]);
  }
}

void Posting::completed(size_t rail, const ibv_wc& wc) {
  auto place = places_.find(uint32_t(wc.wr_id >> 1));
  if (place == places_.end()) return;  // of a queue pair that is no more
  Link& link = *place->second.link;
  Line& line = link.lines[rail];
  const Batch batch = line.batches.front();
  if (wc.status != IBV_WC_SUCCESS)
    return renew(link, batch.transfer, wc.status == IBV_WC_REM_ACCESS_ERR);
  if ((wc.wr_id & 1) == 0) return;
  line.batches.pop_front();
  line.requests -= batch.requests;
  line.bytes -= batch.bytes;
  rail_requests_[rail] -= batch.requests;
  Transfer& t = transfers_.at(batch.transfer);
  --t.batches[rail];
  --t.n_batches;
  if (t.n_batches == 0 && (t.stage == Transfer::sent || t.stage == Transfer::stopped))
    settle(t, t.stage == Transfer::sent);
}

std::vector<TransferId> Posting::drop_queues(Link& link) {
  std::vector<TransferId> hit;
  for (size_t rail = 0; rail < link.lines.size(); ++rail) {
    Line& line = link.lines[rail];
    places_.erase(line.serial);
    line.queue.pair.reset();
    for (const Batch& batch : line.batches) {
      rail_requests_[rail] -= batch.requests;
      Transfer& t = transfers_.at(batch.transfer);
      --t.batches[rail];
      if (--t.n_batches == 0) hit.push_back(batch.transfer);
    }
    line.batches.clear();
    line.requests = 0;
    line.bytes = 0;
  }
  return hit;
}

void Posting::renew(Link& link, TransferId culprit, bool refused) {
  if (link.state == Link::dead) return;
  const size_t n = link.lines.size();
  for (TransferId id : drop_queues(link)) {
    Transfer& t = transfers_.at(id);
    if (refused && id == culprit && t.stage != Transfer::stopped) {
      // Fails when the owner has counted it, which its answer says.
      t.stage = Transfer::refused;
      t.sync = 0;
      if (std::find(link.waiting.begin(), link.waiting.end(), id) == link.waiting.end())
        link.waiting.push_back(id);
      continue;
    }
    settle(t, false);
    leave_queue(link, id);
  }
  for (TransferId id : link.waiting) {  // they have not failed, but their keys are no more
    Transfer& t = transfers_.at(id);
    if (t.stage == Transfer::moving) t.stage = Transfer::seeking, t.sync = 0;
  }
  auto made = make_queues(rails_, n, Role::post);
  if (!made) return die(link);
  number_lines(link, made.value());
  link.state = Link::renewing;
  Message message{Message::renew, {}, refused ? 1u : 0u, {}};
  for (const Line& line : link.lines) message.rails.push_back(line.queue.end);
  link.channel->send(frame(message));
}

void Posting::die(Link& link) {
  link.state = Link::dead;
  for (TransferId id : drop_queues(link)) {
    settle(transfers_.at(id), false);
    leave_queue(link, id);
  }
  for (TransferId id : std::exchange(link.waiting, {})) settle(transfers_.at(id), false);
  link.lines.clear();
  link.channel->end();
}

}  // namespace xpyd::rdma
