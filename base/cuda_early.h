// Programmatic dependent launch (sm_90): a kernel starts while the one before it on the stream
// ends; wait_for_previous() holds it until all that came before is done and visible. Every thread
// calls it before it touches memory that earlier work writes or reads, so that a kernel that is
// done means that all before it are. let_next_start() lets the next one take the room that is left.
// Both do nothing where nothing was launched early and below sm_90. In captured graphs these are
// programmatic edges (CUDA Programming Guide, "Programmatic Dependent Launch"). On the interpreter
// a block comes to its wait before the kernel before it has begun (tests/simt/README.md).
#pragma once

#include "base/cuda.h"

namespace xpyd::cuda {

// A stream, and whether kernels may start early on it. A stream alone: not.
struct On {
  On(Stream& s, bool may_start_early = false) : stream(s), early(may_start_early) {}
  Stream& stream;
  bool early;
};

void launch_kernel(const void* kernel, const char* name, const Shape& shape, void** args, const On& on);
#ifdef XPYD_SIMT
namespace simt {
void launch_early(const char* name, const Shape& shape, cudaStream_t stream, std::function<void()> body);
void wait_for_previous(Where where);
}  // namespace simt
#endif

// launch(), of a kernel that calls wait_for_previous().
template <class... P, class... A>
void launch(void (*kernel)(P...), const char* name, const Shape& shape, const On& on, A&&... args) {
#ifdef XPYD_SIMT
  if (!on.early) return launch(kernel, name, shape, on.stream, std::forward<A>(args)...);
  simt::launch_early(name, shape, on.stream.handle(),
                     [kernel, ... values = static_cast<std::decay_t<P> >(args)] { kernel(values...); });
#else
  auto pass = [&](auto... value) {
    void* addresses[] = {&value...};
    launch_kernel(reinterpret_cast<const void*>(kernel), name, shape, addresses, on);
  };
  pass(static_cast<std::decay_t<P> >(args)...);
#endif
}

#ifdef XPYD_SIMT
inline void wait_for_previous(simt::Where where = simt::Where::current()) { simt::wait_for_previous(where); }
inline void let_next_start() {}
#else
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}
#endif

// Where there is nothing to do before.
__device__ inline void begin_after_previous() {
  let_next_start();
  wait_for_previous();
}

}  // namespace xpyd::cuda
