// Conversations that the server keeps for clients that name them (session_id): a turn brings only
// what is new. Bounded in number and bytes; the one not used for longest goes first.
//
// No client gets an answer without the history that it believes to be there: each turn says that it is
// the first (kNew), or returns the generation of the answer before it. A generation holds a tag that no other
// conversation has, of this process or another, and a turn number: what is not here under that tag is
// gone for ever, also after a restart.
//
// A turn takes its conversation and gives it back changed (commit) or as it was (anything else: a
// refusal, an abort, a timeout, a client that has left), so a turn is in it whole or not at all.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/siphash.h"
#include "model/text/chat_template.h"

namespace xpyd::server {

struct Conversation {
  std::vector<int32_t> tokens;        // of /v1/completions: prompts and outputs, in turn
  std::vector<ChatMessage> messages;  // of /v1/chat/completions, replies included
  bool empty() const { return tokens.empty() && messages.empty(); }
  size_t bytes() const;
};

uint64_t random_word();  // that nobody guesses

// A conversation's key: two texts that cannot be cut in another way.
std::string session_key(const std::string& id, const std::string& salt);

class Sessions : public std::enable_shared_from_this<Sessions> {
 public:
  Sessions(int max_sessions, size_t max_bytes);

  enum class State { taken, busy, dropped, stale, full };
  static constexpr const char* kNew = "new";

  // One turn's hold on a conversation. Empty: of no session.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept { *this = std::move(other); }
    Turn& operator=(Turn&& other) noexcept;
    ~Turn() { release(); }
    explicit operator bool() const { return sessions_ != nullptr; }
    const Conversation& so_far() const;      // empty in a first turn
    std::string generation() const;          // that the conversation has after this turn
    uint64_t salt() const { return salt_; }  // of its KV; no other store's
    void commit(Conversation conversation);
    void end();      // the conversation goes
    void release();  // it stays as it was
   private:
    friend class Sessions;
    std::shared_ptr<Sessions> sessions_;  // a turn may outlive the server's front end
    std::string key_;
    uint64_t salt_ = 0;
  };

  // `generation`: what the client's last turn was answered with, or kNew. busy: another turn holds it. dropped: it is
  // not here, or what is here is another's of its name. stale: it is here, but at another turn. full: as many as may be
  // kept are in the middle of a turn.
  State begin(const std::string& key, Turn& turn, const std::string& generation);

  struct Stats {
    int sessions = 0;
    size_t bytes = 0;
  };
  Stats stats() const;

 private:
  struct Session {
    Conversation conversation;
    bool busy = false;
    uint64_t tag = 0, turns = 0;
    std::list<std::string>::iterator place;  // in order_
  };
  void finish(const std::string& key, Conversation* conversation, bool ends);
  void forget(const std::string& key, Session& session);
  void remove(const std::string& key);
  bool make_room(int sessions, size_t bytes);
  static std::string name_of(const Session& session, uint64_t turns);

  const int max_sessions_;
  const size_t max_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Session> sessions_;
  std::list<std::string> order_;  // least recently used first
  int kept_ = 0, busy_ = 0;       // with a turn behind them; in the middle of one
  size_t bytes_ = 0;
  uint64_t begun_ = 0;
  const SipKey secret_;  // of this store alone
};

}  // namespace xpyd::server
