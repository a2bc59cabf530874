// Products at the shapes of an 8-billion-parameter Llama: bf16 as models compute it, beside cuBLASLt's fastest
// algorithm and our kernel for few rows; and products of quantised weights beside the bf16 product that they replace.
//
// Expected on an H200 (4.3 TB/s of copies, 700 of 790 TFLOP/s): W of gate and up, 28,672 x 4,096, is 235 MB in bf16, 55
// us; 117 MB in int8 and fp8, 27 us; 62 MB in int4 with scales, 14 us, but 16 us at the 3.9 TB/s that its instructions
// allow. So with few rows the speed is 2 and 3.4 times that of bf16, until reading x from L2 takes as long. 2,048 rows
// are 0.48 TFLOP, 0.69 ms; mma.sync reaches at most 0.6 of the tensor cores' rate, 1.1 ms, so 0.6.
#include <algorithm>
#include <cmath>

#include "experiments/gpu/rounds.h"
#include "model/cuda/peak_cuda.h"
#include "model/cuda/quantised_gemm_cuda.h"

namespace xpyd::experiments::gpu {
namespace {

constexpr uint64_t kInputs = 11, kWeights = 12;  // arrays of random_element()

// Any code for any output, with zeros and scales of all sizes. The check computes them again.
void read_codes(Dtype dtype, const QuantGroups& groups, int n, QuantRow& row) {
  for (size_t k = 0; k < row.codes.size(); ++k) {
    const auto bits = uint8_t(mix64((uint64_t(n) << 32) + k));
    row.codes[k] = dtype == Dtype::int4 ? bits & 15 : dtype == Dtype::fp8 && (bits & 0x7f) == 0x7f ? 0 : bits;
  }
  for (int g = 0; g < groups.count; ++g) {
    row.scale[size_t(g)] = float(1 + (n + g) % 7) * 0x1p-10f;
    if (dtype != Dtype::fp8) row.zero[size_t(g)] = dtype == Dtype::int8 ? 128 : uint8_t((n + g) % 17);
  }
}

struct QuantisedRow {
  const char* name;
  Dtype dtype;
  int group;
};
constexpr QuantisedRow kForms[] = {{"int8", Dtype::int8, 0}, {"int4 of 128", Dtype::int4, 128}, {"fp8", Dtype::fp8, 0}};

// Checks some outputs of some rows. weights(n) returns the true row n.
template <class Weights>
std::string wrong(const cuda::Memory& y, int n, int k, int m, cuda::Stream& stream, Weights weights) {
  cuda::Memory host = cuda::Memory::pinned(y.size());
  cuda::copy(host.data(), y.data(), y.size(), stream);
  stream.wait();
  for (int output : {0, 7, n / 3, n / 2 + 8, n - 1}) {
    const std::vector<float> w = weights(output);
    for (int row : {0, m / 2, m - 1}) {
      double sum = 0, terms = 0;
      for (int i = 0; i < k; ++i) {
        const double term = double(to_f32(random_element(kInputs, size_t(row) * size_t(k) + size_t(i)))) *
                            double(w[size_t(i)]);
        sum += term, terms += std::fabs(term);
      }
      const double got = to_f32(host.as<bf16>()[size_t(row) * size_t(n) + size_t(output)]);
      if (!(std::fabs(got - sum) <= (2 * k + 8) * 0x1p-24 * terms + 0x1p-8 * std::fabs(sum)))
        return "output " + std::to_string(output) + " of row " + std::to_string(row) + " is " + std::to_string(got) +
               ", expected " + std::to_string(sum);
    }
  }
  return "";
}

struct OnCard {
  cuda::Memory data;
  CudaMatrix matrix;
};
OnCard make(const QuantisedRow& form, int n, int k, ThreadTeam& team, cuda::Stream& stream) {
  const QuantGroups groups = even_groups(k, form.group);
  const PackedMatrix packed = pack_codes(
      n, k, 1, form.dtype, groups, [&](int row, QuantRow& out) { read_codes(form.dtype, groups, row, out); }, team);
  const CodeTiles tiles = lay_out_tiles(packed);
  const size_t bytes = size_t(tiles.bytes);
  cuda::Memory host = cuda::Memory::pinned(bytes * size_t(tiles.n_tiles));
  team.run([&](int rank) {
    const Range mine = share(tiles.n_tiles, rank, team.size());
    for (int t = mine.begin; t < mine.end; ++t) write_tile(packed, tiles, t, host.data() + size_t(t) * bytes);
  });
  OnCard made{cuda::Memory::device(host.size()).value(), {}};
  cuda::copy(made.data.data(), host.data(), host.size(), stream);
  stream.wait();
  made.matrix = {made.data.data(), n, k, tiles.bytes, tiles.codes};
  return made;
}

}  // namespace

void products(Rounds& rounds, const cuda::Card&, bool tiny) {
  cuda::Stream& stream = rounds.stream();
  ThreadTeam team(tiny ? 1 : 16);
  const int most = tiny ? 70 : 2048;
  for (auto [name, n, k] : {std::tuple("o", 4096, 4096), {"gate_up", 28672, 4096}, {"down", 4096, 14336}}) {
    if (tiny) n = 48, k = 256;
    cuda::Memory w = cuda::Memory::device(size_t(n) * size_t(k) * sizeof(bf16)).value(),
                 x = cuda::Memory::device(size_t(most) * size_t(k) * sizeof(bf16)).value();
    fill_random(w.data(), size_t(n) * size_t(k), kWeights, 1, stream);
    fill_random(x.data(), size_t(most) * size_t(k), kInputs, 1, stream);
    std::vector<OnCard> coded;
    for (const QuantisedRow& form : kForms) coded.push_back(make(form, n, k, team, stream));
    CudaGemm gemm(stream), any_order(stream, false);
    CudaGemmArgs args{.x = x.data(),
                      .w = {w.data(), n, k, k},
                      .x_dtype = Dtype::bf16,
                      .y_dtype = Dtype::bf16,
                      .x_stride = k,
                      .y_stride = n};
    for (CudaGemm* each : {&gemm, &any_order}) {
      const Status prepared = each->prepare(args, most);
      XPYD_CHECK(prepared.ok(), prepared.ok() ? "" : prepared.error().message);
    }
    for (int m : {1, 8, 16, 64, most}) {
      const std::string shape = std::string("8B ") + name + ", " + std::to_string(m) + " rows";
      cuda::Memory y = cuda::Memory::device(size_t(m) * size_t(n) * sizeof(bf16)).value();
      args.y = y.data(), args.m = m;
      const double around = double(sizeof(bf16)) * m * (double(n) + k), flops = 2.0 * m * n * k;
      std::vector<Case> cases = {
          {.name = shape + ", bf16",
           .run = [&gemm, args] { gemm.run(args); },
           .check =
               [&] {
                 return wrong(y, n, k, m, stream, [&](int output) {
                   std::vector<float> row;
                   for (int i = 0; i < k; ++i)
                     row.push_back(to_f32(random_element(kWeights, size_t(output) * size_t(k) + size_t(i))));
                   return row;
                 });
               },
           .work = {.bytes = double(w.size()) + around, .flops = flops},
           .limit = Limit::roofline}};
      // These cases show the cost of one fixed order of additions, and the gain of our kernel for few rows.
      const auto dense = [&](const char* what, std::function<void()> run) {
        Case beside = cases[0];
        beside.name = shape + ", " + what, beside.run = std::move(run), beside.versus = cases[0].name;
        cases.push_back(std::move(beside));
      };
      dense("bf16, cuBLASLt's fastest", [&any_order, args] { any_order.run(args); });
      if (cuda_gemv_takes(args)) dense("bf16, gemv", [&stream, args] { cuda_gemv(args, stream); });
      for (size_t i = 0; i < coded.size(); ++i) {
        CudaGemmArgs of_codes = args;
        of_codes.w = coded[i].matrix;
        cases.push_back({.name = shape + ", " + kForms[i].name,
                         .run = [&stream, of_codes] { cuda_quantised_gemm(of_codes, stream); },
                         .check =
                             [&, form = kForms[i]] {
                               return wrong(y, n, k, m, stream, [&](int output) {
                                 const QuantGroups groups = even_groups(k, form.group);
                                 QuantRow codes(form.dtype, k, groups.count);
                                 read_codes(form.dtype, groups, output, codes);
                                 std::vector<float> row(static_cast<size_t>(k));
                                 widen_row(form.dtype, groups, codes, row.data());
                                 return row;
                               });
                             },
                         .work = {.bytes = double(coded[i].data.size()) + around, .flops = flops},
                         .limit = Limit::roofline,
                         .versus = cases[0].name});
      }
      rounds.measure(cases);
    }
    if (tiny) return;
  }
}

}  // namespace xpyd::experiments::gpu
