#include "model/weights/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json/json.h"
#include "model/folder.h"

namespace xpyd::model {
namespace {

using nlohmann::json;

constexpr size_t kMaxIndexBytes = 64u << 20;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // as in the reference reader

// Bytes of an element of any safetensors dtype; 0 for an unknown name.
uint64_t element_bytes(const std::string& dtype) {
  static const struct {
    const char* name;
    uint64_t bytes;
  } kDtypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
                 {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
                 {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8}};
  for (const auto& d : kDtypes)
    if (dtype == d.name) return d.bytes;
  return 0;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Quotes a name for a message: shortened, without control characters.
std::string name_in_quotes(std::string_view name) {
  std::string text = "\"";
  for (char c : name.substr(0, 100)) text += (unsigned(c) & 0xff) < 0x20 ? '?' : c;
  return text + (name.size() > 100 ? "...\"" : "\"");
}

Error bad(const std::string& file, const std::string& what) {
  return {ErrorCode::invalid_argument, file + ": " + what};
}

Error io_error(const std::string& file, const std::string& what, int error) {
  return {error == ENOENT ? ErrorCode::not_found : ErrorCode::io, file + ": " + what + ": " + strerror(error)};
}

TensorEntry parse_entry(const json& value, uint64_t data_bytes, const std::string& name, const std::string& file) {
  auto wrong = [&](const std::string& what) { return bad(file, "tensor " + name_in_quotes(name) + ": " + what); };
  TensorEntry entry;
  try {
    entry.dtype = value.at("dtype").get<std::string>();
    for (const char* list : {"shape", "data_offsets"})
      for (const json& n : value.at(list))
        if (!n.is_number_integer()) throw wrong(std::string(list) + ": expected integers of 64 bits");
    entry.shape = value.at("shape").get<std::vector<int64_t>>();
    entry.begin = value.at("data_offsets").at(0).get<uint64_t>();
    entry.end = value.at("data_offsets").at(1).get<uint64_t>();
  } catch (const json::exception&) {
    throw wrong("expected an object with dtype, shape and data_offsets");
  }
  uint64_t bytes = element_bytes(entry.dtype);
  if (bytes == 0) throw wrong("unknown dtype " + name_in_quotes(entry.dtype));
  for (const int64_t n : entry.shape)
    if (n < 0 || __builtin_mul_overflow(bytes, uint64_t(n), &bytes))
      throw wrong("shape: expected non-negative integers whose product fits 64 bits");
  if (entry.end < entry.begin || entry.end - entry.begin != bytes)
    throw wrong("data_offsets are " + std::to_string(entry.begin) + " and " + std::to_string(entry.end) + ", but " +
                entry.dtype + " " + shape_text(entry.shape) + " has " + std::to_string(bytes) + " bytes");
  if (entry.end > data_bytes)
    throw wrong("it ends at byte " + std::to_string(entry.end) + " of the data, but the file has " +
                std::to_string(data_bytes) + " (the file is truncated)");
  return entry;
}

}  // namespace

Result<TensorMap> parse_safetensors_header(std::string_view json_text, uint64_t data_bytes,
                                           const std::string& file_name) try {
  const json root = need(parse_json(json_text, file_name + ": header", {.max_bytes = kMaxHeaderBytes}));
  if (!root.is_object()) return bad(file_name, "the header is not a JSON object");
  TensorMap tensors;
  for (const auto& [name, value] : root.items())
    if (name != "__metadata__") tensors.emplace(name, parse_entry(value, data_bytes, name, file_name));
  // The format allows neither holes nor overlaps.
  std::vector<const TensorMap::value_type*> in_order;
  for (const auto& one : tensors) in_order.push_back(&one);
  std::ranges::sort(in_order, {}, [](auto* one) { return std::pair(one->second.begin, one->second.end); });
  uint64_t at = 0;
  for (const auto* one : in_order) {
    if (one->second.begin != at)
      return bad(file_name, "tensor " + name_in_quotes(one->first) + ": it begins at byte " +
                                std::to_string(one->second.begin) +
                                " of the data, but what is before it ends at byte " + std::to_string(at));
    at = one->second.end;
  }
  if (at != data_bytes)
    return bad(file_name, "the tensors end at byte " + std::to_string(at) + " of the data, but the file has " +
                              std::to_string(data_bytes));
  return tensors;
} catch (const Error& error) {
  return error;
}

Result<std::map<std::string, std::string, std::less<>>> parse_safetensors_index(std::string_view json_text,
                                                                                const std::string& file_name) try {
  const json root = need(parse_json(json_text, file_name, {.max_bytes = kMaxIndexBytes}));
  const json& weight_map = *need(get_object(root, "weight_map", file_name));
  std::map<std::string, std::string, std::less<>> shards;
  for (const auto& [tensor, shard] : weight_map.items()) {
    if (!shard.is_string()) return bad(file_name, "weight_map: " + name_in_quotes(tensor) + ": expected a file name");
    const std::string& name = shard.get_ref<const std::string&>();
    // The name comes from outside and may only choose among the files of this folder.
    if (name.empty() || name.find('/') != std::string::npos)
      return bad(file_name, "weight_map: " + name_in_quotes(tensor) + ": " + name_in_quotes(name) +
                                " is not the name of a file in the model's folder");
    shards.emplace(tensor, name);
  }
  if (shards.empty()) return bad(file_name, "weight_map: it names no tensor");
  return shards;
} catch (const Error& error) {
  return error;
}

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::open(const std::string& path) try {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  if (std::optional<std::string_view> embedded = embedded_file(path)) {
    file->embedded_ = *embedded;
    file->file_bytes_ = embedded->size();
  } else {
    // O_NONBLOCK: opening a FIFO must not wait for a writer.
    file->fd_ = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (file->fd_.get() < 0) return io_error(path, "cannot open", errno);
    struct stat info;
    if (fstat(file->fd_.get(), &info) != 0) return io_error(path, "cannot stat", errno);
    if (!S_ISREG(info.st_mode)) return bad(path, "not a regular file");
    file->file_bytes_ = uint64_t(info.st_size);
  }
  if (file->file_bytes_ < 8) return bad(path, "the file is shorter than 8 bytes, so it is not a safetensors file");

  unsigned char length[8];
  need(file->read_exactly(length, 8, 0));
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | length[i];
  if (header_bytes > kMaxHeaderBytes)
    return bad(path, "header length " + std::to_string(header_bytes) + " is above the limit of " +
                         std::to_string(kMaxHeaderBytes));
  if (header_bytes > file->file_bytes_ - 8)
    return bad(path, "header length " + std::to_string(header_bytes) + " exceeds the file");
  std::string header(header_bytes, '\0');
  need(file->read_exactly(header.data(), header_bytes, 8));
  file->data_start_ = 8 + header_bytes;
  file->tensors_ = need(parse_safetensors_header(header, file->file_bytes_ - file->data_start_, path));
  return file;
} catch (const Error& error) {
  return error;
}

Status SafetensorsFile::read_exactly(void* out, size_t n, uint64_t at, std::string_view tensor) const {
  if (fd_.get() < 0) memcpy(out, embedded_.substr(at, n).data(), n);
  for (size_t done = 0; fd_.get() >= 0 && done < n;) {
    const ssize_t got = pread(fd_.get(), static_cast<char*>(out) + done, n - done, off_t(at + done));
    if (got < 0 && errno == EINTR) continue;
    const int error = errno;
    const std::string of = got > 0 || tensor.empty() ? "" : "tensor " + name_in_quotes(tensor) + ": ";
    if (got < 0) return io_error(path_, of + "cannot read" + (tensor.empty() ? " the header" : ""), error);
    if (got == 0) return Error{ErrorCode::io, path_ + ": " + of + "the file was truncated while it was read"};
    done += size_t(got);
  }
  return ok();
}

Status SafetensorsFile::read(std::string_view name, const TensorEntry& tensor, int64_t first, int n, float* out) const {
  const uint64_t size = element_bytes(tensor.dtype);
  XPYD_CHECK(first >= 0 && n >= 0 && uint64_t(first + n) * size <= tensor.end - tensor.begin);
  // Data may begin at any byte offset, so elements are copied out of the buffer and never cast in place.
  unsigned char buffer[16384];
  const int chunk = int(sizeof buffer / size);
  for (int done = 0; done < n;) {
    int now = std::min(chunk, n - done);
    const size_t want = size_t(now) * size;
    const uint64_t at = data_start_ + tensor.begin + uint64_t(first + done) * size;
    if (Status status = read_exactly(buffer, want, at, name); !status) return status;
    float* to = out + done;
    if (size == 4) {
      memcpy(to, buffer, want);
    } else {
      const bool is_bf16 = tensor.dtype == "BF16";
      for (int i = 0; i < now; ++i) {
        uint16_t bits;
        memcpy(&bits, buffer + 2 * i, 2);
        to[i] = is_bf16 ? to_f32(bf16{bits}) : f16_to_f32(bits);
      }
    }
    done += now;
  }
  return ok();
}

Result<Checkpoint> Checkpoint::open(const std::string& dir) try {
  Checkpoint checkpoint;
  const std::string index_name = "model.safetensors.index.json", single_name = "model.safetensors";
  auto add = [&](const std::string& name) {
    checkpoint.files_.push_back(need(SafetensorsFile::open(dir + "/" + name)));
    return checkpoint.files_.back().get();
  };

  if (!has_model_file(dir + "/" + index_name)) {
    checkpoint.source_ = dir + "/" + single_name;
    const SafetensorsFile* file = add(single_name);
    for (const auto& [name, entry] : file->tensors()) checkpoint.where_[name] = file;
    return checkpoint;
  }

  checkpoint.source_ = dir + "/" + index_name;
  const std::string text = need(read_model_file(checkpoint.source_, kMaxIndexBytes));
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [tensor, shard] : need(parse_safetensors_index(text, checkpoint.source_))) {
    const SafetensorsFile*& file = shards[shard];
    if (!file) file = add(shard);
    if (file->tensors().find(tensor) == file->tensors().end())
      return bad(file->path(),
                 "tensor " + name_in_quotes(tensor) + ": it is not in this file, although " + index_name + " says so");
    checkpoint.where_[tensor] = file;
  }
  return checkpoint;
} catch (const Error& error) {
  return error;
}

const TensorEntry* Checkpoint::entry(std::string_view name) const {
  auto found = where_.find(name);
  return found == where_.end() ? nullptr : &found->second->tensors().find(name)->second;
}

Result<TensorHandle> Checkpoint::find(std::string_view name, const std::vector<int64_t>& shape,
                                      const std::vector<std::string>& dtypes) const {
  auto found = where_.find(name);
  if (found == where_.end()) return bad(source_, "tensor " + name_in_quotes(name) + ": missing");
  auto tensor = found->second->tensors().find(name);
  const TensorEntry& entry = tensor->second;
  if (std::find(dtypes.begin(), dtypes.end(), entry.dtype) == dtypes.end()) {
    std::string expected;
    for (size_t i = 0; i < dtypes.size(); ++i)
      expected += (i == 0 ? "" : i + 1 == dtypes.size() ? " or " : ", ") + dtypes[i];
    return bad(found->second->path(), "tensor " + name_in_quotes(name) + ": dtype " + entry.dtype +
                                          " is not supported (expected " + expected + ")");
  }
  if (entry.shape != shape)
    return bad(found->second->path(), "tensor " + name_in_quotes(name) + ": shape " + shape_text(entry.shape) +
                                          ", but config.json implies " + shape_text(shape));
  return TensorHandle{found->second, tensor->first, &entry};
}

std::vector<std::string_view> Checkpoint::names() const {
  std::vector<std::string_view> names;
  for (const auto& [name, file] : where_) names.push_back(name);
  return names;
}

Error Checkpoint::unexpected(std::string_view name, const std::string& family) const {
  return bad(where_.find(name)->second->path(), "tensor " + name_in_quotes(name) + ": a " + family +
                                                    " model with this config.json does not have this tensor");
}

}  // namespace xpyd::model
