#include "disagg/net/zmq.h"

#include <dlfcn.h>
#include <zmq.h>

#include <cerrno>
#include <utility>

#if defined(__SANITIZE_THREAD__)
// libzmq is compiled without the thread sanitizer, so its locks and fences are invisible.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:libzmq.so\n"; }
#endif

namespace xpyd::disagg {
namespace {

struct ZmqApi {
  decltype(&zmq_ctx_new) ctx_new;
  decltype(&zmq_ctx_term) ctx_term;
  decltype(&zmq_socket) socket;
  decltype(&zmq_close) close;
  decltype(&zmq_setsockopt) setsockopt;
  decltype(&zmq_getsockopt) getsockopt;
  decltype(&zmq_bind) bind;
  decltype(&zmq_connect) connect;
  decltype(&zmq_send) send;
  decltype(&zmq_msg_init) msg_init;
  decltype(&zmq_msg_recv) msg_recv;
  decltype(&zmq_msg_data) msg_data;
  decltype(&zmq_msg_size) msg_size;
  decltype(&zmq_msg_more) msg_more;
  decltype(&zmq_msg_close) msg_close;
  decltype(&zmq_poll) poll;
  decltype(&zmq_strerror) strerror;
};

Result<ZmqApi> load() {
  constexpr const char* kLibrary = "libzmq.so.5";
  const auto unusable = [](const std::string& why) { return Error{ErrorCode::unavailable, why}; };
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) return unusable(std::string(dlerror()) + ": expected ZeroMQ; install libzmq5");
  ZmqApi api;
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
    if (!function) missing += std::string(" ") + symbol;
  };
  find(api.ctx_new, "zmq_ctx_new");
  find(api.ctx_term, "zmq_ctx_term");
  find(api.socket, "zmq_socket");
  find(api.close, "zmq_close");
  find(api.setsockopt, "zmq_setsockopt");
  find(api.getsockopt, "zmq_getsockopt");
  find(api.bind, "zmq_bind");
  find(api.connect, "zmq_connect");
  find(api.send, "zmq_send");
  find(api.msg_init, "zmq_msg_init");
  find(api.msg_recv, "zmq_msg_recv");
  find(api.msg_data, "zmq_msg_data");
  find(api.msg_size, "zmq_msg_size");
  find(api.msg_more, "zmq_msg_more");
  find(api.msg_close, "zmq_msg_close");
  find(api.poll, "zmq_poll");
  find(api.strerror, "zmq_strerror");
  if (!missing.empty()) return unusable(std::string(kLibrary) + " has no" + missing);
  return api;
}

// Loaded once for each process.
const Result<ZmqApi>& loaded() {
  static const Result<ZmqApi> api = load();
  return api;
}
const ZmqApi& zmq() { return loaded().value(); }

Error last_error() {
  const int error = errno;
  if (error == ENODEV)
    return {ErrorCode::invalid_argument, "expected an address of this machine as a number"};
  return {error == EINVAL || error == EPROTONOSUPPORT ? ErrorCode::invalid_argument : ErrorCode::io,
          zmq().strerror(error)};
}

}  // namespace

Result<ZmqSocket> ZmqSocket::open(int type, int most_queued) {
  if (!loaded()) return loaded().error();
  ZmqSocket made;
  made.context_ = zmq().ctx_new();
  if (made.context_) made.socket_ = zmq().socket(made.context_, type);
  if (!made.socket_) return last_error();
  made.set(ZMQ_SNDHWM, most_queued);
  made.set(ZMQ_RCVHWM, most_queued);
  made.set(ZMQ_LINGER, 0);
  return made;
}

ZmqSocket::ZmqSocket(ZmqSocket&& other) noexcept
    : context_(std::exchange(other.context_, nullptr)), socket_(std::exchange(other.socket_, nullptr)) {}

ZmqSocket::~ZmqSocket() {
  if (socket_) zmq().close(socket_);
  while (context_ && zmq().ctx_term(context_) != 0 && errno == EINTR) {
  }
}

void ZmqSocket::set(int option, int value) {
  const int64_t bytes = value;  // the one option that is not an int
  const bool set = option == ZMQ_MAXMSGSIZE ? zmq().setsockopt(socket_, option, &bytes, sizeof bytes) == 0
                                            : zmq().setsockopt(socket_, option, &value, sizeof value) == 0;
  XPYD_CHECK(set, "option " + std::to_string(option));
}

void ZmqSocket::subscribe(std::string_view topic) {
  XPYD_CHECK(zmq().setsockopt(socket_, ZMQ_SUBSCRIBE, topic.data(), topic.size()) == 0);
}

Status ZmqSocket::bind(const std::string& endpoint) {
  set(ZMQ_IPV6, endpoint.find('[') != endpoint.npos);
  if (zmq().bind(socket_, endpoint.c_str()) != 0) return last_error();
  return ok();
}

Status ZmqSocket::connect(const std::string& endpoint) {
  set(ZMQ_IPV6, endpoint.find('[') != endpoint.npos);
  if (zmq().connect(socket_, endpoint.c_str()) != 0) return last_error();
  return ok();
}

std::string ZmqSocket::endpoint() const {
  char text[256];
  size_t n = sizeof text;
  XPYD_CHECK(zmq().getsockopt(socket_, ZMQ_LAST_ENDPOINT, text, &n) == 0);
  return text;
}

// A message is queued whole or not at all, so only its first frame can be refused.
bool ZmqSocket::send(std::initializer_list<std::string_view> frames) {
  for (const std::string_view& frame : frames) {
    const int more = &frame + 1 != frames.end() ? ZMQ_SNDMORE : 0;
    while (zmq().send(socket_, frame.data(), frame.size(), ZMQ_DONTWAIT | more) < 0)
      if (errno != EINTR) return false;
  }
  return true;
}

std::vector<std::string> ZmqSocket::receive() {
  std::vector<std::string> frames;
  zmq_msg_t part;
  zmq().msg_init(&part);
  for (bool more = true; more && zmq().msg_recv(&part, socket_, ZMQ_DONTWAIT) >= 0;) {
    frames.emplace_back(static_cast<const char*>(zmq().msg_data(&part)), zmq().msg_size(&part));
    more = zmq().msg_more(&part);
  }
  zmq().msg_close(&part);
  return frames;
}

bool ZmqSocket::wait(int ms) {
  zmq_pollitem_t item{.socket = socket_, .fd = 0, .events = ZMQ_POLLIN, .revents = 0};
  return zmq().poll(&item, 1, ms) > 0;
}

}  // namespace xpyd::disagg
