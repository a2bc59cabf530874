// Tools: tools/check over stages of its own (what fails is not lost, what is left out is named), and
// tools/lint-sass over small disassemblies (each fault that it looks for, planted, and the sound ones beside it).
#include "tests/program.h"

namespace xpyd::testing::tools_test {
namespace {

struct Outcome {
  int code = -1;
  std::string output;
  bool says(const std::string& part) const { return has(output, part); }
  std::string last_line() const {
    const size_t end = output.find_last_not_of('\n'), begin = output.rfind('\n', end);
    return output.substr(begin + 1, end - begin);
  }
};

// A row of a table is `name | minutes | needs | command`.
Outcome check(const TempDir& dir, const std::string& table, const std::string& arguments) {
  const std::string stages = dir.path + "/stages";
  {
    std::ofstream file(stages);
    std::istringstream rows(table);
    for (std::string name, minutes, needs, command; std::getline(rows, name, '|') && std::getline(rows, minutes, '|') &&
                                                    std::getline(rows, needs, '|') && std::getline(rows, command);)
      file << "check-" << name.substr(0, name.find(' ')) << ": ##" << minutes << "|" << needs << "| a stage\n\t@"
           << command << "\n";
  }
  const Ran ran = shell("CHECK_STAGES=" + stages + " CHECK_MAKE='make -f " + stages + "' CHECK_LOGS=" + dir.path +
                        "/logs tools/check " + arguments + " 2>&1");
  return {ran.code, ran.out};
}

TEST_CASE("make check: counts tests of stages, and fails when one of them fails", "[issues][check]") {
  TempDir dir;
  const std::string good =
      "suite | 1 | - | echo 5 passed, 0 failed, 2 skipped\n"
      "plain | 1 | - | true | cat\n";
  Outcome all = check(dir, good, "");
  CHECK(all.code == 0);
  CHECK(all.last_line() == "6 passed, 0 failed, 2 skipped");
  Outcome one = check(dir, good, "plain");
  CHECK(one.code == 0);
  CHECK(one.last_line() == "1 passed, 0 failed, 0 skipped");
  CHECK(check(dir, good, "nowhere").code == 2);

  // By its exit code alone, by its own count alone (an exit code that a pipe has lost), by neither's middle.
  Outcome code = check(dir, "a | 1 | - | echo the reason; exit 3\n" + good, "");
  CHECK(code.code == 1);
  CHECK(code.says("the reason"));
  CHECK(code.says("a FAILED with exit code 2"));
  CHECK(code.last_line() == "6 passed, 1 failed, 2 skipped");
  Outcome words = check(dir, "a | 1 | - | echo 3 passed, 2 failed, 1 skipped; echo 'make: *** Error 1'; exit 2\n", "");
  CHECK(words.code == 1);
  CHECK(words.last_line() == "3 passed, 2 failed, 1 skipped");
  Outcome twice = check(dir, "a | 1 | - | for i in 1 2; do echo 3 passed, 0 failed, 1 skipped; done; echo bye\n", "");
  CHECK(twice.code == 0);
  CHECK(twice.last_line() == "6 passed, 0 failed, 2 skipped");
  Outcome count = check(dir, "a | 1 | - | echo 3 passed, 2 failed, 0 skipped\n", "");
  CHECK(count.code == 1);
  CHECK(count.last_line() == "3 passed, 2 failed, 0 skipped");
}

TEST_CASE("make check: a stage that cannot end in time, or at all here, is left out by name", "[issues][check]") {
  TempDir dir;
  // The test row says one minute and takes a second: the machine counts as twice as quick, not more.
  const std::string table =
      "test   | 1 | -     | echo 1 passed, 0 failed, 0 skipped\n"
      "long   | 6 | -     | echo must not run; false\n"
      "absent | 1 | false | echo must not run; false\n"
      "short  | 3 | -     | echo 2 passed, 0 failed, 0 skipped\n";
  Outcome bounded = check(dir, table, "--test --minutes 2");
  CHECK(bounded.code == 0);
  CHECK_FALSE(bounded.says("must not run"));
  CHECK(bounded.says("left out: long: expected to take 3.0 min, and 0.0 of 2 are gone"));
  CHECK(bounded.says("left out: absent: it needs: false"));
  CHECK(bounded.last_line() == "3 passed, 0 failed, 2 skipped");
  Outcome named = check(dir, table, "--minutes 9 short");
  CHECK(named.code == 0);
  CHECK(named.says("left out: long: not asked for"));
  CHECK(named.last_line() == "2 passed, 0 failed, 2 skipped");
  // Without a bound everything that can run is run, and `make test` is not part of it.
  Outcome free = check(dir, table, "");
  CHECK(free.code == 1);
  CHECK(free.says("must not run"));
  CHECK(free.last_line() == "2 passed, 1 failed, 1 skipped");
  // Where the tests fail, that is all.
  Outcome failing = check(dir, "test | 1 | - | false\n" + table.substr(table.find('\n') + 1), "--test");
  CHECK(failing.code == 1);
  CHECK(failing.last_line() == "0 passed, 1 failed, 0 skipped");
}

// ---- lint-sass

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
  const Ran ran = shell(environment + " python3 tools/lint-sass " + arguments + " 2>&1");
  INFO(ran.out);
  CHECK(ran.code == !has(ran.out, "1 kernels, 0 problems"));
  return ran.out;
}
std::string lint(const std::string& kernel, const std::vector<std::string>& lines) {
  TempDir dir;
  write_sass(dir.path + "/sass", kernel, lines);
  return run_lint("--text " + dir.path + "/sass");
}
bool sound(const std::string& output) { return has(output, ", 0 problems"); }

const std::string kProduct = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0";  // R24 .. R55
const std::string kWait = "WARPGROUP.DEPBAR.LE gsb0, 0x0";

TEST_CASE("lint-sass: accumulators and weights of a product that is not waited for", "[issues][lint-sass]") {
  if (shell("python3 --version >/dev/null 2>&1").code != 0) SKIP_TEST("no python3");
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
  if (shell("python3 --version >/dev/null 2>&1").code != 0) SKIP_TEST("no python3");
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
  if (shell("python3 --version >/dev/null 2>&1").code != 0) SKIP_TEST("no python3");
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
}  // namespace xpyd::testing::tools_test
