// The parts of a running xpyd, built from its options: what serve, worker and generate have in common.
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

// What the rows cannot say one by one: combinations that make no sense. `group` as in the table.
Status check_options(const Options& options, std::string_view group);
const IsaRow* cpu_kernels(const Options& options);  // --cpu-kernels; null: auto, or not an option of this subcommand
// What was given and only counts with another option that was not, a line each: the help of such a
// row begins with "--processes: " or "--device cuda: ".
std::vector<std::string> without_effect(const Options& options);

// ---- what a running xpyd needs of a device: the weights there, and a model per instance. `--device` picks a row

struct Stack;
struct DeviceRow;

struct BackendOptions {
  const DeviceRow* device = nullptr;
  LoadOptions load;
  int threads = 0;   // of each instance; 0: its share of the cores
  bool pin = false;  // each thread to a core of its own
  Kernels kernels;   // of the CPU; null: the machine's own choice
  std::string cuda_prefill_attention, cuda_decode_attention, cuda_graphs, gpu_split;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Device& device() = 0;
  // Error `unavailable`: no room on the device.
  virtual Result<std::unique_ptr<Model>> make_model(int instance, DeviceQueue& queue) = 0;
  // FLOP/s that an instance's threads can do, where it has been measured (xpyd peak); 0: it has not.
  virtual double peak_flops(int /*instance*/) const { return 0; }
  // What instance 0's model, which must still be there, has chosen by now: lines, or "".
  virtual std::string describe() const { return ""; }
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

// Of the names that --dtype, --weight-dtype and --kv-dtype take.
Dtype find_dtype(const std::string& name);

struct DeviceRow {
  const char* name;
  // Loads the weights. Errors: invalid_argument for input that is wrong, `unavailable` for a machine that cannot.
  Result<std::unique_ptr<Backend>> (*open)(const Stack& stack);
  // What it can do, measured now; errors as of open(). Null: the host, which base/peak/peak.h measures.
  Result<DevicePeak> (*peak)();
  size_t page_group_bytes;  // of --page-group-bytes where it is not given: what it maps well
  // The device without weights: where the pool is that processes share. Errors as of open(). Null:
  // the host.
  Result<std::unique_ptr<Device>> (*alone)();
};
std::span<const DeviceRow> devices();
const DeviceRow* find_device(const std::string& name);  // null: no such row

// The rows' functions. `stack`: as prepare_stack() leaves it.
Result<std::unique_ptr<Backend>> open_cpu_backend(const Stack& stack);
Result<std::unique_ptr<Backend>> open_cuda_backend(const Stack& stack);
Result<DevicePeak> cuda_device_peak();
Result<std::unique_ptr<Device>> open_cuda_alone();

// The host's weights as the options ask for them, read with every core.
Result<std::shared_ptr<const Weights>> load_host_weights(const Stack& stack);

// ---- the parts

struct Stack {
  RealClock clock;
  std::string model_dir;  // kDemoModel where none was given
  ModelConfig config;
  std::unique_ptr<const Tokenizer> tokenizer;         // null with --load-format dummy and no tokenizer.json
  std::unique_ptr<const ChatTemplate> chat_template;  // null: the model has none
  ClusterOptions options;                             // all that the model files and the command line say of it
  BackendOptions backend_options;
  bool processes = false;  // each instance is a process of its own
  int max_step_tokens() const { return std::max(options.step_tokens, options.max_batch); }  // of one instance
  std::unique_ptr<Backend> backend;     // null with --processes: the workers have theirs
  std::unique_ptr<Device> pool_device;  // with --processes, of the pool that they share; null: host
  std::unique_ptr<Runtime> runtime;     // not started
  Cluster* cluster = nullptr;           // the runtime, where its instances are threads
};

// MODEL_DIR, or the embedded demo model.
std::string model_dir(const Options& options);
Role role_of(const std::string& name);  // of --role
// --cpus: of each of these instances, "P0=0-3,D0=4+6" (or with blanks between them); of a worker, which has no name,
// "0-3". Empty for "". Errors say what is wrong: every instance has cores, which the process may use.
Result<std::vector<std::vector<int>>> parse_cpus(const std::string& text, const std::vector<std::string>& names);
// What the command line says of the cluster and of the device, which has a say in its memory.
void read_options(const Options& options, ClusterOptions& cluster, BackendOptions& backend);
// Of stages and ranks, what no instance would read.
Status check_unread(const Options& options);

// The errors name the option or the file.
Result<std::unique_ptr<Stack>> build_stack(const Options& options);

// In parts: a worker has no runtime.
Result<std::unique_ptr<Stack>> prepare_stack(const Options& options);
Status open_backend(Stack& stack);
// Of all that instances must agree on, so that KV may cross between them.
uint64_t fingerprint(const Stack& stack);

// Of --event-log, with `suffix` behind its name; null: none is asked for. Its Error is thrown.
std::shared_ptr<EventLog> open_event_log(const Options& options, const std::string& suffix = "");

}  // namespace xpyd::server
