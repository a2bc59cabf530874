// Who asks, and who may: judged at the end of a request's header, before its body is read, on every route.
//
// Thread safety: plain functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/http_parser.h"

namespace xpyd::server {

struct ApiError;  // api_parse.h

// For whom a connection or a request counts, where there is not enough for everybody: an IPv4 address as it is, also
// inside IPv6; of another IPv6 address its /64, since who has one of them has all. "" where `address` is none.
std::string address_group(std::string_view address);

// The client's address: the peer's, or, where the peer is one of `trusted` proxies, the last of
// X-Forwarded-For that is none of them. What a stranger writes there counts for nothing.
std::string client_address(const std::string& peer, const HttpRequest& request,
                           const std::vector<std::string>& trusted);

bool is_loopback_address(const std::string& address);

// Of the request's "Authorization: Bearer KEY", the key's place among `keys`; -1: none of them. It
// takes as long for a wrong key as for a right one of the same length.
int key_owner(const std::vector<std::string>& keys, const HttpRequest& request);

// Why the request's Host, Origin or content type is not served. `allowed_hosts` are names that Host
// may have beside addresses, localhost and this machine's name: with any name, a stranger's page
// could point its own name here and read answers as its own (DNS rebinding).
// "*": any.
std::optional<ApiError> object_to(const HttpRequest& request, const std::vector<std::string>& allowed_hosts);

bool is_api_key(const std::string& text);  // one that a header can carry
// One key on a line; empty lines and those that begin with # do not count. A file that others than
// its owner can read is refused.
Result<std::vector<std::string>> read_api_keys(const std::string& path);

}  // namespace xpyd::server
