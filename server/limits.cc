#include "server/limits.h"

#include <arpa/inet.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>

namespace xpyd {

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

void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace xpyd
