// The measured peaks of this machine's CPU: the denominators of every printed share. They are measured and never looked
// up. A shared machine's speed varies by 10-25 % between runs, so a bench measures them again beside what it compares.
// A card's are in model/cuda/peak_cuda.h. GB/s are 10^9 bytes a second ("gbps"), GFLOP/s 10^9 operations.
//
// Thread safety: each function is called by the owner of the team that it is given.
#pragma once

#include <string>

#include "base/memory.h"
#include "base/thread_team.h"

namespace xpyd {

struct PeakRow {
  int n_threads = 0;
  double fma_gflops = 0;  // f32 multiply-adds in registers only, two operations each
  double read_gbps = 0;   // streaming read of memory far larger than any cache, several rows at once
  double copy_gbps = 0;   // non-temporal copy, each byte counted once
  // The rates of instructions that multiply pairs of bfloat16 and add them in f32 (VDPBF16PS), or groups of four bytes
  // in int32 (VPDPBUSD); 0 if this processor has none.
  double bf16_dot_gflops = 0, int8_dot_gops = 0;
};

struct Peak {
  std::string machine;  // the processor's name
  std::string isa;      // the newest instruction set of the measured loops: "avx2"
  PeakRow one, all;     // on one thread, on all threads of the team
};

// The single measurements, for benches that interleave them. Owns the memory that is read and copied.
class PeakProbe {
 public:
  explicit PeakProbe(size_t bytes = size_t(256) << 20);
  double fma_gflops(ThreadTeam& team);  // about 8 ms, as the next two
  double bf16_dot_gflops(ThreadTeam& team);
  double int8_dot_gops(ThreadTeam& team);
  double read_gbps(ThreadTeam& team);  // one pass over all bytes, about 10 ms
  double copy_gbps(ThreadTeam& team);  // one half over the other
  static const char* isa();

 private:
  Buffer buffer_;
};

// Medians of interleaved rounds on one thread and on the whole team; about 2 s.
Peak measure_peak(ThreadTeam& team);

std::string to_text(const Peak& peak);  // a small table
std::string to_json(const Peak& peak);  // one object

}  // namespace xpyd
