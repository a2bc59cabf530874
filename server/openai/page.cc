// The demo page at "/". The assembler copies the file into the binary. The compiler runs in the repository's root, as
// every include expects.
__asm__(
    ".section .rodata\n"
    ".global xpyd_page_begin\n"
    ".global xpyd_page_end\n"
    "xpyd_page_begin:\n"
    ".incbin \"server/openai/page.html\"\n"
    "xpyd_page_end:\n"
    ".byte 0\n"
    ".previous\n");
