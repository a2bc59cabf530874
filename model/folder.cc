#include "model/folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/json/json.h"

// The assembler includes the files. Compilers run in the repository's root, as all includes expect.
#define XPYD_EMBED(symbol, path)       \
  __asm__(                             \
      ".section .rodata\n"             \
      ".global " #symbol               \
      "_begin\n"                       \
      ".global " #symbol               \
      "_end\n"                         \
      ".balign 16\n" #symbol           \
      "_begin:\n"                      \
      ".incbin \"" path "\"\n" #symbol \
      "_end:\n"                        \
      ".byte 0\n"                      \
      ".previous\n");                  \
  extern "C" const char symbol##_begin[], symbol##_end[];

XPYD_EMBED(xpyd_demo_config, "model/demo/config.json")
XPYD_EMBED(xpyd_demo_weights, "model/demo/model.safetensors")
XPYD_EMBED(xpyd_demo_tokenizer, "model/demo/tokenizer.json")
XPYD_EMBED(xpyd_demo_tokenizer_config, "model/demo/tokenizer_config.json")

namespace xpyd::model {
namespace {

namespace fs = std::filesystem;

struct EmbeddedFile {
  std::string_view name;
  const char *begin, *end;
};
const EmbeddedFile kFiles[] = {
    {"config.json", xpyd_demo_config_begin, xpyd_demo_config_end},
    {"model.safetensors", xpyd_demo_weights_begin, xpyd_demo_weights_end},
    {"tokenizer.json", xpyd_demo_tokenizer_begin, xpyd_demo_tokenizer_end},
    {"tokenizer_config.json", xpyd_demo_tokenizer_config_begin, xpyd_demo_tokenizer_config_end},
};

}  // namespace

bool is_embedded(std::string_view path) {
  const std::string_view dir = kDemoModel;
  return path.starts_with(dir) && (path.size() == dir.size() || path[dir.size()] == '/');
}

std::optional<std::string_view> embedded_file(std::string_view path) {
  if (!is_embedded(path)) return std::nullopt;
  path.remove_prefix(std::string_view(kDemoModel).size());
  for (const EmbeddedFile& file : kFiles)
    if (path.size() == file.name.size() + 1 && path.ends_with(file.name))
      return std::string_view(file.begin, size_t(file.end - file.begin));
  return std::nullopt;
}

Status check_model_folder(const std::string& dir) {
  std::error_code error;
  if (is_embedded(dir) || fs::is_directory(dir, error)) return ok();
  return invalid("MODEL_DIR " + dir + ": there is no such folder");
}

bool has_model_file(const std::string& path) {
  std::error_code error;
  return is_embedded(path) ? embedded_file(path).has_value() : std::filesystem::exists(path, error);
}

namespace {

// "x" neither overwrites a file nor follows a link.
Status write_new(const std::string& path, const EmbeddedFile& file) {
  const size_t bytes = size_t(file.end - file.begin);
  std::FILE* out = std::fopen(path.c_str(), "wxe");
  const bool whole = out && std::fwrite(file.begin, 1, bytes, out) == bytes;
  if (out && std::fclose(out) == 0 && whole) return ok();
  return Error{ErrorCode::io, path + ": " + std::strerror(errno)};
}

}  // namespace

Status export_demo(const std::string& dir) {
  std::error_code error;
  if (::mkdir(dir.c_str(), 0755) != 0 && errno != EEXIST)
    return Error{ErrorCode::io, dir + ": " + std::strerror(errno)};
  if (!fs::is_directory(dir, error) || !fs::is_empty(dir, error))
    return invalid(dir + ": expected a new or empty folder");
  for (const EmbeddedFile& file : kFiles)
    if (Status status = write_new(dir + "/" + std::string(file.name), file); !status) return status;
  return ok();
}

Result<std::string> read_model_file(const std::string& path, size_t max_bytes) {
  if (!is_embedded(path)) return read_small_file(path, max_bytes);
  std::optional<std::string_view> file = embedded_file(path);
  if (!file) return Error{ErrorCode::not_found, path + ": no such file"};
  if (file->size() > max_bytes)
    return Error{ErrorCode::io,
                 path + ": " + std::to_string(file->size()) + " bytes; expected at most " + std::to_string(max_bytes)};
  return std::string(*file);
}

}  // namespace xpyd::model
