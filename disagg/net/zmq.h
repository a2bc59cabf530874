// ZeroMQ sockets, for other projects' programs (pool/kv_events.h). The first socket that is opened loads libzmq. A
// process without one has neither libzmq nor its dozen dependencies.
//
// Only wait() blocks. Thread safety: a socket belongs to one thread at a time.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace xpyd::disagg {

class ZmqSocket {
 public:
  // Opens a socket. The types (ZMQ_PUB, ZMQ_ROUTER, …) and the options of set() are those of <zmq.h>. At most
  // `most_queued` messages wait for a slow peer; more are dropped. Error `unavailable`: libzmq is not installed.
  static Result<ZmqSocket> open(int type, int most_queued);
  // Closes the socket and frees its address before it returns. Messages that no peer has taken are dropped.
  ~ZmqSocket();
  ZmqSocket(ZmqSocket&&) noexcept;

  void set(int option, int value);
  void subscribe(std::string_view topic);
  // `endpoint` is "tcp://HOST:PORT". The error has the reason.
  Status bind(const std::string& endpoint);
  Status connect(const std::string& endpoint);
  std::string endpoint() const;  // bound address; port 0 has become a number

  // Sends one message. Returns false, and sends nothing, if there is no room.
  bool send(std::initializer_list<std::string_view> frames);
  // Returns the frames of a received message; empty: there is none.
  std::vector<std::string> receive();
  // Waits at most `ms`. Returns whether a message is there.
  bool wait(int ms);

 private:
  ZmqSocket() = default;
  void* context_ = nullptr;
  void* socket_ = nullptr;
};

}  // namespace xpyd::disagg
