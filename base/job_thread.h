// A thread that runs jobs in the order in which they are posted.
//
// Thread safety: any thread may post.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace xpyd {

class JobThread {
 public:
  JobThread() : thread_([this] { work(); }) {}
  ~JobThread() {  // lets all jobs end
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    posted_.notify_one();
    thread_.join();
  }
  std::future<bool> post(std::function<bool()> job) {
    std::packaged_task<bool()> task(std::move(job));
    std::future<bool> ended = task.get_future();
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(std::move(task));
    }
    posted_.notify_one();
    return ended;
  }
  void drain() {
    post([] { return true; }).wait();
  }  // waits for the jobs posted so far

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      posted_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::packaged_task<bool()> job = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::packaged_task<bool()>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace xpyd
