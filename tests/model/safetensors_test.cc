// Tests the safetensors reader with malformed files of every kind. Each is refused with a message that names the file
// (and tensor), and nothing is read unchecked.
#include "model/weights/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/json.h"
#include "tests/matchers.h"
#include "tests/model/model_fixture.h"

namespace xpyd::testing::safetensors_test {

std::string length_prefix(uint64_t n) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += char(n >> (8 * i));
  return bytes;
}

void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

void write_safetensors(const std::string& path, const std::string& header, const std::string& data) {
  write_file(path, length_prefix(header.size()) + header + data);
}

std::string error_of(const std::string& header, uint64_t data_bytes) {
  auto parsed = parse_safetensors_header(header, data_bytes, "m.safetensors");
  return parsed ? "accepted" : parsed.error().message;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

TEST_CASE("safetensors: well-formed headers are accepted", "[model][safetensors]") {
  const std::pair<std::string, uint64_t> cases[] = {
      {"{}    ", 0},
      {"{\"__metadata__\":{\"format\":\"pt\"}}", 0},
      {"{" + tensor("a", "F32", "[]", "[0,4]") + "}", 4},     // a scalar
      {"{" + tensor("a", "F32", "[0,7]", "[0,0]") + "}", 0},  // an empty tensor
      {"{" + tensor("b", "BF16", "[3]", "[1,7]") + "," + tensor("a", "U8", "[1]", "[0,1]") + "}", 7},
  };
  for (const auto& [header, bytes] : cases) {
    CAPTURE(header);
    CHECK(error_of(header, bytes) == "accepted");
  }
}

TEST_CASE("safetensors: malformed headers are refused with a reason", "[model][safetensors]") {
  json cases = parsed_file(data_path("hostile/safetensors.json"));  // a header, the bytes behind it, and the message
  for (const std::string& deep : {std::string(100000, '{'), "{\"a\":" + std::string(100000, '[')})
    cases.push_back({deep, 0, "header"});
  for (const json& c : cases) {
    CAPTURE(as_text(c).substr(0, 200));
    CHECK_THAT(error_of(c[0], c[1]), Contains("m.safetensors") && Contains(c[2].get<std::string>()));
  }
  CHECK_THAT(error_of("{\"a\xff\":1}", 0), Contains("m.safetensors: header"));
}

TEST_CASE("safetensors: files that lie about their header are refused", "[model][safetensors]") {
  TempDir dir;
  const std::string path = dir.path + "/m.safetensors";
  struct Case {
    std::string bytes, says;
  } cases[] = {
      {"1234567", "shorter than 8 bytes"},
      {length_prefix(0), "header"},
      {length_prefix(3) + "{}", "exceeds the file"},
      {length_prefix(100'000'001) + "{}", "above the limit"},
      {length_prefix(~uint64_t{0}) + "{}", "above the limit"},
  };
  for (const Case& c : cases) {
    write_file(path, c.bytes);
    auto file = SafetensorsFile::open(path);
    REQUIRE_FALSE(file);
    CHECK_THAT(file.error().message, Contains(path) && Contains(c.says));
  }
  REQUIRE(mkfifo((dir.path + "/fifo").c_str(), 0600) == 0);
  auto fifo = SafetensorsFile::open(dir.path + "/fifo");  // does not wait for a writer
  REQUIRE_FALSE(fifo);
  CHECK_THAT(fifo.error().message, Contains("not a regular file"));
}

TEST_CASE("safetensors: elements of every float dtype are read at odd offsets", "[model][safetensors]") {
  TempDir dir;
  const std::string path = dir.path + "/m.safetensors";
  const float values[] = {1.5f, -2.25f, 3e-40f};
  const uint16_t half[] = {0x3c00, 0xc100, 0x0001}, brain[] = {0x3fc0, 0xc010, 0x0001};
  std::string data = "!";
  data.append(reinterpret_cast<const char*>(values), 12);
  data.append(reinterpret_cast<const char*>(half), 6);
  data.append(reinterpret_cast<const char*>(brain), 6);
  write_safetensors(path,
                    "{" + tensor("pad", "U8", "[1]", "[0,1]") + "," + tensor("f", "F32", "[3]", "[1,13]") + "," +
                        tensor("h", "F16", "[3]", "[13,19]") + "," + tensor("b", "BF16", "[3]", "[19,25]") + "}",
                    data);
  auto file = SafetensorsFile::open(path);
  REQUIRE(file);
  auto read = [&](const char* name) {
    std::vector<float> out(3);
    REQUIRE(file.value()->read(name, file.value()->tensors().at(name), 0, 3, out.data()));
    return out;
  };
  CHECK(read("f") == std::vector<float>{1.5f, -2.25f, 3e-40f});
  CHECK(read("h") == std::vector<float>{1, -2.5f, 0x1p-24f});
  CHECK(read("b") == std::vector<float>{1.5f, -2.25f, to_f32(bf16{1})});
  float last;
  REQUIRE(file.value()->read("h", file.value()->tensors().at("h"), 2, 1, &last));
  CHECK(last == 0x1p-24f);

  REQUIRE(truncate(path.c_str(), long(std::filesystem::file_size(path)) - 1) == 0);
  float out[3];
  Status status = file.value()->read("b", file.value()->tensors().at("b"), 0, 3, out);
  REQUIRE_FALSE(status);
  CHECK_THAT(status.error().message, Contains(path) && Contains("tensor \"b\"") && Contains("truncated"));
}

TEST_CASE("safetensors: an index names shards of the folder that exist and hold its tensors", "[model][safetensors]") {
  TempDir dir;
  write_safetensors(dir.path + "/real", "{" + tensor("a", "F32", "[1]", "[0,4]") + "}", std::string(4, 'x'));
  const auto error_with = [&](const std::string& index) {
    write_file(dir.path + "/model.safetensors.index.json", index);
    auto opened = Checkpoint::open(dir.path);
    return opened ? "accepted" : opened.error().message;
  };
  CHECK(error_with(R"({"weight_map":{"a":"real"}})") == "accepted");
  CHECK_THAT(error_with(R"({"weight_map":{"a":"real","b":"real"}})"),
             Contains("real") && Contains("tensor \"b\": it is not in this file"));
  CHECK_THAT(error_with(R"({"weight_map":{"a":"absent"}})"), Contains("absent"));
  for (const char* name : {"", "../x", "/etc/passwd", "a/b"}) {
    CAPTURE(name);
    CHECK_THAT(error_with(std::string(R"({"weight_map":{"a":")") + name + R"("}})"),
               Contains("index.json: weight_map: \"a\""));
  }
  for (const char* text : {"", "[]", R"({"weight_map":3})", R"({"weight_map":{"a":1}})"}) {
    CAPTURE(text);
    CHECK_THAT(error_with(text), Contains("index.json"));
  }
}

// A copy of a fixture that a test may spoil.
struct SpoiledModel {
  explicit SpoiledModel(const std::string& name) {
    std::filesystem::copy(data_path("models/" + name), dir.path, std::filesystem::copy_options::recursive);
  }
  std::string text(const std::string& file) const {
    std::ifstream in(dir.path + "/" + file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // Replaces `from` by `to`, of the same length, in a file.
  void replace(const std::string& file, const std::string& from, const std::string& to) const {
    std::string bytes = text(file);
    const size_t at = bytes.find(from);
    REQUIRE(at != std::string::npos);
    bytes.replace(at, from.size(), to);
    write_file(dir.path + "/" + file, bytes);
  }
  std::string load_error(Range layers = {}) const {
    ThreadTeam team(2);
    auto config = load_model_config(dir.path);
    REQUIRE(config);
    auto weights = load_weights(dir.path, config.value(), {.layers = layers}, team);
    return weights ? "accepted" : weights.error().message;
  }
  TempDir dir;
};

TEST_CASE("safetensors: a checkpoint that does not fit its config.json is refused by tensor", "[model][safetensors]") {
  const std::string file = "model.safetensors";
  SpoiledModel shape("llama2");
  shape.replace("config.json", "\"intermediate_size\": 100", "\"intermediate_size\": 101");
  CHECK_THAT(shape.load_error(),
             Contains(file) && Contains("gate_proj.weight\": shape [100, 48]") && Contains("[101, 48]"));
  SpoiledModel name("llama2");
  name.replace(file, "layers.1.mlp.up_proj", "layers.1.mlp.Up_proj");
  CHECK_THAT(name.load_error(), Contains(file) && Contains("layers.1.mlp.up_proj.weight\": missing"));
  SpoiledModel extra("llama_linear_bias");
  extra.replace("config.json", "\"mlp_bias\": true", "\"mlp_bias\": false");
  CHECK_THAT(extra.load_error(), Contains(file) && Contains("down_proj.bias\": a llama model with this config.json"));
  SpoiledModel beyond("llama31");  // layer 1 may be a prediction head, and layer 2 is none of this model
  beyond.replace("config.json", "\"num_hidden_layers\": 3",
                 "\"num_hidden_layers\": 1, \"num_nextn_predict_layers\": 1");
  CHECK_THAT(beyond.load_error(),
             Contains("tensor \"model.layers.2.") && Contains("a llama model with this config.json"));
  beyond.replace("config.json", "\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 2");
  CHECK(beyond.load_error() == "accepted");
  beyond.replace("config.json", "\"num_nextn_predict_layers\": 2", "\"num_nextn_predict_layers\": 0");
  CHECK_THAT(beyond.load_error({0, 1}), Contains("tensor \"model.layers.1."));
  SpoiledModel dtype("llama_linear_bias");
  dtype.replace(file, "\"dtype\":\"F16\"", "\"dtype\":\"I16\"");
  CHECK_THAT(dtype.load_error(), Contains(file) && Contains("dtype I16 is not supported (expected F32, F16 or BF16)"));
  SpoiledModel cut("mistral");
  const std::string shard = cut.dir.path + "/model-00003-of-00007.safetensors";
  REQUIRE(truncate(shard.c_str(), long(std::filesystem::file_size(shard)) - 1) == 0);
  CHECK_THAT(cut.load_error(), Contains("model-00003-of-00007.safetensors") && Contains("truncated"));
  CHECK(SpoiledModel("qwen3").load_error() == "accepted");
}

}  // namespace xpyd::testing::safetensors_test
