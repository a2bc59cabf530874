#include "model/weights/weight_source.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace xpyd::model {
namespace {

using Names = std::set<std::string, std::less<>>;

Error of_tensor(const std::string& tensor, const std::string& what) {
  return invalid("tensor \"" + tensor + "\": " + what);
}

// The f32 rows are the widened codes.
WeightSource of_codes(std::shared_ptr<CodeSource> codes, int columns) {
  auto widened = [codes, columns](int n, float* out) {
    QuantRow row(codes->dtype, columns, codes->groups.count);
    codes->read(n, row);
    widen_row(codes->dtype, codes->groups, row, out);
  };
  return {.rows = widened, .codes = codes};
}

// GPTQ with 4 bits (Frantar et al. 2022, in AutoGPTQ's layout). Eight inputs share a word; outputs are adjacent.
//   qweight [columns / 8, rows] i32: input 8 i + j of an output is in bits 4 j of word i
//   scales  [groups, rows] f16
//   qzeros  [groups, rows / 8] i32: output 8 i + j is in bits 4 j of word i, stored one too small except in "gptq_v2"
//   g_idx   [columns] i32: the group of each input, in any order with desc_act; may be missing without desc_act
class Gptq {
 public:
  static Result<WeightSource> make(const Checkpoint& checkpoint, const Quantization& form, const std::string& name,
                                   int rows, int columns, Names& used) {
    if (rows % 8 != 0 || columns % 8 != 0)
      return of_tensor(name + ".qweight", "of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                              ": expected multiples of 8, because 8 values of 4 bits share a word");
    auto self = std::make_shared<Gptq>();
    self->rows_ = rows, self->columns_ = columns, self->less_one_ = form.zeros_less_one, self->name_ = name;
    auto codes = std::make_shared<CodeSource>();
    codes->dtype = Dtype::int4;
    codes->groups = even_groups(columns, form.group);
    const int groups = codes->groups.count;
    const auto find = [&](const char* part, std::vector<int64_t> shape, std::vector<std::string> dtypes) {
      used.insert(name + part);
      return need(checkpoint.find(name + part, shape, dtypes));
    };
    self->qweight_ = find(".qweight", {columns / 8, rows}, {"I32"});
    self->scales_ = find(".scales", {groups, rows}, {"F16"});
    self->qzeros_ = find(".qzeros", {groups, rows / 8}, {"I32"});
    if (checkpoint.entry(name + ".g_idx") || form.act_order) {
      codes->groups.of.resize(size_t(columns));
      need(find(".g_idx", {columns}, {"I32"}).read_bytes(0, size_t(columns) * 4, codes->groups.of.data()));
      for (int32_t g : codes->groups.of)
        if (g < 0 || g >= groups)
          return of_tensor(name + ".g_idx", "it names group " + std::to_string(g) + " of " + std::to_string(groups));
    }
    codes->open = [self] { return self->open(); };
    codes->close = [self] { self->close(); };
    codes->read = [self](int n, QuantRow& row) { self->read(n, row); };
    return of_codes(std::move(codes), columns);
  }

 private:
  Status open() try {
    const auto take = [](const TensorHandle& from, auto& to) {
      to.resize((from.entry->end - from.entry->begin) / sizeof to[0]);
      need(from.read_bytes(0, to.size() * sizeof to[0], to.data()));
    };
    take(qweight_, words_), take(scales_, scale_), take(qzeros_, zeros_);
    for (uint16_t scale : scale_)
      if (!std::isfinite(f16_to_f32(scale))) return of_tensor(name_ + ".scales", "a scale is not finite");
    return ok();
  } catch (const Error& error) {
    return error;
  }
  void close() {  // frees their memory, too
    words_ = std::vector<uint32_t>(), zeros_ = std::vector<uint32_t>(), scale_ = std::vector<uint16_t>();
  }
  void read(int n, QuantRow& row) const {
    const size_t width = size_t(rows_), output = size_t(n);
    for (size_t i = 0; i < size_t(columns_); i += 8) {
      const uint32_t word = words_[i / 8 * width + output];
      for (size_t j = 0; j < 8; ++j) row.codes[i + j] = uint8_t(word >> (4 * j) & 15);
    }
    for (size_t g = 0; g < row.scale.size(); ++g) {
      row.scale[g] = f16_to_f32(scale_[g * width + output]);
      row.zero[g] = uint8_t((zeros_[(g * width + output) / 8] >> (output % 8 * 4) & 15) + less_one_);
    }
  }

  int rows_ = 0, columns_ = 0;
  bool less_one_ = true;
  std::string name_;
  TensorHandle qweight_, scales_, qzeros_;
  std::vector<uint32_t> words_, zeros_;  // filled between open() and close()
  std::vector<uint16_t> scale_;
};

// FP8: NAME.weight is e4m3. NAME.weight_scale_inv has one scale per block; NAME.weight_scale has one per tensor or
// output. In both cases the weight is the code times the scale, whatever the name suggests. NAME.input_scale is
// ignored, because activations are not rounded to fp8.
Result<WeightSource> make_fp8(const Checkpoint& checkpoint, const Quantization& form, const std::string& name, int rows,
                              int columns, ReadErrors& errors, Names& used) {
  used.insert({name + ".weight", name + ".input_scale"});
  const TensorHandle weight = need(checkpoint.find(name + ".weight", {rows, columns}, {"F8_E4M3"}));
  auto codes = std::make_shared<CodeSource>();
  codes->dtype = Dtype::fp8;
  const bool blocks = form.block_rows > 0;
  codes->groups = even_groups(columns, form.block_columns);
  const std::string scale_name = name + (blocks ? ".weight_scale_inv" : ".weight_scale");
  const int groups = codes->groups.count, block_rows = blocks ? form.block_rows : 1;
  std::vector<int64_t> shape = {(rows + block_rows - 1) / block_rows, groups};
  if (const TensorEntry* there = checkpoint.entry(scale_name); there && !blocks)
    for (const std::vector<int64_t>& other : {std::vector<int64_t>{}, {1}, {1, 1}, {rows}})
      if (there->shape == other) shape = other;
  used.insert(scale_name);
  const TensorHandle handle = need(checkpoint.find(scale_name, shape));
  int64_t count = 1;
  for (int64_t n : shape) count *= n;
  std::vector<float> scales(static_cast<size_t>(count));
  need(handle.read(0, int(count), scales.data()));
  for (float scale : scales)
    if (!(std::abs(scale) <= 0x1p119f))
      return of_tensor(scale_name, "a scale is not finite, or its magnitude exceeds 2^119");
  codes->read = [=, scales = std::move(scales), tensor = name + ".weight", &errors](int n, QuantRow& row) {
    if (Status status = weight.read_bytes(uint64_t(n) * uint64_t(columns), size_t(columns), row.codes.data());
        !status) {
      std::fill(row.codes.begin(), row.codes.end(), uint8_t{0});
      errors.keep(status);
    }
    if (std::any_of(row.codes.begin(), row.codes.end(), [](uint8_t code) { return (code & 0x7f) == 0x7f; }))
      errors.keep(of_tensor(tensor, "row " + std::to_string(n) + " has a weight that is not a number"));
    const size_t first = scales.size() == 1 ? 0 : size_t(n / block_rows * groups);
    for (size_t g = 0; g < row.scale.size(); ++g) row.scale[g] = scales[first + (scales.size() == 1 ? 0 : g)];
  };
  return of_codes(std::move(codes), columns);
}

}  // namespace

Result<WeightSource> dense_source(const Checkpoint& checkpoint, const std::string& tensor,
                                  const std::vector<int64_t>& shape, int columns, ReadErrors& errors, Names& used) {
  used.insert(tensor);
  Result<TensorHandle> found = checkpoint.find(tensor, shape);
  if (!found) return found.error();
  auto read = [handle = found.value(), columns, &errors](int row, float* out) {
    Status status = handle.read(int64_t(row) * columns, columns, out);
    if (status) return;
    std::fill(out, out + columns, 0.0f);
    errors.keep(status);
  };
  const std::string& in_file = found.value().entry->dtype;
  const Dtype dtype = in_file == "F32" ? Dtype::f32 : in_file == "F16" ? Dtype::f16 : Dtype::bf16;
  auto elements = [handle = found.value(), bytes = size_t(columns) * dtype_bytes(dtype), &errors](int row,
                                                                                                  std::byte* out) {
    Status status = handle.read_bytes(uint64_t(row) * bytes, bytes, out);
    if (status) return;
    std::fill(out, out + bytes, std::byte{0});
    errors.keep(status);
  };
  return WeightSource{read, dtype, elements, nullptr};
}

Result<WeightSource> matrix_source(const Checkpoint& checkpoint, const Quantization& form, const std::string& name,
                                   int rows, int columns, ReadErrors& errors, Names& used) try {
  const TensorEntry* dense = checkpoint.entry(name + ".weight");
  const bool codes = checkpoint.entry(name + ".qweight") || (!dense && rows % 8 == 0 && columns % 8 == 0);
  if (form.method == Quantization::Method::gptq && codes)
    return Gptq::make(checkpoint, form, name, rows, columns, used);
  if (form.method == Quantization::Method::fp8 && dense && dense->dtype == "F8_E4M3")
    return make_fp8(checkpoint, form, name, rows, columns, errors, used);
  return dense_source(checkpoint, name + ".weight", {rows, columns}, columns, errors, used);
} catch (const Error& error) {
  return error;
}

}  // namespace xpyd::model
