# Compiles and links the rooms (top-level folders), their tests and experiments: flags, sources, units, rules. Makefile includes it.

# The compiler keeps one order of additions (CONTRIBUTING.md, decision D1): no contraction, no reassociation.
# Warnings are errors only if CI is set. A compiler newer than these sources must not stop anybody else.
WERROR    := $(if $(CI),-Werror)
WARN      := -Wall -Wextra -Wshadow -Wno-missing-field-initializers $(WERROR)
DETERMINE := -ffp-contract=off -fno-fast-math
HARDEN    := -D_FORTIFY_SOURCE=2 -D_GLIBCXX_ASSERTIONS -fstack-protector-strong -fstack-clash-protection
LINK_release  := -Wl,-z,relro,-z,now
FLAGS_release := -O2 $(G) $(HARDEN)
FLAGS_asan    := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS -Wno-maybe-uninitialized
FLAGS_tsan    := -O1 -g1 -fsanitize=thread -Wno-tsan
FLAGS_odr     := -O0 -flto
FLAGS_fuzz    := -O1 -g1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
# g++ collects garbage only once its heap has this many KiB.
HEAP     := $(if $(findstring clang,$(CXX)),,--param ggc-min-heapsize=786432)
# SYSROOT: the folder with the unpacked libraries of another architecture (check-aarch64).
SYSROOT  ?=
ARCH      := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine)))
CXXFLAGS := -std=c++20 $(HEAP) $(WARN) $(DETERMINE) $(FLAGS_$(MODE)) -I. $(SYSROOT:%=-idirafter %/usr/include)$(SYSROOT:%= -idirafter %/usr/include/$(ARCH)-linux-gnu) -pthread
DEFINES  := -DBOOST_ASIO_SEPARATE_COMPILATION -DBOOST_BEAST_SEPARATE_COMPILATION \
            -DBOOST_ASIO_DISABLE_DEPRECATED_MSG -DXPYD_BUILD_MODE='"$(MODE)"'
comma     := ,
AR       := $(SYSROOT:%=$(ARCH)-linux-gnu-)ar
LDFLAGS  := -pthread $(FLAGS_$(MODE)) $(LINK_$(MODE)) $(if $(SYSROOT),-L$(SYSROOT)/usr/lib/$(ARCH)-linux-gnu -Wl$(comma)-rpath-link=$(SYSROOT)/usr/lib/$(ARCH)-linux-gnu:$(SYSROOT)/lib/$(ARCH)-linux-gnu)
LDLIBS    = -l:libnettle.a -l:libutf8proc.a -l:libpcre2-8.a -libverbs $(if $(CUDA),-l:libboost_program_options.a -static-libstdc++ -static-libgcc,-lboost_program_options)
LDLIBS_TEST = $(shell pkg-config --libs catch2-with-main 2>/dev/null | sed 's/-lCatch2Main//')

# The sources of the rooms, in folders of any depth.
ROOM_SRC  := $(sort $(shell find $(ROOMS) -name '*.cc' -o -name '*.cu'))
AVX512_SRC := %_avx512.cc %_avx512vnni.cc %_avx512bf16.cc
# Subcommands that read logs of a cluster, simulate it or load it. They include the rooms and are linked into the same binary.
# Tests of single rooms need two of their files.
SUBCOMMANDS := $(if $(filter disagg,$(ROOMS)),$(filter-out $(if $(filter server,$(ROOMS)),,%_command.cc %_commands.cc),\
               $(wildcard experiments/stats.cc experiments/published_routers.cc experiments/simulate/*.cc experiments/event_log/*.cc $(if $(filter server,$(ROOMS)),experiments/load/*.cc experiments/subcommands.cc))),\
               experiments/stats.cc experiments/pipeline_time.cc)
LIB_SRC   := $(filter-out $(if $(filter x86_64,$(ARCH)),,%_avx2.cc $(AVX512_SRC)),$(filter-out server/main.cc,$(filter %.cc,$(ROOM_SRC)))) $(SUBCOMMANDS)
TEST_SRC  := $(filter-out $(if $(filter disagg,$(ROOMS)),,tests/tiny_model.cc),$(wildcard tests/*.cc)) $(foreach r,$(ROOMS) $(if $(filter server,$(ROOMS)),end_to_end experiments issues),$(wildcard tests/$(r)/*.cc))
BENCH_SRC := $(wildcard experiments/bench/*.cc)
HARNESS   := $(BUILD)/experiments/bench/harness.o
EXP_SRC   := $(filter-out experiments/stats.cc experiments/published_routers.cc experiments/subcommands.cc,$(wildcard experiments/*.cc))
EXP_CU    := $(wildcard experiments/cuda/*.cu)
EXP_PARTS := $(if $(filter server,$(ROOMS)),$(filter-out experiments/main.cc,$(EXP_SRC)))
# CUDA is compiled in if nvcc and a GPU are found, or with CUDA=1 (`make cuda` does that in build/cuda).
NVCC      ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA      ?= $(if $(and $(NVCC),$(wildcard /dev/nvidiactl)),1)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_ARCH ?= 80 90a
# (nvcc itself writes parentheses around pointers to members.)
NVCCFLAGS  = -std=c++20 -O3 -I. -lineinfo --expt-relaxed-constexpr --expt-extended-lambda $(if $(CI),-Werror all-warnings) \
             -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-Wno-parentheses,-pthread,-ffp-contract=off $(foreach a,$(1),-gencode arch=compute_$(a),code=sm_$(a)) \
             $(if $(filter 80,$(1)),-gencode arch=compute_80$(comma)code=compute_80)
CUDA_OBJ   = $(if $(CUDA),$(patsubst %.cu,$(BUILD)/cuda/%.o,$(CUDA_SRC)))
CUDA_LIBS  = $(if $(CUDA),-L$(CUDA_HOME)/lib64 -lcudart_static -lcublasLt -ldl -lrt -Wl$(comma)--disable-new-dtags$(comma)-rpath$(comma)'$$ORIGIN:$(CUDA_HOME)/lib64')
# Tests run CUDA sources on an interpreter (tests/simt), which replaces the parts that need a GPU.
CUDA_SRC  := $(filter %.cu,$(ROOM_SRC))
GPU_SRC   := $(filter-out %/main.cu,$(wildcard experiments/gpu/*.cu))
SIMT_SRC  := $(filter-out base/cuda/cuda.cu base/cuda/cuda_driver.cu model/cuda/gemm_cuda.cu,$(CUDA_SRC)) $(GPU_SRC) $(filter-out %/card.cu,$(EXP_CU)) $(wildcard tests/simt/*.cu) \
             $(foreach r,$(ROOMS) end_to_end,$(wildcard tests/$(r)/*.cu))
object     = $(patsubst %.cc,$(BUILD)/%.o,$(1))
# Several files are compiled as one unit (tools/units), except those with flags of their own. `make UNITS=` compiles each file
# by itself, as MODE=odr does. A missing #include then fails.
UNITS    ?= $(if $(filter odr,$(MODE)),,1)
ALONE    := %_avx2.cc $(AVX512_SRC) base/version.cc model/folder.cc server/backend.cc server/openai/page.cc server/http/boost_impl.cc \
            experiments/experiment.cc tests/main.cc
units     = $(if $(UNITS),$(patsubst %.cc,%.o,$(shell tools/units $(2)/units $(filter-out $(ALONE),$(1)))) $(call object,$(filter $(ALONE),$(1))),$(call object,$(1)))
LIB_OBJ  := $(call units,$(LIB_SRC),$(BUILD))
TEST_OBJ := $(call units,$(TEST_SRC),$(BUILD)/tests)
# The AVX-512 kernels a second time, compiled for any processor with AVX2. Only tests use them (base/avx512.h).
EMULATED := $(patsubst %.cc,$(BUILD)/%_emulated.o,$(filter $(AVX512_SRC),$(LIB_SRC)))
KERNELS  := $(call object,$(filter %_avx2.cc $(AVX512_SRC),$(LIB_SRC)))
EXP_OBJ  := $(call units,$(EXP_PARTS),$(BUILD)/experiments)
# `make SIMT=` leaves out the CUDA tests. tests/simt/*_test.cu share units, because some test whole instances, whose headers take longest.
SIMT      ?= 1
SIMT_UNIT := $(if $(UNITS),$(filter-out %/gemm_choice_test.cu %/sm90_test.cu,$(wildcard tests/simt/*_test.cu)))
SIMT_OBJ  := $(if $(SIMT),$(patsubst %.cc,%.o,$(shell tools/units $(BUILD)/simt/units $(SIMT_UNIT))) \
             $(patsubst %.cu,$(BUILD)/simt/%.o,$(filter-out $(SIMT_UNIT),$(SIMT_SRC))) \
             $(patsubst %.cc,$(BUILD)/simt/%.o,$(wildcard tests/simt/*.cc) $(if $(filter server,$(ROOMS)),server/backend.cc)))
LIB       := $(BUILD)/libxpyd.a
BIN       := $(BUILD)/xpyd

# Sanitizers bring an allocator of their own, so nothing may be preloaded before it.
FAULTS_LIB = $(if $(filter release,$(MODE)),$(BUILD)/libfaults.so)

# llama.cpp: a folder with its sources, or those of its Python package, which are fetched into build/ and never committed.
LLAMA_CPP  ?= build/llama.cpp/source
LLAMA_LIBS  = build/llama.cpp/of$(subst /,-,$(abspath $(LLAMA_CPP)))

# Everything is recompiled if the compiler or its flags change. -Werror is excepted, because it does not change code.
FLAGS_NOW := $(CXX) $(filter-out -Werror,$(CXXFLAGS))
$(shell mkdir -p $(BUILD) && { [ "$$(cat $(BUILD)/flags 2>/dev/null)" = "$(FLAGS_NOW)" ] || echo "$(FLAGS_NOW)" >$(BUILD)/flags; })
# The commit is compiled into one object, which is recompiled whenever it changes. Changed results and figures do not count as
# -dirty, because they do not change code.
COMMIT := $(shell git describe --always 2>/dev/null || echo unknown)$(shell git diff --quiet HEAD -- . ':!experiments/results' ':!experiments/*.md' ':!experiments/*.csv' ':!paper_figures/out' 2>/dev/null || echo -dirty)
$(shell mkdir -p $(BUILD) && { [ "$$(cat $(BUILD)/commit 2>/dev/null)" = "$(COMMIT)" ] || echo "$(COMMIT)" >$(BUILD)/commit; })
$(BUILD)/base/version.o: private DEFINES += -DXPYD_COMMIT='"$(COMMIT)"'
$(BUILD)/base/version.o: $(BUILD)/commit

# Kernels that need AVX2 or more of x86-64 are in files with these suffixes. They are reached only after a run-time check (base/cpu.h).
AVX2     := $(if $(filter release,$(MODE)),-O3,-O1) -mavx2 -mfma -mf16c -falign-loops=32
# (Where an inner loop begins moved a product by 10 %. g++ 12 warns of registers in its own header that are undefined on purpose.)
AVX512   := $(AVX2) -mavx512f -mavx512bw -mavx512vl -mavx512dq $(if $(findstring clang,$(CXX)),,-Wno-uninitialized -Wno-maybe-uninitialized)
$(BUILD)/%_avx2.o: private CXXFLAGS += $(AVX2)
$(BUILD)/%_avx512.o: private CXXFLAGS += $(AVX512)
$(BUILD)/%_avx512vnni.o: private CXXFLAGS += $(AVX512) -mavx512vnni
$(BUILD)/%_avx512bf16.o: private CXXFLAGS += $(AVX512) -mavx512vnni -mavx512bf16
# (SIMDe would define __mmask64 as another type than clang does, and asks for loops that clang does not vectorise.)
$(EMULATED): private CXXFLAGS += $(AVX2) -O1 -DXPYD_EMULATE -D__mmask64=__mmask64 -Wno-psabi -Wno-ignored-attributes -Wno-pass-failed
# Tests must compile quickly. The code that they test is compiled as it is served.
TEST_O  := $(if $(filter release,$(MODE)),-Og -U_FORTIFY_SOURCE -fno-stack-protector,-O1)
$(BUILD)/tests/%.o: private CXXFLAGS += $(TEST_O)
# Headers that many files include are precompiled once for each set of flags (`make PCH=` turns that off).
# g++ drops the pragmas of a precompiled header, so warnings that libstdc++ silences by pragmas are silenced here.
PCH ?= 1
headers = $(if $(PCH),$(1:%=$(BUILD)/%/precompiled.h.gch))
QUIET   := $(if $(findstring clang,$(CXX)),,-Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
ahead   = $(if $(PCH),-Winvalid-pch $(QUIET) -include $(BUILD)/$(1)/precompiled.h)
$(BUILD)/%/precompiled.h.gch: %/precompiled.h $(BUILD)/flags
	@mkdir -p $(@D) && echo '#include "$<"' >$(@:.gch=)
	@echo "  c++  $<"
	@$(CXX) $(CXXFLAGS) $(DEFINES) -MMD -MP -MT $@ -MF $(@:.gch=.d) -x c++-header $< -o $@
$(BUILD)/tests/precompiled.h.gch: private CXXFLAGS += $(TEST_O)
$(BUILD)/simt/%/precompiled.h.gch: %/precompiled.h $(BUILD)/flags
	@mkdir -p $(@D) && echo '#include "$<"' >$(@:.gch=)
	@echo "  simt $<"
	@$(CXX) $(CXXFLAGS) $(SIMT_FLAGS) $(DEFINES) -MMD -MP -MT $@ -MF $(@:.gch=.d) -x c++-header $< -o $@

$(BUILD)/%.o: private AHEAD = $(call ahead,base)
$(BUILD)/tests/%.o: private AHEAD = $(call ahead,tests)
$(BUILD)/%_avx2.o $(BUILD)/tests/main.o $(patsubst %.cc,$(BUILD)/%.o,$(AVX512_SRC)): private AHEAD =
$(call object,$(TEST_SRC) $(wildcard tests/fuzz/*.cc)): $(call headers,tests)
$(TEST_OBJ): $(call headers,tests)
$(LIB_OBJ) $(TEST_OBJ) $(EXP_OBJ): $(BUILD)/flags $(call headers,base)
$(BUILD)/%.o: $(BUILD)/%.cc
	@echo "  c++  $(notdir $<) of $$(grep -c . $<) files"
	@$(CXX) $(CXXFLAGS) $(DEFINES) $(AHEAD) -MMD -MP -c $< -o $@
$(BUILD)/%.o: %.cc $(BUILD)/flags $(call headers,base)
	@mkdir -p $(@D)
	@echo "  c++  $<"
	@$(CXX) $(CXXFLAGS) $(DEFINES) $(AHEAD) -MMD -MP -c $< -o $@

$(BUILD)/%_emulated.o: %.cc $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  c++  $< (emulated)"
	@$(CXX) $(CXXFLAGS) $(DEFINES) -MMD -MP -c $< -o $@

# (Launch bounds mean nothing to the interpreter and leave constants unused.)
SIMT_FLAGS := -O1 -DXPYD_SIMT -Itests/simt -Wno-unused-const-variable -Wno-unknown-pragmas -Wno-psabi -fno-strict-aliasing $(if $(findstring clang,$(CXX)),-Wno-pass-failed -Wno-unknown-warning-option)
$(BUILD)/simt/tests/simt/%.o: private SIMT_FLAGS += $(if $(filter release,$(MODE)),-O2)
$(BUILD)/simt/tests/simt/%.o: private AHEAD =
$(BUILD)/simt/%.o: private AHEAD = $(call ahead,simt/tests)
$(SIMT_OBJ): $(call headers,simt/tests)  # for each object: make 4.4 does not chain pattern rules if a shorter one applies
$(BUILD)/simt/%.o: $(BUILD)/simt/%.cc $(BUILD)/flags $(call headers,simt/tests)
	@echo "  simt $(notdir $<) of $$(grep -c . $<) files"
	@$(CXX) $(CXXFLAGS) $(SIMT_FLAGS) $(DEFINES) $(AHEAD) -MMD -MP -c $< -o $@
$(BUILD)/simt/%.o: %.cu $(BUILD)/flags $(call headers,simt/tests)
	@mkdir -p $(@D)
	@echo "  simt $<"
	@$(CXX) $(CXXFLAGS) $(SIMT_FLAGS) $(DEFINES) $(AHEAD) -MMD -MP -x c++ -c $< -o $@
$(BUILD)/simt/%.o: %.cc $(BUILD)/flags $(call headers,simt/tests)
	@mkdir -p $(@D)
	@echo "  simt $<"
	@$(CXX) $(CXXFLAGS) $(SIMT_FLAGS) $(DEFINES) $(AHEAD) -MMD -MP -c $< -o $@

# The binary embeds these files by .incbin, which leaves no trace in a .d file.
$(BUILD)/server/openai/page.o: server/openai/page.html
$(BUILD)/model/folder.o: $(wildcard model/demo/*)

# Kernels for sm_90a alone are in *_sm90.cu.
$(BUILD)/cuda/%.o: %.cu
	@mkdir -p $(@D)
	@echo "  nvcc $<"
	@$(NVCC) $(call NVCCFLAGS,$(if $(filter %_sm90.cu,$<),90a,$(CUDA_ARCH))) $(DEFINES) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2>$(@:.o=.ptxas) || { cat $(@:.o=.ptxas); exit 1; }
$(BUILD)/server/backend.o $(BUILD)/experiments/experiment.o: private DEFINES += $(if $(CUDA),-DXPYD_CUDA)
$(BUILD)/simt/server/backend.o: private DEFINES += -DXPYD_CUDA

$(LIB): $(LIB_OBJ) $(CUDA_OBJ)
	@rm -f $@ && $(AR) rcs $@ $^
$(BIN): $(BUILD)/server/main.o $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(CUDA_LIBS) -o $@
# This link compares the types in all objects and makes no code. (tests/simt has a server/backend.o of its own.)
$(BUILD)/all.o: $(filter-out $(BUILD)/server/backend.o,$(LIB_OBJ)) $(TEST_OBJ) $(EMULATED) $(EXP_OBJ) $(HARNESS) $(SIMT_OBJ)
	@echo "  link $@" && $(CXX) -r -flinker-output=rel $(FLAGS_$(MODE)) -Werror=odr $^ -o $@
$(BUILD)/xpyd_tests: $(TEST_OBJ) $(EMULATED) $(EXP_OBJ) $(HARNESS) $(SIMT_OBJ) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(LDLIBS_TEST) -lboost_context -o $@
GPU_TEST_SRC := $(foreach r,$(ROOMS) end_to_end,$(wildcard tests/$(r)/*.cu))
cuda_object   = $(patsubst %.cu,$(BUILD)/cuda/%.o,$(1))
$(BUILD)/xpyd_gpu_tests: $(call object,$(wildcard tests/*.cc) $(addprefix tests/disagg/transport_,side.cc test.cc)) $(call cuda_object,$(GPU_TEST_SRC) $(GPU_SRC)) $(HARNESS) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(LDLIBS_TEST) $(CUDA_LIBS) -o $@
$(BUILD)/tests/cute/oracle.o: tests/cute/oracle.cc tests/cute/oracle.h $(BUILD)/flags
	@mkdir -p $(@D) && echo "  c++  $<" && $(CXX) -std=c++20 -O1 -w -I. $(CUTE_INC) -c $< -o $@
$(BUILD)/xpyd_cute_tests: $(BUILD)/tests/main.o $(BUILD)/tests/cute/oracle.o $(BUILD)/simt/tests/cute/cute_test.o $(filter-out %_test.o $(BUILD)/simt/units/% $(BUILD)/simt/experiments/% $(BUILD)/simt/tests/end_to_end/%,$(SIMT_OBJ)) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(LDLIBS_TEST) -lboost_context -o $@
$(BUILD)/xpyd_gpu_report: $(call cuda_object,$(GPU_SRC) experiments/gpu/main.cu) $(HARNESS) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(CUDA_LIBS) -o $@
$(BUILD)/libfaults.so: tests/faults/preload.cc
	@echo "  c++  $<" && $(CXX) -std=c++20 -O1 $(WARN) -shared -fPIC $< -ldl -o $@
$(BUILD)/fuzz_%: $(BUILD)/tests/fuzz/fuzz_%.o $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) -fsanitize=fuzzer $(LDLIBS) -o $@
$(BUILD)/xpyd_bench: $(call object,$(BENCH_SRC)) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) -o $@
$(BUILD)/xpyd_experiments: $(BUILD)/experiments/main.o $(EXP_OBJ) $(if $(CUDA),$(call cuda_object,$(EXP_CU))) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) $(CUDA_LIBS) -o $@
$(BUILD)/xpyd_gemm_peers: $(BUILD)/experiments/bench/peers/gemm_peers.o $(HARNESS) $(LIB)
	@echo "  link $@" && $(CXX) $^ $(LDFLAGS) $(LDLIBS) -ldnnl -ldl -o $@
$(BUILD)/experiments/bench/peers/llama_peers.o: private DEFINES += -isystem $(LLAMA_CPP)/include -isystem $(LLAMA_CPP)/ggml/include -DXPYD_LLAMA_FILES='"build/llama.cpp"'
$(BUILD)/experiments/bench/peers/llama_peers.o: $(LLAMA_LIBS)/src/libllama.a
$(BUILD)/xpyd_llama_peers: $(BUILD)/experiments/bench/peers/llama_peers.o $(HARNESS) $(LIB) $(LLAMA_LIBS)/src/libllama.a
	@echo "  link $@" && $(CXX) $^ $(addprefix $(LLAMA_LIBS)/ggml/src/libggml,.a -cpu.a -base.a) $(LDFLAGS) $(LDLIBS) -ldl -o $@

.SECONDARY: $(call object,$(wildcard tests/fuzz/*.cc)) $(call headers,base tests simt/tests)
-include $(patsubst %.o,%.d,$(SIMT_OBJ) $(CUDA_OBJ) $(call cuda_object,$(GPU_TEST_SRC) $(GPU_SRC) $(EXP_CU) experiments/gpu/main.cu) $(LIB_OBJ) $(TEST_OBJ) $(EMULATED) $(EXP_OBJ) $(call object,$(TEST_SRC) $(BENCH_SRC) $(EXP_SRC) server/main.cc \
            $(wildcard tests/fuzz/*.cc))) $(foreach d,base tests simt/tests,$(BUILD)/$(d)/precompiled.h.d)

build/llama.cpp/source/CMakeLists.txt:
	@mkdir -p $(@D) && cd build/llama.cpp && $(PYTHON) -m pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 && \
	tar -xzf llama_cpp_python-*.tar.gz -C source --strip-components=3 --wildcards '*/vendor/llama.cpp' && touch source/CMakeLists.txt
$(LLAMA_LIBS)/src/libllama.a: $(LLAMA_CPP)/CMakeLists.txt
	@echo "  cmake $@" && mkdir -p $(LLAMA_LIBS) && { cmake -S $(LLAMA_CPP) -B $(LLAMA_LIBS) -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
	  -DGGML_NATIVE=ON -DGGML_OPENMP=OFF $(foreach part,COMMON TESTS TOOLS EXAMPLES SERVER APP,-DLLAMA_BUILD_$(part)=OFF) && \
	nice cmake --build $(LLAMA_LIBS) --target llama -j $$(nproc); } >$(LLAMA_LIBS)/log 2>&1 || { tail -20 $(LLAMA_LIBS)/log; exit 1; }
