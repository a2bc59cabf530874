// The product over cuBLASLt. For every prepared shape the heuristics' candidates are run on the
// weights themselves and random rows, for sizes of M from 1 to the largest in powers of two, and a
// hash of the bits of every output row is kept. A reference is sought among the candidates of the
// largest M such that for every other M some candidate gives the same rows; the best placed of
// those is used from then on.
#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "base/cuda_kernel.h"
#include "model/gemm_cuda.h"

#define XPYD_CUBLAS(call)                                                           \
  do {                                                                              \
    const cublasStatus_t status_ = (call);                                          \
    XPYD_CHECK(status_ == CUBLAS_STATUS_SUCCESS, cublasLtGetStatusString(status_)); \
  } while (0)

namespace xpyd {
namespace {

constexpr size_t kWorkspace = size_t(32) << 20;    // NVIDIA's advice for sm_90
constexpr size_t kCheckBytes = size_t(512) << 20;  // of x or of y: bounds the rows that are checked
constexpr int kCandidates = 16;
constexpr int kReferences = 8;

cudaDataType_t cuda_type(Dtype dtype) { return dtype == Dtype::f32 ? CUDA_R_32F : CUDA_R_16BF; }

__device__ inline uint64_t mix(uint64_t x) {  // SplitMix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Uniform in [-1, 1).
__global__ void random_kernel(void* out, Dtype dtype, size_t n) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n;
       i += size_t(gridDim.x) * blockDim.x) {
    const float x = float(int32_t(uint32_t(mix(i)))) * 0x1p-31f;
    if (dtype == Dtype::f32)
      static_cast<float*>(out)[i] = x;
    else
      static_cast<bf16*>(out)[i] = to_bf16(x);
  }
}

// One block per row. A sum of mixed (place, bits): any order of additions gives the same.
__global__ void hash_kernel(const void* y, Dtype dtype, int n, int stride,
                            unsigned long long* hashes) {
  const size_t first = blockIdx.x * size_t(stride);
  unsigned long long sum = 0;
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
    const uint64_t bits = dtype == Dtype::f32 ? static_cast<const uint32_t*>(y)[first + size_t(i)]
                                              : static_cast<const uint16_t*>(y)[first + size_t(i)];
    sum += mix(uint64_t(i) << 32 | bits);
  }
  atomicAdd(&hashes[blockIdx.x], sum);
}

template <class T>
std::optional<T> config_value(const cublasLtMatmulAlgo_t& algo,
                              cublasLtMatmulAlgoConfigAttributes_t what) {
  T value{};
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algo, what, &value, sizeof value, &written) !=
      CUBLAS_STATUS_SUCCESS)
    return std::nullopt;
  return value;
}

bool splits_k(const cublasLtMatmulAlgo_t& algo) {
  const auto parts = config_value<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  const auto reduction = config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
  return !parts || (*parts != 0 && *parts != 1) || !reduction ||
         *reduction != CUBLASLT_REDUCTION_SCHEME_NONE;
}

std::string name_of(const cublasLtMatmulAlgo_t& algo) {
  auto number = [](auto value) { return value ? std::to_string(*value) : std::string("?"); };
  return "algorithm " + number(config_value<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID)) + " tile " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID)) + " stages " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID)) + " cluster " +
         number(config_value<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)) + " swizzle " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)) + " option " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION));
}

struct Algo {  // a struct with a name, for containers
  cublasLtMatmulAlgo_t value;
};

int bucket_of(int m) { return std::bit_width(unsigned(m - 1)); }  // m <= 1 << bucket

// Everything of a product but M and the pointers, and what was chosen for each power of two of M.
struct Product {
  CudaGemmArgs like;
  cublasLtMatmulDescOpaque_t operation;
  std::vector<Algo> chosen;  // [bucket]
  std::string notes;

  bool is_like(const CudaGemmArgs& a) const {
    return a.w.n == like.w.n && a.w.k == like.w.k && a.w.stride == like.w.stride &&
           a.x_stride == like.x_stride && a.y_stride == like.y_stride &&
           a.x_dtype == like.x_dtype && a.y_dtype == like.y_dtype;
  }
};

using Hashes = std::vector<uint64_t>;  // [rows]

// One way to add, and for each power of two of M an algorithm that adds so.
struct Reference {
  Hashes rows;
  Algo algo;
  std::vector<std::optional<Algo>> chosen;
  int covered = 0, places = 0;

  bool agrees(const Hashes& some) const {
    return std::equal(some.begin(), some.end(), rows.begin());
  }
  bool before(const Reference& other) const {
    return covered != other.covered ? covered > other.covered : places < other.places;
  }
};

struct Layouts {
  // Row-major is column-major transposed: y^T [n, m] = W [n, k] x^T [k, m], W read as the transpose
  // of [k, n].
  Layouts(const CudaGemmArgs& a, int m) {
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&w, cuda_type(a.x_dtype), uint64_t(a.w.k), uint64_t(a.w.n),
                                         a.w.stride));
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&x, cuda_type(a.x_dtype), uint64_t(a.w.k), uint64_t(m),
                                         a.x_stride));
    XPYD_CUBLAS(cublasLtMatrixLayoutInit(&y, cuda_type(a.y_dtype), uint64_t(a.w.n), uint64_t(m),
                                         a.y_stride));
  }
  cublasLtMatrixLayoutOpaque_t w, x, y;
};

}  // namespace

struct CudaGemm::Impl {
  explicit Impl(cuda::Stream& s) : stream(s) { XPYD_CUBLAS(cublasLtCreate(&handle)); }
  ~Impl() { cublasLtDestroy(handle); }

  cublasStatus_t multiply(Product& p, const Algo& algo, const CudaGemmArgs& a) {
    Layouts layouts(a, a.m);
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, &p.operation, &one, a.w.data, &layouts.w, a.x, &layouts.x, &zero,
                          a.y, &layouts.y, a.y, &layouts.y, &algo.value, workspace.data(),
                          workspace.size(), stream.handle());
  }

  // Eligible algorithms for M, best first by cuBLASLt's estimate.
  std::vector<Algo> candidates(Product& p, int m) {
    Layouts layouts(p.like, m);
    cublasLtMatmulPreferenceOpaque_t preference;
    XPYD_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      XPYD_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, what, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace.size()));
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE));
    for (auto what :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      prefer(what, uint32_t(16));
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, &p.operation, &layouts.w, &layouts.x, &layouts.y,
                                       &layouts.y, &preference, kCandidates, results, &found);
    std::vector<Algo> eligible;
    if (status == CUBLAS_STATUS_SUCCESS)
      for (int i = 0; i < found; ++i)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && !splits_k(results[i].algo))
          eligible.push_back({results[i].algo});
    return eligible;
  }

  Status choose(Product& p, int max_m);

  cuda::Stream& stream;
  cublasLtHandle_t handle = nullptr;
  cuda::Memory workspace;
  std::vector<Product> products;
};

Status CudaGemm::Impl::choose(Product& p, int max_m) {
  const CudaGemmArgs& like = p.like;
  const size_t x_row = size_t(like.x_stride) * dtype_bytes(like.x_dtype);
  const size_t y_row = size_t(like.y_stride) * dtype_bytes(like.y_dtype);
  const int rows = int(
      std::min<size_t>(size_t(max_m), std::max<size_t>(1, kCheckBytes / std::max(x_row, y_row))));
  Result<cuda::Memory> x = cuda::Memory::device(size_t(rows) * x_row);
  if (!x) return x.error();
  Result<cuda::Memory> y = cuda::Memory::device(size_t(rows) * y_row);
  if (!y) return y.error();
  Result<cuda::Memory> hashed = cuda::Memory::device(size_t(rows) * 8);
  if (!hashed) return hashed.error();
  cuda::Memory host = cuda::Memory::pinned(size_t(rows) * 8);
  cuda::launch(random_kernel, "random", cuda::Shape{dim3(1024), dim3(256)}, stream,
               x.value().data(), like.x_dtype, size_t(rows) * size_t(like.x_stride));

  auto run = [&](const Algo& algo, int m) -> Hashes {  // empty: cannot run
    CudaGemmArgs a = like;
    a.x = x.value().data();
    a.y = y.value().data();
    a.m = std::min(m, rows);
    cuda::fill(a.y, 0xff, size_t(a.m) * y_row, stream);
    cuda::fill(hashed.value().data(), 0, size_t(a.m) * 8, stream);
    if (multiply(p, algo, a) != CUBLAS_STATUS_SUCCESS) return {};
    cuda::launch(hash_kernel, "hash", cuda::Shape{dim3(unsigned(a.m)), dim3(256)}, stream, a.y,
                 a.y_dtype, a.w.n, a.y_stride, hashed.value().as<unsigned long long>());
    cuda::copy(host.data(), hashed.value().data(), size_t(a.m) * 8, stream);
    stream.wait();
    return Hashes(host.as<uint64_t>(), host.as<uint64_t>() + a.m);
  };

  const int n_buckets = bucket_of(max_m) + 1;
  std::vector<Reference> references;
  for (const Algo& algo : candidates(p, max_m)) {
    Hashes bits = run(algo, max_m);
    bool known = bits.empty() || int(references.size()) == kReferences;
    for (const Reference& r : references) known = known || r.rows == bits;
    if (known) continue;
    Reference& added = references.emplace_back();
    added.rows = std::move(bits);
    added.algo = algo;
    added.chosen.resize(size_t(n_buckets));
  }
  for (int bucket = 0; bucket < n_buckets; ++bucket) {
    const int most = std::min(1 << bucket, max_m), least = (1 << bucket) / 2 + 1;
    std::vector<Algo> tried = candidates(p, most);
    const int n_offered = int(tried.size());
    for (const Reference& r : references)
      tried.push_back(r.algo);  // where the heuristics offer none of its kind
    for (int i = 0; i < int(tried.size()); ++i) {
      const Hashes whole = run(tried[size_t(i)], most),
                   part = run(tried[size_t(i)], std::min(least, most));
      if (whole.empty() || part.empty()) continue;
      for (Reference& r : references) {
        if (r.chosen[size_t(bucket)] || !r.agrees(whole) || !r.agrees(part)) continue;
        r.chosen[size_t(bucket)] = tried[size_t(i)];
        ++r.covered;
        r.places += std::min(i, n_offered);
      }
    }
  }
  const Reference* best = nullptr;
  for (const Reference& r : references)
    if (!best || r.before(*best)) best = &r;
  const std::string shape = std::to_string(like.w.n) + " x " + std::to_string(like.w.k) + " " +
                            dtype_name(like.x_dtype) + " -> " + dtype_name(like.y_dtype);
  if (!best || best->covered < n_buckets)
    return Error{ErrorCode::unavailable, "cuBLASLt has no algorithms for " + shape +
                                             " whose rows keep their bits for M = 1 to " +
                                             std::to_string(max_m) +
                                             " (best: " + std::to_string(best ? best->covered : 0) +
                                             " of " + std::to_string(n_buckets) + " sizes)"};
  p.notes = shape + ":";
  std::string last;
  for (int bucket = 0; bucket < n_buckets; ++bucket) {
    p.chosen.push_back(*best->chosen[size_t(bucket)]);
    const std::string name = name_of(p.chosen.back().value);
    if (name != last) p.notes += " M <= " + std::to_string(1 << bucket) + ": " + name + ";";
    last = name;
  }
  p.notes += " rows compared up to M = " + std::to_string(rows) + "\n";
  return ok();
}

CudaGemm::CudaGemm(cuda::Stream& stream) : impl_(new Impl(stream)) {}
CudaGemm::~CudaGemm() = default;

Status CudaGemm::prepare(const CudaGemmArgs& like, int max_m) {
  XPYD_CHECK(max_m > 0 && like.w.data);
  for (const Product& p : impl_->products)
    if (p.is_like(like) && bucket_of(max_m) < int(p.chosen.size())) return ok();
  if (impl_->workspace.size() == 0) {
    Result<cuda::Memory> workspace = cuda::Memory::device(kWorkspace);
    if (!workspace) return workspace.error();
    impl_->workspace = std::move(workspace).value();
  }
  Product p{like, {}, {}, {}};
  // Pedantic: f32 stays f32, no TF32 and no emulation.
  XPYD_CUBLAS(cublasLtMatmulDescInit(
      &p.operation, like.x_dtype == Dtype::f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
      CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  XPYD_CUBLAS(cublasLtMatmulDescSetAttribute(&p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                             sizeof transposed));
  if (Status status = impl_->choose(p, max_m); !status) return status;
  impl_->products.push_back(std::move(p));
  return ok();
}

void CudaGemm::run(const CudaGemmArgs& a) {
  if (a.m == 0) return;
  for (Product& p : impl_->products) {
    if (!p.is_like(a) || bucket_of(a.m) >= int(p.chosen.size())) continue;
    XPYD_CUBLAS(impl_->multiply(p, p.chosen[size_t(bucket_of(a.m))], a));
    return;
  }
  XPYD_CHECK(false, "no prepare() of " + std::to_string(a.w.n) + " x " + std::to_string(a.w.k) +
                        ", m = " + std::to_string(a.m));
}

size_t CudaGemm::bytes() const { return impl_->workspace.size(); }

std::string CudaGemm::describe() const {
  std::string lines;
  for (const Product& p : impl_->products) lines += p.notes;
  return lines;
}

}  // namespace xpyd
