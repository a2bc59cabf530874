// A worker's lasting connection: one channel to the conductor at a time, made again whenever it was
// lost or the conductor has moved. What a new channel means (to join, to say what was kept) is up
// to `on_open`.
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "disagg/control/channel.h"

namespace xpyd {

struct JoinerOptions {
  double connect_timeout_s = 2;
  double first_pause_s = 0.05, longest_pause_s = 1;  // between attempts, doubling
};

class Joiner {
 public:
  // `self`: key and identity; the address may be empty until it is known. `loop` outlives this.
  Joiner(ControlLoop& loop, ControlEndpoint self, OnOpen on_open,
         const JoinerOptions& options = {});
  ~Joiner();  // closes the channel

  // Where the conductor is now (Registry::watch of kConductorName). Another address than the
  // channel's closes it; "" keeps it and lets none be made.
  void set_address(const std::string& address);

  int attempts() const;         // since the last channel opened
  std::string trouble() const;  // why the last attempt failed, or the last channel closed

 private:
  void run();
  OnOpen wrapped();

  ControlLoop& loop_;
  ControlEndpoint self_;  // address: guarded
  const OnOpen on_open_;
  const JoinerOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ChannelPtr channel_;  // open, or closed and not yet noticed
  std::string channel_address_, trouble_;
  int attempts_ = 0;
  bool channel_closed_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace xpyd
