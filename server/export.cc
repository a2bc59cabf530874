// xpyd export DIR: the demo model inside this binary as a folder, from which clients load a tokenizer.
#include <cstdio>

#include "model/folder.h"
#include "server/commands.h"

namespace xpyd {

int export_main(const Options& options) {
  const auto fail = [](const Error& error) {
    std::fprintf(stderr, "xpyd: export: %s\n", error.message.c_str());
    return error.code == ErrorCode::invalid_argument ? 2 : 1;
  };
  if (options.positional().empty()) return fail(invalid("expected DIR, a new or an empty folder"));
  const Status written = export_demo(options.positional()[0]);
  return written ? 0 : fail(written.error());
}

}  // namespace xpyd
