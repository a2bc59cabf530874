// What becomes of a process that gets no memory: one line on stderr, and exit code 1. A server or a
// worker is told to end (SIGTERM, which its signal thread takes), with a reserve to do it in; where
// that is not enough, or nobody takes the signal, the process ends at once.
#pragma once

#include <cstddef>

namespace xpyd {

// Before there is another thread.
void prepare_for_out_of_memory();
// Whoever gets none from the system does what `new` does: asks for help, then tries again.
// `bytes`: as many as were asked for; 0: not known.
void out_of_memory(size_t bytes);
bool was_out_of_memory();  // since the start

}  // namespace xpyd
