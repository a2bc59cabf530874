// Threads on which request bodies are parsed and tokenized. One takes small ones alone, so that no
// number of large bodies is in their way; the others take large ones first, then small ones. Of
// each kind the clients have their turns, a body each: nobody waits for more than what runs and one
// body of each other client. What waits is bounded by the bytes of bodies that the listener holds.
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace xpyd::server {

class BodyThreads {
 public:
  ~BodyThreads();  // ends what runs, drops what waits
  void run(const std::string& client, size_t body_bytes, std::function<void()> work);

 private:
  using Work = std::function<void()>;
  // Clients; the one whose turn it is first.
  using Line = std::list<std::pair<std::string, std::deque<Work>>>;
  void loop(bool small_only);
  std::mutex mutex_;
  std::condition_variable changed_;
  Line small_, large_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // started with the first body
};

}  // namespace xpyd::server
