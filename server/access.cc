#include "server/access.h"

#include <arpa/inet.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/json.h"
#include "disagg/net/hello.h"
#include "server/api_parse.h"

namespace xpyd::server {
namespace {

constexpr size_t kMaxKeyFileBytes = 1u << 20;

// What is compared are digests: how long it takes says nothing of the keys, nor of their lengths.
bool equal_keys(std::string_view a, std::string_view b) {
  return equal_in_constant_time(hmac_sha256("", a), hmac_sha256("", b));
}

// "name:80", "[::1]:80" -> "name", "::1".
std::string host_name(std::string_view host) {
  if (host.starts_with('[')) return lower(host.substr(1, host.find(']') - 1));
  return lower(host.substr(0, host.find(':')));
}

bool is_own_name(const std::string& name) {
  char own[256] = "";
  gethostname(own, sizeof own - 1);
  return name == "localhost" || name.ends_with(".localhost") || name == lower(own) || !address_group(name).empty();
}

bool is_json(std::string_view type) {
  const std::string text = lower(type.substr(0, type.find(';')));
  return text.substr(0, text.find(' ')) == "application/json";
}

}  // namespace

std::string address_group(std::string_view address) {
  const std::string text(address.substr(0, address.find('%')));  // without an interface's name
  char out[INET6_ADDRSTRLEN];
  in_addr four;
  if (inet_pton(AF_INET, text.c_str(), &four) == 1) return inet_ntop(AF_INET, &four, out, sizeof out);
  in6_addr six;
  if (inet_pton(AF_INET6, text.c_str(), &six) != 1) return "";
  if (IN6_IS_ADDR_V4MAPPED(&six)) return inet_ntop(AF_INET, six.s6_addr + 12, out, sizeof out);
  if (!IN6_IS_ADDR_LOOPBACK(&six)) std::memset(six.s6_addr + 8, 0, 8);
  return inet_ntop(AF_INET6, &six, out, sizeof out);
}

std::string client_address(const std::string& peer, const HttpRequest& request,
                           const std::vector<std::string>& trusted) {
  auto trusts = [&](const std::string& address) {
    return std::find(trusted.begin(), trusted.end(), address) != trusted.end();
  };
  if (!trusts(peer)) return peer;
  std::string list;  // of all such headers: proxies append to the line, or add one
  for (const auto& [name, value] : request.headers)
    if (name == "x-forwarded-for") list += "," + value;
  while (!list.empty()) {
    const size_t comma = list.rfind(',');
    std::string_view item = std::string_view(list).substr(comma + 1);
    item.remove_prefix(std::min(item.find_first_not_of(" \t["), item.size()));
    const std::string address = address_group(item.substr(0, item.find_first_of(" \t]")));
    if (address.empty()) return peer;  // not an address: nobody knows who that is
    if (!trusts(address)) return address;
    list.resize(comma);
  }
  return peer;
}

bool is_loopback_address(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

int key_owner(const std::vector<std::string>& keys, const HttpRequest& request) {
  constexpr std::string_view kScheme = "Bearer ";
  std::string_view given = request.header("authorization");
  if (!given.starts_with(kScheme)) return -1;
  given.remove_prefix(kScheme.size());
  int owner = -1;
  for (size_t i = 0; i < keys.size(); ++i)
    if (equal_keys(given, keys[i])) owner = static_cast<int>(i);
  return owner;
}

std::optional<ApiError> object_to(const HttpRequest& request, const std::vector<std::string>& allowed_hosts) {
  const std::string_view host = request.header("host"), origin = request.header("origin");
  auto listed = [&](const std::string& name) {
    return std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                       [&](const std::string& one) { return one == "*" || lower(one) == name; });
  };
  if (!host.empty() && !is_own_name(host_name(host)) && !listed(host_name(host)))
    return ApiError{.status = 403,
                    .message = "this server does not go by the name in the Host header; see --allowed-hosts"};
  // A browser says from which page a request comes: ours has our own name.
  if (!origin.empty()) {
    const size_t at = origin.find("://");
    const std::string_view from = at == origin.npos ? "" : origin.substr(at + 3);
    const bool named =  // behind a proxy Host may be another
        std::any_of(allowed_hosts.begin(), allowed_hosts.end(),
                    [&](const std::string& one) { return lower(one) == lower(from); });
    if (from.empty() || (lower(from) != lower(host) && !named))
      return ApiError{.status = 403, .message = "requests from pages of another origin are not served"};
  }
  // A form or a script of another origin may send other types without asking first.
  const std::string_view type = request.header("content-type"), length = request.header("content-length");
  const bool body = !request.header("transfer-encoding").empty() || length.find_first_not_of('0') != length.npos;
  if (request.method == "POST" && (body || !type.empty()) && !is_json(type))
    return ApiError{.status = 415, .message = "send the body as Content-Type: application/json"};
  return {};
}

bool is_api_key(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 127; });
}

Result<std::vector<std::string>> read_api_keys(const std::string& path) {
  struct stat about {};
  if (stat(path.c_str(), &about) == 0 && (about.st_mode & 077) != 0)
    return invalid(path + ": others than its owner can read it: chmod 600");
  auto text = read_small_file(path, kMaxKeyFileBytes);
  if (!text) return text.error();
  std::vector<std::string> keys;
  std::istringstream lines(text.value());
  for (std::string line; std::getline(lines, line);) {
    line.erase(line.find_last_not_of(" \t\r") + 1);
    if (line.empty() || line[0] == '#') continue;
    if (!is_api_key(line)) return invalid(path + ": a key has printable ASCII and no blank");
    keys.push_back(std::move(line));
  }
  if (keys.empty()) return invalid(path + ": expected a key on each line, found none");
  return keys;
}

}  // namespace xpyd::server
