#include "disagg/control/joiner.h"

#include <algorithm>
#include <chrono>
#include <memory>

namespace xpyd {

Joiner::Joiner(ControlLoop& loop, ControlEndpoint self, OnOpen on_open,
               const JoinerOptions& options)
    : loop_(loop),
      self_(std::move(self)),
      on_open_(std::move(on_open)),
      options_(options),
      thread_([this] { run(); }) {}

Joiner::~Joiner() {
  ChannelPtr channel;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    channel = channel_;
    changed_.notify_all();
  }
  if (channel) channel->close("the worker leaves");
  thread_.join();  // returns after on_closed, which refers to this object
}

void Joiner::set_address(const std::string& address) {
  ChannelPtr old;
  {
    std::lock_guard lock(mutex_);
    self_.address = address;
    if (channel_ && !address.empty() && channel_address_ != address) old = channel_;
    changed_.notify_all();
  }
  if (old) old->close("the conductor has moved");
}

int Joiner::attempts() const {
  std::lock_guard lock(mutex_);
  return attempts_;
}

std::string Joiner::trouble() const {
  std::lock_guard lock(mutex_);
  return trouble_;
}

OnOpen Joiner::wrapped() {
  return [this](ChannelPtr channel) {
    ChannelEvents events = on_open_(std::move(channel));
    events.on_closed = [this, tell = std::move(events.on_closed)](const std::string& reason) {
      if (tell) tell(reason);
      std::lock_guard lock(mutex_);
      trouble_ = reason;
      channel_closed_ = true;
      changed_.notify_all();
    };
    return events;
  };
}

void Joiner::run() {
  double pause_s = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !self_.address.empty(); });
    if (stopping_) return;
    ControlEndpoint endpoint = self_;
    channel_closed_ = false;
    ++attempts_;
    lock.unlock();
    Result<ChannelPtr> made = loop_.connect(endpoint, options_.connect_timeout_s, wrapped());
    lock.lock();
    if (made) {
      channel_ = made.value();
      channel_address_ = endpoint.address;
      attempts_ = 0;
      // Whoever stopped us, or moved the conductor, while the channel was being made did not see
      // it.
      const char* unwanted = stopping_ ? "the worker leaves" : nullptr;
      if (!unwanted && !self_.address.empty() && self_.address != endpoint.address)
        unwanted = "the conductor has moved";
      if (unwanted) {
        lock.unlock();
        made.value()->close(unwanted);
        lock.lock();
      }
      const auto opened = std::chrono::steady_clock::now();
      changed_.wait(lock, [&] { return channel_closed_; });
      channel_.reset();
      // A conductor that takes the channel and then refuses us is not asked twenty times a second.
      const std::chrono::duration<double> lived = std::chrono::steady_clock::now() - opened;
      if (lived.count() > options_.longest_pause_s) pause_s = 0;
    } else {
      trouble_ = made.error().message;
    }
    pause_s = std::clamp(2 * pause_s, options_.first_pause_s, options_.longest_pause_s);
    changed_.wait_for(lock, std::chrono::duration<double>(pause_s),
                      [&] { return stopping_ || self_.address != endpoint.address; });
  }
}

}  // namespace xpyd
