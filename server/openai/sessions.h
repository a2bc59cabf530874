// Sessions keeps conversations for clients that name them (session_id), so a turn sends only what is new. Number and
// bytes are bounded; the least recently used conversation is dropped first.
//
// No client gets an answer without the history that it expects. Each turn says that it is the first (kNew) or returns
// the generation of the answer before it. A generation holds a turn number and a tag that no other conversation has, in
// this process or another. A conversation that is not here under its tag is lost, also after a restart.
//
// A turn takes its conversation and returns it changed (commit) or unchanged (refusal, abort, timeout, lost client). A
// turn is therefore kept completely or not at all.
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
  std::vector<int32_t> tokens;        // /v1/completions: prompts and outputs, in turn
  std::vector<ChatMessage> messages;  // /v1/chat/completions: messages and replies
  int n_tokens = 0;                   // of the last turn's prompt and output: their KV may still be there
  bool empty() const { return tokens.empty() && messages.empty(); }
  size_t bytes() const;
};

uint64_t random_word();  // unpredictable

// The key of a conversation. Different (id, salt) pairs have different keys.
std::string session_key(const std::string& id, const std::string& salt);

class Sessions : public std::enable_shared_from_this<Sessions> {
 public:
  Sessions(int max_sessions, size_t max_bytes);

  enum class State { taken, busy, dropped, stale, full };
  static constexpr const char* kNew = "new";

  // The hold of one turn on a conversation. Empty: the request names no session.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept { *this = std::move(other); }
    Turn& operator=(Turn&& other) noexcept;
    ~Turn() { release(); }
    explicit operator bool() const { return sessions_ != nullptr; }
    const Conversation& so_far() const;      // empty in a first turn
    std::string generation() const;          // the conversation's generation after this turn
    uint64_t salt() const { return salt_; }  // of its KV; different in every store
    void commit(Conversation conversation);
    void end();      // drops the conversation
    void release();  // leaves the conversation as it was
   private:
    friend class Sessions;
    std::shared_ptr<Sessions> sessions_;  // a turn may outlive the server's frontend
    std::string key_;
    uint64_t salt_ = 0;
  };

  // Starts a turn. `generation` is that of the client's last answer, or kNew. busy: another turn holds the
  // conversation. dropped: it is not here, or another one has its name. stale: it is here, but at another turn. full:
  // as many conversations as may be kept are in a turn.
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
  int kept_ = 0, busy_ = 0;       // with a committed turn; in a turn now
  size_t bytes_ = 0;
  uint64_t begun_ = 0;
  const SipKey secret_;  // of this store only
};

}  // namespace xpyd::server
