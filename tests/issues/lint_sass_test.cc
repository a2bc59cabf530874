// tools/lint-sass over small disassemblies: each fault that it looks for, planted, and the sound ones beside it.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace xpyd::testing::lint_sass_test {
namespace {

// A kernel with these instructions, as nvdisasm writes it; lines that end in a colon are labels.
void write_sass(const std::string& path, const std::string& kernel, const std::vector<std::string>& lines) {
  std::ofstream file(path);
  file << ".text." << kernel << ":\n";
  int address = 0;
  char place[32];
  for (const std::string& line : lines) {
    if (line.back() == ':') {
      file << line << "\n";
      continue;
    }
    snprintf(place, sizeof place, "        /*%04x*/", 16 * address++);
    file << place << "                   " << line << " ;\n";
  }
}

// What lint-sass says, which fails where it names a problem.
std::string run_lint(const std::string& arguments, const std::string& environment = "") {
  FILE* pipe = popen((environment + " python3 tools/lint-sass " + arguments + " 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::string output;
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) output.append(part, n);
  const int code = WEXITSTATUS(pclose(pipe));
  INFO(output);
  CHECK(code == (output.find("1 kernels, 0 problems") == output.npos));
  return output;
}
std::string lint(const std::string& kernel, const std::vector<std::string>& lines) {
  TempDir dir;
  write_sass(dir.path + "/sass", kernel, lines);
  return run_lint("--text " + dir.path + "/sass");
}
bool sound(const std::string& output) { return output.find(", 0 problems") != output.npos; }

const std::string kProduct = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0";  // R24 .. R55
const std::string kWait = "WARPGROUP.DEPBAR.LE gsb0, 0x0";

TEST_CASE("lint-sass: accumulators and weights of a product that is not waited for", "[issues][lint-sass]") {
  if (std::system("python3 --version >/dev/null 2>&1") != 0) SKIP_TEST("no python3");
  CHECK(sound(lint("k", {kProduct, "MOV R2, R56", kWait, "FADD R24, R24, R55", "EXIT"})));
  for (std::string touch : {"FADD R2, R3, R55", "MOV R24, R2", "STS.128 [R2], R52"}) {
    INFO(touch);
    CHECK(lint("k", {kProduct, touch, kWait, "EXIT"}).find("`" + touch + "` touches registers of an HGMMA") !=
          std::string::npos);
  }
  // Its operand in registers, P, may be read by the next product, and by nobody else written.
  const std::string with_p = "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR20], R24, gsb0";
  CHECK(sound(lint("k", {with_p, with_p, kWait, "MOV R11, R2", "EXIT"})));
  CHECK_FALSE(sound(lint("k", {with_p, "MOV R11, R2", kWait, "EXIT"})));
  // A wait for all but the last group covers the first alone.
  const std::string other = "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR20], R64, gsb0";
  const std::string but_one = "WARPGROUP.DEPBAR.LE gsb0, 0x1";
  CHECK(sound(lint("k", {kProduct, other, but_one, "MOV R2, R24", kWait, "EXIT"})));
  CHECK_FALSE(sound(lint("k", {kProduct, other, but_one, "MOV R2, R64", kWait, "EXIT"})));
  // On one path only: behind a branch, and around a loop.
  CHECK_FALSE(sound(lint("k", {kProduct, "@P0 BRA `(.L_x_1)", kWait, ".L_x_1:", "MOV R2, R24", "EXIT"})));
  CHECK_FALSE(sound(lint("k", {".L_x_1:", "MOV R2, R24", kProduct, "@P0 BRA `(.L_x_1)", kWait, "EXIT"})));
  CHECK(sound(lint("k", {".L_x_1:", "MOV R2, R24", kProduct, kWait, "@P0 BRA `(.L_x_1)", "EXIT"})));
}

TEST_CASE("lint-sass: registers beyond a role's, spills, and loops that have grown", "[issues][lint-sass]") {
  if (std::system("python3 --version >/dev/null 2>&1") != 0) SKIP_TEST("no python3");
  const std::string few = "USETMAXREG.DEALLOC.CTAPOOL 0x28";  // 40
  CHECK(sound(lint("k", {"MOV R100, R2", few, "MOV R39, R2", "EXIT"})));
  CHECK(lint("k", {few, "MOV R40, R2", "EXIT"}).find("`MOV R40, R2` is beyond its role's") != std::string::npos);
  CHECK(sound(lint("k", {"LDS R2, [R3]", "EXIT"})));
  CHECK(lint("k", {"STL [R1], R2", "EXIT"}).find("local memory: STL") != std::string::npos);

  // 27 instructions a token of 16 are allowed, and 64 for a new maximum.
  for (int more : {0, 1}) {
    std::vector<std::string> loop(size_t(27 * 16 + 64 - 2 + more), "FADD R2, R2, R3");
    loop.insert(loop.begin(), {".L_x_1:", "HMMA.16816.F32.BF16 R4, R8, R12, R4"});
    loop.insert(loop.end(), {"@P0 BRA `(.L_x_1)", "EXIT"});
    const std::string said = lint("_Z16split_mma_kernelI4bf16Li128EEvv", loop);
    INFO(said);
    CHECK(sound(said) == (more == 0));
    CHECK(said.find("split_mma_kernel<bf16; 128>," + std::to_string(loop.size() - 2)) != std::string::npos);
    CHECK(sound(lint("_Z16other_mma_kernelI4bf16Li128EEvv", loop)));  // has no bound
  }
}

TEST_CASE("issue: lint-sass said nothing of a bound that bounded no loop", "[issues][lint-sass]") {
  if (std::system("python3 --version >/dev/null 2>&1") != 0) SKIP_TEST("no python3");
  // The kernel is there, and its loop is not recognised.
  CHECK(lint("_Z16split_mma_kernelI4bf16Li128EEvv", {"FADD R2, R2, R3", "EXIT"})
            .find("split_mma_kernel<bf16; 128>: no loop") != std::string::npos);
  // Nor is the kernel: its name has changed. CUDA's programs are played.
  TempDir dir;
  namespace fs = std::filesystem;
  fs::create_directories(dir.path + "/objects/model");
  fs::create_directories(dir.path + "/bin");
  std::ofstream(dir.path + "/objects/model/x.o") << "";
  write_sass(dir.path + "/sass", "_Z17flash_other_kernelILi128EEvv", {"EXIT"});
  std::ofstream(dir.path + "/bin/cuobjdump") << "#!/bin/sh\n: >x.sm_90a.cubin\n";
  std::ofstream(dir.path + "/bin/nvdisasm") << "#!/bin/sh\ncat " << dir.path << "/sass\n";
  for (const char* program : {"cuobjdump", "nvdisasm"})
    fs::permissions(dir.path + "/bin/" + program, fs::perms::owner_all);
  const std::string said = run_lint(dir.path + "/objects", "PATH=" + dir.path + "/bin:\"$PATH\"");
  INFO(said);
  CHECK(said.find("BOUNDS: no kernel is called flash_wgmma_kernel<128>") != std::string::npos);
  CHECK(said.find("1 kernels, 4 problems") != std::string::npos);
}

}  // namespace
}  // namespace xpyd::testing::lint_sass_test
