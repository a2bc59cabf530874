// libFuzzer: arbitrary bytes as a safetensors file, an index and a config.json. Whatever is accepted must hold what the
// parsers promise.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "model/config.h"
#include "model/weights/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0: {
      static const int fd = memfd_create("fuzz", MFD_CLOEXEC);
      static const std::string path = "/proc/self/fd/" + std::to_string(fd);
      XPYD_CHECK(ftruncate(fd, 0) == 0);
      XPYD_CHECK(pwrite(fd, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()));
      auto file = xpyd::model::SafetensorsFile::open(path);
      if (!file) break;
      for (const auto& [name, tensor] : file.value()->tensors()) {
        XPYD_CHECK(tensor.begin <= tensor.end && tensor.end <= bytes.size());
        if (tensor.dtype != "F32" && tensor.dtype != "F16" && tensor.dtype != "BF16") continue;
        const int64_t n = int64_t(tensor.end - tensor.begin) / (tensor.dtype == "F32" ? 4 : 2);
        float last;
        if (n > 0) XPYD_CHECK(file.value()->read(name, tensor, n - 1, 1, &last).ok());
      }
      break;
    }
    case 2: {
      auto index = xpyd::model::parse_safetensors_index(bytes, "fuzz");
      if (index)
        for (const auto& [tensor, shard] : index.value())
          XPYD_CHECK(!shard.empty() && shard.find('/') == std::string::npos);
      break;
    }
    default: {
      auto config = xpyd::model::parse_model_config(std::string(bytes), "fuzz");
      if (!config) break;
      const xpyd::model::ModelConfig& c = config.value();
      XPYD_CHECK(c.n_layers > 0 && c.hidden > 0 && c.intermediate > 0 && c.head_dim > 0 && c.head_dim % 2 == 0);
      XPYD_CHECK(c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0 && c.vocab > 0 && c.max_position > 0);
      XPYD_CHECK(c.parameters() > 0);
      for (int eos : c.eos_tokens) XPYD_CHECK(eos >= 0 && eos < c.vocab);
    }
  }
  return 0;
}
