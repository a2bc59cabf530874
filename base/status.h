// Three kinds of failure: a bug of ours or a broken device is a CHECK that aborts; a normal outcome or bad input from
// outside is a Result that the caller must look at.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/rooms.h"

namespace xpyd {

enum class ErrorCode {
  invalid_argument,  // the caller's input is wrong; the message names the field and what was expected
  not_found,
  unavailable,  // no room now; the same call may succeed later
  io,           // a file or socket failed or is corrupt
  cancelled,
};

struct Error {
  ErrorCode code = ErrorCode::invalid_argument;
  std::string message;
};

inline Error invalid(std::string message) { return {ErrorCode::invalid_argument, std::move(message)}; }

// A value or an Error. `value()` of an error is a bug and aborts.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit on purpose
  Result(Error error) : state_(std::move(error)) {}  // NOLINT
  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& value() & { return *checked(); }
  const T& value() const& { return *const_cast<Result*>(this)->checked(); }
  T&& value() && { return std::move(*checked()); }
  const Error& error() const { return std::get<1>(state_); }

 private:
  T* checked() {
    if (!ok()) {
      std::fprintf(stderr, "xpyd: value() of an error: %s\n", error().message.c_str());
      std::abort();
    }
    return &std::get<0>(state_);
  }
  std::variant<T, Error> state_;
};

struct Ok {};
using Status = Result<Ok>;
inline Status ok() { return Status(Ok{}); }

// For readers of much outside input: returns the value or throws its Error, which the reader's one `catch (const Error&
// error) { return error; }` makes a Result again. `where` is put before its message.
template <class T>
T need(Result<T> result, const std::string& where = "") {
  if (!result) throw Error{result.error().code, where + result.error().message};
  return std::move(result).value();
}

[[noreturn]] inline void check_failed(const char* expression, const char* file, int line, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s%s%s\n", file, line, expression, detail.empty() ? "" : ": ",
               detail.c_str());
  std::abort();
}

}  // namespace xpyd

// CHECK(condition) or CHECK(condition, "text with values"): on in every build.
#define XPYD_CHECK(condition, ...)                                                      \
  do {                                                                                  \
    if (!(condition)) [[unlikely]]                                                      \
      ::xpyd::check_failed(#condition, __FILE__, __LINE__, ::std::string(__VA_ARGS__)); \
  } while (0)
