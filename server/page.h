// The demo page at "/": server/page.html, carried inside the binary.
#pragma once

#include <string_view>

namespace xpyd {

std::string_view page_html();

}  // namespace xpyd
