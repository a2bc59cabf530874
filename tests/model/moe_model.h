// A small random Mixtral or Qwen3-MoE folder, and what it computes in double precision, from the tensors as they are
// written and from the papers' formulas alone.
#pragma once

#include <algorithm>
#include <cmath>

#include "base/dtype.h"
#include "base/random.h"
#include "tests/model/model_folder.h"

namespace xpyd::testing {

struct MoeModel : ModelFolder {
  using Row = std::vector<double>;
  static constexpr int kHidden = 36, kHeads = 4, kKvHeads = 2, kHeadDim = 10, kVocab = 97, kDense = 44;
  const bool mixtral;
  const int layers, experts, used, inner;
  std::map<std::string, std::vector<float>> values;  // as stored

  // `dtype`: F32, BF16 or F16. Layer 1 of a Qwen3-MoE folder is dense.
  explicit MoeModel(const std::string& family, const std::string& dtype = "F32", int n_layers = 3, int vocab = kVocab)
      : mixtral(family == "mixtral"),
        layers(n_layers),
        experts(mixtral ? 5 : 9),
        used(mixtral ? 2 : 3),
        inner(mixtral ? 30 : 21),
        vocab_(vocab) {
    config = {{"model_type", family},
              {"hidden_size", kHidden},
              {"intermediate_size", mixtral ? inner : kDense},
              {"num_attention_heads", kHeads},
              {"num_key_value_heads", kKvHeads},
              {"head_dim", kHeadDim},
              {"vocab_size", vocab},
              {"max_position_embeddings", 512},
              {"num_hidden_layers", layers},
              {"rms_norm_eps", 1e-5},
              {"rope_theta", 1e4},
              {"num_experts_per_tok", used}};
    config[mixtral ? "num_local_experts" : "num_experts"] = experts;
    if (!mixtral) config.update({{"moe_intermediate_size", inner}, {"mlp_only_layers", {1}}, {"norm_topk_prob", true}});
    const int q = kHeads * kHeadDim, kv = kKvHeads * kHeadDim;
    matrix("model.embed_tokens", vocab, kHidden, dtype, 30);
    matrix("lm_head", vocab, kHidden, dtype);
    norm("model.norm", kHidden, dtype);
    for (int i = 0; i < layers; ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".", attention = at + "self_attn.";
      norm(at + "input_layernorm", kHidden, dtype), norm(at + "post_attention_layernorm", kHidden, dtype);
      matrix(attention + "q_proj", q, kHidden, dtype, 3), matrix(attention + "k_proj", kv, kHidden, dtype, 3);
      matrix(attention + "v_proj", kv, kHidden, dtype), matrix(attention + "o_proj", kHidden, q, dtype);
      if (!mixtral) norm(attention + "q_norm", kHeadDim, dtype), norm(attention + "k_norm", kHeadDim, dtype);
      if (!sparse(i)) {
        mlp(at + "mlp.", "gate_proj", "up_proj", "down_proj", kDense, dtype);
        continue;
      }
      const std::string block = at + (mixtral ? "block_sparse_moe." : "mlp.");
      matrix(block + "gate", experts, kHidden, dtype, 4);
      for (int e = 0; e < experts; ++e) {
        const std::string of = block + "experts." + std::to_string(e) + ".";
        mixtral ? mlp(of, "w1", "w3", "w2", inner, dtype) : mlp(of, "gate_proj", "up_proj", "down_proj", inner, dtype);
      }
    }
  }

  // Logits of every token, [tokens, vocab].
  std::vector<float> logits(const std::vector<int32_t>& tokens) const {
    std::vector<Row> x;
    for (int32_t id : tokens) {
      const auto row = values.at("model.embed_tokens.weight").begin() + id * kHidden;
      x.emplace_back(row, row + kHidden);
    }
    for (int i = 0; i < layers; ++i) {
      const std::string at = "model.layers." + std::to_string(i) + ".";
      std::vector<Row> normed;
      for (const Row& row : x) normed.push_back(normalised(row, at + "input_layernorm"));
      const std::vector<Row> attended = attention(normed, at + "self_attn.");
      for (size_t t = 0; t < x.size(); ++t) {
        add(x[t], product(attended[t], at + "self_attn.o_proj"));
        add(x[t], block(normalised(x[t], at + "post_attention_layernorm"), at, i));
      }
    }
    std::vector<float> all;
    for (const Row& row : x)
      for (double logit : product(normalised(row, "model.norm"), "lm_head")) all.push_back(float(logit));
    return all;
  }
  std::vector<int32_t> greedy(std::vector<int32_t> tokens, int n) const {
    const size_t prompt = tokens.size();
    for (int i = 0; i < n; ++i) {
      const std::vector<float> all = logits(tokens);
      const auto last = all.end() - vocab_;
      tokens.push_back(int32_t(std::max_element(last, all.end()) - last));
    }
    return {tokens.begin() + ptrdiff_t(prompt), tokens.end()};
  }

 private:
  bool sparse(int layer) const { return mixtral || layer != 1; }

  void store(const std::string& name, std::vector<int64_t> shape, std::vector<float> v, const std::string& dtype) {
    std::vector<uint16_t> halves;
    for (float& x : v) {
      if (dtype == "BF16") halves.push_back(to_bf16(x).bits), x = to_f32(to_bf16(x));
      if (dtype == "F16") halves.push_back(nearest_f16(x)), x = f16_to_f32(nearest_f16(x));
    }
    tensors[name] = {dtype, std::move(shape), halves.empty() ? bytes(v) : bytes(halves)};
    values[name] = std::move(v);
  }
  // Uniform, of variance gain / columns.
  void matrix(const std::string& name, int rows, int columns, const std::string& dtype, double gain = 1) {
    std::vector<float> v(size_t(rows) * size_t(columns));
    const double most = std::sqrt(3 * gain / columns);
    for (float& x : v) x = float((2 * random_.uniform() - 1) * most);
    store(name + ".weight", {rows, columns}, std::move(v), dtype);
  }
  void norm(const std::string& name, int n, const std::string& dtype) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = float(0.8 + 0.4 * random_.uniform());
    store(name + ".weight", {n}, std::move(v), dtype);
  }
  void mlp(const std::string& at, const char* gate, const char* up, const char* down, int n, const std::string& dtype) {
    matrix(at + gate, n, kHidden, dtype), matrix(at + up, n, kHidden, dtype), matrix(at + down, kHidden, n, dtype);
  }

  Row product(const Row& x, const std::string& name) const {
    const std::vector<float>& w = values.at(name + ".weight");
    Row y(w.size() / x.size());
    for (size_t n = 0; n < y.size(); ++n)
      for (size_t k = 0; k < x.size(); ++k) y[n] += double(w[n * x.size() + k]) * x[k];
    return y;
  }
  Row normalised(Row x, const std::string& name) const {
    double squares = 0;
    for (double v : x) squares += v * v;
    for (size_t i = 0; i < x.size(); ++i)
      x[i] *= double(values.at(name + ".weight")[i]) / std::sqrt(squares / double(x.size()) + 1e-5);
    return x;
  }
  static void add(Row& x, const Row& y, double weight = 1) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += weight * y[i];
  }
  std::vector<Row> heads(const Row& x, const std::string& head_norm, size_t position) const {
    std::vector<Row> all;
    for (size_t at = 0; at < x.size(); at += kHeadDim) {
      const auto from = x.begin() + ptrdiff_t(at);
      Row head(from, from + kHeadDim), turned(kHeadDim);
      if (!mixtral) head = normalised(head, head_norm);
      for (size_t j = 0; j < kHeadDim / 2; ++j) {
        const double angle = double(position) * std::pow(1e4, -2.0 * double(j) / kHeadDim);
        const double a = head[j], b = head[j + kHeadDim / 2];
        turned[j] = a * std::cos(angle) - b * std::sin(angle);
        turned[j + kHeadDim / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
      all.push_back(turned);
    }
    return all;
  }
  std::vector<Row> attention(const std::vector<Row>& normed, const std::string& at) const {
    std::vector<std::vector<Row>> k;
    std::vector<Row> v, out;
    for (size_t t = 0; t < normed.size(); ++t) {
      k.push_back(heads(product(normed[t], at + "k_proj"), at + "k_norm", t));
      v.push_back(product(normed[t], at + "v_proj"));
      const std::vector<Row> q = heads(product(normed[t], at + "q_proj"), at + "q_norm", t);
      out.emplace_back();
      for (size_t h = 0; h < kHeads; ++h) {
        const size_t kv = h * kKvHeads / kHeads;
        Row sum(kHeadDim);
        double total = 0;
        for (size_t s = 0; s <= t; ++s) {
          double score = 0;
          for (size_t d = 0; d < kHeadDim; ++d) score += q[h][d] * k[s][kv][d];
          const double p = std::exp(score / std::sqrt(double(kHeadDim)));
          total += p;
          for (size_t d = 0; d < kHeadDim; ++d) sum[d] += p * v[s][kv * kHeadDim + d];
        }
        for (double d : sum) out.back().push_back(d / total);
      }
    }
    return out;
  }
  Row gated(const Row& x, const std::string& at, const char* gate, const char* up, const char* down) const {
    Row g = product(x, at + gate);
    const Row u = product(x, at + up);
    for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
    return product(g, at + down);
  }
  Row block(const Row& x, const std::string& layer, int i) const {
    if (!sparse(i)) return gated(x, layer + "mlp.", "gate_proj", "up_proj", "down_proj");
    const std::string at = layer + (mixtral ? "block_sparse_moe." : "mlp.");
    Row p = product(x, at + "gate"), sum(x.size());
    for (double& score : p) score = std::exp(score);
    double total = 0, of_used = 0;
    for (double share : p) total += share;
    std::vector<size_t> order(p.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
    order.resize(size_t(used));
    for (size_t e : order) of_used += p[e];
    const bool renormalise = mixtral || config["norm_topk_prob"] == true;
    for (size_t e : order) {
      const std::string of = at + "experts." + std::to_string(e) + ".";
      add(sum, mixtral ? gated(x, of, "w1", "w3", "w2") : gated(x, of, "gate_proj", "up_proj", "down_proj"),
          p[e] / (renormalise ? of_used : total));
    }
    return sum;
  }

  const int vocab_;
  Random random_{31};
};

}  // namespace xpyd::testing
