#include "allocator/kv_copy.h"

#include "base/status.h"

namespace xpyd {

void add_block_copies(std::byte* dst_pool, const KvLayout& dst, int dst_block,
                      const std::byte* src_pool, const KvLayout& src, int src_block, int begin,
                      int end, std::vector<Copy>& copies) {
  XPYD_CHECK(dst.shape == src.shape && dst.order == src.order &&
             dst.block_tokens == src.block_tokens);
  XPYD_CHECK(0 <= begin && begin <= end && end <= src.block_tokens);
  // Tokens of a block lie token_stride apart without gaps: per plane, or all planes of a token
  // together.
  size_t bytes = size_t(end - begin) * src.token_stride();
  if (bytes == 0) return;
  int planes = src.order == KvOrder::layer_major ? 2 * src.shape.n_layers : 1;
  for (int p = 0; p < planes; ++p)
    copies.push_back({src_pool + src.offset(src_block, p / 2, p % 2, begin, 0),
                      dst_pool + dst.offset(dst_block, p / 2, p % 2, begin, 0), bytes});
}

}  // namespace xpyd
