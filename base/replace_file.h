// Files that are written as a whole: beside, under a name of nobody's, then renamed.
//
// Thread safety: plain functions.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace xpyd {

// Whoever reads `path` meanwhile sees the old text or the new one. Only a regular file is replaced:
// renaming over a device, a pipe or a socket would take that away from everybody.
Status replace_file(const std::string& path, std::string_view text);
// Its error, found before there is a text.
Status check_replaceable(const std::string& path);

}  // namespace xpyd
