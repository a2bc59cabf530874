#include "disagg/transport/nccl/nccl_link.h"

#include <algorithm>

#include "base/clock.h"

namespace xpyd::disagg::nccl {
namespace {

constexpr double kPatience = 1;  // seconds

double now() { return RealClock().now(); }

}  // namespace

Transfer::Transfer(uint64_t id_, const KvTransfer& what_, std::span<const Copy> copies)
    : id(id_), what(what_), groups(1) {
  // Copies that are adjacent on both sides become one call.
  std::vector<Copy> joined;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;
    if (!joined.empty() && joined.back().source + joined.back().bytes == copy.source &&
        joined.back().destination + joined.back().bytes == copy.destination)
      joined.back().bytes += copy.bytes;
    else
      joined.push_back(copy);
  }
  size_t bytes = 0;
  for (Copy copy : joined) {
    while (copy.bytes > 0) {
      if (bytes == kGroupBytes || groups.back().size() == kGroupParts) groups.emplace_back(), bytes = 0;
      const size_t n = std::min(copy.bytes, kGroupBytes - bytes);
      groups.back().push_back({copy.source, copy.destination, n});
      bytes += n;
      copy.source += n, copy.destination += n, copy.bytes -= n;
    }
  }
}

void Link::start() {
  Message message{.kind = Message::join, .seq = ++last_seq_, .id = NcclUniqueId()};
  if (const int result = api_.get_unique_id(&*message.id); result != kNcclSuccess)
    return end(nccl_error(api_, result, nullptr));
  say(channel_, message);
  pipe_ = make_pipe_(*message.id, 0);
}

void Link::add(std::shared_ptr<Transfer> post) {
  posts_.push_back(std::move(post));
  ask();
  settle();
}

void Link::ask() {
  // Asks only if the communicator is ready. A group that is given up earlier would force the link to abort a
  // communicator that is still being made.
  if (!connected()) return;
  for (const auto& post : posts_) {
    while (usable(*post) && post->asked < post->groups.size()) {
      if (flights_.size() >= kMaxAhead) return;
      Ask asked{.post = post->id,
                .group = uint32_t(post->asked),
                .n_groups = uint32_t(post->groups.size()),
                .registration = post->what.registration,
                .op = post->what.op,
                .ranges = {}};
      for (const Copy& copy : post->groups[post->asked]) {
        const std::byte* there = post->what.op == KvOp::write ? copy.destination : copy.source;
        asked.ranges.push_back({reinterpret_cast<uint64_t>(there), copy.bytes});
      }
      say(channel_, Message{.kind = Message::ask, .seq = ++last_seq_, .asked = std::move(asked)});
      flights_[last_seq_] = {post, post->asked++};
    }
  }
}

bool Link::take(std::string_view body) {
  const auto message = read_message(body);
  if (!message || message.value().seq == 0 || message.value().seq > last_seq_) return false;
  const uint64_t seq = message.value().seq;
  auto at = flights_.find(seq);
  // The answer to a group that was broken off here may still arrive.
  const bool known = at != flights_.end();
  switch (message.value().kind) {
    case Message::accepted:
      if (!known || at->second.gone) return false;
      accepted(seq, at->second);
      break;
    case Message::refused:
      if (!known || at->second.gone) return false;
      at->second.post->failed = true;
      flights_.erase(at);
      break;
    case Message::placed:
      if (!known) return true;
      if (!at->second.gone || at->second.placed) return false;
      at->second.placed = true;
      finish(seq, at->second);
      break;
    case Message::lost:
      if (!known) return true;
      if (!at->second.gone || at->second.placed) return false;
      at->second.post->failed = true;
      at->second.placed = true;
      // If the owner's half ran into a registration that was closed meanwhile, this half ends soon too. If the owner's
      // half was broken off, turn() breaks this half off after kPatience.
      finish(seq, at->second);
      break;
    default: return false;
  }
  ask();
  settle();
  return true;
}

void Link::accepted(uint64_t seq, Flight& flight) {
  Transfer& post = *flight.post;
  if (!usable(post) || !connected()) {
    post.failed = true;
    say(channel_, Message{.kind = Message::drop, .seq = seq});
    flights_.erase(seq);
    return;
  }
  const bool send = post.what.op == KvOp::write;
  std::vector<MemoryRange> parts;
  for (const Copy& copy : post.groups[flight.group])
    parts.push_back({send ? const_cast<std::byte*>(copy.source) : copy.destination, copy.bytes});
  flight.gone = true;
  ++post.inside;
  pipe_->enqueue(seq, send, std::move(parts));
  say(channel_, Message{.kind = Message::go, .seq = seq});
}

void Link::ended(uint64_t seq, bool whole) {
  Flight& flight = flights_.at(seq);
  --flight.post->inside;
  flight.run = true;
  if (!whole) flight.post->failed = true, flight.placed = true;  // the owner's answer does not matter
  finish(seq, flight);
}

void Link::finish(uint64_t seq, Flight& flight) {
  if (!flight.run || !flight.placed) return;
  flight.post->placed += !flight.post->failed;
  flights_.erase(seq);
}

void Link::settle() {
  std::erase_if(posts_, [&](const std::shared_ptr<Transfer>& post) {
    const bool done = post->placed == post->groups.size();
    if (post->inside > 0 || (!done && usable(*post))) return false;
    post->state = done ? TransferState::done : TransferState::failed;
    return true;
  });
}

void Link::end(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (dead_) return;
    why_ = why;
  }
  dead_ = true;
  if (pipe_) pipe_->abort(why);
  std::erase_if(flights_, [](const auto& flight) { return !flight.second.gone; });
  channel_->close(why);
}

std::string Link::why() const {
  std::lock_guard lock(mutex_);
  return why_;
}

bool Link::turn() {
  bool soon = false;
  if (pipe_) {
    soon = pipe_->turn([this](uint64_t seq, bool whole) { ended(seq, whole); });
    if (pipe_->overdue())
      end("the peer did not join the communicator within " + std::to_string(kJoinSeconds) + " s");
    if (pipe_->state() == Pipe::State::broken) {
      end(pipe_->why());
      if (pipe_->empty()) pipe_.reset();
    }
  }
  if (dead_ || connected()) settled_ = true;
  for (const auto& post : posts_) {
    if (usable(*post) || post->inside == 0) continue;
    if (post->unwanted_s == 0) post->unwanted_s = now();
    if (now() > post->unwanted_s + kPatience) end("the peer did not take a transfer, which was given up");
    soon = true;
  }
  ask();
  settle();
  return soon;
}

}  // namespace xpyd::disagg::nccl
