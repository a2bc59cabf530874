// Arrays copied to the GPU and back, for tests.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/dtype.h"

namespace xpyd::testing {

template <class T>
cuda::Memory to_card(const std::vector<T>& from, cuda::Stream& stream) {
  const size_t bytes = std::max(from.size() * sizeof(T), size_t(16));
  cuda::Memory staging = cuda::Memory::pinned(bytes);
  if (!from.empty()) std::memcpy(staging.data(), from.data(), from.size() * sizeof(T));
  cuda::Memory memory = cuda::Memory::device(bytes).value();
  cuda::copy(memory.data(), staging.data(), bytes, stream);
  stream.wait();
  return memory;
}

template <class T>
std::vector<T> from_card(const void* from, size_t n, cuda::Stream& stream) {
  if (n == 0) return {};
  cuda::Memory staging = cuda::Memory::pinned(n * sizeof(T));
  cuda::copy(staging.data(), from, n * sizeof(T), stream);
  stream.wait();
  return {staging.as<T>(), staging.as<T>() + n};
}

// Copies n floats to the GPU as an array of `dtype`, and back. The values that come back have been rounded.
inline cuda::Memory floats_to_card(const std::vector<float>& from, Dtype dtype, cuda::Stream& stream) {
  if (dtype == Dtype::f32) return to_card(from, stream);
  std::vector<bf16> rounded(from.size());
  std::transform(from.begin(), from.end(), rounded.begin(), to_bf16);
  return to_card(rounded, stream);
}
inline std::vector<float> floats_from_card(const void* from, size_t n, Dtype dtype, cuda::Stream& stream) {
  if (dtype == Dtype::f32) return from_card<float>(from, n, stream);
  const std::vector<bf16> rounded = from_card<bf16>(from, n, stream);
  std::vector<float> values(n);
  std::transform(rounded.begin(), rounded.end(), values.begin(), to_f32);
  return values;
}

}  // namespace xpyd::testing
