// Where a matrix's rows come from while weights are loaded: a dense tensor, or codes in one of the forms that folders
// have them in.
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

// The first failure of readers that run on several threads.
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

struct CodeSource {
  Dtype dtype;
  QuantGroups groups;
  QuantReader read;
  // Around all reads of the matrix: takes what cannot be read row by row into memory, and lets it go.
  std::function<Status()> open = [] { return ok(); };
  std::function<void()> close = [] {};
};

struct WeightSource {
  RowReader rows;                     // of codes: the f32 that they stand for
  Dtype dtype = Dtype::f32;           // of `elements`
  ElementReader elements = {};        // rows of a dense tensor as they are in the file; or none
  std::shared_ptr<CodeSource> codes;  // or null
};

// Of the matrix NAME.weight, [rows, columns], as `form` says that quantised matrices are kept; those that the folder
// has left dense are read as dense ones. `used`: the tensors that it takes. Errors name the tensor.
Result<WeightSource> matrix_source(const Checkpoint& checkpoint, const Quantization& form, const std::string& name,
                                   int rows, int columns, ReadErrors& errors, std::set<std::string, std::less<>>& used);
// Of any tensor of f32, f16 or bf16, as rows of `columns`.
Result<WeightSource> dense_source(const Checkpoint& checkpoint, const std::string& tensor,
                                  const std::vector<int64_t>& shape, int columns, ReadErrors& errors,
                                  std::set<std::string, std::less<>>& used);

}  // namespace xpyd::model
