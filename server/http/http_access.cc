// Which requests are refused for their Host, Origin, content type or content encoding.
#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>

#include "server/http/http.h"

namespace xpyd::server {
namespace {

bool is_ipv6(const std::string& name) {
  const std::string text(name.substr(0, name.find('%')));  // without the zone (interface name)
  in6_addr any;
  return inet_pton(AF_INET6, text.c_str(), &any) == 1;
}

// "name:80", "[::1]:80" -> "name", "::1". Nothing for what is no host and port (RFC 3986 3.2.2).
std::optional<std::string> host_name(std::string_view host) {
  const bool bracket = host.starts_with('[');
  const size_t end = bracket ? host.find(']') : std::min(host.find(':'), host.size());
  if (end == host.npos) return {};
  const std::string name = lower(host.substr(bracket, end - bracket));
  const std::string_view port = host.substr(end + bracket);
  const bool malformed = (bracket && !is_ipv6(name)) || name.find_first_of("/?#@[]\\\" <>^`{|}") != name.npos ||
                         (!port.empty() && port[0] != ':') || port.find_first_not_of("0123456789", 1) != port.npos;
  return malformed ? std::nullopt : std::optional(name);
}

bool is_own_name(const std::string& name) {
  char own[256] = "";
  in_addr any;
  gethostname(own, sizeof own - 1);
  return name == "localhost" || name.ends_with(".localhost") || name == lower(own) || is_ipv6(name) ||
         inet_pton(AF_INET, name.c_str(), &any) == 1;
}

bool is_json(std::string_view type) {
  const std::string text = lower(type.substr(0, type.find(';')));
  return text.substr(0, text.find(' ')) == "application/json";
}

}  // namespace

std::string_view find_header(const HttpHeaders& headers, std::string_view name) {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return {};
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  return out;
}

std::optional<std::pair<int, std::string>> object_to(const HttpRequest& request,
                                                     const std::vector<std::string>& allowed_hosts) {
  const std::string_view host = request.header("host"), origin = request.header("origin");
  auto listed = [&](const std::string& name) {
    return std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                       [&](const std::string& one) { return one == "*" || lower(one) == name; });
  };
  const std::optional<std::string> name = host_name(host);
  if (!name) return std::pair(400, "the Host header is no host and port");
  if (!host.empty() && !is_own_name(*name) && !listed(*name))
    return std::pair(403, "this server does not have the name in the Host header; --allowed-hosts sets its names");
  // A browser's Origin names the page that sends the request. Our own page has our own name.
  if (!origin.empty()) {
    const size_t at = origin.find("://");
    const std::string_view from = at == origin.npos ? "" : origin.substr(at + 3);
    const bool named =  // behind a proxy the Host may differ
        std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                    [&](const std::string& one) { return lower(one) == lower(from); });
    if (from.empty() || (lower(from) != lower(host) && !named))
      return std::pair(403, "this server does not answer requests from web pages of another origin");
  }
  // A form or script of another origin may send other content types without a preflight request.
  const std::string_view type = request.header("content-type"), length = request.header("content-length");
  const bool body = !request.header("transfer-encoding").empty() || length.find_first_not_of('0') != length.npos;
  if (request.method == "POST" && (body || !type.empty()) && !is_json(type))
    return std::pair(415, "expected a body with Content-Type: application/json");
  const std::string encoding = lower(request.header("content-encoding"));
  if (!encoding.empty() && encoding != "identity")
    return std::pair(
        415, "Content-Encoding: " + encoding.substr(0, 64) + " is not supported: send the body without encoding");
  return {};
}

}  // namespace xpyd::server
