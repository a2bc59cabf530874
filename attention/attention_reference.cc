#include "attention/attention_reference.h"

#include <cstring>

namespace xpyd {

void attention_reference(const AttentionArgs& args) {
  attention_reference_over(args, [&](int seq, int kv, int token, int head, int d) {
    const KvView& view = args.views[size_t(seq)];
    const std::byte* row = view.row(args.layer, kv, token, head);
    if (view.layout->shape.dtype == Dtype::f32)
      return double(reinterpret_cast<const float*>(row)[d]);
    return double(to_f32(reinterpret_cast<const bf16*>(row)[d]));
  });
}

}  // namespace xpyd
