// Threads on which request bodies are parsed and tokenized. One takes small ones alone, so that no
// number of large bodies is in their way; the others take large ones first, then small ones. Each
// kind goes in the order of its coming. What waits is bounded by the bytes of bodies that the
// listener holds.
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xpyd {

class BodyThreads {
 public:
  ~BodyThreads();  // ends what runs, drops what waits
  void run(size_t body_bytes, std::function<void()> work);

 private:
  void loop(bool small_only);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> small_, large_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // started with the first body
};

}  // namespace xpyd
