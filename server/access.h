// Who may ask this server: judged at the end of a request's header, before its body is read, on
// every route.
//
// Thread safety: const after construction.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/api_parse.h"
#include "server/http_message.h"

namespace xpyd {

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

}  // namespace xpyd
