#include <cmath>

#include "model/attention_row_cuda.h"
#include "model/model_cuda.h"

namespace xpyd {
namespace {

const CudaAttentionVariant* find_variant(const std::string& name, CudaAttentionVariant::Phase phase) {
  for (const CudaAttentionVariant& variant : cuda_attention_variants())
    if (variant.phase == phase && variant.name == name) return &variant;
  return nullptr;
}

}  // namespace

CudaAttentionArgs attention_args(const ModelConfig& config, Dtype activations, const KvLayout& layout,
                                 bool contiguous) {
  CudaAttentionArgs args;
  args.dtype = activations;
  args.layout = layout;
  args.step.contiguous = contiguous;
  args.n_heads = config.n_heads;
  args.sliding_window = config.sliding_window;
  args.scale = float(1 / std::sqrt(double(config.head_dim)));
  return args;
}

Result<const CudaAttentionVariant*> attention_row(CudaAttentionVariant::Phase phase, const std::string& name,
                                                  const CudaAttentionArgs& args, const cuda::Card& card) {
  if (name == "auto") return &default_cuda_attention(phase, args, card);
  const bool decode = phase == CudaAttentionVariant::decode;
  const CudaAttentionVariant* found = find_variant(name, phase);
  if (!found && decode) found = find_variant(name, CudaAttentionVariant::prefill);
  const std::string option = decode ? "decode attention: " : "prefill attention: ";
  if (!found) {
    std::string names = "auto";
    for (const CudaAttentionVariant& v : cuda_attention_variants())
      if (v.phase == phase) names += std::string(", ") + v.name;
    return invalid(option + "no variant \"" + name + "\"; expected one of " + names);
  }
  if (const char* why = found->refuses(args, card)) return invalid(option + name + " " + why);
  return found;
}

Status check_cuda_attention(const CudaModelOptions& options, const ModelConfig& config, Dtype activations,
                            const KvLayout& layout, bool contiguous, const cuda::Card& card) {
  const CudaAttentionArgs args = attention_args(config, activations, layout, contiguous);
  auto prefill = attention_row(CudaAttentionVariant::prefill, options.prefill_attention, args, card);
  if (!prefill) return prefill.error();
  auto decode = attention_row(CudaAttentionVariant::decode, options.decode_attention, args, card);
  if (!decode) return decode.error();
  return ok();
}

}  // namespace xpyd
