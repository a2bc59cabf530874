// Functions of the driver (libcuda) are looked up at run time, so that a program starts where there
// is none and says so. Included by CUDA sources that nvcc compiles.
#pragma once

#include <cuda_runtime.h>

namespace xpyd::cuda {

// version: of the CUDA release whose signature of the function this is, as 12000.
template <class F>
bool look_up(F& function, const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state{};
#if CUDART_VERSION >= 12050
  cudaError_t result = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &state);
#else
  (void)version;
  cudaError_t result = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &state);
#endif
  function = reinterpret_cast<F>(found);
  return result == cudaSuccess && state == cudaDriverEntryPointSuccess && found != nullptr;
}

}  // namespace xpyd::cuda
