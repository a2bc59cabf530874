#include <arpa/inet.h>

#include <algorithm>

#include "disagg/transport/rdma_posting.h"

namespace xpyd::rdma {
namespace {

// Under way in one queue: 400 Gb/s * 20 us are 1 MB, and a cancelled transfer waits for this much.
constexpr size_t kAheadBytes = 4 << 20;
constexpr size_t kStripeBytes = 256 << 10;  // smaller transfers use one rail

}  // namespace

void Posting::number_lines(Link& link, std::vector<Queue>& queues) {
  link.lines.clear();
  for (size_t rail = 0; rail < queues.size(); ++rail) {
    link.lines.push_back({std::move(queues[rail]), ++last_serial_, {}, 0, 0});
    places_[last_serial_] = {&link, rail};
  }
}

bool Posting::advance(Link& link, Transfer& t) {
  while (t.stage == Transfer::moving) {
    if (t.rail < 0 || t.requests.bytes >= kStripeBytes) {
      t.rail = 0;
      for (size_t rail = 1; rail < link.lines.size(); ++rail)
        if (link.lines[rail].bytes < link.lines[size_t(t.rail)].bytes) t.rail = int(rail);
    }
    Line& line = link.lines[size_t(t.rail)];
    const int n_before = line.requests;
    if (line.bytes >= kAheadBytes) return false;
    if (!send_batch(link, t, size_t(t.rail))) {
      renew(link, &t, false);
      return false;
    }
    if (line.requests == n_before) return false;  // full, or the last one waits for other rails
  }
  return true;
}

bool Posting::send_batch(Link& link, Transfer& t, size_t rail) {
  Line& line = link.lines[rail];
  const bool write = t.what.op == KvOp::write;
  const int room = std::min(rails_[rail].queue_depth - line.requests, rails_[rail].send_depth - rail_requests_[rail]);
  const bool alone = t.n_batches == t.batches[rail];
  const BatchSize size = next_batch(t.requests, t.what.op, t.next, room, alone);
  const int n = size.n + int(size.notice);
  if (n == 0) return true;
  size_t bytes = 0, n_pieces = 0;
  for (int i = 0; i < n; ++i) {
    ibv_send_wr& wr = requests_[size_t(i)];
    wr = {};
    wr.wr_id = uint64_t(line.serial) << 1;
    wr.next = &wr + 1;
    if (i == size.n) continue;  // the notice
    const Request& request = t.requests.list[t.next++];
    wr.sg_list = &pieces_[n_pieces];
    wr.num_sge = int(request.n_pieces);
    for (uint32_t k = 0; k < request.n_pieces; ++k) {
      const LocalPiece& piece = t.requests.pieces[request.first_piece + k];
      pieces_[n_pieces++] = {piece.address, piece.bytes, rails_[rail].regions[piece.region]->lkey};
    }
    wr.opcode = write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    wr.wr.rdma = {request.remote, t.keys->ranges[request.range].keys[rail]};
    if (write && !device_queue_ && int(request.bytes) <= line.queue.inline_bytes) wr.send_flags = IBV_SEND_INLINE;
    bytes += request.bytes;
  }
  ibv_send_wr& last = requests_[size_t(n - 1)];
  last.next = nullptr;
  last.wr_id |= 1;
  last.send_flags |= IBV_SEND_SIGNALED;
  if (size.last) {
    if (link.counted.count(t.what)) {  // not one that comes again
      last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      last.imm_data = htonl(t.keys->generation);
    }
    if (size.notice && !write) last.send_flags |= IBV_SEND_FENCE;  // behind the reads
    t.stage = Transfer::sent;
  }
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(line.queue.pair.get(), requests_.data(), &bad);
  line.batches.push_back({&t, n, bytes});
  line.requests += n;
  line.bytes += bytes;
  rail_requests_[rail] += n;
  ++t.batches[rail];
  ++t.n_batches;
  return error == 0;
}

void Posting::poll_completions() {
  constexpr int kMost = 16;
  ibv_wc found[kMost];
  for (size_t rail = 0; rail < rails_.size(); ++rail) {
    int n;
    do {
      n = ibv_poll_cq(rails_[rail].sends.get(), kMost, found);
      for (int i = 0; i < n; ++i) completed(rail, found[i]);
    } while (n == kMost);
  }
}

void Posting::completed(size_t rail, const ibv_wc& wc) {
  auto place = places_.find(uint32_t(wc.wr_id >> 1));
  if (place == places_.end()) return;  // of a queue pair that is no more
  Link& link = *place->second.link;
  Line& line = link.lines[rail];
  const Batch batch = line.batches.front();
  if (wc.status != IBV_WC_SUCCESS) return renew(link, batch.transfer, wc.status == IBV_WC_REM_ACCESS_ERR);
  if ((wc.wr_id & 1) == 0) return;
  line.batches.pop_front();
  line.requests -= batch.requests;
  line.bytes -= batch.bytes;
  rail_requests_[rail] -= batch.requests;
  Transfer& t = *batch.transfer;
  --t.batches[rail];
  --t.n_batches;
  if (t.n_batches == 0 && (t.stage == Transfer::sent || t.stage == Transfer::stopped))
    settle(t, t.stage == Transfer::sent);
}

std::vector<Posting::Transfer*> Posting::drop_queues(Link& link) {
  std::vector<Transfer*> hit;
  for (size_t rail = 0; rail < link.lines.size(); ++rail) {
    Line& line = link.lines[rail];
    places_.erase(line.serial);
    line.queue.pair.reset();
    for (const Batch& batch : line.batches) {
      rail_requests_[rail] -= batch.requests;
      Transfer& t = *batch.transfer;
      --t.batches[rail];
      if (--t.n_batches == 0) hit.push_back(&t);
    }
    line.batches.clear();
    line.requests = 0;
    line.bytes = 0;
  }
  return hit;
}

void Posting::renew(Link& link, Transfer* culprit, bool refused) {
  if (link.state == Link::dead) return;
  const size_t n = link.lines.size();
  for (Transfer* t : drop_queues(link)) {
    if (refused && t == culprit && t->stage != Transfer::stopped) {
      // Fails when the owner has counted it, which its answer says.
      t->stage = Transfer::refused;
      t->sync = 0;
      if (std::find(link.waiting.begin(), link.waiting.end(), t) == link.waiting.end()) link.waiting.push_back(t);
      continue;
    }
    settle(*t, false);
    std::erase(link.waiting, t);
  }
  for (Transfer* t : link.waiting)  // they have not failed, but their keys are no more
    if (t->stage == Transfer::moving) t->stage = Transfer::seeking, t->sync = 0;
  auto made = make_queues(rails_, n, Role::post);
  if (!made) return die(link);
  number_lines(link, made.value());
  link.state = Link::renewing;
  Message message{Message::renew, {}, refused ? 1u : 0u, {}};
  for (const Line& line : link.lines) message.rails.push_back(line.queue.end);
  link.channel->send(frame(message));
}

void Posting::read_mail(Link& link) {
  if (!link.mail->news || link.state == Link::dead) return;
  std::optional<std::vector<RailEnd>> renewed;
  bool left;
  {
    std::lock_guard lock(link.mail->mutex);
    renewed.swap(link.mail->renewed);
    left = link.mail->left;
    link.mail->news = false;
  }
  bool up = !left && renewed && link.state == Link::renewing && renewed->size() == link.lines.size();
  if (up) {
    std::vector<Queue> queues;
    for (Line& line : link.lines) queues.push_back(std::move(line.queue));
    up = connect_queues(rails_, queues, *renewed).ok();
    for (size_t i = 0; i < queues.size(); ++i) link.lines[i].queue = std::move(queues[i]);
  }
  if (!up) return die(link);
  link.state = Link::ready;
  // The owner has counted what it refused.
  std::erase_if(link.waiting, [this](Transfer* t) {
    if (t->stage != Transfer::refused || t->sync != 0) return false;
    settle(*t, false);
    return true;
  });
}

void Posting::die(Link& link) {
  link.state = Link::dead;
  for (Transfer* t : drop_queues(link)) {
    settle(*t, false);
    std::erase(link.waiting, t);
  }
  for (Transfer* t : std::exchange(link.waiting, {})) settle(*t, false);
  link.lines.clear();
  link.channel->end();
}

}  // namespace xpyd::rdma
