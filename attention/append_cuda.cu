// This step's K and V to their places in the cache. One thread moves 8 elements of one row where
// both sides allow 16-byte accesses, one element otherwise; the bytes written are the same.
#include <bit>
#include <type_traits>

#include "attention/attention_cuda_kernel.h"

namespace xpyd {
namespace {

using namespace cuda::attention;

constexpr int kThreads = 256;

// 8 elements, 16-byte aligned.
__device__ inline void get_8(const float* from, float (&x)[8]) {
  for (int half = 0; half < 2; ++half) {
    uint4 w = reinterpret_cast<const uint4*>(from)[half];
    x[4 * half + 0] = std::bit_cast<float>(w.x), x[4 * half + 1] = std::bit_cast<float>(w.y);
    x[4 * half + 2] = std::bit_cast<float>(w.z), x[4 * half + 3] = std::bit_cast<float>(w.w);
  }
}
__device__ inline void get_8(const bf16* from, float (&x)[8]) {
  uint4 w = *reinterpret_cast<const uint4*>(from);
  uint32_t words[4] = {w.x, w.y, w.z, w.w};
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = std::bit_cast<float>(words[i] << 16);
    x[2 * i + 1] = std::bit_cast<float>(words[i] & 0xffff0000u);
  }
}
__device__ inline void put_8(float* to, const float (&x)[8]) {
  for (int half = 0; half < 2; ++half)
    reinterpret_cast<uint4*>(to)[half] =
        uint4{std::bit_cast<uint32_t>(x[4 * half + 0]), std::bit_cast<uint32_t>(x[4 * half + 1]),
              std::bit_cast<uint32_t>(x[4 * half + 2]), std::bit_cast<uint32_t>(x[4 * half + 3])};
}
__device__ inline void put_8(bf16* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) = uint4{cuda::pack_bf16(x[0], x[1]), cuda::pack_bf16(x[2], x[3]),
                                        cuda::pack_bf16(x[4], x[5]), cuda::pack_bf16(x[6], x[7])};
}

// Pieces of kWidth elements, in the order [token][K|V][head][piece].
template <class From, class To, int kWidth>
__global__ void append_kernel(const __grid_constant__ CudaAppendArgs args) {
  const KvShape& shape = args.layout.shape;
  int pieces = shape.head_dim / kWidth, per_token = 2 * shape.n_kv_heads * pieces;
  size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
  int token = int(i / size_t(per_token)), rest = int(i % size_t(per_token));
  if (token >= args.step.q_offsets[args.step.n_seqs]) return;
  int kv = rest / (shape.n_kv_heads * pieces), head = rest / pieces % shape.n_kv_heads;
  int d = rest % pieces * kWidth;
  KvView view = view_of(args.step, args.pool, args.layout, args.step.token_seqs[token]);
  const From* from = static_cast<const From*>(kv ? args.v : args.k) +
                     size_t(token) * size_t(args.stride) + size_t(head) * size_t(shape.head_dim) +
                     d;
  To* to = reinterpret_cast<To*>(view.row(args.layer, kv, args.step.positions[token], head)) + d;
  if constexpr (std::is_same_v<From, To>) {
    struct alignas(kWidth == 8 ? 16 : sizeof(To)) Piece {
      To x[kWidth];
    };
    *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
  } else if constexpr (kWidth == 8) {
    float x[8];
    get_8(from, x);
    put_8(to, x);
  } else {
    from_float(to_float(*from), *to);
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class From, class To>
void run(const CudaAppendArgs& args, cuda::Stream& stream) {
  const KvShape& shape = args.layout.shape;
  // A row starts at a multiple of head_dim elements; 16 bytes are at most 8 of them.
  bool wide = shape.head_dim % 8 == 0 && args.stride % 8 == 0 && aligned(args.k) &&
              aligned(args.v) && aligned(args.pool);
  size_t n = size_t(args.step.n_tokens) * 2 * size_t(shape.n_kv_heads) *
             size_t(shape.head_dim / (wide ? 8 : 1));
  cuda::Shape grid = {.grid = unsigned((n + kThreads - 1) / kThreads), .block = kThreads};
  cuda::launch(wide ? append_kernel<From, To, 8> : append_kernel<From, To, 1>, "append_kv", grid,
               stream, args);
}

}  // namespace

void cuda_append_kv(const CudaAppendArgs& args, cuda::Stream& stream) {
  const KvShape& shape = args.layout.shape;
  XPYD_CHECK(args.dtype != Dtype::f16 && shape.dtype != Dtype::f16);
  XPYD_CHECK(args.layer >= 0 && args.layer < shape.n_layers);
  XPYD_CHECK(args.stride >= shape.n_kv_heads * shape.head_dim);
  if (args.step.n_tokens == 0) return;
  bool from_f32 = args.dtype == Dtype::f32, to_f32 = shape.dtype == Dtype::f32;
  auto* launch = from_f32 ? (to_f32 ? run<float, float> : run<float, bf16>)
                          : (to_f32 ? run<bf16, float> : run<bf16, bf16>);
  launch(args, stream);
}

}  // namespace xpyd
