// Conversations that the server keeps for clients that name them (session_id): a turn brings only
// what is new. Bounded in number and bytes; the one not used for longest goes first. Whoever names
// one of the last kGone conversations that were dropped is told so, and gets no answer without its
// history; a server that was started again knows none of them.
//
// A turn takes its conversation and gives it back changed (commit) or as it was (anything else: a
// refusal, an abort, a timeout, a client that has left), so a turn is in it whole or not at all.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "model/chat_template.h"

namespace xpyd {

struct Conversation {
  std::vector<int32_t> tokens;        // of /v1/completions: prompts and outputs, in turn
  std::vector<ChatMessage> messages;  // of /v1/chat/completions, replies included
  bool empty() const { return tokens.empty() && messages.empty(); }
  size_t bytes() const;
};

class Sessions : public std::enable_shared_from_this<Sessions> {
 public:
  Sessions(int max_sessions, size_t max_bytes);

  enum class State { taken, busy, dropped, full };

  // One turn's hold on a conversation. Empty: of no session.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept { *this = std::move(other); }
    Turn& operator=(Turn&& other) noexcept;
    ~Turn() { release(); }
    explicit operator bool() const { return sessions_ != nullptr; }
    const Conversation& so_far() const;  // empty in a first turn
    void commit(Conversation conversation);
    void end();      // the conversation goes
    void release();  // it stays as it was
   private:
    friend class Sessions;
    std::shared_ptr<Sessions> sessions_;  // a turn may outlive the server's front end
    std::string key_;
  };

  // busy: another turn holds it. dropped: it was given up to make room for others. full: as many as
  // may be kept are in the middle of a turn.
  State begin(const std::string& key, Turn& turn);

  struct Stats {
    int sessions = 0;
    size_t bytes = 0;
    uint64_t dropped = 0;  // since the start
  };
  Stats stats() const;

 private:
  struct Session {
    Conversation conversation;
    bool busy = false;
    std::list<std::string>::iterator place;  // in order_
  };
  void finish(const std::string& key, Conversation* conversation, bool ends);
  void forget(const std::string& key, Session& session);
  void remove(const std::string& key, bool by_us);
  bool make_room(int sessions, size_t bytes);

  const int max_sessions_;
  const size_t max_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Session> sessions_;
  std::list<std::string> order_;  // least recently used first
  int kept_ = 0, busy_ = 0;       // with a turn behind them; in the middle of one
  size_t bytes_ = 0;
  uint64_t dropped_ = 0;
  static constexpr size_t kGone = 1 << 18;
  std::deque<size_t> gone_;  // hashes of the names of those that were dropped last
  std::unordered_set<size_t> is_gone_;
};

}  // namespace xpyd
