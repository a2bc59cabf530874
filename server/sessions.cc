#include "server/sessions.h"

#include <utility>

#include "base/status.h"

namespace xpyd {

size_t Conversation::bytes() const {
  size_t sum = tokens.size() * sizeof(int32_t);
  for (const ChatMessage& message : messages)
    sum += sizeof message + message.role.size() + message.content.size();
  return sum;
}

Sessions::Sessions(int max_sessions, size_t max_bytes)
    : max_sessions_(max_sessions), max_bytes_(max_bytes) {}

Sessions::State Sessions::begin(const std::string& key, Turn& turn) {
  std::lock_guard lock(mutex_);
  auto found = sessions_.find(key);
  if (found == sessions_.end()) {
    if (is_gone_.contains(key)) return State::dropped;
    if (!make_room(1, 0)) return State::full;
    found = sessions_.emplace(key, Session{}).first;
    found->second.place = order_.insert(order_.end(), key);
    bytes_ += key.size();
  }
  Session& session = found->second;
  if (session.busy) return State::busy;
  session.busy = true;
  order_.splice(order_.end(), order_, session.place);
  turn.release();
  turn.sessions_ = shared_from_this();
  turn.key_ = key;
  return State::taken;
}

// Gives up idle conversations until that much more fits.
bool Sessions::make_room(int sessions, size_t bytes) {
  auto fits = [&] {
    return int(sessions_.size()) + sessions <= max_sessions_ && bytes_ + bytes <= max_bytes_;
  };
  for (auto at = order_.begin(); at != order_.end() && !fits();) {
    const std::string key = *at++;
    if (!sessions_.at(key).busy) remove(key, true);
  }
  return fits();
}

void Sessions::remove(const std::string& key, bool by_us) {
  auto found = sessions_.find(key);
  Session& session = found->second;
  bytes_ -= key.size() + session.conversation.bytes();
  order_.erase(session.place);
  if (by_us) {
    ++dropped_;
    if (is_gone_.insert(key).second) gone_.push_back(key);
    if (int(gone_.size()) > max_sessions_) {
      is_gone_.erase(gone_.front());
      gone_.pop_front();
    }
  }
  sessions_.erase(found);
}

void Sessions::finish(const std::string& key, Conversation* conversation, bool ends) {
  std::lock_guard lock(mutex_);
  Session& session = sessions_.at(key);
  session.busy = false;
  if (conversation) {
    bytes_ -= session.conversation.bytes();
    session.conversation = Conversation();
    const size_t more = conversation->bytes();
    session.busy = true;  // it is not the one to go, unless it alone is too large
    const bool fits = make_room(0, more);
    session.busy = false;
    if (!fits) return remove(key, true);
    session.conversation = std::move(*conversation);
    bytes_ += more;
  } else if (ends || session.conversation.empty()) {
    remove(key, false);
  }
}

Sessions::Stats Sessions::stats() const {
  std::lock_guard lock(mutex_);
  return {int(sessions_.size()), bytes_, dropped_};
}

Sessions::Turn& Sessions::Turn::operator=(Turn&& other) noexcept {
  if (this == &other) return *this;
  release();
  sessions_ = std::exchange(other.sessions_, nullptr);
  key_ = std::move(other.key_);
  return *this;
}

const Conversation& Sessions::Turn::so_far() const {
  static const Conversation none;
  if (!sessions_) return none;
  // Nobody else changes it during this turn, and it does not move.
  std::lock_guard lock(sessions_->mutex_);
  return sessions_->sessions_.at(key_).conversation;
}

void Sessions::Turn::commit(Conversation conversation) {
  if (auto sessions = std::exchange(sessions_, nullptr))
    sessions->finish(key_, &conversation, false);
}

void Sessions::Turn::end() {
  if (auto sessions = std::exchange(sessions_, nullptr)) sessions->finish(key_, nullptr, true);
}

void Sessions::Turn::release() {
  if (auto sessions = std::exchange(sessions_, nullptr)) sessions->finish(key_, nullptr, false);
}

}  // namespace xpyd
