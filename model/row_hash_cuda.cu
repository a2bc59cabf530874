// Several blocks per row: a batch of one must not wait for one SM to read 512 KB. The sum of the
// terms does not depend on their order.
#include <algorithm>

#include "base/cuda_kernel.h"
#include "base/row_hash.h"
#include "model/row_hash_cuda.h"

namespace xpyd {
namespace {

constexpr int kThreads = 256;
constexpr int kTerms = 8;  // of one thread

using Word = unsigned long long;  // as atomicAdd wants it

__global__ void hash_rows_kernel(const float* logits, int vocab, Word* out) {
  const float* row = logits + size_t(blockIdx.y) * size_t(vocab);
  const size_t n = n_row_hash_terms(size_t(vocab));
  size_t i = blockIdx.x * size_t(kThreads * kTerms) + threadIdx.x;
  Word sum = 0;
  for (int term = 0; term < kTerms; ++term, i += kThreads)
    if (i < n) sum += row_hash_term(row, size_t(vocab), i);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&out[blockIdx.y], sum);
}

}  // namespace

void hash_rows(const float* logits, int n_rows, int vocab, uint64_t* out, cuda::Stream& stream) {
  XPYD_CHECK(n_rows >= 0 && n_rows < 1 << 16 && vocab > 0);
  if (n_rows == 0) return;
  static_assert(sizeof(Word) == sizeof(uint64_t));
  cuda::fill(out, 0, size_t(n_rows) * sizeof(uint64_t), stream);
  const size_t of_block = size_t(kThreads * kTerms);
  const size_t blocks = (n_row_hash_terms(size_t(vocab)) + of_block - 1) / of_block;
  cuda::launch(hash_rows_kernel, "hash_rows", cuda::Shape{dim3(unsigned(blocks), unsigned(n_rows)), dim3(kThreads)},
               stream, logits, vocab, reinterpret_cast<Word*>(out));
}

}  // namespace xpyd
