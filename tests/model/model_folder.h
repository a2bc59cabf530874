// A model folder that a test writes tensor by tensor.
#pragma once

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace xpyd::testing {

struct ModelFolder {
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string data;
  };
  std::map<std::string, Tensor> tensors;
  nlohmann::json config;
  TempDir dir;

  template <class T>
  static std::string bytes(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }
  void add(const std::string& name, std::vector<int64_t> shape, const std::vector<float>& values) {
    tensors[name] = {"F32", std::move(shape), bytes(values)};
  }
  std::string write() const {
    std::ofstream(dir.path + "/config.json") << config;
    nlohmann::json header;
    size_t at = 0;
    std::string data;
    for (const auto& [name, t] : tensors) {
      header[name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {at, at + t.data.size()}}};
      at += t.data.size(), data += t.data;
    }
    const std::string text = header.dump();
    uint64_t length = text.size();
    std::ofstream file(dir.path + "/model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << text << data;
    return dir.path;
  }
};

}  // namespace xpyd::testing
