// Our GEMM beside Debian's OpenBLAS, BLIS and oneDNN, interleaved in one process. `make bench-peers` runs it.
//
// A fair comparison needs this:
//  - OpenBLAS and BLIS export the same names, so each is opened with RTLD_LOCAL.
//  - OpenBLAS counts the cpus when it is loaded, and threads inherit the affinity of the thread that makes them. So all
//    libraries are loaded and warmed up before anything is pinned, and then every thread of theirs is pinned. Without
//    pinning, BLIS loses half of its speed here.
//  - Their threads spin for a while after a call, so the harness pauses before each sample.
//  - Weights rotate through more than 256 MiB on every side. Ours are bf16 and theirs f32, because none of the three
//    has a bf16 product for AVX2. With few rows, half of our lead is that we read half of the bytes.
#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <dnnl.hpp>
#include <memory>
#include <set>

#include "experiments/bench/gemm_case.h"
#include "experiments/bench/harness.h"

namespace xpyd::experiments {
namespace {

void* open_library(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  std::fprintf(stderr, "bench-peers: cannot load %s: %s\n", *names.begin(), dlerror());
  std::exit(2);
}

template <class Fn>
Fn symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    std::fprintf(stderr, "bench-peers: %s\n", dlerror());
    std::exit(2);
  }
  return reinterpret_cast<Fn>(found);
}

// Computes row-major y[m, n] = x[m, k] W[n, k]^T.
using Sgemm = void (*)(int order, int trans_x, int trans_w, int m, int n, int k, float alpha, const float* x, int ldx,
                       const float* w, int ldw, float beta, float* y, int ldy);

struct Libraries {
  void* openblas = open_library({"openblas-pthread/libopenblas.so.0",
                                 "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0", "libopenblas.so.0"});
  void* blis = open_library({"/usr/lib/x86_64-linux-gnu/blis-openmp/libblis.so.4", "libblis.so.4"});
  void* openmp = open_library({"libgomp.so.1"});  // BLIS and oneDNN share its thread pool
  Sgemm openblas_sgemm = symbol<Sgemm>(openblas, "cblas_sgemm");
  Sgemm blis_sgemm = symbol<Sgemm>(blis, "cblas_sgemm");

  void set_threads(int n) {
    symbol<void (*)(int)>(openblas, "openblas_set_num_threads")(n);
    symbol<void (*)(long)>(blis, "bli_thread_set_num_threads")(n);
    symbol<void (*)(int)>(openmp, "omp_set_num_threads")(n);
  }
};

void call(Sgemm sgemm, const GemmCase& c, const float* w) {
  sgemm(101, 111, 112, c.m, c.n, c.k, 1.0f, c.x.data(), c.k, w, c.k, 0.0f, c.y0, c.n);
}

// oneDNN's matmul primitive. `packed` uses the weight layout that it prefers.
class DnnlMatmul {
 public:
  DnnlMatmul(const GemmCase& c, const std::vector<const float*>& weights, bool packed)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    using dnnl::memory;
    auto f32 = memory::data_type::f32;
    memory::desc x({c.m, c.k}, f32, memory::dims{c.k, 1});
    memory::desc plain({c.k, c.n}, f32, memory::dims{1, c.k});
    memory::desc any({c.k, c.n}, f32, memory::format_tag::any);
    memory::desc y({c.m, c.n}, f32, memory::dims{c.n, 1});
    dnnl::matmul::primitive_desc primitive(dnnl::matmul::desc(x, packed ? any : plain, y), engine_);
    matmul_ = dnnl::matmul(primitive);
    x_ = memory(x, engine_, const_cast<float*>(c.x.data()));
    y_ = memory(y, engine_, c.y0);
    for (const float* w : weights) {
      memory given(plain, engine_, const_cast<float*>(w));
      if (packed) {
        memory own(primitive.weights_desc(), engine_);
        dnnl::reorder(given, own).execute(stream_, given, own);
        stream_.wait();
        given = own;
      }
      weights_.push_back(given);
    }
  }
  void run(size_t turn) {
    matmul_.execute(stream_, {{DNNL_ARG_SRC, x_}, {DNNL_ARG_WEIGHTS, weights_[turn]}, {DNNL_ARG_DST, y_}});
    stream_.wait();
  }

 private:
  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  dnnl::memory x_, y_;
  std::vector<dnnl::memory> weights_;
};

std::set<int> thread_ids() {
  std::set<int> ids;
  if (DIR* dir = opendir("/proc/self/task")) {
    while (dirent* entry = readdir(dir))
      if (int id = std::atoi(entry->d_name); id > 0) ids.insert(id);
    closedir(dir);
  }
  return ids;
}

// Pins a library's own threads to cpus 1, 2, ...; the bench pins the caller to cpu 0.
template <class Call>
void warm_up_and_pin(int n_threads, const std::vector<int>& cpus, Call warm_up) {
  std::set<int> before = thread_ids();
  warm_up();
  size_t next = 1;
  for (int id : thread_ids()) {
    if (before.count(id) || n_threads < 2) continue;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[next++ % cpus.size()], &set);
    sched_setaffinity(id, sizeof set, &set);
  }
}

void compare(Bench& bench, Libraries& libraries, int threads, int m, int n, int k, Dtype dtype, double target) {
  GemmCase data(m, n, k, 1, dtype, m <= 64 ? size_t(256) << 20 : 0, bench.team(threads));
  // The same weights as [n, k] in f32. They rotate through as many bytes as ours.
  std::vector<Buffer> rows;
  std::vector<const float*> plain;
  size_t copies = m <= 64 ? (size_t(256) << 20) / (size_t(n) * size_t(k) * 4) + 1 : 1;
  for (size_t c = 0; c < copies; ++c) {
    rows.emplace_back(size_t(n) * size_t(k) * sizeof(float));
    for (int r = 0; r < n; ++r) data.weight_row(int(c), r, rows[c].as<float>() + size_t(r) * size_t(k));
    plain.push_back(rows[c].as<float>());
  }
  DnnlMatmul dnnl_plain(data, plain, false), dnnl_packed(data, plain, true);
  size_t turn = 0;
  auto next = [&] { return turn = (turn + 1) % plain.size(); };
  ThreadTeam& team = bench.team(threads);
  struct Contestant {
    const char* name;
    std::function<void(size_t)> run;
  };
  const Contestant peers[] = {
      {"OpenBLAS", [&](size_t t) { call(libraries.openblas_sgemm, data, plain[t]); }},
      {"BLIS", [&](size_t t) { call(libraries.blis_sgemm, data, plain[t]); }},
      {"oneDNN", [&](size_t t) { dnnl_plain.run(t); }},
      {"oneDNN packed", [&](size_t t) { dnnl_packed.run(t); }},
  };
  std::vector<BenchCase> cases;
  std::vector<std::string> names;
  std::string shape = " M=" + std::to_string(m) + " N=" + std::to_string(n) + " K=" + std::to_string(k);
  Work f32_work{4.0 * (double(n) * k + double(m) * (n + k)), 2.0 * m * n * k};
  for (const Contestant& peer : peers) {
    names.push_back(std::string(peer.name) + " f32" + shape);
    cases.push_back({.name = names.back(),
                     .n_threads = threads,
                     .run = [&, &peer = peer] { peer.run(next()); },
                     .check = [&, &peer = peer] { return data.check([&] { peer.run(0); }); },
                     .work = f32_work,
                     .limit = Limit::fma,
                     .target = 0,
                     .versus = {}});
  }
  cases.push_back({.name = std::string("xpyd ") + dtype_name(dtype) + shape,
                   .n_threads = threads,
                   .run = [&] { data.run(team); },
                   .check = [&] { return data.check([&] { data.run(team); }); },
                   .work = work(data.args(0)),
                   .limit = Limit::fma,
                   .target = target,
                   .versus = names});
  bench.measure(cases);
}

}  // namespace

int run_peers(BenchOptions options) {
  Libraries libraries;
  cpu_set_t allowed;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
    for (int c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(c, &allowed)) cpus.push_back(c);
  const int n_threads = options.n_threads > 0 ? options.n_threads : int(cpus.size());
  options.n_threads = n_threads;
  options.settle_ms = 40;
  options.sample_ms = 60;
  options.row_s = 1.5;  // 10 measurements of 5 rows: 75 s
  libraries.set_threads(n_threads);
  {
    ThreadTeam unpinned(1);
    GemmCase warm(256, 1024, 1024, 1, Dtype::f32, 0, unpinned);
    std::vector<float> w(size_t(1024) * 1024, 1.0f);
    auto twice = [&](Sgemm sgemm) {
      warm_up_and_pin(n_threads, cpus, [&] { call(sgemm, warm, w.data()), call(sgemm, warm, w.data()); });
    };
    twice(libraries.openblas_sgemm);
    twice(libraries.blis_sgemm);
    warm_up_and_pin(n_threads, cpus, [&] { DnnlMatmul(warm, {w.data()}, false).run(0); });
  }
  Bench bench(options);
  bench.print_conditions();
  // The largest team comes first. A smaller team would make the OpenMP runtime end threads that are already pinned.
  for (int threads : n_threads > 1 ? std::vector<int>{n_threads, 1} : std::vector<int>{1}) {
    libraries.set_threads(threads);
    std::printf("\n%d thread%s\n", threads, threads > 1 ? "s" : "");
    bench.team(threads).run([](int) {});  // pins the threads
    for (int m : {4, 8, 16}) compare(bench, libraries, threads, m, 4096, 4096, Dtype::bf16, 2.0);
    compare(bench, libraries, threads, 512, 4096, 4096, Dtype::f32, 1.0);
    compare(bench, libraries, threads, 512, 4096, 4096, Dtype::bf16, 0);
  }
  bench.write_files();
  return bench.exit_code();
}

}  // namespace xpyd::experiments

int main(int argc, char** argv) {
  auto options = xpyd::experiments::parse_bench_options(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "bench-peers: %s\n", options.error().message.c_str());
    return 2;
  }
  return xpyd::experiments::run_peers(options.value());
}
