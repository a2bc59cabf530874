// A scripted HTTP server on a free port of loopback. It has one thread per connection, and a function maps each request
// to the bytes of its answer.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"

namespace xpyd::testing {

struct FakeRequest {
  std::string head, method, target, body;
};

class FakeServer {
 public:
  // Writes the raw answer to `fd`. The server closes the connection afterwards.
  using Handler = std::function<void(int fd, const FakeRequest& request)>;

  explicit FakeServer(Handler handler) : handler_(std::move(handler)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    REQUIRE(bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(listen(listener_, 1024) == 0);
    REQUIRE(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_loop(); });
  }
  ~FakeServer() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    close(listener_);
    for (std::thread& worker : workers_) worker.join();
  }

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port); }
  static void send_all(int fd, const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return;
      sent += size_t(n);
    }
  }
  static void send_json(int fd, const std::string& body, const std::string& status = "200 OK") {
    send_all(fd, "HTTP/1.1 " + status + "\r\nContent-Type: application/json\r\nContent-Length: " +
                     std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  int port = 0;

 private:
  void accept_loop() {
    while (true) {
      int fd = accept(listener_, nullptr, nullptr);
      if (fd < 0) return;
      workers_.emplace_back([this, fd] {
        FakeRequest request;
        if (read_request(fd, &request)) handler_(fd, request);
        close(fd);
      });
    }
  }
  static bool read_request(int fd, FakeRequest* request) {
    std::string bytes;
    char buffer[4096];
    size_t end;
    while ((end = bytes.find("\r\n\r\n")) == bytes.npos) {
      ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) return false;
      bytes.append(buffer, size_t(n));
    }
    request->head = bytes.substr(0, end);
    request->method = bytes.substr(0, bytes.find(' '));
    size_t begin = request->method.size() + 1;
    request->target = bytes.substr(begin, bytes.find(' ', begin) - begin);
    size_t length = 0, at = request->head.find("Content-Length: ");
    if (at != std::string::npos) length = std::stoul(request->head.substr(at + 16));
    request->body = bytes.substr(end + 4);
    while (request->body.size() < length) {
      ssize_t n = recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) return false;
      request->body.append(buffer, size_t(n));
    }
    return true;
  }

  Handler handler_;
  int listener_ = -1;
  std::thread acceptor_;
  std::vector<std::thread> workers_;  // used by the acceptor thread alone until it is joined
};

}  // namespace xpyd::testing
