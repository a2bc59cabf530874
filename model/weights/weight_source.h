// Sources of a matrix's rows while weights load: a dense tensor, or quantised rows in one of the formats that folders
// use. A source must not outlive its Checkpoint and ReadErrors. Thread safety: the readers may run on any thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/status.h"
#include "model/config.h"
#include "model/gemm/gemm.h"
#include "model/weights/safetensors.h"

namespace xpyd::model {

// Keeps the first failure of readers on several threads.
class ReadErrors {
 public:
  void keep(const Status& status) {
    std::lock_guard lock(mutex_);
    if (first_) first_ = status;
  }
  Status first() const { return first_; }

 private:
  std::mutex mutex_;
  Status first_ = ok();
};

// Quantised rows of one matrix.
struct CodeSource {
  Dtype dtype;
  QuantGroups groups;
  QuantReader read;
  // open() precedes all reads and loads what cannot be read row by row; close() frees it.
  std::function<Status()> open = [] { return ok(); };
  std::function<void()> close = [] {};
};

// Rows of one matrix, in all forms that its source offers.
struct WeightSource {
  RowReader rows;                     // f32; quantised rows are widened
  Dtype dtype = Dtype::f32;           // of `elements`
  ElementReader elements = {};        // rows of a dense matrix as stored in the file; may be empty
  std::shared_ptr<CodeSource> codes;  // null: dense
};

// Opens the matrix NAME.weight, [rows, columns], in the quantised format that `form` names. A matrix that the folder
// left dense is read as a dense one. Adds the tensors that it takes to `used`. Errors name the tensor.
Result<WeightSource> matrix_source(const Checkpoint& checkpoint, const Quantization& form, const std::string& name,
                                   int rows, int columns, ReadErrors& errors, std::set<std::string, std::less<>>& used);
// Opens any f32, f16 or bf16 tensor as rows of `columns`.
Result<WeightSource> dense_source(const Checkpoint& checkpoint, const std::string& tensor,
                                  const std::vector<int64_t>& shape, int columns, ReadErrors& errors,
                                  std::set<std::string, std::less<>>& used);

}  // namespace xpyd::model
