# xpyd: every target of the project. `make help` lists them. Everything is built under build/.
#
# ROOMS limits the top-level folders that are compiled (`make test ROOMS="base allocator"`). MODE selects the compiler flags.
# G=-g adds line numbers for gdb and perf.
MODE    ?= release
G       ?=
BUILD   ?= build/$(MODE)
ROOMS   ?= base allocator attention model batch disagg server
CXX     ?= g++
MODEL   ?=
PORT    ?= 8000
ARGS    ?=
TESTS   ?=
SEEDS   ?= 2000

PACKAGES := g++ make pkg-config libboost-dev libboost-program-options-dev catch2 \
            nlohmann-json3-dev libxxhash-dev libutf8proc-dev libpcre2-dev libboost-context-dev libibverbs-dev nettle-dev \
            libzmq3-dev libmsgpack-cxx-dev libsimde-dev

# Debian's own Python, which finds Debian's matplotlib.
PYTHON  ?= $(firstword $(wildcard /usr/bin/python3) python3)
.DEFAULT_GOAL := help
include tools/build.mk tools/check.mk

.PHONY: help deps build tour serve test bench bench-peers experiments claims figures demo-accuracy cuda gpu-report gpu-bundle check install uninstall layers house format clean
help:  ## list every target
	@grep -hE '^[a-z][a-z0-9%-]*:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 16

deps:  ## install the Debian/Ubuntu packages that are missing
	@tools/install-packages $(PACKAGES)

build: deps  ## build build/release/xpyd
	@$(MAKE) --no-print-directory -j$$(nproc) $(BIN)

tour: build  ## run one prompt through prefill and decode step by step, in one thread (server/cli/tour.cc)
	@$(BIN) tour

serve: build  ## serve a model as 1P1D on http://127.0.0.1:8000 (MODEL=dir, PORT=, ARGS=)
	exec $(BIN) serve $(MODEL) --topology 1P1D --port $(PORT) $(ARGS)

test: deps  ## run every test (TESTS='[tag]' selects some)
	@$(MAKE) --no-print-directory layers
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_tests $(BIN) $(FAULTS_LIB)
	@$(if $(filter release,$(MODE)),tools/check-hardening $(BIN) && $(if $(KERNELS),tools/check-kernels $(BIN) $(KERNELS) $(EMULATED)))
	@XPYD_BIN=$(BIN) XPYD_FAULTS=$(FAULTS_LIB) tools/run-tests $(BUILD)/xpyd_tests $(TESTS)

bench: build  ## measure speed as shares of this machine's measured peaks (ARGS='gemm attention')
	@$(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_bench
	@$(BUILD)/xpyd_bench $(ARGS)

PEERS   ?= gemm llama
bench-peers: build  ## compare our GEMM with OpenBLAS, BLIS and oneDNN (installs them), and our steps with llama.cpp's (LLAMA_CPP=dir; PEERS='gemm llama', ARGS='--all')
	@tools/install-packages $(if $(filter gemm,$(PEERS)),libopenblas-dev libblis-openmp-dev libdnnl-dev) $(if $(filter llama,$(PEERS)),cmake python3-pip)
	@$(MAKE) --no-print-directory -j$$(nproc) $(PEERS:%=$(BUILD)/xpyd_%_peers)
	@$(if $(filter gemm,$(PEERS)),$(BUILD)/xpyd_gemm_peers $(filter-out --all,$(ARGS)))
	@$(if $(filter llama,$(PEERS)),$(BUILD)/xpyd_llama_peers $(ARGS))

RUN     ?= 1
QUICK   ?=
DEVICE  ?=
RUN_PY   = $(PYTHON) experiments/run.py
EXP_ARGS = --bin $(BUILD)/xpyd_experiments $(if $(DEVICE),--device $(DEVICE)) $(ARGS)
EXP_BIN  = tools/install-packages python3 valgrind && $(MAKE) --no-print-directory -j$$(nproc) $(BUILD)/xpyd_experiments $(BUILD)/xpyd

experiments: deps  ## measure every missing result of experiments/README.md that this machine can measure
	@$(EXP_BIN)
	@$(RUN_PY) run $(EXP_ARGS)

exp-%: deps  ## exp-NAME runs one experiment (DEVICE=cuda: on a GPU)
	@$(EXP_BIN)
	@$(RUN_PY) run $* $(EXP_ARGS)

claims: deps  ## measure what is missing, then print the evidence for every claim (QUICK=1: the shortest parts, in five minutes, into build/experiments/quick; RUN=0: measure nothing)
	@$(EXP_BIN)
	@$(RUN_PY) check $(if $(filter 0,$(RUN)),--no-run) $(if $(QUICK),--quick --results build/experiments/quick) $(EXP_ARGS)

figures:  ## draw every figure from the CSVs in experiments/results
	@tools/install-packages python3-matplotlib
	@for f in $(filter-out %/style.py,$(wildcard paper_figures/*.py)); do $(PYTHON) $$f || exit 1; done

demo-accuracy: build  ## measure how often the demo model answers right, by context length (ARGS='--csv FILE --share 0.1')
	@tools/install-packages python3
	@$(PYTHON) experiments/demo_model/accuracy.py --bin $(BIN) $(ARGS)

cuda: deps  ## compile everything for sm_80 and sm_90a into build/cuda, then report registers and spills and lint the machine code (needs nvcc, no GPU)
	@test -n "$(NVCC)" || { echo "make cuda: nvcc was not found; install the CUDA toolkit (12.4 to 13) or give NVCC=path"; exit 1; }
	@$(MAKE) --no-print-directory -j$$(nproc) CUDA=1 BUILD=build/cuda $(addprefix build/cuda/,xpyd xpyd_gpu_tests xpyd_gpu_report xpyd_experiments)
	@ldd build/cuda/xpyd | awk '/libibverbs|libnl-/ && $$3 !~ /build.cuda/ { print $$3 }' | xargs -r cp -Lt build/cuda
	@CUDA_HOME=$(CUDA_HOME) tools/kernel-registers build/cuda/cuda >experiments/results/kernel-registers.csv && echo "experiments/results/kernel-registers.csv"
	@CUDA_HOME=$(CUDA_HOME) $(PYTHON) tools/lint-sass build/cuda/cuda --csv experiments/results/sass-loops.csv

gpu-report: cuda  ## check and time everything that uses CUDA, on a machine with a GPU; writes experiments/results (MODEL=dir compares that model's text)
	@MODEL=$(MODEL) tools/gpu-report build/cuda

gpu-bundle: cuda  ## pack build/xpyd-gpu.tar.gz, which is gpu-report for a machine with a GPU but without compiler or network
	@rm -rf build/xpyd-gpu && mkdir -p build/xpyd-gpu/bin build/xpyd-gpu/tools build/xpyd-gpu/experiments/gpu build/xpyd-gpu/tests
	@for b in xpyd xpyd_gpu_tests xpyd_gpu_report xpyd_experiments; do strip -o build/xpyd-gpu/bin/$$b build/cuda/$$b || exit 1; done
	@cp build/cuda/*.so.* build/xpyd-gpu/bin/
	@cp tools/gpu-report build/xpyd-gpu/tools/ && cp experiments/gpu/sdpa.py build/xpyd-gpu/experiments/gpu/ && cp -r experiments/models experiments/*.py experiments/*.csv build/xpyd-gpu/experiments/ && cp -r tests/data build/xpyd-gpu/tests/ && cp LICENSE build/xpyd-gpu/
	@tar -C build -czf build/xpyd-gpu.tar.gz xpyd-gpu
	@ls -l build/xpyd-gpu.tar.gz && echo "there: tar xzf xpyd-gpu.tar.gz && xpyd-gpu/tools/gpu-report bin"

check:  ## run the stages of tools/check.mk: sanitizers, fuzzers, chaos, other systems and compilers (STAGE='asan tsan' selects some; STAGE=list lists them)
	@tools/check $(STAGE)

PREFIX  ?= /usr/local
DESTDIR ?=
INSTALL_DOC = README.md SECURITY.md LICENSE CITATION.cff
install: build  ## install the binary into PREFIX/bin and the documents into PREFIX/share/doc/xpyd (PREFIX=/usr/local, DESTDIR=)
	install -D -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/xpyd
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/doc/xpyd $(INSTALL_DOC)

uninstall:  ## remove what `make install` installed (PREFIX=, DESTDIR=)
	rm -f $(DESTDIR)$(PREFIX)/bin/xpyd $(INSTALL_DOC:%=$(DESTDIR)$(PREFIX)/share/doc/xpyd/%)
	[ ! -d $(DESTDIR)$(PREFIX)/share/doc/xpyd ] || rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/share/doc/xpyd

layers:  ## check that no folder includes one below it in tools/layers, and that no two types share a name
	@tools/check-layers

house:  ## count lines and files of each folder, and the files to edit to add one more policy or transport (ARGS='COMMIT .' compares)
	@tools/house $(ARGS)

format:  ## run clang-format on every source, and update the line counts in the tables of README pages
	@git ls-files '*.cc' '*.h' '*.cu' | xargs clang-format -i
	@tools/readme-lines

clean:  ## remove build/
	rm -rf build
