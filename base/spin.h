// What a thread says to its core between two looks at a word that another thread will write.
#pragma once

namespace xpyd {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace xpyd
