#include "server/page.h"

#include <cstddef>

// The assembler copies the file in; a compile runs in the repository's root, as every include
// expects.
__asm__(
    ".section .rodata\n"
    ".global xpyd_page_begin\n"
    ".global xpyd_page_end\n"
    "xpyd_page_begin:\n"
    ".incbin \"server/page.html\"\n"
    "xpyd_page_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" const char xpyd_page_begin[], xpyd_page_end[];

namespace xpyd {

std::string_view page_html() { return {xpyd_page_begin, static_cast<size_t>(xpyd_page_end - xpyd_page_begin)}; }

}  // namespace xpyd
