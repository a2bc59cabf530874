#include "server/openai/sessions.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "base/numbers.h"

namespace xpyd::server {

uint64_t random_word() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

std::string session_key(const std::string& id, const std::string& salt) {
  return std::to_string(id.size()) + ":" + id + salt;
}

size_t Conversation::bytes() const {
  size_t sum = tokens.size() * sizeof(int32_t);
  for (const ChatMessage& message : messages)
    sum += sizeof message + message.role.size() + message.content.size();
  return sum;
}

Sessions::Sessions(int max_sessions, size_t max_bytes)
    : max_sessions_(max_sessions), max_bytes_(max_bytes), secret_{random_word(), random_word()} {}

std::string Sessions::name_of(const Session& session, uint64_t turns) {
  return hex(session.tag) + "-" + std::to_string(turns);
}

Sessions::State Sessions::begin(const std::string& key, Turn& turn, const std::string& generation) {
  turn.release();
  std::lock_guard lock(mutex_);
  auto found = sessions_.find(key);
  if (found == sessions_.end()) {
    if (generation != kNew) return State::dropped;
    if (busy_ >= max_sessions_) return State::full;
    found = sessions_.emplace(key, Session{}).first;
    found->second.place = order_.insert(order_.end(), key);
    found->second.tag = siphash(secret_, "tag " + std::to_string(++begun_));
  }
  Session& session = found->second;
  if (generation != kNew && !generation.starts_with(name_of(session, 0).substr(0, 17)))
    return State::dropped;  // it is gone, and another one has its name
  if (session.busy) return State::busy;
  if (generation == kNew ? session.turns > 0 : generation != name_of(session, session.turns)) return State::stale;
  session.busy = true;
  ++busy_;
  order_.splice(order_.end(), order_, session.place);
  turn.sessions_ = shared_from_this();
  turn.key_ = key;
  turn.salt_ = std::max<uint64_t>(1, siphash(secret_, "salt " + key));
  return State::taken;
}

// Drops idle conversations until this much more fits. A first turn in progress does not count yet, so refused or lost
// clients displace nobody.
bool Sessions::make_room(int sessions, size_t bytes) {
  auto fits = [&] { return kept_ + sessions <= max_sessions_ && bytes_ + bytes <= max_bytes_; };
  for (auto at = order_.begin(); at != order_.end() && !fits();) {
    const std::string key = *at++;
    if (!sessions_.at(key).busy) remove(key);
  }
  return fits();
}

void Sessions::forget(const std::string& key, Session& session) {
  if (session.conversation.empty()) return;
  bytes_ -= key.size() + session.conversation.bytes();
  --kept_;
  session.conversation = Conversation();
}

void Sessions::remove(const std::string& key) {
  auto found = sessions_.find(key);
  Session& session = found->second;
  forget(key, session);
  order_.erase(session.place);
  sessions_.erase(found);
}

void Sessions::finish(const std::string& key, Conversation* conversation, bool ends) {
  std::lock_guard lock(mutex_);
  Session& session = sessions_.at(key);
  --busy_;
  session.busy = false;
  if (conversation) {
    forget(key, session);
    const size_t more = key.size() + conversation->bytes();
    if (more > max_bytes_) return remove(key);  // does not fit alone: the others stay
    session.busy = true;                        // so that it is not dropped itself
    const bool fits = make_room(1, more);
    session.busy = false;
    if (!fits) return remove(key);
    session.conversation = std::move(*conversation);
    ++session.turns;
    bytes_ += more;
    ++kept_;
  } else if (ends || session.conversation.empty()) {
    remove(key);
  }
}

Sessions::Stats Sessions::stats() const {
  std::lock_guard lock(mutex_);
  return {kept_, bytes_};
}

Sessions::Turn& Sessions::Turn::operator=(Turn&& other) noexcept {
  if (this == &other) return *this;
  release();
  sessions_ = std::exchange(other.sessions_, nullptr);
  key_ = std::move(other.key_);
  salt_ = other.salt_;
  return *this;
}

const Conversation& Sessions::Turn::so_far() const {
  static const Conversation none;
  if (!sessions_) return none;
  // No other thread changes it during this turn, and it does not move.
  std::lock_guard lock(sessions_->mutex_);
  return sessions_->sessions_.at(key_).conversation;
}

std::string Sessions::Turn::generation() const {
  std::lock_guard lock(sessions_->mutex_);
  const Session& session = sessions_->sessions_.at(key_);
  return name_of(session, session.turns + 1);
}

void Sessions::Turn::commit(Conversation conversation) {
  if (auto sessions = std::exchange(sessions_, nullptr)) sessions->finish(key_, &conversation, false);
}

void Sessions::Turn::end() {
  if (auto sessions = std::exchange(sessions_, nullptr)) sessions->finish(key_, nullptr, true);
}

void Sessions::Turn::release() {
  if (auto sessions = std::exchange(sessions_, nullptr)) sessions->finish(key_, nullptr, false);
}

}  // namespace xpyd::server
