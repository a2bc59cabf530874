#include "attention/attention_reference.h"

#include "attention/kv_row.h"

namespace xpyd {

void attention_reference(const AttentionArgs& args) {
  attention_reference_over(args, [&](int seq, int kv, int token, int head, int d) {
    const KvView& view = args.views[size_t(seq)];
    const KvShape& shape = view.layout->shape;
    return double(kv_element(shape.dtype, shape.head_dim, view.row(args.layer, kv, token, head), d));
  });
}

}  // namespace xpyd
