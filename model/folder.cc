#include "model/folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/json/json.h"
#include "base/numbers.h"
#include "base/siphash.h"

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

Status check_model_folder(const std::string& dir, bool with_weights) {
  if (is_embedded(dir)) return ok();
  const std::string what = "MODEL_DIR " + dir,
                    expected =
                        "expected a folder with config.json, *.safetensors and tokenizer.json";
  std::error_code error;
  const fs::path path(dir);
  if (!fs::exists(path, error)) {
    const bool hub_id = std::count(dir.begin(), dir.end(), '/') == 1 && dir.front() != '/' && dir.front() != '.' &&
                        dir.back() != '/' && !fs::exists(path.parent_path(), error);
    if (hub_id)
      return invalid(what + " does not exist here; models are not downloaded: run `hf download " + dir +
                     " --local-dir DIR` and give DIR");
    return invalid(what + ": there is no such folder");
  }
  const auto form = [](const fs::path& file) -> std::string {
    const std::string kind = file.extension().string();
    return kind == ".gguf" ? "a GGUF file" : kind == ".bin" || kind == ".pt" || kind == ".pth" ? "a pickle" : "";
  };
  if (!fs::is_directory(path, error)) {
    if (path.extension() == ".safetensors") return invalid(what + " is a file: expected the folder that has it");
    const std::string kind = form(path);
    return invalid(what +
                   (kind.empty() ? " is not a folder" : " is " + kind + ", a format that this program does not read") +
                   ": " + expected);
  }
  const auto has = [&](const char* name) { return fs::exists(path / name, error); };
  if (has("adapter_config.json") && !has("config.json"))
    return invalid(what +
                   " is a LoRA adapter, which this program does not read: merge it into its base model (peft's "
                   "merge_and_unload) and give the merged folder");
  std::string found;  // weights in another format
  bool safetensors = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    safetensors = safetensors || entry.path().extension() == ".safetensors";
    if (!form(entry.path()).empty()) found = entry.path().filename().string();
  }
  if (with_weights && !safetensors && !found.empty())
    return invalid(what + " has its weights in " + found + ", a format that this program does not read" +
                   ": " + expected);
  if (!has("tokenizer.json") && has("tokenizer.model"))
    return invalid(what +
                   " has tokenizer.model but no tokenizer.json; transformers' "
                   "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes tokenizer.json");
  return ok();
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

// Requires a folder that only this user can change.
Status check_own_folder(const std::string& path) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) return Error{ErrorCode::io, path + ": " + std::strerror(errno)};
  if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & 022) != 0)
    return invalid(path + ": expected a folder that only its owner, this user, can write to");
  return ok();
}

bool holds_demo(const std::string& dir) {
  return std::all_of(std::begin(kFiles), std::end(kFiles), [&](const EmbeddedFile& file) {
    const std::string_view wanted(file.begin, size_t(file.end - file.begin));
    const auto there = read_small_file(dir + "/" + std::string(file.name), wanted.size());
    return there && there.value() == wanted;
  });
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

Result<std::string> cached_demo() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  std::string base = cache && cache[0] == '/' ? std::string(cache)
                     : home && home[0] == '/' ? std::string(home) + "/.cache"
                                              : "";
  if (base.empty()) return Error{ErrorCode::not_found, "the environment has neither XDG_CACHE_HOME nor HOME"};
  std::error_code error;
  fs::create_directories(base, error);
  base += "/xpyd";
  ::mkdir(base.c_str(), 0700);
  if (Status status = check_own_folder(base); !status) return status.error();
  uint64_t hash = 0;  // each version of the demo model has a folder of its own
  for (const EmbeddedFile& file : kFiles) hash = siphash({hash, 1}, {file.begin, size_t(file.end - file.begin)});
  const std::string path = base + "/xpyd-demo-" + hex(hash);
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) {
    // The folder appears whole or not at all: if several processes do this, the first rename wins.
    std::string fresh = base + "/new-XXXXXX";
    if (!::mkdtemp(fresh.data())) return Error{ErrorCode::io, base + ": " + std::strerror(errno)};
    const Status written = export_demo(fresh);
    if (!written || ::rename(fresh.c_str(), path.c_str()) != 0) fs::remove_all(fresh, error);
    if (!written) return written.error();
  }
  if (Status status = check_own_folder(path); !status) return status.error();
  if (!holds_demo(path)) return invalid(path + " is not the demo model of this binary: remove it");
  return path;
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
