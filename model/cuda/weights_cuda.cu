// Each matrix and vector is an allocation of its own. Rows go up through two pieces of pinned memory: the host fills
// one while the other is copied.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "model/cuda/weights_cuda.h"

namespace xpyd::model {
namespace {

constexpr size_t kPieceBytes = size_t(16) << 20;

size_t padded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

class Uploader {
 public:
  Uploader(std::vector<cuda::Memory>& memories, cuda::Stream& stream) : memories_(memories), stream_(stream) {
    for (cuda::Memory& piece : pieces_) piece = cuda::Memory::pinned(kPieceBytes);
  }
  bool full() const { return full_; }  // the card has no more room, and what was uploaded is not whole

  // fill(begin, end, out) writes rows [begin, end) of `row_bytes` each; several threads call it for parts.
  template <class Fill>
  std::byte* rows(int n_rows, size_t row_bytes, Fill fill) {
    XPYD_CHECK(row_bytes <= kPieceBytes, std::to_string(row_bytes));
    Result<cuda::Memory> memory = cuda::Memory::device(size_t(n_rows) * row_bytes);
    full_ = full_ || !memory;
    if (full_) return nullptr;
    std::byte* const to = memories_.emplace_back(std::move(memory).value()).data();
    const int most = int(std::min<size_t>(kPieceBytes / row_bytes, size_t(n_rows)));
    for (int begin = 0; begin < n_rows; begin += most) {
      const int end = std::min(n_rows, begin + most);
      cuda::Memory& piece = pieces_[next_];
      copied_[next_].wait();
      team_.run([&](int rank) {
        const Range mine = share(end - begin, rank, team_.size());
        if (mine.begin < mine.end)
          fill(begin + mine.begin, begin + mine.end, piece.data() + size_t(mine.begin) * row_bytes);
      });
      cuda::copy(to + size_t(begin) * row_bytes, piece.data(), size_t(end - begin) * row_bytes, stream_);
      copied_[next_].record(stream_);
      next_ ^= 1;
    }
    return to;
  }

  template <class T>
  const T* vector(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    return reinterpret_cast<const T*>(rows(int(values.size()), sizeof(T), [&](int begin, int end, std::byte* out) {
      std::memcpy(out, values.data() + begin, size_t(end - begin) * sizeof(T));
    }));
  }

  // row_of(begin, end, out, row_bytes) writes rows without their padding.
  template <class RowOf>
  CudaMatrix matrix(int n, int k, Dtype dtype, RowOf row_of) {
    const size_t element = dtype_bytes(dtype), row_bytes = padded(size_t(k) * element, 16);
    const std::byte* data = rows(n, row_bytes, [&](int begin, int end, std::byte* out) {
      if (row_bytes != size_t(k) * element) std::memset(out, 0, size_t(end - begin) * row_bytes);
      row_of(begin, end, out, row_bytes);
    });
    return {data, n, k, int(row_bytes / element)};
  }
  CudaMatrix matrix(const PackedMatrix& w) { return stacked({&w}); }
  // Matrices of one shape, one below the other.
  CudaMatrix stacked(const std::vector<const PackedMatrix*>& parts) {
    const PackedMatrix& w = *parts[0];
    return matrix(w.n * int(parts.size()), w.k, w.dtype, [&](int begin, int end, std::byte* out, size_t row_bytes) {
      for (int row = begin, next = 0; row < end; row = next) {
        const int part = row / w.n, first = part * w.n;
        next = std::min(end, first + w.n);
        unpack_rows(*parts[size_t(part)], row - first, next - first, out + size_t(row - begin) * row_bytes, row_bytes);
      }
    });
  }

 private:
  std::vector<cuda::Memory>& memories_;
  cuda::Stream& stream_;
  ThreadTeam team_{std::max(1, int(std::thread::hardware_concurrency()))};
  bool full_ = false;
  cuda::Memory pieces_[2];
  cuda::Event copied_[2];
  int next_ = 0;
};

// nvcc does not know the length of this constexpr array of a template; the interpreter's compiler does.
constexpr size_t kMatrices = 4, kVectors = 8;
#ifndef __CUDACC__
static_assert(std::size(LayerWeights::kMatrices) == kMatrices && std::size(LayerWeights::kVectors) == kVectors);
#endif

void place(const Weights& host, Uploader& to, CudaWeights& w) {
  const ModelConfig& c = host.config;
  w.embedding = to.matrix(c.vocab, c.hidden, host.dtype, [&](int begin, int end, std::byte* out, size_t row_bytes) {
    const size_t bytes = size_t(c.hidden) * dtype_bytes(host.dtype);
    for (int row = begin; row < end; ++row, out += row_bytes)
      std::memcpy(out, host.embedding.data() + size_t(row) * bytes, bytes);
  });
  w.lm_head = c.tied_embeddings ? w.embedding : to.matrix(host.lm_head);
  for (const LayerWeights& layer : host.layers) {
    CudaLayerWeights l;
    for (size_t i = 0; i < kMatrices; ++i) {
      const auto from = layer.kMatrices[i];  // g++ 12's -fsanitize=bounds misreads an index inside .*
      const auto place = l.kMatrices[i];
      if ((layer.*from).n > 0) l.*place = to.matrix(layer.*from);
    }
    if (!layer.experts.empty()) {
      const auto stacked = [&](PackedMatrix ExpertWeights::*part) {
        std::vector<const PackedMatrix*> all;
        for (const ExpertWeights& expert : layer.experts) all.push_back(&(expert.*part));
        return to.stacked(all);
      };
      l.router = to.matrix(layer.router);
      l.gate_up = stacked(&ExpertWeights::gate_up);
      l.down = stacked(&ExpertWeights::down);
    }
    for (size_t i = 0; i < kVectors; ++i) {
      const auto from = layer.kVectors[i];
      const auto place = l.kVectors[i];
      l.*place = to.vector(layer.*from);
    }
    w.layers.push_back(l);
  }
  w.final_norm = to.vector(host.final_norm);
  const size_t half = host.rope_freqs.size();
  w.rope = reinterpret_cast<const RopeAngle*>(
      to.rows(c.max_position, half * sizeof(RopeAngle), [&](int begin, int end, std::byte* out) {
        auto* next = reinterpret_cast<RopeAngle*>(out);
        for (int position = begin; position < end; ++position)
          for (size_t j = 0; j < half; ++j) {
            const double angle = position * host.rope_freqs[j];
            *next++ = {float(std::cos(angle)), float(std::sin(angle))};
          }
      }));
}

}  // namespace

size_t CudaWeights::bytes() const {
  size_t total = 0;
  for (const cuda::Memory& memory : memories) total += memory.size();
  return total;
}

Result<std::shared_ptr<const CudaWeights>> upload_weights(const Weights& host, cuda::Stream& stream) {
  auto weights = std::make_shared<CudaWeights>();
  weights->config = host.config;
  weights->dtype = host.dtype;
  const Result<cuda::Card> card = cuda::open();
  if (!card) return card.error();
  Uploader upload(weights->memories, stream);
  place(host, upload, *weights);
  if (upload.full())
    return Error{ErrorCode::unavailable,
                 "model " + host.config.name + ": the card has " + std::to_string(card.value().free_bytes / 1000000) +
                     " MB free, but the weights need " + std::to_string(host.bytes() / 1000000) + " MB in " +
                     dtype_name(host.dtype)};
  stream.wait();
  return std::shared_ptr<const CudaWeights>(std::move(weights));
}

}  // namespace xpyd::model
