#include "disagg/chunked_pp/kv_poster.h"

#include <chrono>
#include <utility>

namespace xpyd::disagg::ranks {

bool inside(const KvBytes& piece, std::span<const MemoryRange> kv) {
  return piece.rank < kv.size() && piece.at <= kv[piece.rank].size() && piece.bytes <= kv[piece.rank].size() - piece.at;
}

KvPoster::KvPoster(std::unique_ptr<KvTransport> wire, std::vector<MemoryRange> kv, ChannelPtr head, Clock& clock)
    : wire_(std::move(wire)), kv_(std::move(kv)), head_(std::move(head)), clock_(clock), thread_([this] { work(); }) {}

KvPoster::~KvPoster() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void KvPoster::take(uint16_t type, std::string_view bytes) {
  std::lock_guard lock(mutex_);
  inbox_.emplace_back(type, bytes);
  wake_.notify_all();
}

void KvPoster::work() {
  constexpr std::chrono::microseconds kLook{200};  // at what is under way
  for (bool busy = false;;) {
    std::vector<std::pair<uint16_t, std::string>> inbox;
    {
      std::unique_lock lock(mutex_);
      const auto news = [this] { return stop_ || !inbox_.empty(); };
      if (busy)
        wake_.wait_for(lock, kLook, news);
      else
        wake_.wait(lock, news);
      if (stop_) return;
      inbox.swap(inbox_);
    }
    try {
      for (const auto& [type, bytes] : inbox) handle(type, bytes);
    } catch (const Error& error) {
      head_->close("refused: it said " + error.message);
      return;
    }
    busy = go_on();
  }
}

void KvPoster::handle(uint16_t type, const std::string& bytes) {
  if (type == kType<Meet>) {
    const Meet meet = need(from_bytes<Meet>(bytes));
    meeting_[PeerId(meet.peer)] = meet.address;
  } else if (type == kType<Leave>) {
    const auto peer = PeerId(need(from_bytes<Leave>(bytes)).peer);
    meeting_.erase(peer);
    wire_->disconnect(peer);
  } else if (type == kType<Cancel>) {
    const auto at = posts_.find(need(from_bytes<Cancel>(bytes)).id);
    if (at != posts_.end()) wire_->cancel(at->second);
  } else {
    const Post post = need(from_bytes<Post>(bytes));
    TransferPlan& plan = plan_;
    for (const KvBytes& piece : post.pieces) {
      if (!inside(piece, kv_)) throw invalid("a post of bytes that are not its KV");
      plan.copies.push_back(
          {kv_[piece.rank].data() + piece.at, reinterpret_cast<std::byte*>(uintptr_t(piece.to)), size_t(piece.bytes)});
      plan.bytes += piece.bytes;
    }
    if (post.more) return;
    posts_[post.id] = wire_->post({.peer = PeerId(post.peer),
                                   .op = KvOp::write,
                                   .window = post.window,
                                   .deadline_s = post.seconds > 0 ? clock_.now() + post.seconds : 0},
                                  plan);
    plan = {};
  }
}

// True: something is under way.
bool KvPoster::go_on() {
  for (auto at = meeting_.begin(); at != meeting_.end();) {
    const Result<bool> connected = wire_->connect(at->first, at->second);
    if (connected && !connected.value()) {
      ++at;
      continue;
    }
    say_to(head_, Met{uint32_t(at->first), connected ? "" : connected.error().message});
    at = meeting_.erase(at);
  }
  for (auto at = posts_.begin(); at != posts_.end();) {
    const TransferState state = wire_->poll(at->second);
    if (state == TransferState::in_flight) {
      ++at;
      continue;
    }
    say_to(head_, Posted{at->first, state == TransferState::done});
    at = posts_.erase(at);
  }
  return !meeting_.empty() || !posts_.empty();
}

}  // namespace xpyd::disagg::ranks
