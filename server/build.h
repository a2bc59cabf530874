// The parts of a running xpyd, built from its options. serve, worker and generate share them.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/device/device.h"
#include "base/options/options.h"
#include "disagg/instance/cluster.h"
#include "model/config.h"
#include "model/cost/cost_model.h"
#include "model/model.h"
#include "model/text/chat_template.h"
#include "model/text/tokenizer.h"

namespace xpyd {
struct IsaRow;  // base/cpu.h
}

namespace xpyd::server {

// ---- THE options table (options.cc): every option of every subcommand, in one place. Names are a contract.

std::span<const OptionRow> option_table();

// Checks what single rows cannot express: combinations without meaning. `group` as in the table.
Status check_options(const Options& options, std::string_view group);
const IsaRow* cpu_kernels(const Options& options);  // --cpu-kernels; null: auto, or the subcommand has no such option

// ---- The device: weights on it, and a model per instance. `--device` picks a row.

struct Build;
struct DeviceRow;

struct BackendOptions {
  const DeviceRow* device = nullptr;
  LoadOptions load;
  int threads = 0;  // per instance; 0: its share of the cores
  Kernels kernels;  // of the CPU; null: the machine's default
  std::string expert_parallel = "off";
  // True if the tensor ranks of an instance of this role hold whole experts.
  bool whole_experts(Role role) const {
    return expert_parallel == "on" || expert_parallel == (role == Role::decode ? "decode" : "prefill");
  }
  std::string cuda_prefill_attention, cuda_decode_attention, gpu_split;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device& device() = 0;
  // Creates an instance's model. Error `unavailable`: no memory on the device.
  virtual Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue& queue) = 0;
  // Peak FLOP/s of an instance's threads, if `xpyd peak` has measured it; 0: not measured.
  virtual double peak_flops(int /*instance*/) const { return 0; }
};

// One figure of `xpyd peak`.
struct PeakFigure {
  const char* name;
  const char* unit;
  double value;
};
struct DevicePeak {
  std::string device;  // "NVIDIA H200"
  std::vector<PeakFigure> figures;
  Rates rates;  // of bf16 products and of reads
};

// Finds a name that --dtype, --weight-dtype or --kv-dtype takes.
Dtype find_dtype(const std::string& name);

struct DeviceRow {
  const char* name;
  // Loads the weights. Errors: invalid_argument for bad input, `unavailable` for a machine that cannot.
  Result<std::unique_ptr<Backend>> (*open)(const Build& build);
  // Measures the device's peaks now. Errors as in open(). Null: the host, which base/peak/peak.h measures.
  Result<DevicePeak> (*peak)();
  size_t page_group_bytes;  // default of --page-group-bytes: a size that it maps well
};
std::span<const DeviceRow> devices();
const DeviceRow* find_device(const std::string& name);  // null: no such row

// The functions of the rows. `build`: as prepare_build() leaves it.
Result<std::unique_ptr<Backend>> open_cpu_backend(const Build& build);
Result<std::unique_ptr<Backend>> open_cuda_backend(const Build& build);
Result<DevicePeak> cuda_device_peak();

// Loads the host's weights as the options say, with every core.
Result<std::shared_ptr<const Weights>> load_host_weights(const Build& build);

// ---- The parts.

struct Build {
  RealClock clock;
  std::string model_dir;  // kDemoModel if none was given
  ModelConfig config;
  std::unique_ptr<const Tokenizer> tokenizer;         // null with --load-format dummy and no tokenizer.json
  std::unique_ptr<const ChatTemplate> chat_template;  // null: the model has none
  ClusterOptions options;  // everything that model files and command line say about the cluster
  BackendOptions backend_options;
  bool processes = false;  // each instance is a process of its own
  int max_step_tokens() const { return std::max(options.step_tokens, options.max_batch); }  // per instance
  std::unique_ptr<Backend> backend;  // null with --processes: the workers have theirs
  std::unique_ptr<Runtime> runtime;  // not started
  Cluster* cluster = nullptr;        // the runtime, if its instances are threads
};

// Returns MODEL_DIR, or the embedded demo model.
std::string model_dir(const Options& options);
Role role_of(const std::string& name);  // parses --role
// Reads the options of the cluster and of the device, which influences the cluster's memory.
void read_options(const Options& options, ClusterOptions& cluster, BackendOptions& backend);

// Builds all parts. Errors name the option or the file.
Result<std::unique_ptr<Build>> make_build(const Options& options);

// The two parts of make_build(), for a worker, which has no runtime.
Result<std::unique_ptr<Build>> prepare_build(const Options& options);
Status open_backend(Build& build);
// A hash of what instances must agree on to exchange KV: server/README.md, Invariants. The weights' values are not in
// it.
uint64_t fingerprint(const Build& build);

// Opens --event-log with `suffix` appended to its name; null: the option is not given. Throws its Error.
std::shared_ptr<EventLog> open_event_log(const Options& options, const std::string& suffix = "");

}  // namespace xpyd::server
