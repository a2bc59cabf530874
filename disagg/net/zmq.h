// Sockets of ZeroMQ, for what speaks to programs that are not ours (pool/kv_events.h). libzmq is loaded where the first
// socket is opened: a process that opens none has neither it nor the dozen libraries that come with it.
//
// Nothing here waits but wait(). Thread safety: a socket belongs to one thread at a time.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace xpyd::disagg {

class ZmqSocket {
 public:
  // ZMQ_PUB, ZMQ_ROUTER, …: zmq.h has the types, and the options of set(). It holds at most `most_queued` messages for
  // a peer that does not take them; beyond, they are dropped. Error `unavailable`: libzmq is not here.
  static Result<ZmqSocket> open(int type, int most_queued);
  // Gone when it returns, and so is its address; what no peer has taken is dropped.
  ~ZmqSocket();
  ZmqSocket(ZmqSocket&&) noexcept;

  void set(int option, int value);
  void subscribe(std::string_view topic);
  // "tcp://HOST:PORT"; the error says why not.
  Status bind(const std::string& endpoint);
  Status connect(const std::string& endpoint);
  std::string endpoint() const;  // where it is bound: port 0 has become a number

  // A message of these frames; false: there is no room for it, and nothing was sent.
  bool send(std::initializer_list<std::string_view> frames);
  // The frames of one that has come; none: nothing has.
  std::vector<std::string> receive();
  // Whether a message is there, within `ms`.
  bool wait(int ms);

 private:
  ZmqSocket() = default;
  void* context_ = nullptr;
  void* socket_ = nullptr;
};

}  // namespace xpyd::disagg
