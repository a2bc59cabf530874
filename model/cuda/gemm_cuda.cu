// The product over cuBLASLt, with one addition order for every M.
//
// The first algorithm that the heuristics name for kReferenceRows rows, and that does not split K, is the reference.
// Trials run it and the heuristics' other candidates on the real weights and random rows, for powers of two of M, and
// hash the bits of every output row. Candidates whose rows equal the reference's have its order, and each size gets the
// fastest of them. Small M slides over kKnownRows rows, because bf16 hides most differences between orders. Timing
// decides only between equal bits, so the order depends on the card and the library only.
#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "base/row_hash.h"
#include "model/cuda/gemm_cuda.h"

#define XPYD_CUBLAS(call)                                                           \
  do {                                                                              \
    const cublasStatus_t status_ = (call);                                          \
    XPYD_CHECK(status_ == CUBLAS_STATUS_SUCCESS, cublasLtGetStatusString(status_)); \
  } while (0)

namespace xpyd::model {
namespace {

constexpr size_t kWorkspace = size_t(32) << 20;    // NVIDIA's advice for sm_90
constexpr size_t kCheckBytes = size_t(512) << 20;  // of x or y; bounds the rows that are checked
constexpr int kCandidates = 16;
constexpr int kTimed = 4;             // candidates per size
constexpr int kKnownRows = 256;       // least number of compared rows for each M
constexpr int kReferenceRows = 1024;  // whatever max_m is, so that instances with other steps add alike

cudaDataType_t cuda_type(Dtype dtype) { return dtype == Dtype::f32 ? CUDA_R_32F : CUDA_R_16BF; }

// Uniform in [-1, 1).
__global__ void random_kernel(void* out, Dtype dtype, size_t n) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    const float x = float(int32_t(uint32_t(mix64(i + 1)))) * 0x1p-31f;
    if (dtype == Dtype::f32)
      static_cast<float*>(out)[i] = x;
    else
      static_cast<bf16*>(out)[i] = to_bf16(x);
  }
}

// One block per row. The hash is a sum of mixed (place, bits), so the order of additions does not matter.
__global__ void hash_kernel(const void* y, Dtype dtype, int n, int stride, unsigned long long* hashes) {
  const size_t first = blockIdx.x * size_t(stride);
  unsigned long long sum = 0;
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
    const uint64_t bits = dtype == Dtype::f32 ? static_cast<const uint32_t*>(y)[first + size_t(i)]
                                              : static_cast<const uint16_t*>(y)[first + size_t(i)];
    sum += mix64(uint64_t(i + 1) << 32 | bits);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) atomicAdd(&hashes[blockIdx.x], sum);
}

template <class T>
std::optional<T> config_value(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t what) {
  T value{};
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algo, what, &value, sizeof value, &written) != CUBLAS_STATUS_SUCCESS)
    return std::nullopt;
  return value;
}

bool splits_k(const cublasLtMatmulAlgo_t& algo) {
  const auto parts = config_value<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  const auto reduction = config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
  return !parts || (*parts != 0 && *parts != 1) || !reduction || *reduction != CUBLASLT_REDUCTION_SCHEME_NONE;
}

// A name for the library's structure, which has none: nvcc does not compile vectors of it.
struct Algo {
  cublasLtMatmulAlgo_t value;
};

int bucket_of(int m) { return std::bit_width(unsigned(m - 1)); }  // m <= 1 << bucket

// A product without M and pointers, and the algorithm chosen for each power of two of M.
struct Product {
  CudaGemmArgs like;
  cublasLtMatmulDescOpaque_t operation;
  Algo reference;
  std::vector<Algo> chosen;  // [bucket]

  std::string shape() const {
    return std::to_string(like.w.n) + " x " + std::to_string(like.w.k) + " " + dtype_name(like.x_dtype) + " -> " +
           dtype_name(like.y_dtype);
  }
  bool takes(const CudaGemmArgs& a, int m) const {
    return a.w.n == like.w.n && a.w.k == like.w.k && a.w.stride == like.w.stride && a.x_stride == like.x_stride &&
           a.y_stride == like.y_stride && a.x_dtype == like.x_dtype && a.y_dtype == like.y_dtype &&
           bucket_of(m) < int(chosen.size());
  }
};

struct Layouts {
  // Row-major is column-major transposed: y^T [n, m] = W [n, k] x^T [k, m], with W read as the transpose of [k, n].
  Layouts(const CudaGemmArgs& a, int m) {
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&w, cuda_type(a.x_dtype), uint64_t(a.w.k), uint64_t(a.w.n), a.w.stride));
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&x, cuda_type(a.x_dtype), uint64_t(a.w.k), uint64_t(m), a.x_stride));
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&y, cuda_type(a.y_dtype), uint64_t(a.w.n), uint64_t(m), a.y_stride));
  }
  cublasLtMatrixLayoutOpaque_t w, x, y;
};

cublasLtMatmulDescOpaque_t operation(Dtype x_dtype) {
  cublasLtMatmulDescOpaque_t made;
  // Pedantic: f32 stays f32, without TF32 or emulation.
  XPYD_CUBLAS(cublasLtMatmulDescInit(&made, x_dtype == Dtype::f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
                                     CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  XPYD_CUBLAS(cublasLtMatmulDescSetAttribute(&made, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  return made;
}

}  // namespace

struct CudaGemm::Impl {
  explicit Impl(cuda::Stream& on) : stream(on) {}
  ~Impl() {
    if (handle) cublasLtDestroy(handle);
  }
  Status open();  // before any other call; may be repeated

  cublasStatus_t multiply(Product& p, const Algo& algo, const CudaGemmArgs& a) {
    Layouts layouts(a, a.m);
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, &p.operation, &one, a.w.data, &layouts.w, a.x, &layouts.x, &zero, a.y, &layouts.y,
                          a.y, &layouts.y, &algo.value, workspace.data(), workspace.size(), stream.handle());
  }
  std::vector<Algo> candidates(Product& p, int m);
  class Trial;
  Status choose(Product& p, int max_m);

  cuda::Stream& stream;
  cublasLtHandle_t handle = nullptr;
  cuda::Memory workspace;
  std::vector<Product> products;
};

// Device memory for one product's trials.
class CudaGemm::Impl::Trial {
 public:
  Trial(Impl& gemm, Product& p)
      : gemm_(gemm),
        p_(p),
        args_(p.like),
        x_row_(size_t(args_.x_stride) * dtype_bytes(args_.x_dtype)),
        y_row_(size_t(args_.y_stride) * dtype_bytes(args_.y_dtype)) {}

  Status allocate(int max_m) {
    rows_ = int(std::clamp<size_t>(kCheckBytes / std::max(x_row_, y_row_), 1, size_t(max_m)));
    // Slices of y begin at 16 bytes, as every y does.
    for (auto [memory, bytes] : {std::pair(&x_, size_t(rows_) * x_row_),
                                 {&y_, size_t(rows_) * y_row_ + kKnownRows * size_t(16)},
                                 {&hashes_, size_t(rows_) * 8}}) {
      Result<cuda::Memory> made = cuda::Memory::device(bytes);
      if (!made) return made.error();
      *memory = std::move(made).value();
    }
    host_ = cuda::Memory::pinned(size_t(rows_) * 8);
    cuda::launch(random_kernel, "random", cuda::Shape{dim3(1024), dim3(256)}, gemm_.stream, x_.data(), args_.x_dtype,
                 size_t(rows_) * size_t(args_.x_stride));
    return ok();
  }

  // Returns the hashes of the first rows' bits, at least of kKnownRows rows if the memory has so many. The rows are
  // computed as consecutive products of m rows. Empty: the algorithm cannot run.
  std::vector<uint64_t> run(const Algo& algo, int m, int least = kKnownRows) {
    CudaGemmArgs slice = args_;
    slice.m = std::min(m, rows_);
    const int n_slices = std::min((least + slice.m - 1) / slice.m, rows_ / slice.m), n = n_slices * slice.m;
    const size_t y_bytes = (size_t(slice.m) * y_row_ + 15) / 16 * 16;
    cuda::fill(y_.data(), 0xff, size_t(n_slices) * y_bytes, gemm_.stream);
    cuda::fill(hashes_.data(), 0, size_t(n) * 8, gemm_.stream);
    for (int i = 0; i < n_slices; ++i) {
      slice.x = x_.data() + size_t(i * slice.m) * x_row_;
      slice.y = y_.data() + size_t(i) * y_bytes;
      if (gemm_.multiply(p_, algo, slice) != CUBLAS_STATUS_SUCCESS) return {};
      cuda::launch(hash_kernel, "hash", cuda::Shape{dim3(unsigned(slice.m)), dim3(256)}, gemm_.stream, slice.y,
                   args_.y_dtype, slice.w.n, slice.y_stride, hashes_.as<unsigned long long>() + i * slice.m);
    }
    cuda::copy(host_.data(), hashes_.data(), size_t(n) * 8, gemm_.stream);
    gemm_.stream.wait();
    return {host_.as<uint64_t>(), host_.as<uint64_t>() + n};
  }
  // The hashes of all rows, computed by kReferenceRows at a time.
  std::vector<uint64_t> run_all(const Algo& algo) { return run(algo, kReferenceRows, rows_); }

  double seconds(const Algo& algo, int m) {
    CudaGemmArgs args = args_;
    args.x = x_.data(), args.y = y_.data(), args.m = std::min(m, rows_);
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      // Evicts most of the weights from L2, as happens between two steps.
      cuda::fill(gemm_.workspace.data(), 0, gemm_.workspace.size(), gemm_.stream);
      begin_.record(gemm_.stream);
      if (gemm_.multiply(p_, algo, args) != CUBLAS_STATUS_SUCCESS) return 1e9;
      end_.record(gemm_.stream);
      end_.wait();
      best = std::min(best, cuda::Event::seconds(begin_, end_));
    }
    return best;
  }

 private:
  Impl& gemm_;
  Product& p_;
  const CudaGemmArgs args_;
  const size_t x_row_, y_row_;
  int rows_ = 0;
  cuda::Memory x_, y_, hashes_, host_;
  cuda::Event begin_{true}, end_{true};
};

Status CudaGemm::Impl::open() {
  if (handle) return ok();
  Result<cuda::Memory> memory = cuda::Memory::device(kWorkspace);
  if (!memory) return memory.error();
  workspace = std::move(memory).value();
  const cublasStatus_t status = cublasLtCreate(&handle);
  if (status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_NOT_INITIALIZED) {
    handle = nullptr;
    return Error{ErrorCode::unavailable,
                 std::string("cuBLASLt cannot be created, most likely for lack of device memory: ") +
                     cublasLtGetStatusString(status)};
  }
  XPYD_CUBLAS(status);
  return ok();
}

// Algorithms for M that do not split K, best first by cuBLASLt's estimate. It asks for such algorithms only; if there
// are none, it asks for all, and splits_k() filters.
std::vector<Algo> CudaGemm::Impl::candidates(Product& p, int m) {
  std::vector<Algo> eligible;
  for (bool unsplit : {true, false}) {
    Layouts layouts(p.like, m);
    cublasLtMatmulPreferenceOpaque_t preference;
    XPYD_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      XPYD_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, what, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace.size()));
    if (unsplit) prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE));
    for (auto what : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(what, uint32_t(16));
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int found = 0;
    if (cublasLtMatmulAlgoGetHeuristic(handle, &p.operation, &layouts.w, &layouts.x, &layouts.y, &layouts.y,
                                       &preference, kCandidates, results, &found) != CUBLAS_STATUS_SUCCESS)
      continue;
    for (int i = 0; i < found; ++i)
      if (results[i].state == CUBLAS_STATUS_SUCCESS && !splits_k(results[i].algo))
        eligible.push_back({results[i].algo});
    if (!eligible.empty()) break;
  }
  return eligible;
}

Status CudaGemm::Impl::choose(Product& p, int max_m) {
  Trial trial(*this, p);
  if (Status status = trial.allocate(std::max(max_m, kReferenceRows)); !status) return status;
  std::vector<uint64_t> rows;
  for (const Algo& algo : candidates(p, kReferenceRows))
    if (rows.empty()) p.reference = algo, rows = trial.run_all(algo);
  if (rows.empty())
    return Error{ErrorCode::unavailable, "cuBLASLt has no algorithm for " + p.shape() + " that does not split K"};
  for (int bucket = 0; bucket <= bucket_of(max_m); ++bucket) {
    const int most = std::min(1 << bucket, max_m), least = std::min((1 << bucket) / 2 + 1, most);
    auto keeps_bits = [&](const Algo& algo, int m) {
      const std::vector<uint64_t> some = trial.run(algo, m);
      return !some.empty() &&
             std::equal(some.begin(), some.begin() + ptrdiff_t(std::min(some.size(), rows.size())), rows.begin());
    };
    std::vector<Algo> tried = candidates(p, most);
    tried.push_back(p.reference);
    double fastest = 1e9;
    for (int i = 0, timed = 0; i < int(tried.size()) && timed < kTimed; ++i) {
      const Algo& algo = tried[size_t(i)];
      if (!keeps_bits(algo, most) || !keeps_bits(algo, least)) continue;
      ++timed;
      const double seconds = trial.seconds(algo, most);
      if (seconds >= fastest) continue;
      fastest = seconds;
      p.chosen.resize(size_t(bucket) + 1, algo);
      p.chosen.back() = algo;
    }
    if (int(p.chosen.size()) <= bucket)
      return Error{ErrorCode::unavailable, "cuBLASLt has no algorithm for " + p.shape() + ", M = " +
                                               std::to_string(most) + ", that keeps the bits of rows for every M"};
  }
  return ok();
}

CudaGemm::CudaGemm(cuda::Stream& stream) : impl_(new Impl(stream)) {}
CudaGemm::~CudaGemm() = default;

Status CudaGemm::prepare(const CudaGemmArgs& like, int max_m) {
  XPYD_CHECK(max_m > 0 && like.w.data);
  for (const Product& p : impl_->products)
    if (p.takes(like, max_m)) return ok();
  if (Status status = impl_->open(); !status) return status;
  Product p{like, operation(like.x_dtype), {}, {}};
  if (Status status = impl_->choose(p, max_m); !status) return status;
  impl_->products.push_back(std::move(p));
  return ok();
}

void CudaGemm::run(const CudaGemmArgs& a) {
  if (a.m == 0) return;
  for (Product& p : impl_->products) {
    if (!p.takes(a, a.m)) continue;
    if (impl_->multiply(p, p.chosen[size_t(bucket_of(a.m))], a) != CUBLAS_STATUS_SUCCESS)
      XPYD_CUBLAS(impl_->multiply(p, p.reference, a));
    return;
  }
  XPYD_CHECK(false, "no prepare() of " + std::to_string(a.w.n) + " x " + std::to_string(a.w.k) +
                        ", m = " + std::to_string(a.m));
}

size_t CudaGemm::bytes() const { return impl_->workspace.size(); }

}  // namespace xpyd::model
