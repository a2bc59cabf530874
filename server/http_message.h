// One HTTP request and one response, as plain values.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace xpyd {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;   // as sent
  std::string path;     // of the target, without the query; not percent-decoded: no route needs it
  std::string query;    // after '?'
  int version = 11;     // 10 or 11
  HttpHeaders headers;  // names in lower case, in the order sent
  std::string body;
  bool keep_alive = true;      // the client's wish
  std::string client;          // its address (client_address in limits.h)
  bool from_loopback = false;  // the client is on this machine, and no proxy stands between

  // The first header of that (lower case) name; "" when there is none.
  std::string_view header(std::string_view name) const {
    for (const auto& [key, value] : headers)
      if (key == name) return value;
    return {};
  }
};

struct HttpResponse {
  int status = 200;
  std::string reason;  // "" = the usual phrase; benchmark clients record nothing else of an error
  std::string content_type = "application/json";
  HttpHeaders headers;  // beside Content-Type, Content-Length, Connection, Date
  std::string body;
  bool close = false;  // no further request on this connection
};

struct HttpLimits {
  size_t max_header_bytes = 32u << 10;  // request line and headers; beyond: 431
  size_t max_target_bytes = 8u << 10;   // beyond: 414
  int max_headers = 100;                // beyond: 431
  size_t max_body_bytes = 16u << 20;    // beyond: 413
};

const char* http_reason(int status);

inline std::string lower(std::string_view text) {  // of ASCII
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  return out;
}

}  // namespace xpyd
