// A reader of safetensors checkpoints: one file, or shards named by model.safetensors.index.json.
//
// A model folder is not trusted for memory safety. open() checks everything before any weight is allocated. Data on
// disk are read with pread and never mapped, because a file that shrinks under a mapping kills the process. Every error
// names the file, and the tensor if there is one.
//
// Thread safety: const functions may run on any number of threads.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/os.h"
#include "base/status.h"

namespace xpyd::model {

struct TensorEntry {
  std::string dtype;           // name in the file: "F32", "BF16", "I64", ...
  std::vector<int64_t> shape;  // row-major; empty for a scalar
  uint64_t begin = 0;          // byte offsets in the file's data part
  uint64_t end = 0;
};

using TensorMap = std::map<std::string, TensorEntry, std::less<>>;

// Parses the JSON header of a file whose data part has `data_bytes`. Each tensor lies inside of it and has as many bytes
// as its shape and dtype say.
Result<TensorMap> parse_safetensors_header(std::string_view json_text, uint64_t data_bytes,
                                           const std::string& file_name);

// Parses the weight_map of an index file: tensor name -> shard name. A shard name must be a bare file name.
Result<std::map<std::string, std::string, std::less<>>> parse_safetensors_index(std::string_view json_text,
                                                                                const std::string& file_name);

class SafetensorsFile {
 public:
  // Opens a file and checks its header; data are read later.
  static Result<std::unique_ptr<SafetensorsFile>> open(const std::string& path);

  const std::string& path() const { return path_; }
  const TensorMap& tensors() const { return tensors_; }

  // Reads elements [first, first + n) of an F32, F16 or BF16 tensor, exactly, as f32.
  Status read(std::string_view name, const TensorEntry& tensor, int64_t first, int n, float* out) const;
  // Reads bytes [at, at + n) of any tensor as they are in the file.
  Status read_bytes(std::string_view name, const TensorEntry& tensor, uint64_t at, size_t n, void* out) const {
    XPYD_CHECK(at + n <= tensor.end - tensor.begin);
    return read_exactly(out, n, data_start_ + tensor.begin + at, name);
  }

 private:
  SafetensorsFile() = default;
  std::string path_;
  // Reads bytes [at, at + n) of the whole file. `tensor`: for the message; empty for the header.
  Status read_exactly(void* out, size_t n, uint64_t at, std::string_view tensor = {}) const;
  Fd fd_;                      // -1: embedded
  std::string_view embedded_;  // the whole file
  uint64_t file_bytes_ = 0, data_start_ = 0;
  TensorMap tensors_;
};

// A tensor of the checkpoint whose dtype and shape have been checked. It points into the Checkpoint.
struct TensorHandle {
  const SafetensorsFile* file = nullptr;
  std::string_view name;
  const TensorEntry* entry = nullptr;
  Status read(int64_t first, int n, float* out) const { return file->read(name, *entry, first, n, out); }
  Status read_bytes(uint64_t at, size_t n, void* out) const { return file->read_bytes(name, *entry, at, n, out); }
};

// All tensors of a model folder.
class Checkpoint {
 public:
  // Opens kDemoModel (model/folder.h), DIR/model.safetensors.index.json if it exists, or else DIR/model.safetensors.
  static Result<Checkpoint> open(const std::string& dir);

  // Finds a tensor. Fails if it is missing, its shape differs or its dtype is not in `dtypes`.
  Result<TensorHandle> find(std::string_view name, const std::vector<int64_t>& shape,
                            const std::vector<std::string>& dtypes = {"F32", "F16", "BF16"}) const;
  const TensorEntry* entry(std::string_view name) const;  // null: no such tensor
  std::vector<std::string_view> names() const;  // ascending
  // Returns the error for a tensor that a model of this family does not have.
  Error unexpected(std::string_view name, const std::string& family) const;

 private:
  std::string source_;  // the file that lists the tensors, for messages
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*, std::less<>> where_;
};

}  // namespace xpyd::model
