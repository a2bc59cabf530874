// Tests quantised weights: the values of their codes, exact and integer products, and folders that contain them.
#include "model/gemm/quantised.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/random.h"
#include "model/gemm/gemm.h"
#include "model/weights/weights.h"
#include "tests/model/gemm_rows.h"
#include "tests/model/llama_cases.h"
#include "tests/model/model_folder.h"

namespace xpyd::testing::quantised_test {
namespace {

float uniform(Random& random) { return random_value(random); }

constexpr Dtype kCodes[] = {Dtype::int8, Dtype::int4, Dtype::fp8};

}  // namespace

TEST_CASE("quantised: e4m3 and f16 have the values of their formats, and rounding finds the nearest",
          "[quantised][model]") {
  CHECK(e4m3_to_f32(0x7e) == 448);
  CHECK(e4m3_to_f32(0x08) == 0x1p-6f);
  CHECK(e4m3_to_f32(0x01) == 0x1p-9f);
  CHECK(e4m3_to_f32(0xb8) == -1);
  CHECK(std::isnan(e4m3_to_f32(0x7f)));
  for (int code = 0; code < 0x7e; ++code) {
    const float low = e4m3_to_f32(uint8_t(code)), high = e4m3_to_f32(uint8_t(code + 1));
    REQUIRE(low < high);
    const float half = (low + high) / 2;
    REQUIRE(nearest_fp8(kE4m3, low) == code);
    REQUIRE(nearest_fp8(kE4m3, -high) == (0x80 | (code + 1)));
    REQUIRE(nearest_fp8(kE4m3, std::nextafter(half, low)) == code);
    REQUIRE(nearest_fp8(kE4m3, std::nextafter(half, high)) == code + 1);
    REQUIRE(nearest_fp8(kE4m3, half) == code + code % 2);  // ties to the even code
  }
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const float low = f16_to_f32(uint16_t(half)), high = half == 0x7bff ? 65536.0f : f16_to_f32(uint16_t(half + 1));
    const float middle = (low + high) / 2;
    REQUIRE(nearest_f16(low) == half);
    REQUIRE(nearest_f16(-low) == (half | 0x8000));
    REQUIRE(nearest_f16(std::nextafter(middle, low)) == half);
    REQUIRE(nearest_f16(middle) == half + half % 2);
    REQUIRE(nearest_f16(std::nextafter(middle, high)) == half + 1);
  }
  CHECK(std::isnan(f16_to_f32(nearest_f16(std::nanf("")))));
}

TEST_CASE("quantised: quantised values are as near as the header promises", "[quantised][model]") {
  Random random(3);
  for (Dtype dtype : kCodes)
    for (int size : {0, 1, 32, 100})
      for (float range : {1.0f, 1e-4f, 300.0f}) {
        const int k = 257;
        const QuantGroups groups = size == 100 ? scattered(k, size, 5) : even_groups(k, size);
        std::vector<float> x(k), w(k);
        for (float& v : x) v = uniform(random) * range;
        x[7] = 0;
        QuantRow row(dtype, k, groups.count);
        REQUIRE(quantise_row(dtype, groups, x.data(), row));
        widen_row(dtype, groups, row, w.data());
        for (size_t i = 0; i < x.size(); ++i) {
          const double scale = row.scale[size_t(groups.of[i])], error = std::fabs(double(w[i]) - double(x[i]));
          const double bound = dtype == Dtype::fp8 ? std::fabs(x[i]) * 0x1p-4 + scale * 0x1p-10
                                                   : scale / 2 * (1 + 0x1p-20);
          CAPTURE(dtype_name(dtype), size, range, i, x[i], w[i], scale);
          REQUIRE(error <= bound + 1e-12 * range);
          if (dtype != Dtype::fp8) REQUIRE(f16_to_f32(nearest_f16(float(scale))) == float(scale));
        }
        x[3] = std::numeric_limits<float>::infinity();
        CHECK_FALSE(quantise_row(dtype, groups, x.data(), row));
      }
}

TEST_GEMM_ROWS(quantised_whole_numbers,
               "quantised: integer products have no order, so two instruction sets have the same bits",
               "[quantised][model]") {
  ThreadTeam team(1);
  auto all = gemm_rows();
  all.insert(all.end(), rows.begin(), rows.end());
  for (Dtype dtype : {Dtype::int8, Dtype::int4}) {
    const Problem c = make_problem(50, 700, 8, dtype, team, 21, even_groups(700, 64));
    auto x = random_rows(6, 700, 22);
    x[700 * 2 + 5] = std::numeric_limits<float>::infinity();  // row 2 is lost, and rows beside it are not
    x[700 * 4] = std::nanf("");
    std::fill_n(x.begin() + 700 * 5, 700, 0.0f);
    std::map<int, std::vector<float>> by_bits;
    for (const GemmVariant* variant : all) {
      if (variant->exact()) continue;
      const auto y = run(*variant, c, x, 6, 700, false, team);
      CAPTURE(variant->name, dtype_name(dtype));
      const auto& expected = by_bits.try_emplace(variant->activation_bits(dtype), y).first->second;
      for (size_t i = 0; i < y.size(); ++i) {
        const size_t row = i / 50;
        REQUIRE(std::isnan(y[i]) == (row == 2 || row == 4));
        if (row == 5) REQUIRE(y[i] == 0);
        REQUIRE((y[i] == expected[i] || std::isnan(y[i])));
      }
    }
  }
}

// ---- folders

namespace {

// A checkpoint that is being written with quantised matrices. `dense` is the folder of the values that they stand for.
struct Folder : ModelFolder {
  static constexpr int kHidden = 64, kInner = 88, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kVocab = 96, kExperts = 3;
  Folder() {
    config = {{"model_type", "qwen2"},       {"architectures", {"Qwen2ForCausalLM"}}, {"hidden_size", kHidden},
              {"intermediate_size", kInner}, {"num_attention_heads", kHeads},         {"num_key_value_heads", kKvHeads},
              {"vocab_size", kVocab},        {"max_position_embeddings", 128},        {"num_hidden_layers", 2}};
  }
  // The same layers with Mixtral's experts. Tools leave the router dense.
  void use_experts() {
    config.update({{"model_type", "mixtral"}, {"num_local_experts", kExperts}, {"num_experts_per_tok", 2}});
  }
  bool sparse() const { return config["model_type"] == "mixtral"; }
};

// Calls matrix(name, rows, columns) for every matrix of a layer, and adds the dense tensors to both folders.
template <class Matrix>
void fill(Folder& coded, Folder& dense, Matrix matrix) {
  Random random(77);
  const auto both = [&](const std::string& name, std::vector<int64_t> shape, float centre) {
    size_t n = 1;
    for (int64_t d : shape) n *= size_t(d);
    std::vector<float> values(n);
    for (float& v : values) v = centre + uniform(random) * 0.3f;
    coded.add(name, shape, values), dense.add(name, shape, values);
  };
  using F = Folder;
  const int q = F::kHeads * F::kHeadDim, kv = F::kKvHeads * F::kHeadDim;
  both("model.embed_tokens.weight", {F::kVocab, F::kHidden}, 0);
  both("lm_head.weight", {F::kVocab, F::kHidden}, 0);
  both("model.norm.weight", {F::kHidden}, 1);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    both(at + "input_layernorm.weight", {F::kHidden}, 1);
    both(at + "post_attention_layernorm.weight", {F::kHidden}, 1);
    for (const auto& [name, rows, columns] : {std::tuple("self_attn.q_proj", q, F::kHidden),
                                              {"self_attn.k_proj", kv, F::kHidden},
                                              {"self_attn.v_proj", kv, F::kHidden},
                                              {"self_attn.o_proj", F::kHidden, q}})
      matrix(at + name, rows, columns);
    const auto mlp = [&](const std::string& in, const char* gate, const char* up, const char* down) {
      matrix(in + gate, F::kInner, F::kHidden), matrix(in + up, F::kInner, F::kHidden);
      matrix(in + down, F::kHidden, F::kInner);
    };
    if (coded.sparse()) {
      both(at + "block_sparse_moe.gate.weight", {F::kExperts, F::kHidden}, 0);
      for (int e = 0; e < F::kExperts; ++e)
        mlp(at + "block_sparse_moe.experts." + std::to_string(e) + ".", "w1", "w3", "w2");
      continue;
    }
    both(at + "self_attn.q_proj.bias", {q}, 0);
    both(at + "self_attn.k_proj.bias", {kv}, 0);
    both(at + "self_attn.v_proj.bias", {kv}, 0);
    mlp(at + "mlp.", "gate_proj", "up_proj", "down_proj");
  }
}

void fill_gptq(Folder& coded, Folder& dense, int group, bool desc_act, bool v2) {
  Random random(5);
  coded.config["quantization_config"] = {
      {"quant_method", "gptq"}, {"bits", 4}, {"group_size", group}, {"desc_act", desc_act}, {"sym", false}};
  if (v2) coded.config["quantization_config"]["checkpoint_format"] = "gptq_v2";
  fill(coded, dense, [&](const std::string& name, int rows, int columns) {
    const int groups = (columns + group - 1) / group;
    // All matrices that read the same input share one order, as the tools leave it. Each expert has its own inputs.
    const size_t expert = name.find("experts.");
    const uint64_t input = uint64_t(columns) + (expert == name.npos ? 0 : uint64_t(name[expert + 8]));
    const QuantGroups of = desc_act ? scattered(columns, group, input) : even_groups(columns, group);
    std::vector<uint32_t> words(size_t(columns / 8 * rows)), zeros(size_t(groups * rows / 8));
    std::vector<uint16_t> scales(size_t(groups * rows));
    std::vector<float> w(size_t(rows * columns));
    for (uint32_t& word : words) word = uint32_t(random.next());
    for (uint32_t& zero : zeros) zero = uint32_t(random.next());
    for (uint16_t& scale : scales) scale = nearest_f16(0.02f + 0.01f * uniform(random));
    for (int n = 0; n < rows; ++n)
      for (int i = 0; i < columns; ++i) {
        const int g = of.of[size_t(i)];
        const int code = int(words[size_t(i / 8 * rows + n)] >> (i % 8 * 4) & 15);
        const int zero = int(zeros[size_t((g * rows + n) / 8)] >> (n % 8 * 4) & 15) + !v2;
        w[size_t(n * columns + i)] = f16_to_f32(scales[size_t(g * rows + n)]) * float(code - zero);
      }
    dense.add(name + ".weight", {rows, columns}, w);
    coded.tensors[name + ".qweight"] = {"I32", {columns / 8, rows}, Folder::bytes(words)};
    coded.tensors[name + ".qzeros"] = {"I32", {groups, rows / 8}, Folder::bytes(zeros)};
    coded.tensors[name + ".scales"] = {"F16", {groups, rows}, Folder::bytes(scales)};
    coded.tensors[name + ".g_idx"] = {"I32", {columns}, Folder::bytes(of.of)};
    if (name.ends_with("o_proj")) coded.add(name + ".bias", {rows}, std::vector<float>(size_t(rows), 0.0f));
  });
}

void fill_fp8(Folder& coded, Folder& dense, bool blocks) {
  Random random(6);
  coded.config["quantization_config"] = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}};
  if (blocks) coded.config["quantization_config"]["weight_block_size"] = {32, 48};
  fill(coded, dense, [&](const std::string& name, int rows, int columns) {
    const int across = blocks ? (columns + 47) / 48 : 1, down = blocks ? (rows + 31) / 32 : 1;
    std::vector<uint8_t> codes(size_t(rows * columns));
    std::vector<float> scales(size_t(across * down)), w(codes.size());
    for (uint8_t& code : codes) code = nearest_fp8(kE4m3, uniform(random) * 400);
    for (float& scale : scales) scale = 3e-4f * (1 + 0.5f * uniform(random));
    for (int n = 0; n < rows; ++n)
      for (int i = 0; i < columns; ++i)
        w[size_t(n * columns + i)] = e4m3_to_f32(codes[size_t(n * columns + i)]) *
                                     scales[blocks ? size_t(n / 32 * across + i / 48) : 0];
    dense.add(name + ".weight", {rows, columns}, w);
    coded.tensors[name + ".weight"] = {"F8_E4M3", {rows, columns}, Folder::bytes(codes)};
    if (blocks)
      coded.add(name + ".weight_scale_inv", {down, across}, scales);
    else
      coded.add(name + ".weight_scale", {}, scales), coded.add(name + ".input_scale", {}, {1.0f});
  });
}

// The best row that rounds the activations of int4 weights to this many bits.
const GemmVariant& row_of(int bits) {
  for (const GemmVariant* row : gemm_rows())
    if (row->activation_bits(Dtype::int4) == bits) return *row;
  XPYD_CHECK(false);
}

std::vector<float> logits_of(const std::string& dir, const LoadOptions& options, int bits, int chunk,
                             Dtype* matrices = nullptr) {
  LoadedModel loaded(dir, options, 2);
  const LayerWeights& layer = loaded.weights->layers[0];
  if (matrices) *matrices = layer.experts.empty() ? layer.down.dtype : layer.experts.back().down.dtype;
  if (!layer.experts.empty()) CHECK(layer.router.dtype == Dtype::f32);
  loaded.model = make_llama(loaded.weights, loaded.team, 64, 64, {.gemm = &row_of(bits)});
  return run_prompt(*loaded.model, {1, 5, 90, 33, 7, 8, 9, 60, 61, 2, 3}, chunk);
}

std::string refusal(Folder& folder, const LoadOptions& options = {}) {
  const std::string dir = folder.write();
  auto config = load_model_config(dir);
  if (!config) return config.error().message;
  ThreadTeam team(1);
  auto weights = load_weights(dir, config.value(), options, team);
  return weights ? "" : weights.error().message;
}

}  // namespace

TEST_CASE("quantised: a GPTQ or FP8 folder is the model that its codes stand for", "[quantised][model]") {
  struct Form {
    const char* name;
    Dtype dtype;
    bool in_order;
    std::function<void(Folder&, Folder&)> fill;
  };
  const Form forms[] = {
      {"gptq", Dtype::int4, true, [](Folder& c, Folder& d) { fill_gptq(c, d, 32, false, false); }},
      {"gptq_v2", Dtype::int4, true, [](Folder& c, Folder& d) { fill_gptq(c, d, 32, false, true); }},
      {"gptq desc_act", Dtype::int4, false, [](Folder& c, Folder& d) { fill_gptq(c, d, 16, true, false); }},
      {"fp8 of a tensor", Dtype::fp8, true, [](Folder& c, Folder& d) { fill_fp8(c, d, false); }},
      {"fp8 of blocks", Dtype::fp8, true, [](Folder& c, Folder& d) { fill_fp8(c, d, true); }}};
  for (const Form& form : forms)
    for (const bool sparse : {false, true}) {
      CAPTURE(form.name, sparse);
      Folder coded, dense;
      if (sparse) coded.use_experts(), dense.use_experts();
      form.fill(coded, dense);
      const std::string dir = coded.write();
      Dtype kept = Dtype::f32;
      const auto expected = logits_of(dense.write(), {}, 32, 64);
      const auto exact = logits_of(dir, {}, 32, 64, &kept);
      CHECK(kept == form.dtype);
      if (form.in_order) CHECK(same_bits(exact, expected));
      CHECK(relative_error(exact, expected) < 1e-6);
      // Widened at load, other rows of the table compute the same numbers.
      CHECK(same_bits(logits_of(dir, {.weight_dtype = Dtype::f32}, 8, 64, &kept), expected));
      CHECK(kept == Dtype::f32);
      // Activations are rounded to 2^-16 or 2^-8 of the largest of a run. The errors are measured up to 1.1e-4 and
      // 2.1e-2. They also change how much of each expert a token takes.
      for (const auto& [bits, most] : {std::pair(16, 3e-4), {8, sparse ? 0.1 : 0.05}}) {
        CAPTURE(bits);
        const auto dot = logits_of(dir, {}, bits, 64);
        CHECK(relative_error(dot, expected) < most);
        CHECK(same_bits(dot, expected) == (form.dtype == Dtype::fp8));
        for (int chunk : {1, 3}) CHECK(same_bits(logits_of(dir, {}, bits, chunk), dot));
      }
      CHECK(relative_error(logits_of(dir, {.weight_dtype = Dtype::int8}, 8, 64), expected) < (sparse ? 0.06 : 0.03));
    }
}

TEST_CASE("quantised: weights that are quantised at load have the error of their number of bits",
          "[quantised][model]") {
  Folder coded, dense;
  fill_fp8(coded, dense, false);
  const std::string dir = dense.write();
  const auto expected = logits_of(dir, {}, 32, 64);
  const struct {
    Dtype dtype;
    int group;
    double least, most;
  } cases[] = {{Dtype::f16, 0, 1e-5, 1e-3}, {Dtype::bf16, 0, 1e-4, 1e-2}, {Dtype::int8, 0, 1e-4, 2e-2},
               {Dtype::fp8, 0, 1e-3, 1e-1}, {Dtype::int4, 32, 1e-2, 0.3}, {Dtype::int4, 0, 1e-2, 0.4}};
  for (const auto& c : cases) {
    Dtype kept = Dtype::f32;
    const double error = relative_error(
        logits_of(dir, {.weight_dtype = c.dtype, .weight_group = c.group}, 8, 64, &kept), expected);
    CAPTURE(dtype_name(c.dtype), c.group, error);
    CHECK(kept == c.dtype);
    CHECK(error > c.least);
    CHECK(error < c.most);
  }
}

TEST_CASE("quantised: what is wrong with a quantised folder is named", "[quantised][model]") {
  const std::string o = "model.layers.1.self_attn.o_proj", q = "model.layers.0.self_attn.q_proj";
  struct Wrong {
    std::function<void(Folder&)> make;
    std::vector<std::string> says;
  };
  const Wrong of_gptq[] = {
      {[&](Folder& f) { f.tensors.erase(o + ".scales"); }, {o + ".scales", "missing"}},
      {[&](Folder& f) {
         f.tensors[o + ".qzeros"].shape = {4, 4};
       },
       {o + ".qzeros", "shape"}},
      {[&](Folder& f) { f.tensors[o + ".scales"].dtype = "BF16"; }, {o + ".scales", "F16"}},
      {[&](Folder& f) { f.tensors[o + ".g_idx"].data[4] = 9; }, {o + ".g_idx", "group 9"}},
      {[&](Folder& f) { f.tensors[q + ".g_idx"].data[4] = 1; }, {"g_idx", "its groups differ"}},
      {[&](Folder& f) { f.tensors[o + ".scales"].data.replace(0, 2, "\x00\x7c", 2); }, {o + ".scales", "not finite"}},
      {[&](Folder& f) { f.add(o + ".bias", {64}, std::vector<float>(64, 0.5f)); }, {o + ".bias"}},
      {[&](Folder& f) {
         for (const char* part : {".qweight", ".qzeros", ".scales", ".g_idx"}) f.tensors.erase(q + part);
         const int rows = Folder::kHeads * Folder::kHeadDim;
         f.add(q + ".weight", {rows, Folder::kHidden}, std::vector<float>(size_t(rows * Folder::kHidden), 0.1f));
       },
       {q + ".weight", "it is not quantised, but other tensors"}},
      {[](Folder& f) { f.config["quantization_config"]["bits"] = 3; }, {"bits", "3"}},
      {[](Folder& f) { f.config["quantization_config"]["quant_method"] = "awq"; }, {"quant_method", "awq"}},
      {[](Folder& f) { f.config["quantization_config"]["checkpoint_format"] = "marlin"; }, {"marlin"}}};
  const Wrong of_fp8[] = {
      {[&](Folder& f) { f.tensors.erase(o + ".weight_scale_inv"); }, {o + ".weight_scale_inv", "missing"}},
      {[&](Folder& f) { f.tensors[o + ".weight"].data[100] = char(0x7f); }, {o + ".weight", "row 1", "not a number"}},
      {[](Folder& f) { f.config["quantization_config"]["fmt"] = "e5m2"; }, {"e5m2"}}};
  const auto check = [](auto& cases, const std::function<void(Folder&, Folder&)>& make) {
    for (const Wrong& wrong : cases) {
      Folder coded, dense;
      make(coded, dense);
      wrong.make(coded);
      const std::string message = refusal(coded);
      for (const std::string& part : wrong.says) {
        INFO("message: " << message << "; expected: " << part);
        CHECK(message.find(part) != std::string::npos);
      }
    }
  };
  check(of_gptq, [](Folder& c, Folder& d) { fill_gptq(c, d, 32, false, false); });
  check(of_fp8, [](Folder& c, Folder& d) { fill_fp8(c, d, true); });
  // Numbers that no code can represent. up_proj shares one matrix with gate_proj.
  const std::string up = "model.layers.0.mlp.up_proj.weight";
  const std::tuple<std::string, std::string, Dtype, const char*> numbers[] = {
      {up, std::string("\x00\x00\xc0\x7f", 4), Dtype::int8, "\": a weight is not finite or"},
      {up, std::string("\x00\x24\x74\x49", 4), Dtype::f16, "\": a weight exceeds the range of f16"},  // 1e6
      {up, std::string("\x00\x24\x74\x49", 4), Dtype::int4, "\": a weight is not finite or too large"},
      {up, std::string("\x00\x24\x74\x49", 4), Dtype::int8, ""}};
  for (const auto& [name, bytes, dtype, says] : numbers) {
    Folder coded, dense;
    fill_fp8(coded, dense, true);
    dense.tensors[name].data.replace(0, 4, bytes);
    const std::string message = refusal(dense, {.weight_dtype = dtype});
    INFO(message);
    CHECK((*says ? message.find(name + says) != message.npos : message.empty()));
  }
}

}  // namespace xpyd::testing::quantised_test
