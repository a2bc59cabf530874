// xpyd export DIR: the demo model inside this binary as a folder, from which clients load a
// tokenizer.
#include <cstdio>

#include "model/folder.h"
#include "server/commands.h"

namespace xpyd {

int export_main(const Options& options) {
  if (options.positional().empty()) return fail(": export", invalid("expected DIR, a new or an empty folder"));
  const Status written = export_demo(options.positional()[0]);
  return written ? 0 : fail(": export", written.error());
}

}  // namespace xpyd
