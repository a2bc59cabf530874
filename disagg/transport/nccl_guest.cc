#include "disagg/transport/nccl_guest.h"

namespace xpyd::nccl {

Guest::~Guest() {
  pipes_.clear();
  for (const auto& [seq, held] : held_) windows_.leave(held.ask.window, false);
}

void Guest::say(Message::Kind kind, uint64_t seq) { xpyd::say(channel_, Message{.kind = kind, .seq = seq}); }

bool Guest::take(std::string_view body) {
  const auto read = read_message(body);
  if (!read || ended_) return false;
  const Message& message = read.value();
  const uint64_t seq = message.seq;
  if (message.kind == Message::ask || message.kind == Message::renew) {
    if (seq <= std::exchange(last_seq_, seq)) return false;
    if (message.kind == Message::ask) return accept(seq, *message.asked);
    if (!pipes_.empty()) pipes_.back()->abort("the other end has made another communicator");
    pipes_.push_back(make_pipe_(*message.id, 1));
    return true;
  }
  const auto at = held_.find(seq);
  if (at == held_.end() || at->second.going) return false;
  if (message.kind == Message::go) {
    at->second.going = true;
    go(seq, at->second.ask);
    return true;
  }
  if (message.kind != Message::drop) return false;
  windows_.leave(at->second.ask.window, false);
  held_.erase(at);
  return true;
}

bool Guest::accept(uint64_t seq, const Ask& ask) {
  // Each pipe that runs out may have as many.
  if (pipes_.empty() || held_.size() >= kMaxAhead * (pipes_.size() + 1)) return false;
  std::vector<Copy> copies;
  for (const AddressRange& range : ask.ranges) {
    auto* here = reinterpret_cast<std::byte*>(range.begin);
    copies.push_back({here, here, range.bytes});
  }
  const bool may = windows_.enter(ask.window, peer_, ask.op, copies);
  if (may) held_[seq] = {ask};
  say(may ? Message::accepted : Message::refused, seq);
  return true;
}

void Guest::go(uint64_t seq, const Ask& ask) {
  std::vector<Part> parts;
  for (const AddressRange& range : ask.ranges)
    parts.push_back({reinterpret_cast<std::byte*>(range.begin), range.bytes});
  pipes_.back()->enqueue(seq, ask.op == KvOp::read, std::move(parts));
}

void Guest::ended(uint64_t seq, bool whole) {
  const Ask ask = std::move(held_.at(seq).ask);
  held_.erase(seq);
  if (whole && ask.group == 0) post_ = ask.post, placed_ = 0;
  const bool next = whole && ask.post == post_ && ask.group == placed_;
  placed_ += next;
  const bool counted = windows_.leave(ask.window, next && placed_ == ask.n_groups, ask.number);
  say(counted && next ? Message::placed : Message::lost, seq);
}

void Guest::end(const std::string& why) {
  if (std::exchange(ended_, true)) return;
  channel_->close(why);
  for (const auto& pipe : pipes_) pipe->abort("the peer is gone");
  std::erase_if(held_, [&](const auto& held) {
    if (held.second.going) return false;
    windows_.leave(held.second.ask.window, false);
    return true;
  });
}

bool Guest::turn() {
  bool soon = false;
  for (const auto& pipe : pipes_) soon |= pipe->turn([this](uint64_t seq, bool whole) { ended(seq, whole); });
  if (!ended_ && !pipes_.empty()) {
    const Pipe& pipe = *pipes_.back();
    // One that never stood will not get better by another try.
    if (pipe.overdue() || (pipe.state() == Pipe::State::broken && pipe.by_nccl() && !pipe.stood())) end();
  }
  while (!pipes_.empty() && pipes_.front()->state() == Pipe::State::broken && pipes_.front()->empty() &&
         (ended_ || pipes_.size() > 1))
    pipes_.pop_front();
  return soon;
}

}  // namespace xpyd::nccl
