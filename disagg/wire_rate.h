// What a byte costs on an instance's wire, over its last posts: from each post to its end, time in
// which several are under way counted once. The end is when the poster sees it; where that is
// between two layers of the next prompt, up to a layer's computation too late.
//
// Thread safety: none.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace xpyd::disagg {

class WireRate {
 public:
  void done(double post_s, double end_s, size_t bytes) {
    const double busy_s = end_s - std::max(post_s, last_end_s_);
    last_end_s_ = std::max(last_end_s_, end_s);
    Sample& sample = samples_[n_++ % samples_.size()];
    seconds_ += std::max(0.0, busy_s) - sample.seconds;
    bytes_ += double(bytes) - sample.bytes;
    sample = {std::max(0.0, busy_s), double(bytes)};
  }
  double s_per_byte() const { return bytes_ > 0 ? std::max(0.0, seconds_) / bytes_ : 0; }

 private:
  struct Sample {
    double seconds = 0, bytes = 0;
  };
  std::array<Sample, 64> samples_ = {};
  size_t n_ = 0;
  double seconds_ = 0, bytes_ = 0;  // of the samples
  double last_end_s_ = 0;
};

}  // namespace xpyd::disagg
