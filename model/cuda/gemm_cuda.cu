// The product over cuBLASLt, with one addition order for every M.
//
// Trials run the heuristics' candidates on the real weights and random rows, for powers of two of M, and hash the bits
// of every output row. Candidates with equal rows have the same order. Small M slides over kKnownRows rows, because
// bf16 hides most differences between orders. If an algorithm can also write f32, the f32 bits are compared, too.
//
// The choice is among the orders that have a candidate for every M. It takes the order that the heuristics rank best
// over all sizes, small M as much as large (with the GEMV kernel first for small M). Within that order, each size gets
// the fastest candidate. Timing decides only between equal bits, so the order depends on the card and the library only.
// A stream with a part of the SMs takes the same order, with the algorithms that are fast there.
#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/cuda/cuda.h"
#include "base/cuda/cuda_kernel.h"
#include "base/log.h"
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
constexpr int kOrders = 8;        // most orders that are tracked
constexpr int kTimed = 4;         // candidates per order and size
constexpr int kKnownRows = 256;   // least number of compared rows for each M
constexpr int kExactRows = 1024;  // most rows compared in f32
// Under another order, bf16 keeps all but about 5 of 10^4 sums at K of 2,048, and all but 1 of 10^4 at K of 128. This
// many outputs show a difference for certain.
constexpr size_t kTellingSums = size_t(1) << 18;
// Orders are sought among candidates for these sizes and ranked over all sizes up to the last, whatever max_m is. So
// instances with larger or smaller steps add alike.
constexpr int kSeeds[] = {1, 16, 128, 1024}, kLastSeed = kSeeds[std::size(kSeeds) - 1];

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

struct Algo {
  cublasLtMatmulAlgo_t value;
  bool own = false;  // the GEMV kernel, not the library's
};

std::string name_of(const Algo& chosen) {
  if (chosen.own) return "gemv";
  const cublasLtMatmulAlgo_t& algo = chosen.value;
  auto number = [](auto value) { return value ? std::to_string(*value) : std::string("?"); };
  return "algorithm " + number(config_value<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID)) + " tile " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID)) + " stages " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID)) + " cluster " +
         number(config_value<uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)) + " swizzle " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING)) + " option " +
         number(config_value<uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION));
}

int bucket_of(int m) { return std::bit_width(unsigned(m - 1)); }  // m <= 1 << bucket

// The sizes of M that are tried, one per bucket.
struct Sizes {
  int largest;
  int n() const { return bucket_of(largest) + 1; }
  int most_of(int bucket) const { return std::min(1 << bucket, largest); }
};

// A product without M and pointers, and the algorithms chosen for each power of two of M.
struct Product {
  CudaGemmArgs like;
  int n_sms;  // SMs that the stream may use; 0: all
  cublasLtMatmulDescOpaque_t operation;
  std::vector<std::vector<Algo>> chosen;  // [bucket], fastest first
  std::string notes;
  bool went_elsewhere = false;  // the warning has been logged

  std::string shape() const {
    return std::to_string(like.w.n) + " x " + std::to_string(like.w.k) + " " + dtype_name(like.x_dtype) + " -> " +
           dtype_name(like.y_dtype);
  }
  bool is_like(const CudaGemmArgs& a) const {
    return a.w.n == like.w.n && a.w.k == like.w.k && a.w.stride == like.w.stride && a.x_stride == like.x_stride &&
           a.y_stride == like.y_stride && a.x_dtype == like.x_dtype && a.y_dtype == like.y_dtype;
  }
};

// Rows of a product, as hashes of their bits.
struct Hashes {
  std::vector<uint64_t> rows, exact;  // before rounding to bf16; empty: unknown

  bool operator==(const Hashes&) const = default;
  // True if both agree on the rows that both have.
  bool agrees(const Hashes& some) const {
    auto same = [](const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
      return std::equal(a.begin(), a.begin() + ptrdiff_t(std::min(a.size(), b.size())), b.begin());
    };
    return !some.rows.empty() && same(rows, some.rows) && same(exact, some.exact);
  }
};

// One addition order, and the algorithms that have it for each power of two of M.
struct Order {
  Hashes bits;
  Algo found;                          // the algorithm that showed this order
  std::vector<std::vector<Algo>> fit;  // [bucket]: at most kTimed for the whole card and for the part
  int covered = 0, places = 0;         // buckets with an algorithm; sum of heuristic ranks up to kLastSeed

  bool before(const Order& other) const {
    return covered != other.covered ? covered > other.covered : places < other.places;
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

// The choices of this process. The order depends on the card and the library only, so other instances reuse them. An
// algorithm is not bound to a handle.
class Choices {
 public:
  std::optional<Product> find(const CudaGemmArgs& like, int n_sms, int max_m) {
    std::lock_guard lock(mutex_);
    for (const Product& made : made_)
      if (made.is_like(like) && made.n_sms == n_sms && bucket_of(max_m) < int(made.chosen.size())) return made;
    return std::nullopt;
  }
  void add(const Product& product) {
    std::lock_guard lock(mutex_);
    made_.push_back(product);
  }

 private:
  std::mutex mutex_;
  std::vector<Product> made_;
};
Choices& choices() {
  static Choices all;
  return all;
}

// Device memory for one product's trials.
class Trial {
 public:
  using Multiply = std::function<cublasStatus_t(const Algo&, const CudaGemmArgs&)>;
  Trial(const CudaGemmArgs& like, cuda::Stream& stream, Multiply multiply)
      : args_(like),
        stream_(stream),
        multiply_(std::move(multiply)),
        x_row_(size_t(like.x_stride) * dtype_bytes(like.x_dtype)),
        y_row_(size_t(like.y_stride) * dtype_bytes(like.y_dtype)),
        most_(int(std::clamp<size_t>(kCheckBytes / std::max(x_row_, y_row_), 1, 1 << 24))) {}

  Status allocate(int max_m) {
    rows_ = std::min(max_m, most_);
    exact_rows_ = args_.y_dtype == Dtype::f32 ? 0 : std::min(rows_, kExactRows);
    // Slices of y begin at 16 bytes, as every y does.
    const size_t y_bytes = std::max(size_t(rows_) * y_row_, size_t(exact_rows_) * exact_row_bytes());
    for (auto [memory, bytes] : {std::pair(&x_, size_t(rows_) * x_row_),
                                 {&y_, y_bytes + kKnownRows * size_t(16)},
                                 {&hashes_, size_t(rows_) * 8}}) {
      Result<cuda::Memory> made = cuda::Memory::device(bytes);
      if (!made) return made.error();
      *memory = std::move(made).value();
    }
    host_ = cuda::Memory::pinned(size_t(rows_) * 8);
    cuda::launch(random_kernel, "random", cuda::Shape{dim3(1024), dim3(256)}, stream_, x_.data(), args_.x_dtype,
                 size_t(rows_) * size_t(args_.x_stride));
    args_.x = x_.data();
    args_.y = y_.data();
    return ok();
  }
  int rows() const { return rows_; }

  // Returns the bits of the first rows, computed as consecutive products of m rows; empty if the algorithm cannot run.
  // known: at least kKnownRows rows, else only the first product.
  Hashes run(const Algo& algo, int m, bool known = true) {
    const int whole = std::min(m, rows_), least = known ? std::min(kKnownRows, rows_) : 1,
              n = (least + whole - 1) / whole * whole;
    Hashes bits{run_slices(algo, whole, n <= rows_ ? n : n - whole, args_.y_dtype), {}};
    if (!bits.rows.empty() && int(bits.rows.size()) <= exact_rows_)
      bits.exact = run_slices(algo, whole, int(bits.rows.size()), Dtype::f32);
    return bits;
  }
  double seconds(const Algo& algo, int m, cuda::Memory& workspace) {
    args_.x = x_.data(), args_.y = y_.data(), args_.m = std::min(m, rows_);
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      // Evicts most of the weights from L2, as happens between two steps.
      cuda::fill(workspace.data(), 0, workspace.size(), stream_);
      begin_.record(stream_);
      if (multiply_(algo, args_) != CUBLAS_STATUS_SUCCESS) return 1e9;
      end_.record(stream_);
      end_.wait();
      best = std::min(best, cuda::Event::seconds(begin_, end_));
    }
    return best;
  }

 private:
  size_t exact_row_bytes() const { return size_t(args_.y_stride) * sizeof(float); }
  std::vector<uint64_t> run_slices(const Algo& algo, int m, int n, Dtype y_dtype) {
    CudaGemmArgs slice = args_;
    slice.m = m, slice.y_dtype = y_dtype;
    const size_t y_bytes = (size_t(m) * size_t(args_.y_stride) * dtype_bytes(y_dtype) + 15) / 16 * 16;
    cuda::fill(y_.data(), 0xff, size_t(n / m) * y_bytes, stream_);
    cuda::fill(hashes_.data(), 0, size_t(n) * 8, stream_);
    for (int first = 0; first < n; first += m) {
      slice.x = x_.data() + size_t(first) * x_row_;
      slice.y = y_.data() + size_t(first / m) * y_bytes;
      if (multiply_(algo, slice) != CUBLAS_STATUS_SUCCESS) return {};
      cuda::launch(hash_kernel, "hash", cuda::Shape{dim3(unsigned(m)), dim3(256)}, stream_, slice.y, y_dtype, slice.w.n,
                   slice.y_stride, hashes_.as<unsigned long long>() + first);
    }
    cuda::copy(host_.data(), hashes_.data(), size_t(n) * 8, stream_);
    stream_.wait();
    return {host_.as<uint64_t>(), host_.as<uint64_t>() + n};
  }

  CudaGemmArgs args_;
  cuda::Stream& stream_;
  Multiply multiply_;
  size_t x_row_, y_row_;
  int most_, rows_ = 0, exact_rows_ = 0;
  cuda::Memory x_, y_, hashes_, host_;
  cuda::Event begin_{true}, end_{true};
};

}  // namespace

struct CudaGemm::Impl {
  Impl(cuda::Stream& s, bool one, bool start_early) : stream(s), one_order(one), early(start_early) {}
  ~Impl() {
    if (handle) cublasLtDestroy(handle);
  }
  Status open();  // before any other call; may be repeated

  cublasStatus_t multiply(Product& p, const Algo& algo, const CudaGemmArgs& a) {
    if (algo.own) {
      if (!cuda_gemv_takes(a)) return CUBLAS_STATUS_NOT_SUPPORTED;
      cuda_gemv(a, {stream, early});
      return CUBLAS_STATUS_SUCCESS;
    }
    Layouts layouts(a, a.m);
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, &p.operation, &one, a.w.data, &layouts.w, a.x, &layouts.x, &zero, a.y, &layouts.y,
                          a.y, &layouts.y, &algo.value, workspace.data(), workspace.size(), stream.handle());
  }

  // Eligible algorithms for M, best first by cuBLASLt's estimate for that many SMs (0: the card). It asks for
  // algorithms that do not split K; if there are none, it asks for all, and splits_k() filters. For few rows the GEMV
  // kernel comes first.
  std::vector<Algo> candidates(const Product& p, int m, int sms) {
    std::vector<Algo> eligible = offered(p, m, sms, one_order);
    if (eligible.empty() && one_order) eligible = offered(p, m, sms, false);
    CudaGemmArgs few = p.like;
    few.m = m;
    if (sms == 0 && cuda_gemv_takes(few)) eligible.insert(eligible.begin(), {{}, true});
    return eligible;
  }
  static cublasLtMatmulDescOpaque_t operation(Dtype x_dtype, int sms) {
    cublasLtMatmulDescOpaque_t made;
    // Pedantic: f32 stays f32, without TF32 or emulation.
    XPYD_CUBLAS(cublasLtMatmulDescInit(&made, x_dtype == Dtype::f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
                                       CUDA_R_32F));
    auto set = [&](cublasLtMatmulDescAttributes_t what, auto value) {
      XPYD_CUBLAS(cublasLtMatmulDescSetAttribute(&made, what, &value, sizeof value));
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (sms > 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t(sms));
    return made;
  }
  std::vector<Algo> offered(const Product& p, int m, int sms, bool unsplit) {
    Layouts layouts(p.like, m);
    cublasLtMatmulDescOpaque_t what_for = operation(p.like.x_dtype, sms);
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
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &what_for, &layouts.w, &layouts.x, &layouts.y,
                                                                 &layouts.y, &preference, kCandidates, results, &found);
    std::vector<Algo> eligible;
    if (status == CUBLAS_STATUS_SUCCESS)
      for (int i = 0; i < found; ++i)
        if (results[i].state == CUBLAS_STATUS_SUCCESS && !(one_order && splits_k(results[i].algo)))
          eligible.push_back({results[i].algo});
    return eligible;
  }

  Status choose(Product& p, int max_m);
  std::vector<Order> find_orders(const Product& p, Trial& trial, Sizes sizes);
  void fit_size(const Product& p, Trial& trial, Sizes sizes, int bucket, std::vector<Order>& orders);
  Status take_fastest(Product& p, Trial& trial, Sizes sizes, const std::vector<std::vector<Algo>>& fit);
  bool go_elsewhere(Product& p, const CudaGemmArgs& a);

  cuda::Stream& stream;
  const bool one_order, early;
  cublasLtHandle_t handle = nullptr;
  int n_sms = 0;  // SMs that the stream may use; 0: all
  cuda::Memory workspace;
  std::vector<Product> products;
};

Status CudaGemm::Impl::open() {
  if (!handle) {
    const cublasStatus_t status = cublasLtCreate(&handle);
    if (status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_NOT_INITIALIZED) {
      handle = nullptr;
      return Error{ErrorCode::unavailable,
                   std::string("cuBLASLt cannot be created, most likely for lack of device memory: ") +
                       cublasLtGetStatusString(status)};
    }
    XPYD_CUBLAS(status);
    n_sms = cuda::Split::n_sms_of(stream);
  }
  if (workspace.size() == 0) {
    Result<cuda::Memory> memory = cuda::Memory::device(kWorkspace);
    if (!memory) return memory.error();
    workspace = std::move(memory).value();
  }
  return ok();
}

Status CudaGemm::Impl::choose(Product& p, int max_m) {
  const Sizes sizes{one_order ? std::max(max_m, kLastSeed) : max_m};
  Trial trial(p.like, stream, [&](const Algo& algo, const CudaGemmArgs& a) { return multiply(p, algo, a); });
  if (Status status = trial.allocate(sizes.largest); !status) return status;
  if (!one_order) {
    p.notes = p.shape() + ", any order:";
    std::vector<std::vector<Algo>> fit;
    for (int bucket = 0; bucket < sizes.n(); ++bucket) fit.push_back(candidates(p, sizes.most_of(bucket), p.n_sms));
    return take_fastest(p, trial, sizes, fit);
  }
  std::vector<Order> orders = find_orders(p, trial, sizes);
  for (int bucket = 0; bucket < sizes.n(); ++bucket) fit_size(p, trial, sizes, bucket, orders);
  const Order* best = nullptr;
  for (const Order& o : orders)
    if (!best || o.before(*best)) best = &o;
  if (!best || best->covered < sizes.n())
    return Error{ErrorCode::unavailable,
                 "cuBLASLt has no algorithms for " + p.shape() + " that keep the bits of rows for M = 1 to " +
                     std::to_string(sizes.largest) + " (best: " + std::to_string(best ? best->covered : 0) + " of " +
                     std::to_string(sizes.n()) + " sizes)"};
  p.notes = p.shape() + ", one of " + std::to_string(orders.size()) + " orders:";
  return take_fastest(p, trial, sizes, best->fit);
}

// Finds the orders of the seeds' candidates, still without algorithms for any size.
std::vector<Order> CudaGemm::Impl::find_orders(const Product& p, Trial& trial, Sizes sizes) {
  std::vector<Order> orders;
  for (int m : kSeeds)
    for (const Algo& algo : candidates(p, m, 0)) {
      if (int(orders.size()) == kOrders) break;
      Hashes bits = trial.run(algo, kLastSeed);
      if (bits.rows.empty() ||
          std::any_of(orders.begin(), orders.end(), [&](const Order& o) { return o.bits == bits; }))
        continue;
      orders.push_back({std::move(bits), algo, std::vector<std::vector<Algo>>(size_t(sizes.n()))});
    }
  return orders;
}

// Assigns the algorithms of one size to the orders that they have.
void CudaGemm::Impl::fit_size(const Product& p, Trial& trial, Sizes sizes, int bucket, std::vector<Order>& orders) {
  const int most = sizes.most_of(bucket), least = std::min((1 << bucket) / 2 + 1, most);
  std::vector<Algo> tried = candidates(p, most, 0);
  const int n_offered = int(tried.size());
  // for sizes whose heuristics offer no algorithm of an order
  for (const Order& o : orders) tried.push_back(o.found);
  const int n_of_card = int(tried.size());
  if (p.n_sms > 0)
    for (const Algo& algo : candidates(p, most, p.n_sms)) tried.push_back(algo);
  // Rows after the last seed's have no record; the order's first algorithm defines them.
  for (Order& o : orders)
    if (most > int(o.bits.rows.size()) && int(o.bits.rows.size()) < trial.rows()) {
      Hashes more = trial.run(o.found, most);
      if (o.bits.agrees(more)) o.bits.rows = std::move(more.rows);
    }
  for (int i = 0; i < int(tried.size()); ++i) {
    auto full = [&](const Order& o) {  // also true for an order that misses a smaller size and cannot win
      return int(o.fit[size_t(bucket)].size()) >= (i < n_of_card ? 1 : 2) * kTimed || o.covered < bucket;
    };
    if (std::all_of(orders.begin(), orders.end(), full)) continue;
    auto fits = [&](const Hashes& some) {
      return [&](const Order& o) { return !full(o) && some.rows.size() <= o.bits.rows.size() && o.bits.agrees(some); };
    };
    // The first rows reveal most wrong candidates. The GEMV kernel is unrelated to cuBLASLt's: without f32 bits to
    // compare, only a large number of sums can tell.
    const Algo& algo = tried[size_t(i)];
    const bool few_sums = size_t(kKnownRows) * size_t(p.like.w.n) < kTellingSums;
    if (algo.own && p.like.y_dtype != Dtype::f32 && few_sums &&
        std::any_of(orders.begin(), orders.end(), [](const Order& o) { return o.bits.exact.empty(); }))
      continue;
    if (std::none_of(orders.begin(), orders.end(), fits(trial.run(algo, most, false)))) continue;
    const Hashes whole = trial.run(algo, most), part = trial.run(algo, least);
    for (Order& o : orders) {
      if (!fits(whole)(o) || !fits(part)(o)) continue;
      if (o.fit[size_t(bucket)].empty()) {
        ++o.covered;
        if (bucket <= bucket_of(kLastSeed)) o.places += std::min(i, n_offered);
      }
      o.fit[size_t(bucket)].push_back(algo);
    }
  }
}

// Stores each size's algorithms in the product, fastest first.
Status CudaGemm::Impl::take_fastest(Product& p, Trial& trial, Sizes sizes, const std::vector<std::vector<Algo>>& fit) {
  std::string last;
  for (int bucket = 0; bucket < sizes.n(); ++bucket) {
    std::vector<std::pair<double, const Algo*>> timed;
    for (const Algo& algo : fit[size_t(bucket)])
      if (const double seconds = trial.seconds(algo, sizes.most_of(bucket), workspace); seconds < 1e9)
        timed.emplace_back(seconds, &algo);
    if (timed.empty()) return Error{ErrorCode::unavailable, "cuBLASLt has no algorithm for " + p.shape()};
    std::stable_sort(timed.begin(), timed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Algo>& chosen = p.chosen.emplace_back();
    for (const auto& [seconds, algo] : timed) chosen.push_back(*algo);
    const std::string name = name_of(chosen[0]);
    if (name != last) p.notes += " M <= " + std::to_string(1 << bucket) + ": " + name + ";";
    last = name;
  }
  p.notes += one_order ? " rows compared up to M = " + std::to_string(trial.rows()) + "\n" : "\n";
  return ok();
}

// Runs a product if none of the algorithms chosen for this M starts: first those of other sizes, then any that the
// library offers, then the GEMV kernel for a few rows at a time. False: nothing starts.
bool CudaGemm::Impl::go_elsewhere(Product& p, const CudaGemmArgs& a) {
  std::vector<Algo> others;
  for (const std::vector<Algo>& of_size : p.chosen) others.insert(others.end(), of_size.begin(), of_size.end());
  const size_t n_of_order = others.size();
  for (int sms : {p.n_sms, 0})
    for (const Algo& algo : candidates(p, a.m, sms)) others.push_back(algo);
  others.push_back({{}, true});
  for (size_t i = 0; i < others.size(); ++i) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const int rows = others[i].own ? kGemvRows : a.m;
    for (int first = 0; first < a.m && status == CUBLAS_STATUS_SUCCESS; first += rows) {
      CudaGemmArgs part = a;
      part.m = std::min(rows, a.m - first);
      part.x = static_cast<const std::byte*>(a.x) + size_t(first) * size_t(a.x_stride) * dtype_bytes(a.x_dtype);
      part.y = static_cast<std::byte*>(a.y) + size_t(first) * size_t(a.y_stride) * dtype_bytes(a.y_dtype);
      status = multiply(p, others[i], part);
    }
    if (status != CUBLAS_STATUS_SUCCESS) continue;
    if (!std::exchange(p.went_elsewhere, true))
      log_line(LogLevel::warning, "xpyd: gemm %d x %d, M = %d: none of the chosen algorithms can run; it uses %s%s",
               a.w.n, a.w.k, a.m, name_of(others[i]).c_str(),
               i < n_of_order ? "" : ", which may change the order of additions");
    if (!others[i].own || a.m <= kGemvRows) {  // the next product of this size tries it first
      std::vector<Algo>& algos = p.chosen[size_t(bucket_of(a.m))];
      algos.insert(algos.begin(), others[i]);
    }
    return true;
  }
  return false;
}

CudaGemm::CudaGemm(const cuda::On& on, bool one_order) : impl_(new Impl(on.stream, one_order, on.early)) {}
CudaGemm::~CudaGemm() = default;

Status CudaGemm::prepare(const CudaGemmArgs& like, int max_m) {
  XPYD_CHECK(max_m > 0 && like.w.data);
  for (const Product& p : impl_->products)
    if (p.is_like(like) && bucket_of(max_m) < int(p.chosen.size())) return ok();
  if (Status status = impl_->open(); !status) return status;
  if (impl_->one_order)
    if (auto made = choices().find(like, impl_->n_sms, max_m)) {
      impl_->products.push_back(std::move(*made));
      return ok();
    }
  Product p{like, impl_->n_sms, Impl::operation(like.x_dtype, impl_->n_sms), {}, {}};
  if (Status status = impl_->choose(p, max_m); !status) return status;
  if (impl_->one_order) choices().add(p);
  impl_->products.push_back(std::move(p));
  return ok();
}

void CudaGemm::run(const CudaGemmArgs& a) {
  if (a.m == 0) return;
  for (Product& p : impl_->products) {
    if (!p.is_like(a) || bucket_of(a.m) >= int(p.chosen.size())) continue;
    // An algorithm may fail to start on a part of the card, for instance without room for a cluster. The next of the
    // same order then runs.
    std::vector<Algo>& algos = p.chosen[size_t(bucket_of(a.m))];
    for (auto algo = algos.begin(); algo != algos.end(); ++algo)
      if (impl_->multiply(p, *algo, a) == CUBLAS_STATUS_SUCCESS) {
        std::rotate(algos.begin(), algo, algo + 1);
        return;
      }
    if (!impl_->go_elsewhere(p, a)) XPYD_CUBLAS(impl_->multiply(p, algos[0], a));
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

}  // namespace xpyd::model
