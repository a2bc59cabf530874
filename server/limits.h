// For whom a connection or a request counts, where there is not enough for everybody.
//
// Thread safety: plain functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/http_message.h"

namespace xpyd {

// An IPv4 address as it is, also inside IPv6; of another IPv6 address its /64, since who has one of
// them has all. "" where `address` is none.
std::string address_group(std::string_view address);

// The client's address: the peer's, or, where the peer is one of `trusted` proxies, the last of
// X-Forwarded-For that is none of them. What a stranger writes there counts for nothing.
std::string client_address(const std::string& peer, const HttpRequest& request,
                           const std::vector<std::string>& trusted);

bool is_loopback_address(const std::string& address);

void raise_descriptor_limit();  // to what the system lets this process have

}  // namespace xpyd
